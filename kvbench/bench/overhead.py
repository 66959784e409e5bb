"""What it costs to run through kvbench, as ratios of times measured in one process, alternating.

1. The full cache through kvbench (audit, scoring, storing included) over a bare ``model.generate`` loop.
2. full and snapkv+think together over full alone.

    python -m kvbench.bench.overhead [--examples 16] [--repeats 5]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kvbench.models import load
from kvbench.run import config, experiment
from kvbench.run.experiment import RunPlan
from kvbench.run.host import Host
from kvbench.run.provenance import provenance
from kvbench.run.runner import run_group
from kvbench.run.store import ResultStore

LIMITS = {"full through kvbench / bare generate": 1.10, "full and snapkv+think together / full": 1.60}


def prepared(method: str, examples: int) -> RunPlan:
    """A run of ``method`` on two tiny tasks, one with short and one with long answers."""
    arguments = [f"method={method}", "baseline=false", "dataset=tiny/needle,tiny/listing", f"limit={examples}"]
    cfg = config.read(arguments)
    return experiment.prepare(cfg)


def through_kvbench(host: Host, run: RunPlan) -> float:
    """Seconds of the run with an empty store."""
    with tempfile.TemporaryDirectory() as folder:
        store = ResultStore(Path(folder))
        facts = provenance(host.model, torch.get_num_threads())
        start = time.perf_counter()
        for group in run.groups:
            run_group(host, group, store, facts)
        return time.perf_counter() - start


def bare_generate(host: Host, run: RunPlan) -> float:
    """Seconds of transformers' own greedy ``generate`` on the same prompts, one by one, text decoded."""
    start = time.perf_counter()
    for group in run.groups:
        for example in group.examples:
            ids = torch.tensor([host.tokenizer.encode(example.prompt)], device=host.model.device)
            out = host.model.generate(  # type: ignore[operator]
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=example.max_new_tokens,
                do_sample=False,
                eos_token_id=sorted(host.stop),
                pad_token_id=0,
            )
            host.tokenizer.decode(out[0, ids.shape[1] :].tolist(), skip_special_tokens=True)
    return time.perf_counter() - start


def main() -> int:
    """Print medians, spreads and ratios; the status is 1 if a ratio is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=16, help="prompts per task (two tasks)")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each variant, interleaved")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    alone, both = prepared("full", args.examples), prepared("full,snapkv+think", args.examples)
    model = load.load_weights(alone.cfg.model, alone.source, load.resolve_device("auto"))
    host = experiment.make_host(alone, model)
    variants: dict[str, Callable[[], float]] = {
        "bare generate": lambda: bare_generate(host, alone),
        "full through kvbench": lambda: through_kvbench(host, alone),
        "full and snapkv+think together": lambda: through_kvbench(host, both),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for measure in variants.values():
        measure()
    for i in range(args.repeats):
        names = list(variants)
        for name in names[i % len(names) :] + names[: i % len(names)]:
            times[name].append(variants[name]())
    prompts = sum(len(g.examples) for g in alone.groups)
    print(f"{prompts} prompts of 1024 tokens, {args.repeats} repeats, {model.device}, {args.threads} thread(s)")
    for name, seconds in times.items():
        print(f"  {name:<32} median {statistics.median(seconds):.3f} s  [{min(seconds):.3f}, {max(seconds):.3f}]")
    ok = True
    for name, limit in LIMITS.items():
        a, b = (key if key in times else f"{key} through kvbench" for key in name.split(" / "))
        # the same repeat measured both within seconds of each other: a ratio per repeat cancels slow drifts
        ratio = statistics.median(x / y for x, y in zip(times[a], times[b], strict=True))
        ok = ok and ratio <= limit
        print(f"  {name}: {ratio:.2f}x (at most {limit:.2f}x: {'ok' if ratio <= limit else 'MISSED'})")
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""What it costs to run through kvbench, as ratios of times measured in one process, alternating.

1. The full cache through kvbench (audit, scoring, storing included) over a bare ``model.generate`` loop.
2. full and snapkv+think together over full alone.

    python -m kvbench.bench.overhead [--examples 16] [--repeats 5]
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from kvbench.bench.ratio import in_turns, median_ratio, options, verdict
from kvbench.models import load
from kvbench.run import config, experiment
from kvbench.run.experiment import RunPlan
from kvbench.run.host import Host
from kvbench.run.provenance import provenance
from kvbench.run.runner import run_group
from kvbench.run.store import ResultStore

FULL, BARE, TOGETHER = "full through kvbench", "bare generate", "full and snapkv+think together"
LIMITS = {f"{FULL} / {BARE}": (FULL, BARE, 1.10), f"{TOGETHER} / full": (TOGETHER, FULL, 1.60)}


def planned(*arguments: str) -> RunPlan:
    """Return the run that ``key=value`` arguments name."""
    return experiment.prepare(config.read(arguments))


def loaded(run: RunPlan) -> Host:
    """Return the host of a run with its model loaded."""
    model = load.load_weights(run.cfg.model, run.source, load.resolve_device(run.cfg.device))
    return experiment.make_host(run, model)


def through_kvbench(host: Host, run: RunPlan) -> float:
    """Return the seconds of the run with an empty store."""
    with tempfile.TemporaryDirectory() as folder:
        store = ResultStore(Path(folder))
        facts = provenance(host.model, torch.get_num_threads())
        start = time.perf_counter()
        for group in run.groups:
            run_group(host, group, store, facts)
        return time.perf_counter() - start


def bare_generate(host: Host, prompt: Sequence[int], new: int, **how: Any) -> torch.Tensor:
    """Return the tokens that transformers' own greedy ``generate`` answers to one prompt."""
    ids = torch.tensor([prompt], device=host.model.device)
    mask = torch.ones_like(ids)
    out = host.model.generate(  # type: ignore[operator]
        ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0, **how
    )
    answer: torch.Tensor = out[0, len(prompt) :]
    return answer


def by_generate(host: Host, run: RunPlan) -> float:
    """Return the seconds of ``generate`` on the run's prompts, one by one, text encoded and decoded."""
    start = time.perf_counter()
    for example in (e for group in run.groups for e in group.examples):
        prompt = host.tokenizer.encode(example.prompt)
        answer = bare_generate(host, prompt, example.max_new_tokens, eos_token_id=sorted(host.stop))
        host.tokenizer.decode(answer.tolist(), skip_special_tokens=True)
    return time.perf_counter() - start


def main() -> int:
    """Print medians, spreads and ratios. Return exit status 1 if a ratio is above its limit, else 0."""
    parser = options(__doc__, repeats=5, threads=1)
    parser.add_argument("--examples", type=int, default=16, help="prompts per task (two tasks)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    # one task with short answers and one with long ones
    shared = ["baseline=false", "dataset=tiny/needle,tiny/listing", f"limit={args.examples}"]
    alone, together = (planned(f"method={method}", *shared) for method in ("full", "full,snapkv+think"))
    host = loaded(alone)
    variants: dict[str, Callable[[], float]] = {
        BARE: partial(by_generate, host, alone),
        FULL: partial(through_kvbench, host, alone),
        TOGETHER: partial(through_kvbench, host, together),
    }
    in_turns(variants, 1)
    times = in_turns(variants, args.repeats)
    prompts = sum(len(g.examples) for g in alone.groups)
    print(f"{prompts} prompts of 1024 tokens, {args.repeats} repeats, {host.model.device}, {args.threads} thread(s)")
    for name, seconds in times.items():
        print(f"  {name:<32} median {median(seconds):.3f} s  [{min(seconds):.3f}, {max(seconds):.3f}]")
    ok = True
    for name, (above, below, most) in LIMITS.items():
        ratio = median_ratio(times[above], times[below])
        ok &= verdict(name, ratio, ratio <= most, f"at most {most:.2f}x")
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""What a whole table costs: all its rows at once, over the same rows one by one and over kvpress.

Rows: full, and streamingllm, snapkv, keynorm, h2o, snapkv+think at 50, 25, 12.5 and 6.25 % of the prompt (full has no
budget: one row). (a) The tiny suite. (b) A Llama with random weights: 8 layers, hidden 512, 8 heads, 4 kv heads, a
prompt of 4k tokens, 32 new ones. Every ratio is of times measured in this run, in turns; kvpress runs in the Python
given by --peers, on the same checkpoint, tokens and threads.

    python -m kvbench.bench.tables [--part a b peers memory] [--repeats 2] [--threads 2] [--peers PYTHON]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvbench.bench.overhead import through_kvbench
from kvbench.engine.memory import process_memory
from kvbench.models import load
from kvbench.run import config, experiment
from kvbench.run.experiment import RunPlan
from kvbench.run.host import Host
from kvbench.run.words import rewrite

METHODS = ("full", "streamingllm", "snapkv", "keynorm", "h2o", "snapkv+think")
BUDGETS = (0.5, 0.25, 0.125, 0.0625)
N, NEW = 4096, 32
AT_ONCE, OVER_PEERS, FULL_ALONE, MEMORY = 8.0, 10.0, 1.05, 2.0


@dataclass(frozen=True)
class Case:
    """A loaded run of all rows."""

    host: Host
    run: RunPlan

    def rows(self) -> list[str]:
        return [c.label for c in self.run.groups[0].cells]

    def only(self, label: str) -> RunPlan:
        """The run of one row."""
        groups = (replace(g, cells=tuple(c for c in g.cells if c.label == label)) for g in self.run.groups)
        return replace(self.run, groups=tuple(groups))

    def at_once(self) -> float:
        """Seconds of all rows together, from an empty store to the last line in it."""
        return through_kvbench(self.host, self.run)

    def row(self, label: str) -> float:
        """Seconds of one row from scratch, one example at a time."""
        return through_kvbench(replace(self.host, batch_rows=1), self.only(label))


def case(*overrides: str, methods: str = ",".join(METHODS)) -> Case:
    """The run of ``methods`` on what ``overrides`` name; answers never stop before their limit."""
    budgets = ",".join(map(str, BUDGETS))
    arguments = [f"method={methods}", *([f"kv_ratio={budgets}"] if methods != "full" else []), *overrides]
    cfg = config.parse(config.compose_config(rewrite(arguments).runs[0]))
    run = experiment.prepare(cfg)
    model = load.load_weights(cfg.model, run.source, load.resolve_device(cfg.device))
    return Case(experiment.make_host(run, model), run)


def write_checkpoint(folder: Path, prompts: int) -> list[str]:
    """The random Llama with the tiny model's tokenizer, and prompts of exactly N tokens; overrides that name them."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(load.EMBEDDED / "tiny" / name, folder / name)
    torch.manual_seed(0)
    shape = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4}
    vocabulary = int(json.loads((load.EMBEDDED / "tiny" / "config.json").read_text())["vocab_size"])
    options = {"intermediate_size": 1408, "max_position_embeddings": 2 * N, "vocab_size": vocabulary}
    LlamaForCausalLM(LlamaConfig(**shape, **options)).save_pretrained(folder)  # type: ignore[arg-type]
    words = ["the", "cold", "river", "shines", "slowly", "over", "an", "old", "stone", "bridge", "near", "town"]
    with (folder / "prompts.jsonl").open("w") as out:
        for i in range(prompts):
            order = torch.randint(len(words), (2 * N,), generator=torch.Generator().manual_seed(i)).tolist()
            text = " ".join(words[j] for j in order)
            out.write(json.dumps({"id": str(i), "prompt": text, "answers": ["none"]}) + "\n")
    return [f"model={folder}", "dataset=file", f"path={folder / 'prompts.jsonl'}", f"max_new_tokens={NEW}"]


def big_case(folder: Path, prompts: int, methods: str = ",".join(METHODS)) -> Case:
    """Case (b) in ``folder``; no token ends an answer."""
    found = case(*write_checkpoint(folder, prompts), f"max_length={N}", methods=methods)
    return Case(replace(found.host, stop=frozenset()), found.run)


def bare_generate(host: Host, ids: torch.Tensor) -> float:
    """Seconds of transformers' own greedy ``generate`` of NEW tokens."""
    start = time.perf_counter()
    host.model.generate(  # type: ignore[operator]
        ids[None],
        attention_mask=torch.ones_like(ids)[None],
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
    )
    return time.perf_counter() - start


def in_turns(variants: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each variant, measured ``repeats`` times, one after the other within each repeat."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for i in range(repeats):
        names = list(variants)
        for name in names[i % len(names) :] + names[: i % len(names)]:
            times[name].append(variants[name]())
    return times


def verdict(what: str, above: list[float], below: list[float], limit: float, least: bool) -> bool:
    """Print the median over repeats of above / below, and whether it keeps to ``limit``."""
    # what was measured in one repeat lies close together in time: slow drifts of the machine cancel
    ratio = statistics.median(a / b for a, b in zip(above, below, strict=True))
    ok = ratio >= limit if least else ratio <= limit
    wanted = f"at {'least' if least else 'most'} {limit:g}x"
    seconds = f"{statistics.median(above):.2f} s / {statistics.median(below):.2f} s"
    print(f"  {what}: {ratio:.2f}x ({seconds}; {wanted}: {'ok' if ok else 'MISSED'})", flush=True)
    return ok


def table_against_rows(found: Case, repeats: int) -> bool:
    """All rows at once against one by one."""
    rows = found.rows()
    found.row(rows[0])
    # at once at both ends and in the middle: a machine that grows busier or calmer shifts both sides alike
    steps = ["at once", *rows[: len(rows) // 2], "at once ", *rows[len(rows) // 2 :], "at once  "]
    variants = {name: found.at_once if name.strip() == "at once" else partial(found.row, name) for name in steps}
    times = in_turns(variants, repeats)
    one_by_one = [sum(times[label][i] for label in rows) for i in range(repeats)]
    together = [statistics.fmean(times[name][i] for name in steps if name not in rows) for i in range(repeats)]
    print(f"  {len(found.rows())} rows x {sum(len(g.examples) for g in found.run.groups)} prompts")
    return verdict("one by one / at once", one_by_one, together, AT_ONCE, least=True)


def against_peers(found: Case, folder: Path, python: str, repeats: int, threads: int) -> bool:
    """kvpress over our whole table, both over the rows that it has: all of them."""
    command = [python, "-m", "kvbench.bench.kvpress_rows", str(folder), "--n", str(N), "--new", str(NEW)]
    command += ["--threads", str(threads), "--budgets", *map(str, BUDGETS)]
    ours, theirs, others = [], [], []
    by_row: dict[str, float] = {}
    for _ in range(repeats):
        ours.append(found.at_once())
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"  kvpress could not be measured: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
            return False
        by_row = json.loads(done.stdout.splitlines()[-1])
        theirs.append(sum(by_row.values()))
        others.append(sum(s for label, s in by_row.items() if not label.startswith("h2o")))
    listed = ", ".join(f"{label} {seconds:.1f}" for label, seconds in by_row.items())
    print(f"  kvpress by row, s: {listed}")
    ok = verdict(f"kvpress / at once, {len(by_row)} rows", theirs, ours, OVER_PEERS, least=True)
    verdict("kvpress without its h2o rows, which materialise attention / all our rows", others, ours, OVER_PEERS, True)
    return ok


def full_alone(found: Case, repeats: int) -> bool:
    """The full cache through kvbench over a bare ``generate``."""
    lines = (Path(found.run.cfg.model.path) / "prompts.jsonl").read_text().splitlines()
    encode = found.host.tokenizer.encode
    prompts = [torch.tensor(_cut(encode(json.loads(line)["prompt"]))) for line in lines]
    variants = {
        "kvbench": lambda: found.row("full"),
        "generate": lambda: sum(bare_generate(found.host, ids) for ids in prompts),
    }
    times = in_turns(variants, 2 * repeats + 1)
    return verdict("full through kvbench / bare generate", times["kvbench"], times["generate"], FULL_ALONE, least=False)


def _cut(ids: list[int]) -> list[int]:
    """The middle cut to N, as prompts are."""
    return [*ids[: N // 2], *ids[-(N - N // 2) :]]


def resident(methods: str, threads: int) -> float:
    """Peak resident MiB of a process that runs ``methods`` on case (b)."""
    command = [sys.executable, "-m", "kvbench.bench.tables", "--resident", methods, "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def memory(threads: int) -> bool:
    """Peak resident memory of all rows over that of the full row alone."""
    alone, together = resident("full", threads), resident(",".join(METHODS), threads)
    ratio = together / alone
    ok = ratio < MEMORY
    print(
        f"  peak resident memory, all rows / full alone: {ratio:.2f}x ({together:.0f} MiB / {alone:.0f} MiB; ", end=""
    )
    print(f"below {MEMORY:g}x: {'ok' if ok else 'MISSED'})", flush=True)
    return ok


def main() -> int:
    """Print the ratios; the status is 1 if one misses its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("a", "b", "peers", "memory")
    parser.add_argument("--part", nargs="+", choices=parts, default=parts, help="peers: of (b), over kvpress alone")
    parser.add_argument("--examples", type=int, default=4, help="prompts per task of the tiny suite")
    parser.add_argument("--repeats", type=int, default=2, help="measurements of each variant, in turns")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--peers", help="a Python in which kvpress is installed (make .venv-peers/.ready)")
    parser.add_argument("--resident", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ok = True
    with tempfile.TemporaryDirectory() as name:
        if args.resident:
            big_case(Path(name), 1, args.resident).at_once()
            print(process_memory("VmHWM") / 2**20)
            return 0
        print(f"{args.repeats} repeats, {args.threads} threads, load {os.getloadavg()[0]:.1f}")
        if "a" in args.part:
            print("(a) the tiny suite")
            ok &= table_against_rows(case("dataset=tiny", f"limit={args.examples}"), args.repeats)
        if {"b", "peers"} & set(args.part):
            print(f"(b) random Llama, prompts of {N} tokens, {NEW} new")
            found = big_case(Path(name), 1)
            if "b" in args.part:
                ok &= table_against_rows(found, args.repeats)
                ok &= full_alone(found, args.repeats)
            if "peers" in args.part and args.peers:
                ok &= against_peers(found, Path(name), args.peers, args.repeats, args.threads)
            elif "peers" in args.part:
                print("  kvpress is not measured: give --peers")
        if "memory" in args.part:
            ok &= memory(args.threads)
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(main())

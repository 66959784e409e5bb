"""Time a whole table of a pretrained model on real text, over kvpress row by row and over what it takes at least.

24 rows: the full cache, five selectors at 50, 25, 12.5 and 6.25 % of the prompt, SnapKV with ThinK, KIVI at 4 and 2
bits; essays of 2,048 and 4,096 tokens, 64 new tokens. kvpress runs the 22 rows that it has, in the Python given by
--peers, on the same checkpoint, tokens and threads, in turns with ours; its H2O keeps all attention weights and is left
out where they would take half of the memory. The bound: one pass over each prompt by the bare model, and for each new
token every row's products and every row's bytes at the bandwidth of a copy.

    python -m kvbench.bench.real_table [--peers PYTHON] [--lengths 2048 4096] [--prompts 1] [--repeats 2] [--threads 2]
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import nn
from transformers import PretrainedConfig

from kvbench.bench.ratio import add_peers, finish, kvpress_seconds, options, seconds
from kvbench.bench.roofline import copy_bandwidth
from kvbench.bench.tables import bare_generate, compare, loaded, measured, planned, through_kvbench
from kvbench.engine.prefill import prefill_chains
from kvbench.plan.run_plan import RunPlan
from kvbench.run.host import Host
from kvbench.tasks.fidelity import TEXTS
from kvbench.tasks.source import Files

NEW = 64
BUDGETS = (0.5, 0.25, 0.125, 0.0625)
SELECTORS = ("streamingllm", "snapkv", "keynorm", "expectedattention", "h2o")
ROWS = (
    [f"method={','.join(SELECTORS)}", f"kv_ratio={','.join(map(str, BUDGETS))}"],
    ["method=snapkv+think", "kv_ratio=0.25", "ratio=0.4"],
    ["method=kivi", "bits=4,2", "group=32", "residual=32"],
)
"""What each part of the 24 rows is asked for as; the full cache is the first row of each."""
PEERS = ("full", *(f"{method} {budget}" for method in SELECTORS for budget in BUDGETS), "snapkv+think 0.25")
OVER_PEERS, OVER_BOUND = 12.0, 1.4


def table(model: str, data: str | None, folder: Path, length: int, prompts: int) -> tuple[Host, RunPlan]:
    """Return (host, run) of the 24 rows on ``prompts`` essays of ``length`` tokens. No token ends an answer."""
    texts = [text for _, text in TEXTS["essays"](Files("essays", Path(data) if data else None))]
    lines = [
        {"id": str(i), "prompt": text, "answers": ["none"]} for i, text in enumerate(texts) if len(text) > 8 * length
    ]
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines[:prompts]), encoding="utf-8")
    named = [f"model={model}", "dataset=file", f"path={path}", f"max_new_tokens={NEW}", f"max_length={length}"]
    runs = [planned(*named, "prompt=plain", *rows) for rows in ROWS]
    (group,) = runs[0].groups
    rows = (cell for run in runs for cell in run.groups[0].cells)
    cells = tuple({cell.id: cell for cell in rows}.values())
    run = replace(runs[0], groups=(replace(group, cells=cells),))
    return replace(loaded(run), stop=frozenset()), run


def products(model: nn.Module, rows: int) -> float:
    """Return the seconds of the products of one decode step with all weight matrices, for a batch of ``rows``."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    inputs = {m.in_features: torch.randn(rows, m.in_features) for m in layers}

    def step() -> None:
        for layer in layers:
            layer(inputs[layer.in_features])

    with torch.no_grad():
        return median(seconds(step) for _ in range(5))


def bound(host: Host, run: RunPlan) -> float:
    """Return the seconds that the run takes at least; print its parts, and those of a run by kvbench."""
    (group,) = run.groups
    spent, cells = measured(host, run)
    prompts = [host.tokenizer.encode(e.prompt)[: run.cfg.prompt.max_length] for e in group.examples]
    # one new token is the pass over the prompt
    reading = sum(median(seconds(partial(bare_generate, host, ids, 1)) for _ in range(3)) for ids in prompts)
    chains = [cell.chain for cell in group.cells]
    # by a clock of its own: statistics that rows share are in the time of each
    shared = sum(seconds(partial(prefill_chains, host.model, torch.tensor(ids), chains)) for ids in prompts)
    print(f"  ours: {shared:.2f} s reading and compressing, {spent - shared:.2f} s for answers and all else")
    step = products(host.model, len(group.cells) * len(prompts))
    moving = sum(s.payload + s.overhead for samples in cells for s in samples) / copy_bandwidth(host.model.device)
    print(
        f"  bound: {reading:.2f} s reading, {NEW - 1} x ({1000 * step:.0f} ms of products + {1000 * moving:.0f} ms of "
        "bytes)"
    )
    return reading + (NEW - 1) * (step + moving)


def peer_rows(model: PretrainedConfig, length: int) -> list[str]:
    """Return the rows that kvpress can run in this memory: its H2O keeps the attention weights of all layers."""
    weights = model.num_hidden_layers * model.num_attention_heads * length**2 * 4
    if weights < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2:
        return [*PEERS]
    print(f"  kvpress's H2O would keep {weights / 2**30:.0f} GiB of attention weights: left out")
    return [row for row in PEERS if not row.startswith("h2o")]


def measure(host: Host, run: RunPlan, peers: Callable[[], Mapping[str, float]] | None, repeats: int) -> bool:
    """Print our whole table over kvpress's rows and over the bound. Return True if both keep to their aims."""
    least = bound(host, run)
    ours, theirs = [], []
    by_row: Mapping[str, float] = {}
    for _ in range(repeats):
        ours.append(through_kvbench(host, run))
        if peers is not None:
            by_row = peers()
            theirs.append(sum(by_row.values()))
    ok = compare("at once / bound", ours, [least] * repeats, OVER_BOUND, least=False)
    if peers is None:
        print("  kvpress is not measured: give --peers")
        return ok
    print(f"  kvpress by row, s: {', '.join(f'{row} {time:.1f}' for row, time in by_row.items())}")
    return compare(f"kvpress, {len(by_row)} rows / at once, all rows", theirs, ours, OVER_PEERS) and ok


def main() -> int:
    """Print the ratios at each length. Return exit status 1 if one misses its aim, else 0."""
    parser = options(__doc__, repeats=2, threads=2)
    parser.add_argument("--model", default="smollm2-135m-q4_1")
    parser.add_argument("--data", default=os.environ.get("KVBENCH_DATA"), help="folder with paul_graham or state_union")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--prompts", type=int, default=1)
    add_peers(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ok = True
    print(f"{args.repeats} repeats, {args.threads} threads, load {os.getloadavg()[0]:.1f}")
    for length in args.lengths:
        with tempfile.TemporaryDirectory() as name:
            host, run = table(args.model, args.data, Path(name), length, args.prompts)
            cells = run.groups[0].cells
            print(f"{len(cells)} rows x {args.prompts} essays of {length} tokens, {NEW} new, {args.model}")
            peers = None
            if args.peers:
                rows = peer_rows(host.model.config, length)
                sizes = ["--prompts", Path(name) / "prompts.jsonl", "--n", length, "--new", NEW, "--rows", *rows]
                sizes += ["--threads", args.threads]
                peers = partial(kvpress_seconds, args.peers, run.source.location, *sizes)
            ok &= measure(host, run, peers, args.repeats)
    return 0 if ok else 1


if __name__ == "__main__":
    finish(main)

"""Time a whole table of a pretrained model on real text, over kvpress row by row and over what it takes at least.

24 rows: the full cache, five selectors at 50, 25, 12.5 and 6.25 % of the prompt, SnapKV with ThinK, KIVI at 4 and 2
bits; essays of 2,048 and 4,096 tokens, 64 new tokens. kvpress runs the 22 rows that it has, in the Python given by
--peers, on the same checkpoint, tokens and threads, in turns with ours; its H2O keeps all attention weights and is left
out where they would take half of the memory. The bound: one pass over each prompt by the bare model, and for each new
token every row's products and every row's bytes at the bandwidth of a copy.

    python scripts/bench/real_table.py [--peers PYTHON] [--lengths 2048 4096] [--prompts 1] [--repeats 2] [--threads 2]
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
from ratio import add_peers, finish, kvpress_seconds, options, seconds
from tables import bare_generate, compare_at_least, compare_at_most, load_host, plan_run, through_kvbench, time_run
from torch import nn
from transformers import PretrainedConfig

from kvbench.bench.roofline import copy_bandwidth
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
"""The words of each part of the 24 rows. The full cache is the first row of each part."""
OVER_PEERS = 12.0
"""The least ratio of the time of kvpress's rows to that of our table."""
OVER_BOUND = 1.4
"""The largest ratio of the time of our table to that of the bound."""


def _peer_labels() -> list[str]:
    """Return kvpress's 22 rows, each as a method with the share of tokens that it keeps."""
    labels = ["full"]
    for method in SELECTORS:
        labels += [f"{method} {budget}" for budget in BUDGETS]
    labels.append("snapkv+think 0.25")
    return labels


PEERS = tuple(_peer_labels())


def table(model: str, data: str | None, folder: Path, length: int, prompts: int) -> tuple[Host, RunPlan]:
    """Return (host, run) of the 24 rows on ``prompts`` essays of ``length`` tokens. No token ends an answer.

    ``data`` is the folder with the essays. The prompts are written to ``folder``.
    """
    files = Files("essays", Path(data) if data else None)
    lines = []
    for i, (_, text) in enumerate(TEXTS["essays"](files)):
        # a token of English has four or five characters, so eight a token are surely enough
        if len(text) > 8 * length:
            lines.append(json.dumps({"id": str(i), "prompt": text, "answers": ["none"]}) + "\n")
    path = folder / "prompts.jsonl"
    path.write_text("".join(lines[:prompts]), encoding="utf-8")
    words = [f"model={model}", "dataset=file", f"path={path}", f"max_new_tokens={NEW}", f"max_length={length}"]
    runs = [plan_run(*words, "prompt=plain", *rows) for rows in ROWS]
    # one run of all rows has the full cache only once
    cells = {}
    for part in runs:
        for cell in part.groups[0].cells:
            cells[cell.id] = cell
    (group,) = runs[0].groups
    run = replace(runs[0], groups=(replace(group, cells=tuple(cells.values())),))
    return replace(load_host(run), stop=frozenset()), run


def products(model: nn.Module, rows: int) -> float:
    """Return the seconds of the products of one decode step with all weight matrices, for a batch of ``rows``."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    # [rows, in_features], one for all matrices of that width
    inputs = {layer.in_features: torch.randn(rows, layer.in_features) for layer in layers}

    def step() -> None:
        for layer in layers:
            layer(inputs[layer.in_features])

    with torch.no_grad():
        return median(seconds(step) for _ in range(5))


def bound(host: Host, run: RunPlan) -> float:
    """Return a lower bound of the run's seconds. Print its parts, and the seconds of a run by kvbench.

    The bound is reading + (NEW - 1) * (products + moving). Each row has its first token from the prompt.
    """
    (group,) = run.groups
    spent, samples_by_cell = time_run(host, run)
    prompts = [host.tokenizer.encode(example.prompt)[: run.cfg.prompt.max_length] for example in group.examples]
    chains = [cell.chain for cell in group.cells]
    reading, compressing = 0.0, 0.0
    for ids in prompts:
        # one new token costs only the pass over the prompt
        read_bare = partial(bare_generate, host, ids, 1)
        reading += median(seconds(read_bare) for _ in range(3))
    for ids in prompts:
        # do not sum the rows' own times: each contains the statistics that the rows share
        compressing += seconds(partial(prefill_chains, host.model, torch.tensor(ids), chains))
    print(f"  ours: {compressing:.2f} s reading and compressing, {spent - compressing:.2f} s for answers and all else")
    step = products(host.model, len(group.cells) * len(prompts))
    held_bytes = 0.0
    for samples in samples_by_cell:
        held_bytes += sum(sample.payload + sample.overhead for sample in samples)
    # a step reads every row's bytes
    moving = held_bytes / copy_bandwidth(host.model.device)
    print(
        f"  bound: {reading:.2f} s reading, {NEW - 1} x ({1000 * step:.0f} ms of products + {1000 * moving:.0f} ms of "
        "bytes)"
    )
    return reading + (NEW - 1) * (step + moving)


def peer_rows(model: PretrainedConfig, length: int) -> list[str]:
    """Return the rows that kvpress can run in this memory. Its H2O keeps the attention weights of all layers."""
    # fp32, [layers, query heads, length, length]
    weights = model.num_hidden_layers * model.num_attention_heads * length**2 * 4
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if weights < memory / 2:
        return list(PEERS)
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
    ok = compare_at_most("at once / bound", ours, [least] * repeats, OVER_BOUND)
    if peers is None:
        print("  kvpress is not measured: give --peers")
        return ok
    print(f"  kvpress by row, s: {', '.join(f'{row} {time:.1f}' for row, time in by_row.items())}")
    name = f"kvpress, {len(by_row)} rows / at once, all rows"
    return compare_at_least(name, theirs, ours, OVER_PEERS) and ok


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
                sizes = ["--prompts", Path(name) / "prompts.jsonl", "--n", length, "--new", NEW]
                sizes += ["--threads", args.threads, "--rows"]
                sizes += peer_rows(host.model.config, length)
                peers = partial(kvpress_seconds, args.peers, run.source.location, *sizes)
            ok &= measure(host, run, peers, args.repeats)
    return 0 if ok else 1


if __name__ == "__main__":
    finish(main)

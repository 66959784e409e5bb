"""Time a whole table of a pretrained model on real text, over kvpress row by row and over what it takes at least.

Two tables, on essays of 2,048 and 4,096 tokens with 64 new tokens:

- 18 rows: the full cache, four selectors at 50, 25, 12.5 and 6.25 % of the prompt, SnapKV with ThinK. The aims are for
  this one.
- 24 rows: H2O at the same budgets, and KIVI at 4 and 2 bits, are added. kvpress's H2O keeps all attention weights: that
  takes most of its time, and it is left out where they would take half of the memory. KIVI is not in kvpress.

kvpress runs its rows in the Python given by --peers, on the same checkpoint, tokens and threads, in turns with ours.
The bound: one pass over each prompt by the bare model, and for each new token every row's products and its bytes at
the bandwidth of a copy.

    python scripts/bench/real_table.py [--peers PYTHON] [--lengths 2048 4096] [--new 64] [--prompts 1] [--repeats 2]
                                       [--threads 2]
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from ratio import add_peers, finish, kvpress_seconds, options, seconds
from tables import (
    bare_generate,
    compare_at_least,
    compare_at_most,
    describe_ratio,
    load_host,
    plan_run,
    through_kvbench,
    time_run,
)
from torch import nn
from transformers import PretrainedConfig

from kvbench.bench.roofline import measure_bandwidth
from kvbench.engine.prefill import prefill_chains
from kvbench.plan.run_plan import RunPlan
from kvbench.run.host import Host
from kvbench.tasks.fidelity import TEXTS
from kvbench.tasks.source import Files

BUDGETS = (0.5, 0.25, 0.125, 0.0625)
SELECTORS = ("streamingllm", "snapkv", "keynorm", "expectedattention")
OVER_PEERS = 12.0
"""The least ratio of the time of kvpress's rows to that of our table of selectors."""
OVER_BOUND = 1.5
"""The largest ratio of the time of our table of selectors to that of the bound."""


@dataclass(frozen=True)
class Table:
    """Rows that are timed together.

    words: the words of each part of a run. The full cache is the first row of each part.
    selectors: the methods that kvpress runs at each of BUDGETS. It also runs the full cache and SnapKV with ThinK.
    aims: whether the ratios are held to OVER_PEERS and OVER_BOUND.
    """

    words: tuple[tuple[str, ...], ...]
    selectors: tuple[str, ...]
    aims: bool

    def peer_rows(self) -> list[str]:
        """Return kvpress's rows, each as a method with the share of tokens that it keeps."""
        rows = ["full"]
        for method in self.selectors:
            rows += [f"{method} {budget}" for budget in BUDGETS]
        rows.append("snapkv+think 0.25")
        return rows


def _selector_words(selectors: Sequence[str]) -> tuple[str, ...]:
    return f"method={','.join(selectors)}", f"kv_ratio={','.join(map(str, BUDGETS))}"


THIN = ("method=snapkv+think", "kv_ratio=0.25", "ratio=0.4")
KIVI = ("method=kivi", "bits=4,2", "group=32", "residual=32")
PLAIN = Table(words=(_selector_words(SELECTORS), THIN), selectors=SELECTORS, aims=True)
WITH_H2O = (*SELECTORS, "h2o")
ALL = Table(words=(_selector_words(WITH_H2O), THIN, KIVI), selectors=WITH_H2O, aims=False)


def prepare(
    rows: Table, model: str, data: str | None, folder: Path, *, length: int, new: int, prompts: int = 1
) -> tuple[Host, RunPlan]:
    """Return (host, run) of a table's rows on ``prompts`` essays of ``length`` tokens. No token ends an answer.

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
    words = [f"model={model}", "dataset=file", f"path={path}", f"max_new_tokens={new}", f"max_length={length}"]
    runs = [plan_run(*words, "prompt=plain", *part) for part in rows.words]
    # one run of all rows has the full cache only once
    cells = {}
    for part in runs:
        for cell in part.groups[0].cells:
            cells[cell.id] = cell
    (group,) = runs[0].groups
    run = replace(runs[0], groups=(replace(group, cells=tuple(cells.values())),))
    return replace(load_host(run), stop=frozenset(), stop_texts=()), run


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


def bound(host: Host, run: RunPlan, new: int) -> float:
    """Return a lower bound of the run's seconds. Print its parts, and the seconds of a run by kvbench.

    The bound is reading + (new - 1) * (products + moving). Each row has its first token from the prompt.
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
    moving = held_bytes / measure_bandwidth(host.model.device)
    print(
        f"  bound: {reading:.2f} s reading, {new - 1} x ({1000 * step:.0f} ms of products + {1000 * moving:.0f} ms of "
        "bytes)"
    )
    return reading + (new - 1) * (step + moving)


def possible_peer_rows(rows: Table, model: PretrainedConfig, length: int) -> list[str]:
    """Return the rows that kvpress can run in this memory. Its H2O keeps the attention weights of all layers."""
    names = rows.peer_rows()
    # fp32, [layers, query heads, length, length]
    weights = model.num_hidden_layers * model.num_attention_heads * length**2 * 4
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if "h2o" not in rows.selectors or weights < memory / 2:
        return names
    print(f"  kvpress's H2O would keep {weights / 2**30:.0f} GiB of attention weights: left out")
    return [name for name in names if not name.startswith("h2o")]


def measure(
    host: Host, run: RunPlan, rows: Table, *, new: int, peers: Callable[[], Mapping[str, float]] | None, repeats: int
) -> bool:
    """Print our whole table over the bound and kvpress's rows over it. Return True if both keep to their aims."""
    least = [bound(host, run, new)] * repeats
    ours, theirs = [], []
    by_row: Mapping[str, float] = {}
    for _ in range(repeats):
        ours.append(through_kvbench(host, run))
        if peers is not None:
            by_row = peers()
            theirs.append(sum(by_row.values()))
    if rows.aims:
        ok = compare_at_most("at once / bound", ours, least, OVER_BOUND)
    else:
        ok = True
        print(f"  at once / bound: {describe_ratio(ours, least)}")
    if peers is None:
        print("  kvpress is not measured: give --peers")
        return ok
    print(f"  kvpress by row, s: {', '.join(f'{row} {time:.1f}' for row, time in by_row.items())}")
    name = f"kvpress, {len(by_row)} rows / at once, all rows"
    if rows.aims:
        return compare_at_least(name, theirs, ours, OVER_PEERS) and ok
    print(f"  {name}: {describe_ratio(theirs, ours)}")
    h2o = sum(time for row, time in by_row.items() if row.startswith("h2o"))
    print(f"  kvpress's rows of H2O, in the last turn: {h2o:.1f} of {theirs[-1]:.1f} s")
    return ok


def main() -> int:
    """Print the ratios at each length. Return exit status 1 if one misses its aim, else 0."""
    parser = options(__doc__, repeats=2, threads=2)
    parser.add_argument("--model", default="smollm2-135m-q4_1")
    parser.add_argument("--data", default=os.environ.get("KVBENCH_DATA"), help="folder with paul_graham or state_union")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--new", type=int, default=64, help="new tokens a row")
    parser.add_argument("--prompts", type=int, default=1)
    add_peers(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ok = True
    print(f"{args.repeats} repeats, {args.threads} threads, load {os.getloadavg()[0]:.1f}")
    for length in args.lengths:
        for rows in (PLAIN, ALL):
            with tempfile.TemporaryDirectory() as name:
                host, run = prepare(
                    rows, args.model, args.data, Path(name), length=length, new=args.new, prompts=args.prompts
                )
                cells = run.groups[0].cells
                print(f"{len(cells)} rows x {args.prompts} essays of {length} tokens, {args.new} new, {args.model}")
                peers = None
                if args.peers:
                    sizes = ["--prompts", Path(name) / "prompts.jsonl", "--n", length, "--new", args.new]
                    sizes += ["--threads", args.threads, "--rows"]
                    sizes += possible_peer_rows(rows, host.model.config, length)
                    peers = partial(kvpress_seconds, args.peers, run.source.location, *sizes)
                ok &= measure(host, run, rows, new=args.new, peers=peers, repeats=args.repeats)
    return 0 if ok else 1


if __name__ == "__main__":
    finish(main)

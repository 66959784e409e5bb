"""Bytes, tokens and dataset facts that follow from shapes of models, budgets and the datasets themselves."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from kvbench.audit.accounting import nominal_payload
from kvbench.methods.resolve import chain_of
from kvbench.papers.forensics.exact.base import Exact
from kvbench.papers.spec.numbers import Number, exactly, mean, printed
from kvbench.papers.spec.published_cells import Book, PublishedRow
from kvbench.papers.timed.paper_arithmetic import FP16, GIB, LLAMA2_7B, LLAMA3_8B, LLAMA3_70B, LONG, MIB, MISTRAL_7B
from kvbench.tasks.longbench import TASKS

CONTEXTS = {"llama-2-7b-chat": 4096, "llama-3-8b-instruct": 8096}
"""Tokens that UNComp's appendix A.3 lets each model read."""
SIZES = {"seq=2048": 2048, "seq=2K": 2048, "seq=20K": 20480}


def memory(book: Book) -> Iterator[Exact]:
    """Yield ThinK's table 7, column Memory: payload by its own formula, under all 32 query heads in fp16."""
    for row in book.table("think", 7):
        cell = row.cells.get(("kv_memory", "kv_memory"))
        if cell is not None:
            formula = "0.5 N MiB" if "ratio" not in row.settings else "0.5 N − 0.1 (N − 32) MiB"
            yield Exact(cell, row.label, f"{formula}, 32 heads", _expanded(row.method, row.settings) / MIB)


def equal_sizes(book: Book) -> Iterator[Exact]:
    """Yield the plain cache of ThinK's prose that is as large as a pruned one of 128 tokens."""
    for row in book.table("think", "text"):
        cell = row.cells.get(("kv_size", "kv_size"))
        if cell is not None:
            pruned = {"kv_size": row.settings["matched_to"], "ratio": "0.4"}
            tokens = _expanded("h2o+think", pruned) / (LLAMA2_7B.full_bytes(1, FP16))
            yield Exact(cell, row.label, "bytes with 40 % of key channels gone / 0.5 MiB", tokens)


def caches(book: Book) -> Iterator[Exact]:
    """Yield the sizes of whole caches in prose, of the kv heads that the models store."""
    shapes = {"llama-2-7b-chat": LLAMA2_7B, "llama-3-8b": LLAMA3_8B, "llama-3-70b": LLAMA3_70B}
    for paper in ("think", "refreekv"):
        for row in book.table(paper, "text"):
            cell = row.cells.get(("kv_memory", "kv_memory"))
            if cell is not None:
                tokens = next(n for part, n in SIZES.items() if part in row.setting.split(";"))
                shape, batch = shapes[row.model], int(row.settings.get("batch", 1))
                formula = (
                    f"{shape.layers} layers x {shape.kv_heads} kv heads x 2 x 128 x fp16 x {tokens * batch} tokens"
                )
                gib = exactly(Fraction(shape.full_bytes(tokens * batch, FP16), GIB))
                yield Exact(cell, row.label, formula, gib)


def shares(book: Book) -> Iterator[Exact]:
    """Yield UNComp's shares of the cache: tokens kept over the context."""
    for row in book.table("uncomp", "text"):
        cell = row.cells.get(("kv_ratio", "compression_ratio"))
        if cell is not None and "kv_size" in row.settings:
            size, context = int(row.settings["kv_size"]), CONTEXTS[row.model]
            yield Exact(cell, row.label, f"{size} / {context} tokens", exactly(Fraction(100 * size, context)))


def schedules(book: Book) -> Iterator[Exact]:
    """Yield UNComp's hidden states by group of layers: equal steps from S_max to S_min, whole tokens."""
    groups: dict[tuple[str, str], list[PublishedRow]] = {}
    for row in book.table("uncomp", "text"):
        if ("hidden_state_size", "hidden_state_size") in row.cells:
            groups.setdefault((row.model, row.settings["where"]), []).append(row)
    for (model, where), rows in groups.items():
        largest, smallest = MOST[model], int(rows[0].settings["S_min"])
        step = (largest - smallest) // (len(rows) - 1)
        for i, row in enumerate(rows):
            last = i == len(rows) - 1
            formula = f"{largest} − {i} x {step}" if not last else "S_min"
            cell = row.cells["hidden_state_size", "hidden_state_size"]
            yield Exact(cell, row.label, formula, exactly(smallest if last else largest - i * step))
        if model == "llama-2-7b-chat" and where == "appendix E":
            cell = book.cell("uncomp", "text", "hidden_state_ratio")
            label = next(r.label for r in book.table("uncomp", "text") if cell in r.cells.values())
            yield Exact(cell, label, "mean over the layers of appendix E / 4096", kept_share(rows, largest))


def kept_share(rows: list[PublishedRow], most: int) -> Number:
    """Return the per cent of hidden states that a schedule keeps, over all layers."""
    sizes = []
    for row in rows:
        first, _, last = row.settings["layers"].partition("-")
        size = printed(row.cells["hidden_state_size", "hidden_state_size"].printed).value
        sizes += [exactly(size)] * (int(last or first) - int(first) + 1)
    return mean(sizes) / most * 100


def benchmark(book: Book) -> Iterator[Exact]:
    """Yield LongBench's sizes and metrics as UNComp's and VATP's tables 5 print them, from the tasks of runs."""
    for paper in ("uncomp", "vatp"):
        for row in book.table(paper, 5):
            for (dataset, metric), cell in row.cells.items():
                task = TASKS[dataset]
                if metric == "n_samples":
                    yield Exact(cell, row.label or dataset, "examples of the dataset", exactly(task.size))
                elif metric == "metric_name":
                    yield Exact(cell, row.label or dataset, "metric of the dataset", None, _metric_name(paper, dataset))


MOST = {"llama-2-7b-chat": 4096, "llama-3-8b-instruct": 8096, "llama-2-13b-chat": 4096}
"""Hidden states that UNComp's appendix A.3 keeps in the first layers."""


def _expanded(method: str, settings: dict[str, str]) -> Number:
    """Return the payload by ThinK's formula, under query heads of a model of 32 layers and 32 heads."""
    knobs: dict[str, Any] = {"method": method, "kv_size": int(settings["kv_size"]), "per": "query_head"}
    if "ratio" in settings:
        knobs |= {"ratio": float(settings["ratio"]), "recent": 32}
    payload = nominal_payload(chain_of(knobs), MISTRAL_7B, LONG, FP16)
    assert payload is not None
    return exactly(round(payload, 6))  # without the last bits of a float product


def _metric_name(paper: str, dataset: str) -> str:
    """Return LongBench's metric of a task in the words of that paper."""
    names = WORDS[paper]
    metric = TASKS[dataset].metric
    return next(text for key, text in names.items() if metric.startswith(key))


WORDS = {
    "uncomp": {
        "f1": "F1",
        "rouge": "rouge-l",
        "classification": "classification accuracy",
        "count": "exact match accuracy",
        "retrieval": "exact match accuracy",
        "code_sim": "edit similarity",
    },
    "vatp": {
        "f1": "F1",
        "rouge": "Rouge-L",
        "classification": "Accuracy (CLS)",
        "count": "Accuracy (EM)",
        "retrieval": "Accuracy (EM)",
        "code_sim": "Edit Sim",
    },
}
"""The papers' names of LongBench's metrics, by the beginning of ours."""

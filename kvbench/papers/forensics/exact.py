"""Printed cells that can be recomputed without a model, from first principles or from other cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import pandas as pd

from kvbench.audit.accounting import nominal_payload
from kvbench.methods.core.resolve import chain_of
from kvbench.papers.forensics.frame import find, read_frame
from kvbench.papers.forensics.paper_audit import FORMULAS
from kvbench.papers.forensics.uncomp import compute_kept_share
from kvbench.papers.spec import numbers
from kvbench.papers.spec.numbers import Number, decimals, exact_number, mean, printed_number
from kvbench.papers.spec.published import AVERAGE, SCORES, Published
from kvbench.papers.spec.published_cells import Book, PublishedRow, read_published
from kvbench.papers.timed.paper_arithmetic import FP16, GIB, LLAMA2_7B, LLAMA3_8B, LLAMA3_70B, LONG, MIB, MISTRAL_7B
from kvbench.tasks.longbench import TASKS

LAYERS = {"1": 1, "2": 1, "3-31": 29, "32": 1}
"""The number of layers that each line of ReFreeKV's table 6 stands for, by the line's name."""
CONTEXTS = {"llama-2-7b-chat": 4096, "llama-3-8b-instruct": 8096, "llama-2-13b-chat": 4096}
"""The most tokens that each model reads by UNComp's appendix A.3. The first layers keep all of their hidden states."""
SIZES = {"seq=2048": 2048, "seq=2K": 2048, "seq=20K": 20480}
"""The length of sequences in tokens, by the part of a setting that states it in a paper's prose."""
WORDS = {
    "uncomp": ("F1", "rouge-l", "classification accuracy", "exact match accuracy", "edit similarity"),
    "vatp": ("F1", "Rouge-L", "Accuracy (CLS)", "Accuracy (EM)", "Edit Sim"),
}
"""The words of each paper's table 5 for LongBench's metrics; METRICS has their order."""
METRICS = {"f1": 0, "rouge": 1, "classification": 2, "count": 3, "retrieval": 3, "code_sim": 4}
"""The index of LongBench's metrics in WORDS, by the beginning of kvbench's names for them."""


@dataclass(frozen=True)
class Exact:
    """A published cell beside the value that it must have by other cells or by first principles.

    row: the label of its row.
    formula: how the value is computed, in words.
    recomputed: the value, with the interval that the rounding of its inputs hides; None if the cell is a word.
    text: the word that the cell must have; '' if it is a number.
    """

    cell: Published
    row: str
    formula: str
    recomputed: Number | None
    text: str = ""

    @property
    def column(self) -> str:
        """The name of the cell's column: the dataset of a score or a quantity, else the dataset and the metric."""
        dataset, metric = self.cell.dataset, self.cell.metric
        is_score = metric == "mean" or metric.startswith(("f1", "rouge", "accuracy", "edit", "bleu"))
        # cells of a quantity such as kv_memory have its name both as dataset and as metric
        return dataset if is_score or metric == dataset else f"{dataset} {metric}"

    @property
    def is_mean(self) -> bool:
        """True if the cell is the average of its row's scores."""
        return self.cell.metric == "mean" or (self.cell.dataset == AVERAGE and self.cell.metric in SCORES)

    @property
    def published(self) -> str:
        """The printed characters."""
        return self.cell.printed

    @property
    def shown(self) -> str:
        """The recomputed value as text, with as many decimals as the printed value, or with more if the two differ."""
        if self.recomputed is None:
            return self.text
        return self.recomputed.text(decimals(self.published) if self.grade == "equal" else self._digits)

    @property
    def grade(self) -> str:
        """The grade of the printed value beside the recomputed one.

        It is ``equal`` if they agree, ``rounding`` if rounding explains their difference, else ``off``. Words are equal
        or off, and their case does not matter.
        """
        if self.recomputed is not None:
            return numbers.grade(self.published, self.recomputed)
        return "equal" if self.text.lower() == self.published.lower() else "off"

    @property
    def ok(self) -> bool:
        """True if the printed value is the recomputed one, or rounding explains the difference."""
        return self.grade != "off"

    @property
    def mark(self) -> str:
        """The sign ✓ if the printed value fits, else the amount by which it is off; ✗ for a wrong word."""
        if self.ok:
            return "✓"
        if self.recomputed is None:
            return "✗"
        gap = numbers.format_fixed(printed_number(self.published).value - self.recomputed.value, self._digits)
        return gap.replace("-", "−") if gap.startswith("-") else f"+{gap}"

    @property
    def _digits(self) -> int:
        # an integer, such as a number of tokens, has no decimals that could differ
        if self.recomputed is not None and self.recomputed.value.denominator == 1:
            return decimals(self.published)
        return max(2, decimals(self.published) + 1)


@lru_cache(maxsize=4)
def recomputed_cells(book: Book) -> tuple[Exact, ...]:
    """Return every cell of a book that can be recomputed without a model, with the value that it must have."""
    # a rule that knows how a table averages wins over the plain mean; id() tells apart cells with equal fields
    recomputed: dict[int, Exact] = {}
    for rule in RULES:
        for exact in rule(book):
            recomputed.setdefault(id(exact.cell), exact)
    return tuple(recomputed.values())


def list_exact_cells(paper: str, table: str, book: Book | None = None) -> list[Exact]:
    """Return the cells of a paper's table (``2``, ``text``) that can be recomputed without a model.

    book: the published cells to read; None for those of all papers.
    """
    recomputed = recomputed_cells(book or read_published())
    return [exact for exact in recomputed if (exact.cell.paper, exact.cell.table) == (paper, table)]


def _recompute_means(book: Book) -> Iterator[Exact]:
    # an average of scores is the plain mean of its row, whatever its metric is called
    for row in book.rows:
        for metric, average in row.averages.items():
            scores = [printed_number(cell.printed) for cell in row.averaged(metric)]
            if metric in SCORES and scores:
                yield Exact(average, row.label, f"mean of the {len(scores)} scores", mean(scores))


def _recompute_other_means(book: Book) -> Iterator[Exact]:
    # perplexities, times, bytes and other numbers that are no scores
    for row in book.rows:
        for metric in row.averages:
            if metric not in SCORES:
                yield from _recompute_mean_of(row, metric)


def _recompute_mean_of(row: PublishedRow, metric: str) -> Iterator[Exact]:
    average = row.averages.get(metric)
    values = [printed_number(cell.printed) for cell in row.averaged(metric)]
    if average is not None and values:
        yield Exact(average, row.label, f"mean of the {len(values)} datasets", mean(values))


def _recompute_ratios(book: Book) -> Iterator[Exact]:
    # ReFreeKV's tables 2 and 8: mean budgets, and mean ratios to the full cache in per cent
    for table in ("2", "8"):
        full_rows = {row.model: row for row in book.table("refreekv", table) if row.method == "full"}
        for row in book.table("refreekv", table):
            for (dataset, metric), cell in row.cells.items():
                if dataset == AVERAGE and metric.startswith("ratio_to_full"):
                    # value = 100 * mean(score / full score), or 100 * (mean - 1) for a metric that ends with minus_1
                    offset = 1 if metric.endswith("minus_1") else 0
                    value = (compute_mean_ratio(row, full_rows[row.model]) - offset) * 100
                    formula = f"mean ratio to the full row over {len(row.scores)} datasets"
                    yield Exact(cell, row.label, formula, value)
            yield from _recompute_mean_of(row, "budget")


def compute_mean_ratio(row: PublishedRow, full: PublishedRow) -> Number:
    """Return the mean over datasets of a row's scores relative to the scores of the row ``full``."""
    if row is full:
        # a number over itself is exactly 1; division of intervals would not know that both are the same number
        return exact_number(1)
    ratios = []
    for dataset, cell in row.scores.items():
        if dataset in full.scores:
            ratios.append(printed_number(cell.printed) / printed_number(full.scores[dataset].printed))
    return mean(ratios)


def _recompute_shares_of_full(book: Book) -> Iterator[Exact]:
    # ReFreeKV's table 1: table 2 in per cent of its full row, and the mean of these shares
    scores = {(row.model, row.method, row.setting): row.scores for row in book.table("refreekv", 2)}
    full_scores = {row.model: row.scores for row in book.table("refreekv", 2) if row.method == "full"}
    for row in book.table("refreekv", 1):
        shares: list[Number] = []
        for (dataset, _), cell in row.cells.items():
            # the average is the last cell of a row, so its shares are known here
            if dataset == AVERAGE:
                yield Exact(cell, row.label, "mean of the three, from table 2", mean(shares))
                continue
            score = printed_number(scores[row.model, row.method, row.setting][dataset].printed)
            shares.append(score / printed_number(full_scores[row.model][dataset].printed) * 100)
            yield Exact(cell, row.label, "table 2 divided by its full row", shares[-1])


def _recompute_times(book: Book) -> Iterator[Exact]:
    # ReFreeKV's table 3: mean times over its six datasets
    for row in book.table("refreekv", 3):
        for metric in ("overall_time", "prune_time"):
            yield from _recompute_mean_of(row, metric)


def _recompute_budgets_by_layer(book: Book) -> Iterator[Exact]:
    # ReFreeKV's table 6 has four lines: one line stands for 29 of the 32 layers, each other line for one
    rows = book.table("refreekv", 6)
    for average_row in [row for row in rows if row.settings["layer"] == "avg"]:
        for key, average in average_row.cells.items():
            # mean = sum over lines of (budget * number of layers) / 32; a line may lack a cell that the average has
            total = exact_number(0)
            for row in rows:
                if row.settings["layer"] != "avg" and key in row.cells:
                    total = total + printed_number(row.cells[key].printed) * LAYERS[row.settings["layer"]]
            yield Exact(average, average_row.label, "mean over the 32 layers", total / sum(LAYERS.values()))


def _find_quantity(
    book: Book, paper: str, table: str, dataset: str, metric: str = ""
) -> Iterator[tuple[PublishedRow, Published]]:
    # the metric is named like the dataset by default
    for row in book.table(paper, table):
        cell = row.cells.get((dataset, metric or dataset))
        if cell is not None:
            yield row, cell


def _recompute_memory(book: Book) -> Iterator[Exact]:
    # the memory column of ThinK's table 7, by the paper's formula, which stores all 32 heads
    for row, cell in _find_quantity(book, "think", "7", "kv_memory"):
        # channels are pruned for all tokens except the 32 most recent
        formula = "0.5 N − 0.1 (N − 32) MiB" if "ratio" in row.settings else "0.5 N MiB"
        memory = _count_expanded_payload(row.method, row.settings) / MIB
        yield Exact(cell, row.label, f"{formula}, 32 heads", memory)


def _recompute_equal_sizes(book: Book) -> Iterator[Exact]:
    # the sizes of plain caches that ThinK's prose equates with pruned caches (``matched_to``)
    for row, cell in _find_quantity(book, "think", "text", "kv_size"):
        pruned_bytes = _count_expanded_payload("h2o+think", {"kv_size": row.settings["matched_to"], "ratio": "0.4"})
        formula = "bytes with 40 % of key channels gone / 0.5 MiB"
        yield Exact(cell, row.label, formula, pruned_bytes / LLAMA2_7B.full_bytes(1, FP16))


def _count_expanded_payload(method: str, settings: Mapping[str, str]) -> Number:
    # by ThinK's formula, for a model of 32 layers that stores all 32 query heads
    knobs: dict[str, object] = {"method": method, "kv_size": int(settings["kv_size"]), "per": "query_head"}
    if "ratio" in settings:
        knobs |= {"ratio": float(settings["ratio"]), "recent": 32}
    payload = nominal_payload(chain_of(knobs), MISTRAL_7B, LONG, FP16)
    # None stands for budgets that the prompt's text decides, and kv_size fixes this one
    assert payload is not None
    return exact_number(round(payload, 6))  # rounding removes the last bits of a float product


def _recompute_whole_caches(book: Book) -> Iterator[Exact]:
    # the sizes in GiB that a paper's text states for uncompressed caches
    shapes = {"llama-2-7b-chat": LLAMA2_7B, "llama-3-8b": LLAMA3_8B, "llama-3-70b": LLAMA3_70B}
    for paper in ("think", "refreekv"):
        for row, cell in _find_quantity(book, paper, "text", "kv_memory"):
            shape = shapes[row.model]
            # exactly one part of the setting is a length
            (length,) = (SIZES[part] for part in row.setting.split(";") if part in SIZES)
            tokens = length * int(row.settings.get("batch", 1))
            # 2 counts keys and values; models with grouped queries store fewer kv heads than query heads
            heads = f"{shape.layers} layers x {shape.kv_heads} kv heads"
            formula = f"{heads} x 2 x {shape.head_dim} x fp16 x {tokens} tokens"
            yield Exact(cell, row.label, formula, exact_number(Fraction(shape.full_bytes(tokens, FP16), GIB)))


def _recompute_shares_of_context(book: Book) -> Iterator[Exact]:
    # the shares of the cache that UNComp's prose states: tokens kept over the context, in per cent
    for row, cell in _find_quantity(book, "uncomp", "text", "kv_ratio", metric="compression_ratio"):
        if "kv_size" in row.settings:
            kept, read = int(row.settings["kv_size"]), CONTEXTS[row.model]
            yield Exact(cell, row.label, f"{kept} / {read} tokens", exact_number(Fraction(100 * kept, read)))


def _recompute_schedules(book: Book) -> Iterator[Exact]:
    # how many hidden states each group of layers keeps under UNComp's schedules, and the share that one of them keeps;
    # the numbers fall in equal steps of whole tokens from S_max to S_min
    schedules: dict[tuple[str, str], list[tuple[PublishedRow, Published]]] = {}
    for row, cell in _find_quantity(book, "uncomp", "text", "hidden_state_size"):
        schedules.setdefault((row.model, row.settings["where"]), []).append((row, cell))
    for (model, where), schedule in schedules.items():
        last_row, last_cell = schedule[-1]
        s_max, s_min = CONTEXTS[model], int(last_row.settings["S_min"])
        # S_i = S_max - i * floor((S_max - S_min) / (groups - 1)), and S_min itself for the last group
        step = (s_max - s_min) // (len(schedule) - 1)
        for i, (row, cell) in enumerate(schedule[:-1]):
            yield Exact(cell, row.label, f"{s_max} − {i} x {step}", exact_number(s_max - i * step))
        yield Exact(last_cell, last_row.label, "S_min", exact_number(s_min))
        if model == "llama-2-7b-chat" and where == "appendix E":
            # the paper states this share once
            ((stated_row, stated),) = _find_quantity(book, "uncomp", "text", "hidden_state_ratio", "compression_ratio")
            sizes = {row.settings["layers"]: cell.value for row, cell in schedule}
            share = compute_kept_share(pd.Series(sizes), s_max)
            yield Exact(stated, stated_row.label, "mean over the layers of appendix E / 4096", share)


def _recompute_benchmark(book: Book) -> Iterator[Exact]:
    # LongBench's datasets in the tables 5 of UNComp and VATP, from kvbench's tasks; average lengths are not checked,
    # since they count words of the original texts
    for paper, words in WORDS.items():
        for row in book.table(paper, 5):
            for (dataset, metric), cell in row.cells.items():
                task = TASKS[dataset]
                # a row of UNComp's table has neither model, method nor setting, and so no label
                label = row.label or dataset
                if metric == "n_samples":
                    yield Exact(cell, label, "examples of the dataset", exact_number(task.size))
                elif metric == "metric_name":
                    (place,) = {place for start, place in METRICS.items() if task.metric.startswith(start)}
                    yield Exact(cell, label, "metric of the dataset", None, text=words[place])


def _apply_formulas(book: Book) -> Iterator[Exact]:
    # without the paper's cells a formula would find none, and that would look like an error
    papers = {formula.paper for formula in FORMULAS} & book.papers
    frames = {paper: read_frame(book, paper, printed_number) for paper in papers}
    for formula in FORMULAS:
        if formula.paper not in frames:
            continue
        cells = frames[formula.paper]
        result = formula.recompute(cells)
        for _, line in find(cells, **formula.fields).iterrows():
            value = result
            if isinstance(result, pd.Series):
                names = [line[level] for level in result.index.names]
                # a series with one level is indexed by the label itself, not by a tuple
                value = result[tuple(names) if len(names) > 1 else names[0]]
            yield Exact(line["cell"], line["row"], formula.words, value)


RULES: tuple[Callable[[Book], Iterator[Exact]], ...] = (
    _recompute_means,
    _recompute_ratios,
    _recompute_shares_of_full,
    _recompute_times,
    _recompute_budgets_by_layer,
    _recompute_memory,
    _recompute_equal_sizes,
    _recompute_whole_caches,
    _recompute_shares_of_context,
    _recompute_schedules,
    _recompute_benchmark,
    _apply_formulas,
    _recompute_other_means,
)
"""The rules that recompute cells, in the order in which ``audit --exact`` lists the cells of a table."""

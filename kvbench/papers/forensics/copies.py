"""Check (c) of the audit: values that look copied, too good, or too far from their neighbours to be believed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, combinations

from kvbench.papers.forensics.finding import Finding, doubt
from kvbench.papers.forensics.identity import identity
from kvbench.papers.spec.numbers import format_fixed, printed_number
from kvbench.papers.spec.published import Published
from kvbench.papers.spec.published_cells import Book, PublishedRow

COARSE = ("trec", "passage_retrieval_en", "passage_count", "gsm8k", "gpqa", "theoremqa", "needle")
"""Datasets whose scores can take only few values, so that equal scores say little."""
COMPARED = 5
"""Rows with fewer scores than this are not compared, since they may agree by chance."""
SHARED = 3
"""So many equal scores, or more, of two models in one paper look copied."""
GAIN = 6 / 5
"""A score above so many times the full cache's is a finding."""
LEAST = 10
"""Full-cache scores up to this are noise, and gains over them are no findings."""
TWIN = 20
"""Only scores above this are findings if they stand twice in a row or a column."""
FALL = 2 / 3
"""A value below this share of its neighbour falls out of its series, if all other values are steady."""
STEADY = 0.2
"""Values are steady if the highest and the lowest differ by less than this share of their mean."""
SERIES = 3
"""A series of fewer values is too short for one of them to fall out of it."""


def find_copies(book: Book) -> Iterator[Finding]:
    """Yield a finding for each two rows of different models or methods that share values to the last digit."""
    # numbered tables alone: a paper's text and figures repeat numbers of its tables
    rows = [row for row in book.rows if len(row.scores) >= COMPARED and row.table.isdigit()]
    # there are many pairs: what depends on one row is looked up before them
    row_facts = []
    for row in rows:
        row_facts.append((row, identity(row), {dataset: cell.printed for dataset, cell in row.scores.items()}))
    for (first, first_identity, first_texts), (second, second_identity, second_texts) in combinations(row_facts, 2):
        # the same measurement printed twice is no copy, and neither is one paper's quotation of another
        if first.paper != second.paper or first_identity == second_identity:
            continue
        common = [dataset for dataset in first_texts if dataset in second_texts]
        equal = [dataset for dataset in common if first_texts[dataset] == second_texts[dataset]]
        # two models that share a few scores of three digits are suspicious; two methods of one model are not
        telling = [dataset for dataset in equal if _is_telling(first.scores[dataset])]
        if len(common) >= COMPARED and len(equal) == len(common):
            shared, why = equal, "every score is"
        elif first.model != second.model and len(telling) >= SHARED:
            shared, why = telling, f"{len(telling)} scores are"
        else:
            continue
        printed = ", ".join(f"{dataset} {first.scores[dataset].printed}" for dataset in shared)
        why += f" those of {second.label} in table {second.table}, to the last digit"
        yield doubt(first, "copy", "+".join(shared), printed, why)


def find_twins(book: Book) -> Iterator[Finding]:
    """Yield pairs of equal scores where chance makes them unlikely: they may be copied by mistake.

    A pair is two datasets in one row, or one dataset under two budgets of a method.
    """
    for row in book.rows:
        for a, b in combinations(row.scores.values(), 2):
            # accuracies over the same few questions coincide by chance, and so do low scores
            both_coarse = a.dataset in COARSE and b.dataset in COARSE
            if row.table.isdigit() and a.printed == b.printed and _is_high(a) and not both_coarse:
                why = "two datasets of the row with one value; may be chance"
                yield doubt(row, "twin", f"{a.dataset}+{b.dataset}", a.printed, why)
    for rows in _group_rows(book, lambda row: (row.paper, row.table, row.model, row.method)):
        for first, second in combinations(rows, 2):
            # only ReFreeKV's baselines at several budgets: elsewhere a setting may change nothing for good reasons
            if first.paper != "refreekv" or "budget" not in first.settings:
                continue
            for dataset, cell in first.scores.items():
                # another budget should change some digit of a score that can take many values
                other = second.scores.get(dataset)
                if other is not None and other.printed == cell.printed and _is_high(cell) and _is_telling(cell):
                    why = f"the value of this method under {second.setting}, to the last digit; may be chance"
                    yield doubt(first, "twin", dataset, cell.printed, why)


def find_gains(book: Book) -> Iterator[Finding]:
    """Yield the scores of compressed caches that are more than 20 % above the full cache's."""
    full_rows = {(row.paper, row.table, row.model): row for row in book.rows if row.method == "full"}
    for row in book.rows:
        full = full_rows.get((row.paper, row.table, row.model))
        if full is None or full is row or not row.table.isdigit():
            continue
        for dataset, cell in row.scores.items():
            full_cell = full.scores.get(dataset)
            # words and scores of 0 make no ratio, and scores in two units cannot be compared
            if full_cell is None or not cell.value or not full_cell.value or cell.unit != full_cell.unit:
                continue
            ratio = cell.value / full_cell.value
            if full_cell.value > LEAST and ratio > GAIN:
                printed = f"{cell.printed} against {full_cell.printed}"
                yield doubt(row, "gain", dataset, printed, f"{ratio:.2f} times the full cache's score")


def find_breaks(book: Book) -> Iterator[Finding]:
    """Yield scores that fall out of an otherwise steady series over the setting k. A lost digit would explain them."""
    for group in _group_rows(book, _name_series):
        # some rows state k in tokens, which cannot be ordered among shares of the prompt (20%, or 20%n)
        series = [row for row in group if "%" in row.settings.get("k", "")]
        series.sort(key=lambda row: float(row.settings["k"].rstrip("%n")))
        # a row may lack a dataset that the others have
        for dataset in dict.fromkeys(chain.from_iterable(row.scores for row in series)):
            rows = [row for row in series if dataset in row.scores]
            if len(rows) >= SERIES:
                yield from _find_breaks_of_dataset(rows, dataset)


def _name_series(row: PublishedRow) -> object:
    # sorted, since two tables may write the parts of a setting in another order
    other_parts = sorted((key, value) for key, value in row.settings.items() if key != "k")
    return row.paper, row.table, row.model, row.method, tuple(other_parts)


def _find_breaks_of_dataset(series: Sequence[PublishedRow], dataset: str) -> Iterator[Finding]:
    values = [row.scores[dataset].value or 0.0 for row in series]
    for i, row in enumerate(series):
        # the first value has none before it, and is compared with the second
        neighbour = values[i - 1] if i > 0 else values[1]
        # only a series whose other values are steady has one value that stands out: max - min < STEADY * mean
        others = values[:i] + values[i + 1 :]
        are_steady = max(others) - min(others) < STEADY * sum(others) / len(others)
        if values[i] < FALL * neighbour and are_steady:
            printed = row.scores[dataset].printed
            # suppose that the tens digit 1 was lost: 3.21 would then be 13.21
            fitting = format_fixed(printed_number(printed).value + 10, 2)
            texts = ", ".join(f"{value:.2f}" for value in others)
            why = f"the others of the series are {texts}; {fitting} would fit"
            yield doubt(row, "break", dataset, printed, why, fitting)


def _group_rows(book: Book, key: Callable[[PublishedRow], object]) -> list[list[PublishedRow]]:
    groups: dict[object, list[PublishedRow]] = {}
    for row in book.rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())


def _is_high(cell: Published) -> bool:
    return (cell.value or 0) > TWIN and cell.unit == "pct"


def _is_telling(cell: Published) -> bool:
    # 50.0 has one significant digit, 41.86 has four
    digits = cell.printed.replace(".", "").strip("0")
    return cell.dataset not in COARSE and len(digits) >= 3

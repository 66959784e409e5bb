"""Check (c) of the audit: values that look copied, too good, or too far from their neighbours to be believed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

from kvbench.papers.forensics.finding import Finding
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
    row_facts = [(row, identity(row), {dataset: cell.printed for dataset, cell in row.scores.items()}) for row in rows]
    for (first, first_identity, first_texts), (second, second_identity, second_texts) in combinations(row_facts, 2):
        # the same measurement printed twice is no copy, and neither is one paper's quotation of another
        if first.paper != second.paper or first_identity == second_identity:
            continue
        # a list in the order of the row, since a finding names the datasets in this order
        common = [dataset for dataset in first_texts if dataset in second_texts]
        equal = [dataset for dataset in common if first_texts[dataset] == second_texts[dataset]]
        all_equal = len(common) >= COMPARED and len(equal) == len(common)
        # two models that share a few scores of three digits are suspicious; two methods of one model are not
        telling = [dataset for dataset in equal if _is_telling(first.scores[dataset])]
        if all_equal:
            shared, why = equal, "every score is"
        elif first.model != second.model and len(telling) >= SHARED:
            shared, why = telling, f"{len(telling)} scores are"
        else:
            continue
        yield Finding(
            check="copy",
            weight="doubt",
            paper=first.paper,
            table=first.table,
            row=first.label,
            cell="+".join(shared),
            printed=", ".join(f"{dataset} {first.scores[dataset].printed}" for dataset in shared),
            recomputed="",
            why=f"{why} those of {second.label} in table {second.table}, to the last digit",
        )


def find_twins(book: Book) -> Iterator[Finding]:
    """Yield pairs of equal scores where chance makes them unlikely: they may be copied by mistake.

    A pair is two datasets in one row, or one dataset under two budgets of a method.
    """
    for row in book.rows:
        if row.table.isdigit():
            yield from _find_twins_in_row(row)

    for method_rows in _group_rows(book, _name_method):
        for first, second in combinations(method_rows, 2):
            # only ReFreeKV's baselines at several budgets: elsewhere a setting may change nothing for good reasons
            if first.paper == "refreekv" and "budget" in first.settings:
                yield from _find_twins_under_budgets(first, second)


def _find_twins_in_row(row: PublishedRow) -> Iterator[Finding]:
    # accuracies over the same few questions coincide by chance, and so do low scores
    for first, second in combinations(row.scores.values(), 2):
        both_coarse = first.dataset in COARSE and second.dataset in COARSE
        if first.printed == second.printed and _is_high(first) and not both_coarse:
            yield Finding(
                check="twin",
                weight="doubt",
                paper=row.paper,
                table=row.table,
                row=row.label,
                cell=f"{first.dataset}+{second.dataset}",
                printed=first.printed,
                recomputed="",
                why="two datasets of the row with one value; may be chance",
            )


def _find_twins_under_budgets(first: PublishedRow, second: PublishedRow) -> Iterator[Finding]:
    for dataset, cell in first.scores.items():
        # another budget should change some digit of a score that can take many values
        other = second.scores.get(dataset)
        if other is None or other.printed != cell.printed:
            continue
        if _is_high(cell) and _is_telling(cell):
            yield Finding(
                check="twin",
                weight="doubt",
                paper=first.paper,
                table=first.table,
                row=first.label,
                cell=dataset,
                printed=cell.printed,
                recomputed="",
                why=f"the value of this method under {second.setting}, to the last digit; may be chance",
            )


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
            # score / full score
            ratio = cell.value / full_cell.value
            if full_cell.value > LEAST and ratio > GAIN:
                yield Finding(
                    check="gain",
                    weight="doubt",
                    paper=row.paper,
                    table=row.table,
                    row=row.label,
                    cell=dataset,
                    printed=f"{cell.printed} against {full_cell.printed}",
                    recomputed="",
                    why=f"{ratio:.2f} times the full cache's score",
                )


def find_breaks(book: Book) -> Iterator[Finding]:
    """Yield scores that fall out of an otherwise steady series over the setting k. A lost digit would explain them."""
    for group in _group_rows(book, _name_method_and_setting):
        # some rows state k in tokens, which cannot be ordered among shares
        rows_with_share = [row for row in group if "%" in row.settings.get("k", "")]
        series = sorted(rows_with_share, key=_read_share)
        # a row may lack a dataset that the others have
        datasets: dict[str, None] = {}
        for row in series:
            datasets |= dict.fromkeys(row.scores)
        for dataset in datasets:
            rows_with_score = [row for row in series if dataset in row.scores]
            if len(rows_with_score) >= SERIES:
                yield from _find_breaks_of_dataset(rows_with_score, dataset)


def _name_method(row: PublishedRow) -> object:
    return row.paper, row.table, row.model, row.method


def _name_method_and_setting(row: PublishedRow) -> object:
    # sort, since two tables may write the parts of a setting in another order
    other_parts = tuple(sorted((key, value) for key, value in row.settings.items() if key != "k"))
    return _name_method(row), other_parts


def _read_share(row: PublishedRow) -> float:
    # k is printed as 20% or, with n for the prompt's length, as 20%n
    return float(row.settings["k"].rstrip("%n"))


def _find_breaks_of_dataset(series: Sequence[PublishedRow], dataset: str) -> Iterator[Finding]:
    # scores are numbers; only the type of a cell's value allows None
    values = [row.scores[dataset].value or 0.0 for row in series]
    for i, row in enumerate(series):
        # the first value has none before it, and is compared with the second
        neighbour = values[i - 1] if i > 0 else values[1]
        falls_out = values[i] < FALL * neighbour
        # only a series whose other values are steady has one value that stands out: max - min < STEADY * mean
        others = values[:i] + values[i + 1 :]
        mean = sum(others) / len(others)
        others_are_steady = max(others) - min(others) < STEADY * mean
        if not (falls_out and others_are_steady):
            continue
        cell = row.scores[dataset]
        # suppose that the tens digit 1 was lost: 3.21 would then be 13.21
        fitting = format_fixed(printed_number(cell.printed).value + 10, 2)
        yield Finding(
            check="break",
            weight="doubt",
            paper=row.paper,
            table=row.table,
            row=row.label,
            cell=dataset,
            printed=cell.printed,
            recomputed=fitting,
            why=f"the others of the series are {', '.join(f'{value:.2f}' for value in others)}; {fitting} would fit",
        )


def _group_rows(book: Book, key: Callable[[PublishedRow], object]) -> Iterator[list[PublishedRow]]:
    groups: dict[object, list[PublishedRow]] = {}
    for row in book.rows:
        groups.setdefault(key(row), []).append(row)
    yield from groups.values()


def _is_high(cell: Published) -> bool:
    return (cell.value or 0) > TWIN and cell.unit == "pct"


def _is_telling(cell: Published) -> bool:
    # 50.0 has one significant digit, 41.86 has four
    digits = cell.printed.replace(".", "").strip("0")
    return cell.dataset not in COARSE and len(digits) >= 3

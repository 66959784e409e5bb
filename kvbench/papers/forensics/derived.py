"""Check (a) of the audit: printed averages, ratios, sizes and speed-ups that do not follow from other cells.

kvbench.papers.forensics.exact recomputes the cells.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from kvbench.papers.forensics.exact import Exact, compute_mean_ratio, recomputed_cells
from kvbench.papers.forensics.finding import Finding
from kvbench.papers.spec.numbers import decimals, format_fixed, grade, printed_number
from kvbench.papers.spec.published_cells import Book, PublishedRow


def find_wrong_values(book: Book) -> Iterator[Finding]:
    """Yield a finding for each cell that differs from its recomputed value.

    The check is ``rounding`` if hidden digits of the inputs can explain the difference, else ``derived``.
    """
    # rules recompute the cell objects that the rows of the book hold, so id() finds the row of a cell
    row_of_cell: dict[int, PublishedRow] = {}
    for row in book.rows:
        for cell in row.cells.values():
            row_of_cell[id(cell)] = row
    for exact in recomputed_cells(book):
        if exact.grade == "equal":
            continue
        if exact.ok:
            check, weight = "rounding", "note"
            why = f"{exact.formula}; hidden digits can explain it"
        else:
            check = "derived"
            weight = "doubt" if _is_slip_of_rounding(exact) else "wrong"
            why = f"{exact.formula}; off by {exact.mark}"
            for reason in _find_reasons(book, exact, row_of_cell[id(exact.cell)]):
                why += f"; {reason}"
        yield Finding(
            check=check,
            weight=weight,
            paper=exact.cell.paper,
            table=exact.cell.table,
            row=exact.row,
            cell=exact.column,
            printed=exact.cell.printed,
            recomputed=exact.shown,
            why=why,
        )


def _is_slip_of_rounding(exact: Exact) -> bool:
    if not exact.is_mean or exact.recomputed is None:
        return False
    # in units of the last digit: gap * 10^decimals
    gap = abs(printed_number(exact.published).value - exact.recomputed.value)
    return gap * 10 ** decimals(exact.published) < 2


def find_wrong_orders(book: Book) -> Iterator[Finding]:
    """Yield the blocks of ReFreeKV's table 2 whose wrong averages put the baselines in a wrong order."""
    averages_by_block: dict[tuple[str, str], list[Exact]] = {}
    for exact in recomputed_cells(book):
        cell = exact.cell
        # table 2 prints averages as gains over the full cache (ratio - 1); baselines are all methods but its own
        is_average = (cell.paper, cell.table, cell.metric) == ("refreekv", "2", "ratio_to_full_minus_1")
        if is_average and cell.method != "refreekv":
            averages_by_block.setdefault((cell.model, cell.setting), []).append(exact)

    for (model, setting), averages in averages_by_block.items():
        # the best first; methods with equal averages stay in the table's order
        as_printed = sorted(averages, key=_read_printed, reverse=True)
        as_recomputed = sorted(averages, key=_read_recomputed, reverse=True)
        if [average.cell.method for average in as_printed] == [average.cell.method for average in as_recomputed]:
            continue
        printed_order = [f"{average.cell.method} {average.published}" for average in as_printed]
        true_order = []
        for average in as_recomputed:
            if average.recomputed:
                true_order.append(f"{average.cell.method} {average.recomputed.text(2)}")
        yield Finding(
            check="ranking",
            weight="wrong",
            paper="refreekv",
            table="2",
            row=f"{model} {setting}",
            cell="avg",
            printed=" > ".join(printed_order),
            recomputed=" > ".join(true_order),
            why="the order of the baselines changes once averages are those of their cells",
        )


def _read_printed(exact: Exact) -> Fraction:
    return printed_number(exact.published).value


def _read_recomputed(exact: Exact) -> float:
    return float(exact.recomputed or 0)


def _find_reasons(book: Book, exact: Exact, row: PublishedRow) -> Iterator[str]:
    if exact.cell.metric == "ratio_to_full_minus_1":
        yield _name_other_full_row(book, exact, row)
    elif exact.is_mean and exact.recomputed is not None:
        # missing = n * (printed mean - mean of the cells): the cells' sum lacks so much
        missing = (printed_number(exact.published).value - exact.recomputed.value) * len(row.scores)
        direction = "little" if missing > 0 else "much"
        yield f"the cells sum to {format_fixed(abs(missing), 2)} too {direction}"
        yield from _suspect_copies(row, missing)
    elif exact.cell.metric == "kv_memory" and exact.cell.paper == "refreekv":
        yield "it fits keys and values of every query head, which these models do not have"


def _name_other_full_row(book: Book, exact: Exact, row: PublishedRow) -> str:
    for full in book.table(row.paper, row.table):
        if full.method != "full" or full.model == row.model:
            continue
        # mean ratio to that full row, less one, in per cent
        gain = (compute_mean_ratio(row, full) - 1) * 100
        if grade(exact.published, gain) == "equal":
            return f"the full row of {full.model} as the base gives it"
    return "no full row of the table gives it"


def _suspect_copies(row: PublishedRow, missing: Fraction) -> Iterator[str]:
    datasets_by_value: dict[str, list[str]] = {}
    for dataset, cell in row.scores.items():
        datasets_by_value.setdefault(cell.printed, []).append(dataset)
    for value, datasets in datasets_by_value.items():
        if len(datasets) > 1:
            # digits that the mean hides make the missing sum uncertain, so it is rounded to a half
            needed = printed_number(value).value + Fraction(round(2 * missing), 2)
            yield f"{' and '.join(datasets)} print the same {value}, and {format_fixed(needed, 2)} in one would do"
            return

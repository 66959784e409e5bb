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
        row_of_cell.update((id(cell), row) for cell in row.cells.values())
    for exact in recomputed_cells(book):
        if exact.grade == "equal":
            continue
        check, weight = "rounding", "note"
        why = f"{exact.formula}; hidden digits can explain it"
        if not exact.ok:
            check, weight = "derived", "doubt" if _is_slip_of_rounding(exact) else "wrong"
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
            printed=exact.published,
            recomputed=exact.shown,
            why=why,
        )


def _is_slip_of_rounding(exact: Exact) -> bool:
    if not exact.is_mean or exact.recomputed is None:
        return False
    # less than two units of the last printed digit: gap * 10^decimals
    gap = abs(printed_number(exact.published).value - exact.recomputed.value)
    return gap * 10 ** decimals(exact.published) < 2


def find_wrong_orders(book: Book) -> Iterator[Finding]:
    """Yield the blocks of ReFreeKV's table 2 whose wrong averages put the baselines in a wrong order."""
    blocks: dict[tuple[str, str], list[Exact]] = {}
    for exact in recomputed_cells(book):
        cell = exact.cell
        # table 2 prints averages as gains over the full cache (ratio - 1); baselines are all methods but its own
        is_average = (cell.paper, cell.table, cell.metric) == ("refreekv", "2", "ratio_to_full_minus_1")
        if is_average and cell.method != "refreekv":
            blocks.setdefault((cell.model, cell.setting), []).append(exact)
    for (model, setting), averages in blocks.items():
        # the best first; methods with equal averages stay in the table's order
        as_printed = sorted(averages, key=lambda exact: printed_number(exact.published).value, reverse=True)
        as_recomputed = sorted(averages, key=lambda exact: float(exact.recomputed or 0), reverse=True)
        if as_printed == as_recomputed:
            continue
        yield Finding(
            check="ranking",
            weight="wrong",
            paper="refreekv",
            table="2",
            row=f"{model} {setting}",
            cell="avg",
            printed=" > ".join(f"{exact.cell.method} {exact.published}" for exact in as_printed),
            recomputed=" > ".join(f"{e.cell.method} {e.recomputed.text(2)}" for e in as_recomputed if e.recomputed),
            why="the order of the baselines changes once averages are those of their cells",
        )


def _find_reasons(book: Book, exact: Exact, row: PublishedRow) -> Iterator[str]:
    if exact.cell.metric == "ratio_to_full_minus_1":
        yield _name_other_full_row(book, exact, row)
    elif exact.is_mean and exact.recomputed is not None:
        # missing = n * (printed mean - mean of the cells): the cells' sum lacks so much
        missing = (printed_number(exact.published).value - exact.recomputed.value) * len(row.scores)
        direction = "little" if missing > 0 else "much"
        yield f"the cells sum to {format_fixed(abs(missing), 2)} too {direction}"
        # two datasets that print one value may be a copy of each other
        texts = [cell.printed for cell in row.scores.values()]
        repeated = next((text for text in texts if texts.count(text) > 1), None)
        if repeated is not None:
            datasets = [dataset for dataset, cell in row.scores.items() if cell.printed == repeated]
            # digits that the mean hides make the missing sum uncertain, so it is rounded to a half
            needed = printed_number(repeated).value + Fraction(round(2 * missing), 2)
            yield f"{' and '.join(datasets)} print the same {repeated}, and {format_fixed(needed, 2)} in one would do"
    elif exact.cell.metric == "kv_memory" and exact.cell.paper == "refreekv":
        yield "it fits keys and values of every query head, which these models do not have"


def _name_other_full_row(book: Book, exact: Exact, row: PublishedRow) -> str:
    # the authors may have divided by another model's row
    for full in book.table(row.paper, row.table):
        if full.method != "full" or full.model == row.model:
            continue
        # mean ratio to that full row, less one, in per cent
        if grade(exact.published, (compute_mean_ratio(row, full) - 1) * 100) == "equal":
            return f"the full row of {full.model} as the base gives it"
    return "no full row of the table gives it"

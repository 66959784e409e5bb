"""(a) Cells that follow from others, by kvbench.papers.forensics.exact: averages, ratios, sizes, speed-ups."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from kvbench.papers.forensics.exact import Exact, everything, ratio
from kvbench.papers.forensics.finding import Finding
from kvbench.papers.spec.numbers import decimals, fixed, grade, printed
from kvbench.papers.spec.published_cells import Book, PublishedRow


def derived(book: Book) -> Iterator[Finding]:
    """Yield a finding for each cell that differs from its recomputed value.

    The check is ``rounding`` where hidden digits of the inputs can explain the difference, else ``derived``.
    """
    row_of_cell = {id(cell): row for row in book.rows for cell in row.cells.values()}
    for exact in everything(book):
        if exact.grade == "equal":
            continue
        cell = exact.cell
        check, weight, why = "rounding", "note", f"{exact.formula}; hidden digits can explain it"
        if not exact.ok:
            gap = abs(printed(exact.published).value - exact.recomputed.value) if exact.recomputed else 1
            # a mean off by less than two units of its last digit may be a slip of rounding
            nearly_equal = exact.is_mean and gap * 10 ** decimals(exact.published) < 2
            check, weight = "derived", "doubt" if nearly_equal else "wrong"
            why = "; ".join([f"{exact.formula}; off by {exact.mark}", *_reasons(book, exact, row_of_cell[id(cell)])])
        yield Finding(
            check=check,
            weight=weight,
            paper=cell.paper,
            table=cell.table,
            row=exact.row,
            cell=exact.column,
            printed=cell.printed,
            recomputed=exact.shown,
            why=why,
        )


def ranking(book: Book) -> Iterator[Finding]:
    """Yield where wrong averages of ReFreeKV's table 2 put its baselines in a wrong order."""
    averaged = [e for e in everything(book) if e.cell.table == "2" and e.cell.metric == "ratio_to_full_minus_1"]
    blocks: dict[tuple[str, str], list[Exact]] = {}
    for e in averaged:
        if e.cell.paper == "refreekv" and e.cell.method != "refreekv":
            blocks.setdefault((e.cell.model, e.cell.setting), []).append(e)
    for (model, setting), block in blocks.items():
        shown = sorted(block, key=lambda e: -printed(e.published).value)
        true = sorted(block, key=lambda e: -float(e.recomputed or 0))
        if [e.cell.method for e in shown] != [e.cell.method for e in true]:
            stated = " > ".join(f"{e.cell.method} {e.published}" for e in shown)
            recomputed = " > ".join(f"{e.cell.method} {e.recomputed.text(2)}" for e in true if e.recomputed)
            why = "the order of the baselines changes once averages are those of their cells"
            yield Finding("ranking", "wrong", "refreekv", "2", f"{model} {setting}", "avg", stated, recomputed, why)


def _reasons(book: Book, e: Exact, row: PublishedRow) -> Iterator[str]:
    """Yield other ways to arrive at the printed value."""
    if e.cell.metric == "ratio_to_full_minus_1":
        others = [r for r in book.table(row.paper, row.table) if r.method == "full" and r.model != row.model]
        models = [r.model for r in others if grade(e.published, (ratio(row, r) - 1) * 100) == "equal"]
        yield f"the full row of {models[0]} as the base gives it" if models else "no full row of the table gives it"
    elif e.is_mean and e.recomputed is not None:
        missing = (printed(e.published).value - e.recomputed.value) * len(row.scores)
        yield f"the cells sum to {fixed(abs(missing), 2)} too {'little' if missing > 0 else 'much'}"
        by_value: dict[str, list[str]] = {}
        for dataset, cell in row.scores.items():
            by_value.setdefault(cell.printed, []).append(dataset)
        value, twins = next(((value, names) for value, names in by_value.items() if len(names) > 1), ("", []))
        if twins:
            needed = fixed(printed(value).value + Fraction(round(2 * missing), 2), 2)
            yield f"{' and '.join(twins)} print the same {value}, and {needed} in one would do"
    elif e.cell.metric == "kv_memory" and e.cell.paper == "refreekv":
        yield "it fits keys and values of every query head, which these models do not have"

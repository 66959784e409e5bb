"""A paper's table as one long frame: a line for each side of every cell, ours and the paper's.

Averages are computed here from the cells, never taken from the paper. If the paper states another average, it is kept
beside ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean
from typing import Any

import pandas as pd

from kvbench.bench.records import NOT_RUN
from kvbench.methods.core.chain import Chain
from kvbench.papers.forensics.exact import list_exact_cells
from kvbench.papers.measured.plan import Line, PaperTable, Parts, stored_scores
from kvbench.papers.spec.numbers import decimals
from kvbench.papers.spec.published import MARKS, Published
from kvbench.papers.spec.table_spec import BUDGET, MEANS, RATIO, RELATIVE, SCORE, SHARE, Column
from kvbench.papers.spec.workloads import FAMILIES
from kvbench.plan import presets
from kvbench.plan.advice import at_floor
from kvbench.store.sample_reader import SampleReader
from kvbench.tasks.longbench import TASKS
from kvbench.tasks.metrics import metric, stats

AVERAGE = Column("avg", SCORE)
"""The column of averages. On a stand-in it leaves out tasks on which the model fails."""
ROUNDING = 2
"""In units of the last printed digit: rounding can explain so large a difference between a printed average and the
average of its printed cells."""

Side = dict[str, Any]
"""One side of a cell: its columns of the frame by name, without its place."""
OURS: Side = {
    "status": "none",
    "reason": "",
    "value": None,
    "low": None,
    "high": None,
    "share": None,
    "share_low": None,
    "share_high": None,
    "full": None,
    "kept": None,
    "n": 0,
    "of": 0,
    "cell": "",
    "score": None,
    "scores": {},
    "floor": False,
    "empty": 0,
    "unlike": (),
    "unchanged": False,
    "timed": None,
}
"""The columns of our side.

status: measured, refused or failed (see ``reason``), missing, or ``none`` if the paper has no such cell. Timings may
also be OOM.
value, low, high: the number in printed units, fractions in per cent, with its 95 % interval (a timing's quartiles). A
share of a full cache that scores 0 is None.
share, share_low, share_high: per cent of the full cache, or of the base row in an efficiency table.
full: the full cache's score on the same examples.
kept: the share of the prompt's tokens that is kept, in per cent.
n, of: how many examples are measured, and how many there are.
cell: the id of the result in the store; several ids if tasks are pooled.
score: our score, also where ``value`` is a share.
scores: our score of each example that the full cache answered, too, on the scale from 0 to 1.
floor: whether the model fails: its full cache scores hardly more than empty answers and guessing.
empty: how many of the full cache's answers to the same examples are empty.
unlike: the conditions that differ from the paper's.
unchanged: whether nothing was compressed, so that our number says nothing about the method.
timed: the cell's line of ``Timings.cells``; None in a table of scores.
"""
PAPER: Side = {
    "value": None,
    "share": None,
    "full": None,
    "kept": None,
    "mark": "",
    "text": "",
    "exact": "",
    "stated": None,
    "budgeted": False,
    "less_is_better": False,
}
"""The columns of the paper's side. Those with names of our side mean the same there.

mark: the sign of a suspect or repaired printed value (see published.MARKS).
text: the characters on the page, or a fraction in per cent.
exact: ✓ if the printed value follows from others without a model, or ``recomputed X`` if these give X instead.
stated: the average that the paper prints, if its cells give another.
budgeted: whether the share of tokens kept is printed.
less_is_better: whether the score is a perplexity, and our ``scores`` log losses.
"""


def read_cells(table: PaperTable, reader: SampleReader | None = None) -> PaperTable:
    """Return a table with its cells, from the paper's data and from the store or the timings.

    The frame has the row's number, the name of the column and the side (ours, paper), and the columns OURS or PAPER.

    reader: the reader of the run's samples, if the caller reads all of them, too; None: a dataset at a time is read.
    """
    spec = table.spec
    # values that follow from others on the page need no model, and show whether the printed value is right
    exact = {}
    for value in list_exact_cells(spec.paper, spec.table):
        exact[value.cell] = "✓" if value.ok else f"recomputed {value.shown}"
    lines = table.lines
    columns = spec.columns
    # the sides of each line's cells, column by column
    sides: list[list[tuple[Side, Side]]] = [[] for _ in lines]
    if table.timings is not None:
        for line, cells in zip(lines, sides, strict=True):
            cells += [_list_timed_sides(table, line.printed.get(column.name), exact) for column in columns]
    else:
        # a budget is shown below its score; a table that prints only budgets shows them as columns
        columns = tuple(column for column in columns if column.quantity != BUDGET) or columns
        _read_scores(table, columns, sides, exact, reader)
        # the paper may print no average
        if spec.scores and any(cell.dataset in MEANS for cell in spec.printed):
            for line, cells in zip(lines, sides, strict=True):
                cells.append(_average_sides(table, line, columns, cells))
            columns += (AVERAGE,)
    records = []
    for number, cells in enumerate(sides):
        for column, (ours, paper) in zip(columns, cells, strict=True):
            place = {"row": number, "column": column.name}
            ours.pop("pairs", None)
            records += [place | {"side": "ours"} | OURS | ours, place | {"side": "paper"} | PAPER | paper]
    # objects, so that a number that is missing stays None
    return replace(table, columns=columns, cells=pd.DataFrame(records, dtype=object))


def _list_timed_sides(
    table: PaperTable, printed: Published | None, exact: Mapping[Published, str]
) -> tuple[Side, Side]:
    if printed is None or table.timings is None:
        return {}, {}
    cell = table.timings.find_cell(printed)
    ours = {
        "status": "missing" if cell.status == NOT_RUN else cell.status,
        "reason": cell.reason,
        "value": cell.value,
        "low": cell.low,
        "high": cell.high,
        "share": None if cell.ratio is None else 100 * cell.ratio,
        "timed": cell,
    }
    paper = {
        "value": printed.points,
        "share": None if cell.published_ratio is None else 100 * cell.published_ratio,
        "mark": MARKS.get(printed.certainty, ""),
        "text": printed.printed,
        "exact": exact.get(printed, ""),
    }
    return ours, paper


def _read_scores(
    table: PaperTable,
    columns: Sequence[Column],
    sides: Sequence[list[tuple[Side, Side]]],
    exact: Mapping[Published, str],
    reader: SampleReader | None,
) -> None:
    """Add the sides of every cell of a table of scores to ``sides``, except for averages."""
    # several lines can show the same results
    known: dict[tuple[str, ...], Side] = {}
    for column in columns:
        column_reader = reader
        if reader is None and table.run is not None:
            # a reader keeps all that it has read: with one for each column, one dataset is in memory at a time
            column_reader = SampleReader(table.run.store)
        for line, cells in zip(table.lines, sides, strict=True):
            measured: Side = {"status": "missing", "reason": line.skipped}
            if column.quantity == SCORE:
                ids = tuple(cell.id for _, cell in table.find_parts(line, column))
                # without cells all lines would share the key (), although they have different reasons
                measured = known.get(ids) or _read_score(table, line, column, column_reader)
                if ids:
                    known[ids] = measured
            printed = line.printed.get(column.name)
            if printed is None:
                cells.append(({"reason": measured["reason"]}, {}))
                continue
            ours = dict(measured)
            # if the paper prints shares of its full cache, our share is compared with them
            if printed.metric == RATIO and "value" in ours:
                ours |= {"value": ours["share"], "low": ours["share_low"], "high": ours["share_high"]}
            # another model is itself another condition, and its scores have no difference to the paper's
            if "value" in ours and not table.stand_in:
                ours["unlike"] = tuple(_list_unlike_conditions(table, line, column))
            cells.append((ours, _print_side(table, line, column, exact)))


def _read_score(table: PaperTable, line: Line, column: Column, reader: SampleReader | None) -> Side:
    """Return our side of a score, with the scores [n, 2] of the method and of the full cache as ``pairs``."""
    result = table.read_result(line, column, reader)
    summary = result.summary
    full_parts = table.find_parts(line, column, Chain())
    pairs_by_example = _pair_scores(table.find_parts(line, column), full_parts, reader)
    # an example that is asked in several ways (MDQA's three positions) counts as one, with its mean scores
    pairs = stats.average_by_example(pairs_by_example, width=2)
    ours: Side = {"status": result.status, "reason": result.reason or "", "pairs": pairs}
    if summary is None or summary.score is None:
        return ours
    groups = [group for group, _ in full_parts]
    # the tasks of one dataset have one metric; smaller log losses are better, so their share is inverse
    task_metric = metric(groups[0].task.metric)
    share = stats.share_of_full([pairs], log_losses=task_metric.formula is not None)
    low, high = summary.ci or (None, None)
    share_low, share_high = share.ci or (None, None)
    return ours | {
        "value": summary.score,
        "low": low,
        "high": high,
        "share": share.point,
        "share_low": share_low,
        "share_high": share_high,
        "full": task_metric.show(float(pairs[:, 1].mean())) if len(pairs) else None,
        "kept": 100 * summary.kept / summary.prompt_tokens if summary.prompt_tokens else None,
        "n": summary.n,
        "of": summary.of,
        "cell": result.cell,
        "score": summary.score,
        "scores": dict(zip(pairs_by_example, pairs[:, 0].tolist(), strict=True)),
        "floor": any(at_floor(group.task, pairs[:, 1]) for group in groups),
        "empty": _count_empty(full_parts, reader),
        "unchanged": result.unchanged,
    }


def _pair_scores(parts: Parts, full_parts: Parts, reader: SampleReader | None) -> dict[str, list[tuple[float, float]]]:
    scores: dict[str, list[tuple[float, float]]] = {}
    if parts:
        # cells come from the run's groups
        assert reader is not None
        for (group, cell), (_, full_cell) in zip(parts, full_parts, strict=True):
            own, full = stored_scores(reader, group, cell), stored_scores(reader, group, full_cell)
            for example in sorted(own.keys() & full.keys()):
                scores.setdefault(example, []).append((own[example], full[example]))
    return scores


def _count_empty(full_parts: Parts, reader: SampleReader | None) -> int:
    # without a run there are no cells
    if reader is None:
        return 0
    count = 0
    for group, cell in full_parts:
        samples = reader.read(cell.id)
        for example in group.examples:
            # a text that is scored by its likelihood has no answer of the model's own
            if example.id in samples and example.scored is None:
                count += not samples[example.id].prediction.strip()
    return count


def _list_unlike_conditions(table: PaperTable, line: Line, column: Column) -> Iterator[str]:
    spec = table.spec
    # a group has the examples of one task; a column may be the mean of several tasks
    groups = [group for group, _ in table.find_parts(line, column)]
    if spec.unlike:
        yield spec.unlike
    if spec.extended and column.dataset in TASKS and TASKS[column.dataset].extended:
        yield "the paper's scores fit LongBench-E, ours are of LongBench's own split"
    if any(group.task.id.startswith(FAMILIES["mini"]) for group in groups):
        yield "ours are of MiniLongBench's examples"
    yield from dict.fromkeys(group.task.note for group in groups if group.task.note)
    # the user may have chosen another prompt than the paper's preset
    if spec.preset and table.run is not None and table.run.cfg.preset == spec.preset:
        preset_prompt = presets.values(spec.preset, "").get("prompt")
        if preset_prompt is not None and table.run.cfg.prompt.name != preset_prompt:
            yield f"prompt={table.run.cfg.prompt.name} here, {preset_prompt} there"
    if table.typed:
        yield f"{' '.join(table.typed)} here"


def _print_side(table: PaperTable, line: Line, column: Column, exact: Mapping[Published, str]) -> Side:
    printed = line.printed[column.name]
    budget = None
    if column.quantity == SCORE:
        budget = line.printed.get(Column(column.dataset, BUDGET).name)
    full = _find_printed_full(table, line, column)
    return {
        "value": printed.points,
        "share": _compute_printed_share(printed, full),
        "full": None if full is None else full.points,
        "kept": None if budget is None else budget.value,
        "budgeted": budget is not None,
        "mark": MARKS.get(printed.certainty, ""),
        "text": printed.shown,
        "exact": exact.get(printed, ""),
        "less_is_better": printed.metric == "perplexity",
    }


def _find_printed_full(table: PaperTable, line: Line, column: Column) -> Published | None:
    full = table.spec.full_row(line.model)
    if full is None:
        return None
    return full.cells.get(column.name)


def _compute_printed_share(value: Published, full: Published | None) -> float | None:
    """Return a printed value in per cent of the paper's full-cache value: 100 value / full, or None without both."""
    # a value that is printed as a share
    if value.metric == RATIO:
        return value.value
    if full is None or value.points is None or not full.points:
        return None
    # a smaller perplexity is better, so its share is full / value
    if value.metric == "perplexity":
        return 100 * full.points / value.points
    return 100 * value.points / full.points


def _average_sides(
    table: PaperTable, line: Line, columns: Sequence[Column], cells: Sequence[tuple[Side, Side]]
) -> tuple[Side, Side]:
    """Return the sides of a line's average, averaged as the paper averages over the columns whose data are here."""
    scored = [(column, *sides) for column, sides in zip(columns, cells, strict=True) if column.quantity == SCORE]
    # without a run the table only shows the paper's side, which has all columns
    readable = [entry for entry in scored if table.run is None or not table.why_absent(line, entry[0])]
    if not readable:
        return {"status": "missing"}, {}
    averages_shares = table.spec.average in (RELATIVE, SHARE)
    paper = _average_printed(table, line, readable, averages_shares)
    offset = _find_average_offset(table, line)
    if paper["value"] is not None:
        paper["value"] -= offset
        # a mean over some columns cannot contradict a mean that the paper states over all of them
        if len(readable) == len(scored):
            paper["stated"] = _find_contradicting_average(line, paper["value"])
    ours = [OURS | side for _, side, _ in readable]
    # if one of the averaged columns has no number, the average has no number either, and the first such column says why
    deciding = next((side for side in ours if side["status"] != "measured"), None)
    if deciding is not None:
        status = deciding["status"]
        if any(side["status"] in ("missing", "none") for side in ours):
            status = "missing"
        return {"status": status, "reason": deciding["reason"]}, paper
    share = stats.share_of_full([side["pairs"] for side in ours], of_ratios=averages_shares)
    share_low, share_high = share.ci or (None, None)
    # an average of shares is taken over the tasks' shares, not from the means of both sides
    field = "share" if averages_shares else "value"
    values = [side[field] for side in ours]
    known_values = [value for value in values if value is not None]
    average = {
        "status": "measured",
        "reason": ours[0]["reason"],
        "value": fmean(known_values) - offset if known_values else None,
        "share": share.point,
        "share_low": share_low,
        "share_high": share_high,
        # a mean over tasks rests on all of their examples
        "n": sum(side["n"] for side in ours),
        "of": sum(side["of"] for side in ours),
        "unlike": tuple(dict.fromkeys(chain.from_iterable(side["unlike"] for side in ours))),
    }
    return average, paper


def _average_printed(
    table: PaperTable, line: Line, readable: Sequence[tuple[Column, Side, Side]], averages_shares: bool
) -> Side:
    # the paper prints no average over only some of the columns
    field = "share" if averages_shares else "value"
    values = [(PAPER | paper)[field] for _, _, paper in readable]
    if any(value is None for value in values):
        return {"value": None}
    mean = fmean(values)
    if averages_shares:
        return {"value": mean, "share": mean}
    full_cells = [_find_printed_full(table, line, column) for column, _, _ in readable]
    full_values = [full.points for full in full_cells if full is not None and full.points is not None]
    if len(full_values) < len(full_cells) or not fmean(full_values):
        return {"value": mean}
    # share of the means, not the mean of shares: sum(values) / sum(full values), in per cent
    return {"value": mean, "share": 100 * mean / fmean(full_values)}


def _find_contradicting_average(line: Line, computed: float) -> float | None:
    """Return the average that the paper states in a row; None if there is none, or rounding explains the difference."""
    stated = _find_stated_average(line)
    if stated is None or stated.value is None:
        return None
    # decimals(printed) digits stand behind the point, so 10^-decimals is a unit of the last digit
    rounding = ROUNDING * 10.0 ** -decimals(stated.printed)
    # NaN is within no distance
    if abs(stated.value - computed) <= rounding:
        return None
    return stated.value


def _find_average_offset(table: PaperTable, line: Line) -> int:
    # 100 if the paper prints a share's distance from 100; it prints the full cache's average as a share nevertheless
    stated = _find_stated_average(line)
    if table.spec.average == RELATIVE and (stated is None or stated.metric != RATIO):
        return 100
    return 0


def _find_stated_average(line: Line) -> Published | None:
    # an average of another quantity than scores has the quantity's name behind it
    names = [name for name in line.printed if name == AVERAGE.name or name.startswith("avg/")]
    if not names:
        return None
    return line.printed[min(names, key=lambda name: name != AVERAGE.name)]

"""A paper's table as numbers: the printed value of every cell, ours, and both as shares of the full cache.

Averages are computed here from the cells, never taken from the paper. If the paper states another average, it is kept
beside ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from kvbench.bench.records import NOT_RUN
from kvbench.papers.forensics.exact import list_exact_cells
from kvbench.papers.measured.our_table import OurTable, Parts, TableLine, stored_scores
from kvbench.papers.spec.numbers import decimals
from kvbench.papers.spec.published import MARKS, Published
from kvbench.papers.spec.table_spec import BUDGET, MEANS, RATIO, RELATIVE, SCORE, SHARE, Column, TableRow
from kvbench.papers.spec.workloads import FAMILIES
from kvbench.papers.timed.row_matching import TimedCell as Timed
from kvbench.plan import presets
from kvbench.plan.advice import at_floor
from kvbench.report.data import CellResult
from kvbench.store.sample_reader import SampleReader
from kvbench.tasks.longbench import TASKS
from kvbench.tasks.metrics import metric, stats

AVERAGE = Column("avg", SCORE)
"""The column of averages. On a stand-in it leaves out tasks on which the model fails."""
ROUNDING = 2
"""In units of the last printed digit: rounding can explain so large a difference between a printed average and the
average of its printed cells."""


@dataclass(frozen=True)
class CellView:
    """One cell of a table: our number, the printed one, and the facts behind the marks and notes on both.

    status: measured, refused or failed (see ``reason``), missing, or ``none`` if the paper has no such cell. Timings
    may also be OOM.
    ours, published: the values in printed units, fractions in per cent. A share of a full cache that scores 0 is None.
    score: our score, also where ``ours`` is a share.
    scores: our score of each example that the full cache answered, too, on the scale from 0 to 1.
    published_full: the full cache's printed value.
    less_is_better: whether the score is a perplexity, and ``scores`` log losses.
    relative, published_relative: per cent of each side's full cache, or of each side's base row in an efficiency table.
    ci, relative_ci: the 95 % intervals of ``ours`` and ``relative``. A timing's ``ci`` is its pair of quartiles.
    mark: the sign of a suspect or repaired printed value (see published.MARKS).
    stated: the average that the paper prints, if its cells give another.
    floor: whether the model fails: its full cache scores hardly more than empty answers and guessing.
    full: the full cache's score on the same examples.
    budgeted: whether the share of tokens kept is shown.
    n, total: how many examples are measured, and how many there are.
    cell: the id of the result in the store; several ids if tasks are pooled.
    budget, published_budget: the share of the prompt's tokens that is kept, in per cent.
    printed: the characters on the page, or a fraction in per cent.
    exact: ✓ if the printed value follows from others without a model, or ``recomputed X`` if these give X instead.
    timed: the cell of an efficiency table; None in a table of scores.
    unlike: the conditions that differ from the paper's.
    unchanged: whether nothing was compressed, so that our number says nothing about the method.
    stand_in: whether another model than the paper's was measured, so that our number is a share of its full cache.
    empty: how many of the full cache's answers to the same examples are empty.
    """

    status: str = "none"
    reason: str = ""
    ours: float | None = None
    ci: tuple[float, float] | None = None
    relative: float | None = None
    relative_ci: tuple[float, float] | None = None
    published: float | None = None
    published_relative: float | None = None
    mark: str = ""
    stated: float | None = None
    floor: bool = False
    full: float | None = None
    budgeted: bool = False
    n: int = 0
    total: int = 0
    cell: str = ""
    budget: float | None = None
    published_budget: float | None = None
    printed: str = ""
    exact: str = ""
    timed: Timed | None = None
    unlike: tuple[str, ...] = ()
    unchanged: bool = False
    stand_in: bool = False
    empty: int = 0
    score: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict, repr=False)
    less_is_better: bool = False
    published_full: float | None = None

    @property
    def few(self) -> bool:
        """True if the number rests on fewer than stats.FEWEST examples."""
        return 0 < self.n < stats.FEWEST

    @property
    def delta(self) -> float | None:
        """The difference of ours minus the printed value; None if one of the two is missing.

        ``unlike`` names the conditions that differ from the paper's.
        """
        if self.ours is None or self.published is None:
            return None
        return self.ours - self.published


@dataclass(frozen=True)
class View:
    """A paper's table, ready to be shown.

    ours: the table with its run or timings.
    columns: the columns that are shown, averages last.
    rows: each row with its cells, one for each of ``columns``.
    """

    ours: OurTable
    columns: tuple[Column, ...]
    rows: tuple[tuple[TableLine, tuple[CellView, ...]], ...]


@dataclass(frozen=True)
class _OurScore:
    """The measured side of one number.

    result: the stored result, with its mean, interval and counts.
    pairs: scores [n, 2] of the method and of the full cache on the same examples.
    examples: the names of these examples.
    floor: whether the full cache is at the floor in one of the column's tasks.
    full: the full cache's score.
    share: the score in per cent of the full cache's. It has no value if the full cache scores 0.
    empty: how many of the full cache's answers are empty.
    """

    result: CellResult
    pairs: stats.Pairs
    examples: tuple[str, ...]
    floor: bool
    share: stats.Share
    full: float | None
    empty: int


@dataclass(frozen=True)
class _ColumnEntry:
    """A cell of a line with its column and our score. ``score`` is None if the column shows no scores."""

    column: Column
    cell: CellView
    score: _OurScore | None


def build_view(ours: OurTable, reader: SampleReader | None = None) -> View:
    """Build the view of a table: all of its cells, from the paper's data and from the store or the timings.

    reader: the reader of the run's samples, if the caller reads all of them, too; None: a dataset at a time is read.
    """
    table = ours.declared
    # values that follow from others on the page need no model, and show whether the printed value is right
    recomputed: dict[Published, str] = {}
    for value in list_exact_cells(table.paper, table.table):
        recomputed[value.cell] = "✓" if value.ok else f"recomputed {value.shown}"
    if ours.timings is not None:
        return _build_timed_view(ours, recomputed)
    # a budget is shown below its score; a table that prints only budgets shows them as columns
    columns = tuple(column for column in table.columns if column.quantity != BUDGET) or table.columns
    score_by_cells: dict[tuple[str, ...], _OurScore] = {}
    entries_by_line: list[list[_ColumnEntry]] = [[] for _ in ours.lines]
    for column in columns:
        column_reader = reader
        if reader is None and ours.run is not None:
            # a reader keeps all that it has read: with one for each column, one dataset is in memory at a time
            column_reader = SampleReader(ours.run.store)
        for line, entries in zip(ours.lines, entries_by_line, strict=True):
            score = _read_score(ours, line, column, score_by_cells, column_reader)
            cell = _build_score_cell(ours, line, column, score, recomputed)
            entries.append(_ColumnEntry(column, cell, score))
    means: tuple[Column, ...] = ()
    # the paper may print no average
    if ours.declared.scores and any(cell.dataset in MEANS for cell in ours.declared.printed):
        means = (AVERAGE,)
    rows = []
    for line, entries in zip(ours.lines, entries_by_line, strict=True):
        cells = [entry.cell for entry in entries]
        cells += [_build_average_cell(ours, line, entries) for _ in means]
        rows.append((line, tuple(cells)))
    return View(ours, columns + means, tuple(rows))


def _build_timed_view(ours: OurTable, recomputed: Mapping[Published, str]) -> View:
    columns = ours.declared.columns
    rows = []
    for line in ours.lines:
        cells = [_build_timed_cell(ours, line.row.cells.get(column.name), recomputed) for column in columns]
        rows.append((line, tuple(cells)))
    return View(ours, columns, tuple(rows))


def _build_timed_cell(ours: OurTable, printed: Published | None, recomputed: Mapping[Published, str]) -> CellView:
    if printed is None or ours.timings is None:
        return CellView()
    cell = ours.timings.cells[printed]
    return CellView(
        status="missing" if cell.status == NOT_RUN else cell.status,
        reason=cell.reason,
        ours=cell.value,
        ci=cell.spread,
        relative=_convert_to_percent(cell.ratio),
        published=printed.points,
        published_relative=_convert_to_percent(cell.published_ratio),
        mark=MARKS.get(printed.certainty, ""),
        printed=printed.printed,
        exact=recomputed.get(printed, ""),
        timed=cell,
    )


def _convert_to_percent(ratio: float | None) -> float | None:
    """Return a ratio in per cent; None stays None."""
    return None if ratio is None else 100 * ratio


def _read_score(
    ours: OurTable,
    line: TableLine,
    column: Column,
    score_by_cells: dict[tuple[str, ...], _OurScore],
    reader: SampleReader | None,
) -> _OurScore | None:
    """Return a line's measured score in a column; None if the column shows no scores."""
    if column.quantity != SCORE:
        return None
    cells = ours.find_cells(line, column)
    ids = tuple(cell.id for _, cell in cells)
    # without cells all lines would share the key (), although they have different reasons
    if cells and ids in score_by_cells:
        return score_by_cells[ids]
    full_cells = ours.find_full_cells(line, column)
    pairs_by_example = _pair_scores(cells, full_cells, reader)
    # an example that is asked in several ways (MDQA's three positions) counts as one, with its mean scores
    pairs = stats.average_by_example(pairs_by_example, width=2)
    # the full cache's scores on the examples that the method answered, too
    full_scores = pairs[:, 1]
    groups = [group for group, _ in full_cells]
    floor = any(at_floor(group.task, full_scores) for group in groups)
    # smaller log losses are better, so their share is inverse; only their metrics have a ``formula``
    losses = any(metric(group.task.metric).formula is not None for group in groups)
    share = stats.share_of_full([pairs], log_losses=losses)
    full_score = None
    if len(pairs) and groups:
        # the tasks of one dataset have one metric
        first_group = groups[0]
        full_score = metric(first_group.task.metric).show(float(full_scores.mean()))
    score = _OurScore(
        ours.read_result(line, column, reader),
        pairs,
        tuple(pairs_by_example),
        floor,
        share=share,
        full=full_score,
        empty=_count_empty(full_cells, reader),
    )
    if cells:
        score_by_cells[ids] = score
    return score


def _pair_scores(cells: Parts, full_cells: Parts, reader: SampleReader | None) -> dict[str, list[tuple[float, float]]]:
    scores_by_example: dict[str, list[tuple[float, float]]] = {}
    if cells:
        # cells come from the run's groups
        assert reader is not None
        for (group, cell), (_, full_cell) in zip(cells, full_cells, strict=True):
            own_scores = stored_scores(reader, group, cell)
            full_scores = stored_scores(reader, group, full_cell)
            for example_id in sorted(own_scores.keys() & full_scores.keys()):
                pair = (own_scores[example_id], full_scores[example_id])
                scores_by_example.setdefault(example_id, []).append(pair)
    return scores_by_example


def _build_score_cell(
    ours: OurTable, line: TableLine, column: Column, score: _OurScore | None, recomputed: Mapping[Published, str]
) -> CellView:
    if score is not None:
        result = score.result
    else:
        result = CellResult(task="", cell="", status="missing", reason=line.skipped)
    printed = line.row.cells.get(column.name)
    if printed is None:
        return CellView(reason=result.reason or "")
    budget = None
    if column.quantity == SCORE:
        budget = line.row.cells.get(Column(column.dataset, BUDGET).name)
    printed_full = _find_printed_full(ours, line, column)
    # the printed side does not depend on measurements
    entry = CellView(
        status=result.status,
        reason=result.reason or "",
        published=printed.points,
        published_relative=_compute_printed_share(printed, printed_full),
        published_full=None if printed_full is None else printed_full.points,
        mark=MARKS.get(printed.certainty, ""),
        published_budget=None if budget is None else budget.value,
        budgeted=budget is not None,
        printed=printed.shown,
        exact=recomputed.get(printed, ""),
        less_is_better=printed.metric == "perplexity",
    )
    summary = result.summary
    if score is None or summary is None or summary.score is None:
        return entry
    # if the paper prints shares of its full cache, our share is compared with them
    value: float | None = summary.score
    ci = summary.ci
    if printed.metric == RATIO:
        value, ci = score.share.point, score.share.ci
    # another model is itself another condition, and its scores have no difference to the paper's
    unlike = tuple(_list_unlike_conditions(ours, line, column)) if not ours.stand_in else ()
    kept_percent = 100 * summary.kept / summary.prompt_tokens if summary.prompt_tokens else None
    return replace(
        entry,
        ours=value,
        ci=ci,
        relative=score.share.point,
        relative_ci=score.share.ci,
        floor=score.floor,
        full=score.full,
        unlike=unlike,
        n=summary.n,
        total=summary.of,
        cell=result.cell,
        unchanged=result.unchanged,
        stand_in=ours.stand_in,
        empty=score.empty,
        score=summary.score,
        scores=dict(zip(score.examples, score.pairs[:, 0].tolist(), strict=True)),
        budget=kept_percent,
    )


def _count_empty(full_cells: Parts, reader: SampleReader | None) -> int:
    # without a run there are no cells
    if reader is None:
        return 0
    count = 0
    for group, cell in full_cells:
        samples = reader.read(cell.id)
        for example in group.examples:
            # a text that is scored by its likelihood has no answer of the model's own
            if example.id not in samples or example.scored is not None:
                continue
            if not samples[example.id].prediction.strip():
                count += 1
    return count


def _list_unlike_conditions(ours: OurTable, line: TableLine, column: Column) -> Iterator[str]:
    table = ours.declared
    # a group has the examples of one task; a column may be the mean of several tasks
    groups = [group for group, _ in ours.find_cells(line, column)]
    if table.unlike:
        yield table.unlike
    if table.extended and column.dataset in TASKS and TASKS[column.dataset].extended:
        yield "the paper's scores fit LongBench-E, ours are of LongBench's own split"
    if any(group.task.id.startswith(FAMILIES["mini"]) for group in groups):
        yield "ours are of MiniLongBench's examples"
    yield from dict.fromkeys(group.task.note for group in groups if group.task.note)
    # the user may have chosen another prompt than the paper's preset
    if table.preset and ours.run is not None and ours.run.cfg.preset == table.preset:
        preset_prompt = presets.values(table.preset, "").get("prompt")
        if preset_prompt is not None and ours.run.cfg.prompt.name != preset_prompt:
            yield f"prompt={ours.run.cfg.prompt.name} here, {preset_prompt} there"
    if ours.typed:
        yield f"{' '.join(ours.typed)} here"


def _build_average_cell(ours: OurTable, line: TableLine, entries: Sequence[_ColumnEntry]) -> CellView:
    scored = [entry for entry in entries if entry.column.quantity == SCORE]
    # without a run the table only shows the paper's side, which has all columns
    readable = [entry for entry in scored if ours.run is None or not ours.why_absent(line, entry.column)]
    if not readable:
        return CellView(status="missing")
    cells = [entry.cell for entry in readable]
    # a mean over some columns cannot contradict a mean that the paper states over all of them
    averages_all = len(readable) == len(scored)
    average = _build_printed_average(ours, line, readable, compare_stated=averages_all)
    if any(cell.status != "measured" for cell in cells):
        return average
    averages_shares = ours.declared.average in (RELATIVE, SHARE)
    pairs_by_task = [entry.score.pairs for entry in readable if entry.score is not None]
    share = stats.share_of_full(pairs_by_task, of_ratios=averages_shares)
    # an average of shares is taken over the tasks' shares, not from the means of both sides
    values = [cell.relative if averages_shares else cell.ours for cell in cells]
    known_values = [value for value in values if value is not None]
    mean = None
    if known_values:
        mean = fmean(known_values) - _find_average_offset(ours, line)
    conditions: dict[str, None] = {}
    for cell in cells:
        conditions |= dict.fromkeys(cell.unlike)
    return replace(
        average,
        status="measured",
        ours=mean,
        relative=share.point,
        relative_ci=share.ci,
        # a mean over tasks rests on all of their examples
        n=sum(cell.n for cell in cells),
        stand_in=ours.stand_in,
        total=sum(cell.total for cell in cells),
        unlike=tuple(conditions),
    )


def _build_printed_average(
    ours: OurTable, line: TableLine, readable: Sequence[_ColumnEntry], compare_stated: bool
) -> CellView:
    cells = [entry.cell for entry in readable]
    full_cells = [_find_printed_full(ours, line, entry.column) for entry in readable]
    averages_shares = ours.declared.average in (RELATIVE, SHARE)
    mean, share = _average_printed(cells, full_cells, averages_shares)
    published = None
    contradicting = None
    if mean is not None:
        published = mean - _find_average_offset(ours, line)
        if compare_stated:
            contradicting = _find_contradicting_average(line.row, published)
    # if one of the averaged columns has no number, the average has no number either, and the first such column says why
    unmeasured = [cell for cell in cells if cell.status != "measured"]
    deciding, *_ = unmeasured or cells
    is_missing = any(cell.status in ("missing", "none") for cell in cells)
    return CellView(
        status="missing" if is_missing else deciding.status,
        reason=deciding.reason,
        published=published,
        published_relative=share,
        stated=contradicting,
    )


def _find_contradicting_average(row: TableRow, computed: float) -> float | None:
    stated = _find_stated_average(row)
    if stated is None or stated.value is None:
        return None
    # decimals(printed) digits stand behind the point, so 10^-decimals is a unit of the last digit
    rounding = ROUNDING * 10.0 ** -decimals(stated.printed)
    # NaN is within no distance
    if abs(stated.value - computed) <= rounding:
        return None
    return stated.value


def _find_average_offset(ours: OurTable, line: TableLine) -> int:
    if ours.declared.average != RELATIVE:
        return 0
    # such a paper prints the full cache's average as a share nevertheless, as 100
    stated = _find_stated_average(line.row)
    if stated is not None and stated.metric == RATIO:
        return 0
    return 100


def _find_stated_average(row: TableRow) -> Published | None:
    """Return the average that the paper prints in a row, in whatever unit; None without such an average."""
    if AVERAGE.name in row.cells:
        return row.cells[AVERAGE.name]
    # an average of another quantity than scores has the quantity's name behind it
    for name, cell in row.cells.items():
        if name.startswith("avg/"):
            return cell
    return None


def _average_printed(
    cells: Sequence[CellView], full_cells: Sequence[Published | None], averages_shares: bool
) -> tuple[float | None, float | None]:
    values = [cell.published_relative if averages_shares else cell.published for cell in cells]
    known_values = [value for value in values if value is not None]
    # the paper prints no average over only some of the columns
    if len(known_values) < len(cells):
        return None, None
    mean = fmean(known_values)
    if averages_shares:
        return mean, mean
    full_values = [full.points for full in full_cells if full is not None and full.points is not None]
    if len(full_values) < len(full_cells):
        return mean, None
    full_mean = fmean(full_values)
    if not full_mean:
        return mean, None
    # share of the means, not the mean of shares: sum(values) / sum(full values), in per cent
    return mean, 100 * mean / full_mean


def _find_printed_full(ours: OurTable, line: TableLine, column: Column) -> Published | None:
    """Return the full cache's printed cell for a line's model and a column; None if the paper prints none."""
    full = ours.declared.full_row(line.row.model)
    if full is None:
        return None
    return full.cells.get(column.name)


def _compute_printed_share(value: Published, full: Published | None) -> float | None:
    """Return a printed value in per cent of the paper's full-cache value: 100 value / full, or None without both."""
    if value.metric == RATIO:
        return value.value
    if full is None or value.points is None or not full.points:
        return None
    # a smaller perplexity is better, so its share is full / value
    if value.metric == "perplexity":
        return 100 * full.points / value.points
    return 100 * value.points / full.points

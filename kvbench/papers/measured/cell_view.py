"""A paper's table as numbers: every cell with what is printed, what we measured, and both as a share of the full cache.

Averages are computed here from the cells, never taken from the paper; what it states is kept beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from kvbench.bench.records import NOT_RUN
from kvbench.papers.forensics.exact import exact
from kvbench.papers.measured.our_table import OurTable, TableLine, scores
from kvbench.papers.spec.numbers import decimals
from kvbench.papers.spec.published import MARKS, Published
from kvbench.papers.spec.table_spec import BUDGET, MEAN, MEANS, RATIO, RELATIVE, SCORE, SHARE, Column
from kvbench.papers.spec.workloads import FAMILIES
from kvbench.papers.timed.row_matching import TimedCell as Timed
from kvbench.plan import presets
from kvbench.plan.advice import at_floor
from kvbench.report.report import CellResult
from kvbench.tasks.longbench import TASKS
from kvbench.tasks.metrics import metric, stats

AVERAGE = Column("avg", SCORE)
OF_ALL = Column("avg", "all")
"""The average over all tasks, beside that over the tasks above the floor."""
WIDE = 100.0
"""Percentage points: a share of the full cache with a wider interval is no number."""
ROUNDING = 2
"""Units of a printed average's last digit by which rounding can explain a difference to that of its printed cells."""


@dataclass(frozen=True)
class CellView:
    """One cell of a table: our number, the printed one, and what marks and notes say about both.

    status: measured, refused (see ``reason``), missing, or none if the paper has no such cell; OOM for timings, too.
    ours, published: the values in printed units, fractions in per cent.
    relative, published_relative: per cent of each side's full cache, or of its base row in an efficiency table.
    stated: an average that the paper prints although its cells give another.
    floor: whether the full cache scores too little for a share of it; full: its score on the same examples.
    budgeted: whether the share of tokens kept is shown.
    printed: the characters on the page, or a fraction in per cent.
    exact: ✓ if the printed value follows without a model, else the value that follows.
    timed: the cell of an efficiency table.
    n, of: how many examples are measured, and how many there are.
    unlike: the conditions that differ from the paper's.
    unchanged: whether nothing was compressed, so that our number says nothing about the method.
    stand_in: whether another model than the paper's was measured, so that our number is a share of its full cache.
    empty: how many of the full cache's answers to the same examples are empty.
    wide: whether the interval of a share is wider than WIDE, or has no end.
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
    of: int = 0
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
    wide: bool = False

    @property
    def few(self) -> bool:
        """Return True for a share of so few examples that it says nothing."""
        return self.stand_in and 0 < self.n < stats.FEWEST

    @property
    def delta(self) -> float | None:
        """Return ours minus what is printed; ``unlike`` names the conditions that differ from the paper's."""
        return None if self.ours is None or self.published is None else self.ours - self.published


@dataclass(frozen=True)
class View:
    """A table with all of its entries: a list per row, one entry per column, averages last."""

    ours: OurTable
    columns: tuple[Column, ...]
    rows: tuple[tuple[TableLine, tuple[CellView, ...]], ...]


@dataclass(frozen=True)
class _Read:
    """The measured side of one number: its summary, the pairs [n, 2] with the full cache, and their share."""

    value: CellResult
    pairs: stats.Pairs
    floor: bool
    share: stats.Share
    full: float | None


def view(ours: OurTable) -> View:
    """Build all entries of a table, from the paper's data and from the store."""
    table = ours.declared
    recomputed = {e.cell: "✓" if e.ok else f"recomputed {e.shown}" for e in exact(table.paper, table.table)}
    if ours.timings is not None:
        rows = tuple(
            (x, tuple(_timed(ours, x.row.cells.get(c.name), recomputed) for c in table.columns)) for x in ours.lines
        )
        return View(ours, table.columns, rows)
    # what a score kept of the cache stands below the score
    columns = tuple(c for c in table.columns if c.what != BUDGET) or table.columns
    read_by_cells: dict[tuple[str, ...], _Read] = {}
    reads = [[_read(ours, line, c, read_by_cells) for c in columns] for line in ours.lines]
    entries = [
        tuple(_entry(ours, line, c, read, recomputed) for c, read in zip(columns, row, strict=True))
        for line, row in zip(ours.lines, reads, strict=True)
    ]
    means: tuple[Column, ...] = ()
    if table.scores and any(c.dataset in MEANS for c in table.printed):
        every = [e for row in entries for e in row]
        left_out = any(e.floor for e in every) or len({e.few for e in every if e.n}) > 1
        means = (AVERAGE, OF_ALL) if ours.stand_in and table.average == MEAN and left_out else (AVERAGE,)
    rows = tuple(
        (line, (*row, *(_average(ours, line, list(zip(columns, row, read, strict=True)), m) for m in means)))
        for line, row, read in zip(ours.lines, entries, reads, strict=True)
    )
    return View(ours, (*columns, *means), rows)


def _timed(ours: OurTable, printed: Published | None, recomputed: Mapping[Published, str]) -> CellView:
    """Build an entry of an efficiency table."""
    if printed is None or ours.timings is None:
        return CellView()
    cell = ours.timings.cells[printed]
    return CellView(
        status="missing" if cell.status == NOT_RUN else cell.status,
        reason=cell.reason,
        ours=cell.value,
        ci=cell.spread,
        relative=None if cell.ratio is None else 100 * cell.ratio,
        published=printed.points,
        published_relative=None if cell.published_ratio is None else 100 * cell.published_ratio,
        mark=MARKS.get(printed.certainty, ""),
        printed=printed.printed,
        exact=recomputed.get(printed, ""),
        timed=cell,
    )


def _read(ours: OurTable, line: TableLine, column: Column, read_by_cells: dict[tuple[str, ...], _Read]) -> _Read | None:
    """Return our score in a column, read once for all cells that show it; None for columns of other values."""
    if column.what != SCORE:
        return None
    cells = ours.cells(line, column)
    ids = tuple(c.id for _, c in cells)
    if cells and ids in read_by_cells:
        return read_by_cells[ids]
    full_cells = ours.full(line, column)
    groups = [group for group, _ in full_cells]
    by_example: dict[str, list[tuple[float, float]]] = {}
    for (group, own_cell), (_, full_cell) in zip(cells, full_cells if cells else (), strict=True):
        assert ours.run is not None
        own, full_scores = (scores(ours.run.store, group, cell) for cell in (own_cell, full_cell))
        for e in sorted(own.keys() & full_scores.keys()):
            by_example.setdefault(e, []).append((own[e], full_scores[e]))
    # an example that is asked in several ways (MDQA's three positions) is one, with its mean scores
    value, pairs = ours.value(line, column), stats.by_example(by_example, 2)
    floor = any(at_floor(g.task, pairs[:, 1]) for g in groups)
    # of log losses, less is better
    losses = any(metric(g.task.metric).shown is not None for g in groups)
    share = stats.Share() if floor else stats.share([pairs], log_losses=losses)
    full = metric(groups[0].task.metric).show(float(pairs[:, 1].mean())) if len(pairs) and groups else None
    result = _Read(value, pairs, floor, share, full)
    if cells:
        read_by_cells[ids] = result
    return result


def _entry(
    ours: OurTable, line: TableLine, column: Column, read: _Read | None, recomputed: Mapping[Published, str]
) -> CellView:
    """Build an entry of a table of scores."""
    printed = line.row.cells.get(column.name)
    if printed is None:
        return CellView(reason=(line.skipped if read is None else read.value.reason) or "")
    budget = line.row.cells.get(Column(column.dataset, BUDGET).name) if column.what == SCORE else None
    result = CellResult("", "", "missing", reason=line.skipped) if read is None else read.value
    entry = CellView(
        status=result.status,
        reason=result.reason or "",
        published=printed.points,
        published_relative=_share(printed, _printed_full(ours, line, column)),
        mark=MARKS.get(printed.certainty, ""),
        published_budget=budget.value if budget else None,
        budgeted=budget is not None,
        printed=printed.shown,
        exact=recomputed.get(printed, ""),
    )
    summary = result.summary
    if read is None or summary is None or summary.score is None:
        return entry
    score, ci = (read.share.point, read.share.ci) if printed.metric == RATIO else (summary.score, summary.ci)
    return replace(
        entry,
        ours=score,
        ci=ci,
        relative=read.share.point,
        relative_ci=read.share.ci,
        floor=read.floor,
        full=read.full,
        unlike=() if ours.stand_in else tuple(_unlike(ours, line, column)),
        n=summary.n,
        of=summary.of,
        cell=result.cell,
        unchanged=result.unchanged,
        stand_in=ours.stand_in,
        empty=_empty(ours, line, column),
        wide=ours.stand_in and _wide(line, read.share),
        budget=100 * summary.kept / summary.prompt_tokens if summary.prompt_tokens else None,
    )


def _wide(line: TableLine, share: stats.Share) -> bool:
    """Tell whether a share says nothing: its interval is wider than WIDE or has no end. The full cache's is 100."""
    if share.point is None or line.row.method == "full":
        return False
    return share.ci is None or share.ci[1] - share.ci[0] > WIDE


def _empty(ours: OurTable, line: TableLine, column: Column) -> int:
    """Return how many answers of the full cache are empty, of those to a line's prompts in a column."""
    count = 0
    for group, cell in ours.full(line, column):
        samples = ours.run.store.samples(cell.id) if ours.run is not None else {}
        texts = [samples[e.id].prediction for e in group.examples if e.id in samples and not e.tokens]
        count += sum(not text.strip() for text in texts)
    return count


def _unlike(ours: OurTable, line: TableLine, column: Column) -> Iterator[str]:
    """Yield the conditions under which the paper's score of a column differs from ours."""
    table, groups = ours.declared, [group for group, _ in ours.cells(line, column)]
    if table.unlike:
        yield table.unlike
    if table.extended and column.dataset in TASKS and TASKS[column.dataset].extended:
        yield "the paper's scores fit LongBench-E, ours are of LongBench's own split"
    if any(g.task.id.startswith(FAMILIES["mini"]) for g in groups):
        yield "ours are of MiniLongBench's examples"
    yield from dict.fromkeys(g.task.note for g in groups if g.task.note)
    if table.preset and ours.run is not None and ours.run.cfg.preset == table.preset:
        preset_prompt = presets.values(table.preset, "").get("prompt")
        if preset_prompt is not None and ours.run.cfg.prompt.name != preset_prompt:
            yield f"prompt={ours.run.cfg.prompt.name} here, {preset_prompt} there"
    if ours.typed:
        yield f"{' '.join(ours.typed)} here"


def _average(
    ours: OurTable, line: TableLine, columns: Sequence[tuple[Column, CellView, _Read | None]], kind: Column
) -> CellView:
    """Return the entry of a line's average, taken as the paper does, over the columns that can be read here.

    On a stand-in the mean leaves out columns where the full cache is at the floor, and those of too few examples
    unless all are; that of OF_ALL keeps both.
    """
    scored = [(c, e, read) for c, e, read in columns if c.what == SCORE]
    readable = [(c, e, read) for c, e, read in scored if not (ours.run and ours.why_absent(line, c))]
    if ours.stand_in and kind is AVERAGE:
        above = [(c, e, read) for c, e, read in readable if not e.floor]
        readable = [(c, e, read) for c, e, read in above if not e.few] or above
    if not readable:
        return CellView(status="missing")
    entries = [e for _, e, _ in readable]
    ratios = ours.declared.average in (RELATIVE, SHARE)
    stated = line.row.cells.get(AVERAGE.name) or next(
        (c for name, c in line.row.cells.items() if name.startswith("avg/")), None
    )
    # of the full cache itself the paper prints the share, 100, not how far it is from that
    is_full = stated is not None and stated.metric == RATIO
    offset = 100 if ours.declared.average == RELATIVE and not is_full else 0
    mean, share = _printed_average([(_printed_full(ours, line, c), e) for c, e, _ in readable], ratios)
    published, stated_otherwise = None if mean is None else mean - offset, None
    if stated is not None and stated.value is not None and published is not None and len(readable) == len(scored):
        differs = abs(stated.value - published) > ROUNDING * 10.0 ** -decimals(stated.printed)
        stated_otherwise = stated.value if differs else None
    entry = CellView(
        status="missing" if any(e.status in ("missing", "none") for e in entries) else entries[0].status,
        reason=entries[0].reason,
        published=published,
        published_relative=share,
        stated=stated_otherwise,
    )
    if any(e.status != "measured" or e.ours is None for e in entries):
        return entry
    share_of_full = stats.share([read.pairs for _, _, read in readable if read is not None], of_ratios=ratios)
    values = [s for s in (e.relative if ratios else e.ours for e in entries) if s is not None]
    return replace(
        entry,
        status="measured",
        ours=fmean(values) - offset if values else None,
        relative=share_of_full.point,
        relative_ci=share_of_full.ci,
        # a mean over tasks rests on all of their examples
        n=sum(e.n for e in entries),
        stand_in=ours.stand_in,
        wide=ours.stand_in and _wide(line, share_of_full),
        of=sum(e.of for e in entries),
        unlike=tuple(dict.fromkeys(reason for e in entries for reason in e.unlike)),
    )


def _printed_average(
    entries: Sequence[tuple[Published | None, CellView]], ratios: bool
) -> tuple[float | None, float | None]:
    """Return (mean, share): the mean of the printed values or of their shares, and its own share of the full cache."""
    values = [v for v in (e.published_relative if ratios else e.published for _, e in entries) if v is not None]
    if len(values) < len(entries):
        return None, None
    if ratios:
        return fmean(values), fmean(values)
    full_values = [whole.points for whole, _ in entries if whole is not None and whole.points is not None]
    full = fmean(full_values) if len(full_values) == len(entries) else 0
    return fmean(values), 100 * fmean(values) / full if full else None


def _printed_full(ours: OurTable, line: TableLine, column: Column) -> Published | None:
    """Return the printed cell of the full cache in a line's model and a column."""
    full = ours.declared.full_row(line.row.model)
    return None if full is None else full.cells.get(column.name)


def _share(value: Published, whole: Published | None) -> float | None:
    """Return a printed value in per cent of the printed full cache; of a perplexity the inverse."""
    if value.metric == RATIO:
        return value.value
    if whole is None or value.points is None or not whole.points:
        return None
    # less is better of a perplexity: its share is full / value
    numerator, denominator = (
        (whole.points, value.points) if value.metric == "perplexity" else (value.points, whole.points)
    )
    return 100 * numerator / denominator

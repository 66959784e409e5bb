"""A paper's table as numbers: every cell with what is printed, what we measured, and both as a share of the full cache.

Averages are computed here from the cells, never taken from the paper; what it states is kept beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from kvbench.bench.records import NOT_RUN
from kvbench.metrics import metric, stats
from kvbench.papers.forensics.exact import Exact, exact
from kvbench.papers.measured.our_table import OurTable, TableLine
from kvbench.papers.spec.published import MARKS, Published
from kvbench.papers.spec.table_spec import BUDGET, MEAN, MEANS, RATIO, RELATIVE, SCORE, SHARE, Column, TableRow
from kvbench.papers.spec.workloads import FAMILIES
from kvbench.papers.timed.row_matching import TimedCell as Timed
from kvbench.run import presets
from kvbench.run.advice import at_floor
from kvbench.run.results import CellResult
from kvbench.tasks.longbench import TASKS

AVERAGE = Column("avg", SCORE)
OF_ALL = Column("avg", "all")
"""Beside the average over the tasks above the floor: that over all of them."""
ROUNDING = 2
"""Units of a printed average's last digit by which rounding can explain a difference to that of its printed cells."""


@dataclass(frozen=True)
class CellView:
    """One cell. Scores in printed units; ``relative`` and ``published_relative`` in per cent of the own full cache.

    ``status``: measured, refused (``reason`` says why), missing, or none where the paper has no such cell. ``stated``
    is an average that the paper prints although its cells give another. ``floor``: the full cache scores too little for
    a share of it; ``full`` is its score on the same examples. ``budgeted``: what was kept is shown. ``printed`` are its
    characters on the page, a fraction in per cent; ``exact`` is ✓ where what is printed follows without a model, or
    what follows instead. Of an efficiency table ``timed`` is its cell, the shares are of the base row, and ``status``
    can be OOM, too.
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

    @property
    def delta(self) -> float | None:
        """Ours minus what is printed; where ``unlike`` says why not, under other conditions than the paper's."""
        return None if self.ours is None or self.published is None else self.ours - self.published


@dataclass(frozen=True)
class View:
    """A table with all of its entries: one list per row, a column each, the average last where there is one."""

    ours: OurTable
    columns: tuple[Column, ...]
    rows: tuple[tuple[TableLine, tuple[CellView, ...]], ...]


@dataclass(frozen=True)
class _Reading:
    """A table being read: several columns and rows can show one number, which is read from the store once."""

    ours: OurTable
    exact: Mapping[Published, Exact]
    known: dict[Any, Any] = field(default_factory=dict)

    def once(self, what: str, line: TableLine, column: Column, read: Callable[[], Any]) -> Any:
        """``read`` of the cells behind a number, read once."""
        cells = tuple(c.id for _, c in self.ours.cells(line, column))
        if not cells:
            return read()
        if (what, cells) not in self.known:
            self.known[what, cells] = read()
        return self.known[what, cells]

    def value(self, line: TableLine, column: Column) -> CellResult:
        found: CellResult = self.once("value", line, column, lambda: self.ours.value(line, column))
        return found

    def paired(self, line: TableLine, column: Column) -> stats.Pairs:
        found: stats.Pairs = self.once("pairs", line, column, lambda: _pairs(self.ours, line, column))
        return found

    def floored(self, line: TableLine, column: Column) -> bool:
        """Whether the full cache scores too little on what a line reads in a column."""
        groups = [group for group, _ in self.ours.full(line, column)]
        pairs = self.paired(line, column)
        return any(at_floor(g.task, pairs[:, 1]) for g in groups)

    def relative(self, line: TableLine, column: Column) -> stats.Share:
        def read() -> stats.Share:
            return stats.share([self.paired(line, column)], log_losses=_lower(self.ours, line, column))

        found: stats.Share = self.once("share", line, column, read)
        return found


def view(ours: OurTable) -> View:
    """All entries of a table, read from the paper's data and from the store."""
    if ours.timings is not None:
        return _timed(ours)
    # what a score kept of the cache stands below the score
    columns = tuple(c for c in ours.declared.columns if c.what != BUDGET) or ours.declared.columns
    averaged = bool(ours.declared.scores) and any(c.dataset in MEANS for c in ours.declared.printed)
    table = ours.declared
    reading = _Reading(ours, {e.cell: e for e in exact(table.paper, table.table)})
    entries = [(line, tuple(_entry(reading, line, c) for c in columns)) for line in ours.lines]
    split = ours.stand_in and table.average == MEAN and any(e.floor for _, row in entries for e in row)
    means = ((AVERAGE, OF_ALL) if split else (AVERAGE,)) if averaged else ()
    rows = tuple((line, (*row, *(_average(reading, line, columns, row, m) for m in means))) for line, row in entries)
    return View(ours, (*columns, *means), rows)


def _timed(ours: OurTable) -> View:
    """The entries of an efficiency table."""
    assert ours.timings is not None
    found = {e.cell: e for e in exact(ours.declared.paper, ours.declared.table)}

    def entry(printed: Published | None) -> CellView:
        if printed is None:
            return CellView()
        assert ours.timings is not None
        cell = ours.timings.cells[printed]
        return CellView(
            status="missing" if cell.status == NOT_RUN else cell.status,
            reason=cell.reason,
            ours=cell.value,
            ci=cell.spread,
            relative=_percent(cell.ratio),
            published=printed.points,
            published_relative=_percent(cell.published_ratio),
            mark=MARKS.get(printed.certainty, ""),
            printed=printed.printed,
            exact=_exact(found.get(printed)),
            timed=cell,
        )

    columns = ours.declared.columns
    rows = ((line, tuple(entry(line.row.cells.get(c.name)) for c in columns)) for line in ours.lines)
    return View(ours, columns, tuple(rows))


def _percent(ratio: float | None) -> float | None:
    return None if ratio is None else 100 * ratio


def _entry(reading: _Reading, line: TableLine, column: Column) -> CellView:
    ours = reading.ours
    printed = line.row.cells.get(column.name)
    budget = line.row.cells.get(Column(column.dataset, BUDGET).name) if column.what == SCORE else None
    whole = _printed_full(ours, line.row, column)
    found = CellResult("", "", "missing", reason=line.skipped)
    if column.what == SCORE:
        found = reading.value(line, column)
    base = CellView(
        status=found.status if printed is not None else "none",
        reason=found.reason or "",
        published=printed.points if printed else None,
        published_relative=_share(printed, whole),
        mark=MARKS.get(printed.certainty, "") if printed else "",
        published_budget=budget.value if budget else None,
        budgeted=budget is not None,
        printed=printed.shown if printed else "",
        exact=_exact(reading.exact.get(printed)) if printed else "",
    )
    means = found.summary
    if printed is None or means is None or means.score is None:
        return base
    floor = reading.floored(line, column)
    share = stats.Share() if floor else reading.relative(line, column)
    score, ci = (share.point, share.ci) if printed.metric == RATIO else (means.score, means.ci)
    return replace(
        base,
        ours=score,
        ci=ci,
        relative=share.point,
        relative_ci=share.ci,
        floor=floor,
        full=_whole(reading, line, column),
        unlike=() if ours.stand_in else tuple(_unlike(ours, line, column)),
        n=means.n,
        of=means.of,
        cell=found.cell,
        budget=100 * means.kept / means.prompt_tokens if means.prompt_tokens else None,
    )


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
    if ours.run is not None and ours.run.cfg.preset == table.preset:
        theirs = presets.values(table.preset, "").get("prompt")
        if theirs is not None and ours.run.cfg.prompt.name != theirs:
            yield f"prompt={ours.run.cfg.prompt.name} here, {theirs} there"
    if ours.typed:
        yield f"{' '.join(ours.typed)} here"


def _whole(reading: _Reading, line: TableLine, column: Column) -> float | None:
    """The full cache's score, in printed units, on the examples that the line has."""
    pairs, groups = reading.paired(line, column), [group for group, _ in reading.ours.full(line, column)]
    return metric(groups[0].task.metric).show(float(pairs[:, 1].mean())) if len(pairs) and groups else None


def _average(
    reading: _Reading, line: TableLine, columns: Sequence[Column], entries: Sequence[CellView], kind: Column = AVERAGE
) -> CellView:
    """The mean over columns as the paper takes it, both sides over the same: those that can be read here.

    On a stand-in of those only where the full cache is above the floor, but for OF_ALL.
    """
    ours = reading.ours
    relative = ours.declared.average in (RELATIVE, SHARE)
    scored = [(c, e) for c, e in zip(columns, entries, strict=True) if c.what == SCORE]
    here = [(c, e) for c, e in scored if not (ours.run and ours.why_absent(line, c))]
    if ours.stand_in and kind is AVERAGE:
        here = [(c, e) for c, e in here if not e.floor]
    stated = line.row.cells.get(AVERAGE.name) or next(
        (c for name, c in line.row.cells.items() if name.startswith("avg/")), None
    )
    if not here:
        return CellView(status="missing")
    columns, entries = zip(*here, strict=True)
    # of the full cache itself the paper prints the share, 100, not how far it is from that
    whole = stated is not None and stated.metric == RATIO
    less = 100 if ours.declared.average == RELATIVE and not whole else 0
    printed = [e.published_relative if relative else e.published for e in entries]
    known = [p for p in printed if p is not None]
    published = fmean(known) - less if len(known) == len(entries) else None
    differs = (
        stated is not None
        and stated.value is not None
        and published is not None
        and len(here) == len(scored)
        and abs(stated.value - published) > ROUNDING * 10.0 ** -_decimals(stated)
    )
    base = CellView(
        status="missing" if any(e.status in ("missing", "none") for e in entries) else entries[0].status,
        reason=entries[0].reason,
        published=published,
        published_relative=_printed_average_share(ours, line.row, columns, known, relative),
        stated=stated.value if differs and stated is not None else None,
    )
    if any(e.status != "measured" or e.ours is None for e in entries):
        return base
    scores = [e.relative if relative else e.ours for e in entries]
    share = stats.share([reading.paired(line, c) for c in columns], of_ratios=relative)
    known_scores = [s for s in scores if s is not None]
    return replace(
        base,
        status="measured",
        ours=fmean(known_scores) - less if known_scores else None,
        relative=share.point,
        relative_ci=share.ci,
        n=min(e.n for e in entries),
        of=max(e.of for e in entries),
        unlike=tuple(dict.fromkeys(reason for e in entries for reason in e.unlike)),
    )


def _decimals(cell: Published) -> int:
    return sum(c.isdigit() for c in cell.printed.partition(".")[2])


def _exact(found: Exact | None) -> str:
    """✓ where a printed value can be recomputed and is right, what it should be where it is not, else nothing."""
    return "" if found is None else "✓" if found.ok else f"recomputed {found.shown}"


def _printed_full(ours: OurTable, row: TableRow, column: Column) -> Published | None:
    full = ours.declared.full_row(row.model)
    return None if full is None else full.cells.get(column.name)


def _share(value: Published | None, whole: Published | None) -> float | None:
    """A printed value in per cent of the printed full cache; of a perplexity, the other way round."""
    if value is not None and value.metric == RATIO:
        return value.value
    if value is None or whole is None or value.points is None or not whole.points:
        return None
    if value.metric == "perplexity":
        return 100 * whole.points / value.points
    return 100 * value.points / whole.points


def _printed_average_share(
    ours: OurTable, row: TableRow, columns: Sequence[Column], values: Sequence[float], relative: bool
) -> float | None:
    if len(values) < len(columns):
        return None
    if relative:
        return fmean(values)
    wholes = [_printed_full(ours, row, c) for c in columns]
    known = [w.points for w in wholes if w is not None and w.points is not None]
    return 100 * fmean(values) / fmean(known) if len(known) == len(columns) and fmean(known) else None


def _lower(ours: OurTable, line: TableLine, column: Column) -> bool:
    """Whether less is better in what we measured of a column."""
    return any(metric(group.task.metric).shown is not None for group, _ in ours.full(line, column))


def _pairs(ours: OurTable, line: TableLine, column: Column) -> stats.Pairs:
    """Scores [n, 2] of the examples that both the line and the full cache have: the line's, and the full cache's.

    An example that is asked in several ways (MDQA's three positions) is one, with its mean scores.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    cells = ours.cells(line, column)
    for (group, mine), (_, whole) in zip(cells, ours.full(line, column) if cells else (), strict=True):
        assert ours.run is not None
        wanted = {e.id for e in group.examples}
        a, b = (ours.run.store.samples(cell.id) for cell in (mine, whole))
        for e in sorted(wanted & a.keys() & b.keys()):
            x, y = a[e].score, b[e].score
            if x is not None and y is not None:
                found.setdefault(e, []).append((x, y))
    return stats.by_example(found, 2)

"""A paper's table as numbers: every cell with what is printed, what we measured, and both as a share of the full cache.

Averages are computed here from the cells, never taken from the paper; what it states is kept beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from kvbench.bench.records import NOT_RUN
from kvbench.metrics import metric, stats
from kvbench.papers.forensics.exact import Exact, exact
from kvbench.papers.measured.our_table import OurTable, TableLine
from kvbench.papers.spec.numbers import decimals
from kvbench.papers.spec.published import MARKS, Published
from kvbench.papers.spec.table_spec import BUDGET, MEAN, MEANS, RATIO, RELATIVE, SCORE, SHARE, Column
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
class _Read:
    """What the store has of one number: its summary, its scores beside the full cache's [n, 2], and their share."""

    value: CellResult
    pairs: stats.Pairs
    floor: bool
    share: stats.Share
    full: float | None


def view(ours: OurTable) -> View:
    """All entries of a table, read from the paper's data and from the store."""
    table = ours.declared
    followed = {e.cell: e for e in exact(table.paper, table.table)}
    if ours.timings is not None:
        rows = tuple(
            (x, tuple(_timed(ours, x.row.cells.get(c.name), followed) for c in table.columns)) for x in ours.lines
        )
        return View(ours, table.columns, rows)
    # what a score kept of the cache stands below the score
    columns = tuple(c for c in table.columns if c.what != BUDGET) or table.columns
    known: dict[tuple[str, ...], _Read] = {}
    reads = [[_read(ours, line, c, known) for c in columns] for line in ours.lines]
    entries = [
        tuple(_entry(ours, line, c, read, followed) for c, read in zip(columns, row, strict=True))
        for line, row in zip(ours.lines, reads, strict=True)
    ]
    means: tuple[Column, ...] = ()
    if table.scores and any(c.dataset in MEANS for c in table.printed):
        split = ours.stand_in and table.average == MEAN and any(e.floor for row in entries for e in row)
        means = (AVERAGE, OF_ALL) if split else (AVERAGE,)
    rows = tuple(
        (line, (*row, *(_average(ours, line, list(zip(columns, row, read, strict=True)), m) for m in means)))
        for line, row, read in zip(ours.lines, entries, reads, strict=True)
    )
    return View(ours, (*columns, *means), rows)


def _timed(ours: OurTable, printed: Published | None, followed: Mapping[Published, Exact]) -> CellView:
    """An entry of an efficiency table."""
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
        exact=_exact(followed.get(printed)),
        timed=cell,
    )


def _read(ours: OurTable, line: TableLine, column: Column, known: dict[tuple[str, ...], _Read]) -> _Read | None:
    """What the store has of a score, read once for all rows and columns that show it; None of what is no score."""
    if column.what != SCORE:
        return None
    cells = ours.cells(line, column)
    ids = tuple(c.id for _, c in cells)
    if cells and ids in known:
        return known[ids]
    groups = [group for group, _ in ours.full(line, column)]
    value, pairs = ours.value(line, column), _pairs(ours, line, column)
    floor = any(at_floor(g.task, pairs[:, 1]) for g in groups)
    # of log losses, less is better
    losses = any(metric(g.task.metric).shown is not None for g in groups)
    share = stats.Share() if floor else stats.share([pairs], log_losses=losses)
    full = metric(groups[0].task.metric).show(float(pairs[:, 1].mean())) if len(pairs) and groups else None
    found = _Read(value, pairs, floor, share, full)
    if cells:
        known[ids] = found
    return found


def _entry(
    ours: OurTable, line: TableLine, column: Column, read: _Read | None, followed: Mapping[Published, Exact]
) -> CellView:
    printed = line.row.cells.get(column.name)
    if printed is None:
        return CellView(reason=(line.skipped if read is None else read.value.reason) or "")
    budget = line.row.cells.get(Column(column.dataset, BUDGET).name) if column.what == SCORE else None
    found = CellResult("", "", "missing", reason=line.skipped) if read is None else read.value
    base = CellView(
        status=found.status,
        reason=found.reason or "",
        published=printed.points,
        published_relative=_share(printed, _printed_full(ours, line, column)),
        mark=MARKS.get(printed.certainty, ""),
        published_budget=budget.value if budget else None,
        budgeted=budget is not None,
        printed=printed.shown,
        exact=_exact(followed.get(printed)),
    )
    means = found.summary
    if read is None or means is None or means.score is None:
        return base
    score, ci = (read.share.point, read.share.ci) if printed.metric == RATIO else (means.score, means.ci)
    return replace(
        base,
        ours=score,
        ci=ci,
        relative=read.share.point,
        relative_ci=read.share.ci,
        floor=read.floor,
        full=read.full,
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
    if table.preset and ours.run is not None and ours.run.cfg.preset == table.preset:
        theirs = presets.values(table.preset, "").get("prompt")
        if theirs is not None and ours.run.cfg.prompt.name != theirs:
            yield f"prompt={ours.run.cfg.prompt.name} here, {theirs} there"
    if ours.typed:
        yield f"{' '.join(ours.typed)} here"


def _average(
    ours: OurTable, line: TableLine, entries: Sequence[tuple[Column, CellView, _Read | None]], kind: Column
) -> CellView:
    """The mean over columns as the paper takes it, both sides over the same: those that can be read here.

    On a stand-in of those only where the full cache is above the floor, but for OF_ALL.
    """
    scored = [(c, e, read) for c, e, read in entries if c.what == SCORE]
    here = [(c, e, read) for c, e, read in scored if not (ours.run and ours.why_absent(line, c))]
    if ours.stand_in and kind is AVERAGE:
        here = [(c, e, read) for c, e, read in here if not e.floor]
    if not here:
        return CellView(status="missing")
    shown = [e for _, e, _ in here]
    ratios = ours.declared.average in (RELATIVE, SHARE)
    stated = line.row.cells.get(AVERAGE.name) or next(
        (c for name, c in line.row.cells.items() if name.startswith("avg/")), None
    )
    # of the full cache itself the paper prints the share, 100, not how far it is from that
    whole = stated is not None and stated.metric == RATIO
    less = 100 if ours.declared.average == RELATIVE and not whole else 0
    mean, share = _printed_average([(_printed_full(ours, line, c), e) for c, e, _ in here], ratios)
    published = None if mean is None else mean - less
    base = CellView(
        status="missing" if any(e.status in ("missing", "none") for e in shown) else shown[0].status,
        reason=shown[0].reason,
        published=published,
        published_relative=share,
        stated=stated.value if len(here) == len(scored) and _differs(stated, published) and stated else None,
    )
    if any(e.status != "measured" or e.ours is None for e in shown):
        return base
    found = stats.share([read.pairs for _, _, read in here if read is not None], of_ratios=ratios)
    known = [s for s in (e.relative if ratios else e.ours for e in shown) if s is not None]
    return replace(
        base,
        status="measured",
        ours=fmean(known) - less if known else None,
        relative=found.point,
        relative_ci=found.ci,
        n=min(e.n for e in shown),
        of=max(e.of for e in shown),
        unlike=tuple(dict.fromkeys(reason for e in shown for reason in e.unlike)),
    )


def _printed_average(
    entries: Sequence[tuple[Published | None, CellView]], ratios: bool
) -> tuple[float | None, float | None]:
    """The mean of what is printed, or of its shares of the printed full cache, and the mean's own share of that."""
    values = [v for v in (e.published_relative if ratios else e.published for _, e in entries) if v is not None]
    if len(values) < len(entries):
        return None, None
    if ratios:
        return fmean(values), fmean(values)
    wholes = [w.points for w, _ in entries if w is not None and w.points is not None]
    full = fmean(wholes) if len(wholes) == len(entries) else 0
    return fmean(values), 100 * fmean(values) / full if full else None


def _differs(stated: Published | None, published: float | None) -> bool:
    """Whether a stated average differs from that of its cells by more than rounding explains."""
    if stated is None or stated.value is None or published is None:
        return False
    return abs(stated.value - published) > ROUNDING * 10.0 ** -decimals(stated.printed)


def _exact(found: Exact | None) -> str:
    """✓ where a printed value can be recomputed and is right, what it should be where it is not, else nothing."""
    return "" if found is None else "✓" if found.ok else f"recomputed {found.shown}"


def _printed_full(ours: OurTable, line: TableLine, column: Column) -> Published | None:
    full = ours.declared.full_row(line.row.model)
    return None if full is None else full.cells.get(column.name)


def _share(value: Published, whole: Published | None) -> float | None:
    """A printed value in per cent of the printed full cache; of a perplexity, the other way round."""
    if value.metric == RATIO:
        return value.value
    if whole is None or value.points is None or not whole.points:
        return None
    a, b = (whole.points, value.points) if value.metric == "perplexity" else (value.points, whole.points)
    return 100 * a / b


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

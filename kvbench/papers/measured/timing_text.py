"""An efficiency table's cells as text: ratio beside ratio, and below it each side's own value on its own device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvbench.bench.records import FAILED, NOT_RUN, OOM, REFUSED
from kvbench.papers.timed.row_matching import INTEGRATED, MISSING
from kvbench.papers.timed.timings import SCRIPT, Timings

if TYPE_CHECKING:
    from kvbench.papers.measured.cell_view import CellView

SHORT = {"pct": "%", "x": ""}
"""Printed units as a column's head says them."""


def name(timings: Timings, column: str) -> str:
    """Return a column's name with its unit."""
    unit = next(c.unit for r in timings.table.rows for n, c in r.cells.items() if n == column)
    return f"{column} {SHORT.get(unit, unit)}".rstrip()


def lines(entry: CellView, show: str) -> list[str]:
    """Return the lines of one cell; ``show`` as in grid."""
    cell = entry.timed
    assert cell is not None
    ours, their_ratio, printed = _state(entry) or _ratio(cell.ratio), _ratio(cell.published_ratio), _printed(entry)
    if show in ("published", "beside"):
        return [printed] if cell.published_ratio is None else [their_ratio, printed]
    if show == "delta":
        if cell.ratio is None or cell.published_ratio is None:
            return [_state(entry) or "—"]
        return [f"{cell.ratio - cell.published_ratio:+.2f}".replace("-", "−")]
    value = "" if cell.value is None else _number(cell.value) + (" ∫" if INTEGRATED in cell.marks else "")
    without_ratio = value and cell.ratio is None
    if show == "ours":
        spread = "" if cell.spread is None else f"[{_number(cell.spread[0])}, {_number(cell.spread[1])}]"
        return [text for text in ("" if without_ratio else ours, value, spread) if text]
    ratio = "" if without_ratio and cell.published_ratio is None else f"{ours} ({their_ratio})"
    return [text for text in (ratio, value and f"ours {value}", f"paper {printed}") if text]


def _state(entry: CellView) -> str:
    """Return the text that stands in place of a number; '' where there is a number."""
    if entry.status in (REFUSED, FAILED):
        return "✗"
    return {OOM: OOM, "measured": ""}.get(entry.status, "—")


def _printed(entry: CellView) -> str:
    """Return the text of the printed value, with its marks."""
    assert entry.timed is not None
    if "out-of-memory" in entry.timed.printed.flag.lower():
        return OOM
    text = entry.printed or "—"
    return f"{text}{entry.mark}" + (f" {entry.exact}" if entry.exact else "")


def _ratio(ratio: float | None) -> str:
    """Format a ratio; None is a dash."""
    return "—" if ratio is None else f"{ratio:.2f}×"


def _number(value: float) -> str:
    """Format a number with three digits, or all before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def notes(timings: Timings, entries: Sequence[CellView], show: str = "both") -> list[str]:
    """Return the notes for readers: both devices, what ratios are of, a stand-in's scale, and what is missing."""
    bench = timings.bench
    their_note = f"N.NN×: the paper's over its own {bench.base}; the paper's is {_theirs(timings)}."
    if show == "published":
        return [their_note, *_printed_notes(entries)]
    cells = [e.timed for e in entries if e.timed is not None]
    texts = list(_ours_notes(timings, show)) if timings.there else [their_note.replace("N.NN×", "(N.NN×)", 1)]
    if any(INTEGRATED in c.marks for c in cells):
        texts.append("∫ integrated: steps were run at a few cache lengths and interpolated between them.")
    if show != "delta":
        texts += _printed_notes([replace(e, exact="", mark="") if show == "ours" else e for e in entries])
    failed = [c for c in cells if c.status in (REFUSED, FAILED)]
    failures = {(c.row["method"], c.row["workload"], c.reason) for c in failed if c.row}
    texts += [f"✗ {method} at {workload}: {reason}" for method, workload, reason in sorted(failures)]
    names_by_reason: dict[str, dict[str, None]] = {}
    for printed, cell in timings.cells.items():
        if cell.status == NOT_RUN:
            places = (printed.model, printed.method, printed.dataset)
            other = printed.dataset if printed.dataset == "avg" else printed.method
            names_by_reason.setdefault(cell.reason, {})[next((p for p in places if p in bench.not_run), other)] = None
    texts += [f"— not run: {', '.join(names)}: {reason}" for reason, names in names_by_reason.items()]
    if any(c.status == MISSING for c in cells):
        texts.append(f"— not measured yet: {timings.command}")
    texts += [f"Left out: {n} rows of {device}; a table shows one device." for device, n in timings.left_out.items()]
    if timings.stand_in:
        texts.append(f"GPU numbers are missing: {SCRIPT} {bench.results} measures them; they are then shown instead.")
    if timings.there:
        texts.append(f"Rows: {timings.file.parent.name}/{timings.file.name}.")
    return texts


def _ours_notes(timings: Timings, show: str) -> Iterator[str]:
    """Yield both devices, the base of ratios, a stand-in's scale, and how many ratios agree in direction."""
    bench, cells = timings.bench, timings.cells
    start = "±N.NN: our ratio less the paper's. A ratio is" if show == "delta" else "N.NN×:"
    ratio_text = f"{start} ours over our {bench.base} row, measured beside it (the paper's over its own)"
    ours = f"{bench.model} with random weights on {timings.device}; the paper's"
    if timings.stand_in:
        yield (
            f"Stand-in: ours is {ours} is {_theirs(timings)}. {ratio_text}. Only ratios compare, and of those the "
            "direction; no GPU took part."
        )
        pairs = {bench.printed_workload(p): str(c.row["workload"]) for p, c in cells.items() if c.row is not None}
        workloads = ", ".join(f"{b} for {a}" if a != b else a for a, b in pairs.items())
        yield f"Stand-in's workloads: {bench.stand_in.words()}. Prompt + new tokens x rows: {workloads}."
    else:
        yield f"Ours: {ours}: {_theirs(timings)}. {ratio_text}. Only ratios compare."
    if len(_devices(timings)) > 1:
        yield "Ours is of one device and stands beside each of the paper's."
    rows = [c.row for c in cells.values() if c.row is not None and "total" in c.row["quantities"]]
    counts = sorted({int(r["quantities"]["total"].get("n", 1)) for r in rows})
    largest_batches = sorted(
        {(str(r["workload"]), r["method"], r["batch"]) for r in rows if str(r["workload"]).endswith("xmax")}
    )
    fitted = f" Rows that fit: {', '.join(f'{m} {b}' for _, m, b in largest_batches)}." if largest_batches else ""
    yield f"Medians of {', '.join(map(str, counts)) or 'no'} repeats in shuffled order.{fitted}"
    # as they are shown, with two digits
    sides = [
        (round(c.ratio, 2) - 1, round(c.published_ratio, 2) - 1)
        for p, c in cells.items()
        if c.ratio is not None and c.published_ratio is not None and p.method != bench.base
    ]
    if sides:
        agreeing = sum((a > 0) == (b > 0) and (a < 0) == (b < 0) for a, b in sides)
        yield f"{agreeing} of {len(sides)} ratios lie on the paper's side of 1."
    yield from (f"Ours: {note}." for note in bench.notes)


def _printed_notes(entries: Sequence[CellView]) -> Iterator[str]:
    """Yield what marks beside the numbers say."""
    if any(e.timed is not None and (_printed(e) == OOM or e.timed.status == OOM) for e in entries):
        yield "OOM: out of memory."
    recomputed = [e.exact for e in entries if e.exact]
    if recomputed:
        yield f"✓: {recomputed.count('✓')} of {len(recomputed)} printed values follow from those beside them."
    for mark, text in (("?", "suspect"), ("~", "repaired")):
        paper = next((e.timed.printed.paper for e in entries if e.mark == mark and e.timed is not None), "")
        if paper:
            yield f"{mark}: the printed value is {text} (kvbench/papers/data/{paper})."


def _theirs(timings: Timings) -> str:
    """Return the paper's models and devices."""
    models = [{"unstated": "a model that is not stated"}.get(m, m) for m in timings.table.models() if m]
    return f"{' and '.join(models)} on {' and '.join(_devices(timings)) or timings.bench.device}"


def _devices(timings: Timings) -> list[str]:
    """Return the paper's devices that its rows name."""
    return list(dict.fromkeys(c.settings["gpu"] for c in timings.table.printed if "gpu" in c.settings))

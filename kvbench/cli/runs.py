"""Stored cells as a table for a terminal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from kvbench.report.listing import StoredCell
from kvbench.store.store import DAMAGED, STATUSES, ResultStore

WIDTH = 24


def table(found: Sequence[StoredCell], store: ResultStore) -> str:
    """Return the cells as text that fits 100 columns, with reasons and counts below."""
    from kvbench.report.table import Table
    from kvbench.report.writers import compose

    headers = ("status\nn of N", "method", "dataset\nmodel", "score\ninterval", "last change\ncell")
    sheet = Table(headers, tuple(_texts(cell) for cell in found))
    counts = Counter(cell.status.status for cell in found)
    alike: dict[tuple[str, str], list[str]] = {}
    for cell in found:
        if cell.status.reason:
            alike.setdefault((cell.status.status, cell.status.reason), []).append(cell.id)
    notes = [f"{status} {', '.join(names)}: {reason}" for (status, reason), names in alike.items()]
    busy = [(cell.id, ", ".join(map(str, cell.status.measuring))) for cell in found if cell.status.measuring]
    notes += [f"{name} is being measured now, shard {shards}" for name, shards in busy]
    notes += store.warnings
    total = ", ".join(f"{counts[s]} {s}" for s in (*STATUSES, DAMAGED) if counts[s])
    return compose([sheet], [*notes, f"{len(found)} cells in {store.root}/cells/<cell>/: {total}."], "text")


def _texts(cell: StoredCell) -> tuple[str, ...]:
    status = cell.status
    name, _, knobs = cell.label.partition(" ")
    imported = ["imported"] if cell.record.kind == "imported" else []
    return (
        f"{status.status}\n{status.n} of {'?' if status.of is None else status.of}",
        "\n".join([*_fold(name, "+"), *_fold(knobs, " "), *_fold(cell.differs, " ")]),
        "\n".join([*_fold(cell.record.column, " "), *_fold(cell.record.model, "/"), *imported]),
        _score(cell),
        f"{_ago(status.changed)}\n{cell.id}",
    )


def _score(cell: StoredCell) -> str:
    from kvbench.report.render import UNCHANGED

    score = cell.summary
    if score is None or score.score is None:
        return "—"
    if cell.unchanged:
        return UNCHANGED
    ci = f"\n[{score.ci[0]:.0f}, {score.ci[1]:.0f}]" if score.ci else ""
    return f"{score.metric} {score.score:.1f}{ci}"


def _fold(text: str, at: str) -> list[str]:
    """Return the lines, of at most WIDTH characters, of a text broken behind ``at``. Longer parts are cut anywhere."""
    lines = [""]
    for i, part in enumerate(text.split(at) if text else ()):
        piece = f"{lines[-1]}{at}{part}" if i else part
        if len(piece) <= WIDTH:
            lines[-1] = piece
            continue
        lines[-1:] = [f"{lines[-1]}{at}".rstrip(" ")] if i else []
        lines += [part[i : i + WIDTH] for i in range(0, len(part), WIDTH)] or [""]
    return [line for line in lines if line]


def _ago(changed: float | None) -> str:
    if changed is None:
        return "—"
    seconds = max(0.0, time.time() - int(changed))
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        count = int(seconds // size)
        if count:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"

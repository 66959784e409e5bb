"""All figures by id: texts, pictures and sweeps from each paper's figures.yaml, joined with what computes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any

from kvbench.base.errors import unknown
from kvbench.papers.figures import declared, fidelity, qhitter, scores, think, uncomp, vatp
from kvbench.papers.figures.figure import Code, Figure
from kvbench.papers.figures.measured import COLUMNS, MeasuredFigure, Point, Sweep
from kvbench.papers.figures.panels import Panel, Picture

CODE = {name: code for module in (fidelity, qhitter, scores, think, uncomp, vatp) for name, code in module.CODE.items()}


def _figure(name: str, entry: dict[str, Any]) -> Figure:
    """Build a figure from its entry, with the code that computes and describes it."""
    knobs = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.pop("knobs", {}).items()}
    columns = tuple(entry.pop("columns", COLUMNS))
    texts: dict[str, Any] = {"id": name, "columns": columns, "knobs": knobs, "picture": _picture(entry.pop("picture"))}
    if "sweeps" not in entry:
        return Figure(**texts, **entry, **CODE[name]._asdict())
    sweeps = tuple(_sweep(s) for s in entry.pop("sweeps"))
    tasks, fact_tables = entry.pop("tasks", "mean"), entry.pop("says", [])
    code = CODE.get(name, Code())
    if code.compute is None:
        prepare, facts = code.prepare, partial(scores.told, says=fact_tables, more=code.facts)
        code = Code(MeasuredFigure.frame, facts, lambda data: prepare(scores.chosen(data, tasks)))
    return Figure(**texts, **entry, **code._asdict(), sweeps=sweeps)


def _picture(entry: dict[str, Any]) -> Picture:
    """Build a picture, and the one beside it, from its entry."""
    beside = entry.pop("beside", None)
    panels = tuple(Panel(**panel) for panel in entry.pop("panels"))
    return Picture(panels=panels, beside=_picture(beside) if beside else None, **entry)


def _sweep(entry: dict[str, Any]) -> Sweep:
    """Build a sweep with the points of its entry; ``x`` holds for all points that name none."""
    x = entry.pop("x", None)
    points = tuple(p for grid in entry.pop("points") for p in _points(**{"x": x, **grid}))
    lists: dict[str, Any] = {k: tuple(entry.pop(k)) for k in ("arguments", "pretrained") if k in entry}
    return Sweep(points, **lists, **entry)


def _points(
    method: str | Sequence[str], x: str | float | None, knobs: Mapping[str, Any], series: str = "", times: float = 1
) -> Iterator[Point]:
    """Yield a point for each method and combination of knobs that are lists.

    ``x`` is a number or the name of a knob, whose value is multiplied by ``times``; None counts the combinations.
    """
    for name in [method] if isinstance(method, str) else method:
        lists = [v if isinstance(v, list) else [v] for v in knobs.values()]
        for i, values in enumerate(product(*lists)):
            point_knobs = dict(zip(knobs, values, strict=True))
            position: float = i
            if isinstance(x, str):
                position = times * point_knobs[x]
            elif x is not None:
                position = x
            yield Point(series or name, position, name, point_knobs)


# entries share lists by YAML's anchors
FIGURES: dict[str, Figure] = {name: _figure(name, deepcopy(entry)) for name, entry in declared().items()}


def of(names: Sequence[str]) -> list[Figure]:
    """Return the figures of ids (``uncomp/fig1``), papers (``uncomp``) or ``all``, each once."""
    figures: dict[str, Figure] = {}
    for name in names:
        matches = {i: f for i, f in FIGURES.items() if name in (i, f.paper, "all")}
        if not matches:
            raise unknown("figure", name, [*FIGURES, *{f.paper for f in FIGURES.values()}, "all"])
        figures |= matches
    return list(figures.values())

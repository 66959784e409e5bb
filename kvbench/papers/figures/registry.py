"""Build all figures from their YAML entries and the code that computes them, and find them by id.

The module also lists the figures that were drawn in a folder, for the report.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.base.errors import unknown
from kvbench.papers.figures import declared, fidelity, pictures, qhitter, scores, think, uncomp, vatp
from kvbench.papers.figures.figure import Code, Fact, Figure, facts_of
from kvbench.papers.figures.measured import COLUMNS, MeasuredFigure
from kvbench.papers.figures.sweep import Point, Sweep

CODE: dict[str, Code] = {}
"""The code of figures by id. A figure of measured scores may have none."""
for _module in (fidelity, qhitter, scores, think, uncomp, vatp):
    CODE |= _module.CODE


def _build_figure(name: str, entry: dict[str, Any]) -> Figure:
    knobs = {}
    for knob, default in entry.pop("knobs", {}).items():
        # YAML has lists, and the options of a command are tuples
        if isinstance(default, list):
            default = tuple(default)
        knobs[knob] = default
    columns = tuple(entry.pop("columns", COLUMNS))
    if "sweeps" in entry:
        # a figure of measured scores needs no code of its own
        code = CODE.get(name, Code())
        sweeps = tuple(_build_sweep(sweep) for sweep in entry.pop("sweeps"))
        tasks = entry.pop("tasks", "mean")
        fact_tables = entry.pop("says", [])
        if code.compute is None:
            code = _extend_score_code(code, tasks, fact_tables)
    else:
        code = CODE[name]
        sweeps = None
    # the keys that are left in the entry are names of the figure's fields; code.compute is never None here:
    # _extend_score_code gives it to code of measured scores, and code of activations has it
    return Figure(
        id=name,
        columns=columns,
        knobs=knobs,
        drawing=pictures.DRAWINGS.get(name, pictures.draw_scores),
        compute=code.compute,  # type: ignore[arg-type]
        facts=code.facts,
        prepare=code.prepare,
        complete=code.complete,
        sweeps=sweeps,
        **entry,
    )


def _extend_score_code(code: Code, tasks: str, fact_tables: Sequence[scores.FactTable]) -> Code:

    def facts(data: pd.DataFrame) -> Iterator[Fact]:
        return scores.state_facts(data, fact_tables, state_more=code.facts)

    def prepare(data: pd.DataFrame) -> pd.DataFrame:
        return code.prepare(scores.choose_rows(data, tasks))

    return Code(MeasuredFigure.frame, facts, prepare, code.complete)


def _build_sweep(entry: dict[str, Any]) -> Sweep:
    default_x = entry.pop("x", None)
    points: list[Point] = []
    for grid in entry.pop("points"):
        arguments = {"x": default_x} | grid
        points += _list_grid_points(**arguments)
    # YAML has lists, and the fields of a sweep are tuples
    for key in ("arguments", "pretrained"):
        if key in entry:
            entry[key] = tuple(entry[key])
    return Sweep(tuple(points), **entry)


def _list_grid_points(
    method: str | Sequence[str], x: str | float | None, knobs: Mapping[str, Any], series: str = "", times: float = 1
) -> Iterator[Point]:
    methods = [method] if isinstance(method, str) else method
    # a knob with one value is a list of one
    value_lists = [values if isinstance(values, list) else [values] for values in knobs.values()]
    for name in methods:
        for i, combination in enumerate(product(*value_lists)):
            point_knobs = dict(zip(knobs, combination, strict=True))
            position: float = i
            if isinstance(x, str):
                position = times * point_knobs[x]
            elif x is not None:
                position = x
            yield Point(series or name, position, name, point_knobs)


# building takes an entry apart, and entries share lists by YAML's anchors
FIGURES: dict[str, Figure] = {name: _build_figure(name, deepcopy(entry)) for name, entry in declared().items()}


def select_figures(names: Sequence[str]) -> list[Figure]:
    """Return the figures that the user names by id (``uncomp/fig1``), paper (``uncomp``) or ``all``, each once.

    Raises UsageError for any other name.
    """
    figures: dict[str, Figure] = {}
    for name in names:
        matches = {figure.id: figure for figure in FIGURES.values() if name in (figure.id, figure.paper, "all")}
        if not matches:
            papers = {figure.paper for figure in FIGURES.values()}
            known_names = list(FIGURES) + list(papers) + ["all"]
            raise unknown("figure", name, known_names, listed_by="kvbench list figures")
        figures |= matches
    return list(figures.values())


def read_drawn(folder: Path) -> list[dict[str, str]]:
    """Return the texts of every picture below ``folder``, for the report: a dict for each, in the order of the names.

    ``name`` and ``picture`` are the name and the path. A figure's dict also has its ``title`` and, by the headings of
    the report, its other texts. They are its caption (Shows), our finding (Here), the paper's (The paper), open points
    and the runs.
    """

    pictures = sorted(folder.rglob("*.png"), key=lambda path: number_key(str(path.relative_to(folder))))
    picture_texts = []
    for path in pictures:
        name = str(path.relative_to(folder).with_suffix(""))
        texts = {"name": name, "picture": str(path)}
        # a picture that is no figure of a paper is shown under its name alone
        if name in FIGURES:
            texts |= _describe_drawn(FIGURES[name], path.with_suffix(".csv"))
        picture_texts.append(texts)
    return picture_texts


def _describe_drawn(figure: Figure, csv: Path) -> dict[str, str]:
    # a picture whose CSV is gone is shown without a finding
    csv_text = csv.read_text(encoding="utf-8") if csv.exists() else ""
    finding = figure.finding(figure.parse(csv_text)) if csv_text else ""
    facts = facts_of(csv_text)
    captioned = figure.captioned(facts)
    return {
        "title": captioned.title,
        "Shows": captioned.shows,
        "Here": finding,
        "The paper": captioned.claim,
        "Open": captioned.unsaid,
        "Ran": facts.get("runs", ""),
    }


def number_key(name: str) -> tuple[str | int, ...]:
    """Return a sort key with numbers as numbers: figure 10 comes behind figure 9."""
    parts: list[str | int] = []
    # the parentheses make re.split keep the numbers. Texts stand at even places and numbers at odd ones, so a text is
    # never compared with a number
    for part in re.split(r"(\d+)", name):
        if part.isdigit():
            parts.append(int(part))
        else:
            parts.append(part)
    return tuple(parts)

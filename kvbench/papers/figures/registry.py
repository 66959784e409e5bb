"""All figures by id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbench.errors import unknown
from kvbench.papers.figures import (
    needle,
    qhitter,
    qhitter_results,
    results,
    sweeps,
    think,
    think_memory,
    uncomp,
    uncomp_hidden,
    vatp,
)
from kvbench.papers.figures.figure import Figure

_ALL: tuple[Figure[Any], ...] = (
    *qhitter.FIGURES,
    *qhitter_results.FIGURES,
    *sweeps.FIGURES,
    *think.FIGURES,
    *think_memory.FIGURES,
    *uncomp.FIGURES,
    *uncomp_hidden.FIGURES,
    *vatp.FIGURES,
    *results.FIGURES,
    *needle.FIGURES,
)
FIGURES: dict[str, Figure[Any]] = {f.id: f for f in sorted(_ALL, key=lambda f: f.id)}


def of(names: Sequence[str]) -> list[Figure[Any]]:
    """The figures of ids (``uncomp/fig1``), papers (``uncomp``) or ``all``, each once."""
    found: dict[str, Figure[Any]] = {}
    for name in names:
        mine = {i: f for i, f in FIGURES.items() if name in (i, f.paper, "all")}
        if not mine:
            raise unknown("figure", name, [*FIGURES, *{f.paper for f in FIGURES.values()}, "all"])
        found |= mine
    return list(found.values())

"""The sweeps of a figure: points of methods and knobs that are measured on the same prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvbench.papers.spec import stand_ins

FULL = "full"
MEAN = "mean"
"""The task of rows that are means over all tasks."""
ROW = ["series", "x", "task"]
"""The columns that tell the rows of a figure's data apart."""


@dataclass(frozen=True)
class Point:
    """One place of a figure: a method with its knobs, under the name of its series, at ``x``.

    An ``x`` that is nan stands for the per cent of tokens that were kept.
    """

    series: str
    x: float
    method: str
    knobs: Mapping[str, object] = field(default_factory=dict)


FULL_POINT = Point(FULL, 0.0, "full")


@dataclass(frozen=True)
class Sweep:
    """Points that are measured on the same prompts.

    dataset: the tiny model's. published: the paper's own, for any other model.
    arguments: more arguments of ``run``. pretrained: those for any model but the tiny one. Options of a dataset go to
    the datasets that have them.
    baseline: True where the full cache is measured, too.
    length: prompt tokens of the paper, by which windows and sizes are scaled for the tiny model.
    """

    points: tuple[Point, ...]
    dataset: str = "tiny"
    published: str = ""
    preset: str | None = None
    arguments: tuple[str, ...] = ()
    pretrained: tuple[str, ...] = ()
    baseline: bool = True
    length: int = stand_ins.PROMPT

    def reads(self, tiny: bool) -> str:
        """Return the dataset that is read unless another is asked for."""
        if tiny:
            return self.dataset
        return self.published or self.dataset

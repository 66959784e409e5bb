"""The sweeps of a figure: points of methods and knobs that are measured on the same prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvbench.papers.spec import stand_ins

FULL = "full"
"""The series of the full cache."""
MEAN = "mean"
"""The task of rows that are means over all tasks."""
ROW = ["series", "x", "task"]
"""The columns whose values name a row of a figure's data."""


@dataclass(frozen=True)
class Point:
    """A point of a figure of results: a method with its knobs, and where it is drawn.

    series: the name of the point's line.
    x: the position on the x axis; nan stands for the per cent of tokens that the method turns out to keep.
    method: the name of the method or chain.
    knobs: the method's knobs, in addition to those of the sweep's preset.
    """

    series: str
    x: float
    method: str
    knobs: Mapping[str, object] = field(default_factory=dict)

    def find_x(self, kept: float) -> float:
        """Return the position on the x axis. ``kept``: the per cent of tokens that the method was measured to keep."""
        # a method that the user named stands at the tokens that it kept, with two digits
        if math.isnan(self.x):
            return float(f"{kept:.2g}")
        return self.x


FULL_POINT = Point(FULL, 0.0, "full")
"""The point of the full cache, which is measured beside a sweep's points."""


@dataclass(frozen=True)
class Sweep:
    """Points of a figure that one run measures on the same prompts.

    dataset: the dataset that the tiny model reads.
    published: the paper's own dataset, which any other model reads; '' for ``dataset``.
    preset: the paper whose preset gives the points' defaults; None for no preset.
    arguments: options of the dataset. An option is dropped unless all datasets that are read have it.
    pretrained: further such options, for any model but the tiny one.
    baseline: True if the full cache is measured, too.
    length: the tokens of the paper's prompts. Windows and sizes are scaled by it to the tiny model's prompts.
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
        """Return the dataset that is read unless the user names one.

        tiny: True for the tiny model, False for any other.
        """
        if tiny:
            return self.dataset
        return self.published or self.dataset

"""Needle heat maps: how much of the needle is found at every length of the text and depth of the needle.

A phrasing that asks to complete a sentence scores the sentence's beginning with every answer. Pictures therefore count
from the score of an empty answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvbench.tasks import metrics

if TYPE_CHECKING:
    from kvbench.store.results import Sample
    from kvbench.tasks.base import Task

COUNTED = "0: an empty answer, 100: the whole needle"
"""The scale of a picture, in words."""
BAR, DEPTH = "needle found, %", "depth, % of the text"
"""The labels of a picture's colours and rows."""


@dataclass(frozen=True)
class Heat:
    """A needle heat map.

    lengths: the tokens of a text, rising.
    depths: the needle's depths in per cent of the text, rising.
    scores: the mean scores [depths, lengths]; nan where nothing was measured.
    counts: the number of samples behind each mean [depths, lengths].
    """

    lengths: tuple[float, ...]
    depths: tuple[float, ...]
    scores: np.ndarray
    counts: np.ndarray

    def rows(self) -> Iterator[tuple[float, float, float, int]]:
        """Yield (length, depth, score, number of samples) of every measured point."""
        for i, depth in enumerate(self.depths):
            for j, length in enumerate(self.lengths):
                if self.counts[i, j]:
                    yield length, depth, float(self.scores[i, j]), int(self.counts[i, j])

    def mean(self) -> float:
        """Return the mean score over all samples, hence over places weighted by their counts."""
        measured = self.counts > 0
        return float(np.average(self.scores[measured], weights=self.counts[measured]))


def read_points(samples: Iterable[Sample], show: Callable[[float], float]) -> list[tuple[float, float, float]]:
    """Return (length, depth, score in printed units) of each sample of the needle dataset that has a score.

    show: the metric's function from a score to printed units.
    """
    return [(s.meta["length"], s.meta["depth"], show(s.score)) for s in samples if s.score is not None]


def build_map(points: Sequence[tuple[float, float, float]]) -> Heat:
    """Return the heat map of (length, depth, score) points, with the mean score of each place."""
    lengths = sorted({length for length, _, _ in points})
    depths = sorted({depth for _, depth, _ in points})
    shape = (len(depths), len(lengths))
    sums = np.zeros(shape)
    counts = np.zeros(shape, int)
    for length, depth, score in points:
        place = depths.index(depth), lengths.index(length)
        sums[place] += score
        counts[place] += 1
    # numpy computes the quotient at empty places, too, and would warn about 0 / 0
    scores = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return Heat(tuple(lengths), tuple(depths), scores, counts)


def score_silence(task: Task) -> float:
    """Return the mean score of an empty answer to the task's examples, as printed.

    The metric must be able to score at least one of them.
    """
    scores = [task.score("", example) for example in task.examples]
    known_scores = [score for score in scores if score is not None]
    return metrics.metric(task.metric).show(sum(known_scores) / len(known_scores))


def rescale_score(score: Any, silence: Any) -> Any:
    """Return a printed score rescaled so that ``silence``, the score of an empty answer, is 0 and the best score 100.

    The result is below 0 for a score below ``silence``. Arrays are rescaled element by element.
    """
    return 100 * (score - silence) / (100 - silence)


def draw_map(heat: Heat, title: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the map as a picture [height, width, 3]: lengths to the right, depths downwards, dark 0 to light 100.

    heat: how much of the needle is found (``rescale_score``). The scale stands in words below the title.
    """
    # import late, since matplotlib is an optional package and the numbers do not need it
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from kvbench.report import style

    with style.styled():
        # inches: fixed margins for labels and the colour bar, plus space for each place, so that numbers fit into it
        figure = style.canvas(2.5 + 0.6 * len(heat.lengths), 1.5 + 0.4 * len(heat.depths))
        canvas = FigureCanvasAgg(figure)
        ax = figure.add_subplot()
        lengths = [f"{length:g}" for length in heat.lengths]
        depths = [f"{depth:g}" for depth in heat.depths]
        image = style.heat(ax, heat.scores, depths, lengths, "%.0f", vmin=0, vmax=100)
        ax.set_xlabel("tokens")
        ax.set_ylabel(DEPTH)
        ax.set_title(f"{title}\n{COUNTED}", loc="left", fontsize=6.5)
        figure.colorbar(image, label=BAR)
        canvas.draw()
        # drop the alpha channel, and copy, since the canvas reuses its buffer
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()

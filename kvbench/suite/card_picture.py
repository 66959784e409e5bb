"""The picture of a suite's card: a map of what each method and control retains, by part and budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvbench.report.looks import looks_of
from kvbench.report.style import canvas, heat, styled
from kvbench.suite.card import list_methods_and_controls
from kvbench.suite.definition import Suite
from kvbench.suite.scores import RowScore

CELL_WIDTH, CELL_HEIGHT = 0.3, 0.19
"""The size of one score in the picture, in inches."""
NAMES_WIDTH, TITLES_HEIGHT = 2.4, 0.9
"""The space for names and the colour bar, and for titles and budgets, in inches."""


def draw_card(suite: Suite, scored: Sequence[RowScore], path: Path) -> None:
    """Draw the card's picture into a file: a map of S for each measurable part, a row a method, a column a budget.

    The methods stand in the order of the table of means, and the controls below them. Without a measurable part no
    file is written.
    """
    methods, controls = list_methods_and_controls(scored)
    names = methods + controls
    looks = looks_of(names)
    parts = [part for part in suite.parts if _is_measured(part.name, scored)]
    if not parts:
        return
    with styled():
        width = NAMES_WIDTH + len(parts) * len(suite.budgets) * CELL_WIDTH
        fig = canvas(width, TITLES_HEIGHT + len(names) * CELL_HEIGHT)
        # one row of panels
        (axes,) = fig.subplots(1, len(parts), sharey=True, squeeze=False)
        budgets = [f"1/{budget}" for budget in suite.budgets]
        for ax, part in zip(axes, parts, strict=True):
            image = heat(ax, _fill_scores(part.name, names, suite, scored), names, budgets, "%.0f", vmin=0, vmax=100)
            # ``heat`` leaves out names of a long list, but here each row is a method that a reader looks for
            ax.set_yticks(range(len(names)), [looks[name].name for name in names])
            # a gap between the methods and the controls below them
            ax.axhline(len(methods) - 0.5, color="white", linewidth=3)
            ax.set_title(part.name)
        axes[len(parts) // 2].set_xlabel("share of the bytes")
        # the ends of the bar are pointed: a row may be worse than random tokens, or better than the full cache
        fig.colorbar(image, ax=axes, label="retained: random tokens 0, full cache 100", extend="both", pad=0.01)
        fig.suptitle(f"{suite.name}: what a compressed cache retains", fontsize=9)
        # 250 dpi: a telephone shows half of the pixels, and the names must be readable there, too. No software is named
        # in the file, so that equal data give equal bytes
        fig.savefig(path, dpi=250, metadata={"Software": None})


def _is_measured(part: str, scored: Sequence[RowScore]) -> bool:
    for entry in scored:
        score = entry.parts.get(part)
        if score is not None and score.retained is not None:
            return True
    return False


def _fill_scores(part: str, names: Sequence[str], suite: Suite, scored: Sequence[RowScore]) -> np.ndarray:
    """Return S of one part [names, the suite's budgets]; nan where nothing was measured or compressed."""
    scores = np.full((len(names), len(suite.budgets)), np.nan)
    for entry in scored:
        score = entry.parts.get(part)
        if score is None or score.retained is None or entry.nothing_compressed:
            continue
        if entry.name in names:
            scores[names.index(entry.name), suite.budgets.index(entry.budget)] = score.retained
    return scores

"""One cell that can be computed again without a model."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.papers.spec import numbers
from kvbench.papers.spec.numbers import Number, decimals
from kvbench.papers.spec.published import Published


@dataclass(frozen=True)
class Exact:
    """A published cell beside what it must be. ``row`` is the row's label, ``recomputed`` carries the inputs' rounding.

    ``text`` replaces the number where the cell is a word.
    """

    cell: Published
    row: str
    formula: str
    recomputed: Number | None
    text: str = ""

    @property
    def column(self) -> str:
        """The dataset, or what is measured where a column is no dataset."""
        c = self.cell
        plain = c.metric in ("mean", c.dataset) or c.metric.startswith(("f1", "rouge", "accuracy", "edit", "bleu"))
        return c.dataset if plain else f"{c.dataset} {c.metric}"

    @property
    def published(self) -> str:
        """What the paper prints."""
        return self.cell.printed

    @property
    def shown(self) -> str:
        """The recomputed value, with as many digits as are printed and more where those do not agree."""
        if self.recomputed is None:
            return self.text
        return self.recomputed.text(self._digits if self.grade != "equal" else decimals(self.published))

    @property
    def grade(self) -> str:
        """equal, rounding or off, as numbers.grade."""
        if self.recomputed is None:
            return "equal" if self.text.lower() == self.published.lower() else "off"
        return numbers.grade(self.published, self.recomputed)

    @property
    def ok(self) -> bool:
        """Whether rounding explains what is printed."""
        return self.grade != "off"

    @property
    def mark(self) -> str:
        """✓, or by how much the printed value is off."""
        if self.ok:
            return "✓"
        if self.recomputed is None:
            return "✗"
        gap = numbers.fixed(numbers.printed(self.published).value - self.recomputed.value, self._digits)
        return gap.replace("-", "−") if gap.startswith("-") else f"+{gap}"

    @property
    def _digits(self) -> int:
        whole = self.recomputed is not None and self.recomputed.value.denominator == 1
        return decimals(self.published) if whole else max(2, decimals(self.published) + 1)

"""One cell that can be computed again without a model."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.papers.spec import numbers
from kvbench.papers.spec.numbers import Number, decimals
from kvbench.papers.spec.published import Published


@dataclass(frozen=True)
class Exact:
    """A published cell beside the value that it must have.

    ``row`` is the row's label. ``recomputed`` carries the rounding of its inputs. ``text`` replaces the
    number where the cell is a word.
    """

    cell: Published
    row: str
    formula: str
    recomputed: Number | None
    text: str = ""

    @property
    def column(self) -> str:
        """Return the dataset, or the measured quantity where a column is no dataset."""
        c = self.cell
        plain = c.metric in ("mean", c.dataset) or c.metric.startswith(("f1", "rouge", "accuracy", "edit", "bleu"))
        return c.dataset if plain else f"{c.dataset} {c.metric}"

    @property
    def published(self) -> str:
        """Return the printed characters."""
        return self.cell.printed

    @property
    def shown(self) -> str:
        """Return the recomputed value with as many digits as are printed, and more where those differ."""
        if self.recomputed is None:
            return self.text
        return self.recomputed.text(self._digits if self.grade != "equal" else decimals(self.published))

    @property
    def grade(self) -> str:
        """Return equal, rounding or off, as numbers.grade."""
        if self.recomputed is None:
            return "equal" if self.text.lower() == self.published.lower() else "off"
        return numbers.grade(self.published, self.recomputed)

    @property
    def ok(self) -> bool:
        """Tell whether rounding explains the printed value."""
        return self.grade != "off"

    @property
    def mark(self) -> str:
        """Return ✓, or by how much the printed value is off."""
        if self.ok:
            return "✓"
        if self.recomputed is None:
            return "✗"
        gap = numbers.fixed(numbers.printed(self.published).value - self.recomputed.value, self._digits)
        return gap.replace("-", "−") if gap.startswith("-") else f"+{gap}"

    @property
    def _digits(self) -> int:
        """Return the decimals that are shown: one more than printed, but at least two, unless it is an integer."""
        is_integer = self.recomputed is not None and self.recomputed.value.denominator == 1
        return decimals(self.published) if is_integer else max(2, decimals(self.published) + 1)

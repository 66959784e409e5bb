"""A prompt of RULER in its parts, and the search for the size with which prompts fill a number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbench.base.errors import UsageError


class LengthTooShort(UsageError):
    """A length that the smallest prompt of a task exceeds."""


@dataclass(frozen=True)
class RulerPrompt:
    """One prompt in the order in which it is read, and its references.

    context: all before the question.
    question: what is asked, with the line that asks it.
    prefix: the beginning of the answer, which the model continues.
    facts: what reports may use of it, such as its size.
    others: what else could be asked of the context, as (question, beginning of the answer, references).
    short: whether the haystack ended before the size was reached.
    """

    context: str
    question: str
    prefix: str
    answers: tuple[str, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)
    short: bool = False
    others: tuple[tuple[str, str, tuple[str, ...]], ...] = ()


Draw = Callable[[int], RulerPrompt]
"""From a size (words, lines, documents) to a prompt."""


@dataclass(frozen=True)
class LengthBudget:
    """A number of tokens that one task's prompts and their answers are fitted to.

    task: the name, for errors.
    length: the tokens of prompt, beginning of the answer, and answer.
    new_tokens: those of the answer.
    count: the function from a text to its tokens.
    measure: the function from a prompt to its tokens, a chat template's included.
    """

    task: str
    length: int
    new_tokens: int
    seed: int
    count: Callable[[str], int]
    measure: Callable[[RulerPrompt], int]

    def fits(self, prompt: RulerPrompt, more: int = 0) -> bool:
        """Tell if a prompt, its answer and ``more`` tokens fit. Raises UsageError if they do for lack of haystack."""
        fits = self.measure(prompt) + more + self.new_tokens <= self.length
        if fits and prompt.short:
            raise UsageError(
                f"ruler/{self.task}: the haystack's text ends before it fills lengths={self.length}: lower lengths=, "
                "or give a longer text with haystack="
            )
        return fits

    def bisect(self, draw: Draw, step: int, most: int | None = None, more: int = 0) -> int:
        """Return the largest size tried that fits, from ``step`` up to ``most`` or three times what a trial suggests.

        Each trial is drawn anew, so the path of the search decides the samples after it.
        """
        if most is None:
            per_unit = self.measure(draw(step)) / step
            most = int(self.length / per_unit * 3)
        low, high, best = step, max(most, 2 * step), 0
        while low <= high:
            middle = (low + high) // 2
            if self.fits(draw(middle), more):
                low, best = middle + 1, middle
            else:
                high = middle - 1
        if not best:
            raise self.too_short(draw(step), more)
        return best

    def climb(self, draw: Draw, step: int) -> int:
        """Return the last size that fits with its references behind it, in steps up: RULER's search until 2024."""
        size = step
        while self.fits(prompt := draw(size), self.count(" ".join(prompt.answers))):
            size += step
        if size == step:
            raise self.too_short(prompt)
        return size - step

    def sample(
        self,
        draw: Draw,
        size: int,
        step: int,
        least: int = 1,
        finish: Callable[[RulerPrompt], RulerPrompt] | None = None,
        more: int = 0,
    ) -> RulerPrompt:
        """Return a prompt of ``size``, drawn again a step smaller while it is too long, ``least`` being the smallest.

        ``finish`` adds what is drawn after it, expected to have ``more`` tokens.
        """
        while True:
            prompt = draw(size)
            if self.fits(prompt, more):
                whole = prompt if finish is None else finish(prompt)
                if finish is None or self.fits(whole):
                    return whole
            if size - step < least:  # where RULER's script draws for ever
                raise self.too_short(prompt, more)
            size -= step

    def too_short(self, prompt: RulerPrompt, more: int = 0) -> LengthTooShort:
        """Return the error for a length that the smallest prompt exceeds."""
        tokens = self.measure(prompt) + more
        return LengthTooShort(
            f"ruler/{self.task}: lengths={self.length} is too short: a prompt of the smallest size that RULER "
            f"tries has {tokens} tokens here, and its answer {self.new_tokens}; raise lengths="
        )

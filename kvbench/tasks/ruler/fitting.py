"""The parts of a RULER prompt, and the search for the size with which prompts fill a number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvbench.base.errors import UsageError


class LengthTooShort(UsageError):
    """The error for a length that a task's smallest prompt exceeds."""


class OtherQuestion(NamedTuple):
    """A further question that a prompt's context can answer.

    question: the question, with the instruction in its line.
    prefix: the beginning of the answer.
    answers: the references.
    """

    question: str
    prefix: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class RulerPrompt:
    """One prompt in the order in which it is read, and its references.

    context: the text before the question.
    question: the question, with the instruction in its line.
    prefix: the beginning of the answer, which the model continues.
    answers: the references.
    facts: facts for reports, such as the prompt's size.
    short: True if the haystack ended before the size was reached.
    others: further questions that the context can answer.
    """

    context: str
    question: str
    prefix: str
    answers: tuple[str, ...]
    facts: Mapping[str, object] = field(default_factory=dict)
    short: bool = False
    others: tuple[OtherQuestion, ...] = ()


Draw = Callable[[int], RulerPrompt]
"""The function that draws a prompt of a size. The unit of size is the task's: words, lines or documents."""


@dataclass(frozen=True)
class LengthBudget:
    """The number of tokens that one task's prompts and their answers must fit.

    task: the task's name, for errors.
    length: the number of tokens of prompt, beginning of the answer, and answer.
    new_tokens: the number of tokens of the answer.
    seed: the seed of the task's generators.
    count: the function from a text to its number of tokens.
    measure: the function from a prompt to its number of tokens, with the chat template's.
    """

    task: str
    length: int
    new_tokens: int
    seed: int
    count: Callable[[str], int]
    measure: Callable[[RulerPrompt], int]

    def fits(self, prompt: RulerPrompt, more: int = 0) -> bool:
        """Return True if a prompt, its answer and ``more`` tokens fit.

        Raises UsageError if they fit only because the haystack's text has ended.
        """
        if self.measure(prompt) + more + self.new_tokens > self.length:
            return False
        # a larger size would give the same prompt, and the search would go on to meaningless sizes
        if prompt.short:
            raise UsageError(
                f"ruler/{self.task}: the haystack's text ends before it fills lengths={self.length}: lower lengths=, "
                "or give a longer text with haystack="
            )
        return True

    def bisect(self, draw: Draw, step: int, most: int | None = None, more: int = 0) -> int:
        """Return the largest tried size whose prompt fits, found by bisection between ``step`` and ``most``.

        draw: the function that draws a prompt of a size.
        step: the smallest size that is tried.
        most: the upper bound of the search, raised to twice ``step`` if it is lower. None: three times the size that
            the tokens of a first trial suggest.
        more: the tokens of a text that will be added to the prompt.

        Each trial is drawn anew, so the path of the search decides the samples after it. Raises LengthTooShort if no
        tried size fits.
        """
        # every trial draws from the task's generator, so the bounds affect the prompts; these bounds are RULER's
        if most is None:
            tokens_per_unit = self.measure(draw(step)) / step
            estimated_size = self.length / tokens_per_unit
            most = int(estimated_size * 3)
        low, high = step, max(most, 2 * step)
        best = 0  # the largest size so far that fits; 0: none
        while low <= high:
            middle = (low + high) // 2
            if self.fits(draw(middle), more):
                low, best = middle + 1, middle
            else:
                high = middle - 1
        if not best:
            # the error states the length of the smallest prompt
            raise self.too_short(draw(step), more)
        return best

    def climb(self, draw: Draw, step: int) -> int:
        """Return the largest size whose prompt fits, found by steps upwards from ``step``, as in RULER until 2024.

        The tokens of the prompt's references are counted in addition. Raises LengthTooShort if even ``step`` does not
        fit.
        """
        size = step
        while True:
            prompt = draw(size)
            # RULER's search counted the references in addition to the tokens that the answer may have
            reference_tokens = self.count(" ".join(prompt.answers))
            if not self.fits(prompt, more=reference_tokens):
                break
            size += step
        # the first size did not fit
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
        """Return a prompt of ``size``. While it is too long, draw it again a step smaller, down to ``least``.

        size, step, least: in the task's unit of size, such as words, lines or documents.
        finish: a function that adds a text, which is drawn after the prompt; None: nothing is added.
        more: the number of tokens that the added text is expected to have.

        Raises LengthTooShort if even the smallest prompt is too long.
        """
        while True:
            prompt = draw(size)
            if self.fits(prompt, more):
                if finish is None:
                    return prompt
                # the added text may be longer than expected, so measure the prompt with it
                finished = finish(prompt)
                if self.fits(finished):
                    return finished
            # RULER's script has no such bound: where nothing fits, it never ends
            if size - step < least:
                raise self.too_short(prompt, more)
            size -= step

    def too_short(self, prompt: RulerPrompt, more: int = 0) -> LengthTooShort:
        """Return the error for a length that the smallest prompt exceeds.

        prompt: that prompt.
        more: the number of tokens of a text that would be added to it.
        """
        tokens = self.measure(prompt) + more
        return LengthTooShort(
            f"ruler/{self.task}: lengths={self.length} is too short: a prompt of the smallest size that RULER "
            f"tries has {tokens} tokens here, and its answer {self.new_tokens}; raise lengths="
        )

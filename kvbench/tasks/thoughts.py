"""Thoughts of models that think before they answer: the marks around them, and the answer behind them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

_CLOSING = re.compile(r"([<\[◁])/((?:\w+:)?(?:think|thinking|thought|reasoning))([>\]▷])", re.IGNORECASE)
# templates with channels name a channel of thoughts in place of such a mark (gpt-oss, Gemma 4)
_CHANNELS = (("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"), ("<|channel>thought", "<channel|>"))


@dataclass(frozen=True, kw_only=True)
class Thought:
    """The marks around the thoughts in a model's answers.

    opening, closing: the two marks.
    begun: True if the prompt ends with the opening mark, so that an answer begins inside its thought.
    special: True if the marks are special tokens, which texts without special tokens lack.
    told: True if the model's chat template has these marks; False if they are the usual ones of other models.
    """

    opening: str = "<think>"
    closing: str = "</think>"
    begun: bool = False
    special: bool = False
    told: bool = False

    def find_answer(self, text: str) -> str | None:
        """Return a generated text without its thoughts; None if it ends inside one, and so has no answer."""
        opened, closed = text.find(self.opening), text.find(self.closing)
        if opened < 0 and closed < 0 and not self.begun:
            return text
        # a mark that closes a thought before one opens it: the prompt has opened it
        if self.begun or 0 <= closed < opened or opened < 0:
            text = self.opening + text
        answer, opening, rest = text.partition(self.opening)
        while opening:
            _, closing, rest = rest.partition(self.closing)
            if not closing:
                return None
            # blank lines separate an answer from its thought
            part, opening, rest = re.sub(r"^\s*\n", "", rest).partition(self.opening)
            answer += part
        # a second mark that closes a thought closes the same one
        return answer.rpartition(self.closing)[2]


THOUGHT = Thought()
"""The usual marks, where the chat template has none."""


def read_thought(tokenizer: Any, template: str, prompt_end: str) -> Thought:
    """Return the marks of thoughts that a chat template has; THOUGHT if it has none.

    prompt_end: a prompt as the model reads it, or its end.
    """
    match = _CLOSING.search(template)
    if match is not None:
        left, name, right = match.groups()
        opening, closing = f"{left}{name}{right}", match[0]
    else:
        found = [pair for pair in _CHANNELS if all(mark in template for mark in pair)]
        if not found:
            return THOUGHT
        opening, closing = found[0]
    ids = tokenizer.encode(closing, add_special_tokens=False)
    return Thought(
        opening=opening,
        closing=closing,
        begun=prompt_end.rstrip().endswith(opening),
        special=closing not in tokenizer.decode(ids, skip_special_tokens=True),
        told=True,
    )

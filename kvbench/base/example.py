"""One prompt of a dataset with its references."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Turn:
    """One of several questions about one context, with its references and the beginning of its answer."""

    question: str
    answers: tuple[str, ...]
    prefix: str = ""


@dataclass(frozen=True)
class Example:
    """One prompt with its references, or one context with several questions.

    prompt: the text before tokenisation.
    answers: the acceptable references.
    classes: the closed set of labels of a classification task.
    question: the end of the prompt that ``query_aware=false`` withholds until the rest is compressed; '' if unknown.
    tokens: the exact ids of a text that is scored by its likelihood, from ``meta["prefix"]`` on. It has no answer.
    meta: facts about the example (length, depth, ...) that reports use.
    answer_prefix: the beginning of the answer. The model reads it last, behind the chat template if there is one.
    turns: the questions about the context ``prompt``, in order. ``question`` and ``answers`` are then empty.
    """

    id: str
    prompt: str
    answers: tuple[str, ...]
    max_new_tokens: int
    classes: tuple[str, ...] = ()
    question: str = ""
    tokens: tuple[int, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)
    answer_prefix: str = ""
    turns: tuple[Turn, ...] = ()

    def asked(self, turn: int) -> Example:
        """Return one of the context's questions as a prompt of its own; ``turn`` counts from 0."""
        question = self.turns[turn]
        return replace(
            self,
            # ids count questions from 1, as people do
            id=f"{self.id}#{turn + 1}",
            # a question stands behind its context, so one compressed context serves all questions
            prompt=self.prompt + question.question,
            question=question.question,
            answers=question.answers,
            # a question that states no beginning of its answer takes its context's
            answer_prefix=question.prefix or self.answer_prefix,
            turns=(),
        )

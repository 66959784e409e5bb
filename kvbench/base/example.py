"""One prompt of a dataset with its references."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Turn:
    """One of several questions that are asked of one context, with its references and the beginning of its answer."""

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
    tokens: the exact ids of a text that is not answered but scored by its likelihood, from ``meta["prefix"]`` on.
    meta: facts about the example (length, depth, ...) that reports use.
    answer_prefix: the beginning of the answer, which ends what the model reads, behind a chat template if one is used.
    turns: the questions asked of the context ``prompt`` one after another; then ``question`` and ``answers`` are empty.
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
            # a question stands behind its context, which is why one compressed context serves all of them
            prompt=self.prompt + question.question,
            question=question.question,
            answers=question.answers,
            # a question without a beginning of its answer has that of its context
            answer_prefix=question.prefix or self.answer_prefix,
            turns=(),
        )

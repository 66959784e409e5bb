"""One prompt of a dataset with its references."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True)
class Turn:
    """One of several questions about one context.

    question: the text that is read behind the context.
    answers: the acceptable references.
    prefix: the beginning of the answer, which the model reads last; '' takes the ``answer_prefix`` of the context.
    """

    question: str
    answers: tuple[str, ...]
    prefix: str = ""


@dataclass(frozen=True)
class ScoredText:
    """A text that is scored token by token, by its likelihood, and has no answer.

    ids: the exact token ids.
    prefix: the number of tokens that are read and compressed first. All tokens behind them are fed.
    chunk: the number of tokens that are fed at once.
    divisor: the number by which the text's loss is divided: its tokens, words or bytes.
    scored_from: in windows of a long text, the index in ``ids`` of the token behind which predictions count: the first
        predicted token that counts is ids[scored_from + 1]. None, or the prefix itself: all tokens behind the prefix
        count.
    document: the name of the document that the text is from; '' if it is not named.
    """

    ids: tuple[int, ...]
    prefix: int
    divisor: float
    chunk: int = 1
    scored_from: int | None = None
    document: str = ""

    def facts(self) -> dict[str, object]:
        """Return {field: value} of all fields but ``ids``. ``scored_from`` and ``document`` are left out if unset."""
        facts: dict[str, object] = {"prefix": self.prefix, "chunk": self.chunk, "divisor": self.divisor}
        if self.scored_from is not None:
            facts["scored_from"] = self.scored_from
        if self.document:
            facts["document"] = self.document
        return facts


@dataclass(frozen=True)
class Example:
    """One prompt with its references, or one context with several questions.

    id: the name of the example, which no other example of its task has.
    prompt: the text before tokenisation.
    answers: the acceptable references.
    max_new_tokens: the most tokens of an answer.
    classes: the closed set of labels of a classification task.
    question: the end of the prompt that ``query_aware=false`` withholds until the rest is compressed; '' if unknown.
    scored: the text, if the example is scored by its likelihood. ``prompt`` and ``answers`` are then empty.
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
    scored: ScoredText | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    answer_prefix: str = ""
    turns: tuple[Turn, ...] = ()

    def facts(self) -> dict[str, object]:
        """Return {name: value} of the facts that are stored with an answer: ``meta``, and how a scored text is read."""
        if self.scored is None:
            return dict(self.meta)
        return self.scored.facts() | dict(self.meta)

    def size(self) -> int:
        """Return how long the example is, to compare examples of one task.

        It is the number of tokens of a scored text, or the number of characters of a prompt.
        """
        if self.scored is not None:
            return len(self.scored.ids)
        return len(self.prompt)

    def content(self) -> dict[str, Any]:
        """Return all that the example holds as {name: value}, for hashes of the data."""
        content = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "scored"}
        # turns become dictionaries, from which ``Task.content_hash`` leaves out fields that are not used
        content["turns"] = [asdict(turn) for turn in self.turns]
        # earlier versions had no ScoredText, but its ids as ``tokens`` and its other fields in ``meta``; these keys
        # keep the hashes of that time
        content["tokens"] = self.scored.ids if self.scored is not None else ()
        content["meta"] = self.facts()
        return content

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


def scored_text(example: Example) -> ScoredText:
    """Return the text of an example that is scored by its likelihood. The caller ensures that it is such an example."""
    assert example.scored is not None, f"{example.id} has a prompt and an answer"
    return example.scored

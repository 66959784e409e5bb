"""From a context with several questions to token ids: the context alone, and what is read behind it for each question.

With a chat template the context is the beginning of the first user message. Where questions follow one another, each
later one is a message of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.base.errors import UsageError
from kvbench.base.example import Example
from kvbench.tasks.base import Task
from kvbench.tasks.prompt import SENTINEL, Encoded, PromptPolicy, no_room, part, plain_ids


@dataclass(frozen=True, kw_only=True)
class EncodedTurns(Encoded):
    """A context as token ids, with what is read behind it.

    questions: the tokens of each question, up to where its answer begins.
    references: the first reference of each question, as it is read in place of the model's answer.
    between: True if a question begins with the end of the answer before it, as a chat template has it.
    most: the most tokens that are read behind the context before the last answer begins.
    """

    questions: tuple[tuple[int, ...], ...]
    references: tuple[tuple[int, ...], ...]
    between: bool
    most: int

    def __len__(self) -> int:
        return len(self.ids) + self.most


def encode_turns(
    tokenizer: Any, example: Example, task: Task, policy: PromptPolicy, context: int | None
) -> EncodedTurns:
    """Return the token ids of a context and its questions.

    A context is cut in its middle, by tokens, to leave room for what is read behind it in ``context`` tokens of the
    model: the longest question and answer where questions are isolated, else all of them. ``max_length`` counts the
    context with its longest question.
    """
    templated = policy.templated(task)
    ids, questions = _ids(tokenizer, example, policy, templated)
    isolated, references = task.turns == "isolated", []
    between = policy.between(tokenizer) if templated and not isolated else ""
    frame = _frame(tokenizer, policy, "")[1] if templated else ""
    for i, turn in enumerate(example.turns):
        if i and not isolated:
            end = frame + example.asked(i).answer_prefix
            text = between + (turn.question.lstrip() if between else turn.question) + end
            questions[i] = tuple(plain_ids(tokenizer, text))
        space = "" if templated or turn.question[-1:].isspace() else " "
        references.append(tuple(plain_ids(tokenizer, space + turn.answers[0])))
    longest = max(map(len, questions))
    most = longest
    if not isolated:
        answers = [len(r) if task.turns == "gold" else example.max_new_tokens + 1 for r in references[:-1]]
        most = sum(map(len, questions)) + sum(answers)
    limits = [policy.max_length - longest] if policy.max_length is not None else []
    if context is not None:
        limits.append(context - most - example.max_new_tokens)
    limit = min([len(ids), *limits])
    if limit < 1:
        raise no_room(task)
    cut, front = len(ids) - limit, (limit + 1) // 2
    return EncodedTurns(
        ids=(*ids[:front], *ids[front + cut :]),
        question=(),
        cut=cut,
        questions=tuple(questions),
        references=tuple(references),
        between=bool(between),
        most=most,
    )


def _ids(
    tokenizer: Any, example: Example, policy: PromptPolicy, templated: bool
) -> tuple[Sequence[int], list[tuple[int, ...]]]:
    """Return (the context's ids, those of each question): as each question alone has them, if all agree on the context.

    Else, where a question's beginning is one token with the context's end, context and questions are tokenised apart.
    """
    alone = []
    for i, turn in enumerate(example.turns):
        asked = example.asked(i)
        text = (policy.render(tokenizer, asked.prompt) if templated else asked.prompt) + asked.answer_prefix
        ids = list(tokenizer.encode(text)) if policy.bos and not templated else plain_ids(tokenizer, text)
        alone.append(part(tokenizer, ids, text, turn.question, 0))
    if len({encoded.ids for encoded in alone}) == 1:
        return alone[0].ids, [encoded.question for encoded in alone]
    start, end = _frame(tokenizer, policy, example.prompt) if templated else (example.prompt, "")
    ids = list(tokenizer.encode(start)) if policy.bos and not templated else plain_ids(tokenizer, start)
    questions = [example.asked(i) for i in range(len(example.turns))]
    return ids, [tuple(plain_ids(tokenizer, one.question + end + one.answer_prefix)) for one in questions]


def _frame(tokenizer: Any, policy: PromptPolicy, prompt: str) -> tuple[str, str]:
    """Return what a chat template puts (up to the context's end, behind a question)."""
    start, mark, end = policy.render(tokenizer, prompt + SENTINEL).partition(SENTINEL)
    if not mark:
        raise UsageError("the chat template drops the prompt: it does not print the message's content")
    return start, end

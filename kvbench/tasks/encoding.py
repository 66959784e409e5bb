"""Turn an example into token ids, whether it is a prompt, a context with several questions, or a text to score.

With a chat template, a context with several questions is the beginning of the first user message. If questions follow
one another, each later one is a message of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.base.errors import UsageError
from kvbench.base.example import Example, Turn
from kvbench.tasks.base import Task, Tokenizer
from kvbench.tasks.prompt import (
    SENTINEL,
    Encoded,
    PromptPolicy,
    cut_middle,
    divide_ids,
    encode,
    no_room,
    tokenize_plain,
    tokenize_text,
)


@dataclass(frozen=True, kw_only=True)
class EncodedTurns(Encoded):
    """A context as token ids, with the tokens that are read behind it.

    questions: the tokens of each question, up to the beginning of its answer.
    references: the first reference of each question, in the tokens that are read in place of the model's answer.
    between: True if a question begins with the end of the answer before it, as in a chat template.
    most: the largest number of tokens that are read behind the context before the last answer begins.
    """

    questions: tuple[tuple[int, ...], ...]
    references: tuple[tuple[int, ...], ...]
    between: bool
    most: int

    def __len__(self) -> int:
        """Return the largest number of tokens that are read before the last answer begins."""
        return len(self.ids) + self.most


def encode_prompt(
    tokenizer: Tokenizer, example: Example, task: Task, policy: PromptPolicy, context: int | None
) -> Encoded:
    """Return the example's prompt as token ids, cut so that its longest answer still fits into ``context`` tokens.

    context: the number of tokens that the model can read; None if there is no limit.

    A text that is scored has no answer: its prefix is compressed as a prompt, and the rest is fed to the cache.
    """
    text = example.scored
    if text is not None:
        return Encoded(text.ids[: text.prefix], question=(), cut=0)
    if example.turns:
        return encode_turns(tokenizer, example, task, policy, context)
    room = context - example.max_new_tokens if context is not None else None
    return encode(tokenizer, example, task, policy, room)


def encode_turns(
    tokenizer: Any, example: Example, task: Task, policy: PromptPolicy, context: int | None
) -> EncodedTurns:
    """Return the token ids of a context and its questions.

    context: the number of tokens that the model can read; None if there is no limit.

    The example's text is cut in its middle, by tokens, to leave room for the tokens that are read behind it. Isolated
    questions need room for the longest question and answer, other questions for all questions and answers. The policy's
    ``max_length`` counts the text with its longest question. Raises UsageError if no token of the text can stay.
    """
    policy = policy.suit(task)
    templated = policy.templated(task)
    isolated = task.turns == "isolated"
    ids, questions = _encode_alone(tokenizer, example, policy, templated)
    between = ""
    if not isolated:
        if templated:
            between = policy.render_between(tokenizer)
        # the first question follows the context in every case; later ones follow the answer before them
        questions[1:] = _encode_later_questions(tokenizer, example, policy, templated, between=between)
    references = [_encode_reference(tokenizer, turn, templated) for turn in example.turns]
    most = _count_behind_context(task.turns, questions, references, example.max_new_tokens)
    limit = len(ids)
    if policy.max_length is not None:
        longest_question = max(map(len, questions))
        limit = min(limit, policy.max_length - longest_question)
    if context is not None:
        limit = min(limit, context - most - example.max_new_tokens)
    if limit < 1:
        raise no_room(task)
    return EncodedTurns(
        ids=tuple(cut_middle(ids, limit)),
        question=(),
        cut=len(ids) - limit,
        questions=tuple(questions),
        references=tuple(references),
        between=bool(between),
        most=most,
    )


def _count_behind_context(
    history: str, questions: Sequence[Sequence[int]], references: Sequence[Sequence[int]], max_new_tokens: int
) -> int:
    """Return the largest number of tokens that are read behind the context before the last answer begins.

    history: the task's ``turns``: isolated, gold or own.
    questions, references: the token ids of each.
    max_new_tokens: the most tokens of an answer.
    """
    # an isolated question branches from the context's cache, so at most one question is read behind the context
    if history == "isolated":
        return max(map(len, questions))
    # otherwise the cache holds all questions, and the answers to all but the last one
    question_tokens = sum(map(len, questions))
    if history == "gold":
        return question_tokens + sum(map(len, references[:-1]))
    # the model's own answers may have their full length, and each has one token more that ends it
    return question_tokens + (len(questions) - 1) * (max_new_tokens + 1)


def _encode_alone(
    tokenizer: Any, example: Example, policy: PromptPolicy, templated: bool
) -> tuple[Sequence[int], list[tuple[int, ...]]]:
    """Return (the context's ids, each question's ids) as if each question were the only one.

    templated: True if the prompt goes through the chat template.

    Context and question are tokenised together if the context's ids are then the same for all questions. Otherwise one
    token spans the end of the context and the beginning of some question, and both are tokenised apart.
    """
    special = policy.bos and not templated  # a template has its own special tokens
    prompts = [example.asked(i) for i in range(len(example.turns))]
    together = []
    for prompt in prompts:
        text = prompt.prompt
        if templated:
            text = policy.render_message(tokenizer, text)
        # the beginning of the answer stands behind the template, where the model continues
        text += prompt.answer_prefix
        ids = tokenize_text(tokenizer, text, special)
        together.append(divide_ids(tokenizer, ids, text, prompt.question, cut=0))
    different_contexts = {encoded.ids for encoded in together}
    if len(different_contexts) == 1:
        return together[0].ids, [encoded.question for encoded in together]
    # the context's last token depends on the question behind it, so tokenise both apart
    if templated:
        start, end = _split_template(tokenizer, policy, example.prompt)
    else:
        start, end = example.prompt, ""
    questions = []
    for prompt in prompts:
        questions.append(tuple(tokenize_plain(tokenizer, prompt.question + end + prompt.answer_prefix)))
    return tokenize_text(tokenizer, start, special), questions


def _encode_later_questions(
    tokenizer: Any, example: Example, policy: PromptPolicy, templated: bool, *, between: str
) -> list[tuple[int, ...]]:
    """Return the ids of each question but the first, in the form in which it follows the answer before it.

    templated: True if the questions go through the chat template.
    between: the text of the template between that answer and the question; '' without a template.
    """
    end = ""
    if templated:
        _, end = _split_template(tokenizer, policy, "")
    later = []
    for i, turn in enumerate(example.turns[1:], start=1):
        question = turn.question
        if between:
            # a message does not begin with the blank lines that separate a question from the context
            question = question.lstrip()
        text = between + question + end + example.asked(i).answer_prefix
        later.append(tuple(tokenize_plain(tokenizer, text)))
    return later


def _encode_reference(tokenizer: Any, turn: Turn, templated: bool) -> tuple[int, ...]:
    """Return the ids of a question's first reference, as a model would answer behind the question.

    templated: True if the question goes through the chat template.
    """
    reference = turn.answers[0]
    # behind "Answer:" a model begins with a space; the end of a template has its own whitespace
    if not templated and not turn.question[-1:].isspace():
        reference = f" {reference}"
    return tuple(tokenize_plain(tokenizer, reference))


def _split_template(tokenizer: Any, policy: PromptPolicy, prompt: str) -> tuple[str, str]:
    """Return the chat template's text around a question that follows ``prompt``: (up to the question, behind it).

    Raises UsageError if the template does not print the prompt.
    """
    # the sentinel takes the question's place
    start, mark, end = policy.render_message(tokenizer, prompt + SENTINEL).partition(SENTINEL)
    if not mark:
        raise UsageError("the chat template drops the prompt: it does not print the message's content")
    return start, end

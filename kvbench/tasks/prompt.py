"""From a prompt's text to the token ids that a model reads. Every choice is explicit and part of a cell's identity.

Presets live in conf/prompt: what each paper's scripts did, with the source of every value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvbench.base.conf import is_whole
from kvbench.base.errors import UsageError
from kvbench.base.example import Example
from kvbench.tasks.base import Task, Tokenizer

TEMPLATES = ("off", "on", "skip")
TRUNCATIONS = ("tokens", "text")
SENTINEL = "kvbench5entinel"


@dataclass(frozen=True)
class PromptPolicy:
    """The policy by which prompts reach the model.

    template: whether the tokenizer's chat template is ``on`` or ``off`` for all tasks, or ``skip``: on except for
    tasks that are read without one (few-shot and code).
    truncation: how a prompt longer than ``max_length`` tokens loses its middle: by ``tokens`` exactly, or as ``text``,
    whose halves are decoded and tokenised again, as LongBench's scripts do (and as a template needs in any case).
    max_length: the most tokens of a prompt without template, special tokens counted; None for context minus answer.
    min_new_tokens: the least tokens of an answer for every task; None to take each task's own.
    system: the text of a system message, used with the template.
    query_aware: False compresses the context before the question is known, which is then appended whole; None for what
    each task has.
    frame: the text of a chat template in place of the tokenizer's own, where a paper's script had one.
    bos: False leaves out the special tokens that the tokenizer puts around a text; a template has its own.
    thinking: False renders a chat template that has a switch for it without thinking.
    """

    name: str = "plain"
    template: str = "off"
    truncation: str = "tokens"
    max_length: int | None = None
    min_new_tokens: int | None = None
    system: str | None = None
    query_aware: bool | None = None
    frame: str | None = None
    bos: bool = True
    thinking: bool = True

    def __post_init__(self) -> None:
        for key, allowed in (("template", TEMPLATES), ("truncation", TRUNCATIONS)):
            if getattr(self, key) not in allowed:
                raise UsageError(f"prompt.{key}={getattr(self, key)!r} is not possible: one of {', '.join(allowed)}")
        for key, low in (("max_length", 1), ("min_new_tokens", 0)):
            value = getattr(self, key)
            if value is not None and (not is_whole(value) or value < low):
                raise UsageError(f"{key}={value!r} is not possible: a whole number, {low} or more")
        if not isinstance(self.system, (str, type(None))):
            raise UsageError(f"prompt.system={self.system!r} is not possible: a text, in quotes if it is a number")
        if not isinstance(self.query_aware, bool | None):
            raise UsageError(f"prompt.query_aware={self.query_aware!r} is not possible: true, false, or null")
        for key in ("bos", "thinking"):
            if not isinstance(getattr(self, key), bool):
                raise UsageError(f"prompt.{key}={getattr(self, key)!r} is not possible: true or false")

    def templated(self, task: Task) -> bool:
        """Tell if this task's prompts go through the chat template."""
        return self.template == "on" or (self.template == "skip" and task.chat)

    def aware(self, task: Task) -> bool:
        """Tell if the question of this task's prompts is read before the context is compressed.

        It never is where a context has several, since one cache cannot be made for each of them.
        """
        return not task.turns and (task.query_aware if self.query_aware is None else self.query_aware)

    def render(self, tokenizer: Any, content: str) -> str:
        """Return the text of one user message inside the chat template, ready for the answer."""
        if not (self.frame or getattr(tokenizer, "chat_template", None)):
            raise UsageError(
                "the prompts are to go through a chat template (prompt=chat, or template=on or skip), and the model's "
                "tokenizer has no chat template: use prompt=plain or template=off, or give one with "
                "model.chat_template="
            )
        return self.rendered(tokenizer, [{"role": "user", "content": content}])

    def rendered(self, tokenizer: Any, talk: list[dict[str, str]]) -> str:
        """Return the text of a talk inside the chat template, ready for the answer to its last message."""
        messages = [*([{"role": "system", "content": self.system}] if self.system else []), *talk]
        options: dict[str, Any] = {} if self.frame is None else {"chat_template": self.frame}
        if not self.thinking:
            options["enable_thinking"] = False
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options))
        except Exception as error:
            raise UsageError(f"the model's chat template cannot be applied: {error}") from None

    def renderer(self, tokenizer: Any) -> Callable[[str], str] | None:
        """Return the function from a prompt to its text in the chat template, None if no task uses one."""
        return None if self.template == "off" else partial(self.render, tokenizer)

    def between(self, tokenizer: Any) -> str:
        """Return what a chat template puts between an answer and the user's next message."""
        talk = [{"role": role, "content": f"{SENTINEL}{i}."} for i, role in enumerate(("user", "assistant", "user"))]
        return self.rendered(tokenizer, talk).partition(f"{SENTINEL}1.")[2].partition(f"{SENTINEL}2.")[0]

    def identity(self, task: Task, tokenizer: Any) -> dict[str, Any]:
        """Return the policy's settings for one task, with the template's text and without the preset's name."""
        if task.examples[0].tokens:
            return {"text": "as tokens"}
        frame = self.render(tokenizer, SENTINEL) if self.templated(task) else ""
        if frame and task.turns in ("gold", "own"):
            frame += self.between(tokenizer)
        bare = not (self.bos or frame) and list(tokenizer.encode(SENTINEL)) != plain_ids(tokenizer, SENTINEL)
        return {
            "template": hashlib.sha256(frame.encode()).hexdigest()[:16] if frame else False,
            "system": self.system if frame else None,
            "truncation": "tokens" if task.turns else self.truncation,
            "max_length": self.max_length,
            "query_aware": self.aware(task),
            **({"bos": False} if bare else {}),
        }


@dataclass(frozen=True)
class Encoded:
    """A prompt as token ids.

    ids: the tokens that are prefilled.
    question: the tokens that are appended after compression, none unless ``query_aware=false``.
    cut: the number of tokens that were cut out.
    """

    ids: tuple[int, ...]
    question: tuple[int, ...]
    cut: int

    def __len__(self) -> int:
        return len(self.ids) + len(self.question)


def encode(tokenizer: Any, example: Example, task: Task, policy: PromptPolicy, room: int | None) -> Encoded:
    """Return the token ids of a prompt. ``room`` is the model's context minus the answer, None if there is no limit.

    The prompt is cut first, counted with its special tokens as LongBench's scripts count; then the template is rendered
    with the real content and tokenised once, so that the ids are those of the template's own text.
    """
    templated = policy.templated(task)
    question, prefix = _question(example, task, policy), example.answer_prefix
    whole = example.prompt if templated else example.prompt + prefix
    all_ids = list(tokenizer.encode(whole)) if policy.bos else plain_ids(tokenizer, whole)
    limit = _limit(tokenizer, example, task, policy, room, all_ids)
    if limit is None or len(all_ids) <= limit:
        if not templated:
            return part(tokenizer, all_ids, whole, question, 0)
        text = policy.render(tokenizer, example.prompt) + prefix
        return part(tokenizer, plain_ids(tokenizer, text), text, question, 0)
    if policy.truncation == "tokens" and not templated:
        front = (limit + 1) // 2
        shortened = [*all_ids[:front], *all_ids[len(all_ids) - (limit - front) :]] if limit > front else all_ids[:front]
        held_back = _count(tokenizer, whole, question)
        if held_back > limit - front:
            raise no_room(task)
        divide = limit - held_back
        return Encoded(tuple(shortened[:divide]), tuple(shortened[divide:]), len(all_ids) - limit)
    half = limit // 2
    content = "".join(
        tokenizer.decode(h, skip_special_tokens=True)
        for h in (all_ids[:half], all_ids[len(all_ids) - half :] if half else [])
    )
    if question and not content.endswith(question if templated else question + prefix):
        raise no_room(task)
    text = policy.render(tokenizer, content) + prefix if templated else content
    ids = plain_ids(tokenizer, text) if templated or not policy.bos else list(tokenizer.encode(text))
    if room is not None and len(ids) > room:
        # tokenising again can give a few more tokens than were kept
        ids = [*ids[: room // 2], *ids[len(ids) - (room - room // 2) :]]
    return part(tokenizer, ids, text, question, len(all_ids) - 2 * half)


def check(tokenizer: Any, task: Task, policy: PromptPolicy) -> None:
    """Raise UsageError, before anything is read, for a policy that this task or tokenizer cannot follow."""
    if policy.templated(task) and SENTINEL not in policy.render(tokenizer, SENTINEL):
        raise UsageError("the chat template drops the prompt: it does not print the message's content")
    answers = [e.max_new_tokens for e in task.examples if not e.tokens]
    if answers and policy.min_new_tokens is not None and policy.min_new_tokens > max(answers):
        raise UsageError(
            f"min_new_tokens={policy.min_new_tokens} is not possible: answers of {task.id} have {max(answers)} tokens "
            "at most (max_new_tokens= allows more)"
        )
    for example in task.examples:
        if not (example.tokens or example.turns):
            _question(example, task, policy)


def _question(example: Example, task: Task, policy: PromptPolicy) -> str:
    """Return the question at the prompt's end, which ``query_aware=false`` withholds, or '' if the policy does not."""
    if policy.aware(task):
        return ""
    if not example.question or not example.prompt.endswith(example.question):
        raise UsageError(
            f"query_aware=false: {task.id} does not say where the question of example {example.id} begins; run it with "
            "query_aware=true (lines of dataset=file have context and question in place of prompt)"
        )
    return example.question


def _limit(
    tokenizer: Any, example: Example, task: Task, policy: PromptPolicy, room: int | None, all_ids: Sequence[int]
) -> int | None:
    """Return how many tokens of the prompt without template may stay, None if there is no limit."""
    available = room
    if room is not None and policy.templated(task):
        framed = plain_ids(tokenizer, policy.render(tokenizer, example.prompt) + example.answer_prefix)
        available = room - max(0, len(framed) - len(all_ids))
    limits = [x for x in (policy.max_length, available) if x is not None]
    if limits and min(limits) < 1:
        raise no_room(task)
    return min(limits) if limits else None


def part(tokenizer: Any, ids: Sequence[int], text: str, question: str, cut: int) -> Encoded:
    """Return the ids of ``text`` divided into context and question; together they are the ids of the whole text."""
    question_length = _count(tokenizer, text, question)
    return Encoded(tuple(ids[: len(ids) - question_length]), tuple(ids[len(ids) - question_length :]), cut)


def _count(tokenizer: Any, text: str, question: str) -> int:
    """Return how many tokens of ``text`` lie between the start of the last ``question`` in it and the end."""
    if not question:
        return 0
    # a template may strip the whitespace around the message
    start = text.rindex(question.strip())
    if getattr(tokenizer, "is_fast", False):
        offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        return sum(end > start for _, end in offsets)
    return len(plain_ids(tokenizer, text[start:]))


def plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text without special tokens."""
    return list(tokenizer.encode(text, add_special_tokens=False)) if text else []


def no_room(task: Task) -> UsageError:
    """Return the error for a limit that question, answer and template use up."""
    return UsageError(
        f"{task.id}: the limit leaves no room for a prompt (answer, question and template take it all); "
        "raise max_length or lower max_new_tokens"
    )

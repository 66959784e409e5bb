"""Turn a prompt's text into the token ids that a model reads. Every choice is explicit and part of a cell's identity.

The presets in conf/prompt hold the choices of each paper's scripts, with the source of every value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvbench.base.conf import is_whole
from kvbench.base.errors import UsageError
from kvbench.base.example import Example
from kvbench.tasks.base import Task, Tokenizer
from kvbench.tasks.thoughts import Thought, read_thought

TEMPLATES = ("off", "on", "skip")
"""The possible values of ``PromptPolicy.template``."""
TRUNCATIONS = ("tokens", "text")
"""The possible values of ``PromptPolicy.truncation``."""
SWITCH = "enable_thinking"
"""The variable of chat templates that switches thinking off."""
THOUGHT_ROOM = 1024
"""An answer of fewer tokens cannot hold a thought."""
SENTINEL = "kvbench5entinel"
"""A text that no template holds. The place where it comes out of a template is the place of the content."""


@dataclass(frozen=True)
class PromptPolicy:
    """The policy by which prompts reach the model.

    name: the name of the preset.
    template: ``on`` or ``off`` uses the tokenizer's chat template for all tasks or for none. ``skip`` uses it except
    for tasks that are read without one (few-shot and code).
    truncation: how a prompt longer than ``max_length`` tokens loses its middle: by ``tokens`` exactly, or as ``text``.
    As text its halves are decoded and tokenised again, as in LongBench's scripts. A template always needs this.
    max_length: the most tokens of a prompt without template, with special tokens. None means context minus answer.
    min_new_tokens: the least tokens of an answer for every task. None takes each task's own.
    system: the text of a system message, used with the template; None for none.
    frame: the text of a chat template in place of the tokenizer's own, for papers whose scripts had one.
    bos: False leaves out the special tokens that the tokenizer puts around a text. A template has its own.
    thinking: False renders a chat template without thinking if it has a switch for it. None does so for tasks whose
    answers have fewer than THOUGHT_ROOM tokens.
    """

    name: str = "plain"
    template: str = "off"
    truncation: str = "tokens"
    max_length: int | None = None
    min_new_tokens: int | None = None
    system: str | None = None
    frame: str | None = None
    bos: bool = True
    thinking: bool | None = None

    def __post_init__(self) -> None:
        """Raise UsageError for an impossible value: YAML and the command line give values of any type."""
        for key, allowed in (("template", TEMPLATES), ("truncation", TRUNCATIONS)):
            value = getattr(self, key)
            if value not in allowed:
                raise UsageError(f"prompt.{key}={value!r} is not possible: one of {', '.join(allowed)}")
        for key, least in (("max_length", 1), ("min_new_tokens", 0)):
            value = getattr(self, key)
            if value is not None and (not is_whole(value) or value < least):
                raise UsageError(f"{key}={value!r} is not possible: a whole number, {least} or more")
        if not isinstance(self.system, str | None):
            raise UsageError(f"prompt.system={self.system!r} is not possible: a text, in quotes if it is a number")
        if not isinstance(self.bos, bool):
            raise UsageError(f"prompt.bos={self.bos!r} is not possible: true or false")
        if not isinstance(self.thinking, bool | None):
            raise UsageError(f"prompt.thinking={self.thinking!r} is not possible: true, false or null")

    def templated(self, task: Task) -> bool:
        """Return True if this task's prompts go through the chat template."""
        return self.template == "on" or (self.template == "skip" and task.chat)

    def suit(self, task: Task) -> PromptPolicy:
        """Return the policy for one task: without thinking if that is left open and its answers are too short."""
        if self.thinking is not None:
            return self
        return replace(self, thinking=task.longest_answer >= THOUGHT_ROOM)

    def find_thought(self, tokenizer: Any, task: Task) -> Thought:
        """Return the marks of thoughts in the answers to a task's prompts."""
        frame = ""
        if self.templated(task):
            frame = self.suit(task).render_message(tokenizer, SENTINEL)
        return read_thought(tokenizer, self.template_text(tokenizer), frame)

    def thinks(self, tokenizer: Any) -> bool:
        """Return False if the chat template is to switch thinking off, and has a switch for it."""
        # some tokenizers refuse what their template does not read
        return self.thinking is not False or SWITCH not in self.template_text(tokenizer)

    def template_text(self, tokenizer: Any) -> str:
        """Return the source of the chat template; '' if there is none."""
        return str(self.frame or getattr(tokenizer, "chat_template", None) or "")

    def render_message(self, tokenizer: Any, content: str) -> str:
        """Return the text of one user message inside the chat template, ready for the answer.

        Raises UsageError if there is no chat template, or if it fails.
        """
        if not self.template_text(tokenizer):
            raise UsageError(
                "the prompts are to go through a chat template (prompt=chat, or template=on or skip), and the model's "
                "tokenizer has no chat template: use prompt=plain or template=off, or give one with "
                "model.chat_template="
            )
        without = drop_typed_bos(tokenizer, content)
        if without != content:
            text = self.render_talk(tokenizer, [{"role": "user", "content": without}])
            # the template writes the token itself, once: some templates begin every message with it
            if text.startswith(tokenizer.bos_token) and text.count(tokenizer.bos_token) == 1:
                return text
        return self.render_talk(tokenizer, [{"role": "user", "content": content}])

    def render_talk(self, tokenizer: Any, talk: list[dict[str, str]]) -> str:
        """Return the text of a talk inside the chat template, ready for the answer to the last message.

        talk: messages, each with a ``role`` and its ``content``.

        Raises UsageError if the template fails.
        """
        messages = list(talk)
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        options: dict[str, object] = {}
        if self.frame is not None:
            options["chat_template"] = self.frame
        if not self.thinks(tokenizer):
            options[SWITCH] = False
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options))
        except Exception as error:
            # templates are programs and may raise any error
            raise UsageError(f"the model's chat template cannot be applied: {error}") from None

    def count_templated(self, tokenizer: Any, prompts: Iterable[str]) -> int:
        """Return how many prompts hold the text that the chat template puts around a message.

        It is 0 without a template, and for one that fails: prompts are refused where it is to be applied.
        """
        try:
            start, _, end = self.render_message(tokenizer, SENTINEL).partition(SENTINEL)
        except UsageError:
            return 0
        # the last line before a message and the first line behind it, since system messages differ
        lines = (drop_typed_bos(tokenizer, start).strip().split("\n")[-1], end.strip().split("\n")[0])
        marks = [line for line in lines if line]
        return sum(bool(marks) and all(mark in prompt for mark in marks) for prompt in prompts)

    def make_renderer(self, tokenizer: Any) -> Callable[[str], str] | None:
        """Return the function from a prompt to its text in the chat template; None if no task uses one."""
        if self.template == "off":
            return None
        return partial(self.render_message, tokenizer)

    def render_between(self, tokenizer: Any) -> str:
        """Return the text that a chat template puts between an answer and the user's next message."""
        # marks stand for the messages: the wanted text is what the template puts between the last two marks
        question, answer, next_question = [f"{SENTINEL}{i}." for i in range(3)]
        talk = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": next_question},
        ]
        _, _, behind_answer = self.render_talk(tokenizer, talk).partition(answer)
        between, _, _ = behind_answer.partition(next_question)
        return between

    def identity(self, task: Task, tokenizer: Any) -> dict[str, object]:
        """Return the policy's settings for one task, with the template's text and without the preset's name.

        They are part of a cell's identity. A setting that changes no prompt of the task is left out or constant, so
        that it makes no new cell.
        """
        # the examples of a task are all scored texts, or none is
        if task.examples[0].scored:
            return {"text": "as tokens"}
        settings: dict[str, object] = {
            "template": False,
            "system": None,
            "truncation": self.truncation,
            "max_length": self.max_length,
            "query_aware": task.query_aware,
        }
        if task.turns:
            # contexts of several questions are always cut by tokens
            settings["truncation"] = "tokens"
        is_typed = any(drop_typed_bos(tokenizer, example.prompt) != example.prompt for example in task.examples)
        if is_typed and (self.templated(task) or list(tokenizer.encode(""))):
            # earlier versions read such prompts with two tokens at the beginning, and have them under the older id
            settings["bos"] = "once"
        if self.templated(task):
            policy = self.suit(task)
            frame = policy.render_message(tokenizer, SENTINEL)
            # with a history, the text between an answer and the next question changes prompts as well
            if frame and task.turns in ("gold", "own"):
                frame += policy.render_between(tokenizer)
            # ``check_policy`` refuses a template that prints nothing
            if frame:
                # a template has its own special tokens, so ``bos`` changes nothing
                settings["template"] = hashlib.sha256(frame.encode()).hexdigest()[:16]
                settings["system"] = self.system
                return settings
        # bos=false changes nothing for a tokenizer that puts no tokens around a text
        if not self.bos and list(tokenizer.encode(SENTINEL)) != tokenize_plain(tokenizer, SENTINEL):
            settings["bos"] = False
        return settings


@dataclass(frozen=True)
class Encoded:
    """A prompt as token ids.

    ids: the tokens that are prefilled, and that methods compress.
    question: the tokens that are appended after compression, empty unless ``query_aware=false``.
    cut: the number of tokens that were cut out of the prompt.
    """

    ids: tuple[int, ...]
    question: tuple[int, ...]
    cut: int

    def __len__(self) -> int:
        """Return the number of tokens that are read before the answer begins."""
        return len(self.ids) + len(self.question)


def encode(tokenizer: Any, example: Example, task: Task, policy: PromptPolicy, room: int | None) -> Encoded:
    """Return the token ids of a prompt. ``room`` is the model's context minus the answer; None if there is no limit.

    Raises UsageError if the limits leave no room for the prompt, or if the question to withhold is unknown.

    The prompt is cut first, counted with its special tokens as in LongBench's scripts. Then the template is rendered
    with the real content and tokenised once, so that the ids are those of the template's own text.
    """
    policy = policy.suit(task)
    templated = policy.templated(task)
    question = _find_withheld_question(example, task)
    # with a template, the answer's beginning does not belong to the user's message and is added later
    prompt_text = example.prompt
    if not templated:
        prompt_text += example.answer_prefix
    # count special tokens, or the ids would exceed the limit
    prompt_ids = tokenize_text(tokenizer, prompt_text, policy.bos)
    limit = _find_limit(tokenizer, example, task, policy, room=room, prompt_tokens=len(prompt_ids))
    if limit is None or len(prompt_ids) <= limit:
        # nothing is cut
        if not templated:
            return divide_ids(tokenizer, prompt_ids, prompt_text, question, cut=0)
        text = policy.render_message(tokenizer, example.prompt) + example.answer_prefix
        return divide_ids(tokenizer, tokenize_plain(tokenizer, text), text, question, cut=0)
    if templated or policy.truncation == "text":
        return _encode_halves(tokenizer, example, task, policy, prompt_ids=prompt_ids, limit=limit, room=room)
    shortened = cut_middle(prompt_ids, limit)
    # the question's tokens are the last ones, which a cut in the middle leaves if they lie within the second half
    question_length = _count_question_tokens(tokenizer, prompt_text, question)
    if question_length > limit // 2:
        raise no_room(task)
    divide = limit - question_length
    return Encoded(ids=tuple(shortened[:divide]), question=tuple(shortened[divide:]), cut=len(prompt_ids) - limit)


def _encode_halves(
    tokenizer: Any,
    example: Example,
    task: Task,
    policy: PromptPolicy,
    *,
    prompt_ids: Sequence[int],
    limit: int,
    room: int | None,
) -> Encoded:
    """Return a prompt whose halves of ``limit // 2`` tokens each were decoded, joined and tokenised again.

    prompt_ids: the tokens of the whole prompt without template, which are more than ``limit``.
    limit: how many of these tokens may stay.
    room: the model's context minus the answer; None if there is no limit.

    This is the cut of LongBench's pred.py. A template needs it, since it is rendered around a text.
    """
    templated = policy.templated(task)
    question = _find_withheld_question(example, task)
    half = limit // 2
    # not prompt_ids[-half:], since that would be everything for a half of 0
    front, back = prompt_ids[:half], prompt_ids[len(prompt_ids) - half :]
    content = tokenizer.decode(front, skip_special_tokens=True) + tokenizer.decode(back, skip_special_tokens=True)
    # without a template, the answer's beginning is a part of the prompt that was cut
    prompt_end = question if templated else question + example.answer_prefix
    # the cut must leave the whole question
    if question and not content.endswith(prompt_end):
        raise no_room(task)
    if templated:
        text = policy.render_message(tokenizer, content) + example.answer_prefix
        ids = tokenize_plain(tokenizer, text)
    else:
        text = content
        ids = tokenize_text(tokenizer, text, policy.bos)
    if room is not None and len(ids) > room:
        # tokenising again can give a few more tokens than were kept, so the middle is cut once more, by tokens
        front_length = room // 2
        back_length = room - front_length
        ids = ids[:front_length] + ids[len(ids) - back_length :]
    return divide_ids(tokenizer, ids, text, question, cut=len(prompt_ids) - 2 * half)


def cut_middle(ids: Sequence[int], limit: int) -> list[int]:
    """Return the first and the last ids, ``limit`` together. The front has one more if ``limit`` is odd."""
    front = (limit + 1) // 2
    back = limit - front
    return list(ids[:front]) + list(ids[len(ids) - back :])


def check_policy(tokenizer: Any, task: Task, policy: PromptPolicy) -> None:
    """Raise UsageError, before anything is read, for a policy that this task or tokenizer cannot follow."""
    # some templates print only messages of known roles, or take the content from another field
    if policy.templated(task) and SENTINEL not in policy.suit(task).render_message(tokenizer, SENTINEL):
        raise UsageError("the chat template drops the prompt: it does not print the message's content")
    # windows of a text have no answer whose length could be compared
    answers = [e.max_new_tokens for e in task.examples if not e.scored]
    if answers and policy.min_new_tokens is not None and policy.min_new_tokens > max(answers):
        raise UsageError(
            f"min_new_tokens={policy.min_new_tokens} is not possible: answers of {task.id} have {max(answers)} tokens "
            "at most (max_new_tokens= allows more)"
        )
    for example in task.examples:
        # scored texts have no question, and a context's several questions always come after it
        if not (example.scored or example.turns):
            # raises if the question is to be withheld and the prompt does not end with it
            _find_withheld_question(example, task)


def _find_withheld_question(example: Example, task: Task) -> str:
    """Return the question at the prompt's end that is read after the compression; '' if no question is withheld.

    Raises UsageError if a question is to be withheld and the example does not end with its question.
    """
    if task.query_aware:
        return ""
    if not example.question or not example.prompt.endswith(example.question):
        raise UsageError(
            f"query_aware=false: {task.id} does not say where the question of example {example.id} begins; run it with "
            "query_aware=true (lines of dataset=file have context and question in place of prompt)"
        )
    return example.question


def _find_limit(
    tokenizer: Any, example: Example, task: Task, policy: PromptPolicy, *, room: int | None, prompt_tokens: int
) -> int | None:
    """Return how many tokens of the prompt without template may stay; None if there is no limit.

    room: the model's context minus the answer; None if there is no limit.
    prompt_tokens: the number of the prompt's tokens without template.

    Raises UsageError if no token may stay.
    """
    limits = []
    if policy.max_length is not None:
        limits.append(policy.max_length)
    if room is not None and policy.templated(task):
        # the template's own tokens and the answer's beginning take part of the room
        framed = tokenize_plain(tokenizer, policy.render_message(tokenizer, example.prompt) + example.answer_prefix)
        # ``max``: the prompt's own special tokens, which the template replaces, may be more than the template's tokens
        limits.append(room - max(0, len(framed) - prompt_tokens))
    elif room is not None:
        limits.append(room)
    if not limits:
        return None
    # a prompt of no tokens cannot be prefilled
    if min(limits) < 1:
        raise no_room(task)
    return min(limits)


def divide_ids(tokenizer: Any, ids: Sequence[int], text: str, question: str, cut: int) -> Encoded:
    """Divide ``ids``, the token ids of ``text``, into context and question.

    question: the last part of ``text``, to be read after the compression; '' if nothing is withheld.
    cut: how many tokens were cut out of the prompt before, for the record.
    """
    question_length = _count_question_tokens(tokenizer, text, question)
    divide = len(ids) - question_length
    return Encoded(tuple(ids[:divide]), tuple(ids[divide:]), cut)


def _count_question_tokens(tokenizer: Any, text: str, question: str) -> int:
    """Return the number of tokens of ``text`` from the start of the last ``question`` in it to the text's end.

    The text must hold the question, apart from whitespace around it.
    """
    if not question:
        return 0
    # a template may strip the whitespace around the message
    start = text.rindex(question.strip())
    if knows_offsets(tokenizer):
        # a token that begins before the question and ends in it belongs to the question
        offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        return sum(end > start for _, end in offsets)
    return len(tokenize_plain(tokenizer, text[start:]))


def knows_offsets(tokenizer: Any) -> bool:
    """Return True if a tokenizer can tell which characters of a text each token stands for.

    Only transformers' fast tokenizers can. A tokenizer that is not from transformers has no flag ``is_fast``.
    """
    return bool(getattr(tokenizer, "is_fast", False))


def tokenize_text(tokenizer: Tokenizer, text: str, special: bool) -> list[int]:
    """Return the ids of a text. ``special`` adds the special tokens that the tokenizer puts around a text.

    If the text begins with the token that begins every text, a second one is not added.
    """
    if not special:
        return tokenize_plain(tokenizer, text)
    ids = list(tokenizer.encode(text))
    begin_id = getattr(tokenizer, "bos_token_id", None)
    while begin_id is not None and ids[:2] == [begin_id, begin_id]:
        del ids[0]
    return ids


def drop_typed_bos(tokenizer: Any, text: str) -> str:
    """Return a text without the tokenizer's beginning-of-sequence tokens that are typed at its start."""
    begin = getattr(tokenizer, "bos_token", None)
    while begin and text.lstrip().startswith(begin):
        text = text.lstrip().removeprefix(begin)
    return text


def tokenize_plain(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text without special tokens."""
    if not text:
        return []
    return list(tokenizer.encode(text, add_special_tokens=False))


def no_room(task: Task) -> UsageError:
    """Return the error for a limit too small for question, answer and template."""
    return UsageError(
        f"{task.id}: the limit leaves no room for a prompt (answer, question and template take it all); "
        "raise max_length or lower max_new_tokens"
    )

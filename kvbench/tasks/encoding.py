"""From an example to token ids: the one entry for prompts, for contexts with several questions, and for texts."""

from __future__ import annotations

from kvbench.base.example import Example
from kvbench.tasks.base import Task, Tokenizer
from kvbench.tasks.prompt import Encoded, PromptPolicy, encode
from kvbench.tasks.turns import encode_turns


def encode_prompt(
    tokenizer: Tokenizer, example: Example, task: Task, policy: PromptPolicy, context: int | None
) -> Encoded:
    """Return the example's prompt as token ids, cut so that its longest answer still fits into ``context`` tokens.

    A text that is scored has no answer: its prefix is compressed as a prompt, and the rest is fed to the cache.
    """
    text = example.scored
    if text is not None:
        return Encoded(text.ids[: text.prefix], (), 0)
    if example.turns:
        return encode_turns(tokenizer, example, task, policy, context)
    longest = None
    if context is not None:
        longest = context - example.max_new_tokens
    return encode(tokenizer, example, task, policy, longest)

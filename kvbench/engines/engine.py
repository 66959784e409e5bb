"""Questions to an engine, its replies, and the errors in place of a reply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvbench.base.errors import KvbenchError
from kvbench.store.results import Facts
from kvbench.tasks.thoughts import THOUGHT, Thought


@dataclass(frozen=True, kw_only=True)
class AskedPrompt:
    """One prompt for an engine.

    text: the prompt, or with ``chat`` the user's message, which the engine puts into its own template.
    ids: the same text as token ids of the tokenizer that ``model=`` names.
    limit: the most tokens of the answer.
    stop: texts that end the answer.
    chat: True if the engine puts the text into its own chat template.
    system: with ``chat``, the text of a system message; '' for none.
    thinking: False if the engine's template is to switch thinking off.
    thought: the marks of thoughts in its answer.
    """

    text: str
    ids: tuple[int, ...]
    limit: int
    stop: tuple[str, ...] = ()
    chat: bool = False
    system: str = ""
    thinking: bool = True
    thought: Thought = THOUGHT


@dataclass(frozen=True, kw_only=True)
class Reply:
    """An engine's answer to one prompt.

    new_tokens: the answer's tokens as the engine counts them; None if it does not say.
    seconds: the time from the question to the answer, including the time in the engine's queue.
    first: the log-probability of the likeliest first tokens, by their text; {} if the engine does not report them.
    bytes: the bytes of the cache as the engine reports them; None if it does not.
    """

    text: str
    new_tokens: int | None
    seconds: float
    first: Mapping[str, float] = field(default_factory=dict)
    bytes: int | None = None


class Engine(Protocol):
    """An engine that answers prompts greedily."""

    def facts(self) -> Facts:
        """Return the engine's name, version and model, for the provenance of results."""

    def ask(self, prompt: AskedPrompt) -> Reply:
        """Return the answer to a prompt. Several threads may ask at once. Raises EngineError if there is no answer."""

    def close(self) -> None:
        """Free the engine's memory, or close the connection to it."""


class EngineError(KvbenchError):
    """The error for a question without an answer.

    ends_run: True if further questions would fail in the same way, so that the run stops. Otherwise only this prompt
    has no answer.
    """

    def __init__(self, message: str, ends_run: bool = True) -> None:
        super().__init__(message)
        self.ends_run = ends_run

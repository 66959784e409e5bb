"""The tokenizers and tasks that plans read, each read once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from kvbench.models import load
from kvbench.models.config import ModelConfig
from kvbench.tasks.base import Task, Tokenizer, load_tasks
from kvbench.tasks.prompt import PromptPolicy


class Inputs:
    """The tokenizers and tasks that one or several plans read. Each is read when it is first asked for, and kept.

    Files that change later do not show in what was read before.
    """

    def __init__(self) -> None:
        self._tokenizers: dict[str, Tokenizer] = {}
        self._tasks: dict[str, tuple[Tokenizer | None, tuple[Task, ...]]] = {}

    def tokenizer(self, cfg: ModelConfig, source: load.ModelSource) -> Tokenizer:
        """Return the tokenizer of a checkpoint. Raises UsageError if it cannot be loaded."""
        key = repr((cfg, source.location, source.revision, source.fingerprint))
        if key not in self._tokenizers:
            self._tokenizers[key] = cast(Tokenizer, load.load_tokenizer(cfg, source))
        return self._tokenizers[key]

    def tasks(
        self,
        dataset: str,
        knobs: Mapping[str, object],
        selection: Sequence[str],
        tokenizer: Tokenizer | None,
        data: str | None = None,
        policy: PromptPolicy | None = None,
        query_aware: bool | None = None,
    ) -> tuple[Task, ...]:
        """Return the tasks that ``load_tasks`` loads. Raises UsageError if they cannot be read.

        dataset, knobs, selection, tokenizer, data, query_aware: as in ``load_tasks``.
        policy: how prompts are read; None: without a chat template.
        """
        render = None
        if policy is not None:
            render = policy.make_renderer(tokenizer)
        # without a chat template, a policy does not change what is loaded
        template = None
        if render is not None:
            template = policy
        key = repr((dataset, sorted(knobs.items()), tuple(selection), data, template, query_aware))
        read_with, tasks = self._tasks.get(key, (None, ()))
        # a dataset has at least one task
        if not tasks or read_with is not tokenizer:
            tasks = tuple(
                load_tasks(
                    dataset, knobs, selection, tokenizer=tokenizer, data=data, render=render, query_aware=query_aware
                )
            )
            self._tasks[key] = (tokenizer, tasks)
        return tasks

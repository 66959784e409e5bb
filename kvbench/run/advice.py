"""Notes for readers of scores: on prompts, on answers, and on columns that show nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbench.metrics import metric, score, stats
from kvbench.tasks.base import Task
from kvbench.tasks.prompt import PromptPolicy

SHORT_ANSWER = 16
"""Answers of fewer new tokens may end early: a chat model begins with words of the question."""


def about_prompts(policy: PromptPolicy, tasks: Sequence[Task], tokenizer: Any) -> list[str]:
    """Return notes on prompt settings that are pointless or harmful with this tokenizer and these tasks."""
    answered = [t for t in tasks if not t.examples[0].tokens]
    templated = [t for t in answered if policy.templated(t)]
    notes = []
    if answered and policy.name == "plain" and policy.template == "off" and getattr(tokenizer, "chat_template", None):
        notes.append("The tokenizer has a chat template; prompt=chat applies it.")
    if policy.system and not templated:
        notes.append("system= is ignored: no prompt here goes through a chat template (prompt=chat applies it).")
    short = {t.id: n for t in templated if (n := max(e.max_new_tokens for e in t.examples)) < SHORT_ANSWER}
    if short:
        notes.append(
            f"{', '.join(short)}: answers of at most {max(short.values())} tokens can end before a chat model has come "
            "to the point; max_new_tokens=32 or so gives it room."
        )
    return notes


def at_floor(task: Task, full: stats.Scores) -> bool:
    """Return True if the full cache's scores of a task say nothing, as ``stats.at_floor`` decides.

    Return False for a likelihood, which has no floor.
    """
    return metric(task.metric).shown is None and stats.at_floor(full, chance(task))


def chance(task: Task) -> float:
    """Return the score of an empty answer or of guessing a class, whichever is higher; 0 for a likelihood."""
    first = task.examples[0]
    if first.tokens:
        return 0.0
    empty_score = score(task.metric, task.answer(""), first.asked(0) if first.turns else first) or 0.0
    return max(empty_score, 1 / len(first.classes) if first.classes else 0.0)


def about_floors(names: Sequence[str], columns: int) -> list[str]:
    """Return the note on the columns ``names``, in which the full cache's scores say nothing; [] without names.

    ``columns`` is the number of all columns.
    """
    if not names:
        return []
    clause = "that column shows" if len(names) == 1 else "those columns show"
    effect_on_mean = f" The mean counts {'it' if len(names) == 1 else 'them'}, too." if columns > 1 else ""
    return [
        f"{', '.join(names)}: the full cache itself scores next to nothing or no better than guessing, so {clause} "
        f"nothing about compression.{effect_on_mean}"
    ]

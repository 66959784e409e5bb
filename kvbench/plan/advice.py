"""Notes for readers of scores: on prompts, on answers, and on columns whose scores say nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from kvbench.audit.accounting import bytes_declared
from kvbench.base.conf import entries
from kvbench.base.errors import KvbenchError
from kvbench.base.example import Example
from kvbench.kv.model_shape import Shape
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.resolve import ChainConfig
from kvbench.plan.config import RunConfig
from kvbench.tasks.base import Task
from kvbench.tasks.metrics import metric, stats
from kvbench.tasks.prompt import SWITCH, THOUGHT_ROOM, PromptPolicy

LITTLE_LEFT = 0.1
"""If the prompts that were cut keep less than this share of their tokens, a note says so."""
SHORT_ANSWER = 16
"""Answers of fewer new tokens may end early: a chat model begins with words of the question."""

LARGER = 5
"""A combination is said to be larger than one of its methods if its cache is so many per cent larger."""


def about_prompts(policy: PromptPolicy, tasks: Sequence[Task], tokenizer: Any) -> list[str]:
    """Return notes on prompt settings that are pointless or harmful with this tokenizer and these tasks."""
    # a task's examples are all alike in this: texts of given tokens are only scored, and have no answers
    answered = [task for task in tasks if not task.examples[0].scored]
    templated = [task for task in answered if policy.templated(task)]
    notes = []
    is_bare = policy.name == "plain" and policy.template == "off"
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if answered and is_bare and has_template and not _count_templated(policy, answered, tokenizer):
        notes.append("The tokenizer has a chat template; prompt=chat applies it.")
    for name, count in _count_templated(policy, templated, tokenizer).items():
        notes.append(
            f"{name}: {count} prompts hold the chat template's text already, and prompt={policy.name} applies it "
            "twice; prompt=plain reads them as they are."
        )
    if policy.system and not templated:
        notes.append("system= is ignored: no prompt here goes through a chat template (prompt=chat applies it).")
    # tasks of chat prompts with short answers, and the longest answer of each
    short: dict[str, int] = {}
    for task in templated:
        if task.longest_answer < SHORT_ANSWER:
            short[task.id] = task.longest_answer
    if short:
        notes.append(
            f"{', '.join(short)}: answers of at most {max(short.values())} tokens can end before a chat model has come "
            "to the point; max_new_tokens=32 or so gives it room."
        )
    cramped = [task.id for task in templated if task.thought.told and task.longest_answer < THOUGHT_ROOM]
    if cramped and policy.thinking is None and SWITCH in policy.template_text(tokenizer):
        notes.append(
            f"{', '.join(cramped)}: asked without thinking, since a thought does not fit into answers of fewer than "
            f"{THOUGHT_ROOM:,} tokens (max_new_tokens= gives it room, prompt.thinking=true asks for it all the same)."
        )
    elif cramped and policy.thinking is not False:
        notes.append(
            f"{', '.join(cramped)}: the model may think, and answers of fewer than {THOUGHT_ROOM:,} tokens can end "
            "inside a thought, which scores as an empty answer; max_new_tokens= gives it room."
        )
    return notes


def about_left_out(tasks: Sequence[Task]) -> list[str]:
    """Return a note for each task whose file has records that cannot be used, with their number and the first."""
    notes = []
    for task in tasks:
        if task.left_out:
            total = len(task.examples) + len(task.left_out)
            notes.append(
                f"{task.id}: {len(task.left_out)} of {total} lines are left out, since they cannot be used. The first: "
                f"{task.left_out[0]}"
            )
    return notes


def about_larger_caches(chains: Sequence[ChainConfig], shape: Shape, n: int) -> list[str]:
    """Return a note for each combination whose cache of n tokens is larger than that of one of its methods alone.

    The bytes are those of the formula, at 16 bits. Methods whose bytes depend on the text have no note.
    """
    notes = []
    for entry in chains:
        chain = entry.chain
        held = _count_bytes(chain, shape, n)
        if held is None:
            continue
        for stage in chain.stages:
            # a modifier changes the scores of the selector beside it, and is no method alone
            if len(chain.stages) < 2 or stage.role == "modifier":
                continue
            alone = _count_bytes(Chain((stage,), chain.per), shape, n)
            if alone is None:
                continue
            percent = round(100 * (held / alone - 1))
            if percent >= LARGER:
                notes.append(
                    f"{entry.label}: its cache of {n} tokens is {percent} % larger than that of {stage.id} alone (by "
                    "formula, at 16 bits)."
                )
    return notes


def _count_bytes(chain: Chain, shape: Shape, n: int) -> int | None:
    # low-rank methods have no sizes before they are calibrated, and a prompt that cannot be encoded has no tokens
    if not n or any(stage.unbound for stage in chain.stages):
        return None
    declared = bytes_declared(chain, shape, n, itemsize=2)
    return None if declared is None else declared.total


def _count_templated(policy: PromptPolicy, tasks: Sequence[Task], tokenizer: Any) -> dict[str, int]:
    """Return how many prompts of each task hold the chat template's text. Tasks without such prompts are left out."""
    counts = {}
    for task in tasks:
        count = policy.suit(task).count_templated(tokenizer, [example.prompt for example in task.examples])
        if count:
            counts[task.id] = count
    return counts


def about_ignored(cfg: RunConfig, tasks: Sequence[Task]) -> list[str]:
    """Return notes on the keys that the user set although they do not affect these tasks."""
    notes = []
    # for each key whether it was set, that is, differs from its default: keys of drawn answers, and keys of any answers
    drawing = {"top_p": cfg.sampling.top_p != 1, "sample_seed": cfg.sampling.sample_seed != 0}
    answering = {"temperature": cfg.sampling.temperature != 0}
    answering |= drawing
    answering["samples_per_prompt"] = cfg.sampling.samples_per_prompt != 1
    answering["max_length"] = cfg.max_length is not None
    answering["min_new_tokens"] = cfg.prompt.min_new_tokens is not None
    if all(task.examples[0].scored for task in tasks):
        notes += _write_ignored(answering, "texts are read here, and nothing is answered")
    elif not cfg.sampling.temperature:
        notes += _write_ignored(drawing, "answers are greedy unless temperature= is above 0")
    for dataset in cfg.datasets:
        tasks_of_dataset = [task for task in tasks if task.id.partition("/")[0] == dataset.name]
        # turns= and questions= take effect in a context with several questions
        if any(task.turns for task in tasks_of_dataset):
            continue
        defaults = entries("dataset").get(dataset.name, {})
        asking: dict[str, bool] = {}
        for key in ("turns", "questions"):
            if key in defaults:
                asking[key] = dataset.knobs.get(key) != defaults[key]
        notes += _write_ignored(asking, f"no context of dataset={dataset.name} has several questions")
    # a swept dataset stands here once for each combination of its options, always with the same note
    return list(dict.fromkeys(notes))


def _write_ignored(is_set: Mapping[str, bool], reason: str) -> list[str]:
    """Return a note that the keys that were set are ignored, with the reason. Return [] if none was set."""
    keys = [f"{key}=" for key, key_is_set in is_set.items() if key_is_set]
    if not keys:
        return []
    verb = "are" if len(keys) > 1 else "is"
    return [f"{' and '.join(keys)} {verb} ignored: {reason}."]


def at_floor(task: Task, full: stats.Scores) -> bool:
    """Return True if the full cache's scores of a task say nothing: they are hardly above empty answers or guessing.

    Return False for a likelihood, which has no floor.
    """
    # only metrics of likelihoods have a formula by which they are printed
    return metric(task.metric).formula is None and stats.at_floor(full, chance(task))


def chance(task: Task) -> float:
    """Return the mean score of an empty answer to a task's examples, or of guessing their class, whichever is higher.

    Return 0 for texts that are scored by their likelihood.
    """
    # the examples of a task are alike: all are texts that are scored, or none is
    if task.examples[0].scored is not None:
        return 0.0
    levels = []
    for example in task.examples:
        # the questions of a context have references of their own
        questions = [example.asked(i) for i in range(len(example.turns))] or [example]
        level = fmean(_score_nothing(task, question) for question in questions)
        if example.classes:
            level = max(level, 1 / len(example.classes))
        levels.append(level)
    return fmean(levels)


def _score_nothing(task: Task, question: Example) -> float:
    """Return the score of an empty answer, which is 0 if the metric gives it none."""
    try:
        return task.score("", question) or 0.0
    except KvbenchError:
        # a metric of one's own may fail on an empty answer, and its answers are not empty
        return 0.0


def about_floors(names: Sequence[str], columns: int) -> list[str]:
    """Return a note on the columns ``names``, where the full cache's scores say nothing; [] without names.

    columns: the number of all columns of the report.
    """
    if not names:
        return []
    clause, pronoun = "those columns show", "them"
    if len(names) == 1:
        clause, pronoun = "that column shows", "it"
    # a report of one column has no mean
    effect_on_mean = f" The mean counts {pronoun}, too." if columns > 1 else ""
    return [
        f"{', '.join(names)}: the full cache itself scores next to nothing or no better than guessing, so {clause} "
        f"nothing about compression.{effect_on_mean}"
    ]

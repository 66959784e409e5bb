"""The work that is left of papers' tables, of several as one run: which task comes next, and how long it takes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from kvbench.base.visible import describe_duration
from kvbench.plan.cells import Group
from kvbench.plan.run_plan import RunPlan

READ_S, TOKEN_S = 15.0, 0.02
"""Seconds to read a prompt and to answer with one token, by which tasks are ordered before any answer is stored."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The answers that one group of a run lacks.

    filled: cells that lack answers, each by the share of its answers that it lacks.
    prompts, answers: how many prompts are read, and how many answers are decoded.
    seconds: how long it takes, by the times of stored answers to the same task, or else to the other tasks.
    timed: whether any answer is stored.
    """

    run: RunPlan
    group: Group
    filled: float
    prompts: int
    answers: int
    seconds: float
    timed: bool


def list_work(runs: Iterable[RunPlan], examples: int | None) -> list[Work]:
    """Return the work left in ``runs``, most filled cells an hour first.

    examples: the most examples of a task; None for all.
    """
    groups = []
    for run in runs:
        groups += [(run, take_examples(group, examples)) for group in run.groups]
    read_s, token_s = _measure_seconds(groups)
    typical_read_s = fmean(read_s.values()) if read_s else READ_S
    typical_token_s = fmean(token_s.values()) if token_s else TOKEN_S
    works = []
    for run, group in groups:
        left = run.left(group)
        answers = sum(len(cells) for cells in left.values())
        if not answers:
            continue
        prefills = run.count_prefills(group, [group])
        task = group.task.id
        longest = max(example.max_new_tokens for example in group.examples)
        seconds = prefills * read_s.get(task, typical_read_s) + answers * longest * token_s.get(task, typical_token_s)
        works.append(
            Work(
                run=run,
                group=group,
                filled=answers / len(group.examples),
                prompts=len(left),
                answers=answers,
                seconds=seconds,
                timed=bool(read_s),
            )
        )
    return sorted(works, key=lambda work: work.seconds / work.filled)


def describe_work(works: Sequence[Work]) -> str:
    """Return the sum of ``works`` in words; '' without work."""
    if not works:
        return ""
    amount = f"{sum(w.answers for w in works):,} answers to {sum(w.prompts for w in works):,} prompts"
    if not works[0].timed:
        return f"{amount}; how long they take is known once an answer is stored."
    return f"{amount}: about {describe_duration(sum(w.seconds for w in works))} by the times of stored answers."


def take_examples(group: Group, most: int | None) -> Group:
    """Return the group with at most ``most`` of its examples, spread as ``limit=`` spreads them."""
    if most is None:
        return group
    taken = {example.id for example in group.task.take_examples(most)}
    return replace(group, examples=tuple(example for example in group.examples if example.id in taken))


def _measure_seconds(groups: Sequence[tuple[RunPlan, Group]]) -> tuple[dict[str, float], dict[str, float]]:
    read_s: dict[str, list[float]] = {}
    token_s: dict[str, list[float]] = {}
    for run, group in groups:
        longest = max(example.max_new_tokens for example in group.task.examples)
        for cell in group.cells:
            for sample in run.store.samples(cell.id).values():
                timing = sample.timing
                read_s.setdefault(group.task.id, []).append(timing.prefill_s)
                token_s.setdefault(group.task.id, []).append((timing.compress_s + timing.decode_s) / max(1, longest))
    return {task: fmean(s) for task, s in read_s.items()}, {task: fmean(s) for task, s in token_s.items()}


def join_runs(runs: Iterable[RunPlan]) -> list[RunPlan]:
    """Merge runs that read and answer alike into one run with the cells of all.

    Runs of one model can differ in prompt policy or sampling, as tables of two papers do.
    """
    runs_by_policy: dict[str, list[RunPlan]] = {}
    for run in runs:
        cfg = run.cfg
        # a model's record holds mappings and cannot be part of a key, but its text can
        policy = json.dumps([repr(cfg.model), repr(cfg.prompt), repr(cfg.sampling), run.dtype, str(run.store.root)])
        runs_by_policy.setdefault(policy, []).append(run)
    merged = []
    for runs_alike in runs_by_policy.values():
        first_run = runs_alike[0]
        groups: list[Group] = []
        for run in runs_alike:
            groups.extend(run.groups)
        # nothing else differs between the runs: their datasets and chains are in the groups
        merged.append(replace(first_run, groups=_merge_groups(groups)))
    return merged


def _merge_groups(groups: Iterable[Group]) -> tuple[Group, ...]:
    groups_by_task: dict[str, list[Group]] = {}
    for group in groups:
        # without its chain, a cell's identity describes task, prompts and sampling, in which a group's cells agree
        first_cell = group.cells[0]
        identity = {key: value for key, value in first_cell.identity.items() if key != "chain"}
        task = json.dumps(identity, sort_keys=True, default=str)
        groups_by_task.setdefault(task, []).append(group)
    merged = []
    for groups_alike in groups_by_task.values():
        largest = max(groups_alike, key=lambda group: len(group.examples))
        cell_by_id = {}
        for group in groups_alike:
            cell_by_id.update({cell.id: cell for cell in group.cells})
        merged.append(replace(largest, cells=tuple(cell_by_id.values())))
    return tuple(merged)

"""Forecast the remaining work of a run, with its memory and time, without loading weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvbench.engine import memory, precision
from kvbench.kv.model_shape import state_layers
from kvbench.models import load
from kvbench.plan.cells import Group, pair_by_question, rounds
from kvbench.plan.estimate import Estimate
from kvbench.plan.run_plan import GroupTodo, RunPlan, labels


@dataclass(frozen=True)
class GroupForecast(GroupTodo):
    """The remaining work of one group, with the memory and the time that it takes.

    prompt_tokens: the length of the longest prompt.
    bytes: the most bytes that the caches take.
    parts: the labels of the cells that run together, part by part.
    too_large: the labels of the cells that do not fit into memory even alone.
    seconds: the time left; None if no answer of the group is measured yet.
    """

    prompt_tokens: int
    bytes: int
    parts: list[list[str]]
    too_large: list[str]
    seconds: float | None


@dataclass(frozen=True)
class Forecast:
    """The work that a run will do. Its fields are the keys of ``run --plan --json``.

    memory: the bytes that caches may take.
    device: the device that will hold the model.
    dtype: the model's number type, with the reason for it.
    groups: the remaining work of each group.
    notes: notes on the run's settings.
    """

    memory: int
    device: str
    dtype: str
    groups: list[GroupForecast]
    notes: list[str]


def forecast_run(plan: RunPlan) -> Forecast:
    """Return the remaining work, with the memory and time of each group and the memory limit."""
    device = load.resolve_device(plan.cfg.device)
    limit = memory.cache_limit(plan.cfg.memory, plan.share_layers())
    # memory= is for caches alone
    if plan.cfg.memory is not None:
        cache_memory = limit
    else:
        # the limit is a part of the devices' free memory, and no weights are loaded yet: take off the same part of them
        weights = int(memory.USED_SHARE * load.weight_bytes(plan.source))
        cache_memory = max(0, limit - weights)
    estimates = {g.column: plan.estimate(g) for g in plan.groups}
    parts_by_column, shared_prefills = _divide_groups(plan, estimates, cache_memory)
    groups = []
    for group, todo in zip(plan.groups, plan.todo(), strict=True):
        parts = parts_by_column[group.column]
        # each part reads its prompts again; contexts that another group reads are not read here
        prefills = plan.count_prefills(group, parts) - shared_prefills[group.column]
        # every prompt that is read once more is one less that is saved
        prefills_saved = todo.prefills_saved - (prefills - todo.prefills)
        todo = replace(todo, prefills=prefills, prefills_saved=prefills_saved)
        estimate = estimates[group.column]
        too_large = []
        for part in parts:
            too_large += [cell.label for cell in part.cells if estimate.alone(cell) > cache_memory]
        # parts run one after the other, so the largest one counts
        peak_bytes = max((estimate.bytes(part.cells, cache_memory) for part in parts), default=0)
        groups.append(
            GroupForecast(
                **vars(todo),
                prompt_tokens=estimate.prompt_tokens,
                bytes=peak_bytes,
                parts=[labels(part) for part in parts],
                too_large=too_large,
                seconds=estimate.seconds,
            )
        )
    return Forecast(
        memory=cache_memory,
        device=str(device),
        dtype=precision.explain_dtype(plan.cfg.model.dtype, plan.dtype, device),
        groups=groups,
        notes=plan.advice() + plan.note_drawn_answers() + plan.note_cut_prompts(),
    )


def _divide_groups(
    plan: RunPlan, estimates: Mapping[str, Estimate], cache_memory: int
) -> tuple[dict[str, list[Group]], dict[str, int]]:
    """Return (the parts in which each group runs, the number of its contexts that another group reads), by column."""
    parts_by_column: dict[str, list[Group]] = {g.column: [] for g in plan.groups}
    shared_prefills = dict.fromkeys(parts_by_column, 0)
    for groups_of_round in rounds(plan.groups):
        for pair in pair_by_question(groups_of_round):
            parts_of_pair = [estimates[g.column].parts(g, cache_memory) for g in pair]
            for group, parts in zip(pair, parts_of_pair, strict=True):
                parts_by_column[group.column] += parts
            both_are_whole = all(len(parts) == 1 for parts in parts_of_pair)
            if len(pair) == 2 and both_are_whole:
                # one pass reads each prompt with its question in view and withheld
                seen, withheld = pair
                shared_prefills[withheld.column] += _count_shared(plan, seen, withheld)
    return parts_by_column, shared_prefills


def _count_shared(plan: RunPlan, seen: Group, withheld: Group) -> int:
    """Return how many contexts are read by the passes over the prompts with their questions in view.

    seen, withheld: the groups of the same prompts with their questions in view, and with their questions withheld.
    """
    # a state at the end of a prompt cannot be taken back to the end of its context
    if state_layers(plan.source.config):
        return 0
    seen_examples = plan.left(seen)
    count = 0
    for example, cells in plan.left(withheld).items():
        # a method that changes the prefill has a key of its own and reads its prompts itself
        if example in seen_examples and any(not c.chain.prefill_key for c in cells):
            count += 1
    return count

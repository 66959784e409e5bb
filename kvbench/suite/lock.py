"""The lock of a suite: hashes of its prompts and its checkpoint. Results with the same lock can be compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypedDict

from kvbench.base.errors import UsageError
from kvbench.base.example import Example
from kvbench.base.files import read_json, write_json
from kvbench.plan.cells import Group
from kvbench.plan.run_plan import RunPlan
from kvbench.suite.definition import Suite, lock_path
from kvbench.suite.plan import SuiteRun
from kvbench.tasks.encoding import encode_prompt


class LockedColumn(TypedDict):
    """The hashes and lengths of one task.

    protocol: the hash of everything that decides the task's results, except the method and the prompts.
    prompts: the hash of each prompt, by example.
    tokens: the number of tokens of each prompt that are read before the cache is compressed, by example.
    most: the most tokens of an answer, or the number of tokens of a text that is scored.
    """

    protocol: str
    prompts: Mapping[str, str]
    tokens: Mapping[str, int]
    most: int


Locked = Mapping[str, Mapping[str, LockedColumn]]
"""The locked tasks of an edition, by the part's name and the task's column."""


class Lock(TypedDict):
    """The content of a suite's lock file.

    suite: the suite's name.
    checkpoint: the fingerprint of the model's checkpoint.
    editions: the hashes of the tasks, by edition.
    """

    suite: str
    checkpoint: str
    editions: Mapping[str, Locked]


LENGTH = 16
"""The number of hexadecimal digits that are kept of a hash."""


def hash_run(run: SuiteRun) -> Locked:
    """Compute the hashes of a planned edition in the form in which a lock file has them."""
    parts: dict[str, dict[str, LockedColumn]] = {}
    for part_run in run.parts:
        columns: dict[str, LockedColumn] = {}
        for group in part_run.plan.groups:
            prompts, tokens = {}, {}
            for example in group.examples:
                prompts[example.id], tokens[example.id] = _hash_prompt(part_run.plan, group, example)
            most = max(example.max_new_tokens for example in group.examples)
            # the cells of a group differ only in their method, which is no part of the protocol
            identity = group.cells[0].identity
            columns[group.column] = {
                "protocol": hash_protocol(identity),
                "prompts": prompts,
                "tokens": tokens,
                "most": most,
            }
        parts[part_run.part.name] = columns
    return parts


def hash_protocol(identity: Mapping[str, Any]) -> str:
    """Return the hash of a result's identity without its method: model, data, prompt format, decoding and metric."""
    protocol = {key: value for key, value in identity.items() if key != "chain"}
    return _digest(protocol)


def _hash_prompt(run: RunPlan, group: Group, example: Example) -> tuple[str, int]:
    """Return the hash of a prompt and the number of tokens that are read before the cache is compressed.

    The hash is that of its token ids as the model reads them, of its questions and of its references.
    """
    encoded = encode_prompt(run.tokenizer, example, group.task, run.cfg.prompt, run.context)
    ids, question = list(encoded.ids), list(encoded.question)
    # of a text that is scored by its likelihood, ``encoded`` has the beginning alone
    if example.scored is not None:
        ids = list(example.scored.ids)
    digest = _digest({"ids": ids, "question": question, "example": example.content()})
    return digest, len(encoded.ids)


def _digest(content: object) -> str:
    """Return the first LENGTH digits of the SHA-256 of plain data. The order of keys does not matter."""
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]


def write_lock(suite: Suite, runs: Mapping[str, SuiteRun]) -> None:
    """Write the lock file of a suite: the hashes of all prompts, for every edition.

    runs: the planned run of each edition, by the edition's name.
    """
    # all editions must use one checkpoint: unpacking fails if there are two
    (checkpoint,) = {run.plans[0].source.fingerprint for run in runs.values()}
    editions = {edition: hash_run(run) for edition, run in runs.items()}
    content: Lock = {"suite": suite.name, "checkpoint": checkpoint, "editions": editions}
    write_json(lock_path(suite.name), content)


def read_lock(suite: Suite) -> Lock:
    """Return the lock of a suite. Raises UsageError if it has none."""
    content = read_json(lock_path(suite.name))
    if content is None:
        raise UsageError(f"{suite.name} has no lock: {lock_path(suite.name)} is missing or damaged")
    return {"suite": content["suite"], "checkpoint": content["checkpoint"], "editions": content["editions"]}


def list_differences(suite: Suite, run: SuiteRun, planned: Locked) -> list[str]:
    """Return a sentence for each difference between a planned suite and its lock; [] if they agree.

    planned: the hashes of ``run`` (``hash_run``), which take seconds to compute.
    """
    lock = read_lock(suite)
    problems = []
    if run.plans[0].source.fingerprint != lock["checkpoint"]:
        problems.append(f"the checkpoint of {suite.model} is another one")
    locked = lock["editions"][suite.edition]
    # the planned parts in their order, then the parts that stand only in the lock
    for part in dict.fromkeys([*planned, *locked]):
        planned_columns, locked_columns = planned.get(part, {}), locked.get(part, {})
        for column, planned_column in planned_columns.items():
            locked_column = locked_columns.get(column)
            if locked_column is None:
                problems.append(f"{part}: {column} is no task of the suite")
                continue
            problem = _compare_column(column, planned_column, locked_column)
            if problem:
                problems.append(f"{part}: {problem}")
        for column in locked_columns:
            if column not in planned_columns:
                problems.append(f"{part}: {column} is missing")
    return problems


def _compare_column(column: str, planned: LockedColumn, locked: LockedColumn) -> str:
    """Return in words how the hashes of a task differ from the locked ones; '' if they agree."""
    planned_prompts, locked_prompts = planned["prompts"], locked["prompts"]
    # ids of examples: changed prompts are new or differ from the lock's, missing ones stand only in the lock
    changed = [i for i, digest in planned_prompts.items() if locked_prompts.get(i) != digest]
    missing = [i for i in locked_prompts if i not in planned_prompts]
    differing = changed + missing
    if differing:
        # the first few ids are enough to find the reason
        names = ", ".join(differing[:3])
        return f"{len(differing)} of {len(locked_prompts)} prompts of {column} are others ({names})"
    if planned["protocol"] != locked["protocol"]:
        return f"{column} is asked or scored in another way"
    return ""

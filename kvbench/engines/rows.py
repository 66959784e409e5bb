"""The rows of an engine run: the prompts of a planned run, and a cell for each row and task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvbench.base.errors import UsageError
from kvbench.base.example import Example
from kvbench.engines.engine import AskedPrompt, Engine
from kvbench.methods.core.chain import Chain
from kvbench.plan.cells import Group
from kvbench.plan.run_plan import RunPlan
from kvbench.store.cell import Cell
from kvbench.store.results import CellRecord
from kvbench.tasks.encoding import encode_prompt

KIND = "engine"
"""The kind of a result that an engine measured. It has no chain, and no audited bytes."""


@dataclass(frozen=True, kw_only=True)
class EngineRow:
    """One configuration of an engine.

    label: its name in tables.
    identity: the facts that decide its answers, for the ids of its results.
    open: the function that starts the engine, or connects to it.
    """

    label: str
    identity: Mapping[str, object]
    open: Callable[[], Engine]


@dataclass(frozen=True, kw_only=True)
class EngineRun:
    """Prompts, and the engine's rows that answer them.

    run: the plan of a run of kvbench's own full cache, which gives the prompts, the metrics and the results folder.
    chat: True if the engine puts prompts into its own chat template.
    baseline: the label of the row that others are compared with; '' for the row that was measured first.
    parallel: how many prompts are asked at once.
    """

    run: RunPlan
    rows: tuple[EngineRow, ...]
    chat: bool = False
    baseline: str = ""
    parallel: int = 1

    def cell(self, group: Group, row: EngineRow) -> Cell:
        """Return the cell in which a row's answers to a task are stored."""
        identity = self.shared_identity(group)
        identity["engine"] = {"label": row.label} | dict(row.identity)
        return Cell(identity, Chain(), row.label, task=group.task, column=group.column)

    def shared_identity(self, group: Group) -> dict[str, object]:
        """Return the identity of a task's results without the engine's facts.

        Rows for which it is the same have answered the same prompts.
        """
        # the plan has one cell for each task, the full cache's
        full_identity = group.cells[0].identity
        identity: dict[str, object] = dict(full_identity)
        # the engine has its own weights and cache; kvbench's model only lends its tokenizer
        del identity["chain"]
        identity["model"] = {"prompts": full_identity["model"]["fingerprint"]}
        prompt = dict(full_identity["prompt"])
        if self.chat and self.run.cfg.prompt.templated(group.task):
            prompt["template"] = "the engine's own"
        identity["prompt"] = prompt
        identity["kind"] = KIND
        return identity

    def left(self, group: Group, row: EngineRow) -> list[Example]:
        """Return the examples of a task that a row has not answered."""
        done = self.run.store.lines(self.cell(group, row).id)
        return [example for example in group.examples if example.id not in done]

    def count_left(self) -> dict[str, int]:
        """Return how many examples of all tasks each row has not answered, by the row's label."""
        counts = {}
        for row in self.rows:
            counts[row.label] = sum(len(self.left(group, row)) for group in self.run.groups)
        return counts

    def question(self, group: Group, example: Example) -> AskedPrompt:
        """Return the prompt of an example in the form for the engine. It is cut as for kvbench's own rows."""
        run, policy = self.run, self.run.cfg.prompt
        chat = self.chat and policy.templated(group.task)
        system = ""
        if chat:
            system = policy.system or ""
            # the user's message alone: nobody can begin the answer of a chat
            policy = replace(policy, template="off", bos=False, system=None)
            example = replace(example, answer_prefix="")
        ids = encode_prompt(run.tokenizer, example, group.task, policy, run.context).ids
        text = run.tokenizer.decode(without_bos(run.tokenizer, ids), skip_special_tokens=False)
        return AskedPrompt(
            text=text,
            ids=ids,
            limit=example.max_new_tokens,
            stop=tuple(group.task.stop) + tuple(run.cfg.model.stop),
            chat=chat,
            system=system,
        )


def without_bos(tokenizer: Any, ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return token ids without the token that begins every text, since engines add it themselves."""
    # remove only the token that the tokenizer itself adds to a text: a BOS token at the start of a chat template stays
    added = list(tokenizer.encode(""))
    if added and ids[:1] == (added[0],):
        return ids[1:]
    return ids


def check_tasks(run: RunPlan) -> None:
    """Raise UsageError if an engine cannot answer a task of the run: it has turns, texts, or withheld questions."""
    for group in run.groups:
        task = group.task
        if task.turns:
            raise UsageError(
                f"dataset={task.id.partition('/')[0]} is not possible with an engine: its questions are asked of one "
                "compressed context, and no engine takes a context and its questions apart"
            )
        if task.examples[0].scored:
            raise UsageError(
                f"dataset={task.id.partition('/')[0]} asks for no answers: it reads texts. engine=llamacpp "
                "kl=true compares them, and a server gives no logits of them"
            )
        if not task.query_aware:
            raise UsageError(
                f"query_aware=false is not possible with an engine ({task.id}): none takes a question after its "
                "context was compressed. Leave it out, and the question is seen"
            )


def stored_rows(run: EngineRun, group: Group) -> Iterator[tuple[Mapping[str, object], CellRecord]]:
    """Yield the engine's identity and the record of each stored result on a task's prompts, the oldest result first.

    Damaged results are left out.
    """
    store = run.run.store
    wanted = run.shared_identity(group)
    rows: list[tuple[str, str, Mapping[str, object], CellRecord]] = []
    for cell_id in store.cells():
        if store.damage(cell_id) is not None:
            continue
        record = store.cell(cell_id)
        if record is None or record.kind != KIND:
            continue
        # but for its engine, a result of the same prompts has this task's identity
        identity = dict(record.identity)
        engine = identity.pop("engine")
        if identity == wanted:
            began = min((str(facts.get("began", "")) for facts in record.provenance), default="")
            rows.append((began, str(engine["label"]), engine, record))
    # sort by time and label alone, since identities cannot be compared
    rows.sort(key=lambda row: row[:2])
    for _, _, engine, record in rows:
        yield engine, record

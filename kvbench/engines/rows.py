"""The rows of an engine run: the prompts of a planned run, and a cell for each row and task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

    plan: the plan of a run of kvbench's own full cache, which gives the prompts, the metrics and the results folder.
    rows: the engine's rows to measure.
    chat: True if the engine puts prompts into its own chat template.
    baseline: the label of the row that others are compared with; '' for the row that was measured first.
    parallel: how many prompts are asked at once.
    """

    plan: RunPlan
    rows: tuple[EngineRow, ...]
    chat: bool = False
    baseline: str = ""
    parallel: int = 1

    def make_cell(self, group: Group, row: EngineRow) -> Cell:
        """Return the cell in which a row's answers to a task are stored."""
        identity = self.identify_prompts(group)
        identity["engine"] = {"label": row.label} | dict(row.identity)
        # a cell has a chain, but kvbench compresses nothing here: the chain without stages stands in its place
        return Cell(identity, Chain(), row.label, task=group.task, column=group.column)

    def identify_prompts(self, group: Group) -> dict[str, object]:
        """Return the identity of a task's results without the engine's facts.

        Results with the same such identity are answers to the same prompts.
        """
        # the plan has one cell for each task, the full cache's
        full_identity = group.cells[0].identity
        identity: dict[str, object] = dict(full_identity)
        # the engine has a cache of its own
        del identity["chain"]
        # the engine has weights of its own; kvbench's model only lends the tokenizer that made the prompts
        identity["model"] = {"prompts": full_identity["model"]["fingerprint"]}
        # the dict is copied, because the full cache's identity must not change
        prompt = dict(full_identity["prompt"])
        if self.chat and self.plan.cfg.prompt.templated(group.task):
            prompt["template"] = "the engine's own"
            if not self._thinks(group):
                prompt["thinking"] = False
        identity["prompt"] = prompt
        identity["kind"] = KIND
        return identity

    def find_unanswered(self, group: Group, row: EngineRow) -> list[Example]:
        """Return the examples of a task that a row has not answered."""
        lines_by_example = self.plan.store.lines(self.make_cell(group, row).id)
        return [example for example in group.examples if example.id not in lines_by_example]

    def count_unanswered(self) -> dict[str, int]:
        """Return how many examples of all tasks each row has not answered, by the row's label."""
        counts = {}
        for row in self.rows:
            counts[row.label] = sum(len(self.find_unanswered(group, row)) for group in self.plan.groups)
        return counts

    def make_prompt(self, group: Group, example: Example) -> AskedPrompt:
        """Return the prompt of an example in the form for the engine. It is cut as for kvbench's own rows."""
        plan, policy = self.plan, self.plan.cfg.prompt
        chat = self.chat and policy.templated(group.task)
        system = ""
        if chat:
            system = policy.system or ""
            # the engine's template adds all but the user's message
            policy = replace(policy, template="off", bos=False, system=None)
            # in a chat, the caller cannot begin the engine's answer
            example = replace(example, answer_prefix="")
        ids = encode_prompt(plan.tokenizer, example, group.task, policy, plan.context).ids
        text = plan.tokenizer.decode(remove_bos(plan.tokenizer, ids), skip_special_tokens=False)
        return AskedPrompt(
            text=text,
            ids=ids,
            limit=example.max_new_tokens,
            stop=tuple(group.task.stop) + tuple(plan.cfg.model.stop),
            chat=chat,
            system=system,
            thinking=self._thinks(group),
            thought=group.task.thought,
        )

    def _thinks(self, group: Group) -> bool:
        """Return False if the chat template is to switch thinking off for a task."""
        return self.plan.cfg.prompt.suit(group.task).thinks(self.plan.tokenizer)


def remove_bos(tokenizer: Any, ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return token ids without the token that begins every text, since engines add it themselves."""
    # the ids of an empty text are those that the tokenizer itself adds. Only such a token is removed: one that a chat
    # template writes at its start stays
    added = list(tokenizer.encode(""))
    if added and ids and ids[0] == added[0]:
        return ids[1:]
    return ids


def check_tasks(plan: RunPlan) -> None:
    """Raise UsageError if an engine cannot answer a task of the plan.

    Such a task has turns, asks for no answers, or withholds its questions until the context is compressed.
    """
    for group in plan.groups:
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


@dataclass(frozen=True, kw_only=True)
class StoredEngineRow:
    """A stored result of an engine on one task.

    began: the time, as ISO text, at which the first of its answers was begun; '' if that is not known.
    label: the row's name in tables.
    engine: the engine's identity, with the label.
    record: the record of the result's cell.
    """

    began: str
    label: str
    engine: Mapping[str, object]
    record: CellRecord


def find_stored_rows(run: EngineRun, group: Group) -> list[StoredEngineRow]:
    """Return the stored results of all engines on a task's prompts, the oldest first. Damaged results are left out."""
    store = run.plan.store
    identity_of_prompts = run.identify_prompts(group)
    rows: list[StoredEngineRow] = []
    for cell_id in store.cells():
        if store.damage(cell_id) is not None:
            continue
        record = store.cell(cell_id)
        if record is None or record.kind != KIND:
            continue
        # without its engine, the identity of a result is that of its prompts
        identity = dict(record.identity)
        engine = identity.pop("engine")
        if identity != identity_of_prompts:
            continue
        began = min((str(facts.get("began", "")) for facts in record.provenance), default="")
        rows.append(StoredEngineRow(began=began, label=str(engine["label"]), engine=engine, record=record))
    rows.sort(key=lambda row: (row.began, row.label))
    return rows

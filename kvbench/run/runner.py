"""Measure one group of cells: read each prompt once, compress by every method, audit, decode, score and store."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TypeVar

import torch

from kvbench.audit.decode_audit import check_bytes, check_peak
from kvbench.audit.prompt_audit import audit
from kvbench.engine.batch import Answer
from kvbench.engine.decode import extend_cache
from kvbench.engine.finite import no_answer
from kvbench.engine.memory import is_out_of_memory, release
from kvbench.engine.model_state import state_of
from kvbench.engine.prefill import check_capacity, check_window, prefill_chains
from kvbench.errors import KvbenchError, Refused, UsageError, ending, say
from kvbench.example import Example
from kvbench.methods.foreign import contained
from kvbench.methods.prompt_cache import Cache
from kvbench.metrics import score
from kvbench.models.interface import attached
from kvbench.run import forced
from kvbench.run.host import Host
from kvbench.run.listener import Listeners
from kvbench.run.plan import Cell, Group, pending, with_full
from kvbench.run.queue import DecodeQueue, QueuedRow, in_parts
from kvbench.run.results import Facts, Sample, Timing
from kvbench.run.store import ResultStore
from kvbench.run.store_writer import Writer

REASON_LENGTH = 300
Result = TypeVar("Result")


class ModelChanged(KvbenchError):
    """The error for a method that changed the model itself, which makes all later measurements meaningless.

    ``cells`` are the ids of the cells to refuse.
    """

    def __init__(self, cells: Sequence[Cell]) -> None:
        names = " or ".join(dict.fromkeys(c.chain.name for c in cells))
        super().__init__(f"{names} changes the model (its weights or configuration) and leaves it changed")
        self.cells = {c.id for c in cells}


@dataclass
class GroupRun:
    """The state of one group while it is measured."""

    host: Host
    store: ResultStore
    writers: dict[str, Writer]
    listeners: Listeners = field(default_factory=Listeners)
    shard: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    most_cells: int | None = None  # of one prefill, once that ran out of memory
    foreign: Sequence[Cell] = ()  # those whose code is not kvbench's own

    def __post_init__(self) -> None:
        self.model_before = state_of(self.host.model) if self.foreign else None
        self.queue = DecodeQueue(self.host.model, self.host.most_rows, self.host.memory)

    def run(self, examples: Sequence[Example], todo: Mapping[str, Sequence[Cell]]) -> None:
        """Answer every example for its cells. An error of one cell takes only that cell out of the run."""
        for example in examples:
            cells = self.active(todo.get(example.id, ()))
            while not self.queue.takes(len(cells)):
                self.finish()
                cells = self.active(cells)
            if cells:
                self.read(example, cells)
        while len(self.queue):
            self.finish()

    def active(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the cells that are neither refused nor failed."""
        return [c for c in cells if c.id not in self.refused and c.id not in self.failed]

    def read(self, example: Example, cells: Sequence[Cell]) -> None:
        """Prefill one prompt for its cells and audit their caches. Queue them to be decoded, or score a text now."""
        self.listeners.reading(cells[0].column)
        try:
            encoded = self.host.encode(example, cells[0].task)
            ids = torch.tensor(encoded.ids)
            check_capacity(self.host.model, len(ids))
        except Exception as error:
            for cell in cells:
                self.fail(cell, error, example)
            return
        cells = self._fitting(cells, len(example.tokens) or len(encoded) + example.max_new_tokens, example)
        cells = with_full(cells)
        rows = []
        for cell, cache in self._prefill(ids, cells):
            try:
                if isinstance(cache, Exception):
                    raise cache
                with contained(cell.chain.name, cell.chain.foreign):
                    cell.check_knobs()
                    measured = audit(cache, *self.host.shape())
                if encoded.question:
                    cache = self._with_room(partial(extend_cache, self.host.model, cache, encoded.question))
                rows.append(
                    QueuedRow(cell, example, cache, measured, encoded.cut, self.host.ending(cell.task, example))
                )
            except Refused as reason:
                self.refuse(cell, str(reason), example)
            except Exception as error:
                self.fail(cell, error, example)
        self.check_model(cells, example)
        full = next((r.cache for r in rows if not r.cell.chain.stages), None) if cells[0].fidelity else None
        rows = [r for r in rows if not r.cell.hidden]
        if full is not None and rows:
            rows = self.compare(example, rows, full)
        if example.tokens:
            self.force(example, rows, full)
        else:
            # rows decoded to make room for one cache may have failed the cell of another
            active = self.active([r.cell for r in rows])
            for row in rows:
                if row.cell in active:
                    self.queue.add(row)

    def _with_room(self, work: Callable[[], Result]) -> Result:
        """Return the result of ``work``. If memory runs out while rows are queued, decode them and call it again."""
        try:
            return work()
        except Exception as error:
            if not (is_out_of_memory(error) and len(self.queue)):
                raise
        release()
        while len(self.queue):
            self.finish()
        return work()

    def _prefill(self, ids: torch.Tensor, cells: Sequence[Cell]) -> list[tuple[Cell, Cache | Exception]]:
        """Return (cell, cache) for each cell, or (cell, exception) if its prefill failed."""

        def prefill_together(part_cells: Sequence[Cell]) -> list[Cache]:
            chains = [c.chain for c in part_cells]
            try:
                return self._with_room(lambda: prefill_chains(self.host.model, ids, chains, self.host.plain))
            except Exception as error:
                if is_out_of_memory(error):
                    self.most_cells = max(1, len(part_cells) // 2)
                raise

        most_cells = self.most_cells or max(1, len(cells))
        parts = [cells[i : i + most_cells] for i in range(0, len(cells), most_cells)]
        return [outcome for part in parts for outcome in in_parts(part, prefill_together)]

    def compare(self, example: Example, rows: Sequence[QueuedRow], full: Cache) -> list[QueuedRow]:
        """Return the rows with their divergences from the full cache on texts that the prompt is continued with."""
        try:
            texts = forced.texts_of(self.host, example, full)
        except Exception as error:
            for row in rows:
                self.fail(row.cell, error, example)
            return []
        compared = []
        outcomes = forced.compare(self.host, rows, full, texts)
        self.check_model([r.cell for r in rows], example)
        for row, outcome in outcomes:
            if isinstance(outcome, Exception):
                self.fail(row.cell, outcome, example)
            else:
                compared.append(outcome)
        return compared

    def force(self, example: Example, rows: Sequence[QueuedRow], full: Cache | None) -> None:
        """Score the rest of a text under the cache of each row, and store one sample for each."""
        outcomes = forced.score_text(self.host, example, rows, full)
        self.check_model([r.cell for r in rows], example)
        for row, outcome in outcomes:
            if isinstance(outcome, Exception):
                self.fail(row.cell, outcome, example)
                continue
            value, answer, scored_row = outcome
            self.add(scored_row, answer, "", value)

    def finish(self) -> None:
        """Decode until some rows have ended, and score and store those."""
        first = next(iter(self.queue))
        outcomes = self.queue.advance()
        self.check_model([r.cell for r in (*self.queue.running, *(r for r, _ in outcomes))], first.example)
        for row, outcome in outcomes:
            if isinstance(outcome, Exception):
                self.fail(row.cell, outcome, row.example)
                continue
            ids = outcome.tokens[:-1] if outcome.tokens and outcome.tokens[-1] in row.ending.stop else outcome.tokens
            try:
                text = self.host.tokenizer.decode(ids, skip_special_tokens=True)
                value = score(row.cell.task.metric, row.cell.task.answer(text), row.example)
            except Exception as error:
                self.fail(row.cell, error, row.example)
            else:
                self.add(row, outcome, text, value)

    def add(self, row: QueuedRow, answer: Answer, text: str, value: float | None) -> None:
        """Store the answer of a row with its score, or refuse its cell if the audit of decoding fails."""
        cell, example = row.cell, row.example
        if cell.id in self.refused:
            return
        if not answer.finite:
            self.refuse(cell, str(no_answer(cell.chain, self.host.model.dtype)), example)
            return
        try:
            with contained(cell.chain.name, cell.chain.foreign):
                cell.check_knobs()
                decode_peak = check_peak(row.cache, answer.held, len(answer.tokens) - 1)
                if answer.stored is not None:
                    check_bytes(row.cache, answer.stored, *self.host.shape())
            capacity = cell.chain.capacity(row.measured.n)
        except Refused as reason:
            self.refuse(cell, str(reason), example)
            return
        except Exception as error:
            self.fail(cell, error, example)
            return
        self.store.clear_refusal(cell.id, example.id)
        sample = Sample(
            id=example.id,
            **asdict(row.measured),
            cut=row.cut,
            shrunk=bool(capacity and capacity.shrunk),
            new_tokens=len(answer.tokens),
            meta=dict(example.meta),
            timing=Timing(
                prefill_s=round(row.cache.prefill_s, 6),
                compress_s=round(row.cache.compress_s, 6),
                decode_s=round(answer.seconds, 6),
                batch_rows=answer.rows,
                batch_factor=None if answer.factor is None else round(answer.factor, 3),
            ),
            prediction=text,
            score=value,
            answers=None if example.tokens else tuple(example.answers),
            # methods that mask attend fewer tokens than they hold
            attended=None if example.tokens else answer.attended,
            decode_peak=decode_peak,
            fidelity=row.fidelity,
        )
        self.writers[cell.id].append(sample.record())
        self.listeners.stored(cell, sample)

    def check_model(self, ran: Sequence[Cell], example: Example) -> None:
        """Refuse the foreign cells among ``ran`` and raise ModelChanged if the model is not as it was at the start."""
        if self.model_before is None or state_of(self.host.model) == self.model_before:
            return
        changed = ModelChanged([c for c in ran if c in self.foreign] or self.foreign)
        for cell in self.foreign:
            if cell.id in changed.cells:
                self.refuse(cell, str(changed), example)
        raise changed

    def refuse(self, cell: Cell, reason: str, example: Example) -> None:
        """Take the cell out of the run and out of all reports, record the reason and drop its waiting rows."""
        recorded = f"{reason} (example {example.id})"
        self.refused[cell.id] = recorded
        self.store.refuse(cell, recorded, example.id)
        self.queue.drop(cell.id)

    def fail(self, cell: Cell, error: Exception, example: Example) -> None:
        """Take the cell out of this run and record why. Its samples stay, and the next run tries the others again."""
        if cell.id in self.failed:
            return
        text = " ".join(str(error).split())[:REASON_LENGTH]
        reason = text if isinstance(error, KvbenchError) else f"{type(error).__name__}: {text}".rstrip(": ")
        self.failed[cell.id] = f"{reason} (example {example.id})"
        self.store.mark(cell, "failed", self.failed[cell.id])
        trace = self.store.folder(cell.id) / f"traceback-{self.shard}.txt"
        with suppress(OSError):
            trace.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        say(f"{cell.label} on {cell.column} failed: {self.failed[cell.id]}; see {trace}")
        self.queue.drop(cell.id)

    def _fitting(self, cells: Sequence[Cell], tokens: int, example: Example) -> list[Cell]:
        """Return the cells that can run a text of ``tokens``, and refuse the others.

        Beyond a sliding window only the full cache can run. Beyond the model's context, texts to be scored
        (``example.tokens``) need rolled positions; prompts to be answered were cut to the context already.
        """
        fitting = []
        context = self.host.context
        exceeds_context = bool(example.tokens) and context is not None and tokens > context
        for cell in cells:
            selector = cell.chain.selector
            if exceeds_context and not (selector and selector.rolled):
                reason = (
                    f"a text of {tokens} tokens exceeds the model's context of {context}: lower length=, or stream it "
                    "with positions that roll (method=streamingllm mode=rolled)"
                )
                self.refuse(cell, reason, example)
                continue
            try:
                check_window(self.host.model, tokens, [cell.chain])
                fitting.append(cell)
            except UsageError as error:
                self.refuse(cell, str(error), example)
        return fitting


def run_group(
    host: Host,
    group: Group,
    store: ResultStore,
    provenance: Facts,
    shard: int = 0,
    mix: bool = False,
    listeners: Listeners | None = None,
) -> None:
    """Measure the examples of one group that have no answer yet.

    Whatever ends it early (an interrupt, a full disk), finished examples stay and are not run again. A cell that fails
    is marked as failed in the store.
    """
    todo = pending(group, {c.id: list(store.lines(c.id)) for c in group.cells})
    if not todo:
        return
    cells = [c for c in group.cells if any(c in some for some in todo.values())]
    with ExitStack() as stack:
        writers = {}
        for cell in cells:
            facts = {**provenance, "batch": host.batching(), **cell.chain.provenance()}
            writers[cell.id] = store.open(cell, facts, shard, mix)
            stack.callback(writers[cell.id].close)
        foreign = [c for c in cells if c.chain.foreign]
        run = GroupRun(host, store, writers, listeners or Listeners(), shard, foreign=foreign)
        stack.enter_context(attached(host.model))
        try:
            run.run(group.examples, todo)
        except BaseException as error:
            unfinished = pending(group, {c.id: list(store.lines(c.id)) for c in cells})
            for cell in run.active([c for c in cells if any(c in some for some in unfinished.values())]):
                store.mark(cell, "interrupted", ending(error))
            raise

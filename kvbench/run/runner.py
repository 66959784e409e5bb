"""Measure groups of cells: read each prompt once, compress by every method, audit, decode, score and store."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import TypeVar

from kvbench.audit.decode_audit import check_bytes, check_peak
from kvbench.audit.prompt_audit import audit
from kvbench.base.errors import KvbenchError, Refused, ending
from kvbench.base.example import Example
from kvbench.base.visible import say
from kvbench.engine.batch import Answer
from kvbench.engine.finite import build_answer_refusal
from kvbench.engine.limits import check_capacity
from kvbench.engine.memory import is_out_of_memory, release, run_in_parts
from kvbench.kv.content import digest_layers, find_first_difference
from kvbench.methods.core.prompt_cache import PromptCache
from kvbench.models.interface import attached
from kvbench.plan.cells import Group, pending, with_full
from kvbench.run import forced
from kvbench.run.answers import (
    Asking,
    DecodeQueue,
    Drawing,
    QueuedRow,
    build_sample,
    extend_rows,
    read_question,
    remake_rows,
)
from kvbench.run.host import Host
from kvbench.run.listener import Listeners
from kvbench.run.reading import PromptReader, Work, explain_unfit
from kvbench.store.cell import Cell
from kvbench.store.results import Facts, Sample
from kvbench.store.store import SHARD_WAIT_S, Busy, ResultStore
from kvbench.store.store_writer import Writer
from kvbench.tasks.encoding import EncodedTurns
from kvbench.tasks.prompt import Encoded

REASON_LENGTH = 300
"""The most characters of an error's message in a stored reason."""
AT_RISK_S = 60.0
"""Seconds of reading after which the prompts read so far are answered, so that a killed run loses no more of it."""
BUSY_WAIT_S = 0.05
"""Seconds to wait for a cell's lock once another cell is known to be measured by another process."""
Result = TypeVar("Result")
Item = TypeVar("Item", QueuedRow, Asking)
Todo = Mapping[str, Sequence[Cell]]
"""The cells of one group that still need each example, by the example's id."""


@dataclass
class GroupRun:
    """The state of a group while it is measured, or of several groups that are measured in turns.

    A prompt goes through ``read_prompt`` (prefill, compress, audit), the decode queue, ``advance_queue`` (score) and
    ``store_answer`` (audit of decoding, store). A cell leaves at any of these points if its method fails. The other
    cells go on.

    host, store: the loaded model, and the results folder.
    writers: the open samples file of each cell, by the cell's id.
    listeners: what follows the run, such as a progress display.
    shard: the number of this process's part of the examples.
    refused, failed: the reasons, by the id of each cell that left.
    """

    host: Host
    store: ResultStore
    writers: dict[str, Writer]
    listeners: Listeners = field(default_factory=Listeners)
    shard: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # the ids of cells whose first prompt was read twice (``note_repeats``)
        self.read_twice: set[str] = set()
        self.reader = PromptReader(self.host, self._call_with_room)
        self.reading_since = time.monotonic()
        self.queue = DecodeQueue(
            self.host.model,
            most_rows=self.host.most_rows,
            most_bytes=self.host.memory,
            remake=self._remake_rows,
            make_room=self.reader.forget_all,
        )
        # contexts and prompts with several answers, by the ids of cell and example
        self.asking: dict[tuple[str, str], Asking | Drawing] = {}

    def answer_examples(self, work: Sequence[Work]) -> None:
        """Answer examples, each for its cells. An error of one cell takes only that cell out of the run."""
        for i, (example, cells_left) in enumerate(work):
            cells = self.active_cells(cells_left)
            # make room, and answer prompts that have waited too long; this ends, since an empty queue takes any number
            while not self.queue.has_room(len(cells)) or (len(self.queue) and self.reading_s() > AT_RISK_S):
                self.advance_queue()
                # decoding may have taken some out of the run
                cells = self.active_cells(cells)
            # no prompt waits for an answer, so this one will be the oldest
            if not len(self.queue):
                self.reading_since = time.monotonic()
            if not cells:
                continue
            following = None
            if i + 1 < len(work):
                next_example, next_cells = work[i + 1]
                following = (next_example, self.active_cells(next_cells))
            self.read_prompt(example, cells, following)
        # no prompt follows that could share the kept caches
        self.reader.forget_all()
        while len(self.queue):
            self.advance_queue()

    def reading_s(self) -> float:
        """Return the age in seconds of the oldest prompt that waits for an answer."""
        return time.monotonic() - self.reading_since

    def describe_unanswered(self) -> str:
        """Return in words how many prompts were read and not answered yet; '' if there are none."""
        prompts = {(row.cell.column, row.example.id) for row in self.queue}
        if not prompts:
            return ""
        count = f"{len(prompts)} prompts were" if len(prompts) > 1 else "1 prompt was"
        return f"{count} read and not answered yet ({self.reading_s():.0f} s): to be read again"

    def active_cells(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the cells that are neither refused nor failed."""
        return [c for c in cells if c.id not in self.refused and c.id not in self.failed]

    def read_prompt(self, example: Example, cells: Sequence[Cell], following: Work | None = None) -> None:
        """Prefill one prompt for its cells, audit the caches and queue the answers. A text is scored at once instead.

        A cell that cannot take the prompt is refused. An error of a cell takes it out of the run and is not raised.

        cells: the cells that need the example, at least one. All are of one task.
        following: the work that is read next, which may share this prompt's pass; None if there is none.
        """
        self.listeners.reading(cells[0].column)
        try:
            encoded = self.host.encode(example, cells[0].task)
            # a table of learned positions has no entries for the tokens behind its end
            check_capacity(self.host.model, len(encoded.ids))
        # the prompt is the same for all cells, and so is the error
        except Exception as error:
            for cell in cells:
                self.fail_cell(cell, error, example)
            return
        for cell in cells:
            if reason := explain_unfit(self.host, cell, encoded, example):
                self.refuse_cell(cell, reason, example)
        cells = with_full(self.active_cells(cells))
        rows = self._compress_prompt(example, encoded, cells, following)
        full = None
        if cells and cells[0].fidelity:
            # the full cache was read in the same pass
            full = next((row.cache for row in rows if row.cell.chain.is_full), None)
        # the hidden full cache was needed only for the comparison
        rows = [row for row in rows if not row.cell.hidden]
        if full is not None and rows:
            rows = self.compare_rows(example, encoded, rows, full)
        if rows:
            self._queue_rows(example, encoded, rows, full)

    def _compress_prompt(
        self, example: Example, encoded: Encoded, cells: Sequence[Cell], following: Work | None
    ) -> list[QueuedRow]:
        """Prefill one prompt. Return a row with an audited cache for each cell. A cell that fails is taken out."""
        rows = []
        caches = self.reader.read_caches(example, encoded, cells, following)
        for cell, cache in caches:
            try:
                # the error of the prefill takes the cell out as an error of the audit does
                if isinstance(cache, Exception):
                    raise cache
                # count bytes from the tensors themselves, whatever the method says
                measured = audit(cache, self.host.shape())
                self.note_repeats(cell, cache, encoded)
                ending_rule = self.host.make_ending(cell.task, example)
                rows.append(QueuedRow(cell, example, cache, measured, cut=encoded.cut, ending=ending_rule))
            except Exception as error:
                self.take_out(cell, error, example)
        # the compressed caches read the withheld question now
        if encoded.question:
            rows = self._run_together(rows, partial(extend_rows, host=self.host, ids=encoded.question))
        return rows

    def _queue_rows(
        self, example: Example, encoded: Encoded, rows: Sequence[QueuedRow], full: PromptCache | None
    ) -> None:
        """Queue the answers to one prompt under several methods. A text has no answer: score its rest and store that.

        full: the full cache to compare with, if there is one.
        """
        task = rows[0].cell.task
        if example.scored is not None:
            outcomes = forced.score_text(self.host, example.scored, rows, full)
            for row, outcome in outcomes:
                if isinstance(outcome, Exception):
                    self.take_out(row.cell, outcome, example)
                else:
                    value, answer, scored_row = outcome
                    # the tokens are the text's own, not an answer of the model
                    self.store_answer(scored_row, answer, text="", value=value)
        elif isinstance(encoded, EncodedTurns):
            # a question that sees earlier ones waits for their answers
            turns = range(len(encoded.questions)) if task.turns == "isolated" else range(1)
            self.queue_questions([Asking(self.host, row, encoded, row.cache) for row in rows], turns)
        elif task.samples > 1:
            self.queue_draws([Drawing(row) for row in rows], task.samples)
        else:
            for row in rows:
                # making room for this row may have decoded others and failed its cell
                if self.active_cells([row.cell]):
                    self.queue.add(row)

    def queue_questions(self, askings: Sequence[Asking], turns: Iterable[int]) -> None:
        """Queue the questions with the indices ``turns`` of one context, compressed by several methods.

        askings: the context under each method, all with the same questions.
        """
        # ``store_answer`` looks up the context of an answer by these ids
        self.asking |= {(asking.cell.id, asking.example.id): asking for asking in askings}
        for turn in turns:
            while not self.queue.has_room(len(askings)):
                self.advance_queue()
            # making room may have decoded others and failed a cell
            active = [asking for asking in askings if self.active_cells([asking.cell])]
            for row in self._run_together(active, partial(read_question, turn=turn)):
                self.queue.add(row)

    def queue_draws(self, drawings: Sequence[Drawing], count: int) -> None:
        """Queue ``count`` answers to one prompt, compressed by several methods. All begin from the same caches."""
        # ``store_answer`` looks up the drawings of an answer by these ids
        self.asking |= {(drawing.cell.id, drawing.row.example.id): drawing for drawing in drawings}
        for index in range(count):
            while not self.queue.has_room(len(drawings)):
                self.advance_queue()
            for drawing in drawings:
                # making room may have decoded others and failed its cell
                if self.active_cells([drawing.cell]):
                    self.queue.add(drawing.row_of(index, self.host))

    def _run_together(
        self, items: Sequence[Item], work: Callable[[Sequence[Item]], Sequence[QueuedRow]]
    ) -> list[QueuedRow]:
        """Run ``work`` on all items at once. If that fails, retry in smaller parts.

        An item that fails on its own marks its cell as failed or refused.
        """
        return self._take_out_failed(run_in_parts(items, lambda part: self._call_with_room(partial(work, part))))

    def _take_out_failed(self, outcomes: Iterable[tuple[Item, QueuedRow | Exception]]) -> list[QueuedRow]:
        """Return the rows of ``outcomes``. The cell of an item with an exception is marked as failed or refused."""
        rows = []
        for item, outcome in outcomes:
            if isinstance(outcome, Exception):
                self.take_out(item.cell, outcome, item.example)
            else:
                rows.append(outcome)
        return rows

    def _remake_rows(self, rows: Sequence[QueuedRow]) -> Sequence[tuple[QueuedRow, QueuedRow | Exception]]:
        """Make the caches of ``rows`` again. Return each row with its new cache, or the exception raised.

        Memory ran out before, so the reader drops its kept caches before and after.
        """
        self.reader.forget_all()
        outcomes = remake_rows(self.host, rows)
        # reading has kept the first tokens of the last prompt again
        self.reader.forget_all()
        return outcomes

    def _call_with_room(self, work: Callable[[], Result]) -> Result:
        """Return the result of ``work``. If memory runs out, decode the rows that are queued and call it again."""
        # reading may have dropped the kept caches by the time it fails
        can_forget = self.reader.holds
        try:
            return work()
        except Exception as error:
            if not (is_out_of_memory(error) and (len(self.queue) or can_forget)):
                raise
        # outside the ``except`` block, since the error's traceback would keep the memory of ``work``
        self.reader.forget_all()
        release()
        while len(self.queue):
            self.advance_queue()
        return work()

    def compare_rows(
        self, example: Example, encoded: Encoded, rows: Sequence[QueuedRow], full: PromptCache
    ) -> list[QueuedRow]:
        """Compare rows with the full cache on texts that continue the prompt. Return the rows with divergences."""
        # all cells of a task are compared on texts of the same length
        most = int(rows[0].cell.identity["fidelity"]["tokens"])
        outcomes = forced.compare_with_full(self.host, example, encoded, rows=rows, full=full, most=most)
        return self._take_out_failed(outcomes)

    def advance_queue(self) -> None:
        """Decode until some rows have ended, and score and store those. The queue must not be empty."""
        for row, outcome in self.queue.advance():
            if isinstance(outcome, Exception):
                self.take_out(row.cell, outcome, row.example)
                continue
            task = row.cell.task
            try:
                _, text = self.host.cut_answer(outcome.tokens, row.ending, keep_special=task.thought.special)
                value = task.score(text, row.scored_example)
            except Exception as error:
                self.fail_cell(row.cell, error, row.example)
            else:
                self.store_answer(row, outcome, text, value)

    def store_answer(self, row: QueuedRow, answer: Answer, text: str, value: float | None) -> None:
        """Store a row's answer with its score, or refuse its cell if the audit of decoding fails.

        text: the answer's text; '' for a text that was scored.
        value: the answer's score; None if the metric gives no score.
        """
        cell, example = row.cell, row.example
        # the same step may have refused another row of this cell
        if cell.id in self.refused:
            return
        if not answer.finite:
            self.refuse_cell(cell, str(build_answer_refusal(cell.chain, self.host.model.dtype)), example)
            return
        try:
            # the last token of an answer is never read, so the cache grows by one token less
            decode_peak = check_peak(row.cache, answer.held, fed=len(answer.tokens) - 1)
            if answer.stored is not None:
                check_bytes(row.cache, answer.stored, self.host.shape())
            asking = None
            if row.turn is None:
                sample: Sample | None = build_sample(row, answer, text, value, decode_peak)
            else:
                asking = self.asking[cell.id, example.id]
                add_answer = partial(asking.add_answer, row, answer, text=text, value=value, peak=decode_peak)
                sample = self._call_with_room(add_answer)
        except Exception as error:
            self.take_out(cell, error, example)
            return
        if sample is None:
            # the prompt has further answers; a context's next question may read this one
            if isinstance(asking, Asking) and not asking.isolated:
                self.queue_questions([asking], [len(asking.answered)])
            return
        self.asking.pop((cell.id, example.id), None)
        # an earlier version of the method may have failed the audit on this example
        self.store.clear_refusal(cell.id, example.id)
        # store first: listeners may rely on the sample being on disk
        self.writers[cell.id].append(sample.record())
        self.listeners.stored(cell, sample)

    def note_repeats(self, cell: Cell, cache: PromptCache, encoded: Encoded) -> None:
        """Say so if a method from outside keeps something else of its first prompt when it reads it a second time."""
        if not cell.chain.foreign or cell.id in self.read_twice:
            return
        self.read_twice.add(cell.id)
        (second,) = self._call_with_room(partial(self.host.prefill, encoded.ids, [cell.chain]))
        layer = find_first_difference(digest_layers(cache.layers), digest_layers(second.layers))
        if layer is not None:
            say(
                f"{cell.label} on {cell.column} keeps something else of the same prompt when it reads it twice (layer "
                f"{layer}): its results depend on more than the prompt, such as earlier prompts or draws without a seed"
            )

    def refuse_cell(self, cell: Cell, reason: str, example: Example) -> None:
        """Take the cell out of the run and out of all reports, record the reason and drop its waiting rows."""
        recorded = f"{reason} (example {example.id})"
        self.refused[cell.id] = recorded
        self.store.refuse(cell, recorded, example.id)
        self.forget_cell(cell)

    def take_out(self, cell: Cell, error: Exception, example: Example) -> None:
        """Take the cell out of the run: refuse it if its numbers must not be reported, else mark it as failed."""
        if isinstance(error, Refused):
            self.refuse_cell(cell, str(error), example)
        else:
            self.fail_cell(cell, error, example)

    def forget_cell(self, cell: Cell) -> None:
        """Forget the waiting rows, and the unfinished contexts and drawings of a cell."""
        self.queue.drop(cell.id)
        self.asking = {key: asking for key, asking in self.asking.items() if asking.cell.id != cell.id}

    def fail_cell(self, cell: Cell, error: Exception, example: Example) -> None:
        """Take the cell out of this run and record why. Its samples stay, and the next run measures the others."""
        # the first error is the reason; rows in the same batch may bring others
        if cell.id in self.failed:
            return
        # messages of PyTorch may have many lines; a reason takes one
        reason = " ".join(str(error).split())[:REASON_LENGTH]
        # kvbench's own messages need no name of the error's class
        if not isinstance(error, KvbenchError):
            reason = f"{type(error).__name__}: {reason}".rstrip(": ")
        self.failed[cell.id] = f"{reason} (example {example.id})"
        self.store.mark(cell, "failed", self.failed[cell.id])
        trace = self.store.folder(cell.id) / f"traceback-{self.shard}.txt"
        # a full disk must not end the run of the other cells
        with suppress(OSError):
            trace.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        say(f"{cell.label} on {cell.column} failed: {self.failed[cell.id]}; see {trace}")
        self.forget_cell(cell)


def run_groups(
    host: Host,
    groups: Sequence[Group],
    store: ResultStore,
    provenance: Facts,
    shard: int = 0,
    mix: bool = False,
    listeners: Listeners | None = None,
) -> list[Cell]:
    """Measure the missing examples of one group, or of several groups that share their prompts, in turns.

    Finished examples stay whatever ends the run early (an interrupt, a full disk), and are not run again. A cell that
    fails is marked as failed in the store. Return the cells that are left out because another process measures them.

    provenance: the facts to store with the samples.
    shard: the number of this process's part of the examples.
    mix: whether a cell may have samples of several devices or versions of PyTorch.
    """
    busy: list[Cell] = []
    with ExitStack() as stack:
        writers = {}
        for cell in _list_waiting([pending(group, store) for group in groups]):
            facts = dict(provenance)
            facts |= {"batch": host.describe_batching()}
            facts |= cell.chain.provenance()
            # wait long for the first busy cell only: its process holds the locks of the others, too
            wait_s = BUSY_WAIT_S if busy else SHARD_WAIT_S
            try:
                writers[cell.id] = store.open(cell, facts, shard, mix, wait_s=wait_s)
            except Busy:
                busy.append(cell)
            else:
                stack.callback(writers[cell.id].close)
        # read the store again: another process may have answered some examples before its locks were free
        opened = [group.only(writers) for group in groups]
        todo = [pending(group, store) for group in opened]
        cells = _list_waiting(todo)
        if not cells:
            return busy
        work = _order_work(groups, todo)
        group_run = GroupRun(host=host, store=store, writers=writers, listeners=listeners or Listeners(), shard=shard)
        # attention runs through kvbench's interface until the last answer
        stack.enter_context(attached(host.model))
        try:
            group_run.answer_examples(work)
        # an interrupt, too
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and (unanswered := group_run.describe_unanswered()):
                error.add_note(unanswered)
            for cell in group_run.active_cells(_list_waiting([pending(group, store) for group in opened])):
                store.mark(cell, "interrupted", ending(error))
            raise
    return busy


def _order_work(groups: Sequence[Group], todo: Sequence[Todo]) -> list[Work]:
    """Return the examples of the groups that some cell still needs, in the order in which they are read."""
    work: list[Work] = []
    # take the groups' examples in turns, so that two examples with a shared prompt follow each other
    for examples in zip_longest(*[group.examples for group in groups]):
        for example, cells_left in zip(examples, todo, strict=True):
            if example is not None and example.id in cells_left:
                work.append((example, cells_left[example.id]))
    return work


def _list_waiting(todo: Sequence[Todo]) -> list[Cell]:
    cells_by_id: dict[str, Cell] = {}
    for cells_by_example in todo:
        for cells in cells_by_example.values():
            cells_by_id |= {cell.id: cell for cell in cells}
    return list(cells_by_id.values())

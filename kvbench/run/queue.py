"""The queue of a group's rows before and in its decode batch, and the recovery when a step fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from transformers import PreTrainedModel

from kvbench.audit.prompt_audit import MeasuredBytes
from kvbench.base.errors import say
from kvbench.base.example import Example
from kvbench.engine.batch import Answer, DecodeBatch
from kvbench.engine.memory import is_out_of_memory, release
from kvbench.engine.stopping import Ending
from kvbench.methods.core.prompt_cache import Cache
from kvbench.plan.cells import Cell
from kvbench.store.fidelity import TextFidelity

ENTER_SHARE = 0.5
"""Rows enter a running batch once it has shrunk to this share of its limits, so that groups are few and large."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class QueuedRow:
    """One prompt's cache under one method, ready to be decoded.

    cut: the tokens cut out of the prompt.
    fidelity: the cache beside the full one by kind of text, once they were compared.
    turn: which of a context's questions it answers; None for a prompt with one.
    given_up: whether a batch took the cache over, of which only shapes are left.
    """

    cell: Cell
    example: Example
    cache: Cache
    measured: MeasuredBytes
    cut: int
    ending: Ending
    fidelity: Mapping[str, TextFidelity] | None = None
    turn: int | None = None
    given_up: bool = False

    @property
    def asked(self) -> Example:
        """Return the example that the answer is scored by."""
        return self.example if self.turn is None else self.example.asked(self.turn)

    @property
    def cost(self) -> int:
        """Return the bytes that decoding takes: the cache, a copy where others keep it, and the new tokens."""
        cache_bytes = (1 if self.turn is None else 2) * (self.measured.payload + self.measured.overhead)
        return cache_bytes + self.measured.full_bytes * self.ending.limit // max(1, self.measured.n)

    def giving_up(self) -> QueuedRow:
        """Return the row without its cache's numbers. A question's row keeps them: others follow or branch from it."""
        return self if self.turn is not None else replace(self, cache=self.cache.shapes(), given_up=True)


Outcome = tuple[QueuedRow, Answer | Exception]
Remake = Callable[[Sequence[QueuedRow]], Sequence[tuple[QueuedRow, QueuedRow | Exception]]]


class DecodeQueue:
    """Rows in the order they came, decoded at most ``most_rows`` and ``most_bytes`` at a time.

    The order and ``most_rows`` decide what runs beside what. Out of memory halves ``most_rows``; rows that were running
    begin again from their caches, so that none is lost or answered twice.

    remake: reads prompts again, so that a cache that a batch holds need not be kept beside it: it returns each row with
    its cache, or the exception. Without it caches are kept. Where memory runs out beside rows that run, those wait that
    were to be made again.
    make_room: gives up what others keep when memory runs out, and tells whether there was anything.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        most_rows: int,
        most_bytes: int,
        remake: Remake | None = None,
        make_room: Callable[[], bool] = lambda: False,
    ) -> None:
        self.model, self.most_rows, self.most_bytes, self.remake = model, most_rows, most_bytes, remake
        self.make_room = make_room
        self.waiting: list[QueuedRow] = []
        self.running: list[QueuedRow] = []
        self.apart: list[QueuedRow] = []  # rows of a failed batch, run one by one to show which fails
        self._batch: DecodeBatch[QueuedRow] = DecodeBatch(model)

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.apart)

    def __iter__(self) -> Iterator[QueuedRow]:
        yield from (*self.running, *self.apart, *self.waiting)

    def add(self, row: QueuedRow) -> None:
        self.waiting.append(row)

    def drop(self, cell_id: str) -> None:
        """Remove the rows of a cell that are not being decoded yet."""
        self.waiting = [r for r in self.waiting if r.cell.id != cell_id]
        self.apart = [r for r in self.apart if r.cell.id != cell_id]

    def takes(self, rows: int) -> bool:
        """Return True if the queue is empty, or stays within its limits with ``rows`` more rows of the mean cost."""
        queued = [*self]
        cost = sum(r.cost for r in queued)
        more = cost * rows // max(1, len(queued))
        return not queued or (len(queued) + rows <= self.most_rows and cost + more <= self.most_bytes)

    def advance(self) -> list[Outcome]:
        """Decode until some rows have ended or failed. Return those as (row, answer or exception).

        Return [] if the batch failed and its rows are to be decoded again.
        """
        if self.apart:
            row = self.apart.pop(0)
            batch: DecodeBatch[QueuedRow] = DecodeBatch(self.model)
            try:
                return self._enter(batch, [row])[1] or list(batch.advance())
            except Exception as error:
                return [(row, error)]
        if lost := self._admit():
            return lost
        failure: Exception | None = None
        try:
            answers = self._batch.advance()
        except Exception as error:
            failure = error
        if failure is None:
            ended = {row for row, _ in answers}
            self.running = [r for r in self.running if r not in ended]
            return list(answers)
        rows, self.running, self._batch = self.running, [], DecodeBatch(self.model)
        out_of_memory = is_out_of_memory(failure)
        more_room = out_of_memory and self.make_room()
        if len(rows) == 1 and not more_room:
            return [(rows[0], failure)]
        failure = None  # its traceback would keep the batch alive
        release()
        if out_of_memory:
            self._shrink(len(rows) // 2, rows, f"with {len(rows)} answers at once")
        else:
            self.apart = rows
        return []

    def _admit(self) -> list[Outcome]:
        """Move waiting rows into the batch while it has room: rows for which the model is adapted in the same way.

        Return (row, exception) of those whose caches could not be made again.
        """
        cost = sum(r.cost for r in self.running)
        if not self.waiting or not self._batch.open:
            return []
        if len(self.running) > ENTER_SHARE * self.most_rows or cost > ENTER_SHARE * self.most_bytes:
            return []
        kind = (self.running or self.waiting)[0].cache.batch_key
        entering: list[QueuedRow] = []
        for row in [r for r in self.waiting if r.cache.batch_key == kind]:
            count = len(self.running) + len(entering)
            cost += row.cost
            if count and (count >= self.most_rows or cost > self.most_bytes):
                break
            entering.append(row)
        self.waiting = [r for r in self.waiting if r not in entering]
        entered, lost = self._enter(self._batch, entering)
        self.running += entered
        unmade = [row for row, error in lost if isinstance(error, Exception) and is_out_of_memory(error)]
        if not (unmade and self.running):
            return lost
        release()
        self._shrink(len(self.running), unmade, f"beside {len(self.running)} answers")
        return [(row, error) for row, error in lost if row not in unmade]

    def _shrink(self, most_rows: int, rows: Sequence[QueuedRow], where: str) -> None:
        """Let ``rows`` wait again, and at most so many run at once from now on, as memory ran out."""
        self.most_rows, self.waiting = max(1, most_rows), [*rows, *self.waiting]
        say(f"out of memory {where}; going on with at most {self.most_rows}")

    def _enter(self, batch: DecodeBatch[QueuedRow], rows: Sequence[QueuedRow]) -> tuple[list[QueuedRow], list[Outcome]]:
        """Enter rows into a batch, which takes their caches over. Return them, and those whose caches are lost."""
        lost: list[Outcome] = []
        remade = {}
        if self.remake is not None and (gone := [r for r in rows if r.given_up]):
            for row, outcome in self.remake(gone):
                if isinstance(outcome, Exception):
                    lost.append((row, outcome))
                else:
                    remade[row] = outcome
        whole = [remade.get(r, r) for r in rows if r in remade or not r.given_up]
        entered = whole if self.remake is None else [r.giving_up() for r in whole]
        batch.enter([(key, r.cache, r.ending) for key, r in zip(entered, whole, strict=True)])
        return entered, lost


def in_parts(
    items: Sequence[Item], work: Callable[[Sequence[Item]], Sequence[Result]]
) -> list[tuple[Item, Result | Exception]]:
    """Call ``work`` on all items at once. Return (item, result or exception) of each item.

    If ``work`` fails, it is called on parts: halves if memory ran out, else single items. So only an item that fails
    alone gets an exception.
    """
    try:
        return list(zip(items, work(items), strict=True))
    except Exception as error:
        if len(items) == 1:
            return [(items[0], error)]
        half = (len(items) + 1) // 2 if is_out_of_memory(error) else 1
    release()
    parts = [items[i : i + half] for i in range(0, len(items), half)]
    return [outcome for part in parts for outcome in in_parts(part, work)]

"""Read and compress prompts for the cells of a run. Successive examples may share passes of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kvbench.base.errors import UsageError
from kvbench.base.example import Example
from kvbench.engine.limits import check_capacity, check_turn, check_window
from kvbench.engine.memory import is_out_of_memory, run_in_parts
from kvbench.methods.core.prompt_cache import PromptCache
from kvbench.plan.cells import with_full
from kvbench.run.host import Host
from kvbench.store.cell import Cell
from kvbench.tasks.prompt import Encoded

Key = tuple[str, bool]
"""A cell's id, and whether the cell is hidden: a full cache that is read only to compare others with it."""
Work = tuple[Example, Sequence[Cell]]
"""An example, and the cells that still need it."""


class PromptReader:
    """A reader of prompts. It keeps the caches of the previous context, if a question was withheld from it.

    Successive examples with equal contexts share these caches. A prompt may be followed by the same prompt with its
    question withheld: one pass over all tokens then gives the caches of both.

    with_room: calls its argument, and calls it again with more memory if memory ran out.
    """

    def __init__(self, host: Host, with_room: Callable[[Callable[[], Any]], Any]) -> None:
        self.host, self.with_room = host, with_room
        # the most cells of one prefill, set after a prefill ran out of memory; None: all at once
        self.most_cells: int | None = None
        self.forget()

    def forget(self) -> None:
        """Drop what is kept of the context that was read last: its tokens and its caches."""
        self._kept_ids: Sequence[int] = ()
        self._kept_caches: dict[Key, PromptCache] = {}

    @property
    def holds(self) -> bool:
        """True if caches are kept, or the first tokens of a prompt."""
        has_prefix = self.host.prefix is not None and len(self.host.prefix.ids) > 0
        return bool(self._kept_caches) or has_prefix

    def forget_all(self) -> bool:
        """Drop everything that is kept, including a prompt's first tokens. Return True if there was anything."""
        # ask before all is dropped
        held_anything = self.holds
        self.forget()
        if self.host.prefix is not None:
            self.host.prefix.forget()
        return held_anything

    def read_caches(
        self, example: Example, encoded: Encoded, cells: Sequence[Cell], following: Work | None
    ) -> list[tuple[Cell, PromptCache | Exception]]:
        """Return (cell, cache) for each cell, or (cell, exception) if its prefill failed.

        encoded: the example's prompt.
        following: the work that is read next, which may share this prompt's pass; None if there is none.
        """
        caches: dict[Key, PromptCache | Exception] = {}
        if encoded.question and self._kept_ids == encoded.ids:
            # this is the context that was read last, with another question behind it
            caches |= self._kept_caches
        # free the old caches before new ones come
        self.forget()
        # each cell with how many of the prompt's first tokens it reads
        wanted = [(cell, len(encoded.ids)) for cell in cells if _make_key(cell) not in caches]
        # if all caches of a prompt are known, neither it nor the following work is read
        context: Sequence[int] = ()
        later_cells: list[Cell] = []
        if wanted:
            context, later_cells = self._find_withheld(example, encoded, following)
            wanted += [(cell, len(context)) for cell in later_cells]
        for (cell, _), cache in self._prefill_cells(encoded.ids, wanted):
            caches[_make_key(cell)] = cache
        # only caches of a context whose question was withheld serve the next prompt, which may have another question
        if encoded.question:
            self._keep(encoded.ids, cells, caches)
        else:
            self._keep(context, later_cells, caches)
        return [(cell, caches[_make_key(cell)]) for cell in cells]

    def _keep(
        self, context: Sequence[int], cells: Sequence[Cell], caches: Mapping[Key, PromptCache | Exception]
    ) -> None:
        """Keep the caches of a context for the next prompt.

        context: the context's token ids.
        cells: the cells whose caches of it are kept. A cell whose prefill failed has none.
        caches: the outcomes of reading by cell, which may hold others, too.
        """
        self._kept_ids = context
        for cell in cells:
            cache = caches[_make_key(cell)]
            if isinstance(cache, PromptCache):
                self._kept_caches[_make_key(cell)] = cache

    def _find_withheld(
        self, example: Example, encoded: Encoded, following: Work | None
    ) -> tuple[Sequence[int], list[Cell]]:
        """Return the context's token ids and the cells of the work ``following`` if it asks about this same prompt.

        ``following`` may be the example again, under cells that compress its context before they read its question.
        This prompt begins with that context, so one prefill can serve both. Return ((), []) if it cannot.
        """
        if following is None or encoded.question or example.scored is not None:
            return (), []
        next_example, next_cells = following
        if not next_cells or next_example.id != example.id:
            return (), []
        try:
            withheld = self.host.encode(next_example, next_cells[0].task)
        # the error is reported when that example itself is read
        except Exception:
            return (), []
        begins_alike = encoded.ids[: len(withheld.ids)] == withheld.ids
        if not withheld.question or not begins_alike:
            return (), []
        fitting_cells = []
        for cell in next_cells:
            if explain_unfit(self.host, cell, withheld, next_example) is None:
                fitting_cells.append(cell)
        return withheld.ids, with_full(fitting_cells)

    def _prefill_cells(
        self, ids: Sequence[int], wanted: Sequence[tuple[Cell, int]]
    ) -> list[tuple[tuple[Cell, int], PromptCache | Exception]]:
        """Return each entry of ``wanted`` with its cache, or with the exception that its prefill raised.

        ids: the prompt's token ids.
        wanted: the pairs (cell, how many of the prompt's first tokens its cache covers).
        """

        def prefill_together(part: Sequence[tuple[Cell, int]]) -> list[PromptCache]:
            """Return the caches of ``part``. If memory runs out, later prefills have at most half as many cells."""
            chains = [cell.chain for cell, _ in part]
            lengths = [length for _, length in part]
            try:
                caches: list[PromptCache] = self.with_room(partial(self.host.prefill, ids, chains, lengths))
                return caches
            except Exception as error:
                if is_out_of_memory(error):
                    self.most_cells = max(1, len(part) // 2)
                # ``run_in_parts`` tries smaller parts, or keeps the error
                raise

        # a step of at least 1, since nothing may be wanted
        most_cells = self.most_cells or max(1, len(wanted))
        outcomes: list[tuple[tuple[Cell, int], PromptCache | Exception]] = []
        for start in range(0, len(wanted), most_cells):
            outcomes += run_in_parts(wanted[start : start + most_cells], prefill_together)
        return outcomes


def _make_key(cell: Cell) -> Key:
    """Return the key that tells the cells of one prompt apart. A hidden full cache has its source cell's id."""
    return cell.id, cell.hidden


def explain_unfit(host: Host, cell: Cell, encoded: Encoded, example: Example) -> str | None:
    """Return why a cell cannot run an example, or None if it can.

    encoded: the example's prompt, which the cell's prefill reads.

    Beyond a sliding window only the full cache can run. Beyond the model's context, texts to be scored
    (``example.scored``) need rolled positions; prompts to be answered were cut to the context already.
    """
    exceeds_context = False
    tokens = len(encoded) + example.max_new_tokens
    if example.scored is not None:
        tokens = len(example.scored.ids)
        exceeds_context = host.context is not None and tokens > host.context
    if exceeds_context and not cell.chain.rolled:
        return (
            f"a text of {tokens} tokens exceeds the model's context of {host.context}: lower length=, or stream it "
            "with positions that roll (method=streamingllm mode=rolled)"
        )
    try:
        check_capacity(host.model, tokens)
        check_window(host.model, tokens, [cell.chain])
        check_turn(host.model, len(encoded.ids), tokens)
    except UsageError as error:
        return str(error)
    return None

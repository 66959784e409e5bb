"""Prompts read and compressed for the cells of a run, with the passes that examples after each other share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvbench.base.example import Example
from kvbench.engine.memory import is_out_of_memory
from kvbench.methods.core.prompt_cache import Cache
from kvbench.plan.cells import Cell, with_full
from kvbench.run.host import Host
from kvbench.run.queue import in_parts
from kvbench.run.refusals import unfit
from kvbench.tasks.prompt import Encoded

Work = tuple[Example, Sequence[Cell]]
"""An example, and the cells that still need it."""


class PromptReader:
    """Reads prompts, and keeps the caches of the context read last where a question was withheld from it.

    Examples that follow each other with equal contexts share them, and so does a prompt with its question in view that
    is followed by the same one with the question withheld: its pass over all tokens gives the caches of both.

    with_room: calls its argument, again with more memory if that ran out.
    """

    def __init__(self, host: Host, with_room: Callable[[Callable[[], Any]], Any]) -> None:
        self.host, self.with_room = host, with_room
        self.most_cells: int | None = None  # of one prefill, once that ran out of memory
        self.forget()

    def forget(self) -> None:
        """Drop the caches that are kept."""
        self._ids: Sequence[int] = ()
        self._known: dict[Any, Cache] = {}

    @property
    def holds(self) -> bool:
        """Tell whether caches are kept, or the first tokens of a prompt."""
        return bool(self._known or (self.host.prefix and len(self.host.prefix.ids)))

    def forget_all(self) -> bool:
        """Drop all that is kept, the first tokens of a prompt, too. Tell whether there was anything."""
        anything = self.holds
        self.forget()
        if self.host.prefix is not None:
            self.host.prefix.forget()
        return anything

    def caches(
        self, example: Example, encoded: Encoded, cells: Sequence[Cell], following: Work | None
    ) -> list[tuple[Cell, Cache | Exception]]:
        """Return (cell, cache) for each cell, or (cell, exception) if its prefill failed."""
        same = bool(encoded.question) and self._ids == encoded.ids
        caches: dict[Any, Cache | Exception] = {**self._known} if same else {}
        self.forget()  # freed before others come
        wanted = [(c, len(encoded.ids)) for c in cells if (c.id, c.hidden) not in caches]
        withheld, later = self._withheld(example, encoded, following) if wanted else ((), [])
        of_both = self._prefill(encoded.ids, [*wanted, *((c, len(withheld)) for c in later)])
        caches |= {(c.id, c.hidden): cache for (c, _), cache in of_both}
        kept = [(c.id, c.hidden) for c in (cells if encoded.question else later)]
        self._ids = encoded.ids if encoded.question else withheld
        self._known = {key: cache for key in kept if isinstance(cache := caches[key], Cache)}
        return [(c, caches[c.id, c.hidden]) for c in cells]

    def _withheld(self, example: Example, encoded: Encoded, following: Work | None) -> tuple[Sequence[int], list[Cell]]:
        """Return the context and cells of what follows if it is this prompt with its question withheld, else none."""
        if following is None or not following[1] or following[0].id != example.id or encoded.question or example.tokens:
            return (), []
        other, cells = following
        try:
            context = self.host.encode(other, cells[0].task)
        except Exception:  # which is reported where it is read itself
            return (), []
        if not context.question or encoded.ids[: len(context.ids)] != context.ids:
            return (), []
        return context.ids, with_full([c for c in cells if not unfit(self.host, c, context, other)])

    def _prefill(
        self, ids: Sequence[int], wanted: Sequence[tuple[Cell, int]]
    ) -> list[tuple[tuple[Cell, int], Cache | Exception]]:
        """Return the cache of each cell's first tokens, or the exception that it raised."""

        def prefill_together(part: Sequence[tuple[Cell, int]]) -> list[Cache]:
            chains, lengths = [c.chain for c, _ in part], [n for _, n in part]
            try:
                caches: list[Cache] = self.with_room(lambda: self.host.prefill(ids, chains, lengths))
                return caches
            except Exception as error:
                if is_out_of_memory(error):
                    self.most_cells = max(1, len(part) // 2)
                raise

        most = self.most_cells or max(1, len(wanted))
        parts = [wanted[i : i + most] for i in range(0, len(wanted), most)]
        return [outcome for part in parts for outcome in in_parts(part, prefill_together)]

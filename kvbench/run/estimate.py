"""Estimate a group before it runs: bytes by the formulas of accounting, time from the answers measured so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from kvbench.audit.accounting import bytes_declared
from kvbench.cache.model_shape import Shape
from kvbench.cache.observation import Needs
from kvbench.example import Example
from kvbench.methods.chain import Chain
from kvbench.run.plan import Cell, Group
from kvbench.run.results import Sample

LENGTHS_LOOKED_AT = 3


@dataclass(frozen=True)
class Estimate:
    """The memory and time that the work left of a group takes.

    ``cells`` holds the bytes of one prompt while it is decoded, by id of the cells that still need some. ``layer`` is
    the bytes of one dense layer with its observations. At most ``rows`` of all cells are decoded at once. ``seconds``
    is the time left, from the stored samples of this group; None if there are none.
    """

    prompt_tokens: int
    cells: Mapping[str, int]
    layer: int
    rows: int
    seconds: float | None

    def bytes(self, cells: Sequence[Cell], memory: int) -> int:
        """Return the peak bytes of caches and observations, with as many prompts as ``rows`` and ``memory`` allow."""
        per_prompt = sum(self.cells[c.id] for c in cells)
        prompts = max(1, self.rows // max(1, len(cells)))
        return self.layer + max(per_prompt, min(prompts * per_prompt, memory))

    def alone(self, cell: Cell) -> int:
        """Return the bytes that one prompt of the cell takes. No part of a group can be smaller."""
        return self.layer + self.cells.get(cell.id, 0)

    def parts(self, group: Group, memory: int) -> list[Group]:
        """Return the parts of the group that each fit into ``memory`` with one prompt; too large a cell is one alone.

        Cells that share a prefill stay together where they can, since each further part reads the prompts again.
        """
        room = memory - self.layer
        by_key: dict[str, list[Cell]] = {}
        for cell in group.cells:
            if cell.id in self.cells:
                by_key.setdefault(cell.chain.prefill_key, []).append(cell)
        parts: list[list[Cell]] = [[]]
        for cells in by_key.values():
            if parts[-1] and self._cost(parts[-1]) + self._cost(cells) > room >= self._cost(cells):
                parts.append([])
            for cell in cells:
                if parts[-1] and self._cost([*parts[-1], cell]) > room:
                    parts.append([])
                parts[-1].append(cell)
        return [replace(group, cells=tuple(cells)) for cells in parts if cells]

    def _cost(self, cells: Sequence[Cell]) -> int:
        return sum(self.cells[c.id] for c in cells)


def estimate(
    group: Group,
    todo: Mapping[str, Sequence[Cell]],
    samples: Mapping[str, Mapping[str, Sample]],
    shape: Shape,
    itemsize: int,
    hidden_size: int,
    rows: int,
    prompt_tokens: Callable[[Example], int],
) -> Estimate:
    """Return the estimate of the work left of a group.

    ``todo`` holds the cells that need each example, ``samples`` the stored samples by cell. The longest prompts count.
    A chain whose size depends on the prompt's text counts as the full cache.
    """
    examples = [e for e in group.examples if e.id in todo]
    longest = sorted(examples, key=lambda e: len(e.tokens) or len(e.prompt), reverse=True)[:LENGTHS_LOOKED_AT]
    n = max(map(prompt_tokens, longest), default=0)
    new = max((e.max_new_tokens for e in examples), default=0)
    cells = {c.id: c for some in todo.values() for c in some}
    needs = Needs()
    for cell in cells.values():
        needs = needs | cell.chain.needs(n)
    tail = shape.full_bytes(new, itemsize)
    # twice: the cache and its copy in the decode batch
    costs = {i: 2 * cache_bytes(c.chain, shape, n, itemsize) + tail for i, c in cells.items()}
    seen = _observed(needs, shape, n, itemsize, hidden_size)
    layer = shape.full_bytes(n, itemsize) // shape.layers + seen
    answers = sum(len(some) for some in todo.values())
    return Estimate(n, costs, layer, min(rows, answers), _seconds(todo, samples))


def cache_bytes(chain: Chain, shape: Shape, n: int, itemsize: int) -> int:
    """Return the bytes of a prompt's cache by the chain's formula, or the full cache's if it has none or none yet."""
    known = n and not any(s.unbound for s in chain.stages)
    declared = bytes_declared(chain, shape, n, itemsize) if known else None
    # latents are stored as one head, and are as wide as all kv heads at most
    heads = max(shape.kv_heads, chain.heads(shape.kv_heads, shape.query_heads))
    return shape.full_bytes(n, itemsize, heads) if declared is None else declared.total


def _observed(needs: Needs, shape: Shape, n: int, itemsize: int, hidden_size: int) -> int:
    """Return the bytes of the observations of one layer: queries, column sums in fp32 and hidden states."""
    queries = min(needs.last_q, n) + min(needs.first_q, n)
    sums = int(needs.colsums) + len(needs.colsums_bits)
    seen = shape.query_heads * (queries * shape.head_dim * itemsize + sums * n * 4)
    return seen + (n * hidden_size * itemsize if needs.hidden else 0)


def _seconds(todo: Mapping[str, Sequence[Cell]], samples: Mapping[str, Mapping[str, Sample]]) -> float | None:
    """Return the seconds left, from the mean times of the stored samples; None without samples."""
    if not todo:
        return 0.0
    timings = {i: [s.timing for s in of_cell.values()] for i, of_cell in samples.items()}
    per_answer = {i: fmean(t.compress_s + t.decode_s for t in times) for i, times in timings.items() if times}
    if not per_answer:
        return None
    prefill = fmean(t.prefill_s for times in timings.values() for t in times)
    typical = fmean(per_answer.values())
    prefills = sum(len({c.chain.prefill_key for c in cells}) for cells in todo.values())
    answers = sum(per_answer.get(c.id, typical) for cells in todo.values() for c in cells)
    return prefills * prefill + answers

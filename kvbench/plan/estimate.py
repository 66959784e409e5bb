"""Estimate a group before it runs: its bytes by the formulas of accounting, its time from earlier answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from kvbench.audit.accounting import bytes_declared
from kvbench.base.example import Example
from kvbench.kv.model_shape import Shape
from kvbench.kv.observation import Needs
from kvbench.methods.core.chain import Chain
from kvbench.plan.cells import Group
from kvbench.store.cell import Cell
from kvbench.store.results import Sample

LENGTHS_LOOKED_AT = 3
"""The number of examples, the largest ones in the data, that are measured in tokens to find the longest prompt."""


@dataclass(frozen=True)
class Estimate:
    """The memory and time that the remaining work of a group takes.

    prompt_tokens: the length of the longest prompt.
    cells: the bytes of one prompt while it is decoded, by id of each cell that still lacks an answer.
    layer: the bytes of one dense layer with its observations.
    rows: the most rows, of all cells together, that are decoded at once.
    seconds: the time left, by the stored samples of this group; None without stored samples.
    """

    prompt_tokens: int
    cells: Mapping[str, int]
    layer: int
    rows: int
    seconds: float | None

    def bytes(self, cells: Sequence[Cell], memory: int) -> int:
        """Return the peak bytes of caches and observations, with as many prompts as ``rows`` and ``memory`` allow.

        cells: the cells of one part, all of which lack answers.
        memory: the bytes that caches may take.
        """
        per_prompt = self._count_prompt_bytes(cells)
        # a prompt takes one row for each cell
        prompts = max(1, self.rows // max(1, len(cells)))
        caches = min(prompts * per_prompt, memory)
        # one prompt is decoded even if it needs more than ``memory``
        return self.layer + max(per_prompt, caches)

    def alone(self, cell: Cell) -> int:
        """Return the bytes that one prompt takes under this cell alone. No part with this cell takes less."""
        # a cell without work left has no entry
        return self.layer + self.cells.get(cell.id, 0)

    def parts(self, group: Group, memory: int) -> list[Group]:
        """Divide the group into parts, such that one prompt of all cells of a part fits into ``memory``.

        A cell that does not fit even alone is a part of its own. Cells that share a prefill stay together where they
        can, since each further part reads the prompts again. Cells without work left are in no part.
        """
        # while a prompt is read, one layer stays dense beside the rows
        memory_for_rows = memory - self.layer
        cells_by_prefill: dict[str, list[Cell]] = {}
        for cell in group.cells:
            if cell.id in self.cells:
                cells_by_prefill.setdefault(cell.chain.prefill_key, []).append(cell)
        finished_parts: list[list[Cell]] = []
        part: list[Cell] = []
        for cells in cells_by_prefill.values():
            # cells that fit into one part are not divided just because the current part is partly taken
            fit_together = self._count_prompt_bytes(cells) <= memory_for_rows
            if fit_together and self._count_prompt_bytes(part + cells) > memory_for_rows:
                finished_parts.append(part)
                part = []
            for cell in cells:
                # a cell that does not fit even alone begins a part all the same
                if part and self._count_prompt_bytes([*part, cell]) > memory_for_rows:
                    finished_parts.append(part)
                    part = []
                part.append(cell)
        # a group without work left has no part
        if part:
            finished_parts.append(part)
        return [replace(group, cells=tuple(cells)) for cells in finished_parts]

    def _count_prompt_bytes(self, cells: Sequence[Cell]) -> int:
        """Return the bytes that one prompt takes while all of ``cells`` decode it."""
        return sum(self.cells[c.id] for c in cells)


def count_longest(examples: Sequence[Example], prompt_tokens: Callable[[Example], int]) -> int:
    """Return the tokens of the longest prompt among the examples that are largest in the data; 0 without examples.

    prompt_tokens: returns the length in tokens of an example's prompt.
    """
    longest = sorted(examples, key=Example.size, reverse=True)[:LENGTHS_LOOKED_AT]
    return max(map(prompt_tokens, longest), default=0)


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
    """Return the estimate of a group's remaining work, as if every prompt were as long as the longest.

    A chain whose size depends on the prompt's text counts as the full cache.

    todo: by example id, the cells that still need the example.
    samples: the stored samples by example id, by cell id.
    itemsize: the bytes of one number.
    hidden_size: the numbers of one hidden state.
    rows: the most rows that are decoded at once.
    prompt_tokens: returns the length in tokens of an example's prompt.
    """
    examples = [e for e in group.examples if e.id in todo]
    n = count_longest(examples, prompt_tokens)
    new = max((e.max_new_tokens for e in examples), default=0)
    cells: dict[str, Cell] = {}
    answers = 0
    for cells_left in todo.values():
        cells |= {cell.id: cell for cell in cells_left}
        answers += len(cells_left)
    needs = Needs()
    for cell in cells.values():
        needs = needs | cell.chain.needs(n)
    # states do not grow with the answer, and the cache has them already
    answer_bytes = shape.full_bytes(new, itemsize) - shape.state_bytes(itemsize)
    copies = 1
    if group.task.turns or group.task.samples > 1:
        # questions and drawn answers branch from one cache, so it stays beside its copies in the decode batch
        copies = 2
    bytes_by_cell = {}
    for cell_id, cell in cells.items():
        bytes_by_cell[cell_id] = copies * cache_bytes(cell.chain, shape, n, itemsize) + answer_bytes
    # while a prompt is read, one layer is held whole, with what methods observe of it
    dense = _count_dense_bytes(shape, n, itemsize)
    observed = _count_observation_bytes(needs, shape, n, itemsize, hidden_size)
    return Estimate(
        prompt_tokens=n,
        cells=bytes_by_cell,
        layer=dense + observed,
        rows=min(rows, answers * group.task.samples),
        seconds=_estimate_seconds(todo, samples),
    )


def _count_dense_bytes(shape: Shape, n: int, itemsize: int) -> int:
    """Return the bytes of the layers that are held whole at a time while a prompt of n tokens is read."""
    # a layer of the kind that methods compress, before it is compressed
    compressed = shape.layer_bytes(n, itemsize)
    # a local layer, too, holds all tokens until its window is cut out
    local = shape.local_layer_bytes(n, itemsize) if shape.local_layers else 0
    dense = max(compressed, local)
    if shape.sharing_layers:
        # later layers share the last layer of each kind, which therefore stays
        dense += compressed + local
    return dense


def cache_bytes(chain: Chain, shape: Shape, n: int, itemsize: int) -> int:
    """Return the bytes of a prompt's cache by the chain's formula.

    Return those of the full cache if the chain has no formula, or is not calibrated yet.
    """
    if n and not any(stage.unbound for stage in chain.stages):
        declared = bytes_declared(chain, shape, n, itemsize)
        if declared is not None:
            return declared.total
    # latents are stored as one head that is at most as wide as all kv heads
    heads = max(shape.kv_heads, chain.heads(shape.kv_heads, shape.query_heads))
    return shape.full_bytes(n, itemsize, heads)


def _count_observation_bytes(needs: Needs, shape: Shape, n: int, itemsize: int, hidden_size: int) -> int:
    """Return the bytes of the observations that stages need of one layer, for a prompt of n tokens.

    They are queries, column sums in fp32, and hidden states of ``hidden_size`` numbers a token.
    """
    queries = min(needs.last_q, n) + min(needs.first_q, n)
    query_bytes = queries * shape.head_dim * itemsize
    # one sum [Hq, n] over exact keys if it is needed, and one for each bit width of quantised keys, in fp32
    sums = int(needs.colsums) + len(needs.colsums_bits)
    sum_bytes = sums * n * 4
    observed = shape.query_heads * (query_bytes + sum_bytes)
    if needs.hidden:
        observed += n * hidden_size * itemsize
    return observed


def _estimate_seconds(todo: Mapping[str, Sequence[Cell]], samples: Mapping[str, Mapping[str, Sample]]) -> float | None:
    """Return the seconds that the remaining work takes, by mean times of the stored samples; None without samples.

    todo: by example id, the cells that still need the example.
    samples: the stored samples by example id, by cell id.
    """
    if not todo:
        return 0.0
    # the mean seconds of an answer, by cell
    answer_s: dict[str, float] = {}
    prefill_times: list[float] = []
    for cell_id, samples_of_cell in samples.items():
        timings = [sample.timing for sample in samples_of_cell.values()]
        prefill_times += [t.prefill_s for t in timings]
        if timings:
            answer_s[cell_id] = fmean(t.compress_s + t.decode_s for t in timings)
    if not answer_s:
        return None
    # cells without an answer yet are assumed to take this time
    typical_s = fmean(answer_s.values())
    prefills, all_answers_s = 0, 0.0
    for cells in todo.values():
        # methods with equal keys share a prefill
        prefills += len({cell.chain.prefill_key for cell in cells})
        all_answers_s += sum(answer_s.get(cell.id, typical_s) for cell in cells)
    return prefills * fmean(prefill_times) + all_answers_s


def keeps_everything(chain: Chain, n: int, answer: int) -> bool:
    """Return True if a method only chooses tokens and its budget is never reached.

    n: the tokens of the prompt.
    answer: the tokens of the longest answer.
    """
    # all other stages, such as quantisers, save bytes even if every token stays
    if chain.is_full or any(s.role not in ("selector", "modifier") for s in chain.stages):
        return False
    capacity = chain.capacity(n)
    if capacity is None or capacity.tokens < n:
        return False
    # without a user's budget the data decide what stays, and a capacity is only an upper limit
    if chain.selector is None or chain.selector.nominal(n) is None:
        return False
    # a method that does not choose while decoding keeps all new tokens
    return chain.evictor is None or _holds_answer(chain, n, answer, prompt_budget=capacity.tokens)


def _holds_answer(chain: Chain, n: int, answer: int, prompt_budget: int) -> bool:
    """Return True if a method that chooses while decoding has room for the prompt and the whole answer.

    n, answer: the tokens of the prompt and of the longest answer.
    prompt_budget: the tokens that the method may keep of the prompt, at most n.
    """
    evictor, selector = chain.evictor, chain.selector
    assert evictor is not None
    # the method chooses again after every ``every`` tokens: never in an answer that is not longer
    if evictor.every and answer <= evictor.every:
        return True
    # decode_ratio=: the budget as a fraction of all tokens. Only some selectors have the options of decoding
    ratio = getattr(selector, "decode_ratio", None)
    if ratio is not None:
        return bool(ratio == 1)
    # ``prompt_budget`` is cut to the prompt, so the user's own number counts: decode_budget=, else kv_size=
    budget = getattr(selector, "decode_budget", None)
    if budget is None:
        budget = getattr(selector, "kv_size", None)
    if budget is None:
        budget = prompt_budget
    return bool(budget >= n + answer)

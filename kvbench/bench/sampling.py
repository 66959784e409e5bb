"""Estimate long generations from a few stretches of steps at several cache lengths, by interpolation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from transformers import PreTrainedModel

from kvbench.engine.decode_layer import RowLayer
from kvbench.engine.step import BatchLayers
from kvbench.kv.model_shape import Shape, from_config
from kvbench.methods.core.prompt_cache import PromptCache
from kvbench.storage.evicting_rows import EvictingRows
from kvbench.storage.packed_rows import PackedRows
from kvbench.storage.roles import Evictor

LENGTHS = 4
"""At how many cache lengths a stretch of steps runs."""
CHUNK = 256
"""The number of random tokens drawn at once where a batch is brought to a later length."""


@dataclass(frozen=True)
class Sampled:
    """A generation of ``steps`` steps, of which only a few stretches ran.

    width: the number of steps in each stretch.
    starts: the first step of each stretch.
    times: the mean seconds of a step in each stretch. It counts as the time of the step in the stretch's middle.
    """

    steps: int
    width: int
    starts: tuple[int, ...]
    times: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The estimated seconds of all steps, those that did not run included.

        The time of a step is interpolated linearly between the middles of the two stretches around it. The first line
        is extended to the steps before the first middle, and the last line to the steps after the last middle.
        """
        middles = [start + (self.width - 1) / 2 for start in self.starts]
        total = 0.0
        for t in range(self.steps):
            # step t lies on line number ``line``, which joins the middles ``line`` and ``line + 1``: a line begins at
            # each inner middle
            line = sum(middle <= t for middle in middles[1:-1])
            left, right = middles[line], middles[line + 1]
            time_left, time_right = self.times[line], self.times[line + 1]
            # time(t) = time(left) + slope (t - left)
            total += time_left + (time_right - time_left) * (t - left) / (right - left)
        return total


def summarise_stretches(steps: int, starts: Sequence[int], spans: Sequence[float]) -> Sampled:
    """Summarise a generation of which only stretches of steps ran, by the mean time of a step in each stretch.

    Means are used instead of medians: the occasional step that packs tokens takes longer and must count.

    steps: the steps of the whole generation.
    starts: the first step of each stretch that ran.
    spans: the seconds of every step that ran, stretch after stretch. All stretches are equally long.
    """
    width = len(spans) // len(starts)
    times = [fmean(spans[i * width : (i + 1) * width]) for i in range(len(starts))]
    return Sampled(steps, width, starts=tuple(starts), times=tuple(times))


def place_stretches(steps: int, width: int) -> list[int] | None:
    """Return the first steps of LENGTHS stretches of ``width`` steps, spread evenly over ``steps``.

    Return None if there are no more steps than the stretches would run.
    """
    if steps <= LENGTHS * width:
        return None
    # the first stretch begins with step 0, and the last one ends with the last step
    last_start = steps - width
    return [round(i * last_start / (LENGTHS - 1)) for i in range(LENGTHS)]


def can_be_lengthened(caches: Sequence[PromptCache]) -> bool:
    """Return True if the decode batch of ``caches`` can be brought to a later length without running the model.

    Caches that only grow can: they take random tokens. Caches that evict while decoding choose by attention, and only
    a step computes attention. They can if their size is constant: they hold their budget, and it does not grow. Caches
    that store low-rank latents in place of keys and values cannot.
    """
    for cache in caches:
        if cache.chain.lowrank is not None:
            return False
        evictor = cache.chain.evictor
        if evictor is not None and (evictor.grows or not _holds_budget(cache, evictor)):
            return False
    return True


def _holds_budget(cache: PromptCache, evictor: Evictor) -> bool:
    """Return True if every head of every layer holds at least as many tokens as ``evictor`` allows it."""
    for i, layer in enumerate(cache.layers):
        # a head's tokens can lie in several segments of the layer
        counts_by_segment = [segment.counts for segment in layer.segments]
        tokens_by_head = [sum(counts) for counts in zip(*counts_by_segment, strict=True)]
        budgets = evictor.head_budgets(layer, i)
        if any(count < budget for count, budget in zip(tokens_by_head, budgets, strict=True)):
            return False
    return True


def lengthen(model: PreTrainedModel, batch: BatchLayers, tokens: int) -> None:
    """Add ``tokens`` random tokens to every row of ``batch``, without running the model.

    Rows that evict are left as they are: they hold equally many tokens at every length.
    """
    if tokens < 1:
        return
    shape = from_config(model.config)
    for layer in batch.with_keys:
        stored = [rows for _, rows in layer.formats]
        if all(isinstance(rows, EvictingRows) for rows in stored):
            continue
        packed = [rows for rows in stored if isinstance(rows, PackedRows)]
        if not packed:
            _add_random_tokens(layer, tokens, shape, model)
            continue
        for rows in packed:
            # packing tokens one by one, as steps do, would take as long as the omitted steps
            rows.skip(tokens)
        assert len(packed) == len(stored), "packed rows beside others: a benchmark's rows are of one combination"
        layer.grow(tokens)


def _add_random_tokens(layer: RowLayer, tokens: int, shape: Shape, model: PreTrainedModel) -> None:
    """Add ``tokens`` random keys and values to every row of one layer, in the number type of ``model``."""
    kv_heads, key_dim, value_dim = shape.kv_heads, shape.head_dim, shape.value_dim
    # layers with a sliding window may have other heads; their keys and values have one size
    if layer.local:
        kv_heads, key_dim = shape.local_heads
        value_dim = key_dim
    # draw in chunks, so that the random numbers take little memory beside the cache
    for first in range(0, tokens, CHUNK):
        # [rows, kv heads, tokens], followed by the channels of keys or of values
        sizes = (len(layer.next), kv_heads, min(CHUNK, tokens - first))
        k = torch.randn(*sizes, key_dim, device=model.device).to(model.dtype)
        v = torch.randn(*sizes, value_dim, device=model.device).to(model.dtype)
        layer.add(k, v)

"""Estimate long generations from a few stretches of steps at several cache lengths, by interpolation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from transformers import PreTrainedModel

from kvbench.engine.step import BatchLayers
from kvbench.kv.model_shape import from_config
from kvbench.methods.core.prompt_cache import PromptCache
from kvbench.storage.evicting_rows import EvictingRows
from kvbench.storage.packed_rows import PackedRows

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
        """The seconds of all steps.

        The time of a step lies on the straight line between the middles of the stretches around it. The first and the
        last line also hold for the steps before and after.
        """
        middles = [start + (self.width - 1) / 2 for start in self.starts]
        total = 0.0
        for t in range(self.steps):
            # the line's left end is the last inner middle up to step t, or else the first inner middle
            left = sum(middle <= t for middle in middles[1:-1])
            a, b = middles[left], middles[left + 1]
            x, y = self.times[left], self.times[left + 1]
            # through (a, x) and (b, y)
            total += x + (y - x) * (t - a) / (b - a)
        return total


def summarise_stretches(steps: int, starts: Sequence[int], spans: Sequence[float]) -> Sampled:
    """Summarise a generation of which only stretches of steps ran, by the mean time of a step in each stretch.

    It takes means, not medians: the occasional step that packs tokens takes longer and must count.

    steps: the steps of the whole generation.
    starts: the first step of each stretch that ran.
    spans: the seconds of every step that ran, stretch after stretch. All stretches are equally long.
    """
    width = len(spans) // len(starts)
    times = [fmean(spans[i * width : (i + 1) * width]) for i in range(len(starts))]
    return Sampled(steps, width, starts=tuple(starts), times=tuple(times))


def stretch_starts(steps: int, width: int) -> list[int] | None:
    """Return the first steps of LENGTHS stretches of ``width`` steps, spread evenly over ``steps``.

    Return None if there are no more steps than the stretches would run.
    """
    if steps <= LENGTHS * width:
        return None
    return [round(i * (steps - width) / (LENGTHS - 1)) for i in range(LENGTHS)]


def can_be_lengthened(caches: Sequence[PromptCache]) -> bool:
    """Return True if the decode batch of ``caches`` can be brought to a later length without the model.

    Caches that grow take random tokens. Caches that evict while decoding choose by attention, and only a step computes
    attention. These can be sampled if they hold their budget already and it does not grow, since their size is then
    constant. Latents cannot.
    """
    for cache in caches:
        if cache.chain.lowrank is not None:
            return False
        evictor = cache.chain.evictor
        if evictor is None:
            continue
        if evictor.grows:
            return False
        for i, layer in enumerate(cache.layers):
            # a head's tokens can lie in several segments of the layer
            counts_by_segment = [segment.counts for segment in layer.segments]
            tokens_by_head = [sum(counts) for counts in zip(*counts_by_segment, strict=True)]
            budgets = evictor.head_budgets(layer, i)
            if any(count < budget for count, budget in zip(tokens_by_head, budgets, strict=True)):
                return False
    return True


def lengthen(model: PreTrainedModel, batch: BatchLayers, tokens: int) -> None:
    """Add ``tokens`` random tokens to every row of ``batch``, without the model."""
    if tokens < 1:
        return
    shape = from_config(model.config)
    for layer in batch.with_keys:
        stored = [rows for _, rows in layer.formats]
        # rows that evict hold equally many tokens at every length
        if all(isinstance(rows, EvictingRows) for rows in stored):
            continue
        packing = [rows for rows in stored if isinstance(rows, PackedRows)]
        for rows in packing:
            # packing tokens one by one, as steps do, would take as long as the omitted steps
            rows.skip(tokens)
        if packing and len(packing) == len(stored):
            layer.grow(tokens)
            continue
        assert not packing, "packed rows beside others: a benchmark's rows are of one combination"
        # draw in chunks, so that the random numbers take little memory beside the cache
        for first in range(0, tokens, CHUNK):
            kv_heads, key_dim, value_dim = shape.kv_heads, shape.head_dim, shape.value_dim
            # layers with a sliding window may have other heads; their keys and values have one size
            if layer.local:
                kv_heads, key_dim = shape.local_heads
                value_dim = key_dim
            # [rows, kv heads, tokens], followed by the channels of keys or of values
            sizes = (len(layer.next), kv_heads, min(CHUNK, tokens - first))
            k = torch.randn(*sizes, key_dim, device=model.device).to(model.dtype)
            v = torch.randn(*sizes, value_dim, device=model.device).to(model.dtype)
            layer.add(k, v)

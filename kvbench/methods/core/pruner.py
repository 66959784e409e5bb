"""Stages that keep some channels of the older tokens: the base of ThinK, its value variant and magnitudes.

Shapes: H stored heads, L stored tokens, D head dimension, T kept channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from kvbench.kv import ops
from kvbench.kv.observation import Observation
from kvbench.kv.segment import LayerCache, per_head
from kvbench.methods.core.contract import Block, top_indices
from kvbench.methods.core.knobs import at_least, knob, make_fraction_rule, one_of
from kvbench.methods.core.stage import Role, Stage

Channels = tuple[torch.Tensor | None, torch.Tensor | None]
"""(The channels of keys that stay, the channels of values that stay): each [H, T], ascending, or None for all."""


@dataclass(frozen=True, kw_only=True)
class ChannelPruner(Stage):
    """A stage that keeps T of D key channels of all tokens but the last ``recent``. Its knobs:

    ratio: the fraction of channels removed, 0 <= ratio < 1.
    recent: the number of last tokens whose keys keep all channels.
    rounding: ``code`` keeps T = D - int(ratio * D) as released code does, ``paper`` T = floor((1 - ratio) * D).

    In a chain with a quantiser the pruner only chooses the channels of the packed tokens. The exact tokens are then the
    larger of ``recent`` and the quantiser's residual.
    """

    role: ClassVar[Role] = "prune"
    on_latents: ClassVar[str] = "it removes channels of keys alone, and a latent is key and value at once"

    ratio: float = knob(0.4, make_fraction_rule("key"))
    recent: int = knob(32, at_least(0, "tokens"))
    rounding: str = knob("code", one_of("code", "paper"))

    def count_channels(self, ratio: float, head_dim: int) -> int:
        """Return T, how many of ``head_dim`` channels stay if the fraction ``ratio`` is removed; at least one."""
        if self.rounding == "paper":
            # T = floor((1 - ratio) D), section 3.1 of arXiv 2407.21018;
            # 1e-9: a product that should be whole must not be cut to the number below
            channels = int((1 - ratio) * head_dim + 1e-9)
        else:
            # released code: T = D - int(ratio * D)
            channels = head_dim - int(ratio * head_dim)
        return max(1, channels)

    def kept_keys(self, head_dim: int) -> int:
        """Return how many of ``head_dim`` key channels stay."""
        return self.count_channels(self.ratio, head_dim)

    def kept_values(self, head_dim: int) -> int:
        """Return how many of ``head_dim`` value channels stay: all, unless the method prunes values, too."""
        return head_dim

    def layout(self, blocks: list[Block], head_dim: int, itemsize: int) -> list[Block]:
        """Return the block of the pruned tokens, and that of the newest ``recent`` tokens if there are any.

        The block stays as it is if no channel is removed, or if all tokens are recent.
        """
        # a chain has at most one pruner, and no other stage divides a head's block
        (block,) = blocks
        kept_keys, kept_values = self.kept_keys(head_dim), self.kept_values(head_dim)
        removes_none = kept_keys == kept_values == head_dim
        if removes_none or block.slots <= self.recent:
            return blocks
        # the older tokens are a segment of their own, with fewer channels and the ids of those that stay
        older = block.slots - self.recent
        pruned = replace(
            block,
            slots=older,
            key_bytes=older * kept_keys * itemsize,
            value_bytes=older * kept_values * itemsize,
            fixed_overhead=self.id_bytes(head_dim),
        )
        if not self.recent:
            return [pruned]
        # the recent tokens keep all channels
        dense_bytes = self.recent * head_dim * itemsize
        recent = replace(block, slots=self.recent, key_bytes=dense_bytes, value_bytes=dense_bytes)
        return [pruned, recent]

    def id_bytes(self, head_dim: int) -> int:
        """Return the bytes of one head's channel ids: 2 bytes for each kept channel, none if all channels stay."""
        counts = (self.kept_keys(head_dim), self.kept_values(head_dim))
        # ids are stored as int16
        return sum(2 * count for count in counts if count < head_dim)

    def channel_scores(self, keys: torch.Tensor, cache: LayerCache, obs: Observation) -> torch.Tensor:
        """Return the score [H, D] of each key channel. The channels with the largest scores stay.

        ``keys`` [H, L, D] are the stored keys in fp32. Tokens that take no part in the choice have keys of zeros,
        which add nothing to a norm.
        """
        raise TypeError(f"{type(self).__name__} does not say how it scores channels")

    def value_scores(self, cache: LayerCache, obs: Observation, counted: torch.Tensor) -> torch.Tensor:
        """Return the score [H, D] of each value channel. The channels with the largest scores stay.

        ``counted`` [H, L] is True for the tokens that take part in the choice.
        """
        raise TypeError(f"{type(self).__name__} does not say how it scores value channels")

    def choose_channels(
        self, cache: LayerCache, obs: Observation, *, scored_keys: Sequence[int], scored_values: Sequence[int]
    ) -> Channels:
        """Return (channels of keys, channels of values) that stay, each [H, T], ascending, or None where all stay.

        scored_keys: for each head, how many of its first tokens decide which channels of keys stay.
        scored_values: the same for the channels of values.
        """
        segment = ops.only_segment(cache)
        head_dim = segment.k.shape[2]
        kept_keys, kept_values = self.kept_keys(head_dim), self.kept_values(head_dim)
        slots = torch.arange(segment.tokens, device=segment.k.device)

        def mark_first(counts: Sequence[int]) -> torch.Tensor:
            """Return a mask [H, L] that is True for the first counts[h] tokens of each head h."""
            return slots < torch.tensor(counts, device=slots.device)[:, None]

        key_channels, value_channels = None, None
        if kept_keys < head_dim:
            k = pad_heads(segment.k, segment.lengths, cache.heads).float()
            # the keys of tokens that take no part in the choice become zeros
            counted_keys = k * mark_first(scored_keys)[..., None]
            key_channels = top_indices(self.channel_scores(counted_keys, cache, obs), kept_keys)
        if kept_values < head_dim:
            value_channels = top_indices(self.value_scores(cache, obs, mark_first(scored_values)), kept_values)
        return key_channels, value_channels

    def compress(self, cache: LayerCache, obs: Observation) -> LayerCache:
        segment = ops.only_segment(cache)
        if segment.tokens <= self.recent:
            return cache
        # all tokens decide which channels stay, also the newest, although these keep all of their own channels
        lengths = count_head_tokens(cache)
        key_channels, value_channels = self.choose_channels(cache, obs, scored_keys=lengths, scored_values=lengths)
        if key_channels is None and value_channels is None:
            return cache
        return ops.prune(cache, key_channels, value_channels, self.recent)


def count_head_tokens(cache: LayerCache) -> list[int]:
    """Return how many tokens each stored head of a cache of one segment holds."""
    segment = ops.only_segment(cache)
    if segment.lengths is not None:
        return segment.counts
    return [segment.tokens] * cache.heads


def pad_heads(t: torch.Tensor, lengths: torch.Tensor | None, heads: int) -> torch.Tensor:
    """Return the keys, values or positions t of a segment as one tensor [heads, L, ...].

    lengths: how many tokens each ragged head holds; shorter heads are padded with zeros. None if all heads hold L
        tokens; their kv heads are then repeated to ``heads``.
    """
    if lengths is not None:
        return ops.pad_heads(t, lengths)
    return per_head(t, heads)

"""Stages that pack the older tokens into few bits: the base of KIVI, FlexGen and the formats of inference engines.

Shapes: H stored heads, n prompt tokens, L stored tokens, D head dimension, N tokens of all ragged heads together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from kvbench.kv import ops
from kvbench.kv.observation import Observation
from kvbench.kv.own_values import NoValues, are_stored
from kvbench.kv.packed import Packed
from kvbench.kv.partly_packed import Codes, Residual, join_heads, pack_first_tokens
from kvbench.kv.segment import LayerCache, Segment
from kvbench.methods.core.contract import Block
from kvbench.methods.core.knobs import knob, one_of
from kvbench.methods.core.stage import Role, Stage
from kvbench.storage.roles import Coder, Packer

if TYPE_CHECKING:
    from kvbench.methods.core.pruner import ChannelPruner


Pack = Callable[[torch.Tensor], Packed]
"""A function that packs tokens [H, n, D]."""


@dataclass(frozen=True, kw_only=True)
class Quantiser(Stage, Packer):
    """A stage that packs all tokens but a residual of the newest, and goes on packing while decoding.

    The residual is the tokens that stay exact (``kv.partly_packed.Residual``). A token is still read exactly in the
    step in which it leaves the residual.

    only: ``keys`` or ``values`` packs these alone and keeps the other half exact (Q-Hitter's figure 10). Without it,
    both are packed.

    Subclasses may set two more attributes:

    by_token: True if each token is packed alone and at once, so that any of them can be evicted.
    grows: False if tokens after the prompt stay exact.
    codes_local: True if the tokens of local layers are packed as well.
    """

    role: ClassVar[Role] = "quantise"
    on_latents: ClassVar[str] = "it quantises keys and values by rules of their own, and a latent is both at once"
    by_token: ClassVar[bool] = False
    grows: ClassVar[bool] = True
    codes_local: ClassVar[bool] = False

    only: str | None = knob(None, one_of("keys", "values"))

    def residuals(self) -> tuple[Residual, Residual]:
        """Return (rule of keys, rule of values): how many of the newest tokens stay exact."""
        raise TypeError(f"{type(self).__name__} does not say what stays exact")

    def key_bytes(self, tokens: int, channels: int) -> int:
        """Return the bytes that ``tokens`` packed keys of one head take, each with ``channels`` channels."""
        raise TypeError(f"{type(self).__name__} does not say how many bytes quantised keys take")

    def value_bytes(self, tokens: int, channels: int) -> int:
        """Return the bytes that ``tokens`` packed values of one head take, each with ``channels`` channels."""
        raise TypeError(f"{type(self).__name__} does not say how many bytes quantised values take")

    def frozen_bytes(self, half: Literal["k", "v"]) -> int:
        """Return the bytes, per head, of the scales of keys or of values that the prompt fixes for all tokens."""
        return 0

    def frozen(self, half: Literal["k", "v"], t: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor | None:
        """Return the scales [H, 1, 1] that the prompt's keys (``k``) or values (``v``) fix for all tokens, or None.

        t: these keys or values [H, n, D].
        lengths: [H], the numbers of tokens of ragged heads; None if all heads hold n tokens. Ragged heads lie one after
        the other in t [1, N, D].
        """
        return None

    def check_width(self, head_dim: int) -> None:
        """Raise UsageError if heads of ``head_dim`` channels cannot be packed."""

    def packs_in(self, layer: int) -> bool:
        """Return True if tokens of this layer are packed at all."""
        return True

    def coder(self, pruner: ChannelPruner | None, layer: int | None = None) -> Coder:
        """Return the coder that says which tokens of ``layer`` this stage packs, and packs them.

        Without a ``layer``, the coder is that of any layer that the stage packs. With a ``pruner``, at least
        ``pruner.recent`` tokens stay exact. With the knob ``only``, the other half of the cache stays exact entirely.
        """
        key_residual, value_residual = self.residuals()
        if pruner is not None:
            # packed tokens lose channels, but the pruner leaves its newest ``recent`` tokens all channels
            key_residual = key_residual.at_least(pruner.recent)
            value_residual = value_residual.at_least(pruner.recent)
        if self.only == "keys":
            value_residual = Residual.everything()
        elif self.only == "values":
            key_residual = Residual.everything()
        if layer is not None and not self.packs_in(layer):
            key_residual, value_residual = Residual.everything(), Residual.everything()
        return Coder(self, key_residual, value_residual, grows=self.grows)

    def packed_layout(
        self,
        blocks: list[Block],
        head_dim: int,
        itemsize: int,
        *,
        pruner: ChannelPruner | None,
        layer: int | None,
        own_values: bool = False,
    ) -> list[Block]:
        """Return the block of a stored head, the only one of ``blocks``, with its bytes after packing.

        An exact number takes ``itemsize`` bytes. ``layer`` is None for a local layer. With a ``pruner``, packed tokens
        have only the channels that it keeps. With ``own_values``, keys are their own values, and nothing is stored as
        values.
        """
        # only a pruner makes two blocks of one, and beside a quantiser it just chooses channels
        (block,) = blocks
        # the numbers of tokens that are packed; all others stay exact
        coder = self.coder(pruner, layer)
        packed_keys = coder.keys.packed(block.slots)
        packed_values = coder.values.packed(block.slots)
        key_channels, value_channels = head_dim, head_dim
        id_bytes = 0
        if pruner is not None:
            key_channels = pruner.kept_keys(head_dim)
            value_channels = pruner.kept_values(head_dim)
            id_bytes = pruner.id_bytes(head_dim)
        # a key or a value that stays exact has all its channels
        exact_bytes = head_dim * itemsize
        exact_keys, exact_values = block.slots - packed_keys, block.slots - packed_values
        key_bytes = self.key_bytes(packed_keys, key_channels) + exact_keys * exact_bytes
        frozen_bytes = self.frozen_bytes("k")
        value_bytes = 0
        if not own_values:
            value_bytes = self.value_bytes(packed_values, value_channels) + exact_values * exact_bytes
            frozen_bytes += self.frozen_bytes("v")
        return [
            replace(
                block,
                key_bytes=key_bytes,
                value_bytes=value_bytes,
                fixed_overhead=block.fixed_overhead + frozen_bytes + id_bytes,
            )
        ]

    def compress(self, cache: LayerCache, obs: Observation) -> LayerCache:
        return self.encode(cache, obs, pruner=None)

    def encode(self, cache: LayerCache, obs: Observation, pruner: ChannelPruner | None) -> LayerCache:
        """Return the cache of one layer with its older tokens packed.

        With a ``pruner``, packed tokens have only the channels that it keeps. Raises UsageError if the heads have a
        number of channels that cannot be packed.
        """
        cache = ops.expand(cache)
        segment = ops.only_segment(cache)
        coder = self.coder(pruner, obs.layer)
        key_channels, value_channels = None, None
        if pruner is not None:
            # channels are scored by the tokens that are packed; a prompt too short to pack any still decides, by all
            # its tokens, which channels remain of those that decoding will pack
            scored_keys = [coder.keys.packed(tokens) or tokens for tokens in segment.counts]
            scored_values = [coder.values.packed(tokens) or tokens for tokens in segment.counts]
            key_channels, value_channels = pruner.choose_channels(
                cache, obs, scored_keys=scored_keys, scored_values=scored_values
            )
        return self.encode_by(cache, coder, key_channels, value_channels)

    def encode_by(
        self,
        cache: LayerCache,
        coder: Coder,
        key_channels: torch.Tensor | None = None,
        value_channels: torch.Tensor | None = None,
    ) -> LayerCache:
        """Return the cache of one layer with the tokens packed that ``coder`` says.

        key_channels, value_channels: [H, T], the channels that packed tokens keep; None for all.

        Raises UsageError if the heads have a number of channels that cannot be packed.
        """
        segment = ops.only_segment(cache)
        self.check_width(segment.k.shape[2])
        k_codes, k_counts, k = self._pack(segment, "k", coder.keys, channels=key_channels)
        v_codes, v_counts, v = self._pack(segment, "v", coder.values, channels=value_channels)
        segment = replace(segment, k=k, v=v, codes=Codes(k_codes, v_codes, k_counts, v_counts))
        # channel ids are stored in 2 bytes each, as ``ChannelPruner.id_bytes`` counts them
        if key_channels is not None:
            segment = replace(segment, key_channels=key_channels.to(torch.int16))
        if value_channels is not None:
            segment = replace(segment, value_channels=value_channels.to(torch.int16))
        return replace(cache, segments=(segment,))

    def _pack(
        self,
        segment: Segment,
        half: Literal["k", "v"],
        residual: Residual,
        channels: torch.Tensor | None,
    ) -> tuple[Packed, torch.Tensor | None, torch.Tensor]:
        """Return (codes, counts, exact tokens) of a segment's keys (``k``) or values (``v``).

        ``counts`` [H] are the packed tokens of each head where heads are ragged, None otherwise. The codes and the
        exact tokens of ragged heads lie one head after the other.

        residual: the rule of how many of the newest tokens stay exact.
        channels: [H, T], the channels that packed tokens keep; None for all.
        """
        t = segment.k if half == "k" else segment.v
        # the scales [H, 1, 1] that the prompt fixes for all tokens, if the format has such scales
        frozen = None
        if are_stored(t):
            frozen = self.frozen(half, t, segment.lengths)
        if segment.lengths is None:
            pack = self._choose_packer(half, t, frozen)
            codes, exact = pack_first_tokens(t, pack, residual.packed(segment.tokens), channels)
            return codes, None, exact
        # ragged heads have different numbers of tokens, so they are packed one at a time
        codes_by_head: list[Packed] = []
        exact_by_head: list[torch.Tensor] = []
        for h, tokens in enumerate(t.split(segment.lengths.tolist(), dim=1)):
            head = slice(h, h + 1)
            pack = self._choose_packer(half, t, frozen[head] if frozen is not None else None)
            head_channels = channels[head] if channels is not None else None
            head_codes, head_exact = pack_first_tokens(tokens, pack, residual.packed(tokens.shape[1]), head_channels)
            codes_by_head.append(head_codes)
            exact_by_head.append(head_exact)
        codes, counts = join_heads(codes_by_head)
        return codes, counts, torch.cat(exact_by_head, dim=1)

    def _choose_packer(self, half: Literal["k", "v"], t: torch.Tensor, frozen: torch.Tensor | None) -> Pack:
        """Return the function that packs keys (``k``) or values (``v``).

        t: all keys or values of the segment, which say whether there is anything to pack.
        frozen: the scales of the heads to pack that the prompt has fixed, or None.
        """
        # a model that holds latents has keys that are their own values
        if not are_stored(t):
            return NoValues
        pack: Pack = self.pack_keys if half == "k" else self.pack_values
        if frozen is None:
            return pack
        return partial(pack, frozen=frozen)  # type: ignore[call-arg]

"""Segments (runs of stored tokens of one prompt) and the layers that consist of them.

Shapes use: Hq query heads, Hk kv heads, H stored heads (Hk, or Hq under ``per=query_head``), n prompt
tokens, L stored tokens, D head dimension, T kept channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvbench.base.formatting import format_size
from kvbench.kv.observation import Observation
from kvbench.kv.packed import Packed
from kvbench.kv.partly_packed import Codes, Values


@dataclass(frozen=True)
class Segment:
    """A run of stored tokens in one storage format, ascending in position.

    ``positions`` is [H, L], or [1, L] where all heads keep the same tokens. ``state`` has tensors by name, such as
    running scores. They have leading axes [H, L] and are gathered with their tokens.

    ``lengths`` marks ragged heads: heads that hold different numbers of tokens. They are stored one after the other
    without padding, and every leading [H, L] becomes [1, N] with N = sum of ``lengths``.

    Where a quantiser has packed the older tokens, ``codes`` holds the packed tokens. ``k`` and ``v`` then hold only the
    newest tokens, which stay exact.

    Where query heads share logits, ``leads`` names each query head's leading head, the head whose logits it takes.
    ``k`` then holds, in order, only the heads that a leading query head reads.

    Latents of low-rank projections are stored as one head [1, L, R] for the layer. Selection still looks at keys, and
    meanwhile the latents are in ``latents``. Afterwards they replace ``k`` and ``v``, and ``latent`` is True.
    """

    k: Tensor  # [H, L, D or T]
    v: Tensor  # [H, L, D]
    positions: Tensor  # [H or 1, L] int32
    lengths: Tensor | None = None  # [H] int32; None: all heads hold L tokens
    key_channels: Tensor | None = None  # [H, T] int16, ascending: the channels that (packed) keys keep; None: all
    value_channels: Tensor | None = None  # [H, T] int16, ascending: the same for values
    state: Mapping[str, Tensor] = field(default_factory=dict)
    codes: Codes | None = None
    latents: tuple[Tensor, Tensor] | None = None  # [1, L, R] each; they replace k and v in the end
    latent: bool = False
    leads: Tensor | None = None  # [Hq] int16

    @property
    def heads(self) -> int:
        """The number of stored heads."""
        # v counts the heads: ``k`` holds fewer of them where query heads share logits
        if self.lengths is None:
            return self.v.shape[0]
        return self.lengths.shape[0]

    @property
    def tokens(self) -> int:
        """The number of tokens of the longest head."""
        if self.lengths is None:
            return self.positions.shape[1]
        return int(self.lengths.max())

    @property
    def counts(self) -> list[int]:
        """The number of tokens that each head holds."""
        if self.lengths is None:
            return [self.tokens] * self.heads
        return self.lengths.tolist()

    def head(self, h: int) -> Segment:
        """Return the tokens of stored head h as views [1, its tokens, ...], without ``latents`` and ``leads``.

        Latents and leads belong to all heads together.
        """
        start, end = 0, self.tokens
        if self.lengths is not None:
            # all ragged heads lie in one row: the tokens of head h are ``start`` to ``end``
            end = int(self.lengths[: h + 1].sum())
            start = end - int(self.lengths[h])

        def slice_head(t: Tensor) -> Tensor:
            """Return the head's tokens of t [H or 1, L, ...] as a view."""
            # a single row holds ragged heads one after the other, or positions that all heads share
            row = 0 if t.shape[0] == 1 else h
            return t[row : row + 1, start:end]

        if self.codes is None:
            k, v, codes = slice_head(self.k), slice_head(self.v), None
        else:
            codes, k, v = self.codes.head(h, self.k, self.v, start=start, end=end)
        return Segment(
            k,
            v,
            slice_head(self.positions),
            key_channels=_slice_row(self.key_channels, h),
            value_channels=_slice_row(self.value_channels, h),
            state={name: slice_head(t) for name, t in self.state.items()},
            codes=codes,
        )

    def stored(self) -> tuple[Values, Values]:
        """Return keys and values of all tokens. Raises ValueError if some tokens are packed and some exact."""
        if self.codes is None:
            return self.k, self.v
        if self.k.shape[1] or self.v.shape[1]:
            raise ValueError("some tokens of this segment are quantised and some exact")
        return self.codes.k, self.codes.v

    def holding(self, k: Values, v: Values) -> Segment:
        """Return the segment with k and v as the keys and values of all its tokens, both exact or both packed."""
        if not isinstance(k, Packed) or not isinstance(v, Packed):
            # a pair of one exact and one packed half is never given
            assert isinstance(k, Tensor) and isinstance(v, Tensor)
            return replace(self, k=k, v=v, codes=None)
        # no token stays exact
        no_k = self.k.new_zeros(k.shape[0], 0, k.shape[2])
        no_v = self.k.new_zeros(v.shape[0], 0, v.shape[2])
        codes = Codes(k, v)
        if self.lengths is not None:
            # keys and values get counts of their own, because later tokens of each may be packed at different moments
            codes = Codes(k, v, k_counts=self.lengths.clone(), v_counts=self.lengths.clone())
        return replace(self, k=no_k, v=no_v, codes=codes)

    def shapes(self) -> Segment:
        """Return the segment with tensors that keep their shapes but hold no numbers, and without ``state``.

        The token counts of ragged heads, the channel ids and ``leads`` keep their numbers.
        """
        codes, latents = self.codes, self.latents
        if codes is not None:
            codes = replace(codes, k=codes.k.map(_without_storage), v=codes.v.map(_without_storage))
        if latents is not None:
            key_latents, value_latents = latents
            latents = (_without_storage(key_latents), _without_storage(value_latents))
        return replace(
            self,
            k=_without_storage(self.k),
            v=_without_storage(self.v),
            positions=_without_storage(self.positions),
            state={},
            codes=codes,
            latents=latents,
        )

    def payload(self) -> Iterator[Tensor]:
        """Yield the tensors of keys and values: exact ones, and packed ones if there are any."""
        yield self.k
        yield self.v
        if self.codes is not None:
            yield from self.codes.payload()

    def overhead(self) -> Iterator[Tensor]:
        """Yield the tensors that describe the payload: positions, lengths, channel ids, frozen scales, state."""
        # ``kv.content.digest_layers`` hashes the tensors in this order
        yield self.positions
        optional = [self.lengths]
        if self.codes is not None:
            optional += [self.codes.k_counts, self.codes.v_counts]
        optional += [self.key_channels, self.value_channels, self.leads]
        if self.codes is not None:
            optional += self.codes.frozen()
        for t in optional:
            if t is not None:
                yield t
        yield from self.state.values()


@dataclass(frozen=True)
class LayerCache:
    """One layer of one prompt's cache, without a batch axis.

    segments: the compressed tokens. If there are uncompressed newest tokens, they are the last segment.
    seen: the number of tokens read so far. The next token has this position.
    heads: the number of heads for which tokens are stored: the KV heads, or the query heads with ``per=query_head``.
    query_heads: the number of query heads.
    weight: the layer's weight if one budget is divided over all layers. None: the layer has no part in the division.
    decided: how many of the prompt's tokens each stored head keeps, if this number depends on the prompt's content.
    prompt: the number of the prompt's tokens, to which budgets refer. 0: it equals ``seen``.
    copy_from: for each query head, the head whose attention output it takes. None: all take their own.
    window: for a local layer: the number of last tokens that it holds. No method compresses such a layer.
    chunked: for a local layer. True: a token attends to its own chunk of ``window`` tokens. False: it attends to the
        last ``window`` tokens.
    observed: the last queries and other data, for a method that chooses again while decoding. None: other methods.
    """

    segments: tuple[Segment, ...]
    seen: int
    heads: int
    query_heads: int
    weight: float | None = None
    decided: tuple[int, ...] | None = None
    prompt: int = 0
    copy_from: Tensor | None = None  # [Hq] int16
    window: int | None = None
    chunked: bool = False
    observed: Observation | None = None

    def __repr__(self) -> str:
        return f"<LayerCache: {self.tokens} of {self.seen} tokens, {self.heads} heads, {format_size(self.nbytes())}>"

    @property
    def prompt_tokens(self) -> int:
        """The number of the prompt's tokens. Budgets refer to it, however many tokens were read since."""
        return self.prompt or self.seen

    @property
    def tokens(self) -> int:
        """The number of tokens of the longest stored head."""
        # even segments add the same number to every head
        tokens = sum(s.tokens for s in self.segments if s.lengths is None)
        ragged = [s.lengths for s in self.segments if s.lengths is not None]
        if ragged:
            # the longest head may differ between segments, so counts are summed before the maximum
            tokens += int(torch.stack(ragged).sum(dim=0).max())
        return tokens

    def kept_positions(self) -> list[Tensor]:
        """Return the text positions of the stored tokens: one ascending int32 tensor for each stored head."""
        heads = self.stored_heads
        parts_by_head: list[list[Tensor]] = [[] for _ in range(heads)]
        for segment in self.segments:
            if segment.lengths is None:
                positions_by_head = per_head(segment.positions, heads).unbind()
            else:
                # ragged heads lie one after the other in a single row
                positions_by_head = segment.positions[0].split(segment.lengths.tolist())
            for parts, positions in zip(parts_by_head, positions_by_head, strict=True):
                parts.append(positions)
        return [_join(parts, dim=0) for parts in parts_by_head]

    def kept_counts(self) -> list[int]:
        """Return the number of tokens that each stored head holds: the lengths of ``kept_positions``."""
        counts = [0] * self.stored_heads
        for segment in self.segments:
            if segment.lengths is None:
                # all heads of the segment hold equally many tokens
                lengths = [segment.positions.shape[1]] * len(counts)
            else:
                lengths = segment.lengths.tolist()
            counts = [count + length for count, length in zip(counts, lengths, strict=True)]
        return counts

    @property
    def stored_heads(self) -> int:
        """The number of heads for which tokens are stored at present."""
        # a low-rank chain stores under one head, but its keys and values have all kv heads until latents replace them
        return max(self.heads, max((s.heads for s in self.segments), default=0))

    def even_positions(self) -> Tensor | None:
        """Return all positions [H, tokens], or [1, tokens] if all heads share them; None if heads are ragged."""
        if any(s.lengths is not None for s in self.segments):
            return None
        heads = max(s.positions.shape[0] for s in self.segments)
        return _join([per_head(s.positions, heads) for s in self.segments], dim=1)

    def shapes(self) -> LayerCache:
        """Return the layer with tensors that keep their shapes but hold no numbers.

        It shows how many tokens and bytes the layer holds. Attention cannot read it.
        """
        observed = self.observed
        if observed is not None:
            observed = replace(observed, last_q=None)
        return replace(self, segments=tuple(s.shapes() for s in self.segments), observed=observed)

    def nbytes(self) -> int:
        """Return the bytes of all storages that this layer keeps alive, payload and overhead."""
        return storage_bytes(self.tensors())

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor of the layer, payload and overhead."""
        for segment in self.segments:
            yield from segment.payload()
            yield from segment.overhead()
        yield from self.layer_tensors()

    def layer_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that belong to the layer as a whole, not to a segment. All of them are overhead."""
        if self.copy_from is not None:
            yield self.copy_from
        if self.observed is not None and self.observed.last_q is not None:
            yield self.observed.last_q


def _without_storage(t: Tensor) -> Tensor:
    """Return a tensor of the same shape and dtype that takes no memory."""
    return torch.empty_like(t, device="meta")


def per_head(t: Tensor, heads: int) -> Tensor:
    """Return t [H', ...] as [heads, ...], each row repeated for the heads that share it. H' must divide ``heads``."""
    if t.shape[0] == heads:
        return t
    return t.repeat_interleave(heads // t.shape[0], dim=0)


def _slice_row(t: Tensor | None, h: int) -> Tensor | None:
    """Return row h of t [H, ...] as a view [1, ...]; None if there is no t."""
    if t is None:
        return None
    return t[h : h + 1]


def _join(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Join the tensors along ``dim``. A single tensor is returned as it is, not copied."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts), dim=dim)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages behind ``tensors``. A view counts as all that it keeps alive."""
    bytes_by_storage = {}
    for t in tensors:
        storage = t.untyped_storage()
        # an empty storage has no address (0); the address of the storage object then identifies it
        address = storage.data_ptr() or storage._cdata
        bytes_by_storage[address] = storage.nbytes()
    return sum(bytes_by_storage.values())

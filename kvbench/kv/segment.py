"""Segments, which are runs of stored tokens of one prompt, and the layers that they make.

Shapes use: Hq query heads, Hk kv heads, H stored heads (Hk, or Hq under ``per=query_head``), n prompt
tokens, L stored tokens, D head dimension, T kept channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvbench.kv.observation import Observation
from kvbench.kv.packed import Packed
from kvbench.kv.partly_packed import Codes, Values


@dataclass(frozen=True)
class Segment:
    """A run of stored tokens in one storage format, ascending in position.

    ``positions`` is [H, L], or [1, L] where all heads keep the same tokens. ``state`` tensors have leading axes
    [H, L] and are gathered with their tokens. ``lengths`` marks ragged heads, which are stored one after the other
    without padding: every leading [H, L] is then [1, N] with N = sum of ``lengths``. Where a quantiser has packed
    the older tokens, ``codes`` hold these, and ``k`` and ``v`` only the newest tokens, which stay exact. Where query
    heads share logits, ``leads`` names for each the head whose logits it takes, and ``k`` holds, in order, only the
    heads that a leading one reads.

    Latents of low-rank projections are stored as one head [1, L, R] for the layer. While selection still looks at
    keys they are ``latents``; afterwards they take the place of ``k`` and ``v``, and ``latent`` is True.
    """

    k: Tensor  # [H, L, D or T]
    v: Tensor  # [H, L, D]
    positions: Tensor  # [H or 1, L] int32
    lengths: Tensor | None = None  # [H] int32; None: all heads hold L tokens
    key_channels: Tensor | None = None  # [H, T] int16, ascending: kept channels, of packed keys where there are any
    value_channels: Tensor | None = None  # [H, T] int16, likewise for values
    state: Mapping[str, Tensor] = field(default_factory=dict)
    codes: Codes | None = None
    latents: tuple[Tensor, Tensor] | None = None  # [1, L, R] each, stored in the end instead of k and v
    latent: bool = False
    leads: Tensor | None = None  # [Hq] int16

    @property
    def heads(self) -> int:
        return self.v.shape[0] if self.lengths is None else self.lengths.shape[0]

    @property
    def tokens(self) -> int:
        """The number of tokens of the head that holds most."""
        return self.positions.shape[1] if self.lengths is None else int(self.lengths.max())

    @property
    def counts(self) -> list[int]:
        """The number of tokens that each head holds."""
        return [self.tokens] * self.heads if self.lengths is None else self.lengths.tolist()

    def head(self, h: int) -> Segment:
        """Return one stored head's tokens as a view [1, its tokens, ...]."""
        end = self.tokens if self.lengths is None else int(self.lengths[: h + 1].sum())
        start = 0 if self.lengths is None else end - int(self.lengths[h])

        # ragged heads lie one after the other in one row: those of head h are start to end
        def at(t: Tensor) -> Tensor:
            return t[h if t.shape[0] > 1 else 0, start:end][None]

        keys, values = (None if c is None else c[h : h + 1] for c in (self.key_channels, self.value_channels))
        state = {name: at(t) for name, t in self.state.items()}
        if self.codes is None:
            return Segment(at(self.k), at(self.v), at(self.positions), None, keys, values, state)
        codes, k, v = self.codes.head(h, self.k, self.v, start, end)
        return Segment(k, v, at(self.positions), None, keys, values, state, codes)

    def stored(self) -> tuple[Values, Values]:
        """Return keys and values of all tokens. Raises ValueError where only the older ones are packed."""
        if self.codes is None:
            return self.k, self.v
        if self.k.shape[1] or self.v.shape[1]:
            raise ValueError("some tokens of this segment are packed and some exact")
        return self.codes.k, self.codes.v

    def holding(self, k: Values, v: Values) -> Segment:
        """Return the segment with these keys and values of all its tokens, both exact or both packed."""
        if not isinstance(k, Packed) or not isinstance(v, Packed):
            assert isinstance(k, Tensor) and isinstance(v, Tensor)
            return replace(self, k=k, v=v, codes=None)
        no_k, no_v = (self.k.new_zeros(x.shape[0], 0, x.shape[2]) for x in (k, v))
        counts = (None, None) if self.lengths is None else (self.lengths.clone(), self.lengths.clone())
        return replace(self, k=no_k, v=no_v, codes=Codes(k, v, *counts))

    def shapes(self) -> Segment:
        """Return the segment without its numbers: its tensors have shapes and no storage, but for counts by head."""
        codes = self.codes and replace(self.codes, k=self.codes.k.map(_shape), v=self.codes.v.map(_shape))
        latents = self.latents and (_shape(self.latents[0]), _shape(self.latents[1]))
        k, v, positions = _shape(self.k), _shape(self.v), _shape(self.positions)
        return replace(self, k=k, v=v, positions=positions, state={}, codes=codes, latents=latents)

    def payload(self) -> Iterator[Tensor]:
        """Yield the tensors that hold keys and values as stored."""
        yield self.k
        yield self.v
        if self.codes is not None:
            yield from self.codes.payload()

    def overhead(self) -> Iterator[Tensor]:
        """Yield the tensors that only say what the payload means: positions, lengths, channel ids, state."""
        yield self.positions
        counts = () if self.codes is None else (self.codes.k_counts, self.codes.v_counts)
        frozen = () if self.codes is None else self.codes.frozen()
        optional = (self.lengths, *counts, self.key_channels, self.value_channels, self.leads, *frozen)
        yield from (t for t in optional if t is not None)
        yield from self.state.values()


@dataclass(frozen=True)
class LayerCache:
    """One layer of one prompt's cache, without a batch axis.

    ``segments`` hold the compressed tokens first and any dense tail last. ``seen`` is the number of tokens read so
    far, hence the position of the next one. ``heads`` is the number of heads under which a chain stores (Hk, or Hq
    under ``per=query_head``), ``query_heads`` is Hq. ``weight`` is this layer's weight for a stage that divides one
    budget over all layers; None: the layer takes no part. ``decided`` are the prompt's tokens that each stored head
    keeps, recorded by stages whose count depends on the data. ``prompt`` is the prompt's length when it was compressed,
    to which budgets refer for the whole generation (0: all that was read). ``window`` marks a local layer: it holds the
    last ``window`` tokens read, no method compresses it, and it holds no others while decoding.
    ``observed`` is what a method reads that chooses again while decoding, with the last queries.
    """

    segments: tuple[Segment, ...]
    seen: int
    heads: int
    query_heads: int
    weight: float | None = None
    decided: tuple[int, ...] | None = None
    prompt: int = 0
    copy_from: Tensor | None = None  # [Hq] int16: the head whose attention output each head has; None: all their own
    window: int | None = None
    observed: Observation | None = None

    def __repr__(self) -> str:
        return f"<LayerCache: {self.tokens} of {self.seen} tokens, {self.heads} heads, {self.nbytes() / 2**10:.1f} KiB>"

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the prompt, to which budgets refer, whatever was read since."""
        return self.prompt or self.seen

    @property
    def tokens(self) -> int:
        """The number of tokens of the stored head that holds most."""
        ragged = [s.lengths for s in self.segments if s.lengths is not None]
        even = sum(s.tokens for s in self.segments if s.lengths is None)
        return even + (int(torch.stack(ragged).sum(dim=0).max()) if ragged else 0)

    def kept_positions(self) -> list[Tensor]:
        """Return the original positions of the tokens held, one ascending int32 tensor per stored head."""
        heads = max([self.heads, *(s.heads for s in self.segments)])
        parts_by_head: list[list[Tensor]] = [[] for _ in range(heads)]
        for segment in self.segments:
            if segment.lengths is None:
                parts = per_head(segment.positions, heads).unbind()
            else:
                parts = segment.positions[0].split(segment.lengths.tolist())
            for h in range(heads):
                parts_by_head[h].append(parts[h])
        return [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in parts_by_head]

    def even_positions(self) -> Tensor | None:
        """Return positions [H, tokens], or [1, tokens] where all heads share them; None where heads are ragged."""
        if any(s.lengths is not None for s in self.segments):
            return None
        heads = max(s.positions.shape[0] for s in self.segments)
        parts = [per_head(s.positions, heads) for s in self.segments]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def shapes(self) -> LayerCache:
        """Return the layer without its numbers, which says what it holds and cannot be attended."""
        observed = self.observed and replace(self.observed, last_q=None)
        return replace(self, segments=tuple(s.shapes() for s in self.segments), observed=observed)

    def nbytes(self) -> int:
        """Return the bytes of the storages that this layer keeps alive, payload and overhead."""
        return storage_bytes(self.tensors())

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor of the layer, payload and overhead."""
        yield from (t for s in self.segments for t in (*s.payload(), *s.overhead()))
        yield from self.of_layer()

    def of_layer(self) -> Iterator[Tensor]:
        """Yield the tensors of the layer that belong to no segment, all of them overhead."""
        if self.copy_from is not None:
            yield self.copy_from
        if self.observed is not None and self.observed.last_q is not None:
            yield self.observed.last_q


def _shape(t: Tensor) -> Tensor:
    """Return a tensor of the same shape and dtype without storage."""
    return torch.empty_like(t, device="meta")


def per_head(t: Tensor, heads: int) -> Tensor:
    """Repeat each row of t [H', ...] for the heads that share it -> [heads, ...]; H' must divide ``heads``."""
    return t if t.shape[0] == heads else t.repeat_interleave(heads // t.shape[0], dim=0)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages behind ``tensors``; a view counts as all that it keeps alive."""
    storages = {}
    for t in tensors:
        storage = t.untyped_storage()
        storages[storage.data_ptr() or storage._cdata] = storage.nbytes()  # those without memory have no address
    return sum(storages.values())

"""Pure operations on a layer's cache: each returns a new one and leaves its input alone.

Every result owns its storage: a view of the dense cache would keep all of it alive and save nothing.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvbench.cache.partly_packed import each
from kvbench.cache.segment import LayerCache, Segment, per_head


def dense(
    k: Tensor, v: Tensor, *, heads: int, query_heads: int, positions: Tensor | None = None, length: int = 0
) -> LayerCache:
    """The uncompressed cache of one layer: k, v [Hk, n, D], to be stored under ``heads``.

    ``positions`` [n] are those of the tokens that the layer read of a prompt of ``length``; None: 0..n-1, all of it.
    """
    n = length or k.shape[1]
    where = torch.arange(n, device=k.device) if positions is None else positions
    return LayerCache((Segment(k, v, where.to(torch.int32)[None]),), n, heads, query_heads, prompt=n)


def only_segment(cache: LayerCache) -> Segment:
    """The single segment that selection works on; raises if the cache was already split by another stage."""
    if len(cache.segments) != 1:
        raise ValueError(f"tokens are selected before anything else; this cache has {len(cache.segments)} segments")
    return cache.segments[0]


def as_stored(s: Segment) -> Segment:
    """The segment as it is stored: latents, where it has them, in the place of keys and values."""
    if s.latents is None:
        return s
    return replace(s, k=s.latents[0], v=s.latents[1], latents=None, latent=True)


def gather(t: Tensor, index: Tensor) -> Tensor:
    """t [H, L, ...] at index [H, m] -> [H, m, ...], contiguous."""
    return _read(t, index, _places(index, t.shape[1]))


def _places(index: Tensor, slots: int) -> Tensor:
    """Where index [H, m] points to while the ``slots`` of all heads lie one after the other [H * m]."""
    return (index + torch.arange(index.shape[0], device=index.device)[:, None] * slots).flatten()


def _read(t: Tensor, index: Tensor, places: Tensor) -> Tensor:
    # whole slots are copied: on a CPU several times as fast as torch.gather
    return t.flatten(0, 1).index_select(0, places).view(*index.shape, *t.shape[2:])


def select(cache: LayerCache, index: Tensor, lengths: Tensor | None = None) -> LayerCache:
    """Keep the slots ``index`` [heads, m] (ascending), or [1, m] where all heads keep the same; drop the rest.

    ``lengths`` [heads] makes the result ragged: head h keeps only its first ``lengths[h]`` entries of ``index``.
    """
    old = as_stored(only_segment(cache))
    if lengths is not None and bool((lengths != index.shape[1]).any()):
        return replace(cache, segments=(_select_ragged(old, index, lengths),))
    per_row = per_head(index, cache.heads)
    places = _places(per_row, old.positions.shape[1])
    rows = max(index.shape[0], old.positions.shape[0])

    def at(t: Tensor) -> Tensor:
        return _read(per_head(t, cache.heads), per_row, places)

    if old.positions.shape[0] == 1:
        positions = old.positions[0].index_select(0, index.flatten()).view(index.shape)
    else:
        positions = gather(old.positions, per_head(index, rows))
    new = Segment(old.k, old.v, positions, state={name: at(t) for name, t in old.state.items()}, latent=old.latent)
    k, v = old.stored()
    return replace(cache, segments=(new.holding(each(k, at), each(v, at)),))


def _select_ragged(old: Segment, index: Tensor, lengths: Tensor) -> Segment:
    """Head h's first ``lengths[h]`` of ``index`` [heads, m], the heads one after the other."""
    heads = len(lengths)
    chosen = torch.arange(index.shape[1], device=index.device) < lengths[:, None]
    head = torch.arange(heads, device=index.device)[:, None].expand_as(index)[chosen]
    slot = index[chosen]

    def at(t: Tensor) -> Tensor:
        return t[head // (heads // t.shape[0]), slot][None]

    state = {name: at(t) for name, t in old.state.items()}
    k, v = old.stored()
    new = Segment(old.k, old.v, at(old.positions), lengths.to(torch.int32), state=state)
    return new.holding(each(k, at), each(v, at))


def by_head(t: Tensor, lengths: Tensor) -> Tensor:
    """Ragged heads side by side: t [1, N, ...] -> [H, longest, ...] with zeros as padding."""
    padded = t.new_zeros(len(lengths), int(lengths.max()), *t.shape[2:])
    padded[torch.arange(padded.shape[1], device=t.device) < lengths[:, None]] = t[0]
    return padded


def expand(cache: LayerCache) -> LayerCache:
    """Repeat the kv heads until every segment has ``cache.heads`` of them (what ``per=query_head`` stores).

    Latents are those of all heads, once.
    """

    def widen(s: Segment) -> Segment:
        s = as_stored(s)
        # ragged heads were chosen one by one, under the heads that are stored
        if s.heads == cache.heads or s.lengths is not None:
            return s
        h = cache.heads
        return replace(
            s,
            k=per_head(s.k, h),
            v=per_head(s.v, h),
            key_channels=None if s.key_channels is None else per_head(s.key_channels, h),
            value_channels=None if s.value_channels is None else per_head(s.value_channels, h),
            state={name: per_head(t, h) for name, t in s.state.items()},
        )

    return replace(cache, segments=tuple(widen(s) for s in cache.segments))


def split_recent(cache: LayerCache, recent: int) -> tuple[Segment, Segment]:
    """The single segment as (older, last ``recent`` slots of every head); both own their storage."""
    s = only_segment(expand(cache))
    if s.lengths is not None:
        return _split_ragged(s, s.lengths, recent)
    cut = max(s.tokens - recent, 0)

    def part(at: slice) -> Segment:
        return Segment(
            s.k[:, at].clone(),
            s.v[:, at].clone(),
            s.positions[:, at].clone(),
            state={name: t[:, at].clone() for name, t in s.state.items()},
        )

    return part(slice(0, cut)), part(slice(cut, None))


def _split_ragged(s: Segment, lengths: Tensor, recent: int) -> tuple[Segment, Segment]:
    older = (lengths - recent).clamp(min=0)
    slot = torch.cat([torch.arange(m, device=s.k.device) for m in lengths.tolist()])
    old = slot < older.repeat_interleave(lengths)

    def part(at: Tensor, left: Tensor) -> Segment:
        even = bool((left == left[0]).all())
        shape = (len(left), int(left[0])) if even else (1, int(left.sum()))

        def take(t: Tensor) -> Tensor:
            return t[0, at].view(*shape, *t.shape[2:])

        return Segment(
            take(s.k),
            take(s.v),
            take(s.positions),
            None if even else left.to(torch.int32),
            state={name: take(t) for name, t in s.state.items()},
        )

    return part(old, older), part(~old, lengths - older)


def prune(cache: LayerCache, keys: Tensor | None, values: Tensor | None, recent: int) -> LayerCache:
    """Keep only these channels [heads, T] (ascending) of all tokens but the last ``recent`` slots; None: all."""
    older, newer = split_recent(cache, recent)

    def thinned(t: Tensor, channels: Tensor) -> Tensor:
        if older.lengths is None:
            return torch.gather(t, 2, channels.long()[:, None, :].expand(-1, older.tokens, -1))
        return torch.gather(t, 2, channels.long().repeat_interleave(older.lengths, dim=0)[None])

    thin = older
    if keys is not None:
        thin = replace(thin, k=thinned(thin.k, keys), key_channels=keys.to(torch.int16))
    if values is not None:
        thin = replace(thin, v=thinned(thin.v, values), value_channels=values.to(torch.int16))
    return replace(cache, segments=tuple(s for s in (thin, newer) if s.tokens))


def append(cache: LayerCache, k: Tensor, v: Tensor) -> LayerCache:
    """The cache with T more tokens k, v [Hk, T, D] as a dense tail behind what it holds."""
    positions = torch.arange(cache.seen, cache.seen + k.shape[1], dtype=torch.int32, device=k.device)[None]
    tail = Segment(k, v, positions)
    leads = next((s.leads for s in cache.segments if s.leads is not None), None)
    if leads is not None:
        tail = share_keys(tail, leads.clone())
    return replace(cache, segments=(*cache.segments, tail), seen=cache.seen + k.shape[1])


def key_heads(leads: Tensor, stored: int) -> Tensor:
    """Of ``stored`` heads, those whose keys a leading query head reads, ascending; leads [Hq]."""
    return (leads.long() // (leads.shape[0] // stored)).unique()


def share_keys(segment: Segment, leads: Tensor) -> Segment:
    """The segment with the keys only of heads that leading query heads read; leads [Hq]."""
    held = segment.k[key_heads(leads, segment.k.shape[0])]
    return replace(segment, k=held, leads=leads.to(torch.int16))

"""Pure operations on a layer's cache: each returns a new cache and leaves its input alone.

Every result owns its storage: a view of the dense cache would keep all of it alive and save nothing.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvbench.kv.partly_packed import map_tensors
from kvbench.kv.segment import LayerCache, Segment, per_head


def dense(
    k: Tensor, v: Tensor, *, heads: int, query_heads: int, positions: Tensor | None = None, length: int = 0
) -> LayerCache:
    """Return the uncompressed cache of one layer from k, v [Hk, n, D], to be stored under ``heads`` heads.

    ``positions`` [n] are the positions of the tokens that the layer read, in a prompt of ``length`` tokens. Without
    ``positions`` and ``length`` the layer read the whole prompt, 0 .. n - 1.
    """
    n = length or k.shape[1]
    if positions is None:
        positions = torch.arange(n, device=k.device)
    segment = Segment(k, v, positions.to(torch.int32)[None])
    return LayerCache((segment,), seen=n, heads=heads, query_heads=query_heads, prompt=n)


def local(k: Tensor, v: Tensor, window: int, query_heads: int, chunked: bool = False) -> LayerCache:
    """Return the cache of a local layer: the last ``window`` tokens of k, v [Hk, n, D].

    ``chunked`` marks a layer whose tokens attend their own chunk of ``window`` tokens, not the last ``window`` ones.
    """
    n = k.shape[1]
    first = max(0, n - window)
    positions = torch.arange(first, n, dtype=torch.int32, device=k.device)[None]
    segment = Segment(k[:, first:].clone(), v[:, first:].clone(), positions)
    return LayerCache(
        (segment,), seen=n, heads=len(k), query_heads=query_heads, prompt=n, window=window, chunked=chunked
    )


def only_segment(cache: LayerCache) -> Segment:
    """Return the single segment that selection works on. Raises ValueError if another stage has split the cache."""
    if len(cache.segments) != 1:
        raise ValueError(f"tokens are selected before anything else; this cache has {len(cache.segments)} segments")
    return cache.segments[0]


def with_state(cache: LayerCache, **state: Tensor) -> LayerCache:
    """Return the cache with more state tensors [heads, L, ...] in its single segment."""
    segment = only_segment(cache)
    return replace(cache, segments=(replace(segment, state=dict(segment.state) | state),))


def as_stored(s: Segment) -> Segment:
    """Return the segment with the tensors that are stored: latents, if there are any, in place of keys and values."""
    if s.latents is None:
        return s
    return replace(s, k=s.latents[0], v=s.latents[1], latents=None, latent=True)


def _gather_slots(t: Tensor, index: Tensor) -> Tensor:
    """Return the slots ``index`` [H, m] of t [H, L, ...] as contiguous [H, m, ...]."""
    # slot i of head h is row h L + i of t [H L, ...]; on a CPU index_select is several times as fast as gather
    heads = torch.arange(index.shape[0], device=index.device)[:, None]
    rows = (index + heads * t.shape[1]).flatten()
    return t.flatten(0, 1).index_select(0, rows).view(*index.shape, *t.shape[2:])


def select(cache: LayerCache, index: Tensor, lengths: Tensor | None = None) -> LayerCache:
    """Return the cache with only the slots ``index`` [heads, m], ascending; [1, m] if all heads keep the same slots.

    ``lengths`` [heads] makes the result ragged: head h keeps only its first ``lengths[h]`` entries of ``index``.
    """
    s = as_stored(only_segment(cache))
    # heads that all keep m slots are not stored as ragged ones
    if lengths is not None and bool((lengths != index.shape[1]).any()):
        return replace(cache, segments=(_select_ragged(s, index, lengths),))
    # index [1, m], and keys that several heads share, are repeated for each stored head
    index_by_head = per_head(index, cache.heads)

    def select_slots(t: Tensor) -> Tensor:
        """Return each stored head's slots of t [H', L, ...], in which a head may stand for several stored heads."""
        return _gather_slots(per_head(t, cache.heads), index_by_head)

    # positions stay one row as long as all heads keep the same tokens
    if s.positions.shape[0] == 1:
        positions = s.positions[0].index_select(0, index.flatten()).view(index.shape)
    else:
        rows = max(index.shape[0], s.positions.shape[0])
        positions = _gather_slots(s.positions, per_head(index, rows))
    state = {name: select_slots(t) for name, t in s.state.items()}
    # ``holding`` then replaces k and v, which may be exact or packed
    selected = Segment(s.k, s.v, positions, state=state, latent=s.latent)
    k, v = s.stored()
    selected = selected.holding(map_tensors(k, select_slots), map_tensors(v, select_slots))
    return replace(cache, segments=(selected,))


def _select_ragged(s: Segment, index: Tensor, lengths: Tensor) -> Segment:
    """Return a ragged segment with the first ``lengths[h]`` slots of row h of ``index`` [heads, m] for each head h."""
    heads = len(lengths)
    # ``head`` and ``slot`` [N] are the head and the slot of each kept token, one head after the other
    is_kept = torch.arange(index.shape[1], device=index.device) < lengths[:, None]
    head = torch.arange(heads, device=index.device)[:, None].expand_as(index)[is_kept]
    slot = index[is_kept]

    def select_slots(t: Tensor) -> Tensor:
        """Return the kept tokens [1, N, ...] of t [H', L, ...], in which a row may stand for several stored heads."""
        heads_per_row = heads // t.shape[0]
        return t[head // heads_per_row, slot][None]

    state = {name: select_slots(t) for name, t in s.state.items()}
    k, v = s.stored()
    # ``holding`` then replaces k and v, which may be exact or packed
    ragged = Segment(s.k, s.v, select_slots(s.positions), lengths.to(torch.int32), state=state)
    return ragged.holding(map_tensors(k, select_slots), map_tensors(v, select_slots))


def select_first(cache: LayerCache, order: Tensor, counts: Tensor) -> LayerCache:
    """Return the cache with only the first ``counts[h]`` tokens of each head h.

    ``order`` [heads, n] lists each head's tokens, the best first. With one row in ``order`` and ``counts``, all heads
    keep the same tokens. Kept tokens are stored in order of position, and the counts are recorded as ``decided``.
    """
    n = order.shape[1]
    is_dropped = torch.arange(n, device=order.device) >= counts[:, None]
    # the slots that stay, in order of position; dropped ones become n and sort behind them
    ascending = order.masked_fill(is_dropped, n).sort(dim=-1).values
    # shorter heads are padded with n, which the clamp brings back into range: ``select`` does not read the padding
    index = ascending[:, : int(counts.max())].clamp(max=n - 1)
    # a single count holds for all heads, which are then not ragged
    lengths = counts if len(counts) > 1 else None
    selected = select(cache, index, lengths)
    return replace(selected, decided=tuple(counts.expand(cache.heads).tolist()))


def order_by_position(positions: Tensor, valid: Tensor) -> Tensor:
    """Return the slots [..., S] in order of their positions [..., S]; slots that are not ``valid`` come last."""
    return positions.masked_fill(~valid, torch.iinfo(torch.int32).max).argsort(dim=-1, stable=True)


def pad_heads(t: Tensor, lengths: Tensor) -> Tensor:
    """Return t [1, N, ...], whose ragged heads hold ``lengths`` [H] tokens, as [H, longest, ...] padded with zeros."""
    padded = t.new_zeros(len(lengths), int(lengths.max()), *t.shape[2:])
    # True where a head has a token; row by row, these places have the order of t's tokens
    is_filled = torch.arange(padded.shape[1], device=t.device) < lengths[:, None]
    padded[is_filled] = t[0]
    return padded


def expand(cache: LayerCache) -> LayerCache:
    """Return the cache with every segment's heads repeated to ``cache.heads``, as ``per=query_head`` stores them.

    Latents stay one head, because that head stands for all: ``cache.heads`` is then 1.
    """

    def widen(s: Segment) -> Segment:
        s = as_stored(s)
        # ragged heads need no repeating: ``select`` has already chosen tokens for each of ``cache.heads``
        if s.heads == cache.heads or s.lengths is not None:
            return s
        key_channels, value_channels = s.key_channels, s.value_channels
        if key_channels is not None:
            key_channels = per_head(key_channels, cache.heads)
        if value_channels is not None:
            value_channels = per_head(value_channels, cache.heads)
        return replace(
            s,
            k=per_head(s.k, cache.heads),
            v=per_head(s.v, cache.heads),
            key_channels=key_channels,
            value_channels=value_channels,
            state={name: per_head(t, cache.heads) for name, t in s.state.items()},
        )

    return replace(cache, segments=tuple(widen(s) for s in cache.segments))


def split_recent(cache: LayerCache, recent: int) -> tuple[Segment, Segment]:
    """Return the single segment in two parts: (the older slots, the last ``recent`` slots of every head).

    The segment must hold exact tokens, none of them packed. Each part has ``cache.heads`` heads and owns its storage.
    """
    s = only_segment(expand(cache))
    if s.lengths is not None:
        return _split_ragged(s, s.lengths, recent)
    cut = max(s.tokens - recent, 0)

    def copy_slots(span: slice) -> Segment:
        """Return a segment that owns the slots ``span`` of every head."""
        state = {name: t[:, span].clone() for name, t in s.state.items()}
        return Segment(s.k[:, span].clone(), s.v[:, span].clone(), s.positions[:, span].clone(), state=state)

    return copy_slots(slice(0, cut)), copy_slots(slice(cut, None))


def _split_ragged(s: Segment, lengths: Tensor, recent: int) -> tuple[Segment, Segment]:
    """Return (the older tokens, the last ``recent`` tokens of each head) of a ragged segment, as copies.

    lengths: [H], how many tokens each head holds. A head with no more than ``recent`` tokens has no older ones.
    """
    old_counts = (lengths - recent).clamp(min=0)
    # slot is each token's place within its own head
    slot = torch.cat([torch.arange(count, device=s.k.device) for count in lengths.tolist()])
    is_old = slot < old_counts.repeat_interleave(lengths)

    def copy_tokens(mask: Tensor, counts: Tensor) -> Segment:
        """Return the tokens in ``mask`` [N]; head h has ``counts[h]`` of them."""
        new_lengths: Tensor | None
        if bool((counts == counts[0]).all()):
            # heads that now hold equally many tokens are stored as an even [H, L] segment
            shape, new_lengths = (len(counts), int(counts[0])), None
        else:
            shape, new_lengths = (1, int(counts.sum())), counts.to(torch.int32)

        def copy_part(t: Tensor) -> Tensor:
            """Return these tokens of t [1, N, ...] in the new shape."""
            return t[0, mask].view(*shape, *t.shape[2:])

        state = {name: copy_part(t) for name, t in s.state.items()}
        return Segment(copy_part(s.k), copy_part(s.v), copy_part(s.positions), new_lengths, state=state)

    return copy_tokens(is_old, old_counts), copy_tokens(~is_old, lengths - old_counts)


def prune(cache: LayerCache, keys: Tensor | None, values: Tensor | None, recent: int) -> LayerCache:
    """Return the cache with only some channels of older tokens. The last ``recent`` slots keep all channels.

    ``keys`` and ``values`` [heads, T] are the kept channels, ascending; None keeps all channels.
    """
    older, newer = split_recent(cache, recent)

    def gather_channels(t: Tensor, channels: Tensor) -> Tensor:
        """Return older keys or values t [heads, L, D] or [1, N, D] with only ``channels`` [heads, T]."""
        # each token takes the channels of its head
        if older.lengths is None:
            index = channels.long()[:, None, :].expand(-1, older.tokens, -1)
        else:
            index = channels.long().repeat_interleave(older.lengths, dim=0)[None]
        return torch.gather(t, 2, index)

    pruned = older
    if keys is not None:
        pruned = replace(pruned, k=gather_channels(pruned.k, keys), key_channels=keys.to(torch.int16))
    if values is not None:
        pruned = replace(pruned, v=gather_channels(pruned.v, values), value_channels=values.to(torch.int16))
    # an empty part, older or newer, is no segment
    return replace(cache, segments=tuple(s for s in (pruned, newer) if s.tokens))


def append(cache: LayerCache, k: Tensor, v: Tensor) -> LayerCache:
    """Return the cache with T more tokens k, v [Hk, T, D] as a dense tail behind its other segments."""
    positions = torch.arange(cache.seen, cache.seen + k.shape[1], dtype=torch.int32, device=k.device)[None]
    tail = Segment(k, v, positions)
    # heads that share logits share them in every segment, so the tail shares them as well. It gets a copy of the leads:
    # the audit declares their bytes for each segment, and ``storage_bytes`` counts a tensor that two share only once
    leads_of_segments = [s.leads for s in cache.segments if s.leads is not None]
    if leads_of_segments:
        tail = share_keys(tail, leads_of_segments[0].clone())
    return replace(cache, segments=(*cache.segments, tail), seen=cache.seen + k.shape[1])


def key_heads(leads: Tensor, stored: int) -> Tensor:
    """Return the indices, ascending, of the stored heads whose keys a leading query head reads.

    leads: [Hq], for each query head its leading head.
    stored: the number of stored heads.
    """
    # query head q reads stored head q // group
    group = leads.shape[0] // stored
    return (leads.long() // group).unique()


def share_keys(segment: Segment, leads: Tensor) -> Segment:
    """Return the segment without the keys of heads that no leading query head reads.

    ``leads`` [Hq] is the leading head of each query head. It is stored with the segment.
    """
    read_heads = key_heads(leads, segment.k.shape[0])
    return replace(segment, k=segment.k[read_heads], leads=leads.to(torch.int16))

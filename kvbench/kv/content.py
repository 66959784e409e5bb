"""Compare the tokens of a cache with the prompt's tokens at the same positions, bit for bit.

The comparison covers keys and values that are stored exactly, with all or some of their channels, and latents of
low-rank projections. It leaves out packed tokens, because their quantisers have tests of their own. It also leaves out
the caches of stages that change keys or values: ``changes`` of such a stage gives the reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.kv.ops import key_heads
from kvbench.kv.segment import LayerCache, Segment

INTEGER_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type for each element size in bytes. Viewed as integers, tensors are compared bit for bit."""


def have_same_bits(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors are equal to the bit: NaN equals the same NaN, and -0 differs from 0.

    Tensors of different shapes, dtypes or devices are not equal.
    """
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    return torch.equal(a.view(INTEGER_VIEWS[a.itemsize]), b.view(INTEGER_VIEWS[b.itemsize]))


def find_mismatch(cache: LayerCache, source: Segment, all_read: bool) -> str:
    """Return, in words for an error, how a layer's stored tokens differ from the prompt's, or '' if they do not.

    cache: the layer after compression.
    source: all tokens that the layer read, none of them packed. Every head has them at the same positions.
    all_read: True if the layer read the whole prompt, so that these positions are 0, 1, 2, ...

    Positions beyond the prompt, and shapes that do not fit, are left to the audit.
    """
    for s in cache.segments:
        # packed tokens are left out, and the source's own tensors cannot differ
        if s.codes is not None or _shares_tensors(s, source):
            continue
        index = _find_source_index(s, source, all_read)
        if index is None:
            return "tokens that it did not read"
        value_heads = torch.arange(s.heads, device=index.device)
        value_rows = _find_source_rows(s, index, value_heads, source)
        key_rows = value_rows
        if s.leads is not None:
            # only heads that a leading query head reads still have keys
            key_rows = _find_source_rows(s, index, key_heads(s.leads, s.heads), source)
        if not _equals_source(s.k, source.k, key_rows, s.key_channels, s.lengths):
            return "keys that are not those of the prompt at the positions it names"
        if not _equals_source(s.v, source.v, value_rows, s.value_channels, s.lengths):
            return "values that are not those of the prompt at the positions it names"
    return ""


def _find_source_index(s: Segment, source: Segment, all_read: bool) -> Tensor | None:
    """Return the index in ``source`` of each stored token, in the shape of the segment's positions.

    Returns None if a stored token has a position that the layer did not read. ``all_read`` is that of
    ``find_mismatch``.
    """
    read_positions = source.positions[0]
    last = len(read_positions) - 1
    if all_read:
        # a position is its own index; the clamp keeps positions that the audit refuses from failing here
        return s.positions.long().clamp(0, last)
    # searchsorted finds where each position would stand among those read, whether or not it is one of them
    index = torch.searchsorted(read_positions, s.positions).clamp(0, last)
    if not torch.equal(read_positions[index], s.positions):
        return None
    return index


def _equals_source(
    stored: Tensor, source: Tensor, rows: Tensor, channels: Tensor | None, lengths: Tensor | None
) -> bool:
    """Return True if stored keys or values equal ``rows`` [H, L] of the source [Hk, n, D] bit for bit.

    Rows are numbered through all heads: row h n + j is token j of head h. ``channels`` [H, T] are the kept channels,
    ``lengths`` [H] the token counts of ragged heads. Tensors of different shapes are not compared, and the answer is
    True, because the audit refuses wrong shapes itself.
    """
    expected = source.flatten(0, 1).index_select(0, rows.flatten()).view(*rows.shape, source.shape[-1])
    if channels is not None:
        # every token takes the kept channels of its head
        channels_of_token = channels.long()[:, None]
        if lengths is not None:
            channels_of_token = channels.long().repeat_interleave(lengths, dim=0)[None]
        expected = expected.gather(2, channels_of_token.expand(*rows.shape, -1))
    return expected.shape != stored.shape or have_same_bits(expected, stored)


def find_first_difference(layers: Sequence[str], others: Sequence[str]) -> int | None:
    """Return the number of the first layer in which two caches differ, or None if they are equal.

    ``layers`` and ``others`` are the digests (``digest_layers``) of the two caches, with equally many layers.
    """
    for i, (digest, other) in enumerate(zip(layers, others, strict=True)):
        if digest != other:
            return i
    return None


def digest_layers(layers: Sequence[LayerCache]) -> list[str]:
    """Return a digest of each layer of a cache, in order.

    On a CPU a digest covers all bits of the layer's tensors. On other devices it covers only the positions of tokens,
    because there equal sums may be rounded differently.
    """
    digests = []
    for layer in layers:
        tensors = list(layer.tensors())
        # a hash depends on the order of its input: positions come last, on every device
        hashed = []
        if all(t.device.type == "cpu" for t in tensors):
            hashed += tensors
        hashed += layer.kept_positions()
        digest = hashlib.blake2b(f"{len(tensors)} tensors".encode(), digest_size=16)
        for tensor in hashed:
            digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
        digests.append(digest.hexdigest())
    return digests


def _find_source_rows(s: Segment, index: Tensor, stored_heads: Tensor, source: Segment) -> Tensor:
    """Return the rows [H, L] of the source that hold the tokens of ``stored_heads`` [H].

    Rows are numbered through all heads of the source: row h n + j is token j of head h.

    index: [H or 1, L], the tokens' indices in the source (``_find_source_index``). Ragged heads have theirs in one row.
    """
    source_heads, n = source.v.shape[0], source.positions.shape[1]
    # a head of the source may be repeated for several stored heads: stored head h is its head h source_heads / s.heads
    start = stored_heads * source_heads // s.heads * n
    if s.lengths is not None:
        return index + start.repeat_interleave(s.lengths)
    if len(index) == 1:
        # index [1, L]: all heads keep the same tokens
        return start[:, None] + index
    return start[:, None] + index[stored_heads]


def _shares_tensors(s: Segment, source: Segment) -> bool:
    """Return True if keys, values and positions of a segment are the tensors of ``source`` themselves, not copies."""
    pairs = ((s.k, source.k), (s.v, source.v), (s.positions, source.positions))
    return all(a.shape == b.shape and a.data_ptr() == b.data_ptr() for a, b in pairs)


def mark_kept_rows(keys: Tensor, values: Tensor, kept_keys: Tensor, kept_values: Tensor) -> Tensor:
    """Return marks [H, n]: 1 for each token of keys and values [H, n, D] that is among the kept ones [H, C, D], else 0.

    A token is recognised by its key and value together, in its own head.
    """
    marks = torch.zeros(keys.shape[:2], device=keys.device)
    for head, mark in enumerate(marks):
        all_keys = torch.cat([keys[head], kept_keys[head]])
        all_values = torch.cat([values[head], kept_values[head]])
        # equal (key, value) rows get one id: a token is kept if its id occurs among the kept rows
        _, ids = torch.cat([all_keys, all_values], dim=1).unique(dim=0, return_inverse=True)
        token_ids, kept_ids = ids[: len(mark)], ids[len(mark) :]
        mark[torch.isin(token_ids, kept_ids)] = 1
    return marks

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


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors are equal to the bit: NaN equals the same NaN, and -0 differs from 0."""
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
    n, heads = source.positions.shape[1], source.v.shape[0]
    for s in cache.segments:
        # packed tokens are left out, and the source's own tensors cannot differ
        if s.codes is not None or _shares_tensors(s, source):
            continue
        if all_read:
            # the layer read every token, so a position is its own index in the source; the clamp keeps positions that
            # the audit refuses from failing here
            index = s.positions.long().clamp(0, n - 1)
        else:
            # the place of each position among those read, if it is one of them
            index = torch.searchsorted(source.positions[0], s.positions).clamp(0, n - 1)
            if not torch.equal(source.positions[0][index], s.positions):
                return "tokens that it did not read"
        value_heads = torch.arange(s.heads, device=index.device)
        value_rows = _source_rows(s, index, value_heads, n, heads)
        key_rows = value_rows
        if s.leads is not None:
            # only heads that a leading query head reads still have keys
            key_rows = _source_rows(s, index, key_heads(s.leads, s.heads), n, heads)
        if not _equals_source(s.k, source.k, key_rows, s.key_channels, s.lengths):
            return "keys that are not those of the prompt at the positions it names"
        if not _equals_source(s.v, source.v, value_rows, s.value_channels, s.lengths):
            return "values that are not those of the prompt at the positions it names"
    return ""


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
        ids = channels.long()
        # every token takes the kept channels of its head
        if lengths is None:
            by_token = ids[:, None]
        else:
            by_token = ids.repeat_interleave(lengths, dim=0)[None]
        expected = expected.gather(2, by_token.expand(*rows.shape, -1))
    return expected.shape != stored.shape or same_bits(expected, stored)


def first_difference(layers: Sequence[str], others: Sequence[str]) -> int | None:
    """Return the number of the first layer in which two caches differ, or None if they are equal.

    ``layers`` and ``others`` are the ``digests`` of the two caches, with equally many layers.
    """
    for i, (digest, other) in enumerate(zip(layers, others, strict=True)):
        if digest != other:
            return i
    return None


def digests(layers: Sequence[LayerCache]) -> list[str]:
    """Return a digest of each layer of a cache.

    On a CPU a digest covers all bits of the layer's tensors. On other devices it covers only the positions of tokens,
    because there equal sums may be rounded differently.
    """
    texts = []
    for layer in layers:
        tensors = list(layer.tensors())
        digest = hashlib.blake2b(f"{len(tensors)} tensors".encode(), digest_size=16)
        # the digest depends on the order of the tensors: positions come last, on every device
        compared = []
        if all(t.device.type == "cpu" for t in tensors):
            compared += tensors
        compared += layer.kept_positions()
        for tensor in compared:
            digest.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
        texts.append(digest.hexdigest())
    return texts


def _source_rows(s: Segment, index: Tensor, stored_heads: Tensor, n: int, heads: int) -> Tensor:
    """Return the rows [H, L] of the source [heads * n, D] that hold the tokens of ``stored_heads`` [H].

    ``index`` [H or 1, L] are the tokens' indices 0 .. n - 1; ragged heads have theirs in one row.
    """
    # stored head h is head h heads / s.heads of the source, and that head's rows begin at n times its number
    start = stored_heads * heads // s.heads * n
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


def rows_kept(keys: Tensor, values: Tensor, kept_keys: Tensor, kept_values: Tensor) -> Tensor:
    """Return marks [H, n]: 1 for each token of keys and values [H, n, D] that is among the kept ones [H, C, D], else 0.

    A token is recognised by its key and value together, in its own head.
    """
    marks = torch.zeros(keys.shape[:2], device=keys.device)
    for head, mark in enumerate(marks):
        all_keys = torch.cat([keys[head], kept_keys[head]])
        all_values = torch.cat([values[head], kept_values[head]])
        # equal (key, value) rows get one id: a token is kept if its id occurs among the kept rows
        _, ids = torch.cat([all_keys, all_values], dim=1).unique(dim=0, return_inverse=True)
        mark[torch.isin(ids[: len(mark)], ids[len(mark) :])] = 1
    return marks

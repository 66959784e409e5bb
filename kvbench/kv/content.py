"""Compare what a cache holds with what the prompt had at the positions that it names, bit for bit.

Compared are keys and values that are stored exactly, with all or some of their channels, and latents of low-rank
projections. Packed tokens are not compared, as their quantisers have tests of their own. Nor are the caches of stages
whose ``changes`` says why their keys or values are not the prompt's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.kv.ops import key_heads
from kvbench.kv.segment import LayerCache, Segment

INTEGER_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type by bytes of an element, under which tensors are compared by their bits."""


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors are equal to the bit: NaN is NaN, and -0 is not 0."""
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    return torch.equal(a.view(INTEGER_VIEWS[a.itemsize]), b.view(INTEGER_VIEWS[b.itemsize]))


def find_mismatch(cache: LayerCache, source: Segment, all_read: bool) -> str:
    """Return a description of what a layer holds that ``source`` does not have at the same positions, or ''.

    ``source`` holds all tokens that the layer read, none of them packed, at the same positions in every head: 0, 1,
    2, ... if ``all_read``. Positions beyond these, and shapes that do not fit, are left to the audit.
    """
    n, heads = source.positions.shape[1], source.v.shape[0]
    for s in cache.segments:
        if s.codes is not None or _shares_tensors(s, source):
            continue
        # a position is its own index where all tokens were read, else its place among those read
        index = s.positions.long() if all_read else torch.searchsorted(source.positions[0], s.positions)
        index = index.clamp(0, n - 1)
        if not all_read and not torch.equal(source.positions[0][index], s.positions):
            return "tokens that it did not read"
        # rows of the source, all heads one after the other, that the stored values and keys must equal
        value_rows = _source_rows(s, index, torch.arange(s.heads, device=index.device), n, heads)
        with_keys = None if s.leads is None else key_heads(s.leads, s.heads)
        key_rows = value_rows if with_keys is None else _source_rows(s, index, with_keys, n, heads)
        for name, stored, original, channels, rows in (
            ("keys", s.k, source.k, s.key_channels, key_rows),
            ("values", s.v, source.v, s.value_channels, value_rows),
        ):
            expected = original.flatten(0, 1).index_select(0, rows.flatten()).view(*rows.shape, original.shape[-1])
            if channels is not None:  # only the kept channels, [H, T], of every token
                ids = channels.long()
                by_token = ids[:, None] if s.lengths is None else ids.repeat_interleave(s.lengths, dim=0)[None]
                expected = expected.gather(2, by_token.expand(*rows.shape, -1))
            if expected.shape == stored.shape and not same_bits(expected, stored):
                return f"{name} that are not those of the prompt at the positions it names"
    return ""


def first_difference(layers: Sequence[str], others: Sequence[str]) -> int | None:
    """Return the number of the first layer whose ``digests`` of one prompt differ; None if they are equal."""
    for i, (digest, other) in enumerate(zip(layers, others, strict=True)):
        if digest != other:
            return i
    return None


def digests(layers: Sequence[LayerCache]) -> list[str]:
    """Return a digest of each layer of a cache: of the positions held and, on a CPU, of all bits.

    On other devices equal sums may be rounded differently.
    """
    texts = []
    for layer in layers:
        tensors = list(layer.tensors())
        exact = all(t.device.type == "cpu" for t in tensors)
        digest = hashlib.blake2b(f"{len(tensors)} tensors".encode(), digest_size=16)
        for tensor in (*(tensors if exact else ()), *layer.kept_positions()):
            digest.update(f"{tensor.dtype} {[*tensor.shape]}".encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
        texts.append(digest.hexdigest())
    return texts


def _source_rows(s: Segment, index: Tensor, stored_heads: Tensor, n: int, heads: int) -> Tensor:
    """Return the rows in which tokens ``index`` of ``stored_heads`` lie if all heads' n tokens are in one sequence."""
    start = stored_heads * heads // s.heads * n
    if s.lengths is not None:
        return index + start.repeat_interleave(s.lengths)
    return start[:, None] + (index if len(index) == 1 else index[stored_heads])


def _shares_tensors(s: Segment, source: Segment) -> bool:
    """Tell whether a segment is the very tensors of ``source``."""
    pairs = (s.k, source.k), (s.v, source.v), (s.positions, source.positions)
    return all(a.shape == b.shape and a.data_ptr() == b.data_ptr() for a, b in pairs)


def rows_kept(keys: Tensor, values: Tensor, kept_keys: Tensor, kept_values: Tensor) -> Tensor:
    """Return [H, n], 1 for each token of keys and values [H, n, D] that is among the kept ones [H, C, D], else 0."""
    marks = torch.zeros(keys.shape[:2], device=keys.device)
    for head, mark in enumerate(marks):
        rows = torch.cat(
            [torch.cat([keys[head], kept_keys[head]]), torch.cat([values[head], kept_values[head]])], dim=1
        )
        _, ids = rows.unique(dim=0, return_inverse=True)
        mark[torch.isin(ids[: len(mark)], ids[len(mark) :])] = 1
    return marks

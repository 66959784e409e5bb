"""Whether what a cache holds is what the prompt had at the positions that it names, bit for bit.

Compared are keys and values stored exactly, whole or by channels, of every head, and latents of low-rank projections.
Not compared are tokens that are packed, whose quantisers have tests of their own, and what stages store that say by
``changes`` why it is not the prompt's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.cache.ops import key_heads
from kvbench.cache.segment import LayerCache, Segment

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal to the bit: NaN is NaN, and -0 is not 0."""
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    return torch.equal(a.view(WORDS[a.itemsize]), b.view(WORDS[b.itemsize]))


def strange(found: LayerCache, source: Segment, whole: bool) -> str:
    """What a layer holds that ``source`` does not have at the same positions; '' if nothing.

    ``source`` holds all tokens of every head exactly, at the same positions in each, ``whole`` at 0, 1, 2, ...
    Positions beyond it, and shapes that do not fit, are the audit's matter.
    """
    n, heads = source.positions.shape[1], source.v.shape[0]
    for s in found.segments:
        if s.codes is not None or _same(s, source):
            continue
        places = s.positions.long() if whole else torch.searchsorted(source.positions[0], s.positions)
        places = places.clamp(0, n - 1)
        if not whole and not torch.equal(source.positions[0][places], s.positions):
            return "tokens that it did not read"
        rows = torch.arange(s.heads, device=places.device)
        flat = _flat(s, places, rows, n, heads)
        key_flat = flat if s.leads is None else _flat(s, places, key_heads(s.leads, s.heads), n, heads)
        for what, held, of, channels, at in (
            ("keys", s.k, source.k, s.key_channels, key_flat),
            ("values", s.v, source.v, s.value_channels, flat),
        ):
            want = of.flatten(0, 1).index_select(0, at.flatten()).view(*at.shape, of.shape[-1])
            if channels is not None:
                ids = channels.long()
                by_token = ids[:, None] if s.lengths is None else ids.repeat_interleave(s.lengths, dim=0)[None]
                want = want.gather(2, by_token.expand(*at.shape, -1))
            if want.shape == held.shape and not same_bits(want, held):
                return f"{what} that are not those of the prompt at the positions it names"
    return ""


def _flat(s: Segment, places: Tensor, stored: Tensor, n: int, heads: int) -> Tensor:
    """Where the tokens of the ``stored`` heads of a segment lie while all n of ``heads`` lie one after the other."""
    start = stored * heads // s.heads * n
    if s.lengths is not None:
        return places + start.repeat_interleave(s.lengths)
    return start[:, None] + (places if len(places) == 1 else places[stored])


def _same(s: Segment, source: Segment) -> bool:
    """Whether a segment is the very tensors of ``source``."""
    pairs = (s.k, source.k), (s.v, source.v), (s.positions, source.positions)
    return all(a.shape == b.shape and a.data_ptr() == b.data_ptr() for a, b in pairs)

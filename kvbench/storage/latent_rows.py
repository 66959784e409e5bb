"""Rows that cache low-rank latents. Buffers grow while decoding, and keys are rebuilt a block at a time.

Shapes: U rows, S slots, R latent channels of keys or of values, Hq query heads, Hk kv heads, T new tokens, L tokens of
the longest row, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from kvbench.kv.segment import LayerCache, Segment
from kvbench.storage.attend import Estimate, attend_by_logits, compute_logits, weigh
from kvbench.storage.format import Format, Room, StoredRow
from kvbench.storage.row_segments import per_place

BLOCK = 2**20  # at most this many elements of keys are rebuilt at once


class LatentRows(Format):
    """Rows that store low-rank latents of keys and values. A row's slots hold its tokens in order, the newest last.

    lift: the map from latents to keys and values.
    masker: the method that restricts attention; None: every token is attended.
    k, v: the latents [U, S, R] of keys and of values.
    positions: [U, S], the position of each slot's token.
    total: the number of tokens of each row.
    """

    moves = "it quantises tokens or keeps latents while decoding"

    def __init__(self, rows: Sequence[StoredRow], room: Room) -> None:
        # ``takes`` accepts only rows with a lift
        lift, self.masker = rows[0].lift, rows[0].masker
        assert lift is not None
        segments = [row.cache.segments[0] for row in rows]
        self.lift = lift
        self.total = [s.tokens for s in segments]
        first, slots = segments[0], max(self.total) + room.tokens
        # a layer's latents [U, S, R] are one stored head, so they have no head axis here
        self.k = first.k.new_zeros(len(segments), slots, first.k.shape[2])
        self.v = first.v.new_zeros(len(segments), slots, first.v.shape[2])
        self.positions = first.positions.new_zeros(len(segments), slots)
        for u, s in enumerate(segments):
            self.k[u, : s.tokens] = s.k[0]
            self.v[u, : s.tokens] = s.v[0]
            self.positions[u, : s.tokens] = s.positions[0]

    @classmethod
    def takes(cls, row: StoredRow) -> bool:
        return row.lift is not None

    def add(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Write the latents k, v [U, T, R] of new tokens behind the tokens of each row."""
        tokens = k.shape[1]
        row = torch.arange(len(k), device=k.device)[:, None]
        # the new tokens follow those that each row holds: [U, T]
        slot = torch.tensor(self.total, device=k.device)[:, None] + torch.arange(tokens, device=k.device)
        self.k[row, slot], self.v[row, slot] = k, v
        self.positions[row, slot] = positions.to(self.positions.dtype)
        self.total = [total + tokens for total in self.total]

    def attend(self, query: Tensor, scale: float, window: int | None) -> Tensor:
        """Return attention [U, Hq, T, D] of the newest T tokens, query [U, Hq, T, D], and set ``attended``."""
        logits_of = partial(self._compute_logits, query, scale)
        out, self.attended = attend_by_logits(logits_of, self._weigh, query.dtype, self.masker, scale)
        return out

    def _compute_logits(self, query: Tensor, scale: float, estimate: Estimate) -> Tensor:
        """Return logits [U, Hq, T, L] fp32 of query [U, Hq, T, D] over rebuilt keys, in token order.

        Tokens later than the query's, and tokens that a shorter row lacks, have -inf.

        estimate: maps rebuilt keys to the keys that are multiplied by the query.
        """
        longest, t = max(self.total), query.shape[2]
        scores = query.new_empty((*query.shape[:3], longest), dtype=torch.float32)
        token_elements = len(query) * self.lift.heads * query.shape[3]
        block = max(1, BLOCK // token_elements)
        for start in range(0, longest, block):
            span = slice(start, min(start + block, longest))
            keys = self.lift.keys(self.k[:, span], self.positions[:, span])
            scores[..., span] = compute_logits(query, estimate(keys), scale).float()
        # new token i of T is token total - T + i of its row, and sees no later token
        total = torch.tensor(self.total, device=query.device)[:, None]
        last = total - t + torch.arange(t, device=query.device)
        hidden = torch.arange(longest, device=query.device) > last[:, None, :, None]
        return scores.masked_fill_(hidden, -torch.inf)

    def _weigh(self, probs: Tensor) -> Tensor:
        """Return values [U, Hq, T, D] fp32 weighted by probs [U, Hq, T, L].

        The values are not rebuilt: latents are summed, and only the sum is lifted to the values' dimensions.
        """
        u, hq, t, longest = probs.shape
        projection = self.lift.v
        # split the latents into the groups of kv heads that share a projection
        latents_by_group = self.v[:, :longest].split(projection.ranks, dim=-1)
        # how many query heads read each kv head
        repeats = hq // self.lift.heads
        # how many kv heads share a projection
        group_heads = self.lift.heads // len(latents_by_group)
        group_probs = probs.split(group_heads * repeats, dim=1)
        outputs = []
        for probs_of_group, latent, up in zip(group_probs, latents_by_group, projection.ups, strict=True):
            # sum_t p_t (z_t W) = (sum_t p_t z_t) W; a kv head's query heads and new tokens stand in one axis
            mixed = weigh(probs_of_group, latent[:, None]).view(u, group_heads, repeats * t, -1)
            outputs.append(_lift_latents(mixed, up).view(u, group_heads * repeats, t, -1))
        out = torch.cat(outputs, dim=1)
        if projection.bias is None:
            return out
        # [Hq, 1, D]: the bias is not in the latents, and is added once to their weighted sum
        bias = projection.bias.float().view(self.lift.heads, 1, -1).repeat_interleave(repeats, dim=0)
        return out + bias

    def keep(self, at: Tensor) -> None:
        self.k, self.v, self.positions = self.k[at], self.v[at], self.positions[at]
        self.total = [self.total[u] for u in at.tolist()]

    def tokens(self) -> Tensor:
        return torch.tensor(self.total, device=self.k.device)

    def payload(self) -> list[int]:
        places = self.positions.numel()
        token_bytes = per_place(self.k, places) + per_place(self.v, places)
        return [total * token_bytes for total in self.total]

    def segments(self, u: int, cache: LayerCache) -> tuple[Segment, ...]:
        """Return the latents of row ``u`` as its only segment."""

        def copy_row(t: Tensor) -> Tensor:
            """Return a copy of the entry's part of a buffer, without free slots, as one stored head."""
            # a copy frees the batch's buffers: a view would keep them alive
            return t[u, : self.total[u]].clone()[None]

        return (Segment(copy_row(self.k), copy_row(self.v), copy_row(self.positions), latent=True),)


def _lift_latents(latents: Tensor, up: Tensor | None) -> Tensor:
    """Return latents [U, heads, n, r] of the heads of a group, lifted to the heads' dimensions [U, heads, n, D].

    up: [heads * D, r], the matrix from a group's latents to its heads. None: r is heads * D, and the latents are the
        values of all heads of the group.
    """
    heads = latents.shape[1]
    if up is None:
        # each head takes its own values out of those of all heads
        by_head = latents.unflatten(-1, (heads, -1))
        return torch.stack([by_head[:, h, :, h] for h in range(heads)], dim=1)
    return latents @ up.float().unflatten(0, (heads, -1)).transpose(1, 2)

"""Rows whose method evicts while decoding: a fixed number of slots per head, reused as tokens come and go.

Each step first makes room (the lowest keep-scores go), then writes the new tokens into the free slots, attends, and
lets the method fold the attention into its running state. Memory is flat: nothing is moved but what is written.
Shapes: B rows, H stored heads, S slots, T new tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from kvbench.cache.attend import logits, weigh
from kvbench.cache.ops import by_head, only_segment, select
from kvbench.errors import UsageError
from kvbench.types import LayerCache, Segment, per_head


@dataclass(frozen=True)
class Slots:
    """What a method sees of its slots. ``now`` [B, 1, 1] is the position of the newest token, ``n`` [B, 1, 1] the
    prompt's length; free slots are not ``valid``."""

    positions: Tensor  # [B, H, S] int32
    valid: Tensor  # [B, H, S] bool
    state: Mapping[str, Tensor]  # each [B, H, S] or [B, H, S, ...]
    now: Tensor
    n: Tensor
    row: Mapping[str, Tensor] = field(default_factory=dict)  # numbers of each prompt [B, 1, 1], as its method set them


class Evictor(Protocol):
    """The part of a selector that works while decoding."""

    @property
    def rolled(self) -> bool:
        """Whether cached keys take the positions of their slots."""
        ...

    def hold(self, cache: LayerCache, layer: int) -> int:
        """Tokens held per head of this layer from now on."""
        ...

    def row(self, n: int) -> Mapping[str, int]:
        """Numbers that depend on the prompt's length n alone: asked once, so that no step loops over rows."""
        ...

    def keep_scores(self, slots: Slots) -> Tensor:
        """How much each slot matters [B, H, S], before the new tokens come; the lowest are evicted, +inf never."""
        ...

    def estimate(self, keys: Tensor) -> Tensor | None:
        """Stand-ins in fp32 for keys [B, H, S, D] whose attention ``fold`` reads; None: that of the keys themselves."""
        ...

    def fold(self, slots: Slots, probs: Tensor, values: Tensor) -> Mapping[str, Tensor]:
        """The state after attention ``probs`` [B, Hq, T, S] over slots with ``values`` [B, H, S, D]."""
        ...


@dataclass(frozen=True)
class Rotary:
    """The model's rotation, for chains that give cached keys the positions of their slots."""

    inv_freq: Tensor  # [r / 2]

    def turn(self, x: Tensor, start: Tensor | int, end: Tensor | int) -> Tensor:
        """Rotate x [..., D] from positions ``start`` [...] to ``end`` [...]; dimensions past the rotary ones stay.

        Both angles are rounded to fp32 as the model rounds them, and their difference taken in fp64: at positions of
        many thousands an angle of the difference alone would not undo what the model did.
        """
        r = 2 * self.inv_freq.shape[0]
        inv_freq = self.inv_freq.to(x.device, torch.float32)

        def angle(at: Tensor | int) -> Tensor:
            return (torch.as_tensor(at, device=x.device)[..., None].float() * inv_freq).double()

        by = angle(end) - angle(start)
        cos, sin = (torch.cat([t.float()] * 2, dim=-1) for t in (by.cos(), by.sin()))
        part = x[..., :r].float()
        a, b = part.chunk(2, dim=-1)
        turned = part * cos + torch.cat((-b, a), dim=-1) * sin
        return torch.cat((turned.to(x.dtype), x[..., r:]), dim=-1)


class SlotRows:
    """Rows of one decode-evicting method in one layer."""

    def __init__(
        self, caches: Sequence[LayerCache], budgets: Sequence[int], evictor: Evictor, rotary: Rotary | None
    ) -> None:
        segments = [c.segments[0] for c in caches]
        size = max(budgets)
        first = segments[0]
        b, h, d = len(caches), first.heads, first.k.shape[2]
        device = first.k.device
        self.evictor, self.rotary = evictor, rotary
        self.budget = torch.tensor(budgets, device=device)[:, None, None]
        self.n = torch.tensor([c.prompt_tokens for c in caches], device=device)[:, None, None]
        rows = [evictor.row(c.prompt_tokens) for c in caches]
        self.row = {name: torch.tensor([r[name] for r in rows], device=device)[:, None, None] for name in rows[0]}
        self.k = first.k.new_zeros(b, h, size, d)
        self.v = first.v.new_zeros(b, h, size, first.v.shape[2])
        self.positions = torch.zeros(b, h, size, dtype=torch.int32, device=device)
        self.valid = torch.zeros(b, h, size, dtype=torch.bool, device=device)
        self.state = {name: t.new_zeros(b, h, size, *t.shape[2:]) for name, t in first.state.items()}
        self.fresh = 0
        for i, s in enumerate(segments):
            self._load(i, s)

    def _load(self, row: int, s: Segment) -> None:
        m, lengths = s.tokens, s.lengths
        held = torch.arange(m, device=s.k.device)
        self.valid[row, :, :m] = True if lengths is None else held < lengths[:, None]

        def side_by_side(t: Tensor) -> Tensor:
            return per_head(t, s.heads) if lengths is None else by_head(t, lengths)

        self.k[row, :, :m], self.v[row, :, :m] = side_by_side(s.k), side_by_side(s.v)
        self.positions[row, :, :m] = side_by_side(s.positions)
        for name, t in s.state.items():
            self.state[name][row, :, :m] = side_by_side(t)

    def view(self, now: Tensor) -> Slots:
        """The slots as a method sees them when the newest token is at ``now`` [B]."""
        return Slots(self.positions, self.valid, self.state, now[:, None, None], self.n, self.row)

    def add(self, k: Tensor, v: Tensor, start: Tensor) -> None:
        """Make room for k, v [B, Hk, T, D] at positions ``start`` [B] and on, and write them into free slots."""
        b, h, _ = self.valid.shape
        t = k.shape[2]
        if t > int(self.budget.min()):
            raise UsageError(f"{t} tokens at once do not fit into a budget of {int(self.budget.min())}: lower chunk=")
        kept = self._ranks(start + t - 1) < (self.budget - t).clamp(min=0)
        self.valid &= kept
        free = (~self.valid).int().sort(dim=-1, descending=True, stable=True).indices[..., :t]
        new_k, new_v = (x.repeat_interleave(h // x.shape[1], dim=1) for x in (k, v))
        self.k.scatter_(2, free[..., None].expand(-1, -1, -1, new_k.shape[3]), new_k)
        self.v.scatter_(2, free[..., None].expand(-1, -1, -1, new_v.shape[3]), new_v)
        where = (start[:, None, None] + torch.arange(t, device=k.device)).expand(b, h, t)
        self.positions.scatter_(2, free, where.to(torch.int32))
        self.valid.scatter_(2, free, torch.ones_like(free, dtype=torch.bool))
        for name, s in self.state.items():
            index = free.reshape(*free.shape, *([1] * (s.dim() - 3))).expand(*free.shape, *s.shape[3:])
            self.state[name] = s.scatter(2, index, torch.zeros_like(index, dtype=s.dtype))
        self.fresh = t

    def _ranks(self, now: Tensor) -> Tensor:
        """Each slot's place [B, H, S] in the order of keep-scores; equal scores rank by position, free slots last."""
        scores = self.evictor.keep_scores(self.view(now)).expand_as(self.valid)
        scores = scores.masked_fill(~self.valid, -torch.inf)
        by_position = self.positions.masked_fill(~self.valid, torch.iinfo(torch.int32).max).sort(dim=-1, stable=True)
        order = scores.gather(2, by_position.indices).sort(dim=-1, descending=True, stable=True).indices
        order = by_position.indices.gather(2, order)
        ranks = torch.empty_like(order)
        return ranks.scatter_(2, order, torch.arange(order.shape[2], device=order.device).expand_as(order))

    def attend(self, query: Tensor, scale: float, start: Tensor) -> Tensor:
        """Attention of the tokens just added, query [B, Hq, T, D] at ``start`` [B] and on, then the fold."""
        t = query.shape[2]
        places = start[:, None] + torch.arange(t, device=query.device)
        keys = self.k
        if self.rotary is not None:
            order = self.positions.masked_fill(~self.valid, torch.iinfo(torch.int32).max).argsort(dim=-1)
            rank = torch.empty_like(order)
            rank.scatter_(2, order, torch.arange(order.shape[2], device=order.device).expand_as(order))
            keys = self.rotary.turn(self.k, self.positions, rank)
            last = self.valid.sum(dim=-1).amax(dim=1)[:, None] - t + torch.arange(t, device=query.device)
            query = self.rotary.turn(query, places[:, None], last[:, None])
        probs = self._probs(query, keys, scale, places)
        out = weigh(probs.to(query.dtype), self.v).to(query.dtype)
        estimated = self.evictor.estimate(keys)
        if estimated is not None:
            probs = self._probs(query.float(), estimated, scale, places)
        self.state = dict(self.evictor.fold(self.view(places[:, -1]), probs, self.v))
        return out

    def _probs(self, query: Tensor, keys: Tensor, scale: float, places: Tensor) -> Tensor:
        """Attention [B, Hq, T, S] in fp32 of query [B, Hq, T, D] at ``places`` [B, T] over the slots' ``keys``."""
        b, hq, t, _ = query.shape
        h = keys.shape[1]
        part = logits(query, keys, scale).view(b, h, hq // h, t, -1)
        hidden = ~self.valid[:, :, None, None] | (self.positions[:, :, None, None] > places[:, None, None, :, None])
        return part.masked_fill(hidden, -torch.inf).view(b, hq, t, -1).float().softmax(dim=-1)

    def keep(self, rows: Tensor) -> None:
        """Go on with ``rows`` only."""
        self.budget, self.n = self.budget[rows], self.n[rows]
        self.row = {name: t[rows] for name, t in self.row.items()}
        self.k, self.v = self.k[rows], self.v[rows]
        self.positions, self.valid = self.positions[rows], self.valid[rows]
        self.state = {name: s[rows] for name, s in self.state.items()}

    def held(self) -> Tensor:
        """Tokens held per row and head [B, H]."""
        return self.valid.sum(dim=-1)

    def segment(self, row: int) -> Segment:
        """One row's tokens as a segment, ascending in position; ragged if its heads hold different numbers."""
        counts = self.held()[row]
        hidden = self.positions[row].masked_fill(~self.valid[row], torch.iinfo(torch.int32).max)
        index = hidden.sort(dim=-1, stable=True).indices[:, : int(counts.max())]
        state = {name: s[row] for name, s in self.state.items()}
        slots = Segment(self.k[row], self.v[row], self.positions[row], state=state)
        held = LayerCache((slots,), seen=0, heads=slots.heads, query_heads=slots.heads)
        return only_segment(select(held, index, counts))

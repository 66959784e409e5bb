"""Rows whose method evicts while decoding: a fixed number of slots per head, reused as tokens come and go.

Each step first makes room (the lowest keep-scores go), then writes the new tokens into the free slots, attends, and
lets the method fold the attention into its running state. Memory is flat: nothing is moved but what is written.
Where tokens are packed, the slots hold codes, and attention reads them block by block.
Shapes: B rows, H stored heads, S slots, T new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from kvbench.cache.attend import logits, weigh
from kvbench.cache.coded import Values, each, parts, write
from kvbench.cache.coded_rows import packed_logits, packed_weigh
from kvbench.cache.ops import by_head, only_segment, select
from kvbench.cache.pack import Packed
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


class Packer(Protocol):
    """How tokens are packed one by one. A new token is read as packed from its own step on, or, if ``late``, exactly in
    that step."""

    @property
    def late(self) -> bool: ...

    def pack_keys(self, x: Tensor) -> Packed: ...

    def pack_values(self, x: Tensor) -> Packed: ...


class Evictor(Protocol):
    """The part of a selector that works while decoding."""

    @property
    def packer(self) -> Packer | None:
        """What packs every token held; None where tokens stay exact."""
        ...

    @property
    def rolled(self) -> bool:
        """Whether cached keys take the positions of their slots."""
        ...

    def shares(self, cache: LayerCache, layer: int) -> Sequence[int]:
        """Tokens that each stored head of this layer holds from now on; 0: the head is not stored."""
        ...

    def row(self, n: int) -> Mapping[str, int]:
        """Numbers that depend on the prompt's length n alone: asked once, so that no step loops over rows.

        Where ``blind`` is one of them, a query does not attend the token that is so many positions before it.
        """
        ...

    def keep_scores(self, slots: Slots) -> Tensor:
        """How much each slot matters [B, H, S], before the new tokens come; the lowest are evicted, +inf never."""
        ...

    def enter(self, k: Tensor, v: Tensor) -> Mapping[str, Tensor]:
        """The state that new tokens with exact k, v [B, H, T, D] start from, where that is not 0: [B, H, T, ...]."""
        ...

    @property
    def estimates(self) -> bool:
        """Whether ``fold`` reads the attention of stand-ins for the keys."""
        ...

    def estimate(self, keys: Tensor) -> Tensor:
        """Stand-ins in fp32 for keys [..., D], block by block where these are packed."""
        ...

    def fold(self, slots: Slots, probs: Tensor) -> Mapping[str, Tensor]:
        """The part of the state that attention ``probs`` [B, Hq, T, S] over the slots changes."""
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
        self,
        caches: Sequence[LayerCache],
        budgets: Sequence[Sequence[int]],
        evictor: Evictor,
        rotary: Rotary | None,
    ) -> None:
        segments = [c.segments[0] for c in caches]
        first = segments[0]
        b, h = len(caches), first.heads
        device = first.positions.device
        self.evictor, self.rotary = evictor, rotary
        self.budget = torch.tensor(budgets, device=device)[:, :, None]
        # a prompt that was kept whole may be more than a head holds from now on
        size = max(int(self.budget.max()), *(s.tokens for s in segments))
        self.stand_ins = _stand_ins(caches, device)
        self.n = torch.tensor([c.prompt_tokens for c in caches], device=device)[:, None, None]
        rows = [evictor.row(c.prompt_tokens) for c in caches]
        self.row = {name: torch.tensor([r[name] for r in rows], device=device)[:, None, None] for name in rows[0]}

        def room(t: Tensor) -> Tensor:
            return t.new_zeros(b, h, size, *t.shape[2:])

        k, v = first.stored()
        self.k, self.v = each(k, room), each(v, room)
        self.none = first.k.new_zeros(h, 0, k.shape[2])
        self.positions = torch.zeros(b, h, size, dtype=torch.int32, device=device)
        self.valid = torch.zeros(b, h, size, dtype=torch.bool, device=device)
        self.state = {name: room(t) for name, t in first.state.items()}
        self.fresh: tuple[Tensor, Tensor, Tensor] | None = None  # the newest slots [B, H, T], exact k and v
        for i, s in enumerate(segments):
            self._load(i, s)

    def _load(self, row: int, s: Segment) -> None:
        m, lengths = s.tokens, s.lengths
        held = torch.arange(m, device=s.positions.device)
        self.valid[row, :, :m] = True if lengths is None else held < lengths[:, None]
        pairs = zip((self.k, self.v), s.stored(), strict=True)
        tensors = [both for mine, given in pairs for both in zip(parts(mine), parts(given), strict=True)]
        tensors += [(self.positions, s.positions), *((self.state[name], t) for name, t in s.state.items())]
        for mine, given in tensors:
            mine[row, :, :m] = per_head(given, s.heads) if lengths is None else by_head(given, lengths)

    def view(self, now: Tensor) -> Slots:
        """The slots as a method sees them when the newest token is at ``now`` [B]."""
        return Slots(self.positions, self.valid, self.state, now[:, None, None], self.n, self.row)

    def add(self, k: Tensor, v: Tensor, start: Tensor) -> None:
        """Make room for k, v [B, Hk, T, D] at positions ``start`` [B] and on, and write them into free slots."""
        b, h, _ = self.valid.shape
        t = k.shape[2]
        stored = self.budget > 0
        least = int(self.budget[stored].min())
        if t > least:
            raise UsageError(f"{t} tokens at once do not fit into a budget of {least}: lower chunk=")
        kept = self._ranks(start + t - 1) < (self.budget - t).clamp(min=0)
        self.valid &= kept
        free = (~self.valid).int().sort(dim=-1, descending=True, stable=True).indices[..., :t]
        new_k, new_v = (x.repeat_interleave(h // x.shape[1], dim=1) for x in (k, v))
        packer = self.evictor.packer
        write(self.k, free, new_k if packer is None else packer.pack_keys(new_k))
        write(self.v, free, new_v if packer is None else packer.pack_values(new_v))
        self.fresh = (free, new_k, new_v) if packer is not None and packer.late else None
        where = (start[:, None, None] + torch.arange(t, device=k.device)).expand(b, h, t)
        self.positions.scatter_(2, free, where.to(torch.int32))
        self.valid.scatter_(2, free, stored.expand_as(free))
        entered = self.evictor.enter(new_k, new_v)
        for name, s in self.state.items():
            index = free.reshape(*free.shape, *([1] * (s.dim() - 3))).expand(*free.shape, *s.shape[3:])
            begun = entered.get(name)
            self.state[name] = s.scatter(2, index, torch.zeros_like(index, dtype=s.dtype) if begun is None else begun)

    def _ranks(self, now: Tensor) -> Tensor:
        """Each slot's place [B, H, S] in the order of keep-scores; equal scores rank by position, free slots last."""
        return ranks(self.evictor.keep_scores(self.view(now)).expand_as(self.valid), self.positions, self.valid)

    def attend(self, query: Tensor, scale: float, start: Tensor) -> Tensor:
        """Attention of the tokens just added, query [B, Hq, T, D] at ``start`` [B] and on, then the fold."""
        t = query.shape[2]
        places = start[:, None] + torch.arange(t, device=query.device)
        keys = self.k
        if self.rotary is not None:
            assert isinstance(keys, Tensor)
            order = self.positions.masked_fill(~self.valid, torch.iinfo(torch.int32).max).argsort(dim=-1)
            rank = torch.empty_like(order)
            rank.scatter_(2, order, torch.arange(order.shape[2], device=order.device).expand_as(order))
            keys = self.rotary.turn(keys, self.positions, rank)
            # heads may hold different numbers, and each counts its own
            held = self.valid.sum(dim=-1).repeat_interleave(query.shape[1] // self.valid.shape[1], dim=1)
            last = held[:, :, None] - t + torch.arange(t, device=query.device)
            query = self.rotary.turn(query, places[:, None], last)
        probs = self._probs(query, keys, scale, places, lambda x: x)
        out = self._weigh(probs.to(query.dtype)).to(query.dtype)
        if self.evictor.estimates:
            probs = self._probs(query.float(), keys, scale, places, self.evictor.estimate)
        self.state = {**self.state, **self.evictor.fold(self.view(places[:, -1]), probs)}
        self.fresh = None
        if self.stand_ins is not None:
            out = out.gather(1, self.stand_ins[:, :, None, None].expand_as(out))
        return out

    def _probs(
        self, query: Tensor, keys: Values, scale: float, places: Tensor, read: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Attention [B, Hq, T, S] in fp32 of query [B, Hq, T, D] at ``places`` [B, T] over what ``read`` sees in the
        slots' ``keys``."""
        b, hq, t, _ = query.shape
        h = self.valid.shape[1]
        if isinstance(keys, Packed):
            part = packed_logits(query, keys, scale, None, read)
        else:
            part = logits(query, read(keys), scale)
        if self.fresh is not None:
            where, k, _ = self.fresh
            index = where.repeat_interleave(hq // h, dim=1)[:, :, None].expand(b, hq, t, -1)
            part = part.scatter(3, index, logits(query, read(k), scale).to(part.dtype))
        part = part.view(b, h, hq // h, t, -1)
        held, query_at = self.positions[:, :, None, None], places[:, None, None, :, None]
        hidden = ~self.valid[:, :, None, None] | (held > query_at)
        if "blind" in self.row:
            hidden |= held == query_at - self.row["blind"][..., None, None]
        probs = part.masked_fill(hidden, -torch.inf).view(b, hq, t, -1).float().softmax(dim=-1)
        # a head that is not stored attends nothing
        return probs if self.stand_ins is None else probs.nan_to_num(nan=0.0)

    def _weigh(self, probs: Tensor) -> Tensor:
        """Weighted values of probs [B, Hq, T, S] -> [B, Hq, T, D] in fp32."""
        if not isinstance(self.v, Packed):
            return weigh(probs, self.v)
        if self.fresh is None:
            return packed_weigh(probs, self.v)
        where, _, v = self.fresh
        b, hq, t, _ = probs.shape
        index = where.repeat_interleave(hq // where.shape[1], dim=1)[:, :, None].expand(b, hq, t, -1)
        return packed_weigh(probs.scatter(3, index, 0.0), self.v) + weigh(probs.gather(3, index), v)

    def keep(self, rows: Tensor) -> None:
        """Go on with ``rows`` only."""
        self.budget, self.n = self.budget[rows], self.n[rows]
        self.stand_ins = None if self.stand_ins is None else self.stand_ins[rows]
        self.row = {name: t[rows] for name, t in self.row.items()}
        self.k, self.v = each(self.k, lambda t: t[rows]), each(self.v, lambda t: t[rows])
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
        k, v = each(self.k, lambda t: t[row]), each(self.v, lambda t: t[row])
        slots = Segment(self.none, self.none, self.positions[row], state=state).holding(k, v)
        held = LayerCache((slots,), seen=0, heads=slots.heads, query_heads=slots.heads)
        return only_segment(select(held, index, counts))


def ranks(scores: Tensor, positions: Tensor, among: Tensor) -> Tensor:
    """Each slot's place in the order of scores [..., S], best first; equal ones rank by position, and those not
    ``among`` come last."""
    scores = scores.masked_fill(~among, -torch.inf)
    by_position = positions.masked_fill(~among, torch.iinfo(torch.int32).max).sort(dim=-1, stable=True).indices
    order = scores.gather(-1, by_position).sort(dim=-1, descending=True, stable=True).indices
    order = by_position.gather(-1, order)
    places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def _stand_ins(caches: Sequence[LayerCache], device: torch.device) -> Tensor | None:
    """The head [B, Hq] whose attention output each query head has; None where all have their own."""
    if all(c.copy_from is None for c in caches):
        return None
    own = torch.arange(caches[0].query_heads, device=device)
    return torch.stack([own if c.copy_from is None else c.copy_from.long() for c in caches])

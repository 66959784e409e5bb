"""Rows whose method evicts while decoding: a fixed number of slots per head, reused as tokens come and go.

Each step first makes room (the lowest keep-scores go), then writes the new tokens into the free slots, attends, and
lets the method fold the attention into its running state. Memory is flat: nothing is moved but what is written.
What the slots hold of keys and values, and how attention reads it, is in storage.evicting_store.
Shapes: B rows, H stored heads, S slots, T new tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from kvbench.cache.ops import order_by_position
from kvbench.cache.segment import LayerCache, Segment
from kvbench.errors import UsageError
from kvbench.storage.attend import rounded
from kvbench.storage.evicting_store import OneFormat, Packer, Read, SlotStore, Thin, one_by_one


@dataclass(frozen=True)
class Slots:
    """What a method sees of its slots. ``now`` [B, 1, 1] is the position of the newest token, ``n`` [B, 1, 1] the
    prompt's length; free slots are not ``valid``."""

    positions: Tensor  # [B, H, S] int32
    valid: Tensor  # [B, H, S] bool
    state: Mapping[str, Tensor]  # each [B, H, S] or [B, H, S, ...]
    now: Tensor
    n: Tensor
    counts: Mapping[str, Tensor] = field(default_factory=dict)  # [B, 1, 1] each, by name: see ``token_counts``


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

    def head_budgets(self, cache: LayerCache, layer: int) -> Sequence[int]:
        """Tokens that each stored head of this layer holds from now on; 0: the head is not stored."""
        ...

    def token_counts(self, n: int) -> Mapping[str, int]:
        """Return counts that depend on the prompt's length n alone, so that no step loops over rows."""
        ...

    def unattended(self, n: int) -> int | None:
        """Return how many positions before a query the one token lies that it does not attend; None: it attends all."""
        ...

    def keep_scores(self, slots: Slots) -> Tensor:
        """How much each slot matters [B, H, S], before the new tokens come; the lowest are evicted, +inf never."""
        ...

    def new_token_state(self, k: Tensor, v: Tensor) -> Mapping[str, Tensor]:
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
    """Rows of one decode-evicting method in one layer. ``room`` new tokens come at most."""

    def __init__(
        self,
        caches: Sequence[LayerCache],
        budgets: Sequence[Sequence[int]],
        evictor: Evictor,
        rotary: Rotary | None,
        room: int,
    ) -> None:
        segments = [c.segments for c in caches]
        first = segments[0][0]
        b, h = len(caches), first.heads
        device = first.positions.device
        self.evictor, self.rotary = evictor, rotary
        self.budget = torch.tensor(budgets, device=device)[:, :, None]
        # a prompt that was kept whole may be more than a head holds from now on
        size = max(int(self.budget.max()), *(c.tokens for c in caches))
        self.stand_ins = _stand_ins(caches, device)
        self.n = torch.tensor([c.prompt_tokens for c in caches], device=device)[:, None, None]
        rows = [evictor.token_counts(c.prompt_tokens) for c in caches]
        self.counts = {name: torch.tensor([r[name] for r in rows], device=device)[:, None, None] for name in rows[0]}
        gaps = [evictor.unattended(c.prompt_tokens) for c in caches]
        self.unattended = None if None in gaps else torch.tensor(gaps, device=device)[:, None, None]
        self.positions = torch.zeros(b, h, size, dtype=torch.int32, device=device)
        self.valid = torch.zeros(b, h, size, dtype=torch.bool, device=device)
        self.state = {name: t.new_zeros(b, h, size, *t.shape[2:]) for name, t in first.state.items()}
        self.store: SlotStore
        if first.key_channels is None and first.value_channels is None:
            self.store = OneFormat([first for (first,) in segments], size, evictor.packer)
        else:
            self.store = Thin(segments, size, self._whole_tokens(segments, room))
        for i, row in enumerate(segments):
            held = torch.zeros(h, dtype=torch.int64, device=device)
            for s in row:
                held = self._load(i, s, held)

    def _whole_tokens(self, segments: Sequence[Sequence[Segment]], room: int) -> int:
        """The most tokens with all channels that a head holds until ``room`` more have come."""
        none = [0] * self.budget.shape[1]
        whole = [[sum(c) for c in zip(none, *(s.counts for s in row[1:]), strict=True)] for row in segments]
        now = torch.tensor(whole, device=self.budget.device)
        later = torch.minimum(self.budget[..., 0], now + room)
        return int(torch.maximum(now, later).max())

    def _load(self, row: int, s: Segment, held: Tensor) -> Tensor:
        """Put a segment behind the tokens ``held`` [H] of each head; returns what is held then."""
        counts = torch.tensor(s.counts, device=held.device)
        head = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        slot = torch.cat([torch.arange(a, a + m, device=counts.device) for a, m in zip(held, counts, strict=True)])
        self.valid[row, head, slot] = True
        self.positions[row, head, slot] = one_by_one(s.positions, s)
        for name, t in s.state.items():
            self.state[name][row, head, slot] = one_by_one(t, s)
        self.store.load(row, head, slot, s)
        return held + counts

    def view(self, now: Tensor) -> Slots:
        """The slots as a method sees them when the newest token is at ``now`` [B]."""
        return Slots(self.positions, self.valid, self.state, now[:, None, None], self.n, self.counts)

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
        self.store.add(free, new_k, new_v, self.valid)
        where = (start[:, None, None] + torch.arange(t, device=k.device)).expand(b, h, t)
        self.positions.scatter_(2, free, where.to(torch.int32))
        self.valid.scatter_(2, free, stored.expand_as(free))
        entered = self.evictor.new_token_state(new_k, new_v)
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
        read: Read = None
        if self.rotary is not None:
            query, read = self._rolled(query, places, self.rotary)
        probs = self._probs(query, scale, places, read)
        out = rounded(probs, query.dtype, self.store.weigh)
        if self.evictor.estimates:
            turn, estimate = read or (lambda keys: keys), self.evictor.estimate
            probs = self._probs(query.float(), scale, places, lambda keys: estimate(turn(keys)))
        self.state = {**self.state, **self.evictor.fold(self.view(places[:, -1]), probs)}
        if self.stand_ins is not None:
            out = out.gather(1, self.stand_ins[:, :, None, None].expand_as(out))
        return out

    def _rolled(self, query: Tensor, places: Tensor, rotary: Rotary) -> tuple[Tensor, Read]:
        """The query at the last slots, and what turns keys to theirs."""
        t = query.shape[2]
        order = order_by_position(self.positions, self.valid)
        rank = torch.empty_like(order)
        rank.scatter_(2, order, torch.arange(order.shape[2], device=order.device).expand_as(order))
        # heads may hold different numbers, and each counts its own
        held = self.valid.sum(dim=-1).repeat_interleave(query.shape[1] // self.valid.shape[1], dim=1)
        last = held[:, :, None] - t + torch.arange(t, device=query.device)
        return rotary.turn(query, places[:, None], last), lambda keys: rotary.turn(keys, self.positions, rank)

    def _probs(self, query: Tensor, scale: float, places: Tensor, read: Read) -> Tensor:
        """Attention [B, Hq, T, S] in fp32 of query [B, Hq, T, D] at ``places`` [B, T] over what ``read`` sees."""
        b, hq, t, _ = query.shape
        h = self.valid.shape[1]
        part = self.store.logits(query, scale, read).view(b, h, hq // h, t, -1)
        held, query_at = self.positions[:, :, None, None], places[:, None, None, :, None]
        hidden = ~self.valid[:, :, None, None] | (held > query_at)
        if self.unattended is not None:
            hidden |= held == query_at - self.unattended[..., None, None]
        probs = part.masked_fill(hidden, -torch.inf).view(b, hq, t, -1).float().softmax(dim=-1)
        # a head that is not stored attends nothing
        return probs if self.stand_ins is None else probs.nan_to_num(nan=0.0)

    def keep(self, rows: Tensor) -> None:
        """Go on with ``rows`` only."""
        self.budget, self.n = self.budget[rows], self.n[rows]
        self.stand_ins = None if self.stand_ins is None else self.stand_ins[rows]
        self.counts = {name: t[rows] for name, t in self.counts.items()}
        self.unattended = None if self.unattended is None else self.unattended[rows]
        self.store.keep(rows)
        self.positions, self.valid = self.positions[rows], self.valid[rows]
        self.state = {name: s[rows] for name, s in self.state.items()}

    def held(self) -> Tensor:
        """Tokens held per row and head [B, H]."""
        return self.valid.sum(dim=-1)

    def segments(self, row: int) -> tuple[Segment, ...]:
        """One row's tokens, each segment ascending in position; ragged if its heads hold different numbers."""
        state = {name: s[row] for name, s in self.state.items()}
        none = self.positions.new_zeros(self.positions.shape[1], 0, 0)
        return self.store.segments(row, Segment(none, none, self.positions[row], state=state), self.valid[row])


def ranks(scores: Tensor, positions: Tensor, among: Tensor) -> Tensor:
    """Each slot's place in the order of scores [..., S], best first; equal ones rank by position, and those not
    ``among`` come last."""
    scores = scores.masked_fill(~among, -torch.inf)
    by_position = order_by_position(positions, among)
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

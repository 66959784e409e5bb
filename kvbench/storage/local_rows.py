"""Rows of a local layer: a layer that attends only the last tokens. A new token takes the oldest token's slot.

Shapes: U rows, S slots, Hq query heads, Hk kv heads, T new tokens, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvbench.kv.packed import Packed
from kvbench.kv.partly_packed import Codes, Residual, allocate_buffers
from kvbench.kv.segment import LayerCache, Segment
from kvbench.storage.attend import (
    Estimate,
    attend_by_logits,
    compute_logits,
    compute_packed_logits,
    weigh,
    weigh_packed,
)
from kvbench.storage.format import Format, Room, StoredRow
from kvbench.storage.row_segments import describe_format, per_place


class LocalRows(Format):
    """Rows of a local layer with exact tokens, whatever their methods: methods leave local layers alone.

    The slots are a ring. The token at position p is in slot p mod S.

    window: how many of the last tokens are attended; if ``chunked``, how many tokens a chunk has.
    chunked: True if a token attends the tokens of its own chunk of the text, not the last ones.
    k, v: the keys and values [U, Hk, S, D] of the slots.
    positions: [U, S], the position of each slot's token. In a free slot it lies before every window.
    newest: [U, T], the positions of the tokens added last.
    """

    takes_ragged = True
    moves = "it has local layers, whose windows move"

    def __init__(self, rows: Sequence[StoredRow], room: Room) -> None:
        caches = [row.cache for row in rows]
        # ``takes`` accepts only caches with a window, and ``key`` puts caches of one window together
        assert caches[0].window is not None
        self.window = caches[0].window
        self.chunked = caches[0].chunked
        # of several tokens that come at once, the first still sees the whole window before it
        slots = min(self.window + room.at_once - 1, max(cache.seen for cache in caches) + room.tokens)
        segments = [cache.segments[0] for cache in caches]
        k, v = segments[0].k, segments[0].v
        self.k = k.new_zeros(len(rows), k.shape[0], slots, k.shape[2])
        self.v = v.new_zeros(len(rows), v.shape[0], slots, v.shape[2])
        # a free slot gets a position before everything that the first token sees
        self.positions = torch.full((len(rows), slots), -self.window, dtype=torch.int64, device=self.k.device)
        for u, s in enumerate(segments):
            self._write(torch.tensor([u], device=self.k.device), s.k[None], s.v[None], s.positions.long())
        self.newest = self.positions[:, -1:]  # [U, 1], a placeholder until ``add``

    @classmethod
    def takes(cls, row: StoredRow) -> bool:
        return row.cache.window is not None

    @classmethod
    def key(cls, row: StoredRow) -> Hashable:
        return row.cache.window, row.cache.chunked

    def _write(self, rows: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Write tokens of the rows with indices ``rows`` [U'] into their slots.

        k, v: the tokens' keys and values [U', Hk, T, D].
        positions: [U', T], which decide the slots.
        """
        slots = positions % self.positions.shape[1]
        index = (rows[:, None], slots)
        self.positions[index] = positions
        # in [U, S, Hk, D] rows and slots are neighbours, as in the index
        self.k.transpose(1, 2)[index] = k.transpose(1, 2)
        self.v.transpose(1, 2)[index] = v.transpose(1, 2)

    def add(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        self._write(torch.arange(len(k), device=k.device), k, v, positions)
        self.newest = positions

    def attend(self, query: Tensor, scale: float, window: int | None) -> Tensor:
        """Return the attention over the last tokens, or over those of the chunk. ``window`` is not read."""
        token_at, query_at = self.positions[:, None], self.newest[:, :, None]
        # a query at position p sees positions p - window + 1 to p, or those of its chunk up to p: [U, 1, T, S]
        if self.chunked:
            first_seen = query_at // self.window * self.window
        else:
            first_seen = query_at - self.window + 1
        hidden = ((token_at > query_at) | (token_at < first_seen))[:, None]

        def logits_of(estimate: Estimate) -> Tensor:
            """Return the logits [U, Hq, T, S] of all slots; -inf for free slots and tokens that are not attended."""
            return self._compute_logits(query, scale, estimate).masked_fill(hidden, -torch.inf)

        out, _ = attend_by_logits(logits_of, self._weigh, query.dtype, masker=None, scale=scale)
        return out

    def _compute_logits(self, query: Tensor, scale: float, estimate: Estimate) -> Tensor:
        return compute_logits(query, estimate(self.k), scale)

    def _weigh(self, probs: Tensor) -> Tensor:
        return weigh(probs, self.v)

    def keep(self, at: Tensor) -> None:
        self.k, self.v = self.k[at], self.v[at]
        self.positions, self.newest = self.positions[at], self.newest[at]

    def _find_slots_in_window(self) -> Tensor:
        """Return a mask [U, S] of the slots within the window of the newest token."""
        newest = self.positions.amax(dim=1, keepdim=True)
        return (self.positions > newest - self.window) & (self.positions >= 0)

    def tokens(self) -> Tensor:
        return self._find_slots_in_window().sum(dim=1)

    def payload(self) -> list[int]:
        """Return how many bytes of keys and values each row holds within the window of its newest token."""
        places = self.positions.numel()
        token_bytes = per_place(self.k, places) + per_place(self.v, places)
        return [count * token_bytes for count in self.tokens().tolist()]

    def segments(self, u: int, cache: LayerCache) -> tuple[Segment, ...]:
        """Return the tokens of row ``u`` within the window as its only segment, ascending in position."""
        slots = self._find_slots_in_window()[u].nonzero()[:, 0]
        # the ring may begin in any slot, so slots are sorted by position
        slots = slots[self.positions[u, slots].argsort()]
        positions = self.positions[u, slots].to(torch.int32)[None]
        return (Segment(self.k[u][:, slots], self.v[u][:, slots], positions),)


class CodedLocalRows(LocalRows):
    """Rows of a local layer whose tokens a storage format codes, as inference engines code the rows of a window.

    coder: says which tokens stay exact.
    alone: True if the tokens of one step are read as if each came in a step of its own.
    """

    def __init__(self, rows: Sequence[StoredRow], room: Room) -> None:
        # the parent's rings stay without channels: the halves below hold the tokens
        super().__init__([_without_channels(row) for row in rows], room)
        coder, segments = rows[0].coder, [row.cache.segments[0] for row in rows]
        # ``takes`` accepts only rows with a coder, and rows with a coder have codes
        assert coder is not None
        codes = [s.codes for s in segments if s.codes is not None]
        positions = [s.positions[0].long() for s in segments]
        self.alone = room.alone
        self.k_half = _Half([c.k for c in codes], [s.k for s in segments], positions, self.positions.shape[1])
        self.v_half = _Half([c.v for c in codes], [s.v for s in segments], positions, self.positions.shape[1])
        self.k_half.follow(coder.keys, coder.packer.pack_keys, grows=coder.grows)
        self.v_half.follow(coder.values, coder.packer.pack_values, grows=coder.grows)

    @classmethod
    def takes(cls, row: StoredRow) -> bool:
        return row.cache.window is not None and row.coder is not None

    @classmethod
    def key(cls, row: StoredRow) -> Hashable:
        return row.coder, super().key(row), describe_format(row.cache.segments[0])

    def add(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        super().add(k[..., :0], v[..., :0], positions)
        for half, x in ((self.k_half, k), (self.v_half, v)):
            half.add(x, positions, self.alone)

    def _compute_logits(self, query: Tensor, scale: float, estimate: Estimate) -> Tensor:
        half = self.k_half
        coded = compute_packed_logits(query, half.codes, scale, None, estimate)
        if half.exact is None:
            return coded
        exact = compute_logits(query, estimate(half.exact), scale).float()
        return torch.where(half.is_coded(self.positions), coded, exact)

    def _weigh(self, probs: Tensor) -> Tensor:
        half = self.v_half
        if half.exact is None:
            return weigh_packed(probs, half.codes)
        is_coded = half.is_coded(self.positions)
        return weigh_packed(probs * is_coded, half.codes) + weigh(probs * ~is_coded, half.exact)

    def keep(self, at: Tensor) -> None:
        super().keep(at)
        self.k_half.keep(at)
        self.v_half.keep(at)

    def payload(self) -> list[int]:
        in_window = self._find_slots_in_window()
        total = self.k_half.payload(self.positions, in_window) + self.v_half.payload(self.positions, in_window)
        sizes: list[int] = total.tolist()
        return sizes

    def segments(self, u: int, cache: LayerCache) -> tuple[Segment, ...]:
        (ring,) = super().segments(u, cache)
        positions = ring.positions[0].long()
        slots = positions % self.positions.shape[1]
        k_codes, k = self.k_half.held(u, positions, slots)
        v_codes, v = self.v_half.held(u, positions, slots)
        return (Segment(k, v, ring.positions, codes=Codes(k_codes, v_codes)),)


class _Half:
    """The keys, or the values, of the rows: a ring of codes, and a ring of exact tokens if any stay exact.

    codes: [U, Hk, S, .].
    exact: [U, Hk, S, D]; None if every token is coded as it comes.
    coded_to: [U], the position of each row's newest coded token.
    seen_to: [U, T], for each new token the position of the newest token that it reads as coded.
    """

    def __init__(
        self, codes: Sequence[Packed], exact: Sequence[Tensor], positions: Sequence[Tensor], slots: int
    ) -> None:
        device = codes[0].device
        self.codes = allocate_buffers(codes, lambda t: t.new_zeros(len(codes), t.shape[0], slots, *t.shape[2:]))
        self.exact: Tensor | None = exact[0].new_zeros(len(codes), len(exact[0]), slots, exact[0].shape[2])
        # a view would keep the ring's memory
        self.no_token = exact[0].new_zeros(len(exact[0]), 0, exact[0].shape[2])
        coded_to = []
        for u, (packed, tokens, at) in enumerate(zip(codes, exact, positions, strict=True)):
            count = packed.shape[1]
            self._write_codes(torch.tensor([u], device=device), packed.map(lambda t: t[None]), at[None, :count])
            self._write_exact(torch.tensor([u], device=device), tokens[None], at[None, count:])
            # without a coded token, the first exact one tells where coding will begin
            coded_to.append(int(at[0]) + count - 1)
        self.coded_to = torch.tensor(coded_to, device=device)
        self.seen_to = self.coded_to[:, None]

    def follow(self, residual: Residual, pack: Callable[[Tensor], Packed], grows: bool) -> None:
        """Code later tokens by ``pack`` as ``residual`` says; without ``grows`` they all stay exact."""
        self.residual, self.pack, self.grows = residual, pack, grows
        if grows and residual.most == 0:
            self.exact = None

    def add(self, x: Tensor, positions: Tensor, alone: bool) -> None:
        """Take new tokens x [U, Hk, T, D] at ``positions`` [U, T], and code those that must not stay exact."""
        rows = torch.arange(len(x), device=x.device)
        if self.exact is None:
            self._write_codes(rows, self.codes.pack_more(x, self.pack), positions)
            self.coded_to = positions[:, -1]
            return
        self._write_exact(rows, x, positions)
        before = self.coded_to
        if self.grows:
            self.coded_to = before + self._count_coded(positions[:, -1] - before)
            for u in (self.coded_to > before).nonzero().flatten().tolist():
                self._code(u, int(before[u]) + 1, int(self.coded_to[u]))
        self.seen_to = self.coded_to[:, None].expand_as(positions)
        if alone and self.grows:
            # each of several tokens reads as coded what it would find coded in a step of its own
            self.seen_to = before[:, None] + self._count_coded(positions - before[:, None])

    def _count_coded(self, exact: Tensor) -> Tensor:
        """Return how many of ``exact`` tokens must be coded, for each number in the tensor."""
        counts = [self.residual.packed(int(count)) for count in exact.flatten()]
        return torch.tensor(counts, device=exact.device).view_as(exact)

    def _code(self, u: int, first: int, last: int) -> None:
        """Code the tokens of row ``u`` at the positions ``first`` to ``last``."""
        assert self.exact is not None
        positions = torch.arange(first, last + 1, device=self.exact.device)
        tokens = self.exact[u : u + 1, :, positions % self.exact.shape[2]]
        rows = torch.tensor([u], device=self.exact.device)
        self._write_codes(rows, self.codes.pack_more(tokens, self.pack, [u]), positions[None])

    def _write_codes(self, rows: Tensor, packed: Packed, positions: Tensor) -> None:
        for buffer, tokens in zip(self.codes.payload(), packed.payload(), strict=True):
            index = (rows[:, None], positions % buffer.shape[2])
            buffer.transpose(1, 2)[index] = tokens.transpose(1, 2)

    def _write_exact(self, rows: Tensor, tokens: Tensor, positions: Tensor) -> None:
        assert self.exact is not None
        index = (rows[:, None], positions % self.exact.shape[2])
        self.exact.transpose(1, 2)[index] = tokens.transpose(1, 2)

    def is_coded(self, positions: Tensor) -> Tensor:
        """Return [U, 1, T, S]: whether each new token reads the token at each of ``positions`` [U, S] as coded."""
        return (positions[:, None] <= self.seen_to[:, :, None])[:, None]

    def keep(self, at: Tensor) -> None:
        self.codes = self.codes[at]
        if self.exact is not None:
            self.exact = self.exact[at]
        self.coded_to, self.seen_to = self.coded_to[at], self.seen_to[at]

    def payload(self, positions: Tensor, in_window: Tensor) -> Tensor:
        """Return the bytes [U] of the tokens in the slots that are ``in_window`` [U, S]."""
        places = positions.numel()
        coded = in_window & (positions <= self.coded_to[:, None])
        total = coded.sum(dim=1) * sum(per_place(t, places) for t in self.codes.payload())
        if self.exact is None:
            return total
        return total + (in_window & ~coded).sum(dim=1) * per_place(self.exact, places)

    def held(self, u: int, positions: Tensor, slots: Tensor) -> tuple[Packed, Tensor]:
        """Return copies of (coded tokens, exact tokens) of row ``u`` at ascending ``positions``, held in ``slots``."""
        coded = positions <= self.coded_to[u]
        codes = self.codes[u]
        payload = [t[:, slots[coded]] for t in codes.payload()]
        frozen = codes.frozen.clone() if codes.frozen is not None else None
        if self.exact is None:
            exact = self.no_token.clone()
        else:
            exact = self.exact[u][:, slots[~coded]]
        return codes.holding(payload, frozen), exact


def _without_channels(row: StoredRow) -> StoredRow:
    """Return a row of a local layer whose tokens have positions, but no channels."""
    segment = row.cache.segments[0]
    nothing = segment.k.new_zeros(segment.k.shape[0], segment.positions.shape[1], 0)
    bare = Segment(nothing, nothing, segment.positions)
    return replace(row, cache=replace(row.cache, segments=(bare,)))

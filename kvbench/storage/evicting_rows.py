"""Rows whose method evicts while decoding: a fixed number of slots per head, reused as tokens come and go.

Each step first evicts the tokens with the lowest scores (``Evictor.keep_scores``) and writes the new tokens into the
free slots. It then attends and lets the method fold the attention into its running state. Under a budget while
decoding the method instead chooses again after a fixed number of tokens. Slots are reserved once: a step writes new
tokens and moves no others. The keys and values of the slots, and attention over them, are in storage.evicting_store.
Shapes: B rows, H stored heads, S slots, T new tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.base.errors import UsageError
from kvbench.kv.observation import Observation
from kvbench.kv.ops import only_segment, order_by_position
from kvbench.kv.scale import sinks_of, softmax
from kvbench.kv.segment import LayerCache, Segment
from kvbench.storage.attend import as_they_are, weigh_rounded
from kvbench.storage.evicting_store import OneFormat, Read, Thin, expand_slots, gather_slots, list_tokens
from kvbench.storage.format import Format, Room, StoredRow
from kvbench.storage.recent_queries import RecentQueries
from kvbench.storage.roles import Evictor, Rotary, Slots
from kvbench.storage.row_segments import describe_format, take_entries


class _SlotAttention(NamedTuple):
    """Attention over the slots.

    out: the outputs [B, Hq, T, D].
    probs: the attention weights [B, Hq, T, S].
    query: [B, Hq, T, D], turned to the positions of the last slots if cached keys take the positions of their slots.
    read: the map from stored keys to the attended keys, which turns keys alike; None: the stored keys.
    """

    out: Tensor
    probs: Tensor
    query: Tensor
    read: Read


class EvictingRows(Format):
    """Rows of one method that evicts while decoding.

    evictor: the part of the method that decides which tokens go.
    rotary: the model's rotation if cached keys take the positions of their slots, else None.
    positions, valid: [B, H, S], the position of each slot's token, and whether the slot is in use.
    state: the method's running state by name, each [B, H, S, ...].
    budget: [B, H or 1, 1], how many tokens a head may hold.
    n: [B, 1, 1], the prompt's length.
    newest: [B, T], the positions of the tokens added last.
    most: [B], the most tokens that any head of a row has held so far.
    counts: the method's ``token_counts`` by name, each [B, 1, 1].
    unattended_distance: [B, 1, 1], the result of ``Evictor.unattended_distance``; None if every token is attended.
    recent: the last queries if the method chooses again, else None.
    store: the keys and values of the slots.
    """

    takes_ragged = True
    moves = "it evicts while decoding"

    def __init__(self, rows: Sequence[StoredRow], room: Room) -> None:
        # rows of one batch have equal evictors (``key``), and ``takes`` accepts only rows that have one
        evictor = rows[0].evictor
        assert evictor is not None
        caches = [row.cache for row in rows]
        segments_by_row = [cache.segments for cache in caches]
        first = segments_by_row[0][0]
        b, h = len(caches), first.heads
        device = first.positions.device
        self.evictor = evictor
        self.rotary = rows[0].rotary if evictor.rolled else None
        self.recent = RecentQueries(caches, evictor.queries) if evictor.every else None
        self.budget = torch.tensor([_find_budgets(row, evictor, room) for row in rows], device=device)[:, :, None]
        self.most = torch.tensor([cache.tokens for cache in caches], device=device)
        self._set_prompt_numbers([cache.prompt_tokens for cache in caches], device)
        # a prompt that was kept whole may hold more tokens than the budget that applies from now on
        size = max(int(self.budget.max()), max(cache.tokens for cache in caches))
        self.positions = torch.zeros(b, h, size, dtype=torch.int32, device=device)
        self.valid = torch.zeros(b, h, size, dtype=torch.bool, device=device)
        self.state = {name: t.new_zeros(b, h, size, *t.shape[2:]) for name, t in first.state.items()}
        self.newest = self.n[:, :, 0]  # [B, 1]: no token has been added yet
        self.store: OneFormat | Thin
        if first.key_channels is None and first.value_channels is None:
            # such rows have one segment each
            self.store = OneFormat([segment for (segment,) in segments_by_row], size, evictor.packer)
        else:
            self.store = Thin(segments_by_row, size, self._count_whole_tokens(segments_by_row, room.tokens))
        for row, segments in enumerate(segments_by_row):
            used_slots = torch.zeros(h, dtype=torch.int64, device=device)
            for s in segments:
                used_slots = self._load(row, s, used_slots)

    def _set_prompt_numbers(self, prompt_tokens: Sequence[int], device: torch.device) -> None:
        """Set ``n``, ``counts`` and ``unattended_distance``, which follow from the length of each row's prompt."""

        def stack_numbers(numbers: Sequence[int]) -> Tensor:
            """Return a number for each row as a tensor [B, 1, 1], which is read for all heads and slots of the row."""
            return torch.tensor(numbers, device=device)[:, None, None]

        self.n = stack_numbers(prompt_tokens)
        counts_by_row = [self.evictor.token_counts(n) for n in prompt_tokens]
        self.counts = {}
        for name in counts_by_row[0]:
            self.counts[name] = stack_numbers([counts[name] for counts in counts_by_row])
        distances = [self.evictor.unattended_distance(n) for n in prompt_tokens]
        # equal evictors give a distance for every prompt, or for none
        known_distances = [distance for distance in distances if distance is not None]
        self.unattended_distance: Tensor | None = None
        if len(known_distances) == len(distances):
            self.unattended_distance = stack_numbers(known_distances)

    @classmethod
    def takes(cls, row: StoredRow) -> bool:
        return row.evictor is not None

    @classmethod
    def key(cls, row: StoredRow) -> Hashable:
        return (row.evictor, tuple(describe_format(s) for s in row.cache.segments))

    @classmethod
    def head_sizes(cls, row: StoredRow) -> Sequence[int] | None:
        """Return the budget of each head if heads are stored apart, because their budgets differ; else None."""
        # a method that chooses again reads all heads of a row together
        if row.evictor is None or row.evictor.every:
            return None
        # a thin row has segments of two kinds, and its heads could not be joined again one by one
        if any(s.key_channels is not None for s in row.cache.segments):
            return None
        budgets = row.evictor.head_budgets(row.cache, row.layer)
        if len(set(budgets)) == 1:
            return None
        return budgets

    def _count_whole_tokens(self, segments_by_row: Sequence[Sequence[Segment]], new_tokens: int) -> int:
        """Return the most whole tokens (with all channels) that a head holds until ``new_tokens`` more have come."""
        counts_by_row = []
        for segments in segments_by_row:
            counts = torch.zeros(self.budget.shape[1], dtype=torch.int64)  # one number for each head
            # a row's first segment is thin, and its other segments have all channels
            for s in segments[1:]:
                counts += torch.tensor(s.counts)
            counts_by_row.append(counts)
        now = torch.stack(counts_by_row).to(self.budget.device)
        # every new token is whole; a prompt that was kept whole may now hold more than the budget
        later = torch.minimum(self.budget[..., 0], now + new_tokens)
        return int(torch.maximum(now, later).max())

    def _load(self, row: int, s: Segment, used_slots: Tensor) -> Tensor:
        """Load the segment ``s`` of a row, and return how many slots each head uses afterwards [H].

        Each head's tokens go behind the ``used_slots`` [H] that the head uses already.
        """
        counts = torch.tensor(s.counts, device=used_slots.device)
        # ``head`` and ``slot`` [N] are the head and the slot of each token, one head after the other
        head = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        spans = [(int(start), int(start + count)) for start, count in zip(used_slots, counts, strict=True)]
        slot = torch.cat([torch.arange(start, end, device=counts.device) for start, end in spans])
        self.valid[row, head, slot] = True
        self.positions[row, head, slot] = list_tokens(s.positions, s)
        for name, t in s.state.items():
            self.state[name][row, head, slot] = list_tokens(t, s)
        self.store.load(row, head, slot, s)
        return used_slots + counts

    def view(self, now: Tensor) -> Slots:
        """Return the slots as methods see them when the newest token is at position ``now`` [B]."""
        return Slots(self.positions, self.valid, self.state, now=now[:, None, None], n=self.n, counts=self.counts)

    def add(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Make room for new tokens and write them into free slots.

        Raises UsageError if more tokens come at once than a head may hold.
        """
        b, h, _ = self.valid.shape
        t = k.shape[2]
        least = int(self.budget.min())
        if t > least:
            raise UsageError(f"{t} tokens at once do not fit into a budget of {least}: lower chunk=")
        self.newest = positions
        self._evict(t)
        # the sort puts free slots first; the store keeps ``free`` until the next step, and a view would keep the order
        # of all slots alive
        free = (~self.valid).int().sort(dim=-1, descending=True, stable=True).indices[..., :t].clone()
        # kv heads are repeated for the stored heads, which choose their tokens apart
        new_k = k.repeat_interleave(h // k.shape[1], dim=1)
        new_v = v.repeat_interleave(h // v.shape[1], dim=1)
        self.store.add(free, new_k, new_v, self.valid)
        self.positions.scatter_(2, free, positions[:, None].expand(b, h, t).to(torch.int32))
        self.valid.scatter_(2, free, True)
        initial = self.evictor.new_token_state(new_k, new_v)
        for name, s in self.state.items():
            index = expand_slots(free, s)
            new_state = initial.get(name)
            if new_state is None:
                # a reused slot still has the state of its evicted token, so that state is overwritten with zeros
                new_state = torch.zeros_like(index, dtype=s.dtype)
            self.state[name] = s.scatter(2, index, new_state)
        self.most = torch.maximum(self.most, self.held().amax(dim=1))

    def _evict(self, new: int) -> None:
        """Free slots for ``new`` tokens in each head, as the method decides. ``newest`` has their positions already."""
        if self.recent is not None:
            # a method that chooses again evicts in some steps only, and its slots have room until the next choice
            for u in self.recent.list_due(new, self.evictor.every):
                self.valid[u] = self._choose_slots(u, self.recent)
            return
        # the best ``budget - new`` tokens stay, so that a head holds ``budget`` with the new ones
        scores = self.evictor.keep_scores(self.view(self.newest[:, -1])).expand_as(self.valid)
        self.valid &= rank_slots(scores, self.positions, self.valid) < self.budget - new

    def _choose_slots(self, u: int, recent: RecentQueries) -> Tensor:
        """Return a mask [H, S] of the used slots of row ``u`` that its method keeps when it chooses again."""
        in_use = self.valid[u]
        # all heads of the row hold equally many tokens, so head 0 has the number of each
        order = order_by_position(self.positions[u], in_use)[:, : int(in_use[0].sum())]
        k, v = self.store.tokens_of_row(u)
        positions = gather_slots(self.positions[u], order)
        # ``slot`` is selected with its token, so that it shows afterwards which slots stay
        segment = Segment(gather_slots(k, order), gather_slots(v, order), positions, state={"slot": order})
        cache = LayerCache(
            (segment,),
            seen=recent.seen[u],
            heads=len(in_use),
            query_heads=recent.query_heads,
            prompt=int(self.n[u]),
        )
        chosen = self.evictor.choose_again(cache, recent.observation(u, positions))
        return torch.zeros_like(in_use).scatter_(1, only_segment(chosen).state["slot"], True)

    def attend(self, query: Tensor, scale: float, window: int | None) -> Tensor:
        """Return attention [B, Hq, T, D] of the newest T tokens, query [B, Hq, T, D], over all slots.

        The method folds the attention weights into its running state. ``window`` is not read: a text under a method
        that evicts may not outgrow the model's sliding window (``check_window``).
        """
        query_positions = self.newest
        if self.recent is not None:
            # recorded at its own position, before ``_attend`` may turn it to that of a slot
            self.recent.add(query)
        attention = self._attend(query, scale)
        probs = attention.probs
        if self.evictor.estimates:
            # the method folds attention over its own approximate keys, not the attention that made the output
            turn = attention.read or as_they_are

            def estimate(keys: Tensor) -> Tensor:
                """Return the method's approximate keys, turned to the positions of their slots if they are rolled."""
                return self.evictor.estimate(turn(keys))

            probs = self._compute_weights(attention.query.float(), scale, query_positions, estimate)
        self.state = self.state | dict(self.evictor.fold(self.view(query_positions[:, -1]), probs))
        return attention.out

    def attend_again(self, query: Tensor, scale: float, window: int | None) -> Tensor:
        # the method's running state counts the layer's own queries only, so nothing is folded here
        return self._attend(query, scale).out

    def _attend(self, query: Tensor, scale: float) -> _SlotAttention:
        """Return the attention of the newest T tokens, query [B, Hq, T, D], over all slots. No state changes."""
        read: Read = None
        if self.rotary is not None:
            query, read = self._turn_to_slots(query, self.newest, self.rotary)
        probs = self._compute_weights(query, scale, self.newest, read)
        out = weigh_rounded(probs, query.dtype, self.store.weigh)
        return _SlotAttention(out, probs, query=query, read=read)

    def _turn_to_slots(self, query: Tensor, query_positions: Tensor, rotary: Rotary) -> tuple[Tensor, Read]:
        """Return (query at the positions of the last slots, function that rotates keys to positions of their slots).

        A head's m tokens, in order of position, count as positions 0 ... m - 1. The T new tokens come last.
        """
        t = query.shape[2]
        order = order_by_position(self.positions, self.valid)
        # rank is the inverse permutation of order: rank[order[i]] = i
        rank = torch.empty_like(order)
        rank.scatter_(2, order, torch.arange(order.shape[2], device=order.device).expand_as(order))
        # heads may hold different numbers of tokens, so each head counts its own
        group = query.shape[1] // self.valid.shape[1]
        counts = self.valid.sum(dim=-1).repeat_interleave(group, dim=1)
        # [B, Hq, T]: the new tokens take a head's last t positions
        last = counts[:, :, None] - t + torch.arange(t, device=query.device)

        def turn_keys(keys: Tensor) -> Tensor:
            """Return keys [B, H, S, D] turned from their own positions to the positions that equal their ranks."""
            return rotary.turn(keys, self.positions, rank)

        return rotary.turn(query, query_positions[:, None], last), turn_keys

    def _compute_weights(self, query: Tensor, scale: float, query_positions: Tensor, read: Read) -> Tensor:
        """Return attention weights [B, Hq, T, S] fp32 of query [B, Hq, T, D] at ``query_positions`` [B, T].

        ``read`` maps stored keys to the keys that are attended. None attends the stored keys.
        """
        b, hq, t, _ = query.shape
        h = self.valid.shape[1]
        by_head = self.store.compute_logits(query, scale, read).view(b, h, hq // h, t, -1)
        # positions of tokens and of queries, along the axes of logits [B, H, Hq / H, T, S]
        token_at = self.positions[:, :, None, None]
        query_at = query_positions[:, None, None, :, None]
        # new tokens see each other causally
        hidden = ~self.valid[:, :, None, None] | (token_at > query_at)
        if self.unattended_distance is not None:
            hidden |= token_at == query_at - self.unattended_distance[..., None, None]
        return softmax(by_head.masked_fill(hidden, -torch.inf).view(b, hq, t, -1), sinks_of(scale))

    def keep(self, at: Tensor) -> None:
        """Drop all rows except the ascending indices ``at``."""
        if self.recent is not None:
            self.recent.keep(at)
        self.budget = self.budget[at]
        self.n = self.n[at]
        self.most = self.most[at]
        self.newest = self.newest[at]
        self.counts = {name: t[at] for name, t in self.counts.items()}
        self.unattended_distance = take_entries(self.unattended_distance, at)
        self.store.keep(at)
        self.positions, self.valid = self.positions[at], self.valid[at]
        self.state = {name: s[at] for name, s in self.state.items()}

    def tokens(self) -> Tensor:
        return self.most

    def payload(self) -> list[int]:
        return self.store.payload(self.valid)

    def held(self) -> Tensor:
        """Return how many tokens each row and head holds [B, H]."""
        return self.valid.sum(dim=-1)

    def observation(self, u: int) -> Observation | None:
        if self.recent is None:
            return None
        return self.recent.observation(u, positions=None)

    def segments(self, u: int, cache: LayerCache) -> tuple[Segment, ...]:
        """Return the segments that row ``u`` holds now, each ascending in position.

        A segment is ragged if heads hold different numbers of tokens.
        """
        state = {name: s[u] for name, s in self.state.items()}
        # keys and values are empty here, because the store fills them in
        nothing = self.positions.new_zeros(self.positions.shape[1], 0, 0)
        return self.store.segments(u, Segment(nothing, nothing, self.positions[u], state=state), self.valid[u])


def _find_budgets(row: StoredRow, evictor: Evictor, room: Room) -> list[int]:
    """Return how many tokens each head of a row may hold. A row that is a single head has one number."""
    # a head holds at most all tokens of the text, so that a larger budget needs no more slots
    most_tokens = row.cache.seen + room.tokens
    if row.size is not None:
        return [min(row.size, most_tokens)]
    if evictor.every:
        # a head grows until its method chooses again, so it needs room for the most tokens until then
        _, most = evictor.tokens_after(row.cache, row.layer, room.tokens)
        return most
    return [min(budget, most_tokens) for budget in evictor.head_budgets(row.cache, row.layer)]


def rank_slots(scores: Tensor, positions: Tensor, among: Tensor) -> Tensor:
    """Return each slot's rank by its score in scores [..., S]. The highest score has rank 0.

    Slots with equal scores rank by position. Slots not marked in ``among`` come last.
    """
    scores = scores.masked_fill(~among, -torch.inf)
    by_position = order_by_position(positions, among)
    # a stable sort keeps the order of position among equal scores
    best_first = scores.gather(-1, by_position).sort(dim=-1, descending=True, stable=True).indices
    order = by_position.gather(-1, best_first)
    ranking = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, ranking)

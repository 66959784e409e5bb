"""Keys, or values, of rows whose older tokens are packed: packed buffers that grow, and a ring of exact tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvbench.kv.own_values import are_stored
from kvbench.kv.packed import Packed
from kvbench.kv.partly_packed import Residual, allocate_buffers
from kvbench.storage.channels import pick_channels
from kvbench.storage.format import Room
from kvbench.storage.row_segments import per_place, size_with_room, stack_channels, take_entries, with_more_room


class StoredHalf(NamedTuple):
    """The keys, or the values, of one row as a segment holds them.

    packed: the older tokens [H, Lq, .].
    exact: the newest tokens [H, L - Lq, D].
    channels: [H, C], the channels that packed tokens keep; None: all.
    """

    packed: Packed
    exact: Tensor
    channels: Tensor | None


class PackedHalf:
    """The keys, or the values, of U rows: the older tokens packed, and the newest tokens exact in a ring.

    The ring has S slots. Token t of a row is in slot t mod S. Of a row's L tokens the first Lq are packed.
    Shapes: H stored heads, T new tokens, D head dimension, C channels that packed tokens keep.

    residual: the rule for how many of the newest tokens stay exact.
    pack: the function that packs tokens.
    grows: False if tokens after the prompt stay exact.
    step: how many tokens are coded together; they are packed at once.
    codes: the packed tokens [U, H, ., C] of all rows, with room for more.
    ring: the exact tokens [U, H, S, D].
    packed, total: for each row, the number of packed tokens and of all tokens.
    channels: [U, H, C], the channels that packed tokens keep; None: all.
    most: the most steps of tokens that can be packed before the batch ends.
    seen: [U, 1, T, 1], how many tokens each new query sees as packed; None if all queries see the same number.
    before: for each row, how many tokens were packed before the newest step, if ``seen`` is set.
    """

    def __init__(
        self,
        rows: Sequence[StoredHalf],
        residual: Residual,
        pack: Callable[[Tensor], Packed],
        room: Room,
        grows: bool = True,
    ) -> None:
        """Load the rows, which have one format.

        residual: the rule for how many of the newest tokens stay exact.
        pack: the function that packs tokens.
        room: the tokens still to come.
        grows: False if tokens after the prompt stay exact.
        """
        first = rows[0]
        self.residual = residual
        self.pack = pack
        self.grows = grows
        self.step = first.packed.step
        self.packed = [row.packed.shape[1] for row in rows]
        self.total = [row.packed.shape[1] + row.exact.shape[1] for row in rows]
        exact_now = max(row.exact.shape[1] for row in rows)
        if grows:
            most_packed = max(residual.packed(total + room.tokens) for total in self.total)
            # a rule that keeps everything exact has no bound, so the ring is bounded by the tokens that can come
            most_exact = min(residual.most, max(self.total) + room.tokens)
        else:
            most_packed = max(self.packed)
            most_exact = exact_now + room.tokens
        self.most = most_packed // self.step
        # the buffers hold the tokens that are packed now, at least one step, and grow as more are packed
        steps_now = max(max(self.packed) // self.step, 1)

        def make_buffer(t: Tensor) -> Tensor:
            """Return a buffer of zeros for all rows, with room for ``steps_now`` steps of a row's codes or scales t."""
            # axis 1 of a packed tensor counts steps: single tokens, or groups of tokens that are coded together
            return t.new_zeros(len(rows), t.shape[0], steps_now, *t.shape[2:])

        self.codes = allocate_buffers([row.packed for row in rows], make_buffer)
        # a step writes its tokens before the oldest ones leave, so the ring has room for both
        slots = max(most_exact, exact_now) + room.at_once
        self.ring = first.exact.new_zeros(len(rows), first.exact.shape[0], slots, first.exact.shape[2])
        self.channels = stack_channels([row.channels for row in rows])
        self.seen: Tensor | None = None
        self.before = self.packed
        for u, row in enumerate(rows):
            for buffer, codes in zip(self.codes.payload(), row.packed.payload(), strict=True):
                buffer[u, :, : codes.shape[1]] = codes
            # exact tokens are those behind the packed ones; token t is in slot t mod S
            token = torch.arange(self.packed[u], self.total[u], device=row.exact.device)
            self.ring[u, :, token % slots] = row.exact

    @property
    def stored(self) -> bool:
        """True if the tokens have channels. The values of keys that are their own values have none."""
        return are_stored(self.ring)

    @property
    def slots(self) -> int:
        """The number S of the ring's slots."""
        return self.ring.shape[2]

    def add(self, x: Tensor) -> None:
        """Write new tokens x [U, Hk, T, D] into the ring. Their kv heads are repeated for the H stored heads."""
        heads, tokens = self.ring.shape[1], x.shape[2]
        if heads != x.shape[1]:
            x = x.repeat_interleave(heads // x.shape[1], dim=1)
        span = self._find_ring_span(self.total, tokens)
        if span is not None:
            self.ring[:, :, span] = x
        else:
            slot = (self.as_tensor(self.total)[:, None] + torch.arange(tokens, device=x.device)) % self.slots
            row = torch.arange(len(x), device=x.device)[:, None]
            # with two index tensors [U, T], the indexed axes come first: [U, T, H, D]
            self.ring[row, :, slot] = x.transpose(1, 2)
        self.total = [total + tokens for total in self.total]

    def set_seen(self, tokens: int, settles_first: bool) -> None:
        """Set ``seen``: how many tokens each of several new tokens reads as packed.

        A token that came in a step of its own would find fewer tokens packed than the tokens after it. So tokens that
        come together get a number each.

        tokens: the number of new tokens.
        settles_first: True if a token is packed before its own step attends.
        """
        # a copy, because packing changes the list itself
        self.before = list(self.packed)
        # new token i follows total - tokens + i other tokens, and counts itself if packing precedes attention
        counts_itself = 1 if settles_first else 0
        seen_by_row = []
        for total, packed in zip(self.total, self.packed, strict=True):
            seen_by_query = [packed] * tokens
            if self.grows:
                first_count = total - tokens + counts_itself
                for i in range(tokens):
                    seen_by_query[i] = max(packed, self.residual.packed(first_count + i))
            seen_by_row.append(seen_by_query)
        self.seen = torch.tensor(seen_by_row, device=self.ring.device)[:, None, :, None]

    def list_columns(self) -> Tensor:
        """Return for each ring slot [U, S] the index in its row of the token that it holds.

        A slot that is empty, or whose token all queries read as packed, gets the number of tokens of the longest row.
        That is one more than any token's index.
        """
        # if queries see different tokens as packed, tokens that the newest step packed may still be read as exact ones
        packed_for_all = self.packed if self.seen is None else self.before
        newest = self.as_tensor(self.total)[:, None] - 1
        first_exact = self.as_tensor(packed_for_all)[:, None]
        slot = torch.arange(self.slots, device=self.ring.device)
        # a slot holds the newest token t with t mod S = slot
        token = newest - (newest - slot) % self.slots
        return token.masked_fill((token < first_exact) | (token < 0), max(self.total))

    @property
    def even(self) -> bool:
        """True if all rows hold equally many tokens, and equally many packed tokens."""
        return len(set(self.total)) == 1 and len(set(self.packed)) == 1

    @property
    def alike(self) -> bool:
        """True if rows are ``even``, and all queries see the same tokens as packed."""
        return self.seen is None and self.even

    def read_exact(self) -> Tensor:
        """Return the exact tokens [U, H, L - Lq, D] in order. The rows must be ``alike``."""
        start, count = self.packed[0] % self.slots, self.total[0] - self.packed[0]
        tokens = self.ring[:, :, start : start + count]
        missing = count - tokens.shape[2]
        if missing == 0:
            return tokens
        # the ring wraps around: after its last slot the tokens continue in the first
        return torch.cat([tokens, self.ring[:, :, :missing]], dim=2)

    def old(self) -> Packed:
        """Return a view of the packed tokens [U, H, Lq, C], where Lq is the largest number of packed tokens in a row.

        In rows with fewer packed tokens, the rest is undefined.
        """
        return self.codes.tokens(0, max(self.packed))

    def settle(self) -> None:
        """Pack all tokens that ``residual`` no longer keeps exact."""
        rows = self._find_rows_to_pack()
        while rows:
            self._pack_block(rows)
            rows = self._find_rows_to_pack()

    def _find_rows_to_pack(self) -> Sequence[int]:
        """Return the rows that have exact tokens to pack, because ``residual`` no longer keeps them exact."""
        if not self.grows:
            return ()
        if self.even:
            # rows of a batch often are: one comparison then replaces hundreds in every layer
            if self.residual.packed(self.total[0]) > self.packed[0]:
                return range(len(self.total))
            return ()
        return [u for u, total in enumerate(self.total) if self.residual.packed(total) > self.packed[u]]

    def _pack_block(self, rows: Sequence[int]) -> None:
        """Pack the oldest exact tokens of ``rows``: in each row as many as the row with the fewest has to pack."""
        block = min(self.residual.packed(self.total[u]) - self.packed[u] for u in rows)
        span = None
        if len(rows) == len(self.total):
            span = self._find_ring_span(self.packed, block)
        if span is None:
            self._pack_slots(rows, block)
        else:
            self._pack_span(span)
        for u in rows:
            self.packed[u] += block

    def _pack_span(self, span: slice) -> None:
        """Pack the tokens in the ring slots ``span`` of all rows, which have equally many packed tokens.

        Slices of the ring and of the buffers replace the slower indices of ``_pack_slots``.
        """
        coded = self._pack_tokens(self.ring[:, :, span], rows=None)
        first = self.packed[0] // self.step
        end = first + (span.stop - span.start) // self.step
        self._reserve(end)
        for buffer, codes in zip(self.codes.payload(), coded.payload(), strict=True):
            buffer[:, :, first:end] = codes

    def _pack_slots(self, rows: Sequence[int], block: int) -> None:
        """Pack the ``block`` oldest exact tokens of each of ``rows``, whatever slots they are in."""
        row = self.as_tensor(rows)[:, None]
        packed = self.as_tensor([self.packed[u] for u in rows])[:, None]
        slot = (packed + torch.arange(block, device=row.device)) % self.slots
        # with two index tensors [U, T], the indexed axes come first: [U, T, H, D]
        exact = self.ring[row, :, slot].transpose(1, 2)
        some_rows = rows if len(rows) < len(self.total) else None
        coded = self._pack_tokens(exact, some_rows)
        self._reserve((max(self.packed[u] for u in rows) + block) // self.step)
        step = packed // self.step + torch.arange(block // self.step, device=row.device)
        for buffer, codes in zip(self.codes.payload(), coded.payload(), strict=True):
            buffer[row, :, step] = codes.transpose(1, 2)

    def _pack_tokens(self, x: Tensor, rows: Sequence[int] | None) -> Packed:
        """Return exact tokens x [U', H, T, D] packed. Their rows have the indices ``rows``; None: all rows in order."""
        channels = self.channels
        if rows is not None:
            channels = take_entries(channels, self.as_tensor(rows))
        if channels is not None:
            x = pick_channels(x, channels)
        return self.codes.pack_more(x, self.pack, rows)

    def _reserve(self, steps: int) -> None:
        """Make room in each row for the codes of ``steps`` times ``self.step`` tokens."""
        payload = list(self.codes.payload())
        # axis 2 of a buffer counts steps
        if payload[0].shape[2] < steps:
            size = size_with_room(steps, max(self.total) // self.step, self.most)
            self.codes = self.codes.holding([with_more_room(t, size) for t in payload], self.codes.frozen)

    def skip(self, tokens: int) -> None:
        """Count ``tokens`` more tokens in each row, for benchmarks that measure a step's cost and not its result.

        No token is packed: storage is filled with random numbers instead.
        """
        first = min(self.packed)
        self.total = [total + tokens for total in self.total]
        if self.grows:
            pairs = zip(self.packed, self.total, strict=True)
            self.packed = [max(packed, self.residual.packed(total)) for packed, total in pairs]
        self._reserve(max(self.packed) // self.step)
        for t in self.codes.tokens(first, max(self.packed)).payload():
            if t.is_floating_point():
                # these are not codes, but numbers such as scales and minima
                t.uniform_(0.01, 0.1)
            else:
                t.random_(0, 120)  # as 8-bit floats, bytes below 120 are finite numbers
        self.ring.normal_()

    def _find_ring_span(self, first: Sequence[int], count: int) -> slice | None:
        """Return the slice of ring slots that hold ``count`` tokens of every row.

        ``first`` is the index of each row's first such token. Returns None if the rows differ in it, or if the slots
        pass the ring's end: then no single slice holds the tokens.
        """
        start = first[0] % self.slots
        if len(set(first)) > 1 or start + count > self.slots:
            return None
        return slice(start, start + count)

    def keep(self, at: Tensor) -> None:
        """Drop all rows except the indices ``at``."""
        self.codes, self.ring = self.codes[at], self.ring[at]
        self.channels = take_entries(self.channels, at)
        rows = at.tolist()
        self.packed = [self.packed[u] for u in rows]
        self.total = [self.total[u] for u in rows]

    def payload(self) -> list[int]:
        """Return the number of bytes that each row's packed and exact tokens take."""
        buffers = tuple(self.codes.payload())
        # all buffers have as many rows and steps as the first
        steps = buffers[0].shape[0] * buffers[0].shape[2]
        step_bytes = sum(per_place(t, steps) for t in buffers)
        token_bytes = per_place(self.ring, self.ring.shape[0] * self.slots)
        sizes = []
        for packed, total in zip(self.packed, self.total, strict=True):
            sizes.append(packed // self.step * step_bytes + (total - packed) * token_bytes)
        return sizes

    def held(self, u: int) -> tuple[Packed, Tensor]:
        """Return copies of what row u holds: (packed tokens [H, Lq, .], exact tokens [H, L - Lq, D])."""
        codes = self.codes[u]
        # the buffers have room for more tokens than are packed now
        steps = self.packed[u] // self.step
        payload = [t[:, :steps].clone() for t in codes.payload()]
        frozen = codes.frozen
        if frozen is not None:
            frozen = frozen.clone()
        # token t is in ring slot t mod S
        slots = torch.arange(self.packed[u], self.total[u], device=self.ring.device) % self.slots
        return codes.holding(payload, frozen), self.ring[u][:, slots]

    def as_tensor(self, numbers: Sequence[int]) -> Tensor:
        """Return ``numbers``, for example one for each row, as a tensor on the device of the tokens."""
        return torch.tensor(numbers, device=self.ring.device)

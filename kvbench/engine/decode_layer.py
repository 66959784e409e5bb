"""One layer of a decode batch: rows of any storage format, grouped so that each group is attended at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvbench.cache import ops
from kvbench.cache.partly_packed import Codes, side_by_side
from kvbench.cache.segment import LayerCache, Segment
from kvbench.models.interface import KvbenchLayer
from kvbench.storage import kernels
from kvbench.storage.attend import Masker, attend
from kvbench.storage.evicting_rows import Evictor, Rotary, SlotRows
from kvbench.storage.latent_rows import LatentRows, Lift
from kvbench.storage.packed_rows import CodedRows, RowCoder
from kvbench.storage.row_segments import Ragged, RowSegment, flat, format_of, stack

PADDING_LIMIT = 1.25


@dataclass(frozen=True)
class FormatGroup:
    """Rows of one storage format, padded to the longest. Where no kernel reads them, heads of ragged rows are attended
    one by one, as rows of a single head: ``heads`` then names the stored head of each, of ``stored`` in all."""

    rows: Tensor  # [U] rows of the batch
    segments: list[RowSegment | Ragged]
    masker: Masker | None
    heads: Tensor | None = None  # [U]
    stored: int = 0
    coded: CodedRows | LatentRows | None = None  # instead of segments, where tokens are packed or latents

    def add(self, k: Tensor, v: Tensor, positions: Tensor) -> None:
        """Take k, v [B, Hk, T, D] of T new tokens at positions [B, T], where these rows do not share the tail."""
        if isinstance(self.coded, LatentRows):
            latent_k, latent_v = self.coded.lift.new()
            self.coded.add(latent_k[self.rows], latent_v[self.rows], positions[self.rows])
        elif self.coded is not None:
            self.coded.add(self.tail(k), self.tail(v))

    def keep(self, at: Tensor, rows: Tensor) -> FormatGroup:
        """The entries ``at`` only, which are ``rows`` of the batch from now on."""
        heads = None if self.heads is None else self.heads[at]
        if self.coded is not None:
            self.coded.keep(at)
        return replace(self, rows=rows, segments=[s.rows(at) for s in self.segments], heads=heads)

    def split(self, query: Tensor) -> Tensor:
        """Of query [B, Hq, T, D], what these rows ask: [U, Hq, T, D], or [U, group, T, D] of single heads."""
        if self.heads is None:
            return query[self.rows]
        return query.unflatten(1, (self.stored, -1))[self.rows, self.heads]

    def tail(self, tail: Tensor) -> Tensor:
        """Of the tail [B, Hk, t, D], what these rows see: [U, Hk, t, D], or [U, 1, t, D]."""
        if self.heads is None:
            return tail[self.rows]
        return tail[self.rows, self.heads // (self.stored // tail.shape[1])][:, None]

    def put(self, out: Tensor, found: Tensor) -> None:
        """Write what ``attend`` found into out [B, Hq, T, D]."""
        if self.heads is None:
            out[self.rows] = found
        else:
            out.unflatten(1, (self.stored, -1))[self.rows, self.heads] = found


class RowLayer(KvbenchLayer):
    """One layer of a decode batch.

    Rows that only grow are grouped by storage format and share a preallocated dense tail; rows whose method evicts
    while decoding are grouped by method into reusable slots. ``attended`` [B] is the mean number of tokens that the
    last step attended in rows whose method masks (else nan); None if no row does. ``held`` is the peak of each row.
    """

    def __init__(
        self,
        caches: Sequence[LayerCache],
        capacity: int,
        windowed: bool = False,
        evictors: Sequence[Evictor | None] = (),
        layer: int = 0,
        rotary: Rotary | None = None,
        maskers: Sequence[Masker | None] = (),
        coders: Sequence[RowCoder | None] = (),
        at_once: int = 1,
        lift: Lift | None = None,
    ) -> None:
        super().__init__()
        device = caches[0].segments[0].k.device
        evicting = list(evictors) or [None] * len(caches)
        masking = list(maskers) or [None] * len(caches)
        coding = list(coders) or [None] * len(caches)
        by_kernel = not windowed and kernels.serves(device)
        growing = [
            part
            for i, e in enumerate(evicting)
            if e is None
            for part in _parts(i, caches[i].segments, masking[i], coding[i], by_kernel)
        ]
        self.groups = [_together(parts, windowed, capacity, at_once, lift) for parts in _alike(growing)]
        self.dense = any(g.coded is None for g in self.groups)
        self.attended: Tensor | None = None
        self.slots: list[tuple[Tensor, SlotRows]] = []
        by_stage: dict[object, list[int]] = {}
        for i, evictor in enumerate(evicting):
            if evictor is not None:
                by_stage.setdefault((evictor, *(format_of(s) for s in caches[i].segments)), []).append(i)
        for rows in by_stage.values():
            stage = evicting[rows[0]]
            assert stage is not None
            held = [caches[r] for r in rows]
            budgets = [[min(x, c.seen + capacity) for x in stage.head_budgets(c, layer)] for c in held]
            turn = rotary if stage.rolled else None
            self.slots.append((torch.tensor(rows, device=device), SlotRows(held, budgets, stage, turn, capacity)))
        self.capacity, self.used, self.new = capacity, 0, 0
        self.seen = max(c.seen for c in caches)
        self.starts = torch.tensor([c.seen for c in caches], device=device)
        self.grows = torch.tensor([e is None for e in evicting], device=device)
        self.most = torch.tensor([c.tokens for c in caches], device=device)

    def add(self, k: Tensor, v: Tensor) -> None:
        b, h, t, _ = k.shape
        if self.dense:
            if self.keys is None:
                self.keys = k.new_empty(b, h, self.capacity, k.shape[3])
                self.values = v.new_empty(b, h, self.capacity, v.shape[3])
            assert self.values is not None
            self.keys[:, :, self.used : self.used + t] = k
            self.values[:, :, self.used : self.used + t] = v
        positions = self.starts[:, None] + torch.arange(self.used, self.used + t, device=k.device)
        for g in self.groups:
            g.add(k, v, positions)
        for rows, slots in self.slots:
            slots.add(k[rows], v[rows], self.starts[rows] + self.used)
            self.most[rows] = torch.maximum(self.most[rows], slots.held().amax(dim=1))
        self.used += t
        self.new = t
        self.seen += t

    def attend(self, query: Tensor, scale: float, window: int | None) -> Tensor:
        before = self.used - self.new
        if not self.groups and len(self.slots) == 1:
            return self.slots[0][1].attend(query, scale, self.starts + before)
        floor = None
        if window is not None:
            floor = self.starts[:, None] + torch.arange(before, self.used, device=query.device) - window + 1
        sizes: list[Tensor] = []
        g = self.groups[0] if len(self.groups) == 1 and not self.slots else None
        if g is not None and g.heads is None and g.coded is None:
            out = attend(query, g.segments, self.tail(), scale, floor, self.starts, g.masker, sizes)
            self.attended = sizes[0] if sizes else None
            return out
        out = torch.empty_like(query)
        masked: list[tuple[Tensor, Tensor]] = []
        for g in self.groups:
            if g.coded is not None:
                found = g.coded.attend(g.split(query), scale, g.masker, sizes)
            else:
                tail = (g.tail(self.tail()[0]), g.tail(self.tail()[1]))
                below = None if floor is None else floor[g.rows]
                starts = self.starts[g.rows]
                found = attend(g.split(query), g.segments, tail, scale, below, starts, g.masker, sizes)
            g.put(out, found)
            if g.masker is not None:
                masked.append((g.rows, sizes[-1]))
        self.attended = _mean_of(masked, len(query)) if masked else None
        for rows, slots in self.slots:
            out[rows] = slots.attend(query[rows], scale, self.starts[rows] + before)
        return out

    def tail(self) -> tuple[Tensor, Tensor]:
        """Keys and values [B, Hk, used, D] of the tokens added since the batch was built, of rows that only grow."""
        assert self.keys is not None and self.values is not None
        return self.keys[:, :, : self.used], self.values[:, :, : self.used]

    def held(self) -> Tensor:
        """The most tokens that any head of each row has held so far [B]."""
        return self.most + self.used * self.grows

    def keep(self, rows: Tensor) -> None:
        """Go on with ``rows`` (ascending) only."""
        rows = rows.to(self.starts.device)
        self.grows, self.most = self.grows[rows], self.most[rows]
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]
        self.starts = self.starts[rows]
        new_index = {old: new for new, old in enumerate(rows.tolist())}

        def moved(old_rows: Tensor) -> tuple[Tensor, Tensor]:
            at = [i for i, old in enumerate(old_rows.tolist()) if old in new_index]
            places = [new_index[int(old_rows[i])] for i in at]
            return torch.tensor(at, device=rows.device), torch.tensor(places, device=rows.device)

        groups, slot_groups = [], []
        for group in self.groups:
            at, places = moved(group.rows)
            if len(at):
                groups.append(group.keep(at, places))
        for old_rows, slots in self.slots:
            at, places = moved(old_rows)
            if len(at):
                slots.keep(at)
                slot_groups.append((places, slots))
        self.groups, self.slots = groups, slot_groups
        self.dense = any(g.coded is None for g in groups)
        if not self.dense:
            self.keys = self.values = None

    def continued(self, cache: LayerCache) -> LayerCache:
        """The only row's cache with the tokens added since: a dense tail, or what its slots hold now."""
        if self.slots:
            return replace(cache, segments=self.slots[0][1].segments(0), seen=cache.seen + self.used)
        if isinstance(self.groups[0].coded, LatentRows):
            return replace(cache, segments=(self.groups[0].coded.segment(0),), seen=cache.seen + self.used)
        if not self.dense:
            return _repacked(cache, self.groups, self.used)
        k, v = self.tail()
        return ops.append(cache, k[0], v[0])


@dataclass(frozen=True)
class _Part:
    """What is attended as one row of a group: a whole row, or one head of a row whose heads are ragged."""

    row: int
    segments: tuple[Segment, ...]
    masker: Masker | None
    coder: RowCoder | None = None
    head: int | None = None
    stored: int = 0

    @property
    def format(self) -> tuple[object, ...]:
        return (self.masker, self.coder, self.head is None, self.stored, *(format_of(s) for s in self.segments))


def _parts(
    row: int, segments: tuple[Segment, ...], masker: Masker | None, coder: RowCoder | None, by_kernel: bool
) -> Iterator[_Part]:
    whole = by_kernel and masker is None and coder is None
    if whole or all(s.lengths is None for s in segments):
        yield _Part(row, segments, masker, coder)
        return
    stored = max(s.heads for s in segments)
    for head in range(stored):
        yield _Part(row, tuple(s.head(head // (stored // s.heads)) for s in segments), masker, coder, head, stored)


def _alike(parts: Sequence[_Part]) -> list[list[_Part]]:
    """The parts by storage format and mask, split so that padding to the longest keeps to PADDING_LIMIT."""
    by_format: dict[tuple[object, ...], list[_Part]] = {}
    for part in parts:
        by_format.setdefault(part.format, []).append(part)
    groups: list[list[_Part]] = []
    for alike in by_format.values():
        alike.sort(key=lambda p: sum(s.tokens for s in p.segments))
        current: list[_Part] = []
        for part in alike:
            if current and any(
                s.lengths is None and s.tokens > PADDING_LIMIT * max(f.tokens, 1)
                for s, f in zip(part.segments, current[0].segments, strict=True)
            ):
                groups.append(current)
                current = []
            current.append(part)
        groups.append(current)
    return groups


def _together(parts: Sequence[_Part], positions: bool, room: int, at_once: int, lift: Lift | None) -> FormatGroup:
    parts = sorted(parts, key=lambda p: (p.row, p.head or 0))
    device = parts[0].segments[0].k.device
    heads = None if parts[0].head is None else torch.tensor([p.head for p in parts], device=device)
    rows = torch.tensor([p.row for p in parts], device=device)
    if lift is not None:
        latent = LatentRows([p.segments[0] for p in parts], lift, room)
        return FormatGroup(rows, [], parts[0].masker, coded=latent)
    masker, coder, stored = parts[0].masker, parts[0].coder, parts[0].stored
    if coder is not None:
        coded = CodedRows([p.segments[0] for p in parts], coder, room, at_once)
        return FormatGroup(rows, [], masker, heads, stored, coded)
    columns = list(zip(*(p.segments for p in parts), strict=True))
    segments = [stack(column, positions) if column[0].lengths is None else flat(column) for column in columns]
    return FormatGroup(rows, segments, masker, heads, stored)


def _repacked(cache: LayerCache, groups: Sequence[FormatGroup], new: int) -> LayerCache:
    """The only row's cache with ``new`` more tokens, as its packed rows hold them."""
    (old,) = cache.segments
    fresh = torch.arange(cache.seen, cache.seen + new, dtype=torch.int32, device=old.positions.device)
    held = {
        -1 if g.heads is None else int(g.heads[u]): (g.coded.k.held(u), g.coded.v.held(u))
        for g in groups
        if isinstance(g.coded, CodedRows)
        for u in range(len(g.rows))
    }
    if old.lengths is None:
        (k_codes, k), (v_codes, v) = held[-1]
        positions = torch.cat([old.positions, fresh.expand(old.positions.shape[0], -1)], dim=1)
        grown = replace(old, k=k, v=v, positions=positions, codes=Codes(k_codes, v_codes))
        return replace(cache, segments=(grown,), seen=cache.seen + new)
    in_order = [held[h] for h in range(old.heads)]
    places = [torch.cat([p, fresh]) for p in old.positions[0].split(old.lengths.tolist())]
    k_codes, k_counts = side_by_side([k[0] for k, _ in in_order])
    v_codes, v_counts = side_by_side([v[0] for _, v in in_order])
    grown = replace(
        old,
        k=torch.cat([k[1] for k, _ in in_order], dim=1),
        v=torch.cat([v[1] for _, v in in_order], dim=1),
        positions=torch.cat(places)[None],
        lengths=old.lengths + new,
        codes=Codes(k_codes, v_codes, k_counts, v_counts),
    )
    return replace(cache, segments=(grown,), seen=cache.seen + new)


def _mean_of(masked: Sequence[tuple[Tensor, Tensor]], rows: int) -> Tensor:
    """Mean over the entries of each row: (rows, values) pairs -> [B], nan where there are none."""
    where, values = (torch.cat(parts) for parts in zip(*masked, strict=True))
    sums, counts = values.new_zeros(2, rows)
    return sums.index_add(0, where, values) / counts.index_add(0, where, torch.ones_like(values))

"""One layer of a decode batch. It keeps rows in their storage formats and attends all rows of one format at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kvbench.kv.segment import LayerCache, Segment, storage_bytes
from kvbench.models.interface import KvbenchLayer
from kvbench.storage import registry
from kvbench.storage.entries import attend_groups, mean_by_row, replace_heads, select_head
from kvbench.storage.format import Room, StoredRow


class RowLayer(KvbenchLayer):
    """One layer of a decode batch of B rows.

    formats: pairs (places in the batch, storage), one for each group of entries that are stored together.
    lift: the map from latents to keys and values if the layer's projections are low-rank, else None.
    attended: [B], the mean number of tokens attended in the most recent step, nan for rows whose method does not mask.
    It is None if no row's method masks.
    next: [B], the position of each row's next token.
    seen: the most tokens that a row has read.
    used: how many tokens have come since the layer was built.
    local: True for a local layer, which attends a window of tokens. Methods leave it alone.
    sources: for each row, the heads [Hq] whose outputs its query heads take; None if all take their own.
    """

    def __init__(self, rows: Sequence[StoredRow], room: Room) -> None:
        super().__init__()
        self.formats = registry.load(rows, room)
        seen = [row.cache.seen for row in rows]
        self.next = torch.tensor(seen, device=rows[0].cache.segments[0].k.device)
        self.seen = max(seen)
        self.used = 0
        # all rows belong to one layer of one model, so the first row speaks for all
        self.lift = rows[0].lift
        self.local = rows[0].cache.window is not None
        self.sources: list[Tensor | None] = []
        for row in rows:
            source = row.cache.copy_from
            if source is not None:
                source = source.long()
            self.sources.append(source)
        self.attended: Tensor | None = None
        self._answered = False  # whether the layer itself has attended the newest tokens

    def add(self, k: Tensor, v: Tensor) -> None:
        """Store new tokens k, v [B, Hk, T, D] of all rows. The first of them is at the position ``next``."""
        tokens = k.shape[2]
        positions = self.next[:, None] + torch.arange(tokens, device=k.device)
        if self.lift is not None:
            # low-rank projections store latents instead of the keys and values that the model computed
            k, v = self.lift.new()
        for entries, rows in self.formats:
            rows.add(entries.select_tokens(k), entries.select_tokens(v), entries.select_rows(positions))
        self._answered = False
        self.grow(tokens)

    def newest_positions(self, tokens: int) -> Tensor:
        return self.next[:, None] + torch.arange(-tokens, 0, device=self.next.device)

    def grow(self, tokens: int) -> None:
        """Count ``tokens`` new tokens of every row."""
        self.next = self.next + tokens
        self.used, self.seen = self.used + tokens, self.seen + tokens

    def join(self, other: RowLayer) -> None:
        """Append the rows of ``other``, the same layer of another batch. The storage of both stays where it is."""
        offset = len(self.next)
        # behind(0) keeps the entries' places, but marks that they are no longer the whole batch
        self.formats = [(entries.behind(0), stored) for entries, stored in self.formats]
        self.formats += [(entries.behind(offset), stored) for entries, stored in other.formats]
        self.next = torch.cat([self.next, other.next])
        self.seen = max(self.seen, other.seen)
        self.sources += other.sources

    def attend(self, query: Tensor, scale: float, window: int | None) -> Tensor:
        """Return the attention of all rows (``KvbenchLayer.attend``), computed for one storage format after the other.

        Sets ``attended`` at the first query after new tokens. Further queries come from later layers that share this
        layer's keys and values.
        """
        groups = []
        # a second query after the same tokens comes from a later layer that shares this layer's keys and values
        is_of_later_layer = self._answered
        for entries, rows in self.formats:
            attend = rows.attend_again if is_of_later_layer else rows.attend
            groups.append((entries, partial(attend, scale=entries.select_scale(scale), window=window)))
        out = attend_groups(query, groups)
        for b, source in enumerate(self.sources):
            if source is not None:
                # in out [B, Hq, T, D] each query head takes the output of its source head
                out[b] = out[b, source]
        if not is_of_later_layer:
            self.attended = mean_by_row([(entries, rows.attended) for entries, rows in self.formats], len(query))
        self._answered = True
        return out

    def held(self) -> Tensor:
        """Return the most tokens that any head of each row has held so far [B]."""
        most = torch.zeros_like(self.next)
        for entries, rows in self.formats:
            # a row has several entries if its heads are stored one by one
            most.scatter_reduce_(0, entries.rows, rows.tokens(), "amax")
        return most

    def payload(self) -> list[int]:
        """Return the bytes of keys and values that each row's tokens take."""
        sizes = [0] * len(self.next)
        for entries, rows in self.formats:
            for row, size in zip(entries.rows.tolist(), rows.payload(), strict=True):
                sizes[row] += size
        return sizes

    def keep(self, rows: Tensor) -> None:
        """Drop all rows except ``rows``, which ascend."""
        rows = rows.to(self.next.device)
        self.next = self.next[rows]
        new_row_of = {old_row: new_row for new_row, old_row in enumerate(rows.tolist())}
        self.sources = [self.sources[row] for row in new_row_of]
        formats, self.formats = self.formats, []
        for entries, stored in formats:
            # the indices of the entries that stay, and these entries in the new batch
            index, staying = entries.keep(new_row_of)
            # storage is rewritten only if some of its entries leave and others stay
            if 0 < len(index) < len(entries.rows):
                stored.keep(index)
            # storage without entries is dropped
            if len(index):
                self.formats.append((staying, stored))

    def continue_cache(self, cache: LayerCache, row: int = 0) -> LayerCache:
        """Return a copy of ``cache``, from which the row ``row`` was loaded, with the tokens added since then.

        No other layer may have joined this one, because ``used`` counts the new tokens of all rows alike.
        """
        seen = cache.seen + self.used
        segment_of_head: dict[int, Segment] = {}
        for entries, stored in self.formats:
            for entry in (entries.rows == row).nonzero().flatten().tolist():
                if entries.heads is None:
                    # this row is stored as one entry
                    segments = stored.segments(entry, cache)
                    return replace(cache, segments=segments, seen=seen, observed=stored.observation(entry))
                # the row is ragged: each head is an entry with one segment
                head = int(entries.heads[entry])
                (segment_of_head[head],) = stored.segments(entry, select_head(cache, head, entries.stored))
        (loaded,) = cache.segments
        head_segments = []
        for head in range(loaded.heads):
            if head in segment_of_head:
                head_segments.append(segment_of_head[head])
            else:
                # a head that copies another head has no entry and holds no tokens
                head_segments.append(loaded.head(head))
        return replace(cache, segments=(replace_heads(loaded, head_segments),), seen=seen)


def select_compressed(layers: Sequence[RowLayer]) -> list[RowLayer]:
    """Return the layers of a decode batch that methods compress, in the order of ``Cache.layers``."""
    return [layer for layer in layers if not layer.local]


def count_allocated(layers: Sequence[RowLayer]) -> int:
    """Return the bytes of all storage of a decode batch: tokens, padding, free slots, positions, and reserved room."""
    tensors: list[Tensor] = []
    for layer in layers:
        tensors.extend(_find_tensors(layer.formats))
    return storage_bytes(tensors)


def _find_tensors(value: object) -> Iterator[Tensor]:
    """Yield the tensors in a value: the value itself, or those in its items or, for a storage object, its attributes.

    Objects of classes outside kvbench.kv and kvbench.storage are left out: some lead to the model's own weights.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _find_tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _find_tensors(item)
    elif type(value).__module__.startswith(("kvbench.kv.", "kvbench.storage.")):
        for attribute in vars(value).values():
            yield from _find_tensors(attribute)

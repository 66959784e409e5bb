"""The storage formats, and the assignment of a batch's rows to them."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.storage.entries import Entries, Entry, grouped
from kvbench.storage.evicting_rows import EvictingRows
from kvbench.storage.exact_rows import ExactRows
from kvbench.storage.format import Format, Room, StoredRow
from kvbench.storage.latent_rows import LatentRows
from kvbench.storage.local_rows import LocalRows
from kvbench.storage.packed_rows import PackedRows

FORMATS: tuple[type[Format], ...] = (LocalRows, EvictingRows, LatentRows, PackedRows, ExactRows)
"""The formats in order of preference: a row is stored in the first that takes it."""


def load(rows: Sequence[StoredRow], room: Room) -> list[tuple[Entries, Format]]:
    """Return (places of a group's entries, format that holds them) for one layer of a batch.

    Entries are in one group if they have the same format and key, and if need be similar lengths.
    """
    by_format: dict[type[Format], list[Entry]] = {}
    for i, row in enumerate(rows):
        by_format.setdefault(next(f for f in FORMATS if f.takes(row)), []).append(Entry(i, row))
    loaded = []
    for kind, entries in by_format.items():
        sizes = [kind.head_sizes(e.row) for e in entries]
        entries = [
            part
            for e, size in zip(entries, sizes, strict=True)
            for part in ([e] if kind.takes_ragged and size is None else e.by_head(size))
        ]
        for group in grouped(entries, kind.key, any_length=kind.takes_ragged):
            loaded.append((Entries.of(group, len(rows)), kind([e.row for e in group], room)))
    return loaded

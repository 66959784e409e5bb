"""The storage formats, and how rows of a batch are assigned to them."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.storage.entries import Entries, Entry, group_entries
from kvbench.storage.evicting_rows import EvictingRows
from kvbench.storage.exact_rows import ExactRows
from kvbench.storage.format import Format, Room, StoredRow
from kvbench.storage.latent_rows import LatentRows
from kvbench.storage.local_rows import CodedLocalRows, LocalRows
from kvbench.storage.packed_rows import PackedRows

# ExactRows takes every row, so it comes last
FORMATS: tuple[type[Format], ...] = (CodedLocalRows, LocalRows, EvictingRows, LatentRows, PackedRows, ExactRows)
"""The formats in order of preference. A row is stored in the first format that takes it."""


def load(rows: Sequence[StoredRow], room: Room) -> list[tuple[Entries, Format]]:
    """Store one layer of a batch, and return its groups as pairs (entries, format).

    ``entries`` are the places of a group's entries in the batch, and ``format`` stores and attends them. Entries share
    a group if they have the same format and key, and similar lengths if the format needs that.

    rows: the layer of each row.
    room: the room to reserve for tokens still to come.
    """
    by_format: dict[type[Format], list[Entry]] = {}
    for i, row in enumerate(rows):
        row_format = next(kind for kind in FORMATS if kind.takes(row))
        by_format.setdefault(row_format, []).append(Entry(i, row))
    groups = []
    for kind, row_entries in by_format.items():
        entries: list[Entry] = []
        for entry in row_entries:
            # heads that will hold different numbers of tokens are stored apart
            sizes = kind.head_sizes(entry.row)
            if kind.takes_ragged and sizes is None:
                entries.append(entry)
            else:
                entries.extend(entry.split_heads(sizes))
        for members in group_entries(entries, kind.key, any_length=kind.takes_ragged):
            groups.append((Entries.of(members, len(rows)), kind([entry.row for entry in members], room)))
    return groups

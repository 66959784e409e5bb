"""The samples behind a committed table in one small file. A reader can make the table again from it."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path

from kvbench.base.errors import UsageError
from kvbench.base.files import format_line, write_json
from kvbench.store.store import ResultStore


def pack(store: ResultStore, cells: Iterable[str], path: Path) -> None:
    """Write the records and samples of ``cells`` as gzipped JSON lines to ``path``. Equal content gives equal bytes.

    Raises UsageError for a cell without a record, whose samples could not be told from those of another result.
    """
    records = {}
    for cell in sorted(set(cells)):
        record = store.cell(cell)
        if record is None:
            raise UsageError(f"{store.folder(cell)} has no cell.json, so that its samples cannot be packed")
        records[cell] = record.record()
    path.parent.mkdir(parents=True, exist_ok=True)
    # gzip's header holds a name and a time unless both are empty; with them, equal content would give unequal bytes
    with path.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0) as out:
        for cell, cell_record in records.items():
            out.write(_encode_line({"cell": cell_record}))
            for line in store.lines(cell).values():
                out.write(_encode_line({"of": cell, "sample": line}))


def unpack(
    path: Path, store: ResultStore, wanted: Collection[str] | None = None, temporary: bool = False
) -> dict[str, int]:
    """Add the records and samples of ``path`` that ``store`` lacks. Return the number of added samples by cell id.

    ``wanted`` holds the ids of the cells to add; None adds all. ``temporary`` is True for a store that is thrown away.
    Raises UsageError if ``path`` is not a file of samples.
    """
    # both are by the id of the cell
    records = {}
    samples = defaultdict(list)
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for entry in map(json.loads, lines):
                if "cell" in entry:
                    records[str(entry["cell"]["id"])] = entry["cell"]
                else:
                    samples[entry["of"]].append(entry["sample"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not a file of samples: {error}") from None
    added = {}
    for cell, record in records.items():
        if wanted is not None and cell not in wanted:
            continue
        if store.cell(cell) is None:
            # a store that is thrown away need not survive a power cut
            write_json(store.folder(cell) / "cell.json", record, sync=not temporary)
        stored = store.lines(cell)
        # ``format_line`` adds a checksum; each stored line also names the cell's id, which the store's lines lack
        missing = [format_line(sample | {"cell": cell}) for sample in samples[cell] if sample["id"] not in stored]
        if missing:
            # append, never write anew: the file may already hold samples of another run
            with (store.folder(cell) / "samples-0.jsonl").open("a", encoding="utf-8") as out:
                out.writelines(missing)
        added[cell] = len(missing)
    return added


def _encode_line(entry: object) -> bytes:
    """Return an entry as a line of JSON in UTF-8. Its keys are sorted, so that equal entries give equal bytes."""
    return (json.dumps(entry, ensure_ascii=False, sort_keys=True) + "\n").encode()

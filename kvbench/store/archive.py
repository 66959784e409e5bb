"""The samples behind a committed table in one small file. A reader can make the table again from it."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from kvbench.base.errors import Damaged, UsageError
from kvbench.base.files import Line, format_line, parse_finite_json, write_json
from kvbench.store.results import CellRecord, Sample
from kvbench.store.store import ResultStore

ID = re.compile(r'"id": "([^"]*)"')
"""The id in the text of a sample that cannot be parsed."""


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


def read(path: Path, wanted: Collection[str] | None = None) -> tuple[dict[str, Line], dict[str, list[Line]]]:
    """Return (the records of cells, the lines of their samples) in a file of samples, by the id of the cell.

    wanted: the ids of the cells to return; None returns all.

    Raises Damaged, with the sample if it is one, if ``path`` is no whole file of samples.
    """
    records: dict[str, Line] = {}
    samples: dict[str, list[Line]] = defaultdict(list)
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for number, text in enumerate(lines, 1):
                entry = _parse_entry(number, text)
                cell = str(entry["cell"]["id"] if "cell" in entry else entry["of"])
                if wanted is not None and cell not in wanted:
                    continue
                if "cell" in entry:
                    CellRecord.read(entry["cell"])
                    records[cell] = entry["cell"]
                else:
                    sample = entry["sample"]
                    if not isinstance(sample["id"], str):
                        raise TypeError(f"{sample['id']!r} is no id")
                    # the samples of another engine have no bytes, and are no ``Sample``
                    if "full16" in sample:
                        Sample.read(sample)
                    samples[cell].append(sample)
    except UsageError as error:
        raise Damaged(f"{path}: {error}") from None
    # gzip raises EOFError and zlib.error for a file that is cut or changed
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"{path} is not a file of samples: {error}") from None
    return records, samples


def _parse_entry(number: int, text: str) -> Any:
    """Return the entry in a line of a file of samples. Raises Damaged, with the sample's id if it has one."""
    try:
        return parse_finite_json(text)
    except ValueError as error:
        named = ID.search(text)
        if named is None:
            raise ValueError(f"line {number}: {error}") from None
        raise Damaged(f"the sample of {named.group(1)} is damaged: {error}") from None


def unpack(
    path: Path, store: ResultStore, wanted: Collection[str] | None = None, temporary: bool = False
) -> dict[str, int]:
    """Add the records and samples of ``path`` that ``store`` lacks. Return the number of added samples by cell id.

    ``wanted`` holds the ids of the cells to add; None adds all. ``temporary`` is True for a store that is thrown away.
    Raises Damaged if ``path`` is not a file of samples.
    """
    records, samples = read(path, wanted)
    added = {}
    for cell, record in records.items():
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

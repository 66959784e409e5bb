"""The samples behind a committed table in one small file, from which a reader can make the table again."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

from kvbench.errors import UsageError
from kvbench.files import line_of, write_json
from kvbench.run.store import ResultStore


def pack(store: ResultStore, cells: Iterable[str], path: Path) -> None:
    """Write the records and samples of ``cells`` as gzipped JSON lines. Equal content gives equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0) as out:
        for cell in sorted(set(cells)):
            record = store.cell(cell)
            out.write(_line({"cell": None if record is None else record.record()}))
            for line in store.lines(cell).values():
                out.write(_line({"of": cell, "sample": line}))


def unpack(path: Path, store: ResultStore) -> list[str]:
    """Write the records and samples in ``path`` into an empty store and return the ids of its cells."""
    cells = []
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                entry = json.loads(line)
                if "cell" in entry:
                    cells.append(str(entry["cell"]["id"]))
                    write_json(store.folder(cells[-1]) / "cell.json", entry["cell"])
                else:
                    with (store.folder(entry["of"]) / "samples-0.jsonl").open("a", encoding="utf-8") as out:
                        out.write(line_of(entry["sample"]))
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{path} is not a file of samples: {error}") from None
    return cells


def restore(path: Path, store: ResultStore) -> int:
    """Add to ``store`` the samples of ``path`` that it lacks, so that a run goes on there. Return their number."""
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        packed = ResultStore(Path(folder))
        for cell in unpack(path, packed):
            record, known = packed.cell(cell), store.lines(cell)
            if record is not None and store.cell(cell) is None:
                write_json(store.folder(cell) / "cell.json", record.record())
            missing = [line for i, line in packed.lines(cell).items() if i not in known]
            if missing:
                with (store.folder(cell) / "samples-0.jsonl").open("a", encoding="utf-8") as out:
                    out.writelines(map(line_of, missing))
            count += len(missing)
    return count


def _line(entry: object) -> bytes:
    return (json.dumps(entry, ensure_ascii=False, sort_keys=True) + "\n").encode()

"""Measured samples on disk: results/cells/<id>/{cell.json, samples-<shard>.jsonl, metrics.json, refused-*.json}.

A sample is one appended line with a checksum. A torn or damaged line is reported and its example measured again;
nothing that was measured is ever rewritten.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from kvbench.errors import KvbenchError, UsageError
from kvbench.plan import Cell

Sample = dict[str, Any]


@dataclass
class Writer:
    """An open cell: appends samples to this shard's own file, under a lock that ends with the process."""

    path: Path
    lock: TextIO
    out: TextIO
    provenance: int

    def append(self, sample: Mapping[str, Any]) -> None:
        """Add one line, with the index of this process in the cell's provenance.

        A full disk is one clear error and loses nothing written before.
        """
        try:
            self.out.write(line_of({**sample, "provenance": self.provenance}))
            self.out.flush()
        except OSError as error:
            raise _disk(error, self.path) from None

    def close(self) -> None:
        """Flush to the device and let go of the lock."""
        with suppress(OSError, ValueError):
            self.out.flush()
            os.fsync(self.out.fileno())
        with suppress(OSError):
            self.out.close()
        self.lock.close()


@dataclass
class ResultStore:
    """All cells below one results folder. ``warnings`` collects what was found damaged."""

    root: Path
    warnings: list[str] = field(default_factory=list)

    def folder(self, cell_id: str) -> Path:
        return self.root / "cells" / cell_id

    def check(self) -> None:
        """Raise UsageError if the folder cannot hold results."""
        cells = self.root / "cells"
        try:
            cells.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=cells):
                pass
        except OSError as error:
            raise UsageError(
                f"results={self.root} cannot be written ({error.strerror}): give results=FOLDER that can"
            ) from None

    def open(self, cell: Cell, provenance: Mapping[str, Any], shard: int, mix: bool) -> Writer:
        """Start or resume a cell; refuses another device or torch version than its samples have, unless ``mix``."""
        folder = self.folder(cell.id)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            index = self._register(cell, provenance, mix)
            lock = (folder / f"lock-{shard}").open("w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise KvbenchError(
                    f"another process is measuring {cell.label} on {cell.column} (cell {cell.id}, shard {shard}); "
                    "wait for it, or give this one another shard with -m shard=0,1"
                ) from None
            path = folder / f"samples-{shard}.jsonl"
            _end_torn_line(path)
            return Writer(path, lock, path.open("a", encoding="utf-8"), index)
        except OSError as error:
            raise _disk(error, folder) from None

    def cell(self, cell_id: str) -> dict[str, Any] | None:
        """The cell's record, or None if it was never started."""
        return read_json(self.folder(cell_id) / "cell.json")

    def samples(self, cell_id: str) -> dict[str, Sample]:
        """The cell's intact samples by example id, in the order of their ids; damaged lines become warnings."""
        found: dict[str, Sample] = {}
        for path in sorted(self.folder(cell_id).glob("samples-*.jsonl")):
            try:
                lines = path.read_bytes().split(b"\n")
            except OSError as error:
                raise UsageError(f"{path} cannot be read: {error.strerror}") from None
            for number, line in enumerate(lines, 1):
                if not line:
                    continue
                sample = parse_line(line)
                if sample is not None:
                    found.setdefault(str(sample["id"]), sample)
                elif number < len(lines):
                    self._warn(f"{path}:{number} is damaged; that example counts as not measured")
        return dict(sorted(found.items()))

    def refuse(self, cell: Cell, reason: str, example: str) -> None:
        """Record that the cell must not be reported, why, and the example that showed it."""
        path = self.folder(cell.id) / f"refused-{zlib.crc32(example.encode()):08x}.json"
        write_json(path, {"reason": reason, "example": example})

    def refusals(self, cell_id: str) -> dict[str, str]:
        """Reasons by example for which the cell was refused."""
        records = [read_json(p) or {} for p in sorted(self.folder(cell_id).glob("refused-*.json"))]
        return {str(r.get("example")): str(r.get("reason")) for r in records}

    def refusal(self, cell_id: str) -> str | None:
        """Why the cell must not be reported, or None."""
        return next(iter(self.refusals(cell_id).values()), None)

    def clear_refusal(self, cell_id: str, example: str) -> None:
        """The example that the cell was refused for has passed the audit."""
        (self.folder(cell_id) / f"refused-{zlib.crc32(example.encode()):08x}.json").unlink(missing_ok=True)

    def write_metrics(self, cell_id: str, metrics: Mapping[str, Any]) -> None:
        """Replace metrics.json in one step."""
        write_json(self.folder(cell_id) / "metrics.json", metrics)

    def cells(self) -> list[str]:
        """Ids of all cells that were started."""
        return sorted(p.parent.name for p in (self.root / "cells").glob("*/cell.json"))

    def _register(self, cell: Cell, provenance: Mapping[str, Any], mix: bool) -> int:
        """Write or extend the cell's record, one process at a time; returns this process's provenance index."""
        folder = self.folder(cell.id)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            record = self.cell(cell.id)
            if record is None:
                identity = {"id": cell.id, "label": cell.label, "column": cell.column, "identity": cell.identity}
                record = {**identity, "provenance": []}
            known: list[dict[str, Any]] = record["provenance"]
            if dict(provenance) not in known:
                self._check_same(cell, known, provenance, mix)
                known.append(dict(provenance))
                write_json(folder / "cell.json", record)
            return known.index(dict(provenance))

    def _check_same(self, cell: Cell, before: Iterable[Mapping[str, Any]], now: Mapping[str, Any], mix: bool) -> None:
        for old in before:
            for key in ("device", "torch", "calibration"):
                if old.get(key) != now.get(key) and not mix:
                    raise UsageError(
                        f"cell {cell.id} ({cell.label} on {cell.column}) was begun with {key} {old.get(key)}, this is "
                        f"{now.get(key)}: its numbers could differ. Use the same {key}, another results=FOLDER, or "
                        "mix=true to allow both"
                    )

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)


def line_of(sample: Mapping[str, Any]) -> str:
    """One JSON line that ends with the CRC-32 of everything before it."""
    body = json.dumps(dict(sample), ensure_ascii=False)
    return f'{body[:-1]}, "crc": {zlib.crc32(body.encode())}}}\n'


def parse_line(line: bytes) -> Sample | None:
    """The sample of one line without its checksum; None if it is torn or damaged."""
    try:
        text = line.decode("utf-8")
        body, mark, crc = text.rpartition(', "crc": ')
        if not mark or int(crc.rstrip("}")) != zlib.crc32(f"{body}}}".encode()):
            return None
        sample = json.loads(f"{body}}}")
    except ValueError:
        return None
    return sample if isinstance(sample, dict) and "id" in sample else None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file in one step: readers see the old or the new one, never half."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False, default=str), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise _disk(error, path) from None


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON file's content, None if it does not exist; raises UsageError if it is damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise UsageError(f"{path} cannot be read ({error}); move it away to measure this cell again") from None
    return content


def _end_torn_line(path: Path) -> None:
    """Close a line that an interrupted process left open, so that the next one starts on its own."""
    if path.exists() and path.stat().st_size:
        with path.open("rb+") as f:
            f.seek(-1, os.SEEK_END)
            if f.read(1) != b"\n":
                f.write(b"\n")


def _disk(error: OSError, path: Path) -> KvbenchError:
    if error.errno == errno.ENOSPC:
        return KvbenchError(
            f"the disk is full: {path} could not be written. Everything before is safe; free some space and run the "
            "same command again to go on"
        )
    return KvbenchError(f"{path} could not be written ({error.strerror}). Everything before is safe")

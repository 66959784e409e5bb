"""Remove waste from a store: cells without an answer, remains of killed processes, and lines that do not count.

Intact samples stay, unless their cell is named. A cell that is being measured is not touched.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import IO

from kvbench.base.errors import KvbenchError, UsageError
from kvbench.base.files import disk_error, is_blocked, lock, read_lines
from kvbench.store.results import Status
from kvbench.store.store import DAMAGED, ResultStore

EMPTY = ("never", "failed", "interrupted")
"""The statuses in which a cell without samples is waste."""
MARKS = ("state-*.json", "traceback-*.txt")
"""The names of files that say how a run ended early."""
STALE_S = 60.0
"""The age in seconds from which a temporary file counts as left behind."""
LOCK_WAIT_S = 0.3
"""Seconds to wait for each lock of a cell. A process that measures the cell holds a lock for longer."""


@dataclass(frozen=True)
class Removal:
    """One file, folder or block of lines to remove from a store.

    kind: what is removed, and how. A cell, a mark, a lock or a temporary file is deleted. For ``lines``, the lines that
        do not count are moved from the file into another one. For ``aside``, the path is moved out of the cell.
    cell: the cell's id; '' for a folder that an earlier cleaning renamed and did not delete.
    path: the file or folder.
    about: a description in words.
    """

    kind: str
    cell: str
    path: Path
    about: str


def list_removals(store: ResultStore, cells: Collection[str], whole: bool) -> list[Removal]:
    """Return the removals for ``cells``: with ``whole`` each cell with its samples, else only its waste.

    Cells that are being measured are left out.
    """
    removals = []
    for cell in cells:
        if not store.measuring(cell):
            if whole:
                try:
                    n = len(store.lines(cell))
                except UsageError:
                    about = "unreadable"
                else:
                    about = f"{n} samples" if n else "nothing measured"
                removals.append(Removal("cell", cell, store.folder(cell), about))
            else:
                removals += _list_waste(store, cell)
    return removals


def list_leftovers(store: ResultStore) -> list[Removal]:
    """Return the folders that an earlier cleaning renamed and did not delete."""
    folder = store.root / "cells"
    paths = sorted(p for p in folder.glob(".removed-*") if not p.is_symlink())
    return [Removal("cell", "", path, "half removed") for path in paths]


def carry_out(store: ResultStore, removals: Collection[Removal]) -> None:
    """Carry out the removals of each cell under its locks. Raises KvbenchError if a process began to measure a cell.

    removals: as ``list_removals`` returns them, with all removals of one cell next to each other.
    """
    for cell, group in groupby(removals, key=attrgetter("cell")):
        with ExitStack() as stack:
            # a folder that an earlier cleaning renamed belongs to no cell, and nobody measures it
            if cell:
                stack.enter_context(_locking_cell(store, cell))
            for removal in group:
                try:
                    _remove(store, removal)
                except OSError as error:
                    raise disk_error(error, removal.path) from None


def _list_waste(store: ResultStore, cell: str) -> Iterator[Removal]:
    """Yield the removals that lose no sample of a cell: the whole cell if it has no sample, else the waste beside them.

    The caller ensures that no process is measuring the cell.
    """
    folder = store.folder(cell)
    status = store.status(cell)
    if status.status == DAMAGED:
        # nobody knows what its samples were measured with: keep them, out of the way of a new measurement
        yield Removal("aside", cell, folder, f"{status.reason}; moved to {aside_path(store, cell).parent}")
        return
    if status.status in EMPTY and not status.n:
        # lines that do not count may be another cell's answers, and the only copy of them
        if any(path.is_file() and path.stat().st_size for path in folder.glob("samples-*.jsonl")):
            about = f"none of its lines count; moved to {aside_path(store, cell).parent}"
            yield Removal("aside", cell, folder, about)
        else:
            yield Removal("cell", cell, folder, f"{status.status}, nothing measured")
        return
    yield from _list_marks(store, cell, status)
    for path in sorted(p for p in folder.glob("*.tmp") if not p.is_dir()):
        # another process may be writing a young temporary file now, and may rename it at any moment
        with suppress(FileNotFoundError):
            age_s = time.time() - path.lstat().st_mtime
            if age_s > STALE_S:
                yield Removal("temporary", cell, path, "half written")
    for path in sorted(folder.glob("samples-*.jsonl")):
        count = len(read_lines(path, cell).uncounted)
        if count:
            words = "1 line that does not count" if count == 1 else f"{count} lines that do not count"
            yield Removal("lines", cell, path, f"{words}, moved to {damaged_path(path).name}")
    for path in sorted(folder.glob("lock*")):
        yield Removal("lock", cell, path, "held by nobody")


def _list_marks(store: ResultStore, cell: str, status: Status) -> Iterator[Removal]:
    """Yield the removals of a cell's marks, then of what blocks the place of a mark or of the metrics.

    status: the cell's status.
    """
    folder = store.folder(cell)
    marks: list[Path] = []
    for pattern in MARKS:
        marks += folder.glob(pattern)
    marks.sort()
    # where something other than a file stands in a file's place, the file can neither be read nor written
    blocked_paths = [path for path in [folder / "metrics.json"] + marks if is_blocked(path)]
    for path in marks:
        if path not in blocked_paths:
            yield Removal("mark", cell, path, f"{status.status}, {status.n} samples stay")
    for path in blocked_paths:
        kind = "a folder" if path.is_dir() else "no readable file"
        yield Removal("aside", cell, path, f"{kind}, moved to {aside_path(store, cell).parent}")


def aside_path(store: ResultStore, cell: str) -> Path:
    """Return a new path outside the folder of cells, for the damaged parts of a cell."""
    # a random end, since a cell may be set aside more than once
    return store.root / "damaged" / f"{cell}-{secrets.token_hex(4)}"


def damaged_path(samples: Path) -> Path:
    """Return the path of the file, beside the file ``samples``, into which lines that do not count are moved."""
    return samples.with_name(samples.name.replace("samples-", "damaged-", 1))


def _remove(store: ResultStore, removal: Removal) -> None:
    """Delete a removal's path, or move the path or its uncounted lines away, as ``removal.kind`` says."""
    # a folder without a cell was renamed by an earlier cleaning, which did not finish
    if not removal.cell:
        shutil.rmtree(removal.path)
    elif removal.kind == "cell":
        # renaming is one step, so a cell is never half there
        renamed = store.root / "cells" / f".removed-{removal.cell}-{secrets.token_hex(4)}"
        removal.path.rename(renamed)
        shutil.rmtree(renamed)
    elif removal.kind == "aside":
        path = aside_path(store, removal.cell)
        path.parent.mkdir(exist_ok=True)
        removal.path.rename(path)
    elif removal.kind == "lines":
        _set_aside(removal.path, removal.cell)
    else:
        removal.path.unlink(missing_ok=True)


def _set_aside(path: Path, cell: str) -> None:
    """Move the lines that do not count from a cell's file of samples into the file ``damaged_path`` beside it."""
    uncounted = read_lines(path, cell).uncounted
    all_lines = path.read_bytes().split(b"\n")
    # lines are counted from 1
    to_move = b"".join(all_lines[number - 1] + b"\n" for number in uncounted)
    counted_lines = []
    for number, line in enumerate(all_lines, start=1):
        if line and number not in uncounted:
            counted_lines.append(line + b"\n")
    to_keep = b"".join(counted_lines)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        # write the moved lines to disk before the file loses them: a crash in between leaves them in both files
        with damaged_path(path).open("ab") as damaged:
            _write_synced(damaged, to_move)
        with temporary.open("xb") as kept:
            _write_synced(kept, to_keep)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_synced(out: IO[bytes], content: bytes) -> None:
    out.write(content)
    out.flush()
    os.fsync(out.fileno())


@contextmanager
def _locking_cell(store: ResultStore, cell: str) -> Iterator[None]:
    """While the context is open, hold every lock of the cell, so that no process can start to measure it.

    Raises KvbenchError if a process measures the cell now.
    """
    folder = store.folder(cell)
    with ExitStack() as stack:
        locks = []
        # where a cell is damaged, a file may stand in the folder's place, and it holds no locks
        if folder.is_dir():
            locks.append(folder / "lock")
            locks += store.shard_locks(cell)
        for path in locks:
            # nobody can hold a lock that is not a file, and no run begins a cell with one
            if is_blocked(path) or path.is_symlink():
                continue
            try:
                lock_handle = lock(path, LOCK_WAIT_S)
            except OSError as error:
                raise disk_error(error, path) from None
            if lock_handle is None:
                raise KvbenchError(f"result {cell} is being measured now; wait for it, or stop it first")
            stack.callback(os.close, lock_handle)
        yield

"""Measured samples on disk, below results/cells/<id>/:

    cell.json            what the cell is, how many examples it has, and what its samples were measured with
    samples-<shard>.jsonl  one appended line per answer, with the cell's id and a checksum
    metrics.json         means over all intact samples, made again from them at the end of every run
    refused-*.json       an example that shows why the cell must not be reported
    state-<shard>.json   there while a shard is measured, and after it failed or was interrupted
    lock, lock-<shard>   locks that end with the process holding them

The store gives these guarantees. Nothing that was measured is ever rewritten. A torn or damaged line is reported, and
its example is measured again. An example in several files counts once. Whatever ends the process (kill -9, a full
disk), every line written earlier is still there. After a power cut every synced line is there. Lines older than SYNC_S
are synced when the next line of any open cell is written. All lines of a cell are synced when it is closed, and all
lines of all cells when ``sync`` is called. Records and metrics are synced before they replace the old ones.
metrics.json depends on the samples alone, not on their order or on the files they are in.

Lines are not synced one by one, since a sync takes hundreds of times as long as a write (results/benchmarks/sync.txt).
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvbench.base.errors import KvbenchError, UsageError, unknown
from kvbench.base.files import (
    Appender,
    Line,
    disk_error,
    is_blocked,
    is_locked,
    lock,
    read_json,
    read_lines,
    sync_folder,
    unreadable,
    write_json,
)
from kvbench.store import labels
from kvbench.store.results import CellRecord, Sample, Status
from kvbench.store.store_writer import Writer

if TYPE_CHECKING:
    from kvbench.store.cell import Cell

SYNC_S = 10.0
"""The age in seconds from which a written line is synced when the next line is written."""
SHARD_WAIT_S = 0.3
"""Seconds to wait for the lock of a shard. A process holds it as long as it measures the shard."""
RECORD_WAIT_S = 60.0
"""Seconds to wait for the lock of a cell's record. A process holds it only while it changes the record."""
ID = re.compile("[0-9a-f]{16}")
"""The form of a cell's id, which is the name of its folder."""
LINK = "is a symbolic link"
"""The reason, in warnings, why a cell's folder is left alone."""
NEEDED = re.compile(r"cell\.json|lock|lock-\d+|refused-.*\.json|samples-.*\.jsonl")
"""The names of files without which a cell can be neither measured nor reported."""
IS_FOLDER = "is a folder; kvbench clean sets it aside"
"""The warning for a folder in the place of a file."""
SHARD_LOCK = re.compile(r"lock-(\d+)")
"""The name of a shard's lock file."""
Mark = Literal["started", "failed", "interrupted"]
"""The statuses that a shard's state file records. All others follow from the cell's other files."""
DAMAGED = "damaged"
STATUSES = ("started", "complete", "done", "refused", "failed", "interrupted", "never", DAMAGED)
"""The statuses of cells, in the order in which lists count them."""


class Busy(KvbenchError):
    """The error for a cell that another process is measuring."""


@dataclass
class ResultStore:
    """All cells below one results folder.

    root: the results folder.
    warnings: one text for each damaged file found so far.
    writers: the writers of the cells that this process has opened, by cell id.
    """

    root: Path
    warnings: list[str] = field(default_factory=list)
    writers: dict[str, Writer] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Raise UsageError if something other than a folder is in place of the folder of all cells."""
        cells = self.root / "cells"
        if os.path.lexists(cells) and not cells.is_dir():
            raise UsageError(
                f"results={self.root}: {cells} is no folder. Move it away, or give another folder that holds "
                "the results of runs, as results=FOLDER"
            )

    def folder(self, cell_id: str) -> Path:
        """Return the folder of a cell. Raises UsageError for a malformed id, and for a link to another folder."""
        if not ID.fullmatch(cell_id):
            raise UsageError(f"{cell_id!r} is no result's id: 16 digits from 0 to f, as kvbench list runs prints them")
        path = self.root / "cells" / cell_id
        if _is_link(path):
            raise UsageError(f"{path} {LINK}: put the folder itself there, or give the results=FOLDER that it lies in")
        return path

    def _find_files(self, cell_id: str, pattern: str) -> list[Path]:
        """Return the files of a cell whose names match ``pattern``, sorted; [] for a link to another folder."""
        if _is_link(self.root / "cells" / cell_id):
            return []
        return sorted(self.folder(cell_id).glob(pattern))

    def find(self, cell_id: str) -> str:
        """Return ``cell_id`` itself if the store has a cell of that id. Raises UsageError otherwise."""
        if not os.path.lexists(self.folder(cell_id)):
            raise unknown("result", cell_id, self.folders(), listed_by=f"kvbench list runs results={self.root}")
        return cell_id

    def check_there(self) -> None:
        """Raise UsageError if there is no results folder to read."""
        if not self.root.is_dir():
            raise UsageError(
                f"results={self.root}: there is no such folder, so that nothing is measured there yet. "
                "kvbench run ... makes it; results=FOLDER reads another"
            )

    def check(self) -> None:
        """Raise UsageError if no file can be written below the results folder."""
        cells = self.root / "cells"
        try:
            # a plan or a report makes no folder: the nearest existing folder tells whether one can be made
            existing = cells
            while not (existing.exists() or existing.is_symlink()):
                existing = existing.parent
            with tempfile.TemporaryFile(dir=existing):
                pass
        except OSError as error:
            raise UsageError(
                f"results={self.root} cannot be written ({error.strerror}): give another folder, as results=FOLDER"
            ) from None

    def open(
        self, cell: Cell, provenance: Mapping[str, object], shard: int, mix: bool, wait_s: float = SHARD_WAIT_S
    ) -> Writer:
        """Start or resume a cell, mark it as started, and return the writer of one shard of it.

        provenance: the facts of this process to record with the samples.
        mix: True to allow samples of several devices, torch versions and calibrations in one cell.
        wait_s: the seconds to wait for the shard's lock.

        Raises Busy for a shard that another process still measures after ``wait_s`` seconds. Raises UsageError if the
        cell's samples were measured with another device, torch version or calibration, unless ``mix`` is set.
        """
        folder = self.folder(cell.id)
        try:
            # the lock is held until the writer is closed: a second process must not append to the same file
            shard_lock = lock(folder / f"lock-{shard}", wait_s)
            if shard_lock is None:
                raise Busy(f"{cell.label} on {cell.column} (result {cell.id}, shard {shard})")
            try:
                # write the record before the first sample, so that every sample has a provenance
                index = self._register(cell, provenance, mix)
                path = folder / f"samples-{shard}.jsonl"
                is_new_file = not path.exists()
                appender = Appender.open(path)
                if is_new_file:
                    # synced lines are lost all the same unless the names of their file and folder are synced, too
                    sync_folder(folder)
                    sync_folder(folder.parent)
            # an interrupt, too, must not leave the shard locked
            except BaseException:
                os.close(shard_lock)
                raise
        except OSError as error:
            raise disk_error(error, folder) from None
        # any written line may trigger a sync of all lines older than SYNC_S
        writer = Writer(
            out=appender,
            lock=shard_lock,
            cell=cell.id,
            shard=shard,
            provenance=index,
            written=partial(self.sync, SYNC_S),
        )
        self.writers[cell.id] = writer
        self.mark(cell, "started")
        return writer

    def sync(self, age_s: float = 0.0) -> None:
        """Sync the files of all open cells whose oldest unsynced line was written at least ``age_s`` seconds ago."""
        # the clock of ``unsynced`` is monotonic: a change of the system's time must not delay a sync
        deadline = time.monotonic() - age_s
        for writer in self.writers.values():
            if writer.out.unsynced is not None and writer.out.unsynced <= deadline:
                writer.out.sync()

    def mark(self, cell: Cell, status: Mark, reason: str | None = None) -> None:
        """Record that measuring the cell has started, failed or was interrupted, for the shard that is open here.

        ``open`` marks started, and closing removes that mark. A mark as failed or interrupted stays until that shard is
        opened again or the cell is complete. A started cell whose process is gone counts as interrupted. A mark that
        cannot be written is skipped, so that its error does not hide the error that it records.
        """
        writer = self.writers.get(cell.id)
        if writer is not None:
            writer.ended = status != "started"
        process = {"host": socket.gethostname(), "pid": os.getpid()}
        with suppress(KvbenchError, OSError):
            # a cell that fails before it was opened still gets a record, so that lists can name it
            if self.cell(cell.id) is None:
                # leaving the context writes the record
                with self._editing_record(cell):
                    pass
            shard = writer.shard if writer is not None else 0
            # losing a mark does no harm, so it is not synced: without it a cell counts as done
            record = {"status": status, "reason": reason, "time": time.time()} | process
            write_json(self.folder(cell.id) / f"state-{shard}.json", record, sync=False)

    def status(self, cell_id: str) -> Status:
        """Return the status of a cell, read from its files alone."""
        # damage goes first: if the record cannot be read, nobody knows what the samples were measured with
        damage = self.damage(cell_id)
        if damage is not None:
            return Status(DAMAGED, 0, None, damage)
        n = len(self.lines(cell_id))
        total = self._read_total(cell_id)
        # ``open`` and ``close`` of another process change a mark and a lock, but not in one step. Only marks that are
        # there before and after the test of the locks tell how a run ended; the others belong to such a process
        earlier_marks = self._read_marks(cell_id)
        measuring = self.measuring(cell_id)
        marks = [mark for mark in self._read_marks(cell_id) if mark in earlier_marks]
        failed_marks = [mark for mark in marks if mark.get("status") == "failed"]
        # the first status that holds counts; a refusal goes first, since a refused cell must never be reported
        refusal = self.refusal(cell_id)
        if refusal is not None:
            status, reason = "refused", refusal
        elif measuring:
            status, reason = "started", None
        elif n and total is not None and n >= total:
            status, reason = "complete", None
        elif failed_marks:
            status, reason = "failed", failed_marks[-1].get("reason")
        elif marks and marks[-1].get("status") == "started":
            status, reason = "interrupted", "its process ended in the middle"
        elif marks:
            status, reason = "interrupted", marks[-1].get("reason")
        elif n:
            status, reason = "done", None
        else:
            status, reason = "never", None
        folder = self.folder(cell_id)
        times = []
        for pattern in ("samples-*.jsonl", "*.json"):
            for path in folder.glob(pattern):
                with suppress(OSError):  # another process may have removed the file meanwhile
                    times.append(path.stat().st_mtime)
        return Status(status, n, total, reason=reason, measuring=measuring, changed=max(times, default=None))

    def _read_total(self, cell_id: str) -> int | None:
        """Return how many examples the cell's task has; None if neither record nor metrics know."""
        record = self.cell(cell_id)
        if record is not None and record.of is not None:
            return record.of
        # records of older versions lack the number; the metrics have it, too
        total: int | None = self.metrics(cell_id).get("of")
        return total

    def measuring(self, cell_id: str) -> tuple[int, ...]:
        """Return the shards of the cell that some process is measuring."""
        # a lock's file stays after its process ends: only the lock on the file tells
        held_locks = [path for path in self.shard_locks(cell_id) if is_locked(path)]
        return tuple(sorted(int(path.name.removeprefix("lock-")) for path in held_locks))

    def shard_locks(self, cell_id: str) -> list[Path]:
        """Return the locks of all shards of the cell. A path that is not a file locks nothing, and is left out."""
        paths = sorted(self.folder(cell_id).glob("lock-*"))
        return [p for p in paths if SHARD_LOCK.fullmatch(p.name) and not is_blocked(p)]

    def _read_marks(self, cell_id: str) -> list[Line]:
        """Return the marks of all shards, oldest first, without those that cannot be read."""
        marks = []
        for path in self._find_files(cell_id, "state-*.json"):
            # a damaged mark tells nothing, so the cell's samples decide alone
            with suppress(UsageError):
                marks.append(read_json(path) or {})
        # an empty mark is a file that was removed meanwhile
        written_marks = [mark for mark in marks if mark]
        return sorted(written_marks, key=lambda mark: float(mark.get("time") or 0))

    def cell(self, cell_id: str) -> CellRecord | None:
        """Return the cell's record, or None if it was never started. Raises UsageError for a damaged one."""
        path = self.folder(cell_id) / "cell.json"
        record = read_json(path)
        if record is None:
            return None
        try:
            return CellRecord.read(record)
        except ValueError as error:
            raise unreadable(path, error) from None

    def damage(self, cell_id: str) -> str | None:
        """Return why the cell's folder, or a file that it needs, cannot be read; None if the cell is whole."""
        try:
            folder = self.folder(cell_id)
        # a cleaning leaves such a cell alone, so the reason goes without that advice
        except UsageError as error:
            return str(error)
        try:
            if os.path.lexists(folder) and not folder.is_dir():
                raise unreadable(folder, "it is no folder")
            for path in sorted(p for p in folder.glob("*") if NEEDED.fullmatch(p.name)):
                # locks are opened without following links
                if is_blocked(path) or (path.name.startswith("lock") and path.is_symlink()):
                    raise unreadable(path, "it is no readable file")
            self.cell(cell_id)
        except UsageError as error:
            return f"{error}; kvbench clean sets the result aside, so that it is measured again"
        return None

    def metrics(self, cell_id: str) -> Line:
        """Return the content of metrics.json, or {} without that file. A damaged file gives {} and a warning."""
        path = self.folder(cell_id) / "metrics.json"
        try:
            return read_json(path) or {}
        except UsageError:
            if path.is_dir():
                self._warn(path, IS_FOLDER)
            else:
                self._warn(path, "cannot be read; the same run makes it again from the samples, which are safe")
            return {}

    def samples(self, cell_id: str) -> dict[str, Sample]:
        """Return the samples of a cell by example id, parsed from its ``lines``."""
        return {name: Sample.read(line) for name, line in self.lines(cell_id).items()}

    def lines(self, cell_id: str) -> dict[str, Line]:
        """Return the cell's intact lines by example id, sorted by id. Damaged lines become warnings.

        Lines that name another cell become warnings, too: someone copied a file of samples from another cell's folder.
        If several lines are about one example, the one whose bytes sort first counts, whichever file it is in.
        """
        chosen: dict[str, tuple[bytes, Line]] = {}
        for path in self._find_files(cell_id, "samples-*.jsonl"):
            try:
                lines = read_lines(path, cell_id)
            except UsageError:
                self._warn(path, "cannot be read, and its answers do not count")
                continue
            for text, line in lines.intact:
                line.pop("cell", None)  # the id guards the file; whoever reads a sample knows the cell from its folder
                example_id = str(line["id"])
                # the order must depend on the text alone, never on file or position; any such order would do
                if example_id not in chosen or text < chosen[example_id][0]:
                    chosen[example_id] = (text, line)
            problems = []
            # a torn line is no reason to warn, since another process may be writing it
            if lines.damaged:
                problems.append(_describe_uncounted("damaged line", "damaged lines", lines.damaged))
            if lines.foreign:
                problems.append(_describe_uncounted("line of another result", "lines of another result", lines.foreign))
            if problems:
                self._warn(path, f"{'; '.join(problems)}; kvbench clean sets them aside")
        return {example_id: line for example_id, (_, line) in sorted(chosen.items())}

    def _refusal_path(self, cell_id: str, example_id: str) -> Path:
        """Return the path of the file that holds a refusal. It is named by a hash, since ids may be no file names."""
        return self.folder(cell_id) / f"refused-{zlib.crc32(example_id.encode()):08x}.json"

    def refuse(self, cell: Cell, reason: str, example: str) -> None:
        """Record that the cell must not be reported, with the reason and the id of the example that showed it."""
        write_json(self._refusal_path(cell.id, example), {"reason": reason, "example": example})

    def refusal(self, cell_id: str) -> str | None:
        """Return the reason why the cell must not be reported, or None."""
        # several examples may have shown reasons; the first one is enough
        for path in self._find_files(cell_id, "refused-*.json"):
            try:
                reason = (read_json(path) or {}).get("reason")
            # the cell was refused, whatever the reason was
            except UsageError:
                reason = None
            if not reason:
                return f"{path.name} cannot be read; kvbench clean cells={cell_id} removes the result"
            return str(reason)
        return None

    def clear_refusal(self, cell_id: str, example_id: str) -> None:
        """Delete the cell's refusal for an example that now passes the audit, if there is one."""
        path = self._refusal_path(cell_id, example_id)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise disk_error(error, path) from None

    def write_metrics(self, cell_id: str, metrics: Mapping[str, object]) -> None:
        """Replace the cell's metrics.json with ``metrics``, atomically. A folder in its place becomes a warning."""
        path = self.folder(cell_id) / "metrics.json"
        if path.is_dir():
            self._warn(path, IS_FOLDER)
        else:
            write_json(path, metrics)

    def folders(self) -> list[str]:
        """Return the ids of all cells, sorted, even of cells without a record or with something else than a folder.

        Links to other folders are left out, with a warning.
        """
        paths = sorted(p for p in (self.root / "cells").glob("*") if ID.fullmatch(p.name))
        links = [path for path in paths if _is_link(path)]
        for path in links:
            self._warn(path, f"{LINK} and is left alone")
        return [path.name for path in paths if path not in links]

    def cells(self) -> list[str]:
        """Return the ids of the cells that have a record. A cell's record is written when the cell is first started."""
        return [name for name in self.folders() if (self.folder(name) / "cell.json").exists()]

    @contextmanager
    def _editing_record(self, cell: Cell) -> Iterator[list[Line]]:
        """While the context is open, the cell's record is locked. Yield its provenance as a list to change.

        On exit, the record is written with the changed list. A cell without a record gets one.
        """
        folder = self.folder(cell.id)
        # processes of several shards add their provenance to the same record
        record_lock = lock(folder / "lock", RECORD_WAIT_S)
        if record_lock is None:
            raise KvbenchError(f"{folder / 'lock'} has been held by another process for {RECORD_WAIT_S:g} s")
        try:
            record = self.cell(cell.id)
            if record is None:
                label = labels.label_cell(cell.identity, cell.label)
                record = CellRecord(
                    id=cell.id,
                    # results of an engine name their kind, those of kvbench have none
                    kind=cell.identity.get("kind"),
                    label=label,
                    column=cell.column,
                    of=len(cell.task.examples),
                    identity=cell.identity,
                )
            provenance = [dict(facts) for facts in record.provenance]
            yield provenance
            write_json(folder / "cell.json", replace(record, provenance=tuple(provenance)).record())
        finally:
            os.close(record_lock)

    def _register(self, cell: Cell, provenance: Mapping[str, object], mix: bool) -> int:
        """Add ``provenance`` to the cell's record if it is not there yet, and return its index in the record's list.

        Raises UsageError if facts that may change the numbers differ from those recorded, unless ``mix`` is set.
        """
        facts = dict(provenance)
        with self._editing_record(cell) as recorded:
            # each distinct set of facts is stored once, and samples refer to it by its index
            if facts not in recorded:
                if not mix:
                    _check_same_conditions(cell, recorded, facts)
                recorded.append(facts)
            return recorded.index(facts)

    def _warn(self, path: Path, text: str) -> None:
        """Add a warning about a file. It replaces an earlier warning about the same file."""
        # the list is changed in place, since a caller may hold it
        self.warnings[:] = [w for w in self.warnings if not w.startswith(f"{path}: ")]
        self.warnings.append(f"{path}: {text}")


def _check_same_conditions(cell: Cell, recorded: Sequence[Line], facts: Line) -> None:
    """Raise UsageError if facts that may change a cell's numbers differ from those recorded with its samples.

    recorded: the provenance of each earlier process.
    facts: the provenance of this process.
    """
    for earlier in recorded:
        # other facts, such as the commit, do not change the numbers and are only recorded
        for key in ("device", "torch", "calibration"):
            if earlier.get(key) != facts.get(key):
                raise UsageError(
                    f"result {cell.id} ({cell.label} on {cell.column}) was begun with {key} "
                    f"{earlier.get(key)}, this is {facts.get(key)}: its numbers could differ. "
                    f"Use the same {key}, another results=FOLDER, or mix=true to allow both"
                )


def _describe_uncounted(singular: str, plural: str, numbers: Sequence[int]) -> str:
    """Return the words of a warning: how many lines do not count, and their ``numbers`` in the file.

    singular, plural: the noun for one such line, and for several.
    """
    listed = ", ".join(map(str, numbers))
    if len(numbers) == 1:
        return f"1 {singular} does not count (line {listed})"
    return f"{len(numbers)} {plural} do not count (lines {listed})"


def _is_link(folder: Path) -> bool:
    """Return True if a cell's folder is a link to one elsewhere. Nothing is read or written through such a link."""
    return folder.is_symlink() and folder.is_dir()

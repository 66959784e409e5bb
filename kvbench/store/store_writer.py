"""The writer of one open cell: it appends samples to one shard's file and holds that shard's lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvbench.base.files import Appender, format_line


@dataclass
class Writer:
    """An open cell. It appends samples to one shard's file and holds the shard's lock, which ends with the process.

    out: the samples file.
    lock: the file descriptor that holds the lock.
    cell: the cell's id. Every line names it, so a file copied into another cell's folder is not taken for its answers.
    provenance: the index of this process's facts in the cell's record.
    shard: the number of the shard.
    written: called after every line.
    ended: whether the cell is marked as failed or interrupted.
    """

    out: Appender
    lock: int
    cell: str
    shard: int
    provenance: int
    written: Callable[[], None]
    ended: bool = False

    @property
    def path(self) -> Path:
        """The samples file that is written."""
        return self.out.path

    def append(self, line: Mapping[str, object]) -> None:
        """Append one line, with the cell's id and the index of this process's facts in the cell's provenance.

        Raises KvbenchError if the line cannot be written. Earlier lines are safe then.
        """
        stored_line = dict(line)
        stored_line["cell"] = self.cell
        stored_line["provenance"] = self.provenance
        self.out.append(format_line(stored_line).encode())
        # the store syncs the lines of all open cells together, including this one's
        self.written()

    def close(self) -> None:
        """Sync the file, remove the mark that the cell has started, and release the lock.

        A mark that the cell has failed or was interrupted stays.
        """
        try:
            self.out.close()
            # without the mark ``started``, a cell's lines alone decide whether it is done in part or complete
            if not self.ended:
                with suppress(OSError):
                    self.path.with_name(f"state-{self.shard}.json").unlink(missing_ok=True)
        finally:
            # a full disk must not keep the shard locked
            with suppress(OSError):
                os.close(self.lock)

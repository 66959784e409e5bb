"""The writer of one open cell: it appends samples to one shard's file and holds that shard's lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvbench.files import Appender, line_of


@dataclass
class Writer:
    """An open cell that appends samples to this shard's file, under a lock that ends with the process."""

    out: Appender
    lock: int
    shard: int
    provenance: int
    written: Callable[[], None]
    ended: bool = False

    @property
    def path(self) -> Path:
        return self.out.path

    def append(self, line: Mapping[str, object]) -> None:
        """Append one line, with the index of this process in the cell's provenance.

        A full disk raises one clear error and loses no earlier line.
        """
        self.out.append(line_of({**line, "provenance": self.provenance}).encode())
        self.written()

    def close(self) -> None:
        """Sync the file and release the lock. A mark as failed or interrupted stays."""
        try:
            self.out.close()
            if not self.ended:
                with suppress(OSError):
                    self.path.with_name(f"state-{self.shard}.json").unlink(missing_ok=True)
        finally:
            with suppress(OSError):
                os.close(self.lock)

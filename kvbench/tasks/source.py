"""Where a dataset's files come from: a folder of the user's, filled by hand or by ``kvbench data fetch``.

There is one code path after that: loaders read local files. A run downloads nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

from kvbench.base.errors import MissingData
from kvbench.tasks import fetch

ENVIRONMENT = "KVBENCH_DATA"


@dataclass(frozen=True)
class Files:
    """The files of one dataset below the data folder, and the advice for somebody who does not have them."""

    dataset: str
    root: Path | None

    def path(self, name: str) -> Path:
        """Return the path of the file or folder ``name`` below the data folder.

        Raises MissingData with the two ways to get it if it is absent, and UsageError if the lock lists it with another
        content.
        """
        if self.root is None:
            raise MissingData(f"dataset={self.dataset} needs {name}, and no data folder is named. {self.ways()}")
        path = self.root / name
        # a folder of texts will do, too
        if not path.exists():
            raise MissingData(f"{name} not found in {self.root}. {self.ways()}", [name])
        self._check(name)
        return path

    def first(self, *names: str) -> Path | None:
        """Return the path of the first of ``names`` that is a file below the data folder; None if none is.

        Raises UsageError if the lock lists it with another content.
        """
        if self.root is None:
            return None
        for name in names:
            if (self.root / name).is_file():
                self._check(name)
                return self.root / name
        return None

    def _check(self, name: str) -> None:
        """Raise UsageError if the lock lists this file with another content. Each file is read once per process."""
        if self.root is None:
            return
        path, lock = self.root / name, self.root / fetch.LOCK
        # files that were put there by hand have no lock; a folder is not listed in it
        if not lock.is_file() or not path.is_file():
            return
        if _changed(self.root, name, _stamp(path), _stamp(lock)):
            raise fetch.changed(self.root, fetch.Wanted(name))

    def ways(self) -> str:
        """Return a text with the two ways to get the files of this dataset."""
        if self.root is None:
            return (
                f"Download it: `kvbench data fetch {self.dataset} data.root=FOLDER`. Or name the folder that has it: "
                f"data.root=FOLDER, or the environment variable {ENVIRONMENT}."
            )
        return f"Download it: `kvbench data fetch {self.dataset} data.root={self.root}`. Or put it there yourself."


def _stamp(path: Path) -> tuple[int, int]:
    """Return the size and the time of a file's last change, which differ if its content does."""
    # reading a file of gigabytes for every dataset that uses it would take longer than a run
    status = path.stat()
    return status.st_size, status.st_mtime_ns


@cache
def _changed(root: Path, name: str, file: tuple[int, int], lock: tuple[int, int]) -> bool:
    """Tell if a file differs from the lock.

    ``file`` and ``lock``, the stamps of both, are arguments so that a cached result stays true.
    """
    # the lock lists places without ./ and doubled slashes
    wanted = fetch.Wanted(PurePosixPath(name).as_posix())
    return fetch.state(root, wanted, fetch.read_lock(root)) == "changed"


def data_root(given: str | None) -> Path | None:
    """Return the data folder: ``data.root`` if given, else the folder that the environment names, else None.

    There is no default. Raises MissingData if it is no folder.
    """
    where, name = "data.root", given
    if not name:
        where, name = f"the environment variable {ENVIRONMENT}", os.environ.get(ENVIRONMENT)
    if not name:
        return None
    root = Path(name).expanduser()
    if not root.is_dir():
        # a mistyped folder must not look like a machine without data
        raise MissingData(f"{where}={name} is not a folder")
    return root

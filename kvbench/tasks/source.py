"""The source of a dataset's files: a folder of the user's, filled by hand or by ``kvbench data fetch``.

Loaders read only local files, however these came there. A run downloads nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

from kvbench.base.errors import MissingData
from kvbench.tasks import fetch

ENVIRONMENT = "KVBENCH_DATA"
"""The environment variable that names the data folder."""


@dataclass(frozen=True)
class Files:
    """The files of one dataset below the data folder, and advice on getting them.

    dataset: the name of the dataset, for errors.
    root: the data folder; None if none is named.
    """

    dataset: str
    root: Path | None

    def path(self, name: str) -> Path:
        """Return the path of the file or folder ``name`` below the data folder.

        Raises MissingData, with the two ways to get the file, if it is absent. Raises UsageError if its content differs
        from the lock's record.
        """
        if self.root is None:
            raise MissingData(f"dataset={self.dataset} needs {name}, and no data folder is named. {self.advise()}")
        path = self.root / name
        # a folder of texts is allowed, too
        if not path.exists():
            raise MissingData(f"{name} not found in {self.root}. {self.advise()}", [name])
        self._check(name)
        return path

    def find_first(self, *names: str) -> Path | None:
        """Return the path of the first of ``names`` that is a file below the data folder; None if no such file exists.

        Raises UsageError if the file's content differs from the lock's record.
        """
        if self.root is None:
            return None
        for name in names:
            if (self.root / name).is_file():
                self._check(name)
                return self.root / name
        return None

    def _check(self, name: str) -> None:
        """Raise UsageError if a file's content differs from the lock's record. Each file is read once per process."""
        if self.root is None:
            return
        path, lock = self.root / name, self.root / fetch.LOCK
        # files that were put there by hand have no lock, and no lock lists folders
        if not lock.is_file() or not path.is_file():
            return
        if _has_changed(self.root, name, _stamp_file(path), _stamp_file(lock)):
            raise fetch.changed_error(self.root, fetch.Wanted(name))

    def advise(self) -> str:
        """Return the advice of error messages: the ways to get the files of this dataset."""
        if self.root is None:
            return (
                f"Download it: `kvbench data fetch {self.dataset} data.root=FOLDER`. Or name the folder that has it: "
                f"data.root=FOLDER, or the environment variable {ENVIRONMENT}."
            )
        return f"Download it: `kvbench data fetch {self.dataset} data.root={self.root}`. Or put it there yourself."


def _stamp_file(path: Path) -> tuple[int, int]:
    """Return (size of a file in bytes, time of its last change in ns). A changed file differs in one of these."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


@cache
def _has_changed(root: Path, name: str, file_stamp: tuple[int, int], lock_stamp: tuple[int, int]) -> bool:
    """Return True if the content of the file ``name`` below the data folder ``root`` differs from the lock's record.

    file_stamp, lock_stamp: the stamps of the file and of the lock. They are not read here. As parts of the cache's key
        they make a changed file be read again, and an unchanged file of gigabytes only once.
    """
    # the lock lists places without ./ and doubled slashes
    wanted = fetch.Wanted(PurePosixPath(name).as_posix())
    return fetch.state_of_file(root, wanted, fetch.read_lock(root)) == "changed"


def data_root(given: str | None) -> Path | None:
    """Return the data folder: ``data.root`` if given, else the folder that the environment names, else None.

    There is no default folder. Raises MissingData if the path is no folder.
    """
    if given:
        where, name = "data.root", given
    else:
        where, name = f"the environment variable {ENVIRONMENT}", os.environ.get(ENVIRONMENT, "")
    # a variable that is set to nothing counts as unset
    if not name:
        return None
    root = Path(name).expanduser()
    if not root.is_dir():
        # a mistyped folder must not look like a machine without data
        raise MissingData(f"{where}={name} is not a folder")
    return root

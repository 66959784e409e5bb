"""The manifest of a fetched model: the sizes and checksums of its files, to which whoever loads the model holds them.

Sizes are compared each time. Checksums are computed once on a machine, and once more where a file's size, time or inode
changed; the files that were right are written down beside the manifest.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from kvbench.base.errors import KvbenchError, UsageError
from kvbench.base.files import read_json, sha256, write_json

NAME = "kvbench-manifest.json"
CHECKED = "kvbench-checked.json"
"""The file with the files that had the right checksum and what they were like then, by machine."""
MACHINES = 16
"""The machines that are remembered, the last ones."""
UNREADABLE = (UsageError, KeyError, TypeError, ValueError, AttributeError)
"""The errors of reading a manifest that is missing, damaged or something else."""

Stamps = dict[str, dict[str, Any]]


def write(folder: Path, sums: Mapping[str, str], origin: Mapping[str, str]) -> None:
    """Write the manifest of files whose checksums were just computed, with their ``origin``."""
    stamps = {name: {**_stamp(folder / name), "sha256": wanted} for name, wanted in sums.items()}
    files = {name: {"sha256": stamp["sha256"], "bytes": stamp["bytes"]} for name, stamp in stamps.items()}
    write_json(folder / NAME, {"version": 1, **origin, "files": files})
    _remember(folder, stamps)


def check_copy(folder: Path) -> None:
    """Hold a folder that the user named to its manifest, if it has one: it was fetched, or is a copy of what was.

    Raises UsageError with the file and what to do if a file differs.
    """
    if not (folder / NAME).is_file():
        return
    try:
        damage = wrong_size(folder) or wrong_sum(folder)
    except UNREADABLE:
        damage = f"{folder / NAME} cannot be read"
    if damage:
        raise UsageError(
            f"model={folder} is damaged: {damage}. Fetch it again (python -m kvbench model list has the names) or copy "
            f"it again; if you changed the file yourself, remove {NAME} from the folder"
        )


def sums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file as the manifest says it."""
    return {name: str(record["sha256"]) for name, record in _files(folder).items()}


def wrong_size(folder: Path) -> str | None:
    """Return a text on the first file that is missing or has another size than the manifest says, None for none."""
    for name, record in _files(folder).items():
        path, size = folder / name, int(record["bytes"])
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size} bytes, it had {size}"
    return None


def wrong_sum(folder: Path, again: bool = False) -> str | None:
    """Return a text on the first file with another checksum than the manifest says, None for none.

    A file is read once on each machine, and once more where its size, time or inode changed; ``again`` reads all files.
    The files that were right are written down beside them.
    """
    known = {} if again else _checked(folder).get(platform.node(), {})
    stamps = {}
    for name, wanted in sums(folder).items():
        path = folder / name
        try:
            # taken before the file is read, so that a change meanwhile makes the next run read it again
            stamp = _stamp(path)
            if known.get(name) != {**stamp, "sha256": wanted}:
                actual = sha256(path) if again else _sum_of(path, tuple(stamp.values()))
                if actual != wanted:
                    return f"{path} has the checksum {actual}, it had {wanted}"
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"
        stamps[name] = {**stamp, "sha256": wanted}
    if known != stamps:
        _remember(folder, stamps)
    return None


def _files(folder: Path) -> dict[str, Any]:
    """Return {name: record} of the manifest's files. Raises one of UNREADABLE if there is none or it is damaged."""
    files = (read_json(folder / NAME) or {})["files"]
    return {Path(name).name: dict(record) for name, record in files.items()}


def _stamp(path: Path) -> dict[str, int]:
    """Return what changes with a file's content."""
    status = path.stat()
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "inode": status.st_ino}


@cache
def _sum_of(path: Path, stamp: tuple[int, ...]) -> str:
    """Return a file's checksum; ``stamp`` makes a cached one stay true where the folder cannot be written."""
    return sha256(path)


def _checked(folder: Path) -> dict[str, Stamps]:
    """Return the stamps of files that had the right checksum, by machine; none if they cannot be read."""
    try:
        content = read_json(folder / CHECKED) or {}
    except UsageError:
        return {}
    return {machine: stamps for machine, stamps in content.items() if isinstance(stamps, dict)}


def _remember(folder: Path, stamps: Stamps) -> None:
    """Write down the files that had the right checksum on this machine, unless the folder cannot be written."""
    others = [item for item in _checked(folder).items() if item[0] != platform.node()]
    with suppress(KvbenchError):
        write_json(folder / CHECKED, dict([*others, (platform.node(), stamps)][-MACHINES:]), sync=False)

"""The manifest of a fetched model: the sizes and checksums of its files, which are checked when the model is loaded.

Sizes are compared each time. Checksums are computed once on each machine, and again if a file's size, time or inode
changed. A record beside the manifest lists the files whose checksums were right.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from kvbench.base.errors import KvbenchError, UsageError
from kvbench.base.files import read_json, sha256, write_json

NAME = "kvbench-manifest.json"
"""The manifest's file name in the model's folder."""
CHECKED = "kvbench-checked.json"
"""The file name of the record of checksums that were right: for each machine, the stamps of files at that time."""
MACHINE = platform.node()
"""The name of this machine on the network."""
MACHINES = 16
"""The record keeps at most this many machines, the latest ones."""
UNREADABLE = (UsageError, KeyError, TypeError, ValueError, AttributeError)
"""The errors that reading a manifest raises if it is missing, damaged or of another form."""

Stamp = dict[str, int | str]
"""A file's size, modification time and inode, with the checksum that the file should have."""
Stamps = dict[str, Stamp]
"""The stamps of a folder's files, by name."""


def write_manifest(folder: Path, sums: Mapping[str, str], origin: Mapping[str, str]) -> None:
    """Write the manifest of a folder whose checksums were just found right, and record them as checked here.

    sums: the SHA-256 of each file by its name.
    origin: more facts to record, such as the package that the files come from.
    """
    stamps: Stamps = {}
    files: dict[str, object] = {}
    for name, checksum in sums.items():
        stamp = _stamp_file(folder / name, checksum)
        stamps[name] = stamp
        files[name] = {"sha256": checksum, "bytes": stamp["bytes"]}
    content: dict[str, object] = {"version": 1}
    content |= origin
    content["files"] = files
    write_json(folder / NAME, content)
    _remember_stamps(folder, stamps, MACHINE)


def check_copy(folder: Path) -> None:
    """Raise UsageError, with the file and the remedy, if a file in ``folder`` differs from the folder's manifest.

    A folder without a manifest was not fetched by kvbench, and nothing is checked.
    """
    if not (folder / NAME).is_file():
        return
    # sizes come first, because they cost nothing and reveal most damage
    try:
        damage = find_wrong_size(folder) or find_wrong_sum(folder)
    except UNREADABLE:
        damage = f"{folder / NAME} cannot be read"
    if damage:
        raise UsageError(
            f"model={folder} is damaged: {damage}. Fetch it again (kvbench model list has the names) or copy "
            f"it again; if you changed the file yourself, remove {NAME} from the folder"
        )


def read_sums(folder: Path) -> dict[str, str]:
    """Return {name: SHA-256} of the files, as the folder's manifest states them.

    Raises one of UNREADABLE if the manifest cannot be read.
    """
    return {name: str(record["sha256"]) for name, record in _read_files(folder).items()}


def find_wrong_size(folder: Path) -> str | None:
    """Return a message on the first file that is missing or has another size than in the manifest, or None.

    Raises one of UNREADABLE if the manifest cannot be read.
    """
    # files that the manifest does not name are the user's own
    for name, record in _read_files(folder).items():
        path, size = folder / name, int(record["bytes"])
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size} bytes, it had {size}"
    return None


def find_wrong_sum(folder: Path, again: bool = False, machine: str = MACHINE) -> str | None:
    """Return a message on the first file that is unreadable or has another checksum than in the manifest, or None.

    Files whose checksums were right on this ``machine`` before, and whose size, time and inode have not changed, are
    not read. If all files are right, this is recorded beside the manifest. Raises one of UNREADABLE if the manifest
    cannot be read.

    again: True to read all files, whatever is known of them.
    """
    known_stamps: Stamps = {} if again else _read_checked(folder).get(machine, {})
    stamps: Stamps = {}
    for name, checksum in read_sums(folder).items():
        path = folder / name
        try:
            # the stamp is taken before the file is read, so that the next run notices a change during the reading
            stamp = _stamp_file(path, checksum)
            stamps[name] = stamp
            if known_stamps.get(name) == stamp:
                continue
            if again:
                actual = sha256(path)
            else:
                # this process remembers the sum if it has read the file before
                actual = _compute_sum_once(path, (stamp["bytes"], stamp["mtime_ns"], stamp["inode"]))
        except OSError as error:
            return f"{path} cannot be read ({error.strerror})"
        if actual != checksum:
            return f"{path} has the checksum {actual}, it had {checksum}"
    # an unchanged record is not rewritten, because several processes may load the model at once
    if known_stamps != stamps:
        _remember_stamps(folder, stamps, machine)
    return None


def _read_files(folder: Path) -> dict[str, dict[str, str | int]]:
    """Return {name: record} of the manifest's files. Raises one of UNREADABLE if the manifest is missing or damaged."""
    # a missing manifest reads as None, and {} raises KeyError below, which is one of UNREADABLE
    content = read_json(folder / NAME) or {}
    files = content["files"]
    # a name with folders in it would lead out of this folder
    return {Path(name).name: dict(record) for name, record in files.items()}


def _stamp_file(path: Path, checksum: str) -> Stamp:
    """Return the size, time and inode of a file, which change with its content, with the checksum it should have."""
    status = path.stat()
    return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "inode": status.st_ino, "sha256": checksum}


@cache
def _compute_sum_once(path: Path, status: tuple[int | str, ...]) -> str:
    """Return a file's SHA-256. It is computed once in a process, even if no record can be written into the folder.

    status: the file's size, time and inode. They are a part of the cache's key, so that a changed file is read again.
    """
    return sha256(path)


def _read_checked(folder: Path) -> dict[str, Stamps]:
    """Return the stamps of files that had the right checksum, by machine; {} if there is no readable record."""
    try:
        content = read_json(folder / CHECKED) or {}
    except UsageError:
        return {}
    return {machine: stamps for machine, stamps in content.items() if isinstance(stamps, dict)}


def _remember_stamps(folder: Path, stamps: Stamps, machine: str) -> None:
    """Record the ``stamps`` of files whose checksums were right on ``machine``, if the folder can be written."""
    stamps_by_machine = _read_checked(folder)
    # this machine moves to the end, and the oldest machines beyond the limit are dropped
    stamps_by_machine.pop(machine, None)
    stamps_by_machine[machine] = stamps
    latest = dict(list(stamps_by_machine.items())[-MACHINES:])
    # the record only saves time, so a folder that cannot be written is no error, and a power cut may undo the writing
    with suppress(KvbenchError):
        write_json(folder / CHECKED, latest, sync=False)

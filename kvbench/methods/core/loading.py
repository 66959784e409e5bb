"""Loading of methods from their files; an error of their author is reported with file and line."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import traceback
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.base.errors import KvbenchError, UsageError

# the command line reads the registry for --help, which must not wait for torch
if TYPE_CHECKING:
    from kvbench.methods.core.base import Stage

MACHINERY = ("importlib", "dataclasses.py", "abc.py")  # frames of Python itself, when it imports and makes classes


def entry_of_class(path: Path, method: str) -> dict[str, Any]:
    """Import the file ``path`` of kvbench/methods and return the entry of its class with the id ``method``.

    An entry is ``_target_`` and the knobs with their defaults. Raises UsageError if the file is not one of a method.
    """
    from kvbench.methods.core.foreign import is_own
    from kvbench.methods.core.knobs import is_knob
    from kvbench.methods.core.walls import contained

    name = f"{__package__}.{path.stem}"
    try:
        with contained(name, name not in sys.modules, seed=0, importing=True):
            module = importlib.import_module(name)
        if module.__file__ != str(path):
            raise UsageError(f"{module.__file__} has the same name: rename the file")
        (stage,) = (c for c in vars(module).values() if getattr(c, "id", None) == method and c.__module__ == name)
        with contained(name, not is_own(name), seed=0):
            plain = {f.name: getattr(stage(), f.name) for f in fields(stage) if is_knob(f)}
    except Exception as error:
        raise UsageError(f"{path}: the method {method} cannot be read: {located(error, str(path))}") from error
    knobs = {knob: list(value) if isinstance(value, tuple) else value for knob, value in plain.items()}
    return {"_target_": f"{name}.{stage.__name__}", **knobs}


def load_stage(path: Path, method: str, target: str, knobs: Mapping[str, Any]) -> Stage:
    """Build a stage of the class ``target``, which the file ``path`` names.

    Raises UsageError, with the author's file and line, for a class that is no stage of this id or cannot be built.
    """
    from kvbench.methods.core.base import Stage
    from kvbench.methods.core.chain import ROLES
    from kvbench.methods.core.foreign import is_own
    from kvbench.methods.core.walls import contained

    module, _, name = target.rpartition(".")
    line = next((i for i, text in enumerate(path.read_text("utf-8").splitlines(), 1) if "_target_" in text), 1)
    entry = f"{path}:{line}: _target_ {target}"
    try:
        with contained(target, module not in sys.modules, seed=0, importing=True):
            cls = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise UsageError(f"{entry} cannot be imported: {located(error, '')}") from error
    if not (isinstance(cls, type) and issubclass(cls, Stage)):
        raise UsageError(f"{entry} is not a Stage (see kvbench/methods/core/base.py)")
    for attribute, fits, remedy in (
        ("id", getattr(cls, "id", None) == method, f"write id = {method!r}, as the file is called"),
        ("role", getattr(cls, "role", None) in ROLES, "derive it from Selector, or from what else kvbench/methods has"),
    ):
        if not fits:
            raise UsageError(
                f"{_source_line(cls)}: class {name} has {attribute} {getattr(cls, attribute, None)!r}: {remedy}"
            )
    try:
        with contained(target, not is_own(module), seed=0):
            stage = cls(**knobs)
            hash(stage)  # equal stages share what they compute
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"{entry}, with the knobs there, cannot be made: {located(error, _source_line(cls))}"
        ) from error
    _check_needs(stage)
    return stage


def syntax_error(path: Path) -> str | None:
    """Return the error of a file that is no Python, with its line; None for one that is."""
    try:
        ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        return located(error, str(path))
    return None


def _check_needs(stage: Stage) -> None:
    """Raise UsageError unless the stage says what it reads of a prompt: that is asked before any prompt is read."""
    from kvbench.kv.observation import Needs
    from kvbench.methods.core.foreign import is_own
    from kvbench.methods.core.walls import contained

    line = _source_line(type(stage))
    where = f"{line}: {type(stage).__name__}.needs(n), what it reads of a prompt of n tokens,"
    try:
        with contained(type(stage).__qualname__, not is_own(type(stage).__module__), seed=0):
            needs = stage.needs(1)
    except Exception as error:
        raise UsageError(f"{where} failed: {located(error, line)}") from error
    if not isinstance(needs, Needs):
        raise UsageError(f"{where} is {needs!r}: return Needs(...), which is in kvbench.kv.observation")


def located(error: BaseException, place: str) -> str:
    """Return an error's description with the line of the author's file that it comes from, or with ``place``."""
    if isinstance(error, KvbenchError):
        return str(error) if error.__cause__ is None else located(error.__cause__, place)
    if isinstance(error, SyntaxError):
        return f"{error.filename or place}:{error.lineno or 1}: {type(error).__name__}: {error.msg}"
    frames = list(traceback.extract_tb(error.__traceback__))
    frames = [f for f in frames if f.filename != __file__ and not any(m in f.filename for m in MACHINERY)]
    place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else place
    return f"{place}: {type(error).__name__}: {error}".removeprefix(": ")


def _source_line(cls: type) -> str:
    try:
        return f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):
        return cls.__module__

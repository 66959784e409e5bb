"""A method's files, read and imported. What their author did wrong is told with file and line."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.errors import KvbenchError, UsageError

# the command line reads the registry for --help, which must not wait for torch
if TYPE_CHECKING:
    from kvbench.methods.base import Stage

MACHINERY = ("importlib", "dataclasses.py", "abc.py")  # what Python reads and makes classes with


def entry_of_class(path: Path, method: str) -> dict[str, Any]:
    """Return ``_target_`` and the knobs, with their defaults, of the class with the id ``method`` in a file here."""
    from kvbench.methods.foreign import contained
    from kvbench.methods.knobs import is_knob

    name = f"{__package__}.{path.stem}"
    try:
        with contained(name, name not in sys.modules):
            module = importlib.import_module(name)
        (stage,) = (c for c in vars(module).values() if getattr(c, "id", None) == method and c.__module__ == name)
        plain = {f.name: getattr(stage(), f.name) for f in fields(stage) if is_knob(f)}
    except Exception as error:
        raise UsageError(f"{path}: the method {method} cannot be read: {_told(error, str(path))}") from error
    knobs = {knob: list(value) if isinstance(value, tuple) else value for knob, value in plain.items()}
    return {"_target_": f"{name}.{stage.__name__}", **knobs}


def load_stage(path: Path, method: str, target: str, knobs: Mapping[str, Any]) -> Stage:
    """Return a stage of the class ``target``, which the file ``path`` names."""
    from kvbench.methods.base import Stage
    from kvbench.methods.foreign import contained

    module, _, name = target.rpartition(".")
    line = next((i for i, text in enumerate(path.read_text("utf-8").splitlines(), 1) if "_target_" in text), 1)
    named = f"{path}:{line}: _target_ {target}"
    try:
        with contained(target, module not in sys.modules):
            cls = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise UsageError(f"{named} cannot be imported: {_told(error, '')}") from error
    if not (isinstance(cls, type) and issubclass(cls, Stage)):
        raise UsageError(f"{named} is not a Stage (see kvbench/methods/base.py)")
    for what, ok, remedy in (
        ("id", getattr(cls, "id", None) == method, f"write id = {method!r}, as the file is called"),
        ("role", hasattr(cls, "role"), "derive it from Selector, or from what else kvbench/methods has"),
    ):
        if not ok:
            raise UsageError(f"{_where(cls)}: class {name} has {what} {getattr(cls, what, None)!r}: {remedy}")
    try:
        return cls(**knobs)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{named}, with the knobs there, cannot be made: {_told(error, _where(cls))}") from error


def _told(error: BaseException, place: str) -> str:
    """An error with the file and line of the author's that it comes from, or ``place``."""
    if isinstance(error, KvbenchError) and error.__cause__ is not None:
        return _told(error.__cause__, place)
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename != __file__ and not any(m in f.filename for m in MACHINERY)]
    place = f"{own[-1].filename}:{own[-1].lineno}" if own else place
    return f"{place}: {type(error).__name__}: {error}".removeprefix(": ")


def _where(cls: type) -> str:
    try:
        return f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):
        return cls.__module__

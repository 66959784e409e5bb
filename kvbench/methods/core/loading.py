"""Loading of methods from their files. An error of their author is reported with file and line."""

from __future__ import annotations

import ast
import importlib
import inspect
import traceback
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.base.errors import KvbenchError, UsageError

# the command line reads the registry for --help, which must not wait for torch: functions import what imports torch
if TYPE_CHECKING:
    from kvbench.methods.core.stage import Stage

MACHINERY = ("importlib", "dataclasses.py", "abc.py")
"""Parts of the names of Python's own files that import modules and make classes. Their frames are not the author's."""


def read_class_entry(path: Path, method: str) -> dict[str, Any]:
    """Import the file ``path`` of kvbench/methods and return the entry of its class with the id ``method``.

    An entry is ``_target_`` and the knobs with their defaults. Raises UsageError if the file is not one of a method.
    """
    from kvbench.methods.core.knobs import is_knob

    # presses of kvpress are read from a file of the machinery, every other method from one of kvbench.methods
    package = "kvbench.methods.core" if path.parent == Path(__file__).parent else "kvbench.methods"
    name = f"{package}.{path.stem}"
    try:
        module = importlib.import_module(name)
        # an earlier folder of the package's path may have a file of this name
        if module.__file__ != str(path):
            raise UsageError(f"{module.__file__} has the same name: rename the file")
        # classes that the file only imports are not its own
        own_classes = [c for c in vars(module).values() if isinstance(c, type) and c.__module__ == name]
        # a class that inherits its id is no method of its own, and two classes of one id are an error
        (stage_class,) = (c for c in own_classes if vars(c).get("id") == method)
        # defaults are read from a stage, not from its class, because its checks may fill knobs in
        knobs = {f.name: getattr(stage_class(), f.name) for f in fields(stage_class) if is_knob(f)}
    # a file of the user's may raise anything
    except Exception as error:
        raise UsageError(f"{path}: the method {method} cannot be read: {locate_error(error, str(path))}") from error
    entry: dict[str, Any] = {"_target_": f"{name}.{stage_class.__name__}"}
    for knob, value in knobs.items():
        # entries of YAML files have lists, and entries are compared
        entry[knob] = list(value) if isinstance(value, tuple) else value
    return entry


def load_stage(path: Path, method: str, target: str, knobs: Mapping[str, object]) -> Stage:
    """Build a stage of the class ``target`` (its module and name) with ``knobs``. ``path`` is the file that names it.

    Raises UsageError, with the author's file and line, for a class that is no stage of this id or cannot be built.
    """
    cls = _import_stage_class(path, method, target)
    # the type of its arguments is not known here: they are the class's own knobs
    make: Callable[..., Stage] = cls
    try:
        stage = make(**knobs)
        # equal stages share their results, which are found by the hash
        hash(stage)
    except UsageError:
        # the error of a wrong knob says all itself
        raise
    except Exception as error:
        entry = _locate_entry(path, target)
        raise UsageError(
            f"{entry}, with the options there, cannot be made: {locate_error(error, _locate_class(cls))}"
        ) from error
    _check_needs(stage)
    return stage


def _import_stage_class(path: Path, method: str, target: str) -> type[Stage]:
    """Return the class ``target`` of the method with the id ``method``. ``path`` is the file that names the class.

    Raises UsageError if it cannot be imported, or is no stage of this id with a known role.
    """
    from kvbench.methods.core.chain import ROLES
    from kvbench.methods.core.stage import Stage

    module, _, name = target.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise UsageError(f"{_locate_entry(path, target)} cannot be imported: {locate_error(error, '')}") from error
    if not (isinstance(cls, type) and issubclass(cls, Stage)):
        raise UsageError(
            f"{_locate_entry(path, target)} is no class of a method: derive it from Selector of kvbench.methods.base, "
            "or from the class of another method"
        )
    # an author may have forgotten either
    stage_id, role = getattr(cls, "id", None), getattr(cls, "role", None)
    if stage_id != method:
        raise UsageError(
            f"{_locate_class(cls)}: class {name} has id {stage_id!r}: write id = {method!r}, as the file is called"
        )
    if role not in ROLES:
        raise UsageError(
            f"{_locate_class(cls)}: class {name} has role {role!r}: derive it from Selector of "
            "kvbench.methods.base, or from the class of another method"
        )
    return cls


def find_syntax_error(path: Path) -> str | None:
    """Return the error of a file that is not Python, with its line, or None for a file that is."""
    try:
        ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        return locate_error(error, str(path))
    return None


def _check_needs(stage: Stage) -> None:
    """Raise UsageError unless ``stage.needs`` returns a ``Needs`` for a prompt of one token.

    A run calls it before it reads a prompt, and the error names the author's file and line.
    """
    from kvbench.kv.observation import Needs

    cls = type(stage)

    def describe_call() -> str:
        """Return the place and the call for an error. It is a function, because finding a class's line takes long."""
        return f"{_locate_class(cls)}: {cls.__name__}.needs(n), what it reads of a prompt of n tokens,"

    try:
        needs = stage.needs(1)
    except Exception as error:
        raise UsageError(f"{describe_call()} failed: {locate_error(error, _locate_class(cls))}") from error
    if not isinstance(needs, Needs):
        raise UsageError(f"{describe_call()} is {needs!r}: return Needs(...), which is in kvbench.kv.observation")


def locate_error(error: BaseException, place: str) -> str:
    """Return ``FILE:LINE: TYPE: message`` of an error, with the line of the author's file that raised it.

    Where no frame of the traceback is the author's, ``place`` stands for file and line.
    """
    if isinstance(error, KvbenchError):
        # such an error either says all itself, or stands for the author's error behind it
        if error.__cause__ is None:
            return str(error)
        return locate_error(error.__cause__, place)
    if isinstance(error, SyntaxError):
        return f"{error.filename or place}:{error.lineno or 1}: {type(error).__name__}: {error.msg}"
    for frame in traceback.extract_tb(error.__traceback__):
        is_machinery = any(part in frame.filename for part in MACHINERY)
        if frame.filename != __file__ and not is_machinery:
            # the last of these frames is where the error was raised
            place = f"{frame.filename}:{frame.lineno}"
    # an empty place leaves no separator in front
    return f"{place}: {type(error).__name__}: {error}".removeprefix(": ")


def _locate_entry(path: Path, target: str) -> str:
    """Return ``FILE:LINE: _target_ CLASS`` for an error: the line of the file ``path`` that names a method's class.

    It is line 1 for a method without a YAML file, as no line then names the class.
    """
    lines = path.read_text("utf-8").splitlines()
    line_number = next((number for number, text in enumerate(lines, 1) if "_target_" in text), 1)
    return f"{path}:{line_number}: _target_ {target}"


def _locate_class(cls: type) -> str:
    """Return ``FILE:LINE`` of a class for an error, or the name of its module if its source is unknown."""
    try:
        _, line_number = inspect.getsourcelines(cls)
        return f"{inspect.getsourcefile(cls)}:{line_number}"
    except (OSError, TypeError):
        return cls.__module__

"""What the source of a method says of it, read without running it: lists of methods must not wait for torch."""

from __future__ import annotations

import ast
from importlib.util import resolve_name
from pathlib import Path
from typing import Any, NamedTuple

import kvbench
from kvbench.base.errors import UsageError
from kvbench.methods.core.knobs import DEFAULT_RATIO

UNDESCRIBED = "no description: the first line of its file's docstring would stand here"


class Described(NamedTuple):
    """The first line of a method's docstring, and its knobs with their defaults."""

    about: str
    knobs: dict[str, Any]


def describe(path: Path, method: str) -> Described:
    """Return what the file ``path`` says of its method with the id ``method``.

    Its line is that of the file's docstring, or of the class's where the file has none or holds several methods. Knobs
    are those of the class and of the classes that it derives from, as far as kvbench or a file beside it has them; a
    default that is no plain value is its source. Raises UsageError, with the line, for a file that is not Python.
    """
    tree = _parsed(path)
    methods = {_id_of(c): c for c in tree.body if isinstance(c, ast.ClassDef) and _id_of(c)}
    if method not in methods:
        raise UsageError(f"{path}: no class at its top level has id = {method!r}")
    docstrings = [ast.get_docstring(tree), ast.get_docstring(methods[method])]
    if len(methods) > 1:
        docstrings.reverse()
    lines = [text.strip().splitlines()[0] for text in docstrings if text and text.strip()]
    try:
        knobs = _knobs_of(methods[method], tree, path)
    except RecursionError:
        raise UsageError(f"{path}: the classes of {method} derive from each other in a circle") from None
    if "kv_size" in knobs and knobs["kv_size"] is None and knobs.get("kv_ratio", 0) is None:
        knobs["kv_ratio"] = DEFAULT_RATIO  # what a selector takes where neither is given
    return Described(lines[0] if lines else UNDESCRIBED, knobs)


def _parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    try:
        return ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        line, reason = getattr(error, "lineno", None) or 1, getattr(error, "msg", error)
        raise UsageError(f"{path}:{line}: {type(error).__name__}: {reason}") from error


def _id_of(cls: ast.ClassDef) -> str:
    """Return the id that a class gives itself, or ''."""
    for name, _, value in _assignments(cls.body):
        if name == "id" and isinstance(value, ast.Constant) and isinstance(value.value, str):
            return value.value
    return ""


def _assignments(body: list[ast.stmt]) -> list[tuple[str, str, ast.expr | None]]:
    """Return (name, annotation or '', value) of each assignment to a single name."""
    assignments = []
    for line in body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            assignments.append((line.target.id, ast.unparse(line.annotation), line.value))
        elif isinstance(line, ast.Assign) and len(line.targets) == 1 and isinstance(line.targets[0], ast.Name):
            assignments.append((line.targets[0].id, "", line.value))
    return assignments


def _knobs_of(cls: ast.ClassDef, tree: ast.Module, path: Path) -> dict[str, Any]:
    """Return the knobs of a class with their defaults, those of the classes that it derives from first."""
    knobs: dict[str, Any] = {}
    for base in reversed(cls.bases):
        source = _class_named(ast.unparse(base), tree, path, cls.lineno)
        if source is not None:
            knobs |= _knobs_of(*source)
    if not any("dataclass" in ast.unparse(decorator) for decorator in cls.decorator_list):
        return knobs  # its annotations are no fields
    constants = {name: value for name, _, value in _assignments(tree.body)}
    for name, annotation, value in _assignments(cls.body):
        if annotation and "ClassVar" not in annotation and not _is_no_knob(value):
            knobs[name] = _default(value, constants)
    return knobs


def _class_named(
    name: str, tree: ast.Module, path: Path, above: float = float("inf")
) -> tuple[ast.ClassDef, ast.Module, Path] | None:
    """Return the class that ``name`` means in a file ``above`` a line, with the file that has it.

    Return None for a class of another package.
    """
    for line in tree.body:
        if isinstance(line, ast.ClassDef) and line.name == name and line.lineno < above:
            return line, tree, path
    for line in tree.body:
        if not isinstance(line, ast.ImportFrom):
            continue
        module = line.module or ""
        if line.level:
            module = resolve_name("." * line.level + module, "kvbench.methods")
        for imported in line.names:
            source = _file_of(module) if (imported.asname or imported.name) == name else None
            if source is not None:
                return _class_named(imported.name, _parsed(source), source)
    return None


def _file_of(module: str) -> Path | None:
    """Return the file of a module of kvbench, methods of one's own among them; None for another."""
    package, *names = module.split(".")
    if package != "kvbench" or not names:
        return None
    in_methods = names[0] == "methods" and len(names) == 2
    folders = kvbench.methods.__path__ if in_methods else [str(Path(*kvbench.__path__, *names[:-1]))]
    files = [Path(folder, f"{names[-1]}.py") for folder in folders]
    return next((file for file in files if file.is_file()), None)


def _is_no_knob(value: ast.expr | None) -> bool:
    """Tell whether a field says that users do not set it: metadata={"knob": False}."""
    if not isinstance(value, ast.Call):
        return False
    return any(k.arg == "metadata" and "'knob': False" in ast.unparse(k.value) for k in value.keywords)


def _default(value: ast.expr | None, constants: dict[str, ast.expr | None]) -> Any:
    """Return a knob's default: a plain value, a constant of the file, or the first argument of ``knob``."""
    if isinstance(value, ast.Call):
        named = [k.value for k in value.keywords if k.arg == "default"]
        value = next(iter([*value.args, *named]), value)
    if isinstance(value, ast.Name):
        value = constants.get(value.id) or value
    if value is None:
        return None
    try:
        plain = ast.literal_eval(value)
    except ValueError:
        return ast.unparse(value)
    return list(plain) if isinstance(plain, tuple) else plain

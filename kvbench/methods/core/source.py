"""The description and the knobs of a method, read from its source without running it.

Lists of methods must not wait for torch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from importlib.util import resolve_name
from pathlib import Path
from typing import Any, NamedTuple

import kvbench.methods
from kvbench.base.errors import UsageError
from kvbench.methods.core.knobs import DEFAULT_RATIO

UNDESCRIBED = "no description: the first line of its file's docstring would stand here"
"""The description of a method without a docstring."""


class _Assignment(NamedTuple):
    """An assignment to a single name in the body of a class or module.

    annotation: the source of the annotation; '' without one.
    value: the syntax tree of the value; None for a name that is only annotated.
    """

    name: str
    annotation: str
    value: ast.expr | None


class Described(NamedTuple):
    """A method as lists show it.

    about: the first line of its docstring.
    knobs: its knobs with their defaults.
    """

    about: str
    knobs: dict[str, Any]


class Field(NamedTuple):
    """A knob of a class, as the class's source states it.

    annotation: the source of its annotation.
    default: its default value, or the source of one that must be computed.
    rule: the source of its rule; '' for a knob without one.
    """

    annotation: str
    default: object
    rule: str


def read_fields(target: str) -> dict[str, Field]:
    """Return the knobs by name of a class of kvbench, such as ``kvbench.methods.snapkv.SnapKV``. It is not imported."""
    module, _, name = target.rpartition(".")
    file = _find_file(module)
    definition = None if file is None else _find_class(name, _parse_file(file), file)
    if definition is None:
        return {}
    return _read_knobs(*definition)


def describe(path: Path, method: str) -> Described:
    """Return the description and the knobs of the method with the id ``method``, read from the file ``path``.

    ``about`` comes from the file's docstring, or from the class's docstring if the file has none or holds several
    methods. The knobs are those of the class and of its base classes, as far as kvbench or a folder of KVBENCH_METHODS
    defines these. A default that is no plain value is shown as its source.

    Raises UsageError for a file that is not Python, with the line, and for a file without such a method. It is also
    raised for classes that derive from each other in a circle.
    """
    tree = _parse_file(path)
    methods = {_read_id(c): c for c in tree.body if isinstance(c, ast.ClassDef) and _read_id(c)}
    if method not in methods:
        raise UsageError(f"{path}: no class at its top level has id = {method!r}")
    docstrings = [ast.get_docstring(tree), ast.get_docstring(methods[method])]
    if len(methods) > 1:
        # the file's docstring speaks of all its methods, so the class's docstring comes first
        docstrings.reverse()
    about = _read_first_line(docstrings) or UNDESCRIBED
    try:
        knobs = {name: field.default for name, field in _read_knobs(methods[method], tree, path).items()}
    except RecursionError:
        raise UsageError(f"{path}: the classes of {method} derive from each other in a circle") from None
    # a selector takes this ratio where neither knob is set, see ``Selector.check``
    if all(knob in knobs and knobs[knob] is None for knob in ("kv_size", "kv_ratio")):
        knobs["kv_ratio"] = DEFAULT_RATIO
    return Described(about, knobs)


def _read_first_line(docstrings: Iterable[str | None]) -> str:
    """Return the first line of the first docstring that has one, or ''."""
    for docstring in docstrings:
        if docstring and docstring.strip():
            return docstring.strip().splitlines()[0]
    return ""


def _parse_file(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError) as error:
        # the ValueError of a null byte, in early releases of Python 3.11, has neither a line nor a message of its own
        line, reason = getattr(error, "lineno", None) or 1, getattr(error, "msg", error)
        raise UsageError(f"{path}:{line}: {type(error).__name__}: {reason}") from error


def _read_id(cls: ast.ClassDef) -> str:
    """Return the id that a class sets in its body (``id = "snapkv"``), or ''."""
    for assignment in _list_assignments(cls.body):
        value = assignment.value
        if assignment.name == "id" and isinstance(value, ast.Constant) and isinstance(value.value, str):
            return value.value
    return ""


def _list_assignments(body: list[ast.stmt]) -> list[_Assignment]:
    assignments: list[_Assignment] = []
    for stmt in body:
        if isinstance(stmt, ast.AnnAssign) and isinstance(stmt.target, ast.Name):
            assignments.append(_Assignment(stmt.target.id, ast.unparse(stmt.annotation), stmt.value))
        elif isinstance(stmt, ast.Assign) and len(stmt.targets) == 1:
            (target,) = stmt.targets
            if isinstance(target, ast.Name):
                assignments.append(_Assignment(target.id, "", stmt.value))
    return assignments


def _read_knobs(cls: ast.ClassDef, tree: ast.Module, path: Path) -> dict[str, Field]:
    """Return the knobs of a class by name, the knobs of its base classes first.

    tree, path: the file that defines the class.
    """
    knobs: dict[str, Field] = {}
    # a field of the first base wins over one of the last, as in a dataclass
    for base in reversed(cls.bases):
        definition = _find_class(ast.unparse(base), tree, path, above=cls.lineno)
        if definition is not None:
            base_class, base_tree, base_path = definition
            knobs |= _read_knobs(base_class, base_tree, base_path)
    # only a dataclass makes fields of its annotations
    if not any("dataclass" in ast.unparse(decorator) for decorator in cls.decorator_list):
        return knobs
    constants = {assignment.name: assignment.value for assignment in _list_assignments(tree.body)}
    for assignment in _list_assignments(cls.body):
        is_field = assignment.annotation and "ClassVar" not in assignment.annotation
        if is_field and not _is_no_knob(assignment.value):
            # a rule holds in subclasses, too
            rule = _read_rule(assignment.value)
            if not rule and assignment.name in knobs:
                rule = knobs[assignment.name].rule
            default = _read_default(assignment.value, constants)
            knobs[assignment.name] = Field(assignment.annotation, default, rule)
    return knobs


def _read_rule(value: ast.expr | None) -> str:
    """Return the source of the rule in a field's ``knob(default, rule)``; '' for any other value."""
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "knob" and len(value.args) == 2:
        return ast.unparse(value.args[1])
    return ""


def _find_class(
    name: str, tree: ast.Module, path: Path, above: float = float("inf")
) -> tuple[ast.ClassDef, ast.Module, Path] | None:
    """Return the class that ``name`` means in a file, with the syntax tree and the path of the file that defines it.

    The class is one that the file imports, or defines above the line number ``above``: a base class stands above its
    subclass. Return None for a class of another package.
    """
    for stmt in tree.body:
        if isinstance(stmt, ast.ClassDef) and stmt.name == name and stmt.lineno < above:
            return stmt, tree, path
    for stmt in tree.body:
        if not isinstance(stmt, ast.ImportFrom):
            continue
        module = _resolve_module(stmt)
        for imported in stmt.names:
            # the class may have another name in this file: ``from a import b as name``
            if (imported.asname or imported.name) != name:
                continue
            file = _find_file(module)
            if file is not None:
                return _find_class(imported.name, _parse_file(file), file)
    return None


def _resolve_module(stmt: ast.ImportFrom) -> str:
    """Return the full name of the module from which a method's file imports."""
    module = stmt.module or ""
    if not stmt.level:
        return module
    # a relative import; files of the user's folders are modules of kvbench.methods, too
    return resolve_name("." * stmt.level + module, "kvbench.methods")


def _find_file(module: str) -> Path | None:
    """Return the file of a module of kvbench, the user's methods among them, or None for another module."""
    names = module.split(".")
    if names[0] != "kvbench" or len(names) == 1:
        return None
    if names[1] == "methods" and len(names) == 3:
        # kvbench/methods itself, and the folders that KVBENCH_METHODS names
        folders = list(kvbench.methods.__path__)
    else:
        folders = [str(Path(*kvbench.__path__).joinpath(*names[1:-1]))]
    for folder in folders:
        file = Path(folder, f"{names[-1]}.py")
        if file.is_file():
            return file
    return None


def _is_no_knob(value: ast.expr | None) -> bool:
    """Return True if a field is marked as no knob: field(metadata={"knob": False})."""
    if not isinstance(value, ast.Call):
        return False
    # unparse writes single quotes, whichever the author used
    return any(
        keyword.arg == "metadata" and "'knob': False" in ast.unparse(keyword.value) for keyword in value.keywords
    )


def _read_default(value: ast.expr | None, constants: Mapping[str, ast.expr | None]) -> object:
    """Return a knob's default, or its source if it must be computed; None for a knob without a default.

    value: the default as the class states it: a value, the name of a constant, or a call of ``knob`` or ``field``.
    constants: {name: value} of the assignments in the file of the class.
    """
    if isinstance(value, ast.Call):
        # knob(0.5, rule), or field(default=0.5)
        arguments = value.args + [keyword.value for keyword in value.keywords if keyword.arg == "default"]
        if arguments:
            value = arguments[0]
    if isinstance(value, ast.Name):
        # a name that the file does not define keeps its name, which is unparsed below
        value = constants.get(value.id) or value
    if value is None:
        return None
    try:
        plain = ast.literal_eval(value)
    except ValueError:
        # an expression that must be computed: its source says most
        return ast.unparse(value)
    # entries of YAML files have lists as well
    return list(plain) if isinstance(plain, tuple) else plain

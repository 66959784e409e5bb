"""The registry of methods, with their knobs and aliases.

A method is a stage with an id in a file of kvbench/methods. Its YAML file in conf/method has its knobs as users see
them, with a comment each; a method without one has the knobs of its class.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvbench.methods
from kvbench.base.conf import conf_dir, entry_of, read_yaml
from kvbench.base.errors import UsageError, unknown
from kvbench.base.extras import require
from kvbench.methods.core.loading import entry_of_class, load_stage, syntax_error
from kvbench.methods.core.source import Described, describe

# the command line reads the registry for --help, which must not wait for torch
if TYPE_CHECKING:
    from kvbench.methods.core.base import Stage

BUDGET_KNOBS = ("kv_size", "kv_ratio")
ALWAYS_NAMED = (*BUDGET_KNOBS, "ratio", "value_ratio")
"""Knobs that a label names even where they have their plain default."""
PER = "per"
"""The one setting of a whole chain: the heads under which it stores."""
# from stages written together to the one method that they mean, and the knob values that they imply
ALIASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "h2o+quant": ("qhitter", {"lam": 1}),
    "q4_0_h": ("q4_0", {"rotate": "hadamard"}),
    "q8_0_h": ("q8_0", {"rotate": "hadamard"}),
}
# the line of a class that names its method
ID = re.compile(r"""^(?: {2,4}|\t)id *(?:: *[\w.\[\]]+ *)?= *["']([\w-]+)["']""", re.MULTILINE)


@cache
def available() -> tuple[str, ...]:
    """Return the ids of all methods, ``full`` included."""
    return tuple(sorted({p.stem for p in (conf_dir() / "method").glob("*.yaml")} | _modules().keys()))


@cache
def defaults(method: str) -> dict[str, Any]:
    """Return the entry of one method, ``_target_`` and its knobs with their plain defaults, or {} for ``full``."""
    if of_kvpress(method):
        require("kvpress", "method=kvpress:NAME")
        from kvbench.methods.core.kvpress import stage_class

        method = stage_class(method).id
        return entry_of_class(path_of(method), method)
    if method not in available():
        raise unknown_method(method)
    path = _only_file(method)
    return entry_of(path) if path.suffix == ".yaml" else entry_of_class(path, method)


def described(method: str) -> Described:
    """Return what the file of a method without a YAML file says of it, without running it."""
    return describe(_only_file(method), method)


def _only_file(method: str) -> Path:
    """Return ``path_of(method)``. Raises UsageError where two files have a method of this id."""
    modules = _modules().get(method, ())
    if len(modules) > 1:
        raise UsageError(f"{modules[1]}: its id {method!r} is also that of {modules[0]}: choose another id")
    return path_of(method)


def of_kvpress(method: str) -> bool:
    """Tell whether a method is a press of the package kvpress: ``kvpress:snapkv``."""
    return method.startswith("kvpress:")


@cache
def _kvpress() -> dict[str, Any]:
    return read_yaml(Path(__file__).with_name("kvpress.yaml"))


def _own_files() -> list[Path]:
    """Return the files of methods that are not kvbench's own."""
    return [path for path in _files()[1] if path.name[0] != "_"]


def broken_files() -> dict[Path, str]:
    """Return for each file of the user's methods that is no Python the sentence that says so."""
    errors = {path: syntax_error(path) for path in _own_files()}
    return {p: f"{error}, so that no method of this file is known." for p, error in errors.items() if error is not None}


def unknown_method(method: str) -> UsageError:
    """Return the error for a name that is no method. It says what a press of kvpress is called here, if it is there."""
    name = re.sub(r"[-_]|press$", "", method.lower())
    here = name if name in available() else _kvpress()["methods"].get(name)
    if here is not None:
        return UsageError(f"unknown method {method!r}: it is method={here} here (docs/differences.md has what differs)")
    if name in _kvpress()["missing"]:
        return UsageError(
            f"kvbench has no {method}, a press of kvpress. Available: {', '.join(available())}; and, where kvpress is "
            "installed, method=kvpress:NAME (python -m kvbench list kvpress)."
        )
    hints = ["Join methods with +, as in method=snapkv+think."]
    own_files = _own_files()
    broken = broken_files()
    hints += broken.values()
    if nameless := [str(path) for path in own_files if path not in broken and not _ids(path)]:
        hints.append(f'No class with a line id = "..." is in {", ".join(nameless)}.')
    return unknown("method", method, available(), " ".join(hints))


def unknown_knob(knob: str, value: Any, names: Iterable[str], hint: str) -> UsageError:
    """Return the error for a name that is no knob. It says what a knob of kvpress is called here."""
    here = _kvpress()["knobs"].get(knob)
    if here is not None:
        return UsageError(f"unknown knob {knob!r}: kvpress's {knob} is {here}= here")
    if knob == "compression_ratio":
        values = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
        with suppress(ValueError, TypeError):
            ratios = ",".join(f"{1 - float(v):g}" for v in values)
            return UsageError(f"unknown knob {knob!r}: it is the fraction removed; kv_ratio={ratios} is what is kept")
    owners = []
    for method in sorted(path.stem for path in (conf_dir() / "method").glob("*.yaml")):
        with suppress(UsageError):  # of a file that cannot be read
            if knob in defaults(method):
                owners.append(method)
    if owners and knob not in BUDGET_KNOBS:  # why a method has no budget is in the hint
        have = "have" if len(owners) > 1 else "has"
        return UsageError(f"unknown knob {knob!r} of what is asked for: {', '.join(owners)} {have} it")
    return unknown("knob", knob, names, hint)


def path_of(method: str) -> Path:
    """Return the file in which a method's knobs are written: its YAML file, or its module if there is none."""
    if of_kvpress(method):
        return Path(__file__).with_name("kvpress.py")
    path = conf_dir() / "method" / f"{method}.yaml"
    return path if path.exists() else _modules().get(method, (path,))[0]


def _files() -> tuple[list[Path], list[Path]]:
    """Return the files of kvbench/methods, and those of the folders that KVBENCH_METHODS names."""
    folders = list(map(Path, kvbench.methods.__path__))
    missing = next((folder for folder in folders if not folder.is_dir()), None)
    if missing is not None:
        raise UsageError(f"KVBENCH_METHODS={missing}: there is no such folder; name one that holds files of methods")
    files = [[path for path in sorted(folder.glob("*.py")) if path.is_file()] for folder in folders]
    return files[0], [path for others in files[1:] for path in others]


def _ids(path: Path) -> list[str]:
    """Return the ids of the methods that a file defines."""
    return ID.findall(path.read_text("utf-8", "replace"))


@cache
def _modules() -> dict[str, tuple[Path, ...]]:
    """Return {method id: files of kvbench/methods or KVBENCH_METHODS that define it}, without importing them."""
    definitions = [(method, path) for files in _files() for path in files for method in _ids(path)]
    return {method: tuple(path for m, path in definitions if m == method) for method, _ in definitions}


def knob_names(method: str) -> tuple[str, ...]:
    """Return the names of a method's knobs."""
    return tuple(k for k in defaults(method) if not k.startswith("_"))


def split(method: str) -> tuple[str, ...]:
    """Return the ids in a method, ``('snapkv', 'think')`` for ``'snapkv+think'``, with aliases resolved.

    Raises UsageError if a part is empty, is no method or is written twice, and if ``full`` stands beside others.
    """
    parts = tuple(p.strip() for p in method.split("+"))
    parts = tuple(defaults(p)["_target_"].rpartition(".")[2] if of_kvpress(p) else p for p in parts)
    for alias, (method_id, _) in ALIASES.items():
        if set(alias.split("+")) <= set(parts):
            parts = tuple(dict.fromkeys(method_id if p in alias.split("+") else p for p in parts))
    for part in parts:
        if not part:
            raise UsageError(f"method={method!r} has an empty part: write one id, or several joined by +")
        defaults(part)
    twice = next((p for p in parts if parts.count(p) > 1), None)
    if twice:
        raise UsageError(f"method={method!r} names {twice} twice")
    if "full" in parts and len(parts) > 1:
        raise UsageError(f"method={method!r}: full keeps everything as it is and is written alone")
    return parts


def settled(method: str) -> dict[str, Any]:
    """Return the knob values that aliases in ``method`` imply, by key (``qhitter.lam``); {} without an alias."""
    parts = {p.strip() for p in method.split("+")}
    meanings = [meaning for alias, meaning in ALIASES.items() if set(alias.split("+")) <= parts]
    return {f"{method_id}.{knob}": value for method_id, knobs in meanings for knob, value in knobs.items()}


def as_written(name: str, written: str) -> str:
    """Return a chain's ``name`` with its ids replaced by the aliases that the user wrote for them in ``written``."""
    parts = {p.strip() for p in written.split("+")}
    aliases = {method_id: alias for alias, (method_id, _) in ALIASES.items() if set(alias.split("+")) <= parts}
    return "+".join(aliases.get(p, p) for p in name.split("+"))


def by_size(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry with a single value for each knob whose value depends on the budget.

    Of ``{kv_size: value, ...}`` it is the value at the nearest kv_size on a log scale, or at the largest kv_size where
    the budget is a fraction (our choice).
    """
    size = entry.get("kv_size")
    size = size if isinstance(size, int) and size > 0 else None

    def choose(value: Any) -> Any:
        if not isinstance(value, Mapping) or not value or not all(isinstance(s, int) and s > 0 for s in value):
            return value
        if size is None:
            return value[max(value)]
        return value[min(sorted(value), key=lambda s: abs(math.log(s / size)))]

    return {k: choose(v) for k, v in entry.items()}


def make_stage(method: str, entry: Mapping[str, Any]) -> Stage:
    """Build the stage of one entry (``_target_`` and knobs). Raises UsageError for a knob that it does not have."""
    knobs = {k: v for k, v in entry.items() if not k.startswith("_")}
    for knob in knobs:
        if knob not in knob_names(method):
            raise unknown(f"knob method.{method}.{knob}; its name", knob, knob_names(method))
    return load_stage(path_of(method), method, entry.get("_target_") or defaults(method)["_target_"], knobs)


def owners(methods: Sequence[str], key: str, value: Any = None) -> list[str]:
    """Return the ids of the stages of ``methods`` that own the knob ``key``, which is to get ``value``.

    Raises UsageError if there is none, or if two stages of one method have a knob that is named without its stage.
    """
    chains = [split(m) for m in methods]
    stage, knob = stage_of(key), knob_of(key)
    present = list(dict.fromkeys(part for chain in chains for part in chain))
    if stage:
        if stage not in present:
            raise unknown(f"knob {key!r}: no entry has the method", stage, present)
        return [stage]
    owning: list[str] = []
    for chain in chains:
        stages = [part for part in chain if knob in knob_names(part)]
        if len(stages) > 1:
            keys = " and ".join(f"method.{s}.{knob}" for s in stages)
            raise UsageError(f"knob {knob!r} is owned by two stages of {'+'.join(chain)}: set {keys} by its full key")
        owning += [s for s in stages if s not in owning]
    if not owning:
        names = {k for s in present for k in knob_names(s)} | {PER}
        method_names = ", ".join("+".join(c) for c in chains)
        note = " There is no budget of tokens to set." if knob in BUDGET_KNOBS else ""
        raise unknown_knob(knob, value, names, f"These are the knobs of {method_names}.{note}")
    return owning


def check_settled(methods: Sequence[str], key: str, value: Any) -> None:
    """Raise UsageError if aliases imply the value of a knob in all of ``methods`` that have it."""
    stage, knob = stage_of(key), knob_of(key)
    owning = [
        (method, part)
        for method in methods
        for part in split(method)
        if knob in knob_names(part) and stage in ("", part)
    ]
    if owning and all(f"{part}.{knob}" in settled(method) for method, part in owning):
        method, part = owning[0]
        raise UsageError(
            f"{key}={value} is not possible: {method} is {part} with {knob}={settled(method)[f'{part}.{knob}']}; "
            f"write method={part} {knob}={value}"
        )


def stage_of(key: str) -> str:
    """Return the stage in a knob's key: ``'snapkv'`` of ``'method.snapkv.window'`` or ``'snapkv.window'``, else ''."""
    return key.rpartition(".")[0].removeprefix("method.")


def knob_of(key: str) -> str:
    """Return the knob in its key: ``'window'`` of ``'method.snapkv.window'``, ``'snapkv.window'`` or ``'window'``."""
    return key.rpartition(".")[2]

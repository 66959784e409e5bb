"""Which methods there are, their knobs and their aliases.

A method is a stage with an id in a file of kvbench/methods. Its YAML file in conf/method has its knobs as users see
them, with a comment each; a method without one has the knobs of its class.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvbench.methods
from kvbench.conf import conf_dir, entry_of
from kvbench.errors import UsageError, unknown
from kvbench.methods.loading import entry_of_class, load_stage

# the command line reads the registry for --help, which must not wait for torch
if TYPE_CHECKING:
    from kvbench.methods.base import Stage

BUDGET_KNOBS = ("kv_size", "kv_ratio")
PER = "per"
"""The one setting of a whole chain: the heads under which it stores."""
# stages written together that are one method with some knobs settled
ALIASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {"h2o+quant": ("qhitter", {"lam": 1})}


ID = re.compile(r'^    id(?:: ClassVar\[str\])? = "([\w-]+)"', re.MULTILINE)


@cache
def available() -> tuple[str, ...]:
    """Return the ids of all methods, ``full`` included."""
    return tuple(sorted({p.stem for p in (conf_dir() / "method").glob("*.yaml")} | _modules().keys()))


@cache
def defaults(method: str) -> dict[str, Any]:
    """Return the entry of one method: ``_target_`` and its knobs with their plain defaults; {} for ``full``."""
    if method not in available():
        raise unknown("method", method, available(), "Join methods with +, as in method=snapkv+think.")
    path = path_of(method)
    return entry_of(path) if path.suffix == ".yaml" else entry_of_class(path, method)


def path_of(method: str) -> Path:
    """Return the file that a method's knobs stand in: its YAML file, or its module where it has none."""
    path = conf_dir() / "method" / f"{method}.yaml"
    return path if path.exists() else _modules().get(method, path)


@cache
def _modules() -> dict[str, Path]:
    """The files of kvbench/methods by the ids of the methods that they define, read without importing them."""
    files = [path for folder in kvbench.methods.__path__ for path in Path(folder).glob("*.py")]
    return {method: path for path in files for method in ID.findall(path.read_text("utf-8"))}


def knob_names(method: str) -> tuple[str, ...]:
    """The knobs of one method."""
    return tuple(k for k in defaults(method) if not k.startswith("_"))


def split(method: str) -> tuple[str, ...]:
    """``'snapkv+think'`` -> ``('snapkv', 'think')``, aliases resolved; checks that every part is a method."""
    parts = tuple(p.strip() for p in method.split("+"))
    for alias, (one, _) in ALIASES.items():
        if set(alias.split("+")) <= set(parts):
            parts = tuple(dict.fromkeys(one if p in alias.split("+") else p for p in parts))
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
    """Return what an alias in ``method`` settles, by key (``qhitter.lam``); {} where there is none."""
    parts = {p.strip() for p in method.split("+")}
    stages = [stage for alias, stage in ALIASES.items() if set(alias.split("+")) <= parts]
    return {f"{one}.{knob}": value for one, knobs in stages for knob, value in knobs.items()}


def as_written(name: str, written: str) -> str:
    """A chain's ``name`` with the aliases that are in the method ``written`` in place of what they stand for."""
    parts = {p.strip() for p in written.split("+")}
    known = {one: alias for alias, (one, _) in ALIASES.items() if set(alias.split("+")) <= parts}
    return "+".join(known.get(p, p) for p in name.split("+"))


def make_stage(method: str, entry: Mapping[str, Any]) -> Stage:
    """The stage of one YAML entry (``_target_`` and knobs); raises UsageError for a knob that it does not have."""
    knobs = {k: v for k, v in entry.items() if not k.startswith("_")}
    for knob in knobs:
        if knob not in knob_names(method):
            raise unknown(f"knob method.{method}.{knob}; its name", knob, knob_names(method))
    return load_stage(path_of(method), method, entry.get("_target_") or defaults(method)["_target_"], knobs)


def owners(methods: Sequence[str], key: str) -> list[str]:
    """Return the stages of ``methods`` that the knob ``key`` belongs to.

    Raises UsageError if there is none, if two stages of one method have a bare knob, or if an alias settles it.
    """
    chains = [split(m) for m in methods]
    stage, knob = stage_of(key), knob_of(key)
    present = list(dict.fromkeys(part for chain in chains for part in chain))
    if stage:
        if stage not in present:
            raise unknown(f"knob {key!r}: no entry has the method", stage, present)
        return [stage]
    having: list[str] = []
    for chain in chains:
        stages = [part for part in chain if knob in knob_names(part)]
        if len(stages) > 1:
            keys = " and ".join(f"method.{s}.{knob}" for s in stages)
            raise UsageError(f"knob {knob!r} is owned by two stages of {'+'.join(chain)}: set {keys} by its full key")
        having += [s for s in stages if s not in having]
    if not having:
        names = {k for s in present for k in knob_names(s)} | {PER}
        written = ", ".join("+".join(c) for c in chains)
        why = " There is no budget of tokens to set." if knob in BUDGET_KNOBS else ""
        raise unknown("knob", knob, names, f"These are the knobs of {written}.{why}")
    return having


def check_settled(methods: Sequence[str], key: str, value: Any) -> None:
    """Raise UsageError for a knob that aliases settle in all of ``methods`` that have it."""
    stage, knob = stage_of(key), knob_of(key)
    having = [
        (method, part)
        for method in methods
        for part in split(method)
        if knob in knob_names(part) and stage in ("", part)
    ]
    if having and all(f"{part}.{knob}" in settled(method) for method, part in having):
        method, part = having[0]
        raise UsageError(
            f"{key}={value} is not possible: {method} is {part} with {knob}={settled(method)[f'{part}.{knob}']}; "
            f"write method={part} {knob}={value}"
        )


def stage_of(key: str) -> str:
    """``'method.snapkv.window'`` or ``'snapkv.window'`` -> ``'snapkv'``; ``''`` for a bare knob."""
    return key.rpartition(".")[0].removeprefix("method.")


def knob_of(key: str) -> str:
    """``'method.snapkv.window'``, ``'snapkv.window'`` or ``'window'`` -> ``'window'``."""
    return key.rpartition(".")[2]

"""From what users type (``snapkv+think``, knobs) to chains. The YAML files in conf/method are the registry."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.conf import conf_dir, entry_of
from kvbench.errors import UsageError, unknown
from kvbench.methods.loading import load_stage

# the command line reads the registry for --help, which must not wait for torch
if TYPE_CHECKING:
    from kvbench.methods.base import Stage
    from kvbench.methods.chain import Chain

CHAIN_KNOBS = ("per",)
BUDGET_KNOBS = ("kv_size", "kv_ratio")
BUDGET_PARTS = ("heavy_ratio", "recent_ratio", "half_ratio", "high", "low")
# stages written together that are one method with some knobs settled
ALIASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {"h2o+quant": ("qhitter", {"lam": 1})}


@cache
def available() -> tuple[str, ...]:
    """The ids of all methods, ``full`` included."""
    return tuple(sorted(p.stem for p in (conf_dir() / "method").glob("*.yaml")))


@cache
def defaults(method: str) -> dict[str, Any]:
    """The YAML entry of one method: ``_target_`` and its knobs with their plain defaults; {} for ``full``."""
    if method not in available():
        raise unknown("method", method, available(), "Join methods with +, as in method=snapkv+think.")
    return entry_of(path_of(method))


def path_of(method: str) -> Path:
    """The YAML file of one method."""
    return conf_dir() / "method" / f"{method}.yaml"


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


def settled(method: str) -> dict[tuple[str, str], Any]:
    """What an alias in ``method`` settles, by method id and knob; {} where there is none."""
    parts = {p.strip() for p in method.split("+")}
    found = [stage for alias, stage in ALIASES.items() if set(alias.split("+")) <= parts]
    return {(one, knob): value for one, knobs in found for knob, value in knobs.items()}


def as_written(name: str, written: str) -> str:
    """A chain's ``name`` with the aliases that are in the method ``written`` in place of what they stand for."""
    parts = {p.strip() for p in written.split("+")}
    known = {one: alias for alias, (one, _) in ALIASES.items() if set(alias.split("+")) <= parts}
    return "+".join(known.get(p, p) for p in name.split("+"))


def check_sets(methods: Iterable[str]) -> None:
    """Raise UsageError, with the reason, for a method whose stages cannot form one, whatever their knobs."""
    from kvbench.methods.legal_sets import check_set

    for method in methods:
        fixed = settled(method)
        entries = {m: {**defaults(m), **{k: v for (o, k), v in fixed.items() if o == m}} for m in split(method)}
        check_set([make_stage(m, by_size(e)) for m, e in entries.items() if e])


def check_settled(methods: Sequence[str], key: str, value: Any) -> None:
    """Raise UsageError for a knob that aliases settle in all of ``methods`` that have it."""
    knob, owner = _knob(key), _method(key)
    having = [m for m in methods if any(knob in knob_names(p) and owner in ("", p) for p in split(m))]
    fixed = [settled(m).get((p, knob)) for m in having for p in split(m) if knob in knob_names(p)]
    if having and all(v is not None for v in fixed):
        one = next(p for p in split(having[0]) if knob in knob_names(p))
        raise UsageError(
            f"{key}={value} is not possible: {having[0]} is {one} with {knob}={fixed[0]}; write method={one} "
            f"{knob}={value}"
        )


def make_stage(method: str, entry: Mapping[str, Any]) -> Stage:
    """The stage of one YAML entry (``_target_`` and knobs); raises UsageError for a knob that it does not have."""
    knobs = {k: v for k, v in entry.items() if not k.startswith("_")}
    for knob in knobs:
        if knob not in knob_names(method):
            raise unknown(f"knob method.{method}.{knob}; its name", knob, knob_names(method))
    return load_stage(path_of(method), entry.get("_target_") or defaults(method)["_target_"], knobs)


def make_chain(entries: Mapping[str, Mapping[str, Any]], per: str = "kv_head") -> Chain:
    """The chain of several YAML entries by method id."""
    from kvbench.methods.chain import Chain

    stages = tuple(make_stage(m, e) for m, e in entries.items() if m != "full")
    return Chain(stages, per)  # type: ignore[arg-type]


def route(chains: Sequence[Sequence[str]], knob: str) -> list[str]:
    """The methods that a bare ``knob`` belongs to: every owner in any of ``chains`` (lists of method ids).

    Raises UsageError if no chain owns it, or if two stages of one chain do.
    """
    owners: list[str] = []
    for chain in chains:
        mine = [m for m in chain if knob in knob_names(m)]
        if len(mine) > 1:
            keys = " and ".join(f"method.{m}.{knob}" for m in mine)
            raise UsageError(f"knob {knob!r} is owned by two stages of {'+'.join(chain)}: set {keys} by its full key")
        owners += [m for m in mine if m not in owners]
    if not owners:
        names = {k for chain in chains for m in chain for k in knob_names(m)} | set(CHAIN_KNOBS)
        written = ", ".join("+".join(c) for c in chains)
        why = " There is no budget of tokens to set." if knob in BUDGET_KNOBS else ""
        raise unknown("knob", knob, names, f"These are the knobs of {written}.{why}")
    return owners


def yielding(preset: Mapping[str, Any], methods: Collection[str], typed: Collection[str]) -> dict[str, Any]:
    """What a preset (values by full key) still sets in a run of ``methods`` whose ``typed`` full keys are the user's.

    A typed budget replaces the preset's budget of that method, also where that is written as fractions of its parts.
    """
    left = {}
    for key, value in preset.items():
        method, knob = _method(key), _knob(key)
        budget = knob in BUDGET_KNOBS + BUDGET_PARTS and any(f"method.{method}.{b}" in typed for b in BUDGET_KNOBS)
        if key not in typed and not budget and (not method or method in methods):
            left[key] = value
    return left


def by_size(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The entry with its values that depend on the budget settled.

    Of ``{kv_size: value, ...}`` the value of the nearest kv_size on a log scale, or of the largest where the budget is
    a fraction (our choice).
    """
    size = entry.get("kv_size")
    size = size if isinstance(size, int) and size > 0 else None

    def settle(value: Any) -> Any:
        if not isinstance(value, Mapping) or not value or not all(isinstance(s, int) and s > 0 for s in value):
            return value
        if size is None:
            return value[max(value)]
        return value[min(sorted(value), key=lambda s: abs(math.log(s / size)))]

    return {k: settle(v) for k, v in entry.items()}


def parse(
    entry: str | Mapping[str, Any], knobs: Mapping[str, Any] | None = None, preset: Mapping[str, Any] | None = None
) -> Chain:
    """One chain from a method string, or from ``{"method": ..., knob: value}``; its own knobs must be its own.

    ``preset`` holds values by full key that stand in for the plain defaults.
    """
    given = dict(entry) if isinstance(entry, Mapping) else {"method": entry}
    if "method" not in given:
        raise UsageError(f"the entry {entry!r} names no method: write {{'method': 'snapkv', 'kv_size': 512}}")
    method = str(given.pop("method"))
    check_sets([method])
    parts, fixed = split(method), settled(method)
    for key, value in given.items():
        check_settled([method], key, value)
    fallback = {k: v for k, v in (knobs or {}).items() if _owned(parts, k) and not _fixed(fixed, parts, k)}
    if any(_knob(k) in BUDGET_KNOBS and v is not None for k, v in given.items()):
        fallback = {k: v for k, v in fallback.items() if _knob(k) not in BUDGET_KNOBS}
    return _chain(parts, {**fallback, **given, **{f"{m}.{k}": v for (m, k), v in fixed.items()}}, preset or {})


def parse_all(
    entries: Sequence[str | Mapping[str, Any]], knobs: Mapping[str, Any], preset: Mapping[str, Any] | None = None
) -> list[Chain]:
    """Chains from entries; bare ``knobs`` go to every chain that owns them, and to at least one."""
    strings = [str(e["method"]) if isinstance(e, Mapping) and "method" in e else e for e in entries]
    check_sets(s for s in strings if isinstance(s, str))
    parts = [split(s) for s in strings if isinstance(s, str)]
    for knob, value in knobs.items():
        if knob not in CHAIN_KNOBS:
            _owners(parts, knob)
            check_settled([s for s in strings if isinstance(s, str)], knob, value)
    return [parse(e, knobs, preset) for e in entries]


def _method(key: str) -> str:
    """``'method.snapkv.window'`` or ``'snapkv.window'`` -> ``'snapkv'``; ``''`` for a bare knob."""
    return key.rpartition(".")[0].removeprefix("method.")


def _knob(key: str) -> str:
    return key.rpartition(".")[2]


def _owned(parts: Sequence[str], key: str) -> bool:
    if key in CHAIN_KNOBS:
        return True
    method = _method(key)
    return method in parts if method else any(key in knob_names(m) for m in parts)


def _fixed(fixed: Mapping[tuple[str, str], Any], parts: Sequence[str], key: str) -> bool:
    return any((m, _knob(key)) in fixed for m in parts if _method(key) in ("", m))


def _owners(chains: Sequence[Sequence[str]], key: str) -> list[str]:
    """The methods that a bare knob or a full key belongs to; raises UsageError if no chain has them."""
    method = _method(key)
    if not method:
        return route(chains, key)
    present = {m for chain in chains for m in chain}
    if method not in present:
        raise unknown(f"knob {key!r}: no entry has the method", method, present)
    return [method]


def _chain(parts: Sequence[str], knobs: Mapping[str, Any], preset: Mapping[str, Any]) -> Chain:
    owned = {k: _owners([parts], k) for k in knobs if k not in CHAIN_KNOBS}
    typed = {k if k in CHAIN_KNOBS else f"method.{m}.{_knob(k)}" for k in knobs for m in owned.get(k, [""])}
    base = yielding(preset, parts, typed)
    entries = {m: dict(defaults(m)) for m in parts}
    for key, value in base.items():
        if _method(key):
            entries[_method(key)][_knob(key)] = value
    for key, owners in owned.items():
        knob, value = _knob(key), knobs[key]
        for owner in owners:
            entries[owner][knob] = value
            if knob in BUDGET_KNOBS and value is not None:
                other = BUDGET_KNOBS[1 - BUDGET_KNOBS.index(knob)]
                if not any(_knob(k) == other for k in knobs) and other in entries[owner]:
                    entries[owner][other] = None
    settled = {m: by_size(e) for m, e in entries.items()}
    return make_chain(settled, str({"per": "kv_head", **base, **knobs}["per"]))

"""Chains from methods and knobs, the same way for the command line, the Python interface and papers' tables.

Knobs come in layers, of which a later one wins: the method's plain defaults, the preset, the knobs set for all methods,
the knobs set for one, and those that an alias implies.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.base.conf import check, identity, runtime
from kvbench.base.errors import UsageError, unknown
from kvbench.methods.core import registry
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.foreign import code_of
from kvbench.methods.core.legal_sets import check_set
from kvbench.methods.core.loading import located
from kvbench.methods.core.registry import ALWAYS_NAMED, BUDGET_KNOBS, PER, by_size
from kvbench.methods.core.stage import Stage
from kvbench.methods.core.walls import contained

BUDGET_PARTS = ("heavy_ratio", "recent_ratio", "half_ratio", "high", "low")

Entry = Mapping[str, Any]
"""The knobs of one stage by name."""
Knobs = Mapping[str, Any]
"""Knobs by key: bare (``window``), or full (``snapkv.window``, ``method.snapkv.window``)."""


@dataclass(frozen=True)
class ChainConfig:
    """One chain with its knobs.

    label: the chain's name with the knobs that the user set or swept.
    entries: the knobs by stage, before values that depend on the budget are chosen.
    written: the method as the user typed it.
    """

    chain: Chain = identity()
    label: str = runtime(default="")
    entries: Mapping[str, Entry] = runtime(default_factory=dict)
    written: str = runtime(default="")


def resolve(
    methods: Sequence[str | Mapping[str, Any]], knobs: Knobs | None = None, preset: Knobs | None = None
) -> list[ChainConfig]:
    """Return the chains of ``methods``, each in all combinations of its knobs that are grids, without duplicates.

    A method is a string (``"snapkv+think"``) or a dict (``{"method": "snapkv", "kv_size": 64}``). ``knobs`` go to every
    method that has them, ``preset`` holds values by full key. A knob is a grid where it is a list and its default is
    not, or a list of lists. Raises UsageError for a set of stages that cannot form a chain, a knob that no method has,
    and a value out of range.
    """
    chains: dict[tuple[str, str], ChainConfig] = {}
    for method, per, entries in _settled(methods, knobs or {}, preset or {}):
        for config in _expanded(method, per, entries):
            chains.setdefault((config.chain.name, repr(config.chain.identity())), config)
    return list(chains.values())


def chains_of(
    methods: Sequence[str | Mapping[str, Any]], knobs: Knobs | None = None, preset: Knobs | None = None
) -> list[Chain]:
    """Return one chain per method, in order: as ``resolve``, but no knob is a grid."""
    return [chain_config(entries, per).chain for _, per, entries in _settled(methods, knobs or {}, preset or {})]


def chain_of(method: str | Mapping[str, Any], knobs: Knobs | None = None, preset: Knobs | None = None) -> Chain:
    """Return the chain of one method; here no knob is a grid."""
    return chains_of([method], knobs, preset)[0]


def chain_config(
    entries: Mapping[str, Entry], per: str, swept: Collection[tuple[str, str]] = (), written: str = ""
) -> ChainConfig:
    """Return the chain of ``entries``, which are its knobs by stage, with the label that names it.

    The label always names the knobs in ``swept``, pairs of stage and knob. ``written`` is the method as typed.
    """
    sized = {stage: by_size(entry) for stage, entry in entries.items()}
    chain = _formed(tuple(registry.make_stage(s, e) for s, e in sized.items() if s != "full"), per)
    return ChainConfig(chain, _label(chain, sized, swept, written), entries, written)


def _formed(stages: tuple[Stage, ...], per: str) -> Chain:
    """Return the chain of ``stages``. Code that is not kvbench's own is asked what it is in its walls.

    Raises UsageError, with the author's file and line, where that fails.
    """
    name = "+".join(s.id for s in stages)
    try:
        with contained(name, any(code_of(s) is not None for s in stages), seed=0):
            chain = Chain(stages, per)  # type: ignore[arg-type]
            chain.identity()
            return chain
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"method {name} cannot say what it is: {located(error, name)}") from error


def entries_of(stages: Sequence[str], *layers: Knobs) -> dict[str, dict[str, Any]]:
    """Return the knobs of each stage by its id: plain defaults, overlaid by ``layers`` of knobs by key, in order.

    In one layer a key with a stage (``snapkv.window``) wins over one without.
    """
    entries = {}
    for stage in stages:
        entry, names = registry.defaults(stage), registry.knob_names(stage)
        for layer in layers:
            split_keys = [(registry.stage_of(key), registry.knob_of(key), value) for key, value in layer.items()]
            split_keys.sort(key=lambda parts: bool(parts[0]))
            entry = overlay(entry, {k: v for owner, k, v in split_keys if owner in ("", stage) and k in names})
        entries[stage] = entry
    return entries


def overlay(entry: Entry, layer: Entry) -> dict[str, Any]:
    """Return the knobs of ``entry`` with those of ``layer`` over them.

    A budget in ``layer`` displaces every way in which ``entry`` states one: its size, fraction or parts.
    """
    if any(layer.get(knob) is not None for knob in BUDGET_KNOBS):
        entry = {knob: None if knob in BUDGET_KNOBS + BUDGET_PARTS else value for knob, value in entry.items()}
    return {**entry, **layer}


def check_sets(methods: Sequence[str]) -> None:
    """Raise UsageError, with the reason, for a method whose stages cannot form one, whatever their knobs."""
    for method in methods:
        entries = entries_of(registry.split(method), registry.settled(method))
        check_set([registry.make_stage(s, by_size(e)) for s, e in entries.items() if e])


def _settled(
    methods: Sequence[str | Mapping[str, Any]], knobs: Knobs, preset: Knobs
) -> Iterator[tuple[str, Any, dict[str, dict[str, Any]]]]:
    """Yield (method, ``per``, knobs by stage) for each method, with all layers of knobs applied."""
    requests = [({"method": m} if isinstance(m, str) else m) for m in methods]
    for request in requests:
        if not isinstance(request, Mapping) or not isinstance(request.get("method"), str):
            raise UsageError(
                f"the entry {request!r} names no method: write 'snapkv+think' or {{'method': 'snapkv', 'kv_size': 512}}"
            )
    requests = [{str(k): _plain(v) for k, v in r.items()} for r in requests]
    knobs = {k: _plain(v) for k, v in knobs.items()}
    names = [r["method"] for r in requests]
    check_sets(names)
    _check_owned(names, knobs)
    for name, request in zip(names, requests, strict=True):
        method_knobs = {k: v for k, v in request.items() if k != "method"}
        _check_owned([name], method_knobs)
        per = method_knobs.get(PER, knobs.get(PER, preset.get(PER, "kv_head")))
        yield name, per, entries_of(registry.split(name), preset, knobs, method_knobs, registry.settled(name))


def _plain(value: Any) -> Any:
    """Return a value in which numbers and arrays of NumPy and PyTorch are Python's own."""
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _check_owned(methods: Sequence[str], knobs: Knobs) -> None:
    """Raise UsageError for a knob that none of ``methods`` has, or whose value an alias implies."""
    for key, value in knobs.items():
        if key == PER:
            continue
        knob, (stage, *_) = registry.knob_of(key), registry.owners(methods, key, value)
        if knob not in registry.knob_names(stage):
            raise unknown(f"knob method.{stage}.{knob}; its name", knob, registry.knob_names(stage))
        registry.check_settled(methods, key, value)


def _expanded(method: str, per: Any, entries: Mapping[str, Entry]) -> Iterator[ChainConfig]:
    """Yield one chain for each combination of the knobs that are grids."""
    implied = registry.settled(method)
    axes = [(s, k, v) for s in entries for k, v in grids(entries[s], registry.defaults(s)) if f"{s}.{k}" not in implied]
    pers = per if isinstance(per, list) else [per]
    for key, values in [(PER, pers), *((f"method.{s}.{k}", v) for s, k, v in axes)]:
        check(key, values, bool(values), "a value, or a list of at least one")
    for one, *chosen in itertools.product(pers, *(v for _, _, v in axes)):
        point = {s: dict(e) for s, e in entries.items()}
        for (s, k, _), value in zip(axes, chosen, strict=True):
            point[s][k] = value
        yield chain_config(point, str(one), {(s, k) for s, k, _ in axes}, method)


def grids(entry: Entry, defaults: Entry) -> Iterator[tuple[str, list[Any]]]:
    """Yield (knob, values) for each knob that is a grid.

    It is one if it is a list and its default is not, or a list of lists.
    """
    for key, value in entry.items():
        if isinstance(value, list) and (
            not isinstance(defaults.get(key), list) or any(isinstance(v, list) for v in value)
        ):
            yield key, value


def _label(chain: Chain, entries: Mapping[str, Entry], swept: Collection[tuple[str, str]], written: str) -> str:
    """Return the chain's name with its budgets, its point of a grid, and the knobs that differ from plain defaults."""
    changed, implied = [], registry.settled(written)
    for stage in chain.stages:
        plain = registry.defaults(stage.id)
        for knob, written_value in entries[stage.id].items():
            # a list of layers has one label, however it is written
            settled = getattr(stage, knob, None)
            value = [*settled] if isinstance(written_value, list) and isinstance(settled, tuple) else written_value
            unset = knob.startswith("_") or getattr(stage, knob, value) is None
            is_default = value == plain.get(knob) and knob not in ALWAYS_NAMED and (stage.id, knob) not in swept
            if not (unset or is_default or f"{stage.id}.{knob}" in implied):
                changed.append(f"{knob}={','.join(map(str, value)) if isinstance(value, list) else value}")
    if chain.stages and chain.per != "kv_head":
        changed.append(f"per={chain.per}")
    return " ".join([registry.as_written(chain.name, written), *changed])

"""Make chains from methods and knobs, the same way for the command line, the Python interface and papers' tables.

Knobs come in layers, and a later layer wins. First come the method's plain defaults, then the preset. The knobs set for
all methods follow, then the knobs set for one, and last those that an alias implies. A knob with several values to try
is a grid: there is one chain for each combination of the values of all grids.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvbench.base.conf import check, identity, runtime
from kvbench.base.errors import UsageError
from kvbench.methods.core import registry
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.knob_owners import Entry, Knobs, check_owned, find_grids, overlay_layers
from kvbench.methods.core.legal_sets import check_set
from kvbench.methods.core.loading import locate_error
from kvbench.methods.core.registry import ALWAYS_NAMED, PER, Method
from kvbench.methods.core.stage import Stage

MethodRequest = str | Mapping[str, object]
"""A method as users ask for it: ``"snapkv+think"``, or ``{"method": "snapkv", "kv_size": 64}`` with knobs."""


class _Request(NamedTuple):
    """One method with all layers of knobs applied, whose knobs may still be grids.

    per: the chain's ``per``, or a list of values for it.
    entries: the knobs of each stage, by its id.
    """

    method: Method
    per: object
    entries: Mapping[str, Entry]


class _Axis(NamedTuple):
    """A knob of a stage that is a grid, with the values that it takes one after the other."""

    stage: str
    knob: str
    values: Sequence[object]


@dataclass(frozen=True)
class ChainConfig:
    """One chain, with the words that describe it in tables.

    label: the chain's name with its budget and the knobs that the user set.
    entries: the knobs of each stage by its id, before values that depend on the budget are chosen.
    method: the method as the user wrote it; None for a chain that was made in code.
    """

    chain: Chain = identity()
    label: str = runtime(default="")
    entries: Mapping[str, Entry] = runtime(default_factory=dict)
    method: Method | None = runtime(default=None)


def resolve(
    methods: Sequence[MethodRequest], knobs: Knobs | None = None, preset: Knobs | None = None
) -> list[ChainConfig]:
    """Return the chains of ``methods``, each in all combinations of its knobs that are grids, without duplicates.

    A method is a string (``"snapkv+think"``) or a dict (``{"method": "snapkv", "kv_size": 64}``). ``knobs`` go to every
    method that has them, ``preset`` holds values by full key. A knob is a grid where it is a list and its default is
    not, or a list of lists. Raises UsageError for a set of stages that cannot form a chain, a knob that no method has,
    and a value out of range.
    """
    # grids may meet in one chain, and methods may be written twice: of equal chains the first stays, with its label
    chains: dict[tuple[str, str], ChainConfig] = {}
    for request in _apply_layers(methods, knobs or {}, preset or {}):
        for config in _expand_grids(request):
            chains.setdefault((config.chain.name, repr(config.chain.identity())), config)
    return list(chains.values())


def chains_of(methods: Sequence[MethodRequest], knobs: Knobs | None = None, preset: Knobs | None = None) -> list[Chain]:
    """Return one chain for each of ``methods``, in order. ``chain_of`` explains the arguments."""
    requests = _apply_layers(methods, knobs or {}, preset or {})
    # a chain itself refuses any other value of ``per``
    return [chain_config(r.method, r.entries, r.per).chain for r in requests]  # type: ignore[arg-type]


def chain_of(method: MethodRequest, knobs: Knobs | None = None, preset: Knobs | None = None) -> Chain:
    """Return the chain of one method, such as ``"snapkv+think"`` or ``{"method": "snapkv", "kv_size": 64}``.

    knobs: values by name for each stage that has such a knob. preset: values by full key (``method.snapkv.kv_size``),
    which ``knobs`` override. A knob has one value here: lists that stand for several chains are not expanded.
    Raises UsageError if no such chain can be formed.
    """
    return chains_of([method], knobs, preset)[0]


def _apply_layers(methods: Sequence[MethodRequest], knobs: Knobs, preset: Knobs) -> Iterator[_Request]:
    """Yield each method with all layers of knobs applied, see the module's docstring.

    Raises UsageError for a set of stages that cannot form a chain, and for a knob that no method has.
    """
    requests = _read_requests(methods)
    knobs = {key: _make_plain(value) for key, value in knobs.items()}
    all_methods = [method for method, _ in requests]
    # a set that is not possible is the first thing to say, whatever its knobs
    _check_sets(all_methods)
    # a knob for all methods needs an owner among all, a method's knob an owner in that method
    check_owned(all_methods, knobs)
    for method, method_knobs in requests:
        check_owned([method], method_knobs)
        # ``per`` is a setting of the chain, so it takes no part in the knobs of stages; the last layer that has it wins
        per = method_knobs.get(PER, knobs.get(PER, preset.get(PER, "kv_head")))
        entries = overlay_layers(method.entries, preset, knobs, method_knobs, method.implied)
        yield _Request(method, per, entries=entries)


def _read_requests(methods: Sequence[MethodRequest]) -> list[tuple[Method, dict[str, object]]]:
    """Return (method, its own knobs by key) of each request. Raises UsageError for an entry that names no method."""
    requests: list[tuple[Method, dict[str, object]]] = []
    for method in methods:
        request = {"method": method} if isinstance(method, str) else method
        if not isinstance(request, Mapping) or not isinstance(request.get("method"), str):
            raise UsageError(
                f"the entry {request!r} names no method: write 'snapkv+think' or {{'method': 'snapkv', 'kv_size': 512}}"
            )
        knobs = {str(key): _make_plain(value) for key, value in request.items() if key != "method"}
        requests.append((registry.read_method(str(request["method"])), knobs))
    return requests


def _make_plain(value: object) -> object:
    """Return a value with NumPy's and PyTorch's numbers and arrays turned into Python's own numbers and lists."""
    # identities and labels are texts, in which np.float64(0.5) and 0.5 differ
    if isinstance(value, (list, tuple)):
        return [_make_plain(element) for element in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return value


def _check_sets(methods: Sequence[Method]) -> None:
    """Raise UsageError, with the reason, for a method whose stages cannot form one, whatever their knobs."""
    for method in methods:
        entries = overlay_layers(method.entries, method.implied)
        stages = []
        for stage, entry in entries.items():
            # the entry of ``full`` is empty: it is no stage
            if entry:
                stages.append(registry.make_stage(stage, registry.choose_by_size(entry)))
        check_set(stages)


def _expand_grids(request: _Request) -> Iterator[ChainConfig]:
    axes: list[_Axis] = []
    for stage, entry in request.entries.items():
        for knob, values in find_grids(entry, request.method.entries[stage]):
            # an alias decides the value of the knobs that it implies
            if f"{stage}.{knob}" not in request.method.implied:
                axes.append(_Axis(stage, knob, values))
    per_values = request.per if isinstance(request.per, list) else [request.per]
    # a grid without values would silently drop the method
    check(PER, per_values, bool(per_values), "a value, or a list of at least one")
    for axis in axes:
        check(f"method.{axis.stage}.{axis.knob}", axis.values, bool(axis.values), "a value, or a list of at least one")
    swept = {(axis.stage, axis.knob) for axis in axes}
    for per in per_values:
        # the last knob changes fastest
        for point_values in itertools.product(*(axis.values for axis in axes)):
            entries = {stage: dict(entry) for stage, entry in request.entries.items()}
            for axis, value in zip(axes, point_values, strict=True):
                entries[axis.stage][axis.knob] = value
            yield chain_config(request.method, entries, str(per), swept)


def chain_config(
    method: Method, entries: Mapping[str, Entry], per: str, swept: Collection[tuple[str, str]] = ()
) -> ChainConfig:
    """Return the chain of a method with ``entries``, the knobs of each stage by its id, with its label.

    The label always names the knobs in ``swept``, pairs (stage, knob).
    """
    # knobs whose value depends on the budget get their value here
    chosen_entries = {stage: registry.choose_by_size(entry) for stage, entry in entries.items()}
    # ``full`` is the chain without stages
    stages = tuple(registry.make_stage(stage, entry) for stage, entry in chosen_entries.items() if stage != "full")
    chain = _form_chain(stages, per)
    label = _describe_chain(chain, method, chosen_entries, swept)
    return ChainConfig(chain, label, entries, method=method)


def _form_chain(stages: tuple[Stage, ...], per: str) -> Chain:
    """Return the chain of ``stages``.

    Raises UsageError for stages that cannot form a chain. Where a stage's own code fails, the error has its file and
    line.
    """
    try:
        chain = Chain(stages, per)  # type: ignore[arg-type]
        # the identity asks the stages as well, so that its errors are found here
        chain.identity()
        return chain
    except UsageError:
        raise
    except Exception as error:
        name = "+".join(s.id for s in stages)
        raise UsageError(f"method {name} cannot say what it is: {locate_error(error, name)}") from error


def _describe_chain(
    chain: Chain, method: Method, entries: Mapping[str, Entry], swept: Collection[tuple[str, str]]
) -> str:
    """Return the chain's name with its budget, its swept knobs, and the knobs that differ from plain defaults.

    Knobs that an alias in ``method`` implies are left out, because the alias itself is in the name.

    entries: the knobs of each stage by its id, each with one value.
    swept: pairs (stage, knob), the knobs that have several values in this run.
    """
    # the name with its ids replaced by the aliases that the user wrote for them
    words = ["+".join(method.aliases.get(part, part) for part in chain.name.split("+"))]
    for stage in chain.stages:
        plain = method.entries[stage.id]
        for knob, value in _list_knob_values(stage, entries[stage.id]):
            is_default = value == plain.get(knob)
            is_always_named = knob in ALWAYS_NAMED or (stage.id, knob) in swept
            is_implied = f"{stage.id}.{knob}" in method.implied
            if is_implied or (is_default and not is_always_named):
                continue
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            words.append(f"{knob}={text}")
    if chain.stages and chain.per != "kv_head":
        words.append(f"per={chain.per}")
    return " ".join(words)


def _list_knob_values(stage: Stage, entry: Mapping[str, object]) -> list[tuple[str, object]]:
    """Return (knob, value) of each knob that is set in a stage, in the order of its ``entry``."""
    knob_values: list[tuple[str, object]] = []
    for knob, value in entry.items():
        # ``_target_`` is no attribute of the stage, and no knob
        stage_value = getattr(stage, knob, value)
        # a stage clears knobs that do not apply to it
        if knob.startswith("_") or stage_value is None:
            continue
        if isinstance(value, list) and isinstance(stage_value, tuple):
            # a list of layers has one label, however it is written: the stage has sorted it
            value = list(stage_value)
        knob_values.append((knob, value))
    return knob_values

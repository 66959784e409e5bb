"""The knobs of methods in layers: which stage has a knob, and which of several values counts.

Knobs come in layers, and a later layer wins. First come the method's plain defaults, then the preset. The knobs set for
all methods follow, then the knobs set for one, and last those that an alias implies. A knob with several values to try
is a grid: there is one point for each combination of the values of all grids.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from kvbench.base.conf import check, conf_dir
from kvbench.base.errors import UsageError, unknown
from kvbench.methods.core import registry
from kvbench.methods.core.registry import BUDGET_KNOBS, PER, Method

BUDGET_PARTS = ("heavy_ratio", "recent_ratio", "half_ratio", "high", "low")
"""Knobs of single methods that state a budget, or a part of one."""

Entry = Mapping[str, Any]
"""The knobs of one stage by name."""
Knobs = Mapping[str, object]
"""Knobs by key: bare (``window``), or full (``snapkv.window``, ``method.snapkv.window``)."""
MethodRequest = str | Mapping[str, object]
"""A method as users ask for it: ``"snapkv+think"``, or ``{"method": "snapkv", "kv_size": 64}`` with knobs."""


class MethodWithKnobs(NamedTuple):
    """One method with all layers of knobs applied, whose knobs may still be grids.

    per: the chain's ``per``, or a list of values for it.
    entries: the knobs of each stage, by its id.
    """

    method: Method
    per: object
    entries: Mapping[str, Entry]


class GridPoint(NamedTuple):
    """One combination of the values of a method's grids.

    per: the chain's ``per``.
    entries: the knobs of each stage, by its id.
    swept: pairs (stage, knob), the knobs that have several values in this run.
    """

    method: Method
    per: str
    entries: Mapping[str, Entry]
    swept: Collection[tuple[str, str]]


class _Axis(NamedTuple):
    """A knob of a stage that is a grid, with the values that it takes one after the other."""

    stage: str
    knob: str
    values: Sequence[object]


def read_requests(methods: Sequence[MethodRequest]) -> list[tuple[Method, dict[str, object]]]:
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


def apply_layers(requests: Sequence[tuple[Method, Knobs]], knobs: Knobs, preset: Knobs) -> Iterator[MethodWithKnobs]:
    """Yield each method with all layers of knobs applied, see the module's docstring.

    requests: each method with its own knobs (``read_requests``).

    Raises UsageError for a knob that no method has.
    """
    knobs = {key: _make_plain(value) for key, value in knobs.items()}
    # a knob for all methods needs an owner among all, a method's knob an owner in that method
    _check_owned([method for method, _ in requests], knobs)
    for method, method_knobs in requests:
        _check_owned([method], method_knobs)
        # ``per`` is a setting of the chain, so it takes no part in the knobs of stages; the last layer that has it wins
        per = method_knobs.get(PER, knobs.get(PER, preset.get(PER, "kv_head")))
        entries = overlay_layers(method.entries, preset, knobs, method_knobs, method.implied)
        yield MethodWithKnobs(method, per, entries=entries)


def overlay_layers(plain_entries: Mapping[str, Entry], *layers: Knobs) -> dict[str, Entry]:
    """Return the entry of each stage, by its id: its plain one, with ``layers`` of knobs by key laid over it in order.

    In one layer a key with a stage (``snapkv.window``) wins over one without.
    """
    entries = dict(plain_entries)
    for stage, plain_entry in plain_entries.items():
        for layer in layers:
            entries[stage] = overlay(entries[stage], _select_knobs(stage, plain_entry, layer))
    return entries


def _select_knobs(stage: str, plain_entry: Entry, layer: Knobs) -> dict[str, object]:
    """Return {knob: value} of the knobs in a layer that belong to one stage. ``layer`` has knobs by key."""
    for_any_stage: dict[str, object] = {}
    for_this_stage: dict[str, object] = {}
    for key, value in layer.items():
        owner, knob = _split_key(key)
        if not _has_knob(plain_entry, knob):
            continue
        if owner == stage:
            for_this_stage[knob] = value
        elif not owner:
            for_any_stage[knob] = value
    return for_any_stage | for_this_stage


def gather_entries(methods: Iterable[Method]) -> dict[str, Entry]:
    """Return {id: plain entry} of the stages of all ``methods``, each once, in order."""
    entries: dict[str, Entry] = {}
    for method in methods:
        entries |= method.entries
    return entries


def _split_key(key: str) -> tuple[str, str]:
    """Return (stage, knob) of a knob's key. The stage of ``window`` is ''; ``method.`` in front is left out."""
    prefix, _, knob = key.rpartition(".")
    return prefix.removeprefix("method."), knob


def _has_knob(entry: Entry, name: str) -> bool:
    """Return True if a stage with this entry has the knob ``name``. ``_target_``, the stage's class, is no knob."""
    return name in entry and not name.startswith("_")


def overlay(entry: Entry, layer: Mapping[str, object]) -> dict[str, Any]:
    """Return the knobs of ``entry``, with the knobs of ``layer`` in place of those that both have.

    If ``layer`` sets a budget of tokens, the knobs by which ``entry`` states a budget are cleared: size, fraction and
    parts.
    """
    knobs = dict(entry)
    if any(layer.get(knob) is not None for knob in BUDGET_KNOBS):
        for knob in knobs:
            if knob in BUDGET_KNOBS or knob in BUDGET_PARTS:
                knobs[knob] = None
    return knobs | dict(layer)


def _check_owned(methods: Sequence[Method], knobs: Knobs) -> None:
    """Raise UsageError for a knob that none of ``methods`` has, or whose value an alias implies."""
    for key, value in knobs.items():
        # ``per`` belongs to the whole chain, so no stage has it
        if key == PER:
            continue
        _check_owner(methods, key, value)
        _check_implied(methods, key, value)


def _check_owner(methods: Sequence[Method], key: str, value: object) -> None:
    """Raise UsageError if no stage of ``methods`` has the knob ``key``, or if two stages of one method have it.

    Two stages may have it if the key names one of them. value: only for the error.
    """
    all_entries = gather_entries(methods)
    stage, knob = _split_key(key)
    if stage:
        if stage not in all_entries:
            raise UsageError(f"{key}={value}: this run has no method {stage}; it has {', '.join(all_entries)}")
        if not _has_knob(all_entries[stage], knob):
            names = _list_knobs([all_entries[stage]])
            raise unknown(f"option of {stage}", knob, names, listed_by=f"kvbench run --help {stage}")
        return
    has_owner = False
    for method in methods:
        owners = [stage for stage, entry in method.entries.items() if _has_knob(entry, knob)]
        if len(owners) > 1:
            keys = " and ".join(f"method.{stage}.{knob}" for stage in owners)
            raise UsageError(f"{knob} is an option of two methods in {method.name}: set {keys} by its full key")
        has_owner = has_owner or bool(owners)
    if not has_owner:
        # ``per`` is no knob of a stage, but the user may have meant it
        names = [PER] + _list_knobs(all_entries.values())
        raise explain_unknown_knob(knob, value, names, methods)


def _list_knobs(entries: Iterable[Entry]) -> list[str]:
    """Return the names of the knobs in all ``entries``, with repeats."""
    names: list[str] = []
    for entry in entries:
        names += [name for name in entry if _has_knob(entry, name)]
    return names


def explain_unknown_knob(knob: str, value: object, names: Iterable[str], methods: Sequence[Method]) -> UsageError:
    """Return the error for ``knob=value`` where no knob of ``methods`` has this name. ``names`` are the allowed names.

    If the name is that of a field of a press of kvpress, the error gives kvbench's name for the same knob.
    """
    name_here = registry.read_kvpress_words()["knobs"].get(knob)
    if name_here is not None:
        return UsageError(f"unknown option {knob}: kvpress's {knob} is {name_here}= here")
    if knob == "compression_ratio":
        kept = _invert_shares(value)
        if kept is not None:
            return UsageError(f"unknown option {knob}: it is the share removed. Write the share kept: kv_ratio={kept}")
    owners = _find_owners(knob)
    named = " and ".join(method.name for method in methods)
    have = "have" if len(methods) > 1 else "has"
    if knob in BUDGET_KNOBS:
        return UsageError(f"{named} {have} no option {knob}. There is no budget of tokens to set.")
    if owners:
        message = f"{named} {have} no option {knob}. It belongs to {', '.join(owners)}."
        # two words that are easily mixed up
        if knob == "ratio" and "kv_ratio" in names:
            message += " Did you mean kv_ratio (share of tokens kept)?"
        return UsageError(message)
    return unknown("option", knob, names, listed_by="kvbench run --help keys")


def _invert_shares(value: object) -> str | None:
    """Return 1 - share for the shares in ``value``, joined by commas, or None if it holds anything but numbers.

    value: a number, a list of numbers, or numbers in a text, joined by commas.
    """
    shares: list[Any]
    if isinstance(value, str):
        shares = value.split(",")
    elif isinstance(value, list):
        shares = value
    else:
        shares = [value]
    try:
        return ",".join(f"{1 - float(share):g}" for share in shares)
    except (ValueError, TypeError):
        return None


def _find_owners(knob: str) -> list[str]:
    """Return the ids of the methods with a YAML file that have this knob, in alphabetical order."""
    owners = []
    for method in sorted(path.stem for path in (conf_dir() / "method").glob("*.yaml")):
        # a method whose file cannot be read is no help here, and has an error of its own
        with suppress(UsageError):
            if knob in registry.defaults(method):
                owners.append(method)
    return owners


def _check_implied(methods: Sequence[Method], key: str, value: object) -> None:
    """Raise UsageError for ``key=value`` if aliases fix this knob in every one of ``methods`` that has it.

    If some method is free to take the value, there is no error: that method takes it.
    """
    named_stage, knob = _split_key(key)
    # the first method with an alias that fixes the knob, in words for the error
    fixed = ""
    for method in methods:
        for stage, entry in method.entries.items():
            if not _has_knob(entry, knob) or named_stage not in ("", stage):
                continue
            full_key = f"{stage}.{knob}"
            if full_key not in method.implied:
                # this method takes the value
                return
            if not fixed:
                implied = method.implied[full_key]
                fixed = f"{method.written} is {stage} with {knob}={implied}; write method={stage} {knob}={value}"
    if fixed:
        raise UsageError(f"{key}={value} is not possible: {fixed}")


def expand_grids(request: MethodWithKnobs) -> Iterator[GridPoint]:
    """Yield one point for each combination of the values of the method's knobs that are grids."""
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
            yield GridPoint(request.method, str(per), entries=entries, swept=swept)


def find_grids(entry: Entry, defaults: Entry) -> Iterator[tuple[str, list[Any]]]:
    """Yield (knob, values) for each knob of ``entry`` that is a grid.

    A knob is a grid if its value is a list and its default is not, or if its value is a list of lists.
    """
    for knob, value in entry.items():
        if not isinstance(value, list):
            continue
        takes_a_list = isinstance(defaults.get(knob), list)
        if not takes_a_list or any(isinstance(element, list) for element in value):
            yield knob, value


def choose_by_size(entry: Mapping[str, object]) -> dict[str, object]:
    """Return the entry with one value for each knob whose value depends on the budget.

    Such a knob is written as ``{kv_size: value, ...}``. It takes the value at the kv_size nearest to the entry's own on
    a log scale. Where the budget is a fraction, it takes the value at the largest kv_size (our choice).
    """
    size = entry.get("kv_size")
    # a size that is no number above 0 gets its error later, from the stage
    if not isinstance(size, int) or size <= 0:
        size = None
    return {knob: _choose_value(value, size) for knob, value in entry.items()}


def _choose_value(value: object, size: int | None) -> object:
    """Return a knob's value for a budget of ``size`` tokens; None: the budget is a fraction.

    A value that does not depend on the budget is returned as it is.
    """
    if not isinstance(value, Mapping) or not value:
        return value
    if not all(isinstance(key, int) and key > 0 for key in value):
        return value
    if size is None:
        return value[max(value)]
    # |log(key / size)| is the distance on a log scale; sorted: of two equally near sizes the smaller is taken
    nearest_size = min(sorted(value), key=lambda key: abs(math.log(key / size)))
    return value[nearest_size]

"""The owners of knobs, and layers and values of knobs, as far as they are known without torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from kvbench.base.conf import conf_dir
from kvbench.base.errors import UsageError, unknown
from kvbench.methods.core import registry
from kvbench.methods.core.knobs import explain_value, find_rule, name_missed_kind
from kvbench.methods.core.registry import BUDGET_KNOBS, PER, Method
from kvbench.methods.core.source import Field, read_fields

BUDGET_PARTS = ("heavy_ratio", "recent_ratio", "half_ratio", "high", "low")
"""Knobs of single methods that state a budget, or a part of one."""

Entry = Mapping[str, Any]
"""The knobs of one stage by name."""
Knobs = Mapping[str, object]
"""Knobs by key: bare (``window``), or full (``snapkv.window``, ``method.snapkv.window``)."""


def gather_entries(methods: Iterable[Method]) -> dict[str, Entry]:
    """Return {id: plain entry} of the stages of all ``methods``, each once, in order."""
    entries: dict[str, Entry] = {}
    for method in methods:
        entries |= method.entries
    return entries


def split_key(key: str) -> tuple[str, str]:
    """Return (stage, knob) of a knob's key. The stage of ``window`` is ''; ``method.`` in front is left out."""
    prefix, _, knob = key.rpartition(".")
    return prefix.removeprefix("method."), knob


def has_knob(entry: Entry, name: str) -> bool:
    """Return True if a stage with this entry has the knob ``name``. ``_target_``, the stage's class, is no knob."""
    return name in entry and not name.startswith("_")


def check_owned(methods: Sequence[Method], knobs: Knobs) -> None:
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
    stage, knob = split_key(key)
    if stage:
        if stage not in all_entries:
            raise UsageError(f"{key}={value}: this run has no method {stage}; it has {', '.join(all_entries)}")
        if not has_knob(all_entries[stage], knob):
            names = list_knobs([all_entries[stage]])
            raise unknown(f"option of {stage}", knob, names, listed_by=f"kvbench run --help {stage}")
        return
    has_owner = False
    for method in methods:
        owners = [stage for stage, entry in method.entries.items() if has_knob(entry, knob)]
        if len(owners) > 1:
            keys = " and ".join(f"method.{stage}.{knob}" for stage in owners)
            raise UsageError(f"{knob} is an option of two methods in {method.name}: set {keys} by its full key")
        has_owner = has_owner or bool(owners)
    if not has_owner:
        # ``per`` is no knob of a stage, but the user may have meant it
        names = [PER] + list_knobs(all_entries.values())
        raise explain_unknown_knob(knob, value, names, methods)


def _check_implied(methods: Sequence[Method], key: str, value: object) -> None:
    """Raise UsageError for ``key=value`` if aliases fix this knob in every one of ``methods`` that has it.

    If some method is free to take the value, there is no error: that method takes it.
    """
    named_stage, knob = split_key(key)
    # the first method with an alias that fixes the knob, in words for the error
    fixed = ""
    for method in methods:
        for stage, entry in method.entries.items():
            if not has_knob(entry, knob) or named_stage not in ("", stage):
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


def check_values(methods: Sequence[Method], knobs: Knobs) -> None:
    """Raise UsageError for the first value of ``knobs`` of a wrong kind, or outside the rule of its knob.

    Kinds and rules are read from the sources of kvbench's methods, which are not imported. Each stage checks all of its
    knobs again when it is made, also how they go together.
    """
    for stage, entry in gather_entries(methods).items():
        fields = read_fields(entry.get("_target_", ""))
        for key, value in knobs.items():
            named_stage, knob = split_key(key)
            if named_stage not in ("", stage) or not has_knob(entry, knob) or knob not in fields:
                continue
            # a knob whose default is a list has rules of its own
            if isinstance(entry[knob], list):
                continue
            for one_value in value if isinstance(value, list) else [value]:
                allowed = _find_allowed(fields[knob], one_value)
                if allowed:
                    raise explain_value(stage, knob, one_value, allowed)


def _find_allowed(field: Field, value: object) -> str:
    """Return the values that a knob takes in words if ``value`` is none of them, else ''."""
    missed_kind = name_missed_kind(field.annotation, value)
    rule = find_rule(field.rule) if field.rule else None
    # values that depend on the budget are a mapping, and null passes every rule where the kind allows it
    if missed_kind or rule is None or value is None or isinstance(value, Mapping):
        return missed_kind
    return "" if rule.holds(value) else rule.allowed


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
        owner, knob = split_key(key)
        if not has_knob(plain_entry, knob):
            continue
        if owner == stage:
            for_this_stage[knob] = value
        elif not owner:
            for_any_stage[knob] = value
    return for_any_stage | for_this_stage


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


def list_knobs(entries: Iterable[Entry]) -> list[str]:
    """Return the names of the knobs in all ``entries``, with repeats."""
    names: list[str] = []
    for entry in entries:
        names += [name for name in entry if has_knob(entry, name)]
    return names


def explain_unknown_knob(knob: str, value: object, names: Iterable[str], methods: Sequence[Method]) -> UsageError:
    """Return the error for ``knob=value`` where no knob of ``methods`` has this name. ``names`` are the allowed names.

    If the name is that of a field of a press of kvpress, the error gives kvbench's name for the same knob.
    """
    name_here = registry.read_kvpress_words()["knobs"].get(knob)
    if name_here is not None:
        return UsageError(f"unknown option {knob}: kvpress's {knob} is {name_here}= here")
    if knob == "compression_ratio":
        shares_kept = _invert_shares(value)
        if shares_kept is not None:
            return UsageError(
                f"unknown option {knob}: it is the share removed. Write the share kept: kv_ratio={shares_kept}"
            )
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

"""The presses of the package kvpress by name: which of them run here, and why the others do not."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, TypedDict, cast

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvbench.base import extras
from kvbench.base.conf import read_yaml
from kvbench.base.errors import UsageError, headline, unknown

MASKS = ("adakv", "criticaladakv")
"""The presses that divide a layer's budget among its heads and mask what they drop."""
REMOVES = ("block", "chunk", "chunkkv")
"""The presses that choose by blocks of tokens and drop the others themselves."""
BY_LAYER = "perlayercompression"
"""The wrapper that gives every layer a share of its own."""


class _PressFacts(TypedDict):
    """Facts about presses that their code does not tell (kvpress.yaml).

    refused: the presses that do not run here, and why.
    masked, zeroed: the presses that only mask, or only zero, the tokens that they drop.
    """

    refused: dict[str, str]
    masked: list[str]
    zeroed: list[str]


class PressRecord(TypedDict):
    """A press as lists show it.

    there: what kvpress does with the tokens that the press drops: ``removed``, ``masked`` or ``zeroed``.
    here: how kvbench runs the press, or why it does not.
    """

    id: str
    about: str
    knobs: dict[str, object]
    there: str
    here: str


@cache
def import_package() -> ModuleType:
    """Return the package kvpress. Importing it leaves transformers as it was.

    On import kvpress wraps all of transformers' attention functions for good, so the plain ones are put back. Raises
    UsageError if kvpress is not installed or cannot be imported.
    """
    extras.require("kvpress", "method=kvpress:NAME")
    before = dict(ALL_ATTENTION_FUNCTIONS)
    try:
        module = importlib.import_module("kvpress")
    except ImportError as error:
        raise UsageError(f"method=kvpress:NAME: the package kvpress cannot be imported: {headline(error)}") from None
    # a press is made for each layer, and would repeat its advice each time (docs/kvpress.md has it)
    logging.getLogger("kvpress").setLevel(logging.ERROR)
    # an entry of kvpress hides the plain function, which shows again once that entry is deleted
    for name, plain in before.items():
        if ALL_ATTENTION_FUNCTIONS[name] is not plain:
            del ALL_ATTENTION_FUNCTIONS[name]
    return module


def find_presses() -> dict[str, type]:
    """Return kvpress's presses by the names that they have here: ``snapkv`` for SnapKVPress."""
    base, scorer = import_package().BasePress, import_package().ScorerPress
    classes = {}
    for value in vars(import_package()).values():
        # the two base classes score nothing themselves
        if isinstance(value, type) and issubclass(value, base) and value not in (base, scorer):
            classes[shorten_name(value.__name__)] = value
    return classes


def shorten_name(name: str) -> str:
    """Return the short name of a press, such as ``snapkv`` for ``SnapKVPress``, ``snap-kv`` or ``Snap_KV``."""
    return name.lower().replace("_", "").replace("-", "").removesuffix("press")


def canonicalise_name(method: str) -> str:
    """Return the canonical name of a method of kvpress, however it is typed: kvpress:SnapKVPress is kvpress:snapkv."""
    words = ["kvpress"]
    words += [shorten_name(name) for name in method.split(":")[1:]]
    return ":".join(words)


def explain_refusal(name: str, press: type) -> str:
    """Return why a press does not run here, or '' if it does."""
    reasons = _read_facts()["refused"]
    if name in reasons:
        return reasons[name]
    if name in MASKS or name in REMOVES or name == BY_LAYER:
        return ""
    if not issubclass(press, import_package().ScorerPress):
        return "it does not score tokens"
    # kvpress calls this function to have a press read its file; a wrapper only hands the call on
    base_init = import_package().BasePress.post_init_from_model
    overrides_init = getattr(press, "post_init_from_model", None) is not base_init
    if overrides_init and not wraps_another(press):
        return "it reads a trained file of the model"
    return ""


@cache
def _read_facts() -> _PressFacts:
    return cast(_PressFacts, read_yaml(Path(__file__).with_name("kvpress.yaml")))


def press_records() -> list[PressRecord]:
    """Return a record of every press of kvpress, in the order of their names."""
    records: list[PressRecord] = []
    for name, press in sorted(find_presses().items()):
        there = "removed"
        if name in _read_facts()["masked"]:
            there = "masked"
        elif name in _read_facts()["zeroed"]:
            there = "zeroed"
        press_id = f"kvpress:{name}"
        here, ours = "runs", "kvbench runs it and removes them"
        knobs: dict[str, object] = {}
        reason = explain_refusal(name, press)
        if reason:
            here, ours = f"does not run: {reason}", f"kvbench does not run it: {reason}"
        else:
            knobs = {field: default for field, _, default in list_fields(press)}
            if wraps_another(press):
                press_id += ":NAME"
        dropped = "channels" if there == "zeroed" else "tokens"
        about = f"{press.__name__}; dropped {dropped} are {there} in kvpress; {ours}"
        records.append({"id": press_id, "about": about, "knobs": knobs, "there": there, "here": here})
    return records


def find_types(method: str) -> tuple[type, ...]:
    """Return the classes of a method's presses, the outermost first, such as two for ``kvpress:adakv:snapkv``.

    method: its canonical name.

    Raises UsageError, with the reason, for a press that kvpress lacks, one that does not run here, and presses that
    cannot stand inside each other.
    """
    known, names = find_presses(), method.split(":")[1:]
    for name in names:
        if name not in known:
            raise unknown("press of kvpress", name, known, listed_by="kvbench list kvpress")
        reason = explain_refusal(name, known[name])
        if reason:
            raise UsageError(f"method={method}: {known[name].__name__} does not run here: {reason}")
    types = tuple(known[name] for name in names)
    # each press with the press inside it; the last press has none
    inner_types: tuple[type | None, ...] = (*types[1:], None)
    for outer, inner in zip(types, inner_types, strict=True):
        _check_nesting(method, outer, inner)
    return types


def _check_nesting(method: str, outer: type, inner: type | None) -> None:
    """Raise UsageError if ``inner``, which is None for the last press, cannot stand inside the press ``outer``."""
    if inner is None:
        if wraps_another(outer):
            raise UsageError(f"method={method} wraps a press that scores tokens: name it, as in {method}:snapkv")
        return
    if not wraps_another(outer):
        raise UsageError(f"method={method}: {outer.__name__} wraps no other press")
    if not issubclass(inner, import_package().ScorerPress):
        raise UsageError(f"method={method}: {outer.__name__} needs a press that scores tokens inside it")


def wraps_another(press: type) -> bool:
    """Return True if a press is made around another one, as AdaKVPress is."""
    return "press" in inspect.signature(press).parameters


def list_fields(press: type) -> Iterator[tuple[str, str, Any]]:
    """Yield (name, type, default) of each field of a press that a user may set, as kvbench's knobs declare theirs."""
    for parameter in inspect.signature(press).parameters.values():
        name, default = parameter.name, parameter.default
        # kvbench makes the inner press and states the budget itself
        if name in ("press", "compression_ratio") or name.startswith("_"):
            continue
        # a field without a default is taken to be a list, such as a share for each layer
        if default is parameter.empty:
            yield name, "tuple", ()
            continue
        annotation = parameter.annotation
        text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
        declared = type(default).__name__
        # a field annotated ``int | float`` is a float, which takes whole numbers as well
        for kind in ("float", "int", "bool"):
            if kind in text:
                declared = kind
                break
        if default is None:
            declared = f"{declared} | None"
        yield name, declared, default


def count_kept(n: int, ratio: float) -> int:
    """Return how many of n tokens kvpress keeps at the share ``ratio`` removed, by the rule of its version."""
    count = getattr(importlib.import_module("kvpress.utils"), "compute_n_kept", None)
    if count is None:
        # the rule of versions that have no function for it
        return int(n * (1 - ratio))
    return int(count(n, ratio))


def installed_version() -> str:
    """Return the version of the installed package kvpress, or "unknown" if it states none."""
    try:
        return version("kvpress")
    except PackageNotFoundError:
        return str(getattr(import_package(), "__version__", "unknown"))

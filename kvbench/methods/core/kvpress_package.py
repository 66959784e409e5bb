"""What the package kvpress has: its presses by name, which of them run here, and why the others do not."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvbench.base import extras
from kvbench.base.conf import read_yaml
from kvbench.base.errors import UsageError, headline, unknown

MASKS = ("adakv", "criticaladakv")
"""The presses that divide a layer's budget among its heads and mask what they drop."""
REMOVES = ("block", "chunk", "chunkkv")
"""The presses that choose by blocks of tokens and drop the others themselves."""
BY_LAYER = "perlayercompression"


@cache
def package() -> ModuleType:
    """Import kvpress and leave transformers as it was: on import kvpress wraps all attention functions for good."""
    extras.require("kvpress", "method=kvpress:NAME")
    before = dict(ALL_ATTENTION_FUNCTIONS)
    try:
        module = importlib.import_module("kvpress")
    except ImportError as error:
        raise UsageError(f"method=kvpress:NAME: the package kvpress cannot be imported: {headline(error)}") from None
    # a press is made for each layer, and would repeat its advice each time (docs/kvpress.md has it)
    logging.getLogger("kvpress").setLevel(logging.ERROR)
    for name, plain in before.items():
        if ALL_ATTENTION_FUNCTIONS[name] is not plain:
            del ALL_ATTENTION_FUNCTIONS[name]
    return module


def presses() -> dict[str, type]:
    """Return kvpress's presses by the names that they have here: ``snapkv`` for SnapKVPress."""
    base, scorer = package().BasePress, package().ScorerPress
    classes = (c for c in vars(package()).values() if isinstance(c, type) and issubclass(c, base))
    return {short(c.__name__): c for c in classes if c not in (base, scorer)}


def short(name: str) -> str:
    """Return the name of a press without case, - and _, and without ``Press`` at its end."""
    return name.lower().replace("_", "").replace("-", "").removesuffix("press")


def canonical(method: str) -> str:
    """Return the one name of a method that may be typed in several ways: ``kvpress:snapkv`` of SnapKVPress."""
    return ":".join(("kvpress", *map(short, method.split(":")[1:])))


def refusal(name: str, press: type) -> str:
    """Return why a press does not run here, or '' if it does."""
    known: Mapping[str, str] = _facts()["refused"]
    if name in known:
        return known[name]
    if name in (*MASKS, *REMOVES, BY_LAYER):
        return ""
    if not issubclass(press, package().ScorerPress):
        return "it does not score tokens"
    own_init = getattr(press, "post_init_from_model", None) is not package().BasePress.post_init_from_model
    return "it reads a trained file of the model" if own_init and not wraps_another(press) else ""


@cache
def _facts() -> dict[str, Any]:
    return read_yaml(Path(__file__).with_name("kvpress.yaml"))


def listing() -> list[dict[str, Any]]:
    """Return every press: what kvpress does with what it drops, and whether it runs here, or why not."""
    items = []
    for name, press in sorted(presses().items()):
        there = next((what for what in ("masked", "zeroed") if name in _facts()[what]), "removed")
        reason = refusal(name, press)
        here = f"does not run: {reason}" if reason else "stored for real"
        knobs = {} if reason else {name: default for name, _, default in fields_of(press)}
        items.append(
            {
                "id": f"kvpress:{name}" + (":NAME" if wraps_another(press) and not reason else ""),
                "about": f"{press.__name__}; in kvpress {there}; here {here}",
                "knobs": knobs,
                "there": there,
                "here": here,
            }
        )
    return items


def types_of(method: str) -> tuple[type, ...]:
    """Return the classes of a method's presses, the outermost first. Raises UsageError, with the reason, if any."""
    known, names = presses(), canonical(method).split(":")[1:]
    for name in names:
        if name not in known:
            raise unknown("press of kvpress", name, known, "They are listed by: python -m kvbench list kvpress")
        reason = refusal(name, known[name])
        if reason:
            raise UsageError(f"method={method}: {known[name].__name__} does not run here: {reason}")
    types = tuple(known[name] for name in names)
    for outer, inner in zip(types, (*types[1:], None), strict=True):
        if wraps_another(outer) and inner is None:
            raise UsageError(f"method={method} wraps a press that scores tokens: name it, as in {method}:snapkv")
        if not wraps_another(outer) and inner is not None:
            raise UsageError(f"method={method}: {outer.__name__} wraps no other press")
        if inner is not None and not issubclass(inner, package().ScorerPress):
            raise UsageError(f"method={method}: {outer.__name__} needs a press that scores tokens inside it")
    return types


def wraps_another(press: type) -> bool:
    """Tell whether a press is made around another one."""
    return "press" in inspect.signature(press).parameters


def fields_of(press: type) -> Iterator[tuple[str, str, Any]]:
    """Yield (name, type, default) of each field of a press that a user may set, as kvbench's knobs declare theirs."""
    for p in inspect.signature(press).parameters.values():
        if p.name in ("press", "compression_ratio") or p.name.startswith("_"):
            continue
        if p.default is p.empty:
            yield p.name, "tuple", ()
            continue
        text = p.annotation if isinstance(p.annotation, str) else inspect.formatannotation(p.annotation)
        declared = next((k for k in ("float", "int", "bool") if k in text), type(p.default).__name__)
        yield p.name, f"{declared} | None" if p.default is None else declared, p.default


def kept(n: int, ratio: float) -> int:
    """Return how many of n tokens kvpress keeps at the share ``ratio`` removed, by the rule of its version."""
    count = getattr(importlib.import_module("kvpress.utils"), "compute_n_kept", None)
    return int(n * (1 - ratio)) if count is None else int(count(n, ratio))


def installed_version() -> str:
    """Return kvpress's version."""
    try:
        return version("kvpress")
    except PackageNotFoundError:
        return str(getattr(package(), "__version__", "unknown"))

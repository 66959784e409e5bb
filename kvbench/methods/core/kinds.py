"""The kind of each method (fewer tokens, fewer channels, fewer bits, ...), for lists and pages.

This module imports no method, and so not torch: the command line lists methods quickly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

FULL = "nothing is compressed"
YOURS = "yours"
OTHERS = "of other packages"
_TOKENS = (
    "snapkv pyramidkv adakv cake h2o tova scissorhands vatp uncomp-group uncomp-stage streamingllm keydiff keynorm "
    "chunkkv kvzip expectedattention random firsttokens"
)
_BITS = "kivi flexgen qhitter turboquant fp8 int8 int4 mxfp4 nvfp4 q8_0 q4_0"
METHODS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        FULL: ("full",),
        "keep some tokens": tuple(_TOKENS.split()),
        "let the prompt decide": ("refreekv", "twilight"),
        "keep some channels": ("think", "thinkv", "l1", "l2"),
        "low rank, shared heads": ("palu", "asvd", "chai"),
        "store fewer bits": tuple(_BITS.split()),
    }
)
"""The methods of each kind, those that are known best first."""
KINDS = (*METHODS, YOURS, OTHERS)
"""The kinds in the order of lists."""
BUDGETS: Mapping[str, str] = MappingProxyType(
    {
        "keep some tokens": "kv_ratio= share of tokens kept, or kv_size= their number",
        "keep some channels": "ratio= share of channels removed",
    }
)
"""The option, in words, by which a user says how much a method keeps, for kinds whose methods mostly share one."""


def kind_of(method: str) -> str:
    """Return the kind of a method by its id.

    A press of kvpress is ``of other packages``. Any other method that METHODS does not list is ``yours``.
    """
    if method.startswith("kvpress:"):
        return OTHERS
    for kind, methods in METHODS.items():
        if method in methods:
            return kind
    return YOURS


def group_by_kind(methods: Iterable[str]) -> dict[str, list[str]]:
    """Return {kind: ids} of ``methods``, in the order of KINDS and of METHODS. Kinds without a method are left out."""
    groups: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for method in methods:
        groups[kind_of(method)].append(method)
    for kind, listed_methods in METHODS.items():
        groups[kind].sort(key=listed_methods.index)
    return {kind: members for kind, members in groups.items() if members}

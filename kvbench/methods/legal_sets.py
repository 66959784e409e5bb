"""Which stages cannot form one method, whatever their knobs, and why."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.errors import UsageError
from kvbench.methods.base import Modifier, Stage, TokenSelector
from kvbench.methods.prefill_changing import check_altered


def check_set(stages: Sequence[Stage]) -> None:
    """Raise UsageError, with the reason, for stages that cannot form one method."""
    ids = [s.id for s in stages]
    written = "+".join(ids)
    twice = sorted({i for i in ids if ids.count(i) > 1})
    if twice:
        raise UsageError(f"method={written!r} names {', '.join(twice)} twice")
    for role, reason in (
        ("lowrank", "each replaces the same projections: a chain has at most one low-rank stage"),
        ("selector", "each chooses which tokens stay: a chain has at most one selector"),
        ("prune", "each chooses which key channels stay: a chain has at most one pruning stage"),
        ("mask", "each decides what a step attends: a chain has at most one mask"),
        ("quantise", "each packs the same values: a chain has at most one quantiser"),
        ("hidden", "each decides which tokens later layers read: a chain has at most one such stage"),
    ):
        same = [s.id for s in stages if s.role == role]
        if len(same) > 1:
            raise UsageError(f"method={written!r} combines {' and '.join(same)}, but {reason}")
    owner = next((s for s in stages if isinstance(s, TokenSelector) and s.packs), None)
    other = next((s for s in stages if s.role in ("prune", "quantise")), None)
    if owner and other:
        baseline = " (with lam=1: h2o+quant)" if getattr(owner, "lam", None) == 1 else ""
        raise UsageError(
            f"method={written!r}: {owner.id}{baseline} owns its quantiser, which packs every token that it keeps; "
            f"{other.id} has nothing left to store: use h2o+{other.id}, or {owner.id}{baseline} alone"
        )
    check_altered(stages)
    modifiers = [s.id for s in stages if s.role == "modifier"]
    if modifiers and not any(s.role == "selector" for s in stages):
        raise UsageError(f"method={written!r}: {modifiers[0]} changes a selector's scores and needs one beside it")
    for m in stages:
        base = next((s.id for s in stages if s.role == "selector"), "")
        if isinstance(m, Modifier) and base not in m.decorates:
            raise UsageError(
                f"method={written!r}: {m.id} changes the scores of {', '.join(m.decorates)}, not those of {base}"
            )

"""The table of the stages that cannot stand in one chain, each with the reason.

``check_set`` enforces the rules that no knob can change. A ``Chain`` enforces the others (``AS_SET``) when it is made,
by the knobs that its stages then have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvbench.base.errors import UsageError
from kvbench.methods.core.stage import Role, Stage

AT_MOST_ONE: tuple[tuple[Role, str], ...] = (
    ("lowrank", "each replaces the same projections: a combination has at most one low-rank method"),
    ("selector", "each chooses which tokens stay: a combination has at most one selector"),
    ("prune", "each chooses which key channels stay: a combination has at most one pruning method"),
    ("mask", "each decides what a step attends: a combination has at most one mask"),
    ("quantise", "each packs the same values: a combination has at most one quantiser"),
    ("hidden", "each decides which tokens later layers read: a combination has at most one such method"),
)
"""Roles that a chain has at most once, each with the reason."""
Kind = Callable[[Stage], bool]
"""A test that tells whether a stage is of a kind."""


class Conflict(NamedTuple):
    """Two kinds of stages that cannot stand in one chain, and why.

    a, b: the two kinds.
    reason: a format string with the ids of the stages, {a} and {b}, and the other words of ``_words``.
    beside: the role of a third stage, {c}, without which the two do not conflict, or None if they always do.
    """

    a: Kind
    b: Kind
    reason: str
    beside: Role | None = None


def kind(*roles: Role, **flags: bool) -> Kind:
    """Return the kind of stages that have one of ``roles`` and attributes as true or false as ``flags`` says.

    Without ``roles``, stages of any role are of this kind.
    """

    def is_of_kind(stage: Stage) -> bool:
        if roles and stage.role not in roles:
            return False
        # a stage without the attribute is taken to have it as false
        return all(bool(getattr(stage, name, False)) == flag for name, flag in flags.items())

    return is_of_kind


AGAIN = kind("selector", chooses_again=True)
"""Selectors that choose again while decoding."""
ROLLS = kind("selector", evicts=True, rolled=True)
"""Selectors that give stored keys new positions at every step."""
PACKS_TOGETHER = kind("quantise", by_token=False)
"""Quantisers that pack several tokens together, or keep some exact for a while."""
PACKS_HALF = kind("quantise", only=True)
"""Quantisers that pack only keys or only values."""


def EVICTS(stage: Stage) -> bool:
    """Return True if the stage evicts tokens while decoding, by itself or under a budget while decoding."""
    return AGAIN(stage) or kind("selector", evicts=True)(stage)


# the reasons: format strings with the words of ``_words``, some of which are joined in the tables below
_EVICTING = "{a} evicts tokens while decoding as set here"
_ROLLED = "method.{a}.{rolled} turns stored keys to new positions at every step, and {b} stores them "
_ONLY_AFTER = "use a variant that evicts only after the prompt, without decode_budget or decode_ratio"
_OWNER = (
    "{owner} owns its quantiser, which packs every token that it keeps; {b} has nothing left to store: use h2o+{b}, or "
    "{owner} alone"
)
_SHARER = (
    "{a} shares logits between heads and holds keys for some of them only, which other methods cannot choose by: it is "
    "written alone"
)
_BALANCER = "{a} divides one budget over layers that all read the whole prompt; use another selector"
_LATENT_CHANNELS = (
    "{b} removes channels of stored keys or values, and {a} stores none: its latents have no channels to rank; leave "
    "out one of them"
)
_LATENT_CODES = (
    "{b} packs keys and values as attention reads them, and {a} stores latents from before rotation; leave out one of "
    "them"
)
_LATENT_SLOTS = ", from slots that hold each head's own keys, and the heads of a layer share the latents of {b}; "
_TWO_WIDTHS = (
    "; {c} then leaves new tokens whole, and {b} would have to pack them at another width: leave out {c} or {b}, or "
)
_HALF_PRUNED = (
    "{a} drops channels of what {b} packs, and method.{b}.only={only} leaves half of the cache exact: leave out one of "
    "the two"
)
_PARTLY_EXACT = (
    ", and {b} as set here keeps some tokens exact beside packed ones: leave out method.{b}.decode=exact, residual and "
    "exact_layers, or "
)
_GROUPED = ", and {b} packs tokens together, of which some leave before the others; "
_MISSING = (
    "{a} chooses again while decoding, by the last queries, and {b} leaves later layers without some of the last "
    "tokens: leave out decode_budget or decode_ratio"
)
_WHOLE = "{b} leaves later layers only some of the tokens that {a} as set here cuts into whole chunks: use variant=fill"

ALWAYS = (
    Conflict(kind("selector", packs=True), kind("prune", "quantise"), _OWNER),
    Conflict(kind("share"), kind(), _SHARER),
    Conflict(kind(rebalances=True), kind("hidden"), _BALANCER),
)
"""Conflicts whatever the knobs."""
AS_SET = (
    Conflict(kind("lowrank"), kind("prune"), _LATENT_CHANNELS),
    Conflict(kind("lowrank"), kind("quantise"), _LATENT_CODES),
    Conflict(EVICTS, kind("lowrank"), _EVICTING + _LATENT_SLOTS + _ONLY_AFTER),
    Conflict(ROLLS, kind("prune"), _ROLLED + "without some of the channels that turn together: leave out {rolled}"),
    Conflict(EVICTS, kind("quantise", partly_exact=True), _EVICTING + _PARTLY_EXACT + _ONLY_AFTER),
    Conflict(EVICTS, PACKS_TOGETHER, _EVICTING + _GROUPED + _ONLY_AFTER),
    Conflict(ROLLS, kind("quantise"), _ROLLED + "packed: leave out {rolled}"),
    Conflict(EVICTS, kind("mask"), _EVICTING + ", and {b} masks caches that only grow; " + _ONLY_AFTER),
    Conflict(EVICTS, kind("quantise"), _EVICTING + _TWO_WIDTHS + _ONLY_AFTER, beside="prune"),
    Conflict(kind("prune"), PACKS_HALF, _HALF_PRUNED),
    Conflict(kind("selector", whole=True), kind("hidden"), _WHOLE),
    Conflict(AGAIN, kind("hidden"), _MISSING),
    Conflict(EVICTS, PACKS_HALF, _EVICTING + ", from a cache of one format: leave out method.{b}.only={only}"),
)
"""Conflicts of stages as their knobs are set."""


def check_set(stages: Sequence[Stage]) -> None:
    """Raise UsageError, with the reason, for stages that cannot form one method, whatever their knobs."""
    ids = [s.id for s in stages]
    method = "+".join(ids)
    twice = sorted({i for i in ids if ids.count(i) > 1})
    if twice:
        raise UsageError(f"method={method!r} names {', '.join(twice)} twice")
    for role, reason in AT_MOST_ONE:
        rivals = [s.id for s in stages if s.role == role]
        if len(rivals) > 1:
            raise UsageError(f"method={method!r} combines {' and '.join(rivals)}, but {reason}")
    refuse_conflicts(ALWAYS, stages)
    selector = next((s.id for s in stages if s.role == "selector"), None)
    for stage in stages:
        if stage.role != "modifier":
            continue
        # a modifier understands the scores of certain selectors only
        bases: tuple[str, ...] = getattr(stage, "decorates", ())
        if selector is None:
            raise UsageError(f"method={method!r}: {stage.id} changes a selector's scores and needs one beside it")
        if selector not in bases:
            scores = f"the scores of {', '.join(bases)}, not those of {selector}"
            raise UsageError(f"method={method!r}: {stage.id} changes {scores}")


def refuse_conflicts(conflicts: Sequence[Conflict], stages: Sequence[Stage]) -> None:
    """Raise UsageError, with the reason, for the first of ``conflicts`` that two of the stages have."""
    for conflict in conflicts:
        # one stage may be of both kinds, but is in no conflict with itself
        a = next((s for s in stages if conflict.a(s)), None)
        b = next((s for s in stages if s is not a and conflict.b(s)), None)
        c = next((s for s in stages if s.role == conflict.beside), None)
        if a is not None and b is not None and (c is not None or conflict.beside is None):
            method = "+".join(s.id for s in stages)
            raise UsageError(f"method={method!r}: {conflict.reason.format(**_words(a, b, c))}")


def _words(a: Stage, b: Stage, c: Stage | None) -> dict[str, str]:
    """Return {name: text} for the braces in a reason: ids of the stages, and knobs as the user may have typed them."""
    owner = a.id
    if getattr(a, "lam", None) == 1:
        # the user may have written the alias
        owner += " (with lam=1: h2o+quant)"
    rolled = "positions=rolled"
    if getattr(a, "mode", "") == "rolled":
        # StreamingLLM has a knob of its own for the same thing
        rolled = "mode=rolled"
    third = "" if c is None else c.id
    return {"a": a.id, "owner": owner, "b": b.id, "c": third, "rolled": rolled, "only": str(getattr(b, "only", ""))}

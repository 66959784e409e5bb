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
    ("quantise", "each quantises the same values: a combination has at most one quantiser"),
    ("hidden", "each decides which tokens later layers read: a combination has at most one such method"),
)
"""Roles that a chain has at most once, each with the reason."""
Kind = Callable[[Stage], bool]
"""A test that tells whether a stage is of a kind."""


class Conflict(NamedTuple):
    """Two kinds of stages that cannot stand in one chain, and why.

    first, second: the two kinds.
    reason: the reason, in which {first.id} stands for the first stage's id, {second.id} and {third.id} for the others',
        {rolled} for the knob that rolls positions, and {alias} for a remark on the alias of Q-Hitter.
    beside: the role of a third stage without which the two do not conflict, or None if they always do.
    """

    first: Kind
    second: Kind
    reason: str
    beside: Role | None = None


def kind(*roles: Role, **flags: bool) -> Kind:
    """Return the test for stages that have one of ``roles``, and whose attributes are true or false as in ``flags``.

    Without ``roles``, stages of any role pass. For example ``kind("selector", evicts=True)`` is the test for selectors
    that evict while decoding.
    """

    def is_of_kind(stage: Stage) -> bool:
        if roles and stage.role not in roles:
            return False
        # attributes such as ``evicts`` belong to some classes of stages only; for all others they count as false
        return all(bool(getattr(stage, name, False)) == flag for name, flag in flags.items())

    return is_of_kind


chooses_again = kind("selector", chooses_again=True)
"""Selectors that choose again while decoding."""
rolls = kind("selector", evicts=True, rolled=True)
"""Selectors that give stored keys new positions at every step."""
packs_together = kind("quantise", by_token=False)
"""Quantisers that pack several tokens together, or keep some exact for a while."""
packs_half = kind("quantise", only=True)
"""Quantisers that pack only keys or only values."""


def evicts(stage: Stage) -> bool:
    """Return True if the stage evicts tokens while decoding, by itself or under a budget while decoding."""
    return chooses_again(stage) or kind("selector", evicts=True)(stage)


_EVICT_AFTER_PROMPT = "use a variant that evicts only after the prompt, without decode_budget or decode_ratio"
_EVICTS = "{first.id} evicts tokens while decoding as set here"
_ROLLS = "method.{first.id}.{rolled} turns stored keys to new positions at every step"

ALWAYS = (
    Conflict(
        kind("selector", packs=True),
        kind("prune", "quantise"),
        "{first.id}{alias} itself quantises every token that it keeps; {second.id} has nothing left to store: use "
        "h2o+{second.id}, or {first.id}{alias} alone",
    ),
    Conflict(
        kind("share"),
        kind(),
        "{first.id} shares logits between heads and holds keys for some of them only, which other methods cannot "
        "choose by: it is written alone",
    ),
    Conflict(
        kind(rebalances=True),
        kind("hidden"),
        "{first.id} divides one budget over layers that all read the whole prompt; use another selector",
    ),
)
"""Conflicts whatever the knobs."""
AS_SET = (
    Conflict(
        kind("lowrank"),
        kind("prune"),
        "{second.id} removes channels of stored keys or values, and {first.id} stores none: its latents have no "
        "channels to rank; leave out one of them",
    ),
    Conflict(
        kind("lowrank"),
        kind("quantise"),
        "{second.id} quantises keys and values as attention reads them, and {first.id} stores latents "
        "from before the rotary embedding; leave out one of them",
    ),
    Conflict(
        evicts,
        kind("lowrank"),
        f"{_EVICTS}, from slots that hold each head's own keys, and the heads of a layer share the latents of "
        f"{{second.id}}; {_EVICT_AFTER_PROMPT}",
    ),
    Conflict(
        rolls,
        kind("prune"),
        f"{_ROLLS}, and {{second.id}} stores them without some of the channels that turn together: leave out "
        "{rolled}",
    ),
    Conflict(
        evicts,
        kind("quantise", partly_exact=True),
        f"{_EVICTS}, and {{second.id}} as set here keeps some tokens exact beside quantised ones: leave out "
        f"method.{{second.id}}.decode=exact, residual and exact_layers, or {_EVICT_AFTER_PROMPT}",
    ),
    Conflict(
        evicts,
        packs_together,
        f"{_EVICTS}, and {{second.id}} quantises tokens together, of which some leave before the others; "
        f"{_EVICT_AFTER_PROMPT}",
    ),
    Conflict(rolls, kind("quantise"), f"{_ROLLS}, and {{second.id}} stores them quantised: leave out {{rolled}}"),
    Conflict(evicts, kind("mask"), f"{_EVICTS}, and {{second.id}} masks caches that only grow; {_EVICT_AFTER_PROMPT}"),
    Conflict(
        evicts,
        kind("quantise"),
        f"{_EVICTS}; {{third.id}} then leaves new tokens whole, and {{second.id}} would have to quantise them at "
        f"another width: leave out {{third.id}} or {{second.id}}, or {_EVICT_AFTER_PROMPT}",
        beside="prune",
    ),
    Conflict(
        kind("prune"),
        packs_half,
        "{first.id} drops channels of what {second.id} quantises, and method.{second.id}.only={second.only} leaves "
        "half of the cache exact: leave out one of the two",
    ),
    Conflict(
        kind("selector", whole=True),
        kind("hidden"),
        "{second.id} leaves later layers only some of the tokens that {first.id} as set here cuts into whole "
        "chunks: use variant=fill",
    ),
    Conflict(
        chooses_again,
        kind("hidden"),
        "{first.id} chooses again while decoding, by the last queries, and {second.id} leaves later layers without "
        "some of the last tokens: leave out decode_budget or decode_ratio",
    ),
    Conflict(
        evicts,
        packs_half,
        f"{_EVICTS}, from a cache of one format: leave out method.{{second.id}}.only={{second.only}}",
    ),
)
"""Conflicts of stages as their knobs are set."""


def check_set(stages: Sequence[Stage]) -> None:
    """Raise UsageError, with the reason, for stages that cannot form one method, whatever their knobs."""
    ids = [s.id for s in stages]
    method = "+".join(ids)
    twice = sorted({stage_id for stage_id in ids if ids.count(stage_id) > 1})
    if twice:
        raise UsageError(f"method={method!r} names {', '.join(twice)} twice")
    for role, reason in AT_MOST_ONE:
        rivals = [s.id for s in stages if s.role == role]
        if len(rivals) > 1:
            raise UsageError(f"method={method!r} combines {' and '.join(rivals)}, but {reason}")
    refuse_conflicts(ALWAYS, stages)
    _check_modifiers(stages)


def _check_modifiers(stages: Sequence[Stage]) -> None:
    method = "+".join(s.id for s in stages)
    selector = next((s.id for s in stages if s.role == "selector"), None)
    for stage in stages:
        if stage.role != "modifier":
            continue
        if selector is None:
            raise UsageError(f"method={method!r}: {stage.id} changes a selector's scores and needs one beside it")
        # a user's class may have this role without deriving from ``Modifier``; it then understands no scores
        understood: tuple[str, ...] = getattr(stage, "decorates", ())
        if selector not in understood:
            scores = f"the scores of {', '.join(understood)}, not those of {selector}"
            raise UsageError(f"method={method!r}: {stage.id} changes {scores}")


def refuse_conflicts(conflicts: Sequence[Conflict], stages: Sequence[Stage]) -> None:
    """Raise UsageError, with the reason, for the first of ``conflicts`` that two of the stages have."""
    method = "+".join(s.id for s in stages)
    for conflict in conflicts:
        first = next((s for s in stages if conflict.first(s)), None)
        # one stage may be of both kinds, but is in no conflict with itself
        second = next((s for s in stages if s is not first and conflict.second(s)), None)
        if first is None or second is None:
            continue
        third = next((s for s in stages if s.role == conflict.beside), None)
        if conflict.beside is None or third is not None:
            reason = conflict.reason.format(
                first=first,
                second=second,
                third=third,
                # StreamingLLM has a knob of its own for it
                rolled="mode=rolled" if getattr(first, "mode", "") == "rolled" else "positions=rolled",
                # lam is a knob of Q-Hitter alone, for which the user may have written the alias
                alias=" (with lam=1: h2o+quant)" if getattr(first, "lam", None) == 1 else "",
            )
            raise UsageError(f"method={method!r}: {reason}")

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
    reason: the function that returns the reason. It is called with the two stages, and with the third if there is
        ``beside``.
    beside: the role of a third stage without which the two do not conflict, or None if they always do.
    """

    first: Kind
    second: Kind
    reason: Callable[..., str]
    beside: Role | None = None


def kind(*roles: Role, **flags: bool) -> Kind:
    """Return the test for stages that have one of ``roles``, and whose attributes are true or false as in ``flags``.

    Without ``roles``, stages of any role pass. For example ``kind("selector", evicts=True)`` is the test for selectors
    that evict while decoding.
    """

    def is_of_kind(stage: Stage) -> bool:
        """Return True if a stage has one of the roles, and attributes as in ``flags``."""
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

# The reasons, one function for each conflict. Each is called with all stages of the conflict, even if it names only
# one of them.


def _owns_its_quantiser(owner: Stage, other: Stage) -> str:
    """Return the reason against a pruner or a quantiser beside a selector that packs its own tokens."""
    name = owner.id
    # lam is a knob of Q-Hitter alone
    if getattr(owner, "lam", None) == 1:
        # the user may have written the alias
        name += " (with lam=1: h2o+quant)"
    return (
        f"{name} itself quantises every token that it keeps; {other.id} has nothing left to store: use "
        f"h2o+{other.id}, or {name} alone"
    )


def _shares_logits(sharer: Stage, other: Stage) -> str:
    """Return the reason against any stage beside one under which heads share logits."""
    return (
        f"{sharer.id} shares logits between heads and holds keys for some of them only, which other methods cannot "
        "choose by: it is written alone"
    )


def _rebalances_layers(balancer: Stage, hidden: Stage) -> str:
    """Return the reason against one budget over layers that read different numbers of tokens."""
    return f"{balancer.id} divides one budget over layers that all read the whole prompt; use another selector"


def _latents_have_no_channels(lowrank: Stage, pruner: Stage) -> str:
    """Return the reason against a pruner beside latents."""
    return (
        f"{pruner.id} removes channels of stored keys or values, and {lowrank.id} stores none: its latents have no "
        "channels to rank; leave out one of them"
    )


def _latents_are_not_packed(lowrank: Stage, quantiser: Stage) -> str:
    """Return the reason against a quantiser beside latents."""
    return (
        f"{quantiser.id} quantises keys and values as attention reads them, and {lowrank.id} stores latents "
        "from before the rotary embedding; leave out one of them"
    )


def _evicts_latents(selector: Stage, lowrank: Stage) -> str:
    """Return the reason against the eviction of latents while decoding."""
    return (
        f"{selector.id} evicts tokens while decoding as set here, from slots that hold each head's own keys, and the "
        f"heads of a layer share the latents of {lowrank.id}; {_EVICT_AFTER_PROMPT}"
    )


def _rolls_thin_keys(selector: Stage, pruner: Stage) -> str:
    """Return the reason against rolled positions of keys that lack channels."""
    knob = _name_rolling_knob(selector)
    return (
        f"method.{selector.id}.{knob} turns stored keys to new positions at every step, and {pruner.id} stores them "
        f"without some of the channels that turn together: leave out {knob}"
    )


def _evicts_partly_exact(selector: Stage, quantiser: Stage) -> str:
    """Return the reason against eviction where some tokens are exact and others packed."""
    return (
        f"{selector.id} evicts tokens while decoding as set here, and {quantiser.id} as set here keeps some tokens "
        f"exact beside quantised ones: leave out method.{quantiser.id}.decode=exact, residual and exact_layers, or "
        f"{_EVICT_AFTER_PROMPT}"
    )


def _evicts_packed_groups(selector: Stage, quantiser: Stage) -> str:
    """Return the reason against the eviction of single tokens that are packed together with others."""
    return (
        f"{selector.id} evicts tokens while decoding as set here, and {quantiser.id} quantises tokens together, of "
        f"which some leave before the others; {_EVICT_AFTER_PROMPT}"
    )


def _rolls_packed_keys(selector: Stage, quantiser: Stage) -> str:
    """Return the reason against rolled positions of packed keys."""
    knob = _name_rolling_knob(selector)
    return (
        f"method.{selector.id}.{knob} turns stored keys to new positions at every step, and {quantiser.id} stores them "
        f"quantised: leave out {knob}"
    )


def _evicts_masked(selector: Stage, mask: Stage) -> str:
    """Return the reason against a mask over a cache that evicts while decoding."""
    return (
        f"{selector.id} evicts tokens while decoding as set here, and {mask.id} masks caches that only grow; "
        f"{_EVICT_AFTER_PROMPT}"
    )


def _evicts_two_widths(selector: Stage, quantiser: Stage, pruner: Stage) -> str:
    """Return the reason against eviction while decoding beside both a pruner and a quantiser."""
    return (
        f"{selector.id} evicts tokens while decoding as set here; {pruner.id} then leaves new tokens whole, and "
        f"{quantiser.id} would have to quantise them at another width: leave out {pruner.id} or {quantiser.id}, or "
        f"{_EVICT_AFTER_PROMPT}"
    )


def _prunes_exact_half(pruner: Stage, quantiser: Stage) -> str:
    """Return the reason against a pruner beside a quantiser that packs only keys or only values."""
    return (
        f"{pruner.id} drops channels of what {quantiser.id} quantises, and {_name_only_knob(quantiser)} leaves half of "
        "the cache exact: leave out one of the two"
    )


def _needs_whole_chunks(selector: Stage, hidden: Stage) -> str:
    """Return the reason against a selector of whole chunks where layers lack tokens of the prompt."""
    return (
        f"{hidden.id} leaves later layers only some of the tokens that {selector.id} as set here cuts into whole "
        "chunks: use variant=fill"
    )


def _needs_last_queries(selector: Stage, hidden: Stage) -> str:
    """Return the reason against choosing again while decoding where layers lack some of the last tokens."""
    return (
        f"{selector.id} chooses again while decoding, by the last queries, and {hidden.id} leaves later layers without "
        "some of the last tokens: leave out decode_budget or decode_ratio"
    )


def _evicts_half_packed(selector: Stage, quantiser: Stage) -> str:
    """Return the reason against eviction where only keys or only values are packed."""
    return (
        f"{selector.id} evicts tokens while decoding as set here, from a cache of one format: leave out "
        f"{_name_only_knob(quantiser)}"
    )


def _name_rolling_knob(selector: Stage) -> str:
    """Return the knob that rolls positions, as the user may have typed it."""
    if getattr(selector, "mode", "") == "rolled":
        # StreamingLLM has a knob of its own for it
        return "mode=rolled"
    return "positions=rolled"


def _name_only_knob(quantiser: Stage) -> str:
    """Return the knob by which a quantiser packs only keys or only values."""
    return f"method.{quantiser.id}.only={getattr(quantiser, 'only', '')}"


ALWAYS = (
    Conflict(kind("selector", packs=True), kind("prune", "quantise"), _owns_its_quantiser),
    Conflict(kind("share"), kind(), _shares_logits),
    Conflict(kind(rebalances=True), kind("hidden"), _rebalances_layers),
)
"""Conflicts whatever the knobs."""
AS_SET = (
    Conflict(kind("lowrank"), kind("prune"), _latents_have_no_channels),
    Conflict(kind("lowrank"), kind("quantise"), _latents_are_not_packed),
    Conflict(evicts, kind("lowrank"), _evicts_latents),
    Conflict(rolls, kind("prune"), _rolls_thin_keys),
    Conflict(evicts, kind("quantise", partly_exact=True), _evicts_partly_exact),
    Conflict(evicts, packs_together, _evicts_packed_groups),
    Conflict(rolls, kind("quantise"), _rolls_packed_keys),
    Conflict(evicts, kind("mask"), _evicts_masked),
    Conflict(evicts, kind("quantise"), _evicts_two_widths, beside="prune"),
    Conflict(kind("prune"), packs_half, _prunes_exact_half),
    Conflict(kind("selector", whole=True), kind("hidden"), _needs_whole_chunks),
    Conflict(chooses_again, kind("hidden"), _needs_last_queries),
    Conflict(evicts, packs_half, _evicts_half_packed),
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
    """Raise UsageError for a modifier without a selector whose scores it understands."""
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
        if conflict.beside is None:
            raise UsageError(f"method={method!r}: {conflict.reason(first, second)}")
        third = next((s for s in stages if s.role == conflict.beside), None)
        if third is not None:
            raise UsageError(f"method={method!r}: {conflict.reason(first, second, third)}")

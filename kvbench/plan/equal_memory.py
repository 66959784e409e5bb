"""Equal memory: find the kv_size at which a chain holds as many bytes as a reference, before anything is measured.

    method=h2o,h2o+think kv_size=128 match=bytes     h2o runs with kv_size=110

The reference is the last method named, or ``reference=``. Bytes are payload after the prompt at 16 bits:
``match=bytes`` counts what all layers store, ``match=compressed`` what the layers store that methods compress, and
``match=nominal`` what ThinK's paper counts in these layers (arXiv 2407.21018, table 7).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from kvbench.audit.accounting import HALF, bytes_declared, declare_local_layers, nominal_payload
from kvbench.base.errors import UsageError, unknown
from kvbench.base.formatting import format_number
from kvbench.kv.model_shape import Shape
from kvbench.methods.core import registry
from kvbench.methods.core.base import Selector
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.knob_owners import BUDGET_PARTS, overlay
from kvbench.methods.core.resolve import ChainConfig, chain_config
from kvbench.plan.config import MATCH as KINDS
from kvbench.plan.config import RunConfig

LONG = 2**20
"""Tokens. A prompt of unknown length counts as this long, and no kv_size beyond it is searched."""
TOLERANCE = 0.05
"""The largest difference from the reference's bytes that counts as a match, relative to those that methods compress."""
CLOSE = 0.005
"""Payloads whose relative difference is no larger than this count as equal."""
FLOOR = 4096
"""The number of sizes that are tried, from the sum of a chain's window and sinks on, to find its smallest kv_size."""
PayloadCounter = Callable[[Chain], float]
"""From a chain to the bytes of its payload after the prompt."""


@dataclass(frozen=True)
class Matched:
    """One chain with a ``kv_size`` that matches a reference in bytes, for prompts that fill both budgets.

    by: how bytes are counted, one of KINDS.
    reference, method: the labels of the two chains.
    kv_size: the size of the chain that matches.
    bytes: the payloads (of the chain, of the reference) as all layers store them.
    compressed: the same payloads without those of local layers and states.
    nominal: the latter as ThinK's paper counts them.
    sizes: the kv_size that each kind of count gives, if there is one.
    """

    by: str
    reference: str
    method: str
    kv_size: int
    bytes: tuple[float, float]
    compressed: tuple[float, float]
    nominal: tuple[float, float]
    sizes: dict[str, int]

    def __str__(self) -> str:
        """Return the match as a line for readers: both payloads, and the kv_size of the other count if it differs."""
        counts = [f"{_compare_bytes(*self.bytes)} are held at 16 bits"]
        if self.compressed != self.bytes:
            counts.append(f"{_compare_bytes(*self.compressed)} in the layers that methods compress")
        if self.nominal != self.compressed:
            counts.append(f"{_compare_bytes(*self.nominal)} nominal")
        text = f"match={self.by}: {self.method} against {self.reference}: {', '.join(counts)}"
        for kind, size in self.sizes.items():
            if size != self.kv_size:
                text += f"; match={kind} gives kv_size={size}"
        return text


def match_budgets(cfg: RunConfig, shape: Shape, tokens: int | None = None) -> tuple[RunConfig, tuple[Matched, ...]]:
    """Return (run, matches). Every chain of the run but the reference gets the kv_size that is nearest in bytes.

    Each setting of the reference gives every other chain a kv_size of its own. The full cache stays as it is. A run
    without ``match=`` stays as it is, and has no matches.

    tokens: the prompt length. Without it, prompts are assumed to be longer than any budget, so the reference must have
    a kv_size.

    Raises UsageError that names the chain that cannot be matched and a remedy.
    """
    if cfg.match is None:
        return cfg, ()
    name = _find_reference(cfg)
    references = [c for c in cfg.chains if c.chain.name == name]
    # a chain without stages is the full cache, which has no kv_size
    others = _drop_repetitions([c for c in cfg.chains if c.chain.name != name and c.chain.stages])
    if not others:
        raise UsageError(
            f"match={cfg.match} sets the kv_size of other methods by {name}, and this run has none: "
            f"name one beside it, as in method=snapkv,{name}"
        )
    matches: list[Matched] = []
    chains = [c for c in cfg.chains if c.chain.is_full]
    counters = {kind: payload_counter(kind, shape, tokens or LONG) for kind in KINDS}
    for reference in references:
        _check_reference(reference.chain, cfg.match, tokens)
        for other in others:
            # a run with both values of per= has its reference under each: match within one value
            if other.chain.per != reference.chain.per:
                continue
            matched_chain, match = _match_chain(other, reference, cfg.match, counters)
            chains.append(matched_chain)
            matches.append(match)
        chains.append(reference)
    # two settings of the reference can give a chain one kv_size
    distinct = {(c.chain.name, repr(c.chain.identity())): c for c in chains}
    return replace(cfg, chains=tuple(distinct.values())), tuple(matches)


def _match_chain(
    template: ChainConfig, reference: ChainConfig, kind: str, counters: Mapping[str, PayloadCounter]
) -> tuple[ChainConfig, Matched]:
    """Return (chain, match): the chain ``template`` with the kv_size that matches the reference by ``kind``.

    counters: the function from a chain to its payload, for each of KINDS.
    """
    # beside windows and states any two caches would seem alike, so what counts as near follows from the others' bytes
    unit = counters["compressed"](reference.chain)
    sizes = {kind: find_nearest_kv_size(template, reference, counters[kind], kind, unit)}
    for other_kind, count in counters.items():
        # by another count there may be no match
        with suppress(UsageError):
            sizes[other_kind] = find_nearest_kv_size(template, reference, count, other_kind, unit)
    best = with_size(template, sizes[kind])
    # the bytes of (this chain, the reference), by each way of counting
    payloads = {k: (count(best.chain), count(reference.chain)) for k, count in counters.items()}
    match = Matched(
        by=kind,
        reference=reference.label,
        method=best.label,
        kv_size=sizes[kind],
        bytes=payloads["bytes"],
        compressed=payloads["compressed"],
        nominal=payloads["nominal"],
        sizes=sizes,
    )
    return best, match


def find_nearest_kv_size(
    template: ChainConfig, reference: ChainConfig, count: PayloadCounter, kind: str, unit: float
) -> int:
    """Return the kv_size at which the chain's payload is nearest to the reference's. A tie goes to the smaller size.

    Packing a block makes the bytes fall while tokens are added, so several sizes of a chain with a quantiser can be
    about equally near. Such a chain takes the largest size within CLOSE of the reference, if there is one.

    template: the chain, of any budget.
    count: the function from a chain to its payload.
    kind: one of KINDS, the way in which ``count`` counts, for the error.
    unit: the bytes of which CLOSE and TOLERANCE are fractions.

    Raises UsageError if the nearest payload is off by more than TOLERANCE.
    """
    target = count(reference.chain)
    least = _find_smallest_size(template, kind)

    def payload_at(size: int) -> float:
        return count(with_size(template, size).chain)

    low, high = _bracket_target(payload_at, target, least)
    # compare these two sizes and a few around them
    coder = template.chain.coder
    reach = 2
    if coder is not None:
        # a quantiser's payload falls where a block is packed, so bisection may miss: try all sizes of several blocks
        reach = 8 * (coder.keys.block + coder.values.block)
    candidates = range(max(least, low - reach), high + reach + 1)
    distance_by_size = {size: abs(payload_at(size) - target) for size in candidates}
    best = min(distance_by_size, key=lambda size: (distance_by_size[size], size))
    if coder is not None:
        # nearly equal payloads: prefer the largest size
        close = [size for size, distance in distance_by_size.items() if distance <= CLOSE * unit]
        best = max(close, default=best)
    if distance_by_size[best] > TOLERANCE * unit:
        raise UsageError(
            f"match={kind}: {template.chain.name} cannot hold as many bytes as {reference.label}: "
            f"{_compare_bytes(payload_at(best), target)} at the nearest, kv_size={best}. Give the reference another "
            "budget, or leave one of them out"
        )
    return best


def _bracket_target(payload_at: Callable[[int], float], target: float, least: int) -> tuple[int, int]:
    """Return (low, high), neighbouring sizes from ``least`` on: the payload reaches ``target`` at high, but not at low.

    If the payload never reaches the target, both are near the largest size that is tried. If it reaches the target at
    ``least`` already, both are ``least``.

    payload_at: returns the payload at a size. It is taken to grow with the size.
    """
    # double the size until its payload reaches the target, then bisect
    high = least
    while payload_at(high) < target and high < LONG:
        high *= 2
    low = max(least, high // 2)
    while high - low > 1:
        middle = (low + high) // 2
        if payload_at(middle) < target:
            low = middle
        else:
            high = middle
    return low, high


def with_size(template: ChainConfig, size: int) -> ChainConfig:
    """Return the chain with kv_size=``size`` in place of its budget. The chain's other knobs stay.

    Raises UsageError if the chain does not accept this size.
    """
    return with_options(template, {"kv_size": size})


def with_options(template: ChainConfig, options: Mapping[str, object]) -> ChainConfig:
    """Return the chain with ``options`` set on its selector. A new budget replaces the old one of any kind.

    template: a chain with a selector.

    Raises UsageError if the chain does not accept the options.
    """
    assert template.method is not None, "the chains of a run are made from methods"
    owner = next(stage.id for stage in template.chain.stages if isinstance(stage, Selector))
    entries = dict(template.entries)
    entries[owner] = overlay(template.entries[owner], options)
    return chain_config(template.method, entries, template.chain.per)


def _find_reference(cfg: RunConfig) -> str:
    """Return the canonical name of the chain that the others are matched to: ``reference=``, else the last in method=.

    The last chain is the default because the chain under test commonly stands behind the method that it extends. In
    method=h2o,h2o+think kv_size=128, h2o+think keeps its setting as written, and h2o gets the same bytes.

    Raises UsageError if there is no such chain.
    """
    names = list(dict.fromkeys(c.chain.name for c in cfg.chains if c.chain.stages))
    if cfg.reference is None:
        if not names:
            raise UsageError(f"match={cfg.match} compares methods, and this run has only full: name one with method=")
        return names[-1]
    # the user may write the stages in any order, and by aliases
    stages = sorted(registry.read_method(cfg.reference).entries)
    for name in names:
        if sorted(name.split("+")) == stages:
            return name
    raise unknown("reference", cfg.reference, names, "Name it in method=, too.")


def _drop_repetitions(chains: Sequence[ChainConfig]) -> list[ChainConfig]:
    """Return the chains without repetitions. Chains that differ only in their budgets count as the same chain."""
    budget_keys = set(registry.BUDGET_KNOBS) | set(BUDGET_PARTS)
    distinct: dict[str, ChainConfig] = {}
    for config in chains:
        other_knobs = {}
        for stage, entry in config.entries.items():
            other_knobs[stage] = {knob: value for knob, value in entry.items() if knob not in budget_keys}
        # values of knobs may be lists, which cannot be keys: their text can
        key = repr((config.chain.name, config.chain.per, sorted(other_knobs.items())))
        distinct.setdefault(key, config)
    return list(distinct.values())


def _check_reference(chain: Chain, kind: str, tokens: int | None) -> None:
    """Raise UsageError if the reference's bytes grow with the prompt and the prompt's length is unknown.

    kind: the kind of equal memory, for the error.
    tokens: the prompt's length, None if it is unknown.
    """
    if tokens is not None:
        return
    selector = chain.selector
    if not isinstance(selector, Selector):
        reason = "it has no kv_size"
    elif selector.kv_size is None:
        reason = "its budget is a fraction of each prompt"
    else:
        return
    raise UsageError(
        f"match={kind}: the bytes of the reference {chain.name} grow with the prompt, as {reason}. Give it "
        "kv_size=, or find sizes at one prompt length (kvbench bench memory n=4096 match=...), give those"
    )


def _find_smallest_size(template: ChainConfig, kind: str) -> int:
    """Return the smallest kv_size that the chain accepts. Raises UsageError if it accepts no size.

    kind: the kind of equal memory, for the error.
    """
    chain, selector = template.chain, template.chain.selector
    if not isinstance(selector, Selector):
        raise UsageError(
            f"match={kind}: {chain.name} has no kv_size to set. Leave it out, or combine it with a method that selects "
            f"tokens, as in snapkv+{chain.name}"
        )
    # sinks and window are always kept, and a budget has room for one token more
    size = sum(selector.protected()) + 1
    # other knobs may need larger budgets: only the chain itself knows which sizes it accepts
    for extra in range(FLOOR):
        try:
            with_size(template, size + extra)
        except UsageError:
            continue
        return size + extra
    raise UsageError(f"match={kind}: {template.label} takes no kv_size; leave it out")


def _compare_bytes(chain_bytes: float, reference_bytes: float) -> str:
    """Return as text two numbers of bytes in one unit, and the difference of the first from the second in per cent."""
    percent = format_number(100 * (chain_bytes / reference_bytes - 1), 2, sign=True)
    unit, size = "KiB", 2**10
    if reference_bytes >= 10 * 2**20:
        unit, size = "MiB", 2**20
    sizes = f"{format_number(chain_bytes / size, 2)} and {format_number(reference_bytes / size, 2)} {unit}"
    return f"{sizes} ({percent} %)"


def payload_counter(kind: str, shape: Shape, tokens: int) -> PayloadCounter:
    """Return a function that gives a chain's payload in bytes at 16 bits, after a prompt of ``tokens`` tokens.

    kind: ``bytes`` counts the payload that the chain declares to store. ``compressed`` leaves out local layers and
    states, beside which methods can seem alike. ``nominal`` leaves them out and counts pruned channels as ThinK's paper
    does: (1 - ratio) D channels a token, not rounded.
    """

    def payload_of(chain: Chain) -> float:
        """Return the chain's payload. Raises UsageError if the prompt's text decides how many tokens it keeps."""
        payload: float | None = None
        if kind == "nominal":
            payload = nominal_payload(chain, shape, tokens, HALF)
        else:
            declared = bytes_declared(chain, shape, tokens, HALF)
            if declared is not None:
                payload = declared.payload
        if payload is None:
            raise UsageError(
                f"match={kind}: how many tokens {chain.name} keeps is decided by the prompt alone: leave it out"
            )
        if kind != "bytes":
            local_payload, _ = declare_local_layers(chain, shape, tokens, HALF)
            payload -= local_payload + shape.state_bytes(HALF)
        return payload

    return payload_of

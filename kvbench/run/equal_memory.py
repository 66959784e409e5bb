"""Equal memory: the kv_size at which a chain holds as many bytes as a reference, before anything is measured.

    method=h2o,h2o+think kv_size=128 match=bytes     h2o runs with kv_size=109

The reference is the last method named, or ``reference=``. Bytes are payload after the prompt at 16 bits:
``match=bytes`` counts what is stored, ``match=nominal`` what ThinK's paper counts (arXiv 2407.21018, table 7).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvbench.audit.accounting import HALF, bytes_declared, nominal_payload
from kvbench.cache.model_shape import Shape
from kvbench.errors import UsageError, unknown
from kvbench.methods import registry
from kvbench.methods.base import Selector
from kvbench.methods.chain import Chain
from kvbench.methods.resolve import BUDGET_PARTS, ChainConfig, chain_config, overlay
from kvbench.run.config import RunConfig

KINDS = ("bytes", "nominal")
LONG = 2**20
TOLERANCE = 0.05
CLOSE = 0.005
FLOOR = 4096  # how far above its window and sinks a chain's least kv_size may lie
Price = Callable[[Chain], float]


@dataclass(frozen=True)
class Matched:
    """One chain whose ``kv_size`` was set by a reference, over all layers and prompts that fill both budgets.

    ``bytes`` and ``nominal`` are (its own, the reference's) payload under either count, ``sizes`` the kv_size that each
    count gives.
    """

    by: str
    reference: str
    method: str
    kv_size: int
    bytes: tuple[float, float]
    nominal: tuple[float, float]
    sizes: dict[str, int]

    def __str__(self) -> str:
        counts = [f"{_text(*self.bytes)} are held at 16 bits"]
        if self.nominal != self.bytes:
            counts.append(f"{_text(*self.nominal)} nominal")
        other = next(k for k in KINDS if k != self.by)
        also = "" if self.sizes[other] == self.kv_size else f"; match={other} gives kv_size={self.sizes[other]}"
        return f"match={self.by}: {self.method} against {self.reference}: {', '.join(counts)}{also}"


def settle(cfg: RunConfig, shape: Shape, tokens: int | None = None) -> tuple[RunConfig, tuple[Matched, ...]]:
    """The run with every chain but the reference at the kv_size whose bytes come nearest, and what was found.

    Each setting of the reference gives every other chain a kv_size of its own; the full cache stays as it is.
    ``tokens`` is the prompt length; without one prompts are longer than any budget, so that a reference must have a
    kv_size. Raises UsageError naming the chain that cannot be matched, and what to do.
    """
    if cfg.match is None:
        return cfg, ()
    name = _reference(cfg)
    references = [c for c in cfg.chains if c.chain.name == name]
    others = _templates([c for c in cfg.chains if c.chain.name != name and c.chain.stages])
    if not others:
        raise UsageError(
            f"match={cfg.match} sets the kv_size of other methods by {name}, and this run has none: "
            f"name one beside it, as in method=snapkv,{name}"
        )
    found: list[Matched] = []
    chains = [c for c in cfg.chains if not c.chain.stages]
    prices = {kind: _price(kind, shape, tokens or LONG) for kind in KINDS}
    for reference in references:
        _check_reference(reference.chain, cfg.match, tokens)
        for other in others:
            if other.chain.per != reference.chain.per:
                continue
            sizes = {k: nearest(other, reference, price, k) for k, price in prices.items()}
            best = with_size(other, sizes[cfg.match])
            chains.append(best)
            held, counted = ((p(best.chain), p(reference.chain)) for p in prices.values())
            found.append(Matched(cfg.match, reference.label, best.label, sizes[cfg.match], held, counted, sizes))
        chains.append(reference)
    distinct = {(c.chain.name, repr(c.chain.identity())): c for c in chains}
    return replace(cfg, chains=tuple(distinct.values())), tuple(found)


def nearest(template: ChainConfig, reference: ChainConfig, price: Price, kind: str) -> int:
    """The kv_size at which the chain's price comes nearest to the reference's; ties go to the smaller size.

    Packing in blocks makes bytes fall now and then as tokens are added: a chain with a quantiser takes the largest size
    within CLOSE of the reference, where there is one. Raises UsageError where the nearest is off by over TOLERANCE.
    """
    target, least = price(reference.chain), _least(template, kind)

    def at(size: int) -> float:
        return price(with_size(template, size).chain)

    high = least
    while at(high) < target and high < LONG:
        high *= 2
    low = max(least, high // 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if at(middle) < target else (low, middle)
    coder = template.chain.coder
    reach = 2 if coder is None else 8 * (coder.keys.block + coder.values.block)
    off = {size: abs(at(size) - target) for size in range(max(least, low - reach), high + reach + 1)}
    best = min(off, key=lambda size: (off[size], size))
    if coder is not None:
        best = max((size for size in off if off[size] <= CLOSE * target), default=best)
    if abs(at(best) - target) > TOLERANCE * target:
        raise UsageError(
            f"match={kind}: {template.chain.name} cannot hold as many bytes as {reference.label}: "
            f"{_text(at(best), target)} at the nearest, kv_size={best}. Give the reference another budget, or leave "
            "one of them out"
        )
    return best


def with_size(template: ChainConfig, size: int) -> ChainConfig:
    """The chain with that kv_size as its only budget, and whatever its knobs make of it."""
    owner = next(s.id for s in template.chain.stages if isinstance(s, Selector))
    entry = overlay(template.entries[owner], {"kv_size": size})
    return chain_config({**template.entries, owner: entry}, template.chain.per, written=template.written)


def _reference(cfg: RunConfig) -> str:
    """The canonical name of the chain that the others are matched to."""
    names = list(dict.fromkeys(c.chain.name for c in cfg.chains if c.chain.stages))
    if cfg.reference is None:
        if not names:
            raise UsageError(f"match={cfg.match} compares methods, and this run has only full: name one with method=")
        return names[-1]
    asked = sorted(registry.split(cfg.reference))
    found = next((name for name in names if sorted(name.split("+")) == asked), None)
    if found is None:
        raise unknown("reference: no method of this run is", cfg.reference, names, "Name it in method= too.")
    return found


def _templates(chains: Sequence[ChainConfig]) -> list[ChainConfig]:
    """Chains that differ in more than their budget, one of each."""
    found: dict[str, ChainConfig] = {}
    for c in chains:
        budget = (*registry.BUDGET_KNOBS, *BUDGET_PARTS)
        rest = {m: {k: v for k, v in e.items() if k not in budget} for m, e in c.entries.items()}
        found.setdefault(repr((c.chain.name, c.chain.per, sorted(rest.items()))), c)
    return list(found.values())


def _check_reference(chain: Chain, kind: str, tokens: int | None) -> None:
    """Raise UsageError for a reference whose bytes depend on prompts of unknown length, or on their text."""
    selector = chain.selector
    if tokens is None and not (isinstance(selector, Selector) and selector.kv_size is not None):
        grows = "its budget is a fraction of each prompt" if isinstance(selector, Selector) else "it has no kv_size"
        raise UsageError(
            f"match={kind}: the bytes of the reference {chain.name} grow with the prompt, as {grows}. Give it "
            "kv_size=, or find sizes at one prompt length (python -m kvbench bench memory n=4096 match=...), give those"
        )


def _least(template: ChainConfig, kind: str) -> int:
    """The smallest kv_size that the chain takes."""
    chain, selector = template.chain, template.chain.selector
    if not isinstance(selector, Selector):
        raise UsageError(
            f"match={kind}: {chain.name} has no kv_size to set. Leave it out, or chain it with a method that selects "
            f"tokens, as in snapkv+{chain.name}"
        )
    size = selector.sink_size() + selector.window_size() + 1
    for more in range(FLOOR):
        try:
            with_size(template, size + more)
        except UsageError:
            continue
        return size + more
    raise UsageError(f"match={kind}: {template.label} takes no kv_size; leave it out")


def _text(own: float, reference: float) -> str:
    """Two numbers of bytes in one unit, and how far apart they are."""
    far = round(100 * (own / reference - 1), 2) + 0.0
    unit, size = ("MiB", 2**20) if reference >= 10 * 2**20 else ("KiB", 2**10)
    return f"{own / size:.2f} and {reference / size:.2f} {unit} ({far:+.2f} %)".replace("-", "−")


def _price(kind: str, shape: Shape, tokens: int) -> Price:
    def price(chain: Chain) -> float:
        if kind == "nominal":
            found = nominal_payload(chain, shape, tokens, HALF)
        else:
            whole = bytes_declared(chain, shape, tokens, HALF)
            found = None if whole is None else whole.payload
        if found is None:
            raise UsageError(
                f"match={kind}: how many tokens {chain.name} keeps is decided by the prompt alone: leave it out"
            )
        return found

    return price

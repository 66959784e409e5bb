"""Stages: a method is a short chain of frozen stages (methods.chain), each one formula with its knobs.

A stage says what it needs to see, what it will keep (``expected``) and what that costs (``layout``). The audit holds it
to both. Stages never see other prompts, other rows or the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from kvbench.base.errors import Refused, UsageError
from kvbench.kv import ops
from kvbench.kv.observation import Observation
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.contract import Block as Block
from kvbench.methods.core.contract import Capacity as Capacity
from kvbench.methods.core.contract import Expected as Expected
from kvbench.methods.core.contract import protect as protect
from kvbench.methods.core.knobs import DEFAULT_RATIO, at_least, knob
from kvbench.methods.core.stage import Role as Role
from kvbench.methods.core.stage import Stage as Stage
from kvbench.methods.core.statistics import check_scores
from kvbench.methods.core.statistics import top_indices as top_indices
from kvbench.storage.roles import Masker, Slots

DECODE_EVERY = 128  # new tokens between two choices while decoding, where a decode_budget alone is given


@dataclass(frozen=True, kw_only=True)
class TokenSelector(Stage):
    """A stage that chooses which tokens stay, with or without a budget. All of them have this knob:

    frozen_layers: the numbers of layers that keep everything.
    """

    role: ClassVar[Role] = "selector"
    shared: ClassVar[bool] = False  # True: all heads keep the same tokens
    packs: ClassVar[bool] = False  # True: it packs what it keeps, and nothing else can
    ragged: ClassVar[bool] = False  # True: heads differ also where only a sum over layers is declared

    frozen_layers: tuple[int, ...] = ()

    def check(self) -> None:
        self.require_layers("frozen_layers")

    def check_layers(self, n_layers: int) -> None:
        self.require_layers("frozen_layers", n_layers)

    def capacity(self, n: int) -> Capacity:
        """Return the budget for a prompt of n tokens: all n where the data alone decide how many stay."""
        return Capacity(n, 0, 0)

    def nominal(self, n: int) -> int | None:
        """Return the budget that the user gave, in tokens of a prompt of n; None where there is none."""
        return None

    @property
    def evicts(self) -> bool:
        """True if tokens are evicted while decoding, too."""
        return False

    @property
    def rolled(self) -> bool:
        """True if cached keys take the positions of their slots instead of their own."""
        return False

    def initial_state(self, cache: LayerCache, obs: Observation) -> Mapping[str, torch.Tensor]:
        """Return the running state that decoding starts from, per prompt token: [heads, n, ...] each."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Selector(TokenSelector):
    """A stage that keeps a budget of tokens, chosen by a score. All of them have these knobs:

    kv_size: tokens kept per stored head, window and sinks included; more than sinks and window together.
    kv_ratio: fraction of the prompt kept, floor(ratio * n) tokens. It is 0.25 if neither knob is given.
    kv_round: whether that product is rounded to the nearest number of tokens (halves to even) instead of down.
    decode_budget: tokens held per stored head while decoding, too: the selector chooses again among all that are held,
        prompt and new ones. Without it only the prompt is chosen from, unless the selector evicts by itself.
    decode_every: new tokens between two such choices.
    """

    kv_size: int | None = None
    kv_ratio: float | None = None
    kv_round: bool | None = None
    decode_budget: int | None = knob(None, at_least(1, "tokens", null=True))
    decode_every: int | None = knob(None, at_least(1, "tokens", null=True))

    def check(self) -> None:
        super().check()
        if self.kv_size is not None and self.kv_ratio is not None:
            raise UsageError(
                f"method.{self.id}: kv_size={self.kv_size} and kv_ratio={self.kv_ratio} are two ways to say one "
                "budget: give one of them"
            )
        if self.kv_size is None and self.kv_ratio is None:
            object.__setattr__(self, "kv_ratio", DEFAULT_RATIO)
        sinks, window = self.protected()
        if self.kv_size is not None:
            least = f"{sinks + window} (sinks {sinks} + window {window})"
            self.require("kv_size", self.kv_size > sinks + window, f"a whole number of tokens above {least}")
        if self.kv_ratio is not None:
            self.require("kv_ratio", 0 < self.kv_ratio <= 1, "a fraction of the prompt kept, above 0 and at most 1")
        if self.decode_budget is not None:
            least = f"{sinks + window} (sinks {sinks} + window {window})"
            self.require(
                "decode_budget", self.decode_budget > sinks + window, f"a whole number of tokens above {least}"
            )
            object.__setattr__(self, "decode_every", self.decode_every or DECODE_EVERY)
        given = self.decode_every is None or self.decode_budget is not None
        self.require("decode_every", given, "given together with decode_budget")

    def while_decoding(self) -> Selector:
        """Return the selector that chooses again while decoding, with ``decode_budget`` as its only budget."""
        return replace(self, kv_size=self.decode_budget, kv_ratio=None, decode_budget=None, decode_every=None)

    def require_one_budget(self, knob: str) -> None:
        """Raise UsageError if kv_size or kv_ratio is set beside ``knob``, which is a budget of its own."""
        alone = self.kv_size is None and self.kv_ratio in (None, DEFAULT_RATIO)
        self.require(knob, alone, "a budget of its own: not given together with kv_size or kv_ratio")
        object.__setattr__(self, "kv_ratio", None)

    def sink_size(self) -> int:
        """Return how many first tokens are always kept."""
        return 0

    def window_size(self) -> int:
        """Return how many last tokens are always kept."""
        return 0

    def protected(self) -> tuple[int, int]:
        """Return how many first and how many last tokens are always kept."""
        return self.sink_size(), self.window_size()

    def capacity(self, n: int) -> Capacity:
        """Return the budget for a prompt of n tokens. A fraction too small for sinks and window shrinks them."""
        sinks, window = self.protected()
        if self.kv_size is not None:
            return Capacity(min(self.kv_size, n), sinks, window)
        exact = (self.kv_ratio or DEFAULT_RATIO) * n
        tokens = max(2, round(exact) if self.kv_round else int(exact + 1e-9))  # 1e-9: a product meant to be whole is
        if tokens >= n or tokens > sinks + window:
            return Capacity(min(tokens, n), sinks, window)
        return Capacity(tokens, min(sinks, tokens // 2), min(window, tokens // 2), shrunk=True)

    def nominal(self, n: int) -> int | None:
        return self.capacity(n).tokens

    def budget(self, n: int, layer: int, n_layers: int) -> int:
        """Return the tokens kept per head in this layer."""
        return n if layer in self.frozen_layers else self.capacity(n).tokens

    def expected(self, n: int, layer: int, n_layers: int, heads: int) -> Expected | None:
        return Expected.exactly(self.budget(n, layer, n_layers), heads)

    def scores(self, cache: LayerCache, obs: Observation, capacity: Capacity) -> torch.Tensor:
        """Return the score of each prompt token, [heads, n] or [1, n] if ``shared``; the largest are kept."""
        raise TypeError(f"{type(self).__name__} does not say how it scores tokens")

    def compress(self, cache: LayerCache, obs: Observation) -> LayerCache:
        return self.choose(cache, obs, ())

    def choose(self, cache: LayerCache, obs: Observation, modifiers: Sequence[Modifier]) -> LayerCache:
        """Return the compressed cache; ``modifiers`` change the scores before the choice."""
        state = dict(self.initial_state(cache, obs))
        for modifier in modifiers if self.evicts else ():
            state.update(modifier.initial_state(cache))
        if state:
            cache = ops.with_state(cache, **state)
        n = obs.prompt_tokens
        budget = self.budget(n, obs.layer, obs.n_layers)
        if budget >= obs.n:
            return cache
        capacity = protect(self.capacity(n), sinks_of(modifiers), n)
        own_scores = self.scores(cache, obs, capacity)
        check_scores(self.id, own_scores, cache, obs)
        # authors may build scores on the CPU; the device of the keys is the cache's matter
        scores = own_scores.to(cache.segments[0].k.device, torch.float32, copy=True)
        for modifier in modifiers:
            scores = modifier.modify(scores, cache, obs)
        if bool(scores.isnan().any()):
            names = "+".join(s.id for s in (self, *modifiers))
            raise Refused(
                f"scores of {names} hold NaN in layer {obs.layer}: its formula divides by 0 or takes inf from inf"
            )
        lowest, highest = scores.aminmax(dim=-1)
        if bool((highest.isinf() & (lowest == highest)).any()):
            names = "+".join(s.id for s in (self, *modifiers))
            raise Refused(
                f"scores of {names} are all infinite for a head in layer {obs.layer} and choose no token: its formula "
                "overflows float32 or divides by 0"
            )
        scores[:, : capacity.sinks] = torch.inf
        scores[:, obs.n - capacity.window :] = torch.inf
        return self.pick(cache, scores, budget)

    def pick(self, cache: LayerCache, scores: torch.Tensor, budget: int) -> LayerCache:
        """Return the cache with every head's ``budget`` best tokens by scores [heads, n]; those at +inf always stay."""
        return ops.select(cache, top_indices(scores, budget))


@dataclass(frozen=True, kw_only=True)
class Modifier(Stage):
    """A stage that changes a selector's scores before they decide. It chooses nothing itself.

    ``decorates`` names the selectors whose scores it understands. Where the selector evicts while decoding,
    ``initial_state`` and ``new_token_state`` keep what ``reweigh`` reads, at ``slot_bytes`` a slot.
    """

    role: ClassVar[Role] = "modifier"
    decorates: ClassVar[tuple[str, ...]] = ()

    def sink_size(self) -> int:
        """Return how many first tokens are always kept, within the selector's budget."""
        return 0

    def modify(self, scores: torch.Tensor, cache: LayerCache, obs: Observation) -> torch.Tensor:
        """Return the selector's scores [heads, n] of the prompt's tokens, changed."""
        return scores

    def slot_bytes(self, itemsize: int) -> int:
        """Return the bytes of state per slot, where values take ``itemsize`` bytes an element."""
        return 0

    def initial_state(self, cache: LayerCache) -> Mapping[str, torch.Tensor]:
        """Return the state per prompt token [heads, n] that decoding needs."""
        return {}

    def reweigh(self, scores: torch.Tensor, slots: Slots) -> torch.Tensor:
        """Return the selector's scores [B, H, S] of slots while decoding, changed; +inf stays +inf."""
        return scores

    def new_token_state(self, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return the state of new tokens with exact values [B, H, T, D]: [B, H, T] each."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Mask(Stage, Masker):
    """A stage that stores everything and decides at each decode step what is attended: it can save time, not bytes."""

    role: ClassVar[Role] = "mask"

    def masks(self, layer: int) -> bool:
        """Tell whether the layer is masked at all."""
        return True


def sinks_of(modifiers: Sequence[Modifier]) -> int:
    """Return how many first tokens the modifiers keep together: as many as the one that keeps most."""
    return max((m.sink_size() for m in modifiers), default=0)

"""Base classes of the stages that choose tokens: selectors, modifiers of their scores, and masks.

A method is a chain of stages (``methods.core.chain``). Each stage is a frozen dataclass that holds one formula. Its
fields are its knobs. It declares the data that it reads (``needs``), the tokens that it will keep (``expected``) and
their bytes (``layout``). The audit checks these tokens and bytes. ``compress`` sees one layer of one prompt at a time.

Shapes: n prompt tokens, D head dimension, B rows of a decode batch, H stored heads, S slots, T new tokens. The word
``heads`` in a shape means stored heads: the kv heads, or all query heads under ``per=query_head``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from kvbench.base.errors import Refused, UsageError
from kvbench.kv import ops
from kvbench.kv.observation import Observation
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.contract import Capacity, Expected, top_indices, with_sinks
from kvbench.methods.core.knobs import DECODE_SHARE, DEFAULT_RATIO, KEPT_SHARE, at_least, knob
from kvbench.methods.core.stage import Role, Stage
from kvbench.storage.roles import Masker, Slots

DECODE_EVERY = 128
"""New tokens between two choices while decoding, if ``decode_every`` is not set."""
EXACT_WHOLE = 2**24
"""float32 represents all whole numbers up to this one exactly."""


@dataclass(frozen=True, kw_only=True)
class TokenSelector(Stage):
    """A stage that chooses which tokens stay, with or without a budget. All such stages have this knob:

    frozen_layers: the numbers of layers that keep everything.

    Subclasses may set three more attributes:

    shared: True if all heads keep the same tokens.
    packs: True if the selector itself packs the tokens that it keeps into few bits. No pruner or quantiser may follow.
    ragged: True if heads may keep different numbers of tokens even where ``expected`` fixes no sum over the heads.
    """

    role: ClassVar[Role] = "selector"
    shared: ClassVar[bool] = False
    packs: ClassVar[bool] = False
    ragged: ClassVar[bool] = False

    frozen_layers: tuple[int, ...] = ()

    def check(self) -> None:
        self.sort_layers("frozen_layers")

    def check_layers(self, n_layers: int) -> None:
        self.require_layers("frozen_layers", n_layers)

    def capacity(self, n: int) -> Capacity:
        """Return the budget for a prompt of n tokens. It is all n if the data alone decide how many stay."""
        return Capacity(n, sinks=0, window=0)

    def nominal(self, n: int) -> int | None:
        """Return the budget that the user gave, in tokens of a prompt of n, or None if no budget was given."""
        return None

    @property
    def evicts(self) -> bool:
        """True if tokens are evicted while decoding as well."""
        return False

    @property
    def rolled(self) -> bool:
        """True if cached keys take the positions of their slots while decoding, not their positions in the text."""
        return False

    def initial_state(self, cache: LayerCache, obs: Observation) -> Mapping[str, torch.Tensor]:
        """Return {name: running state [heads, n, ...]} of the prompt's tokens, such as the attention received so far.

        It is stored with the tokens, and decoding starts from it. Methods that only compress the prompt return {}.
        """
        return {}


@dataclass(frozen=True, kw_only=True)
class Selector(TokenSelector):
    """A stage that keeps a budget of tokens, chosen by a score. All such stages have these options:

    kv_size: tokens kept per stored head, window and sinks included. It must be larger than sinks and window together.
    kv_ratio: share of the prompt's n tokens that is kept, floor(kv_ratio * n) tokens. The default is 0.25, if kv_size
    is not given.
    kv_round: True rounds kv_ratio * n to the nearest whole number (halves to even) instead of down.
    decode_budget: tokens to which each stored head is cut while decoding. The selector then chooses again among all
    cached tokens, old and new. Without this option only the prompt is compressed, unless the selector evicts by itself.
    decode_ratio: the same budget as a share of all tokens so far, prompt and answer: ceil(decode_ratio * tokens), at
    least 2.
    decode_every: new tokens between two cuts (default 128).

    ``rounds_up`` is not an option. True rounds kv_ratio * n up, and ``while_decoding`` sets it for ``decode_ratio``.
    """

    kv_size: int | None = None
    kv_ratio: float | None = knob(None, KEPT_SHARE)
    kv_round: bool | None = None
    decode_budget: int | None = knob(None, at_least(1, "tokens", null=True))
    decode_ratio: float | None = knob(None, DECODE_SHARE)
    decode_every: int | None = knob(None, at_least(1, "tokens", null=True))
    rounds_up: bool = field(default=False, repr=False, metadata={"knob": False})

    def check(self) -> None:
        super().check()
        if self.kv_size is not None and self.kv_ratio is not None:
            raise UsageError(
                f"method.{self.id}: kv_size={self.kv_size} and kv_ratio={self.kv_ratio} are two ways to say one "
                "budget: give one of them"
            )
        if self.kv_size is None and self.kv_ratio is None:
            # a frozen dataclass can fill in its own fields only in this way
            object.__setattr__(self, "kv_ratio", DEFAULT_RATIO)
        self._require_room("kv_size", self.kv_size)
        if self.decode_budget is not None and self.decode_ratio is not None:
            raise UsageError(
                f"method.{self.id}: decode_budget={self.decode_budget} and decode_ratio={self.decode_ratio} are two "
                "ways to say one budget while decoding: give one of them"
            )
        self._require_room("decode_budget", self.decode_budget)
        if self.chooses_again:
            # the knob's rule allows no 0, so only null is replaced
            object.__setattr__(self, "decode_every", self.decode_every or DECODE_EVERY)
        # an interval alone would choose nothing, because it has no budget
        allowed = self.decode_every is None or self.chooses_again
        self.require("decode_every", allowed, "given together with decode_budget or decode_ratio")

    def _require_room(self, knob: str, budget: int | None) -> None:
        """Raise UsageError if a ``budget`` in tokens leaves none to choose beside those that always stay.

        knob: the knob that has this budget, for the error.
        budget: None if the knob is not set.
        """
        sinks, window = self.protected()
        above_protected = f"a whole number of tokens above {sinks + window} (sinks {sinks} + window {window})"
        self.require(knob, budget is None or budget > sinks + window, above_protected)

    @property
    def chooses_again(self) -> bool:
        """True if a budget while decoding is set, by ``decode_budget`` or ``decode_ratio``."""
        return self.decode_budget is not None or self.decode_ratio is not None

    def while_decoding(self) -> Selector:
        """Return the copy of this selector that chooses again while decoding, under the budget while decoding."""
        # in the copy that budget stands as kv_size or kv_ratio, so that it chooses like any selector of a prompt;
        # ``DecodeBudget`` runs it every ``decode_every`` tokens. A decode_ratio is always rounded up, so kv_round, the
        # rounding of kv_ratio, does not apply
        return replace(
            self,
            kv_size=self.decode_budget,
            kv_ratio=self.decode_ratio,
            kv_round=None,
            rounds_up=self.decode_ratio is not None,
            decode_budget=None,
            decode_ratio=None,
            decode_every=None,
        )

    def require_one_budget(self, knob: str) -> None:
        """Raise UsageError if kv_size or kv_ratio is set beside ``knob``, which is itself a budget.

        If neither is set, clear the default that ``check`` has filled in, so that ``knob`` is the only budget.
        """
        # if the user gave neither knob, ``check`` has filled in the default ratio, which looks as if the user gave it
        is_alone = self.kv_size is None and self.kv_ratio in (None, DEFAULT_RATIO)
        self.require(knob, is_alone, "a budget of its own: not given together with kv_size or kv_ratio")
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
        """Return the budget C of a head for a prompt of n tokens: kv_size, or floor(kv_ratio * n), at most n.

        A fraction gives at least 2 tokens. Where it has no room for sinks and window and one token more, each of the
        two shrinks to at most half of C.
        """
        sinks, window = self.protected()
        if self.kv_size is not None:
            # ``check`` has refused a kv_size without room for sinks, window and one token more
            return Capacity(min(self.kv_size, n), sinks, window)
        # at least 2 tokens: one to choose and one that always stays
        tokens = max(2, self._round_share(n))
        has_room = tokens > sinks + window
        if tokens >= n or has_room:
            return Capacity(min(tokens, n), sinks, window)
        # sinks and window share the whole budget, and each gets at most half of it
        half = tokens // 2
        return Capacity(tokens, sinks=min(sinks, half), window=min(window, half), shrunk=True)

    def _round_share(self, n: int) -> int:
        """Return kv_ratio * n as a whole number of tokens, rounded as kv_round and rounds_up say."""
        # kv_ratio is None only in a subclass that has a budget of its own (``require_one_budget``) and does not use
        # this number
        unrounded = (self.kv_ratio or DEFAULT_RATIO) * n
        if self.kv_round:
            return round(unrounded)
        if self.rounds_up:
            # 1e-9: 0.1 * 30 is 3.0000000000000004, and ceil must not raise a product that is meant to be whole
            return math.ceil(unrounded - 1e-9)
        # 1e-9: 0.29 * 100 is 28.999..., and floor must not cut a product that is meant to be whole
        return int(unrounded + 1e-9)

    def nominal(self, n: int) -> int | None:
        return self.capacity(n).tokens

    def budget(self, n: int, layer: int, n_layers: int) -> int:
        """Return how many of n prompt tokens each head of this layer keeps: the capacity, or n in a frozen layer.

        Subclasses whose budget depends on a layer's depth also use ``n_layers``.
        """
        if layer in self.frozen_layers:
            return n
        return self.capacity(n).tokens

    def expected(self, n: int, layer: int, n_layers: int, heads: int) -> Expected | None:
        return Expected.exactly(self.budget(n, layer, n_layers), heads)

    def scores(self, cache: LayerCache, obs: Observation, capacity: Capacity) -> torch.Tensor:
        """Return the score of each prompt token, [heads, n] or [1, n] if ``shared``. The largest are kept.

        cache: the layer, with keys and values [Hk, n, D] in its only segment and ``cache.heads`` heads to store.
        obs: the parts of the layer that ``needs`` asks for, such as its last queries.
        capacity: the budget. Its first ``sinks`` and last ``window`` tokens stay whatever their scores.
        """
        raise TypeError(f"{type(self).__name__} does not say how it scores tokens")

    def compress(self, cache: LayerCache, obs: Observation) -> LayerCache:
        return self.choose(cache, obs, ())

    def choose(self, cache: LayerCache, obs: Observation, modifiers: Sequence[Modifier]) -> LayerCache:
        """Return the cache with the tokens that score highest, after ``modifiers`` have changed the scores.

        Raises Refused unless scores are real numbers [heads, n] or [1, n], without NaN and not all infinite for a head.
        """
        state = dict(self.initial_state(cache, obs))
        # modifiers need a state only where scores are computed again while decoding
        if self.evicts:
            for modifier in modifiers:
                state.update(modifier.initial_state(cache))
        # the state is stored with the tokens even if all of them stay, because decoding continues from it
        if state:
            cache = ops.with_state(cache, **state)
        # the budget refers to the whole prompt of n tokens, although this layer may have read only obs.n of them
        n = obs.prompt_tokens
        budget = self.budget(n, obs.layer, obs.n_layers)
        if budget >= obs.n:
            return cache
        capacity = with_sinks(self.capacity(n), count_sinks(modifiers), n)
        scores = self._compute_scores(cache, obs, capacity, modifiers)
        # +inf makes the protected tokens the best of every head
        scores[:, : capacity.sinks] = torch.inf
        scores[:, obs.n - capacity.window :] = torch.inf
        return self.pick(cache, scores, budget)

    def _compute_scores(
        self, cache: LayerCache, obs: Observation, capacity: Capacity, modifiers: Sequence[Modifier]
    ) -> torch.Tensor:
        """Return the scores [heads, n] or [1, n] in fp32 after ``modifiers``, as a tensor that the caller may change.

        Raises Refused for scores that ``_check_scores`` or ``_check_order`` refuses.
        """
        selector_scores = self.scores(cache, obs, capacity)
        _check_scores(self.id, selector_scores, cache, obs)
        # authors may build scores on the CPU, but the choice is made where the keys are; the copy is needed because all
        # budgets may share the selector's scores
        scores = selector_scores.to(cache.segments[0].k.device, torch.float32, copy=True)
        for modifier in modifiers:
            scores = modifier.modify(scores, cache, obs)
        _check_order(scores, self, modifiers, obs.layer)
        return scores

    def pick(self, cache: LayerCache, scores: torch.Tensor, budget: int) -> LayerCache:
        """Return the cache with every head's ``budget`` best tokens by scores [heads, n]. Those at +inf always stay."""
        return ops.select(cache, top_indices(scores, budget))


@dataclass(frozen=True, kw_only=True)
class Modifier(Stage):
    """A stage that changes a selector's scores before they decide which tokens stay. It chooses nothing itself.

    decorates: the ids of the selectors whose scores it understands.

    ``modify`` changes the scores of the prompt's tokens. ``reweigh`` changes the scores of cached tokens, if the
    selector evicts while decoding. A modifier may store a state of each token for ``reweigh``: ``initial_state``
    computes it for the prompt's tokens, ``new_token_state`` for later ones. It takes ``slot_bytes`` in each slot.
    """

    role: ClassVar[Role] = "modifier"
    decorates: ClassVar[tuple[str, ...]] = ()

    def sink_size(self) -> int:
        """Return how many first tokens the modifier always keeps. They count against the selector's budget."""
        return 0

    def modify(self, scores: torch.Tensor, cache: LayerCache, obs: Observation) -> torch.Tensor:
        """Return the scores [heads, n] of the prompt's tokens as changed from the selector's ``scores``."""
        return scores

    def slot_bytes(self, itemsize: int) -> int:
        """Return the bytes that the modifier's state takes in each slot. ``itemsize``: the bytes of an exact number."""
        return 0

    def initial_state(self, cache: LayerCache) -> Mapping[str, torch.Tensor]:
        """Return {name: state [heads, n]} of the prompt's tokens. ``reweigh`` reads it while decoding."""
        return {}

    def reweigh(self, scores: torch.Tensor, slots: Slots) -> torch.Tensor:
        """Return the scores [B, H, S] of slots while decoding, as changed from the selector's ``scores``.

        +inf marks tokens that always stay, and must remain +inf.
        """
        return scores

    def new_token_state(self, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return {name: state [B, H, T]} of new tokens with exact values [B, H, T, D]."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Mask(Stage, Masker):
    """A stage that keeps all tokens in the cache, and decides at each decode step which of them the new token attends.

    A mask can save time, but no bytes.
    """

    role: ClassVar[Role] = "mask"

    def masks(self, layer: int) -> bool:
        """Return True if the stage masks this layer. In other layers every token is attended."""
        return True


def count_sinks(modifiers: Sequence[Modifier]) -> int:
    """Return how many first tokens always stay because of ``modifiers``: the largest ``sink_size`` of any."""
    return max((modifier.sink_size() for modifier in modifiers), default=0)


def _check_scores(method: str, scores: object, cache: LayerCache, obs: Observation) -> None:
    """Raise Refused unless a method's scores are a tensor of real numbers [H, n], or [1, n] for all heads alike.

    Whole numbers must be small enough for fp32 to tell them apart. ``method`` is the method's id, for the error.
    """
    if not isinstance(scores, torch.Tensor):
        raise Refused(
            f"scores() of {method} returns {type(scores).__name__} in layer {obs.layer}, not a tensor "
            f"[{cache.heads}, {obs.n}]: a score for each stored head and token"
        )
    if scores.is_complex():
        raise Refused(
            f"scores() of {method} returns complex numbers in layer {obs.layer}, which have no order: return real "
            "ones, as scores.abs()"
        )
    # scores are compared as float32; an empty tensor has no smallest score, and its shape is refused below
    is_whole = not scores.is_floating_point() and scores.numel() > 0
    if is_whole and (int(scores.min()) < -EXACT_WHOLE or int(scores.max()) > EXACT_WHOLE):
        raise Refused(
            f"scores() of {method} returns whole numbers above {EXACT_WHOLE} in layer {obs.layer}, which float32 does "
            "not tell apart: scale them"
        )
    if scores.ndim != 2 or scores.shape[0] not in (1, cache.heads) or scores.shape[1] != obs.n:
        raise Refused(
            f"scores() of {method} returns {list(scores.shape)} in layer {obs.layer}, not [{cache.heads}, {obs.n}]: "
            "a score for each stored head and token"
        )


def _check_order(scores: torch.Tensor, selector: Selector, modifiers: Sequence[Modifier], layer: int) -> None:
    """Raise Refused for scores [heads, n] that give tokens no order: NaN, or all infinite for one head."""
    # a modifier may have spoiled the selector's scores, so the error names both
    names = "+".join([selector.id] + [modifier.id for modifier in modifiers])
    if bool(scores.isnan().any()):
        raise Refused(f"scores of {names} hold NaN in layer {layer}: its formula divides by 0 or takes inf from inf")
    lowest, highest = scores.aminmax(dim=-1)
    # a head whose scores are all +inf, or all -inf, chooses nothing
    if bool((highest.isinf() & (lowest == highest)).any()):
        raise Refused(
            f"scores of {names} are all infinite for a head in layer {layer} and choose no token: its formula "
            "overflows float32 or divides by 0"
        )

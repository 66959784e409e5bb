"""Selectors that also evict while decoding. They hold their budget for the whole generation.

A head has a fixed number of slots. When a new token comes, the token in the slot of the lowest ``keep_scores`` goes.

Shapes: B rows of a decode batch, H stored heads, S slots, Hq query heads, T new tokens, D head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kvbench.kv.segment import LayerCache
from kvbench.methods.core.base import Modifier, Selector, count_sinks
from kvbench.methods.core.contract import Block, with_sinks
from kvbench.storage.roles import Evictor, Packer, Slots

POSITIONS = (None, "true", "rolled")
"""The values of the knob ``positions``."""
NO_LIMIT = 2**31 - 1
"""The budget, in tokens, of a layer that keeps everything."""


@dataclass(frozen=True, kw_only=True)
class EvictingSelector(Selector, Evictor):
    """A selector that can evict while decoding as well. ``evicts`` says whether it does as its knobs are set.

    Subclasses implement ``keep_scores``, which scores the cached tokens before a new one comes. A subclass with a
    running state also implements ``initial_state``, ``state_bytes`` and ``fold``. All such selectors have this knob:

    positions: ``true`` and null leave cached keys at their own positions. ``rolled``, for unbounded streams, gives keys
    the positions of their slots, and the query the position of the last slot. It needs rotary positions.
    """

    positions: str | None = None

    def check(self) -> None:
        # YAML reads true as a boolean
        positions = str(self.positions).lower() if self.positions is not None else None
        self.require("positions", positions in POSITIONS, "true or rolled")
        # null and true mean the same, so both become the class's default and have one identity
        if positions != "rolled":
            positions = type(self).positions
        # a frozen dataclass can set its own fields only by object.__setattr__
        object.__setattr__(self, "positions", positions)
        super().check()
        rolls_only_evicted = self.evicts or not self.rolled
        self.require(
            "positions",
            rolls_only_evicted,
            f"rolled positions are those of a cache that evicts while decoding, and {self.id} set so evicts only after "
            "the prompt",
        )

    @property
    def evicts(self) -> bool:
        return True

    @property
    def rolled(self) -> bool:
        return self.positions == "rolled"

    @property
    def state_bytes(self) -> int:
        """The bytes that the running state takes in each slot."""
        return 0

    def layout(self, blocks: list[Block], head_dim: int, itemsize: int) -> list[Block]:
        # every slot also stores its running state
        return [replace(b, slot_overhead=self.state_bytes) for b in blocks]

    def generation_budget(self, n: int) -> int:
        """Return the budget of the whole generation, in tokens per head, after a prompt of n tokens.

        It is ``kv_size`` even if the prompt is shorter, because the answer fills the budget. ``kv_ratio`` is a fraction
        of n.
        """
        if self.kv_size is not None:
            return self.kv_size
        # ``super`` gives the budget that the user set; a subclass's own ``capacity`` divides it into parts
        return super().capacity(n).tokens

    def decode_limit(self, n: int, layer: int) -> int:
        """Return how many tokens a head of this layer may hold while decoding after a prompt of n tokens."""
        if layer in self.frozen_layers:
            return NO_LIMIT
        return self.count_competing(n) + self.spare

    def count_competing(self, n: int) -> int:
        """Return how many tokens per head compete to stay while decoding after a prompt of n tokens.

        These are the tokens of the budget, without the ``spare`` one.
        """
        # after a prompt shorter than kv_size, the answer fills the budget
        if self.kv_size is not None:
            return self.kv_size
        return self.capacity(n).tokens

    @property
    def spare(self) -> int:
        """The number of tokens stored beside the budget while decoding: 1 if the newest competes one step late, else 0.

        Subclasses with a knob for this override the property.
        """
        return 0

    def max_chunk(self, n: int, n_layers: int) -> int:
        """Return how many new tokens every head of every layer can take in one step after a prompt of n tokens."""
        return min(self.decode_limit(n, layer) for layer in range(n_layers))

    def layer_budget(self, cache: LayerCache, layer: int) -> int:
        """Return the most tokens that a head may hold in this layer while decoding, given the layer's cache."""
        return self.decode_limit(cache.prompt_tokens, layer)

    def head_budgets(self, cache: LayerCache, layer: int) -> Sequence[int]:
        return [self.layer_budget(cache, layer)] * cache.heads


@dataclass(frozen=True)
class Modified(Evictor):
    """A selector that evicts while decoding, together with the stages around it.

    modifiers: the stages that change its scores, in order.
    packer: packs every token, or None if tokens stay exact.
    """

    selector: EvictingSelector
    modifiers: tuple[Modifier, ...]
    # without a default here, the dataclass would take the property of ``Evictor`` as the default
    packer: Packer | None = None

    @property
    def rolled(self) -> bool:
        return self.selector.rolled

    def head_budgets(self, cache: LayerCache, layer: int) -> Sequence[int]:
        return self.selector.head_budgets(cache, layer)

    def token_counts(self, n: int) -> Mapping[str, int]:
        # the selector's own sinks and those of its modifiers are the same first tokens, so the larger number counts
        capacity = with_sinks(self.selector.capacity(n), count_sinks(self.modifiers), n)
        counts = dict(self.selector.token_counts(n))
        counts["sinks"] = capacity.sinks
        return counts

    def unattended_distance(self, n: int) -> int | None:
        return self.selector.unattended_distance(n)

    @property
    def estimates(self) -> bool:
        return self.selector.estimates

    def estimate(self, keys: torch.Tensor) -> torch.Tensor:
        return self.selector.estimate(keys)

    def new_token_state(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        state = dict(self.selector.new_token_state(k, v))
        for modifier in self.modifiers:
            state.update(modifier.new_token_state(v))
        return state

    def keep_scores(self, slots: Slots) -> torch.Tensor:
        scores = self.selector.keep_scores(slots)
        for modifier in self.modifiers:
            scores = modifier.reweigh(scores, slots)
        # the modifiers' sinks stay, like the selector's own protected tokens
        return scores.masked_fill(slots.positions < slots.counts["sinks"], torch.inf)

    def fold(self, slots: Slots, probs: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return self.selector.fold(slots, probs)

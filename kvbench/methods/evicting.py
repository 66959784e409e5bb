"""Selectors that also evict while decoding: they hold their budget for the whole generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvbench.cache.segment import LayerCache
from kvbench.methods.base import Modifier, Selector, sinks_of
from kvbench.methods.contract import protect
from kvbench.storage.roles import Packer, Slots

POSITIONS = (None, "true", "rolled")
SPARE_KNOBS = ("evict_after", "code_mask")


@dataclass(frozen=True, kw_only=True)
class EvictingSelector(Selector):
    """A selector whose ``evicts`` may be True; it implements ``keep_scores`` and, with a running state, ``carry`` and
    ``fold``. The knob common to all of them:

    positions: ``true`` leaves cached keys at their own positions, and so does null; ``rolled`` gives them those of
    their slots and the query that of the last (for unbounded streams; needs rotary positions).
    """

    positions: str | None = None

    def check(self) -> None:
        written = None if self.positions is None else str(self.positions).lower()
        self.require("positions", written in POSITIONS, "true or rolled")
        # what is not set and what is set to the default are one method, under one identity
        object.__setattr__(self, "positions", written if written == "rolled" else type(self).positions)
        super().check()
        self.require(
            "positions",
            self.evicts or not self.rolled,
            f"rolled positions are those of a cache that evicts while decoding, and {self.id} set so evicts only after "
            "the prompt",
        )

    @property
    def evicts(self) -> bool:
        return True

    @property
    def rolled(self) -> bool:
        return self.positions == "rolled"

    def decode_budget(self, n: int, layer: int) -> int:
        """Tokens held per head while decoding after a prompt of n tokens."""
        return 2**31 - 1 if layer in self.frozen_layers else self.competing(n) + self.spare

    def competing(self, n: int) -> int:
        """Tokens per head that compete while decoding after a prompt of n tokens."""
        return self.kv_size if self.kv_size is not None else self.capacity(n).tokens

    @property
    def spare(self) -> int:
        """Tokens stored beside the budget while decoding: 1 under a knob by which the newest competes one step late."""
        return int(any(getattr(self, knob, None) for knob in SPARE_KNOBS))

    def at_once(self, n: int) -> int:
        """Tokens that every head can take in one step after a prompt of n tokens."""
        return self.decode_budget(n, 0)

    def hold(self, cache: LayerCache, layer: int) -> int:
        """Tokens that go on being held per head of this layer, at most."""
        return self.decode_budget(cache.prompt_tokens, layer)

    def shares(self, cache: LayerCache, layer: int) -> Sequence[int]:
        """Tokens that each stored head goes on holding; 0 for a head that is not stored and copies another's output."""
        return [self.hold(cache, layer)] * cache.heads

    def row(self, n: int) -> Mapping[str, int]:
        """Numbers that decoding needs and that depend on the prompt's length, for ``Slots.row``."""
        return {}

    def keep_scores(self, slots: Slots) -> torch.Tensor:
        """How much each slot matters while decoding [B, H, S]; the lowest go, +inf stays."""
        raise TypeError(f"{type(self).__name__} does not say what it evicts while decoding")

    @property
    def packer(self) -> Packer | None:
        """What packs every token while decoding; None: nothing does."""
        return None

    def enter(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The state that new tokens with exact k, v [B, H, T, D] start from, where that is not 0."""
        return {}

    @property
    def estimates(self) -> bool:
        """Whether ``fold`` reads the attention of what ``estimate`` makes of the keys."""
        return False

    def estimate(self, keys: torch.Tensor) -> torch.Tensor:
        """Stand-ins in fp32 for keys [..., D]."""
        return keys

    def fold(self, slots: Slots, probs: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The part of the running state that attention probs [B, Hq, T, S] changes; none by default."""
        return {}


@dataclass(frozen=True)
class Modified:
    """A selector that evicts while decoding, under its modifiers, its tokens packed by ``packer`` if there is one."""

    selector: EvictingSelector
    modifiers: tuple[Modifier, ...]
    packer: Packer | None = None

    @property
    def rolled(self) -> bool:
        return self.selector.rolled

    def shares(self, cache: LayerCache, layer: int) -> Sequence[int]:
        return self.selector.shares(cache, layer)

    def row(self, n: int) -> Mapping[str, int]:
        return {**self.selector.row(n), "sinks": protect(self.selector.capacity(n), sinks_of(self.modifiers), n).sinks}

    @property
    def estimates(self) -> bool:
        return self.selector.estimates

    def estimate(self, keys: torch.Tensor) -> torch.Tensor:
        return self.selector.estimate(keys)

    def enter(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        state = dict(self.selector.enter(k, v))
        for modifier in self.modifiers:
            state.update(modifier.enter(v))
        return state

    def keep_scores(self, slots: Slots) -> torch.Tensor:
        scores = self.selector.keep_scores(slots)
        for modifier in self.modifiers:
            scores = modifier.reweigh(scores, slots)
        return scores.masked_fill(slots.positions < slots.row["sinks"], torch.inf)

    def fold(self, slots: Slots, probs: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return self.selector.fold(slots, probs)

"""Chains: stages in canonical order, what they promise together, and budgets divided over all layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch

from kvbench.cache import ops
from kvbench.cache.observation import Needs, Observation
from kvbench.cache.segment import LayerCache
from kvbench.errors import UsageError
from kvbench.methods.base import (
    Block,
    Capacity,
    Expected,
    Mask,
    Modifier,
    Role,
    Selector,
    Stage,
    TokenSelector,
    protect,
    sinks_of,
)
from kvbench.methods.evicting import EvictingSelector, Modified
from kvbench.methods.foreign import is_foreign
from kvbench.methods.legal_sets import check_set
from kvbench.methods.lowrank import LowRankStage, check_lowrank
from kvbench.methods.prefill_changing import HeadSharer, HiddenPruner
from kvbench.methods.pruner import ChannelPruner
from kvbench.methods.quantiser import Coder, Quantiser
from kvbench.models.traits import ModelTraits
from kvbench.storage.roles import Evictor

ROLES: tuple[Role, ...] = ("hidden", "lowrank", "selector", "modifier", "prune", "quantise", "mask", "share")
PER = ("kv_head", "query_head")
_GROWING: Mapping[Role, str] = {
    "quantise": "packs tokens together, of which some leave before the others",
    "mask": "masks caches that only grow",
}


@dataclass(frozen=True)
class Chain:
    """A method: stages in canonical order and the heads under which their result is stored.

    ``per='kv_head'`` stores Hk heads (a group's query heads decide together); ``'query_head'`` repeats keys and
    values to Hq heads first and lets each decide alone, as much published code does, at Hq / Hk times the bytes.
    """

    stages: tuple[Stage, ...] = ()
    per: Literal["kv_head", "query_head"] = "kv_head"

    def __post_init__(self) -> None:
        if self.per not in PER:
            raise UsageError(f"per={self.per!r} is not possible: one of {', '.join(PER)}")
        check_set(self.stages)
        ordered = tuple(sorted(self.stages, key=lambda s: ROLES.index(s.role)))
        object.__setattr__(self, "stages", ordered)
        self._check_sinks()
        check_lowrank(ordered, self.evicts)
        if self.evicts:
            self._check_evicting()
        self._check_halves()

    def _check_evicting(self) -> None:
        """Refuse what cannot stand beside a selector that evicts while decoding."""
        selector = self.selector
        assert selector is not None
        for s in self.stages:
            why = _GROWING.get(s.role)
            if why and not (isinstance(s, Quantiser) and s.by_token):
                raise UsageError(
                    f"method={self.name!r}: {selector.id} evicts tokens while decoding as set here, and {s.id} {why}; "
                    "use a variant that evicts only after the prompt"
                )
            stored = {"quantise": "packed", "prune": "without some of the channels that turn together"}.get(s.role)
            if stored and selector.rolled:
                rolled = "mode=rolled" if getattr(selector, "mode", "") == "rolled" else "positions=rolled"
                raise UsageError(
                    f"method={self.name!r}: method.{selector.id}.{rolled} turns stored keys to new positions "
                    f"at every step, and {s.id} stores them {stored}: leave out {rolled}"
                )
        pruner, quantiser = self.packed_pruner, self.quantiser
        if pruner and quantiser:
            raise UsageError(
                f"method={self.name!r}: {selector.id} evicts tokens while decoding as set here; {pruner.id} then "
                f"leaves new tokens whole, and {quantiser.id} would have to pack them at another width: "
                f"leave out {pruner.id} or {quantiser.id}, or use a variant that evicts only after the prompt"
            )

    def _check_halves(self) -> None:
        """Refuse what goes with a quantiser only where it packs keys and values alike."""
        if self.quantiser is None or self.quantiser.only is None:
            return
        pruner, named = self.packed_pruner, f"method.{self.quantiser.id}.only={self.quantiser.only}"
        if pruner is not None:
            raise UsageError(
                f"method={self.name!r}: {pruner.id} drops channels of what {self.quantiser.id} packs, and {named} "
                "leaves half of the cache exact: leave out one of the two"
            )
        if self.evicts and self.selector is not None:
            raise UsageError(
                f"method={self.name!r}: {self.selector.id} evicts tokens while decoding as set here, from a cache of "
                f"one format: leave out {named}"
            )

    def _check_sinks(self) -> None:
        """Refuse sinks of a modifier that leave a selector of fixed size nothing to choose."""
        selector = self.selector
        if not isinstance(selector, Selector) or selector.kv_size is None:
            return
        asked = selector.capacity(2**31)
        room = asked.tokens - asked.window
        for m in self.modifiers:
            m.require(
                "sinks",
                m.sink_size() < max(room, 1),
                f"fewer than the {room} tokens that {selector.id} keeps beside its window at kv_size={asked.tokens}",
            )

    @property
    def name(self) -> str:
        return "+".join(s.id for s in self.stages) or "full"

    @property
    def prefill_key(self) -> str:
        """Chains with equal keys compute the prompt alike and can share its prefill. Where code that is not kvbench's
        own has a part in it, only equal chains do, whatever it says."""
        key = "+".join(s.prefill_key for s in self.stages if s.prefill_key)
        reads = any(type(s).read is not Stage.read for s in self.stages)
        if self.foreign and (key or reads or self.adaptation or self.hidden or self.sharer):
            return f"{key} {self.identity()}"
        return key

    @cached_property
    def foreign(self) -> bool:
        """Whether a stage is not kvbench's own."""
        return is_foreign(self.stages)

    @property
    def adaptation(self) -> tuple[Stage, ...]:
        """The stages that change the model."""
        return tuple(s for s in self.stages if s.adapts)

    @property
    def batch(self) -> object:
        """Chains in which it is equal decode in one batch: those that change the model alike. Code that is not
        kvbench's own decodes alone."""
        return self if self.foreign else self.adaptation

    @property
    def lowrank(self) -> LowRankStage | None:
        return next((s for s in self.stages if isinstance(s, LowRankStage)), None)

    @property
    def hidden(self) -> HiddenPruner | None:
        """What drops hidden states while the prompt is read."""
        return next((s for s in self.stages if isinstance(s, HiddenPruner)), None)

    def rows(self, n: int, layer: int, n_layers: int) -> int:
        """Tokens of a prompt of n that the layer reads."""
        return self.hidden.sizes(n, n_layers)[layer] if self.hidden else n

    @property
    def sharer(self) -> HeadSharer | None:
        """What lets query heads share logits."""
        return next((s for s in self.stages if isinstance(s, HeadSharer)), None)

    def leading(self, n: int, layer: int, n_layers: int, query_heads: int, kv_heads: int) -> int:
        """Query heads whose logits are computed in a layer."""
        return self.sharer.leading(n, layer, n_layers, query_heads, kv_heads) if self.sharer else query_heads

    @property
    def evicts(self) -> bool:
        """Whether the chain evicts tokens while decoding."""
        return self.selector is not None and self.selector.evicts

    @property
    def selector(self) -> TokenSelector | None:
        return next((s for s in self.stages if isinstance(s, TokenSelector)), None)

    @property
    def modifiers(self) -> tuple[Modifier, ...]:
        return tuple(s for s in self.stages if isinstance(s, Modifier))

    @property
    def quantiser(self) -> Quantiser | None:
        return next((s for s in self.stages if isinstance(s, Quantiser)), None)

    @property
    def packed_pruner(self) -> ChannelPruner | None:
        """The stage whose channels the chain's quantiser packs: it only says which they are."""
        return next((s for s in self.stages if isinstance(s, ChannelPruner)), None) if self.quantiser else None

    @property
    def coder(self) -> Coder | None:
        """What packs tokens while decoding; None for a chain that stores them exactly."""
        return self.quantiser.coder(self.packed_pruner) if self.quantiser else None

    @property
    def evictor(self) -> Evictor | None:
        """What decides over slots while decoding; None for a chain whose cache grows."""
        selector = self.selector
        if not isinstance(selector, EvictingSelector) or not selector.evicts:
            return None
        packer = self.coder or selector.packer
        return Modified(selector, self.modifiers, packer) if self.modifiers or self.coder else selector

    @property
    def masks(self) -> bool:
        """Whether decode steps attend only a part of what is held."""
        return any(s.role == "mask" for s in self.stages)

    def masker(self, layer: int) -> Mask | None:
        """What masks this layer while decoding."""
        return next((s for s in self.stages if isinstance(s, Mask) and s.masks(layer)), None)

    def capacity(self, n: int) -> Capacity | None:
        """What the selector keeps of a prompt of n tokens, the modifiers' sinks included; None without a selector."""
        return protect(self.selector.capacity(n), sinks_of(self.modifiers), n) if self.selector else None

    def heads(self, kv_heads: int, query_heads: int) -> int:
        """Heads stored in each layer. The full cache is the model's own: always kv heads. Latents are one for all."""
        if self.lowrank:
            return 1
        expands = any(s.role != "mask" for s in self.stages)  # each query head masks for itself anyway
        return query_heads if self.per == "query_head" and expands else kv_heads

    def read(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the prompt's own attention reads in place of keys and values [Hk, n, D]."""
        for stage in self.stages:
            k, v = stage.read(k, v)
        return k, v

    def needs(self, n: int) -> Needs:
        merged = Needs()
        for stage in self.stages:
            merged = merged | stage.needs(n)
        return merged

    def nominal(self, n: int) -> int | None:
        """The budget asked for, in tokens of a prompt of n: all n where nothing chooses, None where the data do."""
        if self.selector is None:
            return None if self.masks or self.hidden else n
        return self.selector.nominal(n)

    def check_model(self, model: ModelTraits) -> None:
        """Raise UsageError if a stage cannot run on a model, or names layers that it does not have."""
        selector, evictor, n_layers = self.selector, self.evictor, model.shape.layers
        if selector is not None:
            selector.check_layers(n_layers)
        for mask in self.stages:
            if isinstance(mask, Mask):
                mask.check_layers(n_layers)
        if evictor is not None and evictor.rolled and model.unrolled is not None:
            raise UsageError(f"method {self.name}: positions=rolled needs rotary positions, {model.unrolled}")
        for altered in (self.hidden, self.sharer):
            if altered is not None:
                altered.check_layers(n_layers)
        for stage in self.stages:
            stage.check_heads(self.heads(model.shape.kv_heads, model.shape.query_heads), model.shape.query_heads)
            reason = model.mixed if stage.role == "lowrank" else model.unrolled if stage.rotates else None
            if reason is not None:
                raise UsageError(f"method {stage.id} does not support the model family {model.family!r}: {reason}")

    def provenance(self) -> dict[str, Any]:
        """The content of what the chain's stages were calibrated with, for the record; {} without calibrations."""
        found = {s.id: s.calibration.sha256 for s in self.stages if s.calibration is not None}
        return {"calibration": found} if found else {}

    def expected(self, n: int, layer: int, n_layers: int, heads: int) -> Expected:
        """Tokens that each stored head of a layer must hold after prefill."""
        rows = self.rows(n, layer, n_layers)
        for stage in self.stages:
            declared = stage.expected(n, layer, n_layers, heads)
            if declared is not None:
                return declared if rows == n else declared.within(rows)
        return Expected.exactly(rows, heads)

    def layout(self, slots: int, head_dim: int, itemsize: int, layer: int = 0) -> list[Block]:
        """The segments of one stored head of a layer that holds ``slots`` tokens."""
        k, v = self.lowrank.widths(layer) if self.lowrank else (head_dim, head_dim)
        blocks = [Block(slots, slots * k * itemsize, slots * v * itemsize)]
        for stage in self.stages:
            if stage is self.packed_pruner:
                continue
            if isinstance(stage, Quantiser):
                blocks = stage.packed_layout(blocks, head_dim, itemsize, self.packed_pruner)
            else:
                blocks = stage.layout(blocks, head_dim, itemsize)
            if isinstance(stage, Modifier) and self.evicts:
                more = stage.slot_bytes(itemsize)
                blocks = [replace(b, slot_overhead=b.slot_overhead + more) for b in blocks]
        return blocks

    def expected_sum(self, n: int, n_layers: int, heads: int) -> int | None:
        """Tokens over all layers and heads after prefill, where a stage promises more than each layer's own count."""
        return next(
            (s for s in (stage.expected_sum(n, n_layers, heads) for stage in self.stages) if s is not None), None
        )

    @property
    def rebalancer(self) -> Stage | None:
        return next((s for s in self.stages if s.rebalances), None)

    def compress(self, cache: LayerCache, obs: Observation) -> LayerCache:
        """Run the stages over one layer, then store it under ``cache.heads`` heads.

        A stage that divides a budget over all layers takes this one for the whole model: see ``engine.layer_by_layer``.
        """
        for stage in self.stages:
            cache = self.run(stage, cache, obs)
            if stage.rebalances:
                (cache,) = stage.rebalance([cache], 1)
        return ops.expand(cache)

    def run(self, stage: Stage, cache: LayerCache, obs: Observation) -> LayerCache:
        """One stage over one layer: a selector under the chain's modifiers, a quantiser with the chain's pruner."""
        if isinstance(stage, Selector):
            modified = partial(stage.choose, cache, obs, self.modifiers)
            choose = modified if self.modifiers else partial(stage.compress, cache, obs)
            # chains that begin alike choose alike
            return obs.once((stage, self.modifiers, cache.heads), choose) if stage is self.stages[0] else choose()
        if stage is self.packed_pruner:
            return cache
        if isinstance(stage, Quantiser):
            return stage.encode(cache, obs, self.packed_pruner)
        return stage.compress(cache, obs)

    def identity(self) -> dict[str, Any]:
        """Everything that decides what the chain computes: its stages in order, and heads."""
        return {"stages": [s.identity() for s in self.stages], "per": self.per if self.stages else "kv_head"}

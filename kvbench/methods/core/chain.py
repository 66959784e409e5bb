"""A chain: the stages of one method in canonical order, with the promises that they make together.

``Chain.compress`` does the work on one layer of a prompt. The other members answer questions that arise before or after
it: which chains can share a prefill or a decode batch, which data the stages read, and how many tokens and bytes stay.

Shapes: Hk kv heads, Hq query heads, n prompt tokens, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

import torch

from kvbench.base.errors import UsageError
from kvbench.kv import ops
from kvbench.kv.model_shape import Shape
from kvbench.kv.observation import Needs, Observation
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.base import Mask, Modifier, Selector, TokenSelector, count_sinks
from kvbench.methods.core.contract import Block, Capacity, Expected, with_sinks
from kvbench.methods.core.decode_budget import DecodeBudget, explain_refusal
from kvbench.methods.core.evicting import EvictingSelector, Modified
from kvbench.methods.core.foreign import hash_source
from kvbench.methods.core.formats import StorageFormat
from kvbench.methods.core.legal_sets import AS_SET, check_set, refuse_conflicts
from kvbench.methods.core.lowrank import LowRankStage
from kvbench.methods.core.prefill_changing import BlockReader, HeadSharer, HiddenPruner
from kvbench.methods.core.pruner import ChannelPruner
from kvbench.methods.core.quantiser import Quantiser
from kvbench.methods.core.replaying import ReplayingSelector
from kvbench.methods.core.stage import Role, Stage
from kvbench.models.traits import ModelTraits
from kvbench.storage.roles import Coder, Evictor

ROLES: tuple[Role, ...] = ("hidden", "lowrank", "selector", "modifier", "prune", "quantise", "mask", "share")
"""The roles of stages in canonical order. A stage works on the result of the stages before it."""
PER = ("kv_head", "query_head")
"""The values of ``Chain.per``."""
LONGER_THAN_ANY_BUDGET = 2**31
"""The number of tokens of a prompt that is longer than any kv_size (``knobs.MOST``)."""


@dataclass(frozen=True)
class Chain:
    """A method: stages in canonical order, and the heads under which their result is stored.

    ``per='kv_head'`` stores Hk heads, and the query heads of a group decide together. ``per='query_head'`` first
    repeats keys and values to Hq heads, and each decides alone. Much published code does the latter, at Hq / Hk times
    the bytes.
    """

    stages: tuple[Stage, ...] = ()
    per: Literal["kv_head", "query_head"] = "kv_head"

    def __post_init__(self) -> None:
        """Bring the stages into canonical order. Raises UsageError, with the reason, if they cannot form a chain."""
        if self.per not in PER:
            raise UsageError(f"per={self.per!r} is not possible: one of {', '.join(PER)}")
        check_set(self.stages)
        # users may write stages in any order, but equal sets of stages are equal chains; a frozen dataclass can set its
        # own fields only by object.__setattr__
        ordered = tuple(sorted(self.stages, key=lambda s: ROLES.index(s.role)))
        object.__setattr__(self, "stages", ordered)
        selector = self.selector
        if isinstance(selector, Selector) and selector.chooses_again:
            reason = explain_refusal(selector)
            knob = "decode_ratio" if selector.decode_budget is None else "decode_budget"
            selector.require(knob, not reason, f"not for {selector.id} as set here, as {reason}")
        if isinstance(selector, Selector) and selector.kv_size is not None:
            _check_room_for_sinks(selector, self.modifiers)
        refuse_conflicts(AS_SET, self.stages)

    @property
    def name(self) -> str:
        """The ids of the stages, joined by +; ``full`` for the chain without stages."""
        return "+".join(s.id for s in self.stages) or "full"

    @property
    def is_full(self) -> bool:
        """True for the full cache, the chain without stages."""
        return not self.stages

    @property
    def prefill_key(self) -> str:
        """The key of the prompt's computation: chains with equal keys can share one prefill."""
        return "+".join(s.prefill_key for s in self.stages if s.prefill_key)

    @cached_property
    def foreign(self) -> bool:
        """True if a stage is not kvbench's own."""
        return any(hash_source(s) is not None for s in self.stages)

    @property
    def adaptation(self) -> tuple[Stage, ...]:
        """The stages that change the model."""
        return tuple(s for s in self.stages if s.adapts)

    @property
    def batch_key(self) -> object:
        """The key of the decode batch: chains with equal keys change the model alike and decode together."""
        return self.adaptation

    @property
    def lowrank(self) -> LowRankStage | None:
        """The stage that caches low-rank latents of keys and values, or None."""
        return next((s for s in self.stages if isinstance(s, LowRankStage)), None)

    @property
    def hidden(self) -> HiddenPruner | None:
        """The stage that drops hidden states while the prompt is read, or None."""
        return next((s for s in self.stages if isinstance(s, HiddenPruner)), None)

    def tokens_read(self, n: int, layer: int, n_layers: int) -> int:
        """Return how many tokens of a prompt of n the layer reads."""
        if self.hidden is None:
            return n
        return self.hidden.sizes(n, n_layers)[layer]

    @property
    def sharer(self) -> HeadSharer | None:
        """The stage under which query heads share logits, or None."""
        return next((s for s in self.stages if isinstance(s, HeadSharer)), None)

    @property
    def block_reader(self) -> BlockReader | None:
        """The stage that may have the prompt read in blocks, or None."""
        return next((s for s in self.stages if isinstance(s, BlockReader)), None)

    def leading_heads(self, n: int, layer: int, n_layers: int, query_heads: int, kv_heads: int) -> int:
        """Return how many query heads of a layer compute logits, for a prompt of n tokens: all unless heads share."""
        if self.sharer is None:
            return query_heads
        return self.sharer.leading_heads(n, layer, n_layers, query_heads=query_heads, kv_heads=kv_heads)

    @property
    def evicts(self) -> bool:
        """True if the chain evicts tokens while decoding."""
        return self.evictor is not None

    @property
    def rolled(self) -> bool:
        """True if new tokens take the positions of slots, so that an endless text stays within the context."""
        return self.selector is not None and self.selector.rolled

    @property
    def selector(self) -> TokenSelector | None:
        """The stage that chooses which tokens stay, or None."""
        return next((s for s in self.stages if isinstance(s, TokenSelector)), None)

    @property
    def modifiers(self) -> tuple[Modifier, ...]:
        """The stages that change the selector's scores, in order of application."""
        return tuple(s for s in self.stages if isinstance(s, Modifier))

    @property
    def quantiser(self) -> Quantiser | None:
        """The stage that packs tokens into few bits, or None."""
        return next((s for s in self.stages if isinstance(s, Quantiser)), None)

    @property
    def packed_pruner(self) -> ChannelPruner | None:
        """The pruner that only chooses which channels the chain's quantiser packs; None without a quantiser."""
        if self.quantiser is None:
            return None
        return next((s for s in self.stages if isinstance(s, ChannelPruner)), None)

    @property
    def coder(self) -> Coder | None:
        """The coder that packs tokens while decoding; None for a chain that stores them exactly."""
        if self.quantiser is None:
            return None
        return self.quantiser.coder(self.packed_pruner)

    def coder_at(self, layer: int) -> Coder | None:
        """Return the coder of one layer; None for a chain that stores tokens exactly.

        If the chain packs other layers only, this layer's coder keeps all tokens exact.
        """
        if self.quantiser is None:
            return None
        return self.quantiser.coder(self.packed_pruner, layer)

    @property
    def local_coder(self) -> Coder | None:
        """The coder of local layers; None if these stay exact."""
        if self.quantiser is None or not self.quantiser.codes_local:
            return None
        return self.quantiser.coder(pruner=None)

    def store_local(self, layer: LayerCache) -> LayerCache:
        """Return a local layer as the chain's format stores it: the layer itself, unless the format codes it."""
        coder = self.local_coder
        if self.quantiser is None or coder is None:
            return layer
        return self.quantiser.encode_by(layer, coder)

    def first_alike(self, layer: int) -> int:
        """Return the first layer whose tokens take as many bytes each as the tokens of ``layer``.

        Callers that add up bytes over layers compute them once for this first layer, and use them for all layers alike.
        """
        key = self._token_bytes_key(layer)
        return next(i for i in range(layer + 1) if self._token_bytes_key(i) == key)

    def _token_bytes_key(self, layer: int) -> tuple[object, ...]:
        """Return a key that is equal for layers whose tokens take equally many bytes each.

        It is (True if the layer's tokens are packed, widths of their latents or None).
        """
        packed = self.quantiser is not None and self.quantiser.packs_in(layer)
        latent_widths = self.lowrank.widths(layer) if self.lowrank is not None else None
        return packed, latent_widths

    @property
    def evictor(self) -> Evictor | None:
        """The evictor that decides over slots while decoding, or None for a chain whose cache grows."""
        selector = self.selector
        # a budget while decoding makes an evictor of any selector: it runs again every ``decode_every`` tokens, a knob
        # that ``Selector.check`` fills in beside such a budget
        if isinstance(selector, Selector) and selector.chooses_again and selector.decode_every is not None:
            return DecodeBudget(
                selector.while_decoding(), self.modifiers, every=selector.decode_every, packer=self.quantiser
            )
        if not isinstance(selector, EvictingSelector) or not selector.evicts:
            return None
        # without stages around it, the selector itself is the evictor
        if not self.modifiers and self.quantiser is None:
            return selector
        # some selectors pack their tokens themselves; beside those no quantiser may stand
        return Modified(selector, self.modifiers, self.quantiser or selector.packer)

    @property
    def replayer(self) -> ReplayingSelector | None:
        """The chain's selector if its scores need further passes over the prompt, else None."""
        selector = self.selector
        if isinstance(selector, ReplayingSelector):
            return selector
        return None

    @property
    def masks(self) -> bool:
        """True if decode steps attend only some of the cached tokens."""
        return any(s.role == "mask" for s in self.stages)

    def masker(self, layer: int) -> Mask | None:
        """Return the stage that masks this layer while decoding, or None."""
        return next((s for s in self.stages if isinstance(s, Mask) and s.masks(layer)), None)

    def capacity(self, n: int) -> Capacity | None:
        """Return the selector's budget for a prompt of n tokens, with the modifiers' sinks; None without a selector."""
        if self.selector is None:
            return None
        return with_sinks(self.selector.capacity(n), count_sinks(self.modifiers), n)

    def heads(self, kv_heads: int, query_heads: int) -> int:
        """Return how many heads each layer stores.

        The full cache has the kv heads. Latents are 1 head, because all heads share them. Otherwise ``per`` decides.
        """
        if self.lowrank:
            return 1
        # a mask alone needs no repeated keys, because each query head masks for itself anyway
        expands = any(s.role != "mask" for s in self.stages)
        if self.per == "query_head" and expands:
            return query_heads
        return kv_heads

    def read(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values [Hk, n, D] that the prompt's own attention reads instead of k and v.

        The stages change them one after the other. The cache still gets k and v.
        """
        for stage in self.stages:
            k, v = stage.read(k, v)
        return k, v

    def needs(self, n: int) -> Needs:
        """Return the union of the parts that the stages read of each layer, for a prompt of n tokens."""
        return Needs.union(stage.needs(n) for stage in self.stages)

    def nominal(self, n: int) -> int | None:
        """Return the budget that the user gave, in tokens of a prompt of n.

        It is n if no stage chooses tokens, and None if the data alone decide.
        """
        if self.selector is not None:
            return self.selector.nominal(n)
        # no budget states how many tokens a mask attends or a hidden pruner passes on
        if self.masks or self.hidden:
            return None
        return n

    def check_model(self, model: ModelTraits) -> None:
        """Raise UsageError if a stage cannot run on a model, or names layers that the model does not have."""
        for stage in self.stages:
            stage.check_layers(model.shape.layers)
        if self.quantiser is not None:
            self.quantiser.check_width(model.shape.head_dim)
            if self.quantiser.codes_local:
                _, local_head_dim = model.shape.local_heads
                self.quantiser.check_width(local_head_dim)
        # rolled keys are turned to new positions, and only rotary embeddings allow that
        evictor = self.evictor
        if evictor is not None and evictor.rolled and model.unrolled is not None:
            raise UsageError(f"method {self.name}: positions=rolled needs rotary positions, {model.unrolled}")
        # other shapes are checked stage by stage below, where the error names the model's family
        if model.shape.own_values:
            self.check_shape(model.shape)
        stored_heads = self.heads(model.shape.kv_heads, model.shape.query_heads)
        for stage in self.stages:
            stage.check_heads(stored_heads, model.shape.query_heads)
            reason = _explain_conflict(stage, model)
            if reason is not None:
                raise UsageError(f"method {stage.id} does not support the model family {model.family!r}: {reason}")

    def check_shape(self, shape: Shape) -> None:
        """Raise UsageError if the chain has no meaning on a model whose cache has this shape."""
        if shape.own_values and self.per == "query_head":
            raise UsageError(
                "per=query_head is not possible on a model that holds latents (latent attention): its query heads "
                "share one latent a token, which would be stored once for each of them. Leave per out"
            )
        for stage in self.stages:
            reason = _explain_shape_conflict(stage, shape)
            if reason is not None:
                raise UsageError(f"method {stage.id} is not possible on this model: {reason}")

    def provenance(self) -> dict[str, object]:
        """Return the hashes of the calibrations of the chain's stages, for the record; {} without calibrations."""
        hashes = {s.id: s.calibration.sha256 for s in self.stages if s.calibration is not None}
        if not hashes:
            return {}
        return {"calibration": hashes}

    def expected(self, n: int, layer: int, n_layers: int, heads: int) -> Expected:
        """Return how many tokens each of ``heads`` stored heads of a layer must hold after a prompt of n tokens."""
        tokens_read = self.tokens_read(n, layer, n_layers)
        for stage in self.stages:
            declared = stage.expected(n, layer, n_layers, heads)
            # only the stage that chooses tokens declares how many stay
            if declared is None:
                continue
            # budgets refer to the whole prompt, but a layer cannot hold more tokens than it has read
            if tokens_read != n:
                return declared.within(tokens_read)
            return declared
        return Expected.exactly(tokens_read, heads)

    def layout(self, slots: int, head_dim: int, itemsize: int, layer: int = 0, own_values: bool = False) -> list[Block]:
        """Return the bytes of a stored head of ``layer`` that holds ``slots`` tokens, as one Block for each segment.

        An exact number takes ``itemsize`` bytes. With ``own_values``, keys are their own values (``kv.own_values``).
        """
        key_width, value_width = head_dim, head_dim
        if own_values:
            value_width = 0
        if self.lowrank is not None:
            key_width, value_width = self.lowrank.widths(layer)
        # the bytes are tokens x channels x bytes of an element
        blocks = [Block(slots, key_bytes=slots * key_width * itemsize, value_bytes=slots * value_width * itemsize)]
        for stage in self.stages:
            if stage is self.packed_pruner:
                # the quantiser removes this pruner's channels while it packs
                continue
            if isinstance(stage, Quantiser):
                blocks = stage.packed_layout(
                    blocks, head_dim, itemsize, pruner=self.packed_pruner, layer=layer, own_values=own_values
                )
            else:
                blocks = stage.layout(blocks, head_dim, itemsize)
            if isinstance(stage, Modifier) and self.selector is not None and self.selector.evicts:
                # a modifier keeps a state in every slot only if scores are computed again while decoding
                state = stage.slot_bytes(itemsize)
                blocks = [replace(b, slot_overhead=b.slot_overhead + state) for b in blocks]
        return blocks

    def observed_bytes(self, n: int, query_heads: int, head_dim: int, itemsize: int) -> int:
        """Return the bytes of the prompt's last queries that a layer stores, because choosing again scores by them.

        They are 0 if the chain never chooses again. n is the length of the prompt.
        """
        evictor = self.evictor
        if evictor is None:
            return 0
        return query_heads * min(evictor.queries, n) * head_dim * itemsize

    def expected_sum(self, n: int, n_layers: int, heads: int) -> int | None:
        """Return how many tokens all layers and heads must hold together after prefill of n tokens.

        Return None if no stage declares such a sum: then ``expected`` of each layer states the tokens.
        """
        for stage in self.stages:
            tokens = stage.expected_sum(n, n_layers, heads)
            if tokens is not None:
                return tokens
        return None

    @property
    def rebalancer(self) -> Stage | None:
        """The stage that divides one budget over all layers, or None."""
        return next((s for s in self.stages if s.rebalances), None)

    def compress(self, cache: LayerCache, obs: Observation) -> LayerCache:
        """Return the layer's cache after all stages, stored under ``cache.heads`` heads.

        A stage that divides a budget over all layers treats this one layer as the whole model (see
        ``engine.layer_by_layer``).
        """
        for stage in self.stages:
            cache = self.run(stage, cache, obs)
            # in a model of one layer, the budget of all layers is this layer's
            if stage.rebalances:
                (cache,) = stage.rebalance([cache], 1)
        # under per=query_head, an uncut cache still has its kv heads
        cache = ops.expand(cache)
        evictor = self.evictor
        # ``every`` is the number of tokens between two choices, and 0 for an evictor that scores every step by itself
        if evictor is None or not evictor.every:
            return cache
        # an evictor that chooses again also scores by the prompt's last queries
        return replace(cache, observed=obs.for_decoding(evictor.queries))

    def run(self, stage: Stage, cache: LayerCache, obs: Observation) -> LayerCache:
        """Return the layer's cache after one stage.

        A selector runs with the chain's modifiers, and a quantiser with the chain's pruner.
        """
        if isinstance(stage, Selector):
            choose = partial(stage.compress, cache, obs)
            if self.modifiers:
                choose = partial(stage.choose, cache, obs, self.modifiers)
            if stage is self.stages[0]:
                # chains that begin alike choose alike, so they share this result
                return obs.once((stage, self.modifiers, cache.heads), choose)
            return choose()
        if stage is self.packed_pruner:
            # the quantiser removes this pruner's channels, because it knows which tokens it packs
            return cache
        if isinstance(stage, Quantiser):
            return stage.encode(cache, obs, self.packed_pruner)
        return stage.compress(cache, obs)

    def identity(self) -> dict[str, object]:
        """Return everything that decides the chain's results: its stages in order, and ``per``."""
        # the full cache is one method, because ``per`` changes nothing if no stage decides
        per = self.per if self.stages else "kv_head"
        return {"stages": [s.identity() for s in self.stages], "per": per}


def _reads_modules(stage: Stage) -> bool:
    """Return True if a stage reads a model's attention modules or runs passes of its own, beyond keys and queries."""
    # a stage needs the call for prompts of all lengths or of none, so one token tells
    return stage.needs(1).call or isinstance(stage, ReplayingSelector)


def _explain_shape_conflict(stage: Stage, shape: Shape) -> str | None:
    """Return why a stage cannot run on any model whose cache has this shape, or None."""
    # a local layer behind dropped hidden states would lose tokens of its window
    if shape.local_layers and stage.role == "hidden":
        return (
            f"{shape.local_layers} of its {shape.all_layers} layers are local, and would lose tokens of their windows "
            "with the hidden states that it drops"
        )
    if shape.local_layers and stage.needs(1).call:
        return f"{shape.local_layers} of its {shape.all_layers} layers are local, and it reads attention modules"
    reaches_into_layers = stage.adapts or stage.role == "hidden" or _reads_modules(stage)
    if shape.sharing_layers and (reaches_into_layers or stage.role == "share"):
        return f"{shape.sharing_layers} of its {shape.all_layers} layers read the keys of another layer"
    if shape.has_states and stage.role == "hidden":
        return "it has layers that read every token into a state"
    if shape.own_values:
        return _explain_latent_conflict(stage)
    return None


def _explain_latent_conflict(stage: Stage) -> str | None:
    """Return why a stage cannot run on a model whose cache holds latents, or None."""
    # of several reasons the user reads the last
    reason = stage.on_latents
    if stage.role == "lowrank":
        reason = "the model has low-rank keys and values of its own"
    if stage.rotates:
        reason = "only a part of a latent is rotated"
    if stage.needs(1).call:
        reason = "it reads projections of keys and values"
    if reason:
        return (
            f"it holds latents (latent attention), and {reason}. Take a method that chooses tokens, or a format of "
            "single tokens such as fp8 or q8_0"
        )
    if isinstance(stage, StorageFormat) and stage.values is not None:
        return f"it holds latents and stores no values beside them: leave values={stage.values} out"
    if isinstance(stage, StorageFormat) and stage.only == "values":
        return "it holds latents and stores no values beside them: leave only=values out"
    return None


def _explain_conflict(stage: Stage, model: ModelTraits) -> str | None:
    """Return why a stage cannot run on any model with these traits, or None."""
    reads_modules = stage.needs(1).call
    reason = _explain_shape_conflict(stage, model.shape)
    if reason is not None:
        return reason
    if model.paired and stage.role == "hidden":
        return "each of its layers attends twice"
    if model.one_by_one and isinstance(stage, ReplayingSelector):
        return "it must read tokens behind a prompt one at a time, and the method reads the prompt again at once"
    if model.capped and (stage.uncapped or reads_modules):
        return "it caps attention logits (softcapping), which the method's formula does not"
    if model.sinks and (stage.uncapped or reads_modules or stage.role == "share"):
        return "attention goes to sinks that are no tokens, too, which the method's formula leaves out"
    # the traits ``mixed`` and ``unrolled`` are reasons in words, or None if there is nothing against the stage
    if stage.role == "lowrank":
        return model.mixed
    if stage.rotates:
        return model.unrolled
    return None


def _check_room_for_sinks(selector: Selector, modifiers: Sequence[Modifier]) -> None:
    """Raise UsageError if a modifier's sinks leave a selector with a kv_size no token to choose beside its window."""
    if not modifiers:
        return
    # the capacity is that of a prompt longer than any budget, because a shorter one might keep all its tokens
    capacity = selector.capacity(LONGER_THAN_ANY_BUDGET)
    # sinks and chosen tokens share C - w tokens
    room = capacity.tokens - capacity.window
    for modifier in modifiers:
        # a modifier without sinks fits even where no room is left
        fits = modifier.sink_size() < max(room, 1)
        modifier.require(
            "sinks",
            fits,
            f"fewer than the {room} tokens that {selector.id} keeps beside its window at kv_size={capacity.tokens}",
        )

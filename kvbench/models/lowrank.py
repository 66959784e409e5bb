"""Modules with low-rank key and value projections. They replace a model's own projections while a context is open.

A low-rank module first computes latents: it multiplies its input by ``down``, for all groups of heads side by side. It
then computes keys or values from the latents. It remembers the latents of its last call, because a cache stores them.
The module's matrices count as weights, not as cache.
Shapes: Hk kv heads, D head dimension, d hidden size, R latents of a projection, U rows, L tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvbench.models.factors import Factors
from kvbench.models.interface import compressed_modules
from kvbench.models.traits import layer_frequencies


@dataclass(frozen=True)
class ProjectionShape:
    """The sizes of a model's key and value projections.

    layers: the number of layers with keys and values.
    heads: the number Hk of kv heads.
    head_dim: the number D of channels of a head.
    hidden: the size d of the projections' input.
    """

    layers: int
    heads: int
    head_dim: int
    hidden: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> ProjectionShape:
        """Return the sizes of the projections of ``model``."""
        modules = compressed_modules(model)
        heads = _count_kv_heads(model)
        # the first layer stands for all layers
        (k_weight, _), _ = key_value_weights(modules[0], heads)
        # k_weight is [Hk D, d]
        rows, hidden = k_weight.shape
        return cls(layers=len(modules), heads=heads, head_dim=rows // heads, hidden=hidden)


def _count_kv_heads(model: PreTrainedModel) -> int:
    """Return the number of kv heads of each layer."""
    # models without grouped heads have no num_key_value_heads
    return int(getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads)


QUERY, KEY, VALUE = range(3)
"""The places of a head's query, key and value rows in a fused projection."""
Linear = tuple[Tensor, Tensor | None]
"""The weight [Hk D, d] and the bias [Hk D] of a projection; None: no bias."""


def projection_modules(attention: nn.Module) -> list[nn.Linear]:
    """Return the linear modules that compute keys and values: [k_proj, v_proj], or [GPT-NeoX's fused projection]."""
    fused = getattr(attention, "query_key_value", None)
    if fused is not None:
        return [fused]
    return [attention.k_proj, attention.v_proj]  # type: ignore[list-item]


def key_value_weights(attention: nn.Module, heads: int) -> tuple[Linear, Linear]:
    """Return the key and value projections of an attention module with ``heads`` kv heads, each as (weight, bias)."""
    modules = projection_modules(attention)
    if len(modules) == 2:
        k, v = modules
        return (k.weight, k.bias), (v.weight, v.bias)
    (fused,) = modules
    return _split_fused(fused, heads, KEY), _split_fused(fused, heads, VALUE)


def head_rows(attention: nn.Module, tensors: Sequence[Tensor], heads: int) -> tuple[Tensor, Tensor]:
    """Return (rows of keys, rows of values), each [Hk, D, d], of tensors that belong to an attention module's weights.

    ``tensors`` has one tensor, such as a gradient, for each weight of ``projection_modules``, of the weight's shape.
    """
    if len(tensors) == 2:
        keys, values = tensors
        return keys.unflatten(0, (heads, -1)), values.unflatten(0, (heads, -1))
    (fused,) = tensors
    # [Hk, 3, D, d]: the query, key and value rows of each head
    rows = fused.unflatten(0, (heads, 3, -1))
    return rows[:, KEY], rows[:, VALUE]


def _split_fused(fused: nn.Linear, heads: int, place: int) -> Linear:
    """Return (weight, bias) of one projection in a fused one. ``place`` is QUERY, KEY or VALUE.

    The rows of a fused projection lie head by head: query, key and value rows of one head, then those of the next.
    """

    def select(tensor: Tensor) -> Tensor:
        """Return the rows of the chosen projection out of a tensor [3 H D, ...], as [H D, ...]."""
        by_head = tensor.detach().unflatten(0, (heads, 3, -1))
        return by_head[:, place].flatten(0, 1).contiguous()

    if fused.bias is None:
        return select(fused.weight), None
    return select(fused.weight), select(fused.bias)


class LowRank(nn.Module):
    """A low-rank projection: it computes latents from its input, and then keys, or values, from the latents.

    down, ups, ranks: the factors of the projection's weight (see ``Factors``).
    bias: [Hk D], added to the keys or values; None: no bias.
    latent: [B, T, R], the latents of the last call; None before the first call and after ``take``.
    """

    def __init__(self, factors: Factors, bias: Tensor | None) -> None:
        """Make the projection from the low-rank factors of its weight [Hk D, d] and its bias [Hk D]; None: no bias."""
        super().__init__()
        self.down, self.ups, self.ranks = factors.down, factors.ups, factors.ranks
        self.bias = bias
        self.latent: Tensor | None = None
        # new modules are in training mode, and the model that this one joins is not
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Return the keys or values [B, T, Hk D] of inputs x [B, T, d], and remember their latents."""
        self.latent = F.linear(x, self.down)
        return self.rebuild(self.latent)

    def rebuild(self, latent: Tensor) -> Tensor:
        """Return the keys or values [..., Hk D] of latents [..., R]. The keys are not rotated yet."""
        groups: list[Tensor] = []
        for group_latent, up in zip(latent.split(self.ranks, dim=-1), self.ups, strict=True):
            # at full rank the latents are the outputs
            if up is None:
                groups.append(group_latent)
            else:
                groups.append(F.linear(group_latent, up))
        # one group needs no copy
        outputs = torch.cat(groups, dim=-1) if len(groups) > 1 else groups[0]
        if self.bias is None:
            return outputs
        return outputs + self.bias

    def take(self) -> Tensor:
        """Return the latents [T, R] of the last call and forget them. The call's input must have had a single row."""
        assert self.latent is not None, "the projection must have run since the last ``take``"
        # [1, T, R] -> [T, R]
        latent = self.latent[0]
        self.latent = None
        return latent


class Fused(nn.Module):
    """GPT-NeoX's fused projection with low-rank keys and values. Queries are the model's own."""

    def __init__(self, model_projection: nn.Linear, heads: int, k_proj: LowRank, v_proj: LowRank) -> None:
        """Make the projection from its three parts.

        model_projection: the model's own fused projection of ``heads`` heads, which gives the query rows.
        k_proj, v_proj: the low-rank projections of keys and of values.
        """
        super().__init__()
        self.heads, self.k_proj, self.v_proj = heads, k_proj, v_proj
        self.q_weight, self.q_bias = _split_fused(model_projection, heads, QUERY)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Return queries, keys and values [B, T, 3 H D] of inputs x [B, T, d], side by side for each head."""
        outputs = (F.linear(x, self.q_weight, self.q_bias), self.k_proj(x), self.v_proj(x))
        # query, key and value of a head lie side by side: 3 of [..., heads, D] -> [..., heads, 3 D] -> [..., 3 H D]
        by_head = [output.unflatten(-1, (self.heads, -1)) for output in outputs]
        return torch.cat(by_head, dim=-1).flatten(-2)


@contextmanager
def swap_projections(model: PreTrainedModel, layers: Sequence[tuple[Factors, Factors]]) -> Iterator[None]:
    """While the context is open, each layer computes keys and values by low-rank projections instead of its own.

    ``layers`` has (key factors, value factors) for each layer. Biases stay those of the model.
    """
    heads = ProjectionShape.of(model).heads
    # replaced so far: (attention module, name of its attribute, the model's own projection)
    originals: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for attention, (k_factors, v_factors) in zip(compressed_modules(model), layers, strict=True):
            for name, module in _build_projections(attention, heads, k_factors, v_factors).items():
                originals.append((attention, name, getattr(attention, name)))
                setattr(attention, name, module)
        yield
    finally:
        # an error may have come after only some layers were replaced
        for attention, name, module in reversed(originals):
            setattr(attention, name, module)


def _build_projections(
    attention: nn.Module, heads: int, k_factors: Factors, v_factors: Factors
) -> dict[str, nn.Module]:
    """Return the low-rank projections of an attention module with ``heads`` kv heads, by the attribute to replace."""
    (_, k_bias), (_, v_bias) = key_value_weights(attention, heads)
    k_proj, v_proj = LowRank(k_factors, k_bias), LowRank(v_factors, v_bias)
    modules = projection_modules(attention)
    if len(modules) == 2:
        return {"k_proj": k_proj, "v_proj": v_proj}
    (fused,) = modules
    return {"query_key_value": Fused(fused, heads, k_proj, v_proj)}


@dataclass(frozen=True)
class KeyRotation:
    """The model's rotation of keys by its own module ``rotary``, or no rotation if ``rotary`` is None."""

    rotary: nn.Module | None

    def __call__(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Return keys [U, Hk, L, D] rotated by positions [U, L]. Dimensions behind the rotary ones stay unchanged."""
        if self.rotary is None:
            return keys
        # the rotary module reads only the dtype and device of the keys
        cos, sin = self.rotary(keys, positions)
        # [U, L, rotary dimensions] -> [U, 1, L, rotary dimensions]: the same for all heads
        cos, sin = cos[:, None], sin[:, None]
        width = cos.shape[-1]
        to_rotate, unrotated = keys[..., :width], keys[..., width:]
        first, second = to_rotate.chunk(2, dim=-1)
        # rotation of (x1, x2) by angle t: (x1 cos t - x2 sin t, x2 cos t + x1 sin t)
        rotated = to_rotate * cos + torch.cat((-second, first), dim=-1) * sin
        if not unrotated.shape[-1]:
            return rotated
        return torch.cat((rotated, unrotated), dim=-1)


@dataclass(frozen=True)
class LatentLift:
    """The map from one layer's latents to the keys and values that attention reads.

    k, v: the layer's low-rank projections.
    turn: the model's rotation of keys.
    heads: the kv heads Hk.
    """

    k: LowRank
    v: LowRank
    turn: KeyRotation
    heads: int

    def keys(self, latent: Tensor, positions: Tensor) -> Tensor:
        """Return rotated keys [U, Hk, L, D] of latents [U, L, R] at positions [U, L]."""
        # [U, L, Hk D] -> [U, L, Hk, D] -> [U, Hk, L, D]
        keys = self.k.rebuild(latent).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return self.turn(keys, positions)

    def new(self) -> tuple[Tensor, Tensor]:
        """Return (key latents, value latents), each [B, T, R], of the tokens that the projections read last."""
        assert self.k.latent is not None and self.v.latent is not None
        return self.k.latent, self.v.latent


def lifts(model: PreTrainedModel) -> list[LatentLift]:
    """Return the map from latents to keys and values of each layer, or [] if the model's projections are its own."""
    projections: list[tuple[LowRank, LowRank]] = []
    for attention in compressed_modules(model):
        # GPT-NeoX's low-rank projections are inside its fused projection (see ``Fused``)
        holder = getattr(attention, "query_key_value", attention)
        k, v = getattr(holder, "k_proj", None), getattr(holder, "v_proj", None)
        if isinstance(k, LowRank) and isinstance(v, LowRank):
            projections.append((k, v))
    if not projections:
        return []
    # low-rank methods run only on models that rotate the keys of all compressed layers alike, or of none
    rotary = next((module for module in model.modules() if hasattr(module, "inv_freq")), None)
    if not any(frequencies is not None and bool(frequencies.any()) for frequencies in layer_frequencies(model)):
        rotary = None
    turn = KeyRotation(rotary)
    return [LatentLift(k, v, turn, heads=_count_kv_heads(model)) for k, v in projections]

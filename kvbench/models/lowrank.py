"""Low-rank key and value projections in a model: modules that stand in for its own while a context is open.

They compute latents first (down x, side by side for all groups of heads) and keys or values from them, and remember the
latents of their last call, which is what a cache stores. Their matrices are weights, not cache. Shapes: Hk kv heads, D
head dimension, d hidden size, R latents of a projection, U rows, L tokens.
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
from kvbench.models.interface import attention_modules


@dataclass(frozen=True)
class ProjectionShape:
    """The sizes of a model's cache, and ``hidden``, that of its projections' input."""

    layers: int
    heads: int
    head_dim: int
    hidden: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> ProjectionShape:
        c, attention = model.config, attention_modules(model)
        heads = int(getattr(c, "num_key_value_heads", None) or c.num_attention_heads)
        (k, _), _ = linears(attention[0], heads)
        return cls(len(attention), heads, k.shape[0] // heads, k.shape[1])


Linear = tuple[Tensor, Tensor | None]


def projection(attention: nn.Module) -> list[nn.Linear]:
    """Return the linear modules that compute keys and values: [keys', values'], or GPT-NeoX's one fused module."""
    fused = getattr(attention, "query_key_value", None)
    return [attention.k_proj, attention.v_proj] if fused is None else [fused]  # type: ignore[list-item]


def linears(attention: nn.Module, heads: int) -> tuple[Linear, Linear]:
    """Return the (weight [Hk D, d], bias [Hk D] or None) of keys, and that of values."""
    modules = projection(attention)
    if len(modules) == 2:
        k, v = modules
        return (k.weight, k.bias), (v.weight, v.bias)
    return _split_fused(modules[0], heads, 1), _split_fused(modules[0], heads, 2)


def head_rows(attention: nn.Module, tensors: Sequence[Tensor], heads: int) -> tuple[Tensor, Tensor]:
    """Return (keys', values') rows [Hk, D, d] of tensors with the shapes of ``projection``'s weights."""
    if len(tensors) == 2:
        return tensors[0].unflatten(0, (heads, -1)), tensors[1].unflatten(0, (heads, -1))
    parts = tensors[0].unflatten(0, (heads, 3, -1))
    return parts[:, 1], parts[:, 2]


def _split_fused(fused: nn.Linear, heads: int, which: int) -> Linear:
    """Return (weight, bias) of query, key or value (``which`` 0, 1, 2) in a fused projection.

    Its rows lie head by head: the query's, the key's and the value's rows of a head, then those of the next.
    """

    def select(t: Tensor) -> Tensor:
        return t.detach().unflatten(0, (heads, 3, -1))[:, which].flatten(0, 1).contiguous()

    return select(fused.weight), None if fused.bias is None else select(fused.bias)


class LowRank(nn.Module):
    """A projection by factors. ``latent`` [B, T, R] is what its last call computed."""

    def __init__(self, factors: Factors, bias: Tensor | None) -> None:
        super().__init__()
        self.down, self.ups, self.ranks, self.bias = factors.down, factors.ups, factors.ranks, bias
        self.latent: Tensor | None = None
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        self.latent = F.linear(x, self.down)
        return self.rebuild(self.latent)

    def rebuild(self, latent: Tensor) -> Tensor:
        """Return the keys or values [..., Hk D] of latents [..., R]; keys are not rotated yet."""
        parts = latent.split(self.ranks, dim=-1)
        groups = [p if up is None else F.linear(p, up) for p, up in zip(parts, self.ups, strict=True)]
        outputs = groups[0] if len(groups) == 1 else torch.cat(groups, dim=-1)
        return outputs if self.bias is None else outputs + self.bias

    def take(self) -> Tensor:
        """Return the latents [T, R] of the last call, which had a single row, and forget them."""
        assert self.latent is not None
        latent, self.latent = self.latent[0], None
        return latent


class Fused(nn.Module):
    """GPT-NeoX's fused projection with low-rank keys and values; queries are its own."""

    def __init__(self, own: nn.Linear, heads: int, k_proj: LowRank, v_proj: LowRank) -> None:
        super().__init__()
        self.heads, self.k_proj, self.v_proj = heads, k_proj, v_proj
        self.q_weight, self.q_bias = _split_fused(own, heads, 0)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        parts = (F.linear(x, self.q_weight, self.q_bias), self.k_proj(x), self.v_proj(x))
        return torch.cat([p.unflatten(-1, (self.heads, -1)) for p in parts], dim=-1).flatten(-2)


@contextmanager
def swapped(model: PreTrainedModel, layers: Sequence[tuple[Factors, Factors]]) -> Iterator[None]:
    """Replace each layer's projections by its (key factors, value factors); the model's own come back on exit."""
    heads = ProjectionShape.of(model).heads
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for attention, (k, v) in zip(attention_modules(model), layers, strict=True):
            modules = projection(attention)
            (_, k_bias), (_, v_bias) = linears(attention, heads)
            k_proj, v_proj = LowRank(k, k_bias), LowRank(v, v_bias)
            if len(modules) == 1:
                replacements: dict[str, nn.Module] = {"query_key_value": Fused(modules[0], heads, k_proj, v_proj)}
            else:
                replacements = {"k_proj": k_proj, "v_proj": v_proj}
            for name, module in replacements.items():
                replaced.append((attention, name, getattr(attention, name)))
                setattr(attention, name, module)
        yield
    finally:
        for attention, name, module in reversed(replaced):
            setattr(attention, name, module)


@dataclass(frozen=True)
class KeyRotation:
    """The model's rotation of keys by its own rotary module, which is None where positions are learned."""

    rotary: nn.Module | None

    def __call__(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Return keys [U, Hk, L, D] rotated by positions [U, L]; dimensions past the rotary ones stay."""
        if self.rotary is None:
            return keys
        cos, sin = (t[:, None] for t in self.rotary(keys, positions))  # [U, 1, L, rotary dimensions]
        rotary, rest = keys[..., : cos.shape[-1]], keys[..., cos.shape[-1] :]
        first, second = rotary.chunk(2, dim=-1)
        # (x1, x2) by angle t: (x1 cos t - x2 sin t, x2 cos t + x1 sin t)
        rotated = rotary * cos + torch.cat((-second, first), dim=-1) * sin
        return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


@dataclass(frozen=True)
class LatentLift:
    """The step from one layer's latents to the keys and values that attention reads."""

    k: LowRank
    v: LowRank
    turn: KeyRotation
    heads: int

    def keys(self, latent: Tensor, positions: Tensor) -> Tensor:
        """Return rotated keys [U, Hk, L, D] of latents [U, L, R] at positions [U, L]."""
        return self.turn(self.k.rebuild(latent).unflatten(-1, (self.heads, -1)).transpose(1, 2), positions)

    def new(self) -> tuple[Tensor, Tensor]:
        """Return the (key latents, value latents) [B, T, R] of the tokens that the projections read last."""
        assert self.k.latent is not None and self.v.latent is not None
        return self.k.latent, self.v.latent


def lifts(model: PreTrainedModel) -> list[LatentLift]:
    """Return a lift for each layer while the model's projections are low-rank, else an empty list."""
    turn = KeyRotation(next((m for m in model.modules() if hasattr(m, "inv_freq")), None))
    layer_lifts = []
    for attention in attention_modules(model):
        holder = getattr(attention, "query_key_value", attention)
        k, v = getattr(holder, "k_proj", None), getattr(holder, "v_proj", None)
        if isinstance(k, LowRank) and isinstance(v, LowRank):
            heads = getattr(model.config, "num_key_value_heads", None) or model.config.num_attention_heads
            layer_lifts.append(LatentLift(k, v, turn, int(heads)))
    return layer_lifts

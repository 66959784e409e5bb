"""What methods and models bring to rows that decode: each format asks only for the roles that it needs.

Shapes: B rows, Hq query heads, H stored heads, S slots, T new tokens, D head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from kvbench.cache.packed import Packed
from kvbench.cache.partly_packed import Residual
from kvbench.cache.segment import LayerCache


class Masker(Protocol):
    """A method that decides at each step, per query head, what a new token attends."""

    def estimate(self, keys: Tensor) -> Tensor:
        """Stand-ins for keys [..., D], as cheap to read as the method claims; same shape and dtype."""
        ...

    def mask(self, weights: Tensor) -> Tensor:
        """Which of the attention weights [B, Hq, T, S] that the stand-ins give are attended: bool, at least one."""
        ...


class Packer(Protocol):
    """Pack tokens. A token that is packed at once is read as packed from its own step on; exactly in that step if the
    packer ``packs_after_step``."""

    @property
    def packs_after_step(self) -> bool: ...

    def pack_keys(self, x: Tensor) -> Packed: ...

    def pack_values(self, x: Tensor) -> Packed: ...


class RowCoder(Packer, Protocol):
    """What packs the older tokens of a chain, and which of the newest stay exact as keys and as values."""

    @property
    def keys(self) -> Residual: ...

    @property
    def values(self) -> Residual: ...


class Projection(Protocol):
    """The half of a low-rank projection that a cache of its latents needs."""

    @property
    def ups(self) -> tuple[Tensor | None, ...]:
        """Of each group [its heads * D, r]; None: the identity."""
        ...

    @property
    def ranks(self) -> tuple[int, ...]: ...

    @property
    def bias(self) -> Tensor | None:
        """[Hk * D]."""
        ...


class Lift(Protocol):
    """How a layer's latents become keys and values."""

    @property
    def heads(self) -> int: ...

    @property
    def v(self) -> Projection: ...

    def keys(self, latent: Tensor, positions: Tensor) -> Tensor:
        """Rotated keys [U, Hk, L, D] of latents [U, L, R] at positions [U, L]."""
        ...

    def new(self) -> tuple[Tensor, Tensor]:
        """Latents [B, T, R] of keys and of values of the tokens that the model has just read."""
        ...


@dataclass(frozen=True)
class Slots:
    """What a method sees of its slots. ``now`` [B, 1, 1] is the position of the newest token, ``n`` [B, 1, 1] the
    prompt's length; free slots are not ``valid``."""

    positions: Tensor  # [B, H, S] int32
    valid: Tensor  # [B, H, S] bool
    state: Mapping[str, Tensor]  # each [B, H, S] or [B, H, S, ...]
    now: Tensor
    n: Tensor
    counts: Mapping[str, Tensor] = field(default_factory=dict)  # [B, 1, 1] each, by name: see ``token_counts``


class Evictor(Protocol):
    """The part of a selector that works while decoding."""

    @property
    def packer(self) -> Packer | None:
        """What packs every token held; None where tokens stay exact."""
        ...

    @property
    def rolled(self) -> bool:
        """Whether cached keys take the positions of their slots."""
        ...

    def head_budgets(self, cache: LayerCache, layer: int) -> Sequence[int]:
        """Tokens that each stored head of this layer holds from now on; 0: the head is not stored."""
        ...

    def token_counts(self, n: int) -> Mapping[str, int]:
        """Return counts that depend on the prompt's length n alone, so that no step loops over rows."""
        ...

    def unattended(self, n: int) -> int | None:
        """Return how many positions before a query the one token lies that it does not attend; None: it attends all."""
        ...

    def keep_scores(self, slots: Slots) -> Tensor:
        """How much each slot matters [B, H, S], before the new tokens come; the lowest are evicted, +inf never."""
        ...

    def new_token_state(self, k: Tensor, v: Tensor) -> Mapping[str, Tensor]:
        """The state that new tokens with exact k, v [B, H, T, D] start from, where that is not 0: [B, H, T, ...]."""
        ...

    @property
    def estimates(self) -> bool:
        """Whether ``fold`` reads the attention of stand-ins for the keys."""
        ...

    def estimate(self, keys: Tensor) -> Tensor:
        """Stand-ins in fp32 for keys [..., D], block by block where these are packed."""
        ...

    def fold(self, slots: Slots, probs: Tensor) -> Mapping[str, Tensor]:
        """The part of the state that attention ``probs`` [B, Hq, T, S] over the slots changes."""
        ...


@dataclass(frozen=True)
class Rotary:
    """The model's rotation, for chains that give cached keys the positions of their slots."""

    inv_freq: Tensor  # [r / 2]

    def turn(self, x: Tensor, start: Tensor | int, end: Tensor | int) -> Tensor:
        """Rotate x [..., D] from positions ``start`` [...] to ``end`` [...]; dimensions past the rotary ones stay.

        Both angles are rounded to fp32 as the model rounds them, and their difference taken in fp64: at positions of
        many thousands an angle of the difference alone would not undo what the model did.
        """
        r = 2 * self.inv_freq.shape[0]
        inv_freq = self.inv_freq.to(x.device, torch.float32)

        def angle(at: Tensor | int) -> Tensor:
            return (torch.as_tensor(at, device=x.device)[..., None].float() * inv_freq).double()

        by = angle(end) - angle(start)
        cos, sin = (torch.cat([t.float()] * 2, dim=-1) for t in (by.cos(), by.sin()))
        part = x[..., :r].float()
        a, b = part.chunk(2, dim=-1)
        # x cos + rot(x) sin, where rot(a, b) = (-b, a)
        turned = part * cos + torch.cat((-b, a), dim=-1) * sin
        return torch.cat((turned.to(x.dtype), x[..., r:]), dim=-1)

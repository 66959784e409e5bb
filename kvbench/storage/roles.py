"""The roles that methods and models play for rows that decode. A storage format uses only the roles that it needs.

A masker restricts attention, a packer stores tokens in few bits, a coder says which tokens are packed, and an evictor
drops tokens. A lift rebuilds keys and values from latents, and a rotary turns keys to other positions.

Shapes: B rows, Hq query heads, H stored heads, S slots, T new tokens, D head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvbench.kv.observation import Observation
    from kvbench.kv.packed import Packed
    from kvbench.kv.partly_packed import Residual
    from kvbench.kv.segment import LayerCache


class Masker:
    """A method that decides at each step, for each query head, which tokens a new token attends."""

    def estimate(self, keys: Tensor) -> Tensor:
        """Return the estimates of keys [..., D] by which tokens are chosen, in the same shape and dtype.

        They have the precision that the method claims to read, for example that of 4 bits.
        """
        return keys

    def mask(self, weights: Tensor) -> Tensor:
        """Return a mask [B, Hq, T, S] of the tokens to attend, at least one for each query.

        ``weights`` [B, Hq, T, S] are the attention weights over the estimated keys.
        """
        raise TypeError(f"{type(self).__name__} does not say what it masks")


class Packer:
    """A method that packs tokens into few bits.

    packs_after_step: if True, a token that is packed at once is still read exactly in its own step, and as packed from
    the next step on. If False, it is read as packed in its own step already.
    """

    packs_after_step: ClassVar[bool] = True

    def pack_keys(self, x: Tensor) -> Packed:
        """Return the keys x [..., L, C] packed."""
        raise TypeError(f"{type(self).__name__} does not say how it quantises keys")

    def pack_values(self, x: Tensor) -> Packed:
        """Return the values x [..., L, C] packed."""
        raise TypeError(f"{type(self).__name__} does not say how it quantises values")


@dataclass(frozen=True)
class Coder:
    """A packer, with the rules for which tokens it packs.

    packer: the method that packs the tokens.
    keys, values: the rules for how many of the newest tokens keep exact keys, and exact values.
    grows: False if only the prompt is packed, and all later tokens stay exact.
    """

    packer: Packer
    keys: Residual
    values: Residual
    grows: bool = True


@dataclass(frozen=True)
class Slots:
    """A layer's slots as its method sees them.

    positions: the position of each slot's token.
    valid: True for the slots that hold a token, False for free slots.
    state: the method's running state by name, such as the attention that each token received.
    now: [B, 1, 1], the position of the newest token.
    n: [B, 1, 1], the prompt's length.
    counts: the method's ``token_counts`` by name.
    """

    positions: Tensor  # [B, H, S] int32
    valid: Tensor  # [B, H, S] bool
    state: Mapping[str, Tensor]  # each [B, H, S] or [B, H, S, ...]
    now: Tensor
    n: Tensor
    counts: Mapping[str, Tensor] = field(default_factory=dict)  # each [B, 1, 1]


class Evictor:
    """The part of a selector that evicts tokens while decoding.

    Each head has a budget of tokens. Either ``keep_scores`` decides at every step which tokens go, or ``choose_again``
    decides after a number of new tokens (``every``).
    """

    @property
    def packer(self) -> Packer | None:
        """The packer of every token while decoding, or None if tokens stay exact."""
        return None

    @property
    def rolled(self) -> bool:
        """True if cached keys take the positions of their slots while decoding, not their positions in the text."""
        return False

    def head_budgets(self, cache: LayerCache, layer: int) -> Sequence[int]:
        """Return how many tokens each stored head of this layer may hold.

        A head that may hold 0 tokens copies another head's output.
        """
        raise TypeError(f"{type(self).__name__} does not say how many tokens its heads hold while decoding")

    @property
    def every(self) -> int:
        """The number of new tokens between calls of ``choose_again``; 0: ``keep_scores`` evicts at every step."""
        return 0

    @property
    def grows(self) -> bool:
        """True if the budget grows with the tokens read."""
        return False

    @property
    def queries(self) -> int:
        """The number of last queries that ``choose_again`` reads."""
        return 0

    def choose_again(self, cache: LayerCache, obs: Observation) -> LayerCache:
        """Return the layer with only the tokens that stay.

        cache: all tokens, in one exact segment [H, m, ...]. Its state ``slot`` numbers them. Select it with the tokens:
        the caller reads from it which of them stay.
        obs: the observation of the last ``queries`` queries.
        """
        raise TypeError(f"{type(self).__name__} does not say what it chooses while decoding")

    def tokens_after(self, cache: LayerCache, layer: int, new: int) -> tuple[list[int], list[int]]:
        """Return (tokens, most) after ``new`` more tokens, each a list with a number for each stored head.

        ``tokens`` has how many tokens a head then holds, ``most`` the most that it has held at any time until then.
        """
        counts = cache.kept_counts()
        budgets = self.head_budgets(cache, layer)
        after = counts
        if new:
            # a prompt that was kept whole may shrink to its budget when the first new token comes
            after = [min(budget, count + new) for budget, count in zip(budgets, counts, strict=True)]
        return after, [max(pair) for pair in zip(after, counts, strict=True)]

    def token_counts(self, n: int) -> Mapping[str, int]:
        """Return {name: number of tokens} for a prompt of n tokens, such as the recent tokens that always stay.

        ``keep_scores`` reads these numbers as ``Slots.counts``.
        """
        return {}

    def unattended_distance(self, n: int) -> int | None:
        """Return d if a query at position p does not attend the token at p - d; None if it attends all tokens."""
        return None

    def keep_scores(self, slots: Slots) -> Tensor:
        """Return each slot's score [B, H, S] before new tokens come.

        The tokens with the lowest scores are evicted. A token with the score +inf is never evicted.
        """
        raise TypeError(f"{type(self).__name__} does not say what it evicts while decoding")

    def new_token_state(self, k: Tensor, v: Tensor) -> Mapping[str, Tensor]:
        """Return {name: state [B, H, T, ...]} of new tokens with exact k, v [B, H, T, D]; other states start at 0."""
        return {}

    @property
    def estimates(self) -> bool:
        """True if ``fold`` reads attention over the approximate keys of ``estimate``."""
        return False

    def estimate(self, keys: Tensor) -> Tensor:
        """Return the method's approximation of keys [..., D] in fp32.

        The caller passes packed keys unpacked, block by block.
        """
        return keys

    def fold(self, slots: Slots, probs: Tensor) -> Mapping[str, Tensor]:
        """Return {name: new running state} for each state that the step changes.

        probs: [B, Hq, T, S], the attention weights over the slots of the step's T queries.
        """
        return {}


class Projection(Protocol):
    """A low-rank projection from latents. The heads of a group share one matrix.

    ups: the matrices [G D, r] from a group's latents to its G heads; None if the latents are the values themselves.
    ranks: the widths r of the groups' latents.
    bias: [Hk D], added once to each value; None: no bias.
    """

    @property
    def ups(self) -> Sequence[Tensor | None]: ...

    @property
    def ranks(self) -> Sequence[int]: ...

    @property
    def bias(self) -> Tensor | None: ...


class Lift(Protocol):
    """The map from one layer's latents to the keys and values that attention reads.

    v: the projection from value latents to values.
    heads: the kv heads Hk that the keys and values have.
    """

    @property
    def v(self) -> Projection: ...

    @property
    def heads(self) -> int: ...

    def keys(self, latent: Tensor, positions: Tensor) -> Tensor:
        """Return rotated keys [U, Hk, L, D] of latents [U, L, R] at positions [U, L]."""
        ...

    def new(self) -> tuple[Tensor, Tensor]:
        """Return (key latents, value latents), each [B, T, R], of the tokens that the model's layer read last."""
        ...


@dataclass(frozen=True)
class Rotary:
    """The model's rotation of queries and keys (RoPE), by which cached keys are turned to other positions.

    inv_freq: the angle per position of each pair of dimensions. The first r dimensions of a head are rotary.
    """

    inv_freq: Tensor  # [r / 2]

    def turn(self, x: Tensor, start: Tensor | int, end: Tensor | int) -> Tensor:
        """Return x [..., D] rotated from positions ``start`` [...] to ``end`` [...]. Only rotary dimensions change.

        Both angles are rounded to fp32 as the model rounds them. Their difference is taken in fp64. At positions of
        many thousands, rotating by the difference alone would not undo the model's rotation.
        """
        cos, sin = self._cos_sin(start, end, x.device)
        return self._rotate(x, cos, sin)

    def mean_turn(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the mean of x [..., D] rotated from position 0 to each of ``positions`` [p]."""
        # rotation is linear in (cos, sin), so the mean of rotations is the rotation by the mean cosine and sine
        cos, sin = self._cos_sin(start=0, end=positions, device=x.device)
        return self._rotate(x, cos.mean(dim=0), sin.mean(dim=0))

    def _cos_sin(self, start: Tensor | int, end: Tensor | int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cosine and sine [..., r] fp32 of the angles from ``start`` to ``end``."""
        inv_freq = self.inv_freq.to(device, torch.float32)

        def angles(position: Tensor | int) -> Tensor:
            """Return the angles [..., r / 2] at a position, rounded to fp32, in fp64."""
            return (torch.as_tensor(position, device=device)[..., None].float() * inv_freq).double()

        difference = angles(end) - angles(start)
        cos, sin = difference.cos().float(), difference.sin().float()
        # dimensions i and i + r / 2 turn by the same angle
        return torch.cat([cos, cos], dim=-1), torch.cat([sin, sin], dim=-1)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return x [..., D] with its first r dimensions rotated, computed in fp32."""
        rotary, rest = x[..., : cos.shape[-1]].float(), x[..., cos.shape[-1] :]
        a, b = rotary.chunk(2, dim=-1)
        # x cos + rot(x) sin, where rot(a, b) = (-b, a)
        rotated = rotary * cos + torch.cat((-b, a), dim=-1) * sin
        return torch.cat((rotated.to(x.dtype), rest), dim=-1)

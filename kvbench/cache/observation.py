"""A layer of a prompt as a stage sees it, and the parts of it that a stage asks for.

Shapes use: Hq query heads, Hk kv heads, n prompt tokens, D head dimension, d hidden size, R latents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

Found = TypeVar("Found")


@dataclass(frozen=True)
class Needs:
    """What a stage must see of a layer: the last and first queries (counts), column sums, hidden states.

    ``colsums_bits`` are the widths at which column sums are wanted of keys that were quantised per token.
    """

    last_q: int = 0
    first_q: int = 0
    colsums: bool = False
    hidden: bool = False
    colsums_bits: frozenset[int] = frozenset()

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            max(self.last_q, other.last_q),
            max(self.first_q, other.first_q),
            self.colsums or other.colsums,
            self.hidden or other.hidden,
            self.colsums_bits | other.colsums_bits,
        )


@dataclass(frozen=True)
class Observation:
    """One layer of one prefill, as every pending method sees it. Fields that nobody needs are None.

    ``scale`` multiplies q.k (1.0 where the model scales its queries itself). ``prompt`` is the CRC-32 of the token
    ids: methods that draw at random differ between prompts, and never between runs. ``n`` counts the tokens that this
    layer read. Where a stage drops hidden states that is less than the prompt's ``length``, to which budgets refer;
    ``positions`` then says which tokens they are, and everything else is in their order.
    """

    layer: int
    n_layers: int
    n: int
    scale: float
    prompt: int = 0
    last_q: Tensor | None = None  # [Hq, W, D], after RoPE, W = min(needs.last_q, n)
    first_q: Tensor | None = None  # [Hq, w0, D], after RoPE
    colsums: Tensor | None = None  # [Hq, n] fp32, attention received by each token from all queries
    colsums_q: Mapping[int, Tensor] = field(default_factory=dict)  # the same by bit width, of quantised keys
    hidden: Tensor | None = None  # [n, d], input of the attention module
    read_k: Tensor | None = None  # [Hk, n, D], the keys that the prompt's attention read, where not those stored
    latents: tuple[Tensor, Tensor] | None = None  # [n, R] of keys and of values, where projections are low-rank
    inv_freq: Tensor | None = None  # [r / 2], the model's rotary frequencies; None where positions are learned
    length: int = 0  # tokens of the prompt; 0: n
    positions: Tensor | None = None  # [n] int64, ascending; None: 0 .. n - 1
    found: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def once(self, key: Any, compute: Callable[[], Found]) -> Found:
        """What ``compute`` finds of this layer, computed by the first chain that asks for ``key``; never changed."""
        if key not in self.found:
            self.found[key] = compute()
        found: Found = self.found[key]
        return found

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, whether or not this layer read them."""
        return self.length or self.n

    def where(self, device: torch.device) -> Tensor:
        """The positions [n] of the tokens that this layer read."""
        return torch.arange(self.n, device=device) if self.positions is None else self.positions.to(device)

    def queries(self, w: int) -> Tensor:
        """The last ``min(w, n)`` queries [Hq, w, D]; raises if no stage declared that it needs them."""
        if self.last_q is None or self.last_q.shape[1] < min(w, self.n):
            raise ValueError(f"a stage reads the last {w} queries without declaring them in its needs")
        return self.last_q[:, -min(w, self.n) :]

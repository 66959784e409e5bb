"""A layer of a prompt as a stage sees it, and the parts of it that a stage asks for.

Shapes use: Hq query heads, Hk kv heads, n prompt tokens, D head dimension, d hidden size, R latents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

Result = TypeVar("Result")


@dataclass(frozen=True)
class Needs:
    """The parts of a layer that a stage needs.

    last_q, first_q: how many of the last and of the first queries.
    colsums: the attention that each token received from all queries.
    hidden: the input of the attention module.
    colsums_bits: bit widths. Column sums are also taken over keys quantised per token to each of them.
    call: the attention module and its call.
    """

    last_q: int = 0
    first_q: int = 0
    colsums: bool = False
    hidden: bool = False
    colsums_bits: frozenset[int] = frozenset()
    call: bool = False

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            last_q=max(self.last_q, other.last_q),
            first_q=max(self.first_q, other.first_q),
            colsums=self.colsums or other.colsums,
            hidden=self.hidden or other.hidden,
            colsums_bits=self.colsums_bits | other.colsums_bits,
            call=self.call or other.call,
        )

    @classmethod
    def union(cls, needs: Iterable[Needs]) -> Needs:
        """Return the needs of several stages or chains together."""
        return reduce(or_, needs, cls())


@dataclass(frozen=True)
class AttentionCall:
    """The call of a layer's attention module, for other packages' methods, which read modules.

    module: the attention module.
    kwargs: the keyword arguments of its call.
    rotary: the model's module of rotary embeddings; None where positions are learned.
    """

    module: Any
    kwargs: Mapping[str, Any]
    rotary: Any = None

    def __deepcopy__(self, memo: Any) -> AttentionCall:
        return self  # each method gets a copy of its observation; a copy of the module would copy the model's weights


@dataclass(frozen=True)
class Observation:
    """One layer of one prefill, as every chain sees it. Fields that no stage needs are None.

    n: the number of tokens that this layer read. Where a stage drops hidden states, it is less than the prompt's
    ``length``, to which budgets refer. ``positions`` then names the tokens read, and all fields are in their order.
    scale: the factor of q.k, 1.0 where the model scales its queries itself.
    prompt: the CRC-32 of the token ids. It makes random draws differ between prompts, but never between runs.
    partial: True if ``last_q`` may hold fewer queries than a stage asks for, because older queries' tokens are gone.
    """

    layer: int
    n_layers: int
    n: int
    scale: float
    prompt: int = 0
    last_q: Tensor | None = None  # [Hq, W, D], after RoPE, W = min(needs.last_q, n)
    first_q: Tensor | None = None  # [Hq, w0, D], after RoPE
    colsums: Tensor | None = None  # [Hq, n] fp32, attention received by each token from all queries
    colsums_q: Mapping[int, Tensor] = field(default_factory=dict)  # colsums over quantised keys, by bit width
    hidden: Tensor | None = None  # [n, d], input of the attention module
    read_k: Tensor | None = None  # [Hk, n, D], the keys that the prompt's attention read; None: those stored
    latents: tuple[Tensor, Tensor] | None = None  # [n, R] of keys and of values, where projections are low-rank
    inv_freq: Tensor | None = None  # [r / 2], the model's rotary frequencies; None where positions are learned
    length: int = 0  # tokens of the prompt; 0: n
    positions: Tensor | None = None  # [n] int64, ascending; None: 0 .. n - 1
    call: AttentionCall | None = None
    partial: bool = False
    scratch: dict[object, object] = field(default_factory=dict, compare=False, repr=False)  # see ``once``

    def once(self, key: object, compute: Callable[[], Result]) -> Result:
        """Return the result of ``compute``, which is called once for all chains that see this layer.

        ``key`` names the result: the stage or function that computes it, with all else that it depends on.
        """
        if key not in self.scratch:
            self.scratch[key] = compute()
        return cast(Result, self.scratch[key])

    def received(self, bits: int | None = None) -> Tensor:
        """Return the attention [Hq, n] that each token received from all queries.

        With ``bits`` it is taken over keys quantised to that width. Raises ValueError if no stage declared such a need.
        """
        sums = self.colsums if bits is None else self.colsums_q.get(bits)
        if sums is None:
            raise ValueError("a stage reads column sums without declaring them in its needs")
        return sums

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the prompt, whether or not this layer read them."""
        return self.length or self.n

    def for_decoding(self, queries: int) -> Observation:
        """Return what a method that chooses again while decoding keeps: the last ``queries`` and plain numbers."""
        last_q = None
        if queries:
            # a view would keep all queries of the prompt alive
            last_q = self.queries(queries).clone()
        return Observation(
            layer=self.layer,
            n_layers=self.n_layers,
            n=self.n,
            scale=self.scale,
            prompt=self.prompt,
            last_q=last_q,
            partial=True,
        )

    def token_positions(self, device: torch.device) -> Tensor:
        """Return the positions [n] of the tokens that this layer read."""
        if self.positions is None:
            return torch.arange(self.n, device=device)
        return self.positions.to(device)

    def queries(self, w: int) -> Tensor:
        """Return the last ``min(w, n)`` queries [Hq, w, D]. Raises ValueError if no stage declared such a need."""
        if self.last_q is None or (self.last_q.shape[1] < min(w, self.n) and not self.partial):
            raise ValueError(f"a stage reads the last {w} queries without declaring them in its needs")
        return self.last_q[:, -min(w, self.n) :]

"""A layer of a prompt as a stage sees it, and the parts of the layer that a stage asks for.

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

    last_q, first_q: how many of the last queries, and how many of the first queries.
    colsums: True for the column sums of the attention matrix: the attention that each token received from all queries.
    hidden: True for the input of the attention module.
    colsums_bits: bit widths, such as {2}. For each width, the stage gets column sums over keys quantised per token.
    call: True for the attention module and the keyword arguments of its call.
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
        """Return the least needs that cover those of several stages or chains."""
        return reduce(or_, needs, cls())


@dataclass(frozen=True)
class AttentionCall:
    """The call of a layer's attention module. Methods of other packages read such modules.

    module: the attention module.
    kwargs: the keyword arguments of its call.
    rotary: the model's module of rotary embeddings; None where positions are learned.
    """

    module: Any
    kwargs: Mapping[str, Any]
    rotary: Any = None


@dataclass(frozen=True)
class Observation:
    """One layer of one prefill, as every method sees it. Fields that no stage needs are None.

    layer, n_layers: the layer's number, from 0, among the layers that methods compress, and the number of these layers.
    n: the number of tokens that this layer read. If a stage drops hidden states, ``n`` is less than ``length``, the
    number of the prompt's tokens. ``positions`` then has the positions of the n tokens, and all fields follow their
    order. Budgets always refer to ``length``.
    scale: the factor by which q.k is multiplied. It is 1.0 if the model scales its queries itself.
    prompt: the CRC-32 of the token ids, a seed of random draws. Draws differ between prompts, but not between runs.
    partial: True while decoding, when ``last_q`` may have fewer queries than a stage asks for.
    """

    layer: int
    n_layers: int
    n: int
    scale: float
    prompt: int = 0
    last_q: Tensor | None = None  # [Hq, W, D], after RoPE, W = min(needs.last_q, n)
    first_q: Tensor | None = None  # [Hq, w0, D], after RoPE
    colsums: Tensor | None = None  # [Hq, n] fp32, the attention that each token received from all queries
    colsums_q: Mapping[int, Tensor] = field(default_factory=dict)  # by bit width: colsums over quantised keys
    hidden: Tensor | None = None  # [n, d], input of the attention module
    read_k: Tensor | None = None  # [Hk, n, D], the keys that the prompt's attention read; None: the stored keys
    latents: tuple[Tensor, Tensor] | None = None  # [n, R] each of keys and values, where projections are low-rank
    inv_freq: Tensor | None = None  # [r / 2], the layer's rotary frequencies; None where positions are learned
    length: int = 0  # the number of the prompt's tokens; 0 stands for n
    positions: Tensor | None = None  # [n] int64, ascending; None: 0 .. n - 1
    call: AttentionCall | None = None
    partial: bool = False
    scratch: dict[object, object] = field(default_factory=dict, compare=False, repr=False)  # see ``once``

    def once(self, key: object, compute: Callable[[], Result]) -> Result:
        """Return the result of ``compute``, which only the first of the chains that see this layer calls.

        ``key`` names the result: the stage or function that computes it, and everything else that it depends on.
        """
        if key not in self.scratch:
            self.scratch[key] = compute()
        return cast(Result, self.scratch[key])

    def received(self, bits: int | None = None) -> Tensor:
        """Return the attention [Hq, n] that each token received from all queries.

        With ``bits`` the keys are quantised to that width. Raises ValueError if no stage declared such a need.
        """
        if bits is None:
            sums = self.colsums
        else:
            sums = self.colsums_q.get(bits)
        if sums is None:
            raise ValueError("a stage reads column sums without declaring them in its needs")
        return sums

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the prompt, whether or not this layer read them."""
        return self.length or self.n

    def for_decoding(self, queries: int) -> Observation:
        """Return a smaller observation, for a method that chooses again while decoding.

        It has the last ``queries`` queries and plain numbers, but no other tensors.
        """
        last_q = None
        if queries:
            # the clone frees the prompt's other queries: a view would keep all of them alive
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
        """Return the last min(w, n) queries [Hq, min(w, n), D]; w is 1 or more.

        Raises ValueError if no stage declared such a need. If the observation is ``partial``, there may be fewer.
        """
        # a layer has one query for each token that it read
        count = min(w, self.n)
        if self.last_q is None or (self.last_q.shape[1] < count and not self.partial):
            raise ValueError(f"a stage reads the last {w} queries without declaring them in its needs")
        return self.last_q[:, -count:]

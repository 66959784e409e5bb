"""Q-Hitter: keep tokens that receive attention and survive quantisation, and store all of them packed.

Zhang et al., MLSys 2024 (https://mlsys.org/virtual/2024/poster/2642), algorithm 1, and its released code
(https://github.com/VITA-Group/Q-Hitter).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from kvbench.kv import ops
from kvbench.kv.observation import Needs, Observation
from kvbench.kv.packed import Packed, quantise_zero_point, run_bytes
from kvbench.kv.segment import LayerCache, per_head
from kvbench.methods.core.base import Modifier
from kvbench.methods.core.contract import Block, Capacity
from kvbench.methods.core.evicting import EvictingSelector
from kvbench.methods.core.knobs import CODE_BITS, Rule, knob, one_of
from kvbench.methods.core.statistics import group_mean, group_rows, recent_slots
from kvbench.storage.evicting_rows import rank_slots
from kvbench.storage.roles import Packer, Slots

HEAVY, PARTS = 3, 4
"""Heavy hitters get 3/4 of a budget: the released code keeps 15 % of the prompt as such, beside 5 % recent tokens."""
PUBLISHED_HEAVY = 0.15
"""The fraction of the prompt that the released code keeps as heavy hitters."""


@dataclass(frozen=True, kw_only=True)
class QHitter(EvictingSelector, Packer):
    """Score of token j = lam * attention it received + (1 - lam) * its friendliness to quantisation.

    Attention is H2O's accumulated sum S[h, j]. Friendliness falls with the errors of quantisation e_K = ||k - Q(k)||_2
    and e_V = ||v - Q(v)||_2. Q packs each token of a head alone, by an integer zero point (``quantise_zero_point``).
    S, e_K and e_V are normalised to 0 ... 1 by their minimum and maximum, and are 0 where these are equal (our choice).
    Every token is stored as Q(k) and Q(v), recent ones included. A new token is packed before it is attended (the
    released code reads its key, not its value, exactly in that one step). Evicted tokens never return, and the budget
    holds while decoding.

    variant: ``code`` keeps a first part of tokens by attention alone (``first_ratio``). The best by
    lam * S + (1 - lam) * (2 - e_K - e_V) / 2 follow, and the recent tokens come last. S is normalised over the tokens
    of the layer at each step. Errors are normalised once, those of the prompt over its heads and tokens, those of a new
    token over its heads. ``paper`` keeps the best by lam * S + (1 - lam) * (2 - e_K - e_V), and the recent tokens,
    without which decoding could not begin. S, e_K and e_V are all normalised over the tokens of the layer at each step
    (the scope is our choice).
    first_ratio: tokens chosen by attention alone, as a fraction of the prompt. If a budget leaves heavy hitters less
    than 15 % of the prompt, a share first_ratio / 0.15 of them is chosen so (our choice). Only in ``code``.
    """

    id: ClassVar[str] = "qhitter"
    on_latents: ClassVar[str] = "it quantises keys and values apart, and a latent is both at once"
    packs: ClassVar[bool] = True
    packs_after_step: ClassVar[bool] = False

    bits: int = knob(4, Rule("8, 4, 3 or 2", CODE_BITS.holds))
    lam: float = knob(0.5, Rule("a weight, 0 to 1", lambda x: 0 <= x <= 1))
    variant: str = knob("code", one_of("code", "paper"))
    heavy_ratio: float | None = None
    recent_ratio: float | None = None
    first_ratio: float = knob(0.07, Rule("a fraction of the prompt, 0 or more and below 1", lambda x: 0 <= x < 1))
    v_alias: bool = False
    evict_after: bool | None = None

    def check(self) -> None:
        both_or_none = (self.heavy_ratio is None) == (self.recent_ratio is None)
        self.require("heavy_ratio", both_or_none, "given together with recent_ratio")
        if self.heavy_ratio is not None and self.recent_ratio is not None:
            least = self.attention_share
            inside = least <= self.heavy_ratio <= 1
            self.require("heavy_ratio", inside, f"a fraction of the prompt, at least first_ratio={least:g}")
            fits = 0 < self.recent_ratio <= 1 - self.heavy_ratio
            self.require("recent_ratio", fits, "a fraction of the prompt, above 0, at most 1 together with heavy_ratio")
        super().check()
        self.require("positions", not self.rolled, "true: rolled positions turn stored keys, which are quantised here")

    @property
    def attention_share(self) -> float:
        """The fraction of the prompt's tokens that stay by received attention alone: 0 in the paper's variant."""
        return self.first_ratio if self.variant == "code" else 0.0

    @property
    def prefill_key(self) -> str:
        if not self.v_alias:
            return ""
        return f"qhitter v_alias bits={self.bits}"

    def read(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.v_alias:
            return k, v
        # in released code the prompt's own attention reads Q(v), because that code quantises the values in place
        return k, self.pack_values(v).dequantise(v.dtype)

    @property
    def packer(self) -> Packer | None:
        return self

    def pack_keys(self, x: torch.Tensor) -> Packed:
        return quantise_zero_point(x, self.bits)

    def pack_values(self, x: torch.Tensor) -> Packed:
        return quantise_zero_point(x, self.bits)

    def window_size(self) -> int:
        # ``parts`` divides the budget: at least one of its tokens is recent
        return 1

    def needs(self, n: int) -> Needs:
        return Needs(colsums=True)

    def capacity(self, n: int) -> Capacity:
        by_attention, by_score, recent = self.parts(n)
        return Capacity(tokens=min(by_attention + by_score + recent, n), sinks=0, window=min(recent, n))

    def parts(self, n: int) -> tuple[int, int, int]:
        """Return (tokens kept by attention alone, tokens kept by score, recent tokens) after a prompt of n tokens."""
        first_ratio = self.attention_share
        if self.heavy_ratio is not None and self.recent_ratio is not None:
            by_attention = int(first_ratio * n)
            by_score = int((self.heavy_ratio - first_ratio) * n)
            # the newest token is always a recent one
            return by_attention, by_score, max(1, int(self.recent_ratio * n))
        total = self.generation_budget(n)
        heavy = total * HEAVY // PARTS
        # first_ratio * n tokens, but at most the share first_ratio / 0.15 of the heavy hitters (our choice)
        most_by_attention = int(first_ratio / PUBLISHED_HEAVY * heavy)
        by_attention = min(int(first_ratio * n), most_by_attention, heavy)
        return by_attention, heavy - by_attention, total - heavy

    def count_competing(self, n: int) -> int:
        return sum(self.parts(n))

    @property
    def spare(self) -> int:
        # the newest token competes one step late
        return 1 if self.evict_after else 0

    def token_counts(self, n: int) -> Mapping[str, int]:
        by_attention, _, recent = self.parts(n)
        # under evict_after one more token is stored: the newest one competes a step late
        return {"first": by_attention, "recent": recent + self.spare}

    def layout(self, blocks: list[Block], head_dim: int, itemsize: int) -> list[Block]:
        # no other stage divides a head's block
        (block,) = blocks
        # all channels of a token are one group; keys and values take equally many bytes
        packed_bytes = block.slots * run_bytes(head_dim, self.bits, group=head_dim)
        # fp32 numbers for each slot: S and the friendliness, or S, e_K and e_V
        numbers = 2 if self.variant == "code" else 3
        return [replace(block, key_bytes=packed_bytes, value_bytes=packed_bytes, slot_overhead=4 * numbers)]

    def initial_state(self, cache: LayerCache, obs: Observation) -> Mapping[str, torch.Tensor]:
        segment = ops.only_segment(cache)
        state = {"mass": group_mean(obs.received(), cache.heads)}
        # released code normalises the prompt's errors [Hk, n] over all heads and tokens
        for name, errors in self._measure_errors(segment.k, segment.v, dims=(0, 1)).items():
            state[name] = per_head(errors, cache.heads).clone()
        return state

    def new_token_state(self, k: torch.Tensor, v: torch.Tensor) -> Mapping[str, torch.Tensor]:
        # released code normalises the errors [B, H, T] of new tokens over the heads of each token
        return self._measure_errors(k, v, dims=(1,))

    def choose(self, cache: LayerCache, obs: Observation, modifiers: Sequence[Modifier]) -> LayerCache:
        cache = ops.expand(super().choose(cache, obs, modifiers))
        segment = ops.only_segment(cache)
        # every token that stays is stored as Q(k) and Q(v), recent ones included
        packed = segment.holding(self.pack_keys(segment.k), self.pack_values(segment.v))
        return replace(cache, segments=(packed,))

    def scores(self, cache: LayerCache, obs: Observation, capacity: Capacity) -> torch.Tensor:
        # the prompt is a batch of one: [1, H, n]
        state = {name: t[None] for name, t in ops.only_segment(cache).state.items()}
        positions = torch.arange(obs.n, device=state["mass"].device).expand_as(state["mass"])
        older = positions < obs.n - capacity.window
        by_attention, _, _ = self.parts(obs.prompt_tokens)
        # a prompt has no free slots
        scores = self._score_slots(
            state,
            valid=torch.ones_like(older),
            older=older,
            positions=positions,
            first_count=torch.tensor(min(by_attention, obs.n), device=positions.device),
        )
        return scores[0]

    def keep_scores(self, slots: Slots) -> torch.Tensor:
        older = ~recent_slots(slots, "recent")
        scores = self._score_slots(
            slots.state,
            valid=slots.valid,
            older=older & slots.valid,
            positions=slots.positions,
            first_count=slots.counts["first"],
        )
        return scores.masked_fill(~older, torch.inf)

    def fold(self, slots: Slots, probs: torch.Tensor) -> Mapping[str, torch.Tensor]:
        # S[h, j] += sum over the new queries i of A[h, i, j]
        return {"mass": slots.state["mass"] + group_rows(probs, slots.positions.shape[1]).sum(dim=2)}

    def _measure_errors(self, k: torch.Tensor, v: torch.Tensor, dims: tuple[int, ...]) -> dict[str, torch.Tensor]:
        """Return {name: state [...]} of tokens with exact k, v [..., D].

        Under ``paper`` the state is e_K and e_V. Under ``code`` it is the friendliness (2 - e_K - e_V) / 2, with errors
        normalised over the axes ``dims``.
        """
        # e_K = ||k - Q(k)||_2
        packed_keys = self.pack_keys(k).dequantise(torch.float32)
        k_loss = torch.linalg.vector_norm(k.float() - packed_keys, dim=-1)
        # e_V = ||v - Q(v)||_2
        packed_values = self.pack_values(v).dequantise(torch.float32)
        v_loss = torch.linalg.vector_norm(v.float() - packed_values, dim=-1)
        if self.variant == "paper":
            return {"k_loss": k_loss, "v_loss": v_loss}
        # (2 - e_K - e_V) / 2
        mean_loss = (_normalise(k_loss, dims) + _normalise(v_loss, dims)) / 2
        return {"friendly": 1 - mean_loss}

    def _score_slots(
        self,
        state: Mapping[str, torch.Tensor],
        valid: torch.Tensor,
        older: torch.Tensor,
        positions: torch.Tensor,
        first_count: torch.Tensor,
    ) -> torch.Tensor:
        """Return the scores of slots. The slots with the largest scores stay.

        All tensors but ``first_count`` are [batch, heads, slots].

        state: the running state by name. ``mass`` is the accumulated attention S of the class's formulas.
        valid: the slots in use. Their minimum and maximum normalise the attention (and, under ``paper``, the errors).
        older: the slots that are not among the recent tokens.
        positions: the positions of the slots' tokens.
        first_count: the number of older slots that stay by attention alone. They score above all others.
        """
        mass = state["mass"]
        if self.lam == 1:
            # with lam = 1 the score is the attention alone, and normalising it would not change the order
            return mass
        # the heads and slots of one layer are normalised together
        layer_dims = (1, 2)
        attention = _normalise(mass, layer_dims, valid)
        if self.variant == "paper":
            # lam * S + (1 - lam) * (2 - e_K - e_V), algorithm 1
            k_loss = _normalise(state["k_loss"], layer_dims, valid)
            v_loss = _normalise(state["v_loss"], layer_dims, valid)
            return self.lam * attention + (1 - self.lam) * (2 - k_loss - v_loss)
        # lam * S + (1 - lam) * (2 - e_K - e_V) / 2, at most 1
        scores = self.lam * attention + (1 - self.lam) * state["friendly"]
        # all scores are at most 1, so 2 puts the tokens that stay by attention alone above all others
        by_attention = older & (rank_slots(mass, positions, older) < first_count)
        return torch.where(by_attention, 2 + attention, scores)


def _normalise(numbers: torch.Tensor, dims: tuple[int, ...], among: torch.Tensor | None = None) -> torch.Tensor:
    """Return (x - min) / (max - min) of the numbers x, with minimum and maximum along ``dims``.

    The result is 0 where the two are equal. They are those of the entries marked in ``among``, by default of all.
    """
    # ``among`` restricts the minimum and the maximum, not the result
    for_minimum, for_maximum = numbers, numbers
    if among is not None:
        # an entry of +inf is never the minimum, and one of -inf never the maximum
        for_minimum = numbers.masked_fill(~among, torch.inf)
        for_maximum = numbers.masked_fill(~among, -torch.inf)
    low = for_minimum.amin(dim=dims, keepdim=True)
    high = for_maximum.amax(dim=dims, keepdim=True)
    return torch.where(high > low, (numbers - low) / (high - low), 0.0)

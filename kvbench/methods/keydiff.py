"""KeyDiff: keep the tokens whose keys differ most from the mean key (arXiv 2504.15364, section 3)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch.nn.functional import normalize

from kvbench.kv import ops
from kvbench.kv.observation import Observation
from kvbench.kv.segment import LayerCache, per_head
from kvbench.methods.core.base import Capacity, Selector, top_indices
from kvbench.methods.core.knobs import at_least, knob, one_of
from kvbench.methods.core.prefill_changing import BlockReader
from kvbench.methods.core.statistics import at_heads


@dataclass(frozen=True, kw_only=True)
class KeyDiff(Selector, BlockReader):
    """Score of token j = -cos(k_j, a) with the anchor a = mean over i of k_i / ||k_i||: no attention is looked at.

    variant ``once``: all tokens are scored together, after the prompt (kvpress's KeyDiffPress).
    variant ``block``: the first C tokens, then ``block`` more at a time, of which the best C go on (its BlockPress).
    variant ``paper``: the prompt is read in blocks of ``block`` tokens, of which the best C go on; a block attends
        itself and what was kept of those before it, so that the prefill is not exact.
    """

    id: ClassVar[str] = "keydiff"

    variant: str = knob("once", one_of("once", "block", "paper"))
    block: int = knob(128, at_least(1, "tokens"))

    @property
    def prefill_key(self) -> str:
        return f"keydiff.{self.revision}({self.knobs()})" if self.variant == "paper" else ""

    def while_decoding(self) -> Selector:
        return super(KeyDiff, replace(self, variant="once")).while_decoding()  # tokens held and new ones together

    def scores(self, cache: LayerCache, obs: Observation, capacity: Capacity) -> torch.Tensor:
        keys = ops.only_segment(cache).k
        if self.variant == "once":
            scores = obs.once(KeyDiff, lambda: difference(keys))
        else:
            *_, (_, held) = self.held_before(keys, min(cache.heads, len(keys)), capacity.tokens)
            scores = torch.zeros(held.shape[0], obs.n, device=keys.device).scatter_(1, held, 1.0)
        return at_heads(scores, cache.heads)

    def held_before(self, keys: torch.Tensor, heads: int, budget: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first token, tokens [heads, m] held before it) of each block of keys [Hk, n, D], and of their end."""
        n = keys.shape[1]
        first = budget if self.variant == "block" else 0
        held = torch.arange(first, device=keys.device).expand(heads, -1)
        for start in range(first, n, self.block):
            yield start, held
            new = torch.arange(start, min(start + self.block, n), device=keys.device)
            held = torch.cat([held, new.expand(heads, -1)], dim=1)
            if held.shape[1] > budget:
                index = per_head(held, len(keys))[..., None].expand(-1, -1, keys.shape[2])
                scores = at_heads(difference(keys.gather(1, index)), heads)
                held = held.gather(1, top_indices(scores, budget))
        yield n, held

    def blocks(
        self, keys: torch.Tensor, n: int, layer: int, n_layers: int, heads: int
    ) -> list[tuple[int, torch.Tensor]]:
        budget = self.budget(n, layer, n_layers)
        if self.variant != "paper" or budget >= keys.shape[1]:
            return []
        held = [*self.held_before(keys, min(heads, len(keys)), budget)][:-1]
        return [(start, per_head(index, len(keys))) for start, index in held]


def difference(keys: torch.Tensor) -> torch.Tensor:
    """Return -cos(k_j, a) [Hk, n] of keys [Hk, n, D] with their anchor a."""
    unit = normalize(keys.float(), dim=-1)
    anchor = normalize(unit.mean(dim=1, keepdim=True), dim=-1)
    return -(unit * anchor).sum(dim=-1)

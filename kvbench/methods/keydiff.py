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
from kvbench.methods.core.base import Selector
from kvbench.methods.core.contract import Capacity, top_indices
from kvbench.methods.core.knobs import at_least, knob, one_of
from kvbench.methods.core.prefill_changing import BlockReader
from kvbench.methods.core.statistics import at_heads


@dataclass(frozen=True, kw_only=True)
class KeyDiff(Selector, BlockReader):
    """Score of token j = -cos(k_j, a) with the anchor a = mean over i of k_i / ||k_i||. It looks at no attention.

    variant ``once``: all tokens are scored together, after the prompt (kvpress's KeyDiffPress).
    variant ``block``: tokens are scored in rounds. The first C tokens are kept, then ``block`` more join them in each
    round, and the best C go on (kvpress's BlockPress). Each round takes the anchor of its own tokens.
    variant ``paper``: the same rounds begin with no tokens, and the prompt is read in these blocks. A block attends
    itself and the tokens kept before it. The prefill is therefore not exact.
    """

    id: ClassVar[str] = "keydiff"

    variant: str = knob("once", one_of("once", "block", "paper"))
    block: int = knob(128, at_least(1, "tokens"))

    @property
    def prefill_key(self) -> str:
        # only the paper's variant changes how the prompt is computed
        if self.variant != "paper":
            return ""
        return f"keydiff.{self.revision}({self.knobs()})"

    def while_decoding(self) -> Selector:
        # while decoding, the cached tokens and the new ones are ranked together: there are no blocks of a prompt
        ranking_once = replace(self, variant="once")
        # the base class's method, because this one would call itself
        return super(KeyDiff, ranking_once).while_decoding()

    def scores(self, cache: LayerCache, obs: Observation, capacity: Capacity) -> torch.Tensor:
        keys = ops.only_segment(cache).k
        if self.variant == "once":
            # all chains that see this layer share the scores
            scores = obs.once(KeyDiff, lambda: compute_anchor_scores(keys))
            return at_heads(scores, cache.heads)
        # tokens are chosen for each kv head, or for all of them at once if latents are stored as one head
        choosing_heads = min(cache.heads, len(keys))
        # the last pair has the tokens that stay in the end
        blocks = list(self.iterate_blocks(keys, choosing_heads, capacity.tokens))
        _, kept_tokens = blocks[-1]
        # tokens that are kept after the last block score 1, all others 0
        scores = torch.zeros(choosing_heads, obs.n, device=keys.device).scatter_(1, kept_tokens, 1.0)
        return at_heads(scores, cache.heads)

    def iterate_blocks(self, keys: torch.Tensor, heads: int, budget: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield for each block of the prompt (its first token, the earlier tokens [heads, m] that stay), as indices.

        The last pair is (n, the tokens that stay in the end).

        keys: [Hk, n, D], the keys of one layer.
        heads: the number of heads that choose tokens, Hk or 1.
        budget: C, less than n.
        """
        n = keys.shape[1]
        # variant ``block`` (kvpress) begins with C tokens, ``paper`` with none
        first = budget if self.variant == "block" else 0
        kept_tokens = torch.arange(first, device=keys.device).expand(heads, -1)
        for start in range(first, n, self.block):
            yield start, kept_tokens
            new = torch.arange(start, min(start + self.block, n), device=keys.device)
            kept_tokens = torch.cat([kept_tokens, new.expand(heads, -1)], dim=1)
            if kept_tokens.shape[1] > budget:
                # [Hk, m, D]: the anchor is the mean of the kept and new keys only
                index = per_head(kept_tokens, len(keys))[..., None].expand(-1, -1, keys.shape[2])
                candidate_keys = keys.gather(1, index)
                scores = at_heads(compute_anchor_scores(candidate_keys), heads)
                # ``top_indices`` counts among the candidates, which have their own indices in the prompt
                kept_tokens = kept_tokens.gather(1, top_indices(scores, budget))
        yield n, kept_tokens

    def blocks(
        self, keys: torch.Tensor, n: int, layer: int, n_layers: int, heads: int
    ) -> list[tuple[int, torch.Tensor]]:
        budget = self.budget(n, layer, n_layers)
        if self.variant != "paper" or budget >= keys.shape[1]:
            return []
        # tokens are chosen for each kv head, or for all of them at once if latents are stored as one head
        choosing_heads = min(heads, len(keys))
        # the last pair is the end of the prompt and begins no block
        *blocks, _ = self.iterate_blocks(keys, choosing_heads, budget)
        return [(start, per_head(kept_tokens, len(keys))) for start, kept_tokens in blocks]


def compute_anchor_scores(keys: torch.Tensor) -> torch.Tensor:
    """Return the scores -cos(k_j, a) [Hk, n] of keys [Hk, n, D], with the anchor a of these keys."""
    # k_j / ||k_j||
    unit = normalize(keys.float(), dim=-1)
    # a = mean over j of k_j / ||k_j||, brought to length 1 (section 3)
    anchor = normalize(unit.mean(dim=1, keepdim=True), dim=-1)
    # -cos(k_j, a)
    return -(unit * anchor).sum(dim=-1)

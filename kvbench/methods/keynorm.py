"""KeyNorm: keep the tokens whose keys are short, as those tend to be attended most (arXiv 2406.11430)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.kv import ops
from kvbench.kv.observation import Observation
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.base import Selector
from kvbench.methods.core.contract import Capacity
from kvbench.methods.core.knobs import at_least, knob
from kvbench.methods.core.statistics import at_heads


@dataclass(frozen=True, kw_only=True)
class KeyNorm(Selector):
    """Score of token j = -||k_j||_2: the C tokens with the shortest keys stay. RoPE changes no norm, and so no score.

    protect_recent: the number of last tokens that always stay.
    """

    id: ClassVar[str] = "keynorm"

    protect_recent: int = knob(0, at_least(0, "tokens"))

    def window_size(self) -> int:
        return self.protect_recent

    def scores(self, cache: LayerCache, obs: Observation, capacity: Capacity) -> torch.Tensor:
        # ||k_j||_2; all chains that see this layer share the norms
        norms = obs.once(KeyNorm, lambda: ops.only_segment(cache).k.float().norm(dim=-1))
        if obs.partial:
            # While decoding, equal tokens of the text have equal norms in the first layer but for rounding, which
            # differs between batches. Norms are rounded to 12 bits, so that these errors decide nothing.
            # norm = mantissa * 2^exponent with a mantissa from 0.5 to 1
            mantissa, exponent = torch.frexp(norms)
            norms = torch.ldexp((mantissa * 2**12).round() / 2**12, exponent)
        return at_heads(-norms, cache.heads)

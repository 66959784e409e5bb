"""Random selection: the control that a method must beat to show that its scores mean something.

It has no paper of its own. The same control is RandomPress in https://github.com/NVIDIA/kvpress.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.kv.observation import Observation
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.base import Selector
from kvbench.methods.core.contract import Capacity
from kvbench.methods.core.knobs import at_least, knob


@dataclass(frozen=True, kw_only=True)
class Random(Selector):
    """Score = uniform noise per head and token: C tokens drawn without replacement. No token is protected.

    The draw depends on (seed, prompt, layer) alone. It is equal between runs and devices, and different between prompts
    and layers. A larger budget keeps all tokens of a smaller one.
    """

    id: ClassVar[str] = "random"

    seed: int = knob(0, at_least(0))

    def scores(self, cache: LayerCache, obs: Observation, capacity: Capacity) -> torch.Tensor:
        # hashed, because the numbers of neighbouring seeds start alike
        digest = hashlib.blake2b(f"{self.seed}/{obs.prompt}/{obs.layer}".encode(), digest_size=4).digest()
        # drawn on the CPU, because devices draw differently
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        # score[h, j] ~ U(0, 1): the C largest are C tokens without replacement
        noise = torch.rand(cache.heads, obs.n, generator=generator)
        return noise.to(cache.segments[0].k.device)

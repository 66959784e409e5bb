"""StreamingLLM: keep the first tokens, which soak up attention, and the most recent (arXiv 2309.17453, section 3.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.kv.observation import Observation
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.contract import Capacity
from kvbench.methods.core.evicting import EvictingSelector
from kvbench.methods.core.knobs import at_least, knob, one_of
from kvbench.storage.roles import Slots


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(EvictingSelector):
    """Keep the first S tokens, the sinks, and the last C - S, the same in every head.

    mode: ``static`` evicts once after the prompt, keeps original positions and lets the cache grow while decoding (as
    KVCache-Factory does). ``mask`` holds C tokens at their original positions while decoding: each new token takes the
    place of the oldest one behind the sinks (as VATP's code does). ``rolled`` does the same, but the keys take the
    indices of their slots as positions, as in the paper. The query takes the index of the last slot. ``mask`` with
    ``positions=rolled`` means the same as ``rolled``.
    """

    id: ClassVar[str] = "streamingllm"
    shared: ClassVar[bool] = True

    sinks: int = knob(4, at_least(0, "tokens"))
    mode: str = knob("static", one_of("static", "mask", "rolled"))

    def check(self) -> None:
        # YAML reads true as a boolean; null is no contradiction, because mode=rolled decides then
        contradiction = self.mode == "rolled" and str(self.positions).lower() == "true"
        self.require("positions", not contradiction, "mode=rolled is rolled positions, mode=mask keeps true ones")
        super().check()
        if self.rolled:
            # mode=rolled and mode=mask with positions=rolled are one method, under one identity; a frozen dataclass can
            # set its own fields only by object.__setattr__
            object.__setattr__(self, "mode", "rolled")
            object.__setattr__(self, "positions", None)

    @property
    def evicts(self) -> bool:
        return self.mode != "static"

    @property
    def rolled(self) -> bool:
        return self.mode == "rolled" or super().rolled

    def sink_size(self) -> int:
        return self.sinks

    def scores(self, cache: LayerCache, obs: Observation, capacity: Capacity) -> torch.Tensor:
        # score[j] = j: beside the sinks, which always stay, the most recent tokens score highest
        return torch.arange(obs.n, device=cache.segments[0].k.device)[None]

    def token_counts(self, n: int) -> Mapping[str, int]:
        return {"first": self.capacity(n).sinks}

    def keep_scores(self, slots: Slots) -> torch.Tensor:
        # the oldest token behind the sinks has the lowest position and goes first; fp64 holds every position exactly
        return slots.positions.double().masked_fill(slots.positions < slots.counts["first"], torch.inf)

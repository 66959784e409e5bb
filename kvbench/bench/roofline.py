"""What a decode step must move, and how near it comes to the time that the device's memory needs for that."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from statistics import median

import torch
from transformers import PreTrainedModel

from kvbench.bench.architecture import step_weight_bytes
from kvbench.cache.model_shape import from_config
from kvbench.engine.memory import release
from kvbench.models.interface import synchronise

COPIED = {"cuda": 2**30, "cpu": 2**28}
REPEATS = 7


@dataclass(frozen=True)
class Roofline:
    """One mean decode step: bytes it reads of weights and cache and writes of new tokens, and the time of that.

    ``bound`` is seconds at ``bandwidth`` (bytes a second, read and written, of a large copy); ``fraction`` is bound
    over the measured step: 1 is as fast as memory allows.
    """

    weights: int
    cache: float
    written: int
    bandwidth: float
    step: float

    @property
    def moved(self) -> float:
        return self.weights + self.cache + self.written

    @property
    def bound(self) -> float:
        return self.moved / self.bandwidth

    @property
    def fraction(self) -> float:
        return self.bound / self.step

    def as_json(self) -> dict[str, float]:
        """Plain data."""
        return {**asdict(self), "moved": self.moved, "bound": self.bound, "fraction": self.fraction}


def of(model: PreTrainedModel, batch: int, cache_bytes: float, bandwidth: float, step: float) -> Roofline:
    """Of a step of ``step`` seconds with ``batch`` rows over ``cache_bytes`` of stored tokens.

    Each row writes one token's keys and values, as they are.
    """
    shape = from_config(model.config)
    written = batch * 2 * shape.layers * shape.kv_heads * shape.head_dim * next(model.parameters()).element_size()
    return Roofline(step_weight_bytes(model, batch), cache_bytes, written, bandwidth, step)


def copy_bandwidth(device: torch.device, size: int | None = None) -> float:
    """Bytes a second, read and written, of the device's own copy of ``size`` bytes: the median of several."""
    asked = size or COPIED.get(device.type, COPIED["cpu"])
    if device.type == "cuda":
        # what others have given up is still PyTorch's, and no free memory
        release()
        # a quarter of what is free, so that it fits beside a large model
        asked = min(asked, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.zeros(asked, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    spent = []
    for _ in range(REPEATS):
        synchronise(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronise(device)
        spent.append(time.perf_counter() - start)
    return 2 * asked / median(spent[1:])

"""The bytes that a decode step must move, and its time over the least that the device's memory needs for them."""

from __future__ import annotations

import time
from statistics import median

import torch
from transformers import PreTrainedModel

from kvbench.bench.architecture import step_weight_bytes
from kvbench.engine.memory import release
from kvbench.kv.model_shape import from_config
from kvbench.models.interface import synchronise

COPIED = {"cuda": 2**30, "cpu": 2**28}
"""The bytes that are copied to find a device's bandwidth: far more than its last-level cache holds."""
REPEATS = 7


def step_roofline(
    model: PreTrainedModel, batch: int, cache_bytes: float, bandwidth: float, step: float
) -> dict[str, float]:
    """Return the bytes that a mean decode step of ``step`` seconds moves, for ``batch`` rows over ``cache_bytes``.

    weights, cache: the bytes that it reads.
    written: the bytes of each row's new token.
    bandwidth: bytes a second, read and written, of a large copy.
    moved: all those bytes together.
    bound: the seconds that moving them takes at ``bandwidth``.
    fraction: ``bound`` over the measured step; at 1 a step is as fast as memory allows.
    """
    shape = from_config(model.config)
    itemsize = next(model.parameters()).element_size()
    weights = step_weight_bytes(model, batch)
    # one new token of each row, taken as exact keys and values in the model's number type
    written = shape.full_bytes(batch, itemsize)
    moved = weights + cache_bytes + written
    bound = moved / bandwidth
    return {
        "weights": weights,
        "cache": cache_bytes,
        "written": written,
        "bandwidth": bandwidth,
        "step": step,
        "moved": moved,
        "bound": bound,
        "fraction": bound / step,
    }


def copy_bandwidth(device: torch.device, size: int | None = None) -> float:
    """Return the bytes a second, read and written, of the device's own copy of ``size`` bytes, as a median."""
    copied = size or COPIED.get(device.type, COPIED["cpu"])
    if device.type == "cuda":
        # freed tensors stay in PyTorch's pool and do not count as free memory until released
        release()
        # a quarter of what is free, so that it fits beside a large model
        copied = min(copied, torch.cuda.mem_get_info(device)[0] // 4)
    source = torch.zeros(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(REPEATS):
        synchronise(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    # the first copy warms up, and each byte is read once and written once
    return 2 * copied / median(seconds[1:])

"""The bytes that a decode step must move, and how close its time comes to the limit of the device's memory."""

from __future__ import annotations

import time
from statistics import median

import torch
from transformers import PreTrainedModel

from kvbench.bench.architecture import count_step_weight_bytes
from kvbench.engine.memory import release
from kvbench.models.interface import synchronise
from kvbench.models.traits import shape_of

COPIED = {"cuda": 2**30, "cpu": 2**28}
"""The size in bytes of the copy that measures a device's bandwidth, far more than its last-level cache holds."""
REPEATS = 7
"""The number of copies. The first one warms up and is not counted."""


def compute_roofline(
    model: PreTrainedModel, batch: int, cache_bytes: float, bandwidth: float, step: float
) -> dict[str, float]:
    """Return how close a decode step comes to the bandwidth limit, as sizes in bytes and times in seconds.

    ``step`` is the mean time of a step in seconds, for ``batch`` rows whose caches hold ``cache_bytes``. The result
    has:

    weights: the bytes of weights that the step reads.
    cache: the bytes of the cache that the step reads.
    written: the bytes that the step writes, one new token for each row.
    bandwidth: the bytes that a large copy reads and writes in a second.
    moved: weights + cache + written.
    bound: the seconds that moving ``moved`` bytes takes at ``bandwidth``.
    step: the measured time.
    fraction: ``bound`` over ``step``. At 1 a step is as fast as memory allows.
    """
    shape = shape_of(model.config)
    itemsize = next(model.parameters()).element_size()
    weights = count_step_weight_bytes(model, batch)
    # each row writes the exact keys and values of one new token, and its states anew. ``full_bytes`` of ``batch``
    # tokens counts these keys and values, but the states of only one text
    states = shape.state_bytes(itemsize)
    written = shape.full_bytes(batch, itemsize) - states + batch * states
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


def measure_bandwidth(device: torch.device, size: int | None = None) -> float:
    """Return the device's bandwidth in bytes read and written per second: the median of several large copies.

    size: the bytes of one copy; None for the device's entry of COPIED. On a GPU with little free memory it is smaller.
    """
    copied = size or COPIED.get(device.type, COPIED["cpu"])
    if device.type == "cuda":
        # PyTorch keeps freed tensors in its pool, and they do not count as free memory until they are released
        release()
        free_memory, _ = torch.cuda.mem_get_info(device)
        # source and target together take at most half of the free memory
        copied = min(copied, free_memory // 4)
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

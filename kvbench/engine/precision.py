"""Half precision: the reason for a run's dtype, and the effect of rounding alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TypedDict

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.engine.memory import free_bytes
from kvbench.engine.prefill import prefill_chains
from kvbench.methods.core.chain import Chain

TRIED_S = 0.2
"""The seconds for which matrix products are timed."""
FASTER = 1.2
"""A dtype counts as faster if its products take at most 1 / FASTER of the other dtype's time. Less may be noise."""


class Rounding(TypedDict):
    """The effect of half precision alone: logits after some prompts, compared with those of the same weights in fp32.

    prompts: the number of prompts.
    same: the number of prompts after which both have the same likeliest token.
    largest: the largest absolute difference of a logit.
    """

    prompts: int
    same: int
    largest: float


@cache
def measure_bf16_speed() -> float:
    """Return how many times as long a matrix product takes in fp32 as in bf16 on this CPU. It is timed once a process.

    Units such as AMX make bf16 faster on many CPUs, but not on all that have such a unit.
    """
    # the factors are 256 tokens of a prompt, and a matrix of the size that models of a billion parameters have
    tokens, weights = torch.randn(256, 2048), torch.randn(2048, 2048)
    seconds: dict[torch.dtype, list[float]] = {torch.float32: [], torch.bfloat16: []}
    factors = {dtype: (tokens.to(dtype), weights.to(dtype)) for dtype in seconds}
    end = time.perf_counter() + TRIED_S
    # the first product of a dtype also pays for its preparation, so at least two are needed
    while time.perf_counter() < end or len(seconds[torch.bfloat16]) < 2:
        for dtype, times in seconds.items():
            start = time.perf_counter()
            torch.nn.functional.linear(*factors[dtype])
            times.append(time.perf_counter() - start)
    # the fastest of each: anything else that runs makes a product slower, never faster
    return min(seconds[torch.float32]) / min(seconds[torch.bfloat16])


def explain_dtype(setting: str, dtype: str, device: torch.device) -> str:
    """Return a line that states a run's ``dtype`` with its reason. ``setting`` is the user's dtype= option."""
    is_auto = setting == "auto"
    if device.type != "cpu":
        if is_auto:
            return f"{dtype}: auto on a GPU"
        return f"{dtype}: as asked"
    if dtype == "float16":
        return "float16: as asked; slow on a CPU"
    tried = f"products in bfloat16 take {1 / measure_bf16_speed():.2g} times as long as in float32 here"
    if dtype == "bfloat16":
        return f"bfloat16: as asked; {tried}"
    if not is_auto:
        return f"float32: as asked; {tried}"
    if measure_bf16_speed() < FASTER:
        return f"float32: auto on a CPU; {tried}"
    return f"float32: auto on a CPU; {tried}. dtype=bfloat16 reads prompts faster and rounds more"


def has_better_dtype(setting: str, dtype: str, device: torch.device) -> bool:
    """Return True if another dtype than ``dtype`` is faster on this machine, and the user has not decided for fp32."""
    if device.type != "cpu":
        return False
    if dtype == "float32":
        # a user who asked for fp32 gets no advice
        return setting == "auto" and measure_bf16_speed() >= FASTER
    return dtype == "float16" or measure_bf16_speed() <= 1 / FASTER


def compare_rounding(model: PreTrainedModel, prompts: Sequence[Tensor]) -> Rounding | None:
    """Return how the full cache's logits after ``prompts`` [n] differ from the logits of the same weights in fp32.

    Returns None for a model in fp32, for one that is spread over devices, or if memory cannot hold its fp32 weights.
    """
    # the same model object is measured in both dtypes, and its weights take twice their bytes in fp32
    half = model.dtype
    if half == torch.float32:
        return None
    # transformers sets this attribute on a model that it has spread over devices
    is_spread = bool(getattr(model, "hf_device_map", None))
    weight_bytes = sum(p.nbytes for p in model.parameters())
    if is_spread or 2 * weight_bytes > free_bytes(model.device):
        return None
    half_logits = [_compute_last_logits(model, ids) for ids in prompts]
    with _in_fp32(model, half):
        exact_logits = [_compute_last_logits(model, ids) for ids in prompts]
    largest_differences = []  # each prompt's largest difference of a logit
    same = 0
    for rounded, exact in zip(half_logits, exact_logits, strict=True):
        largest_differences.append(float((rounded - exact).abs().max()))
        if rounded.argmax() == exact.argmax():
            same += 1
    return {"prompts": len(largest_differences), "same": same, "largest": max(largest_differences)}


def describe_rounding(comparison: Rounding, dtype: str) -> str:
    """Return the result of ``compare_rounding`` for a run in ``dtype`` as a few sentences."""
    n = comparison["prompts"]
    tasks = "tasks" if n > 1 else "task"
    return (
        f"Rounding to {dtype} alone: against the same weights in float32 the logits after the first prompt of "
        f"{n} {tasks} differ by at most {comparison['largest']:.2g}, and the first choice is the "
        f"same after {comparison['same']} of {n}. Several answers at once round otherwise than one: batch_rows=1 "
        "decodes full as model.generate does."
    )


def _compute_last_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the logits [V] after a prompt [n] under the full cache, in fp32."""
    (cache,) = prefill_chains(model, ids, [Chain()])
    return cache.logits.float()


@contextmanager
def _in_fp32(model: PreTrainedModel, half: torch.dtype) -> Iterator[None]:
    """While the context is open, hold the weights of dtype ``half`` in fp32, which represents them exactly."""
    weights = [p for p in model.parameters() if p.dtype == half]
    try:
        for p in weights:
            # the parameter objects stay the same, so that tied weights stay tied
            p.data = p.data.float()
        yield
    finally:
        # every fp32 value came from a half-precision value, so rounding back loses nothing
        for p in weights:
            p.data = p.data.to(half)

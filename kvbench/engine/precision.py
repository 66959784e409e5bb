"""Half precision: the reason for a run's dtype, and the effect of rounding alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.engine.memory import free_bytes
from kvbench.engine.prefill import prefill_chains
from kvbench.methods.core.chain import Chain

UNITS = {"avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX", "bf16": "Arm's BF16"}
"""Units of CPUs that multiply bf16. The keys are their flags in /proc/cpuinfo."""


class Rounding(TypedDict):
    """The effect of half precision alone: logits after some prompts, compared with the same weights in fp32.

    prompts: the number of prompts.
    same: the number of prompts after which the first choice is the same.
    largest: the largest difference of a logit.
    """

    prompts: int
    same: int
    largest: float


@cache
def bf16_units() -> tuple[str, ...] | None:
    """Return the units of this CPU that multiply bf16, by their names in UNITS, or None if the system does not tell."""
    with suppress(OSError):
        flags: set[str] = set()
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            # x86 calls the line "flags", Arm calls it "Features"
            if line.startswith(("flags", "Features")):
                flags.update(line.split())
        if not flags:
            return None
        return tuple(name for flag, name in UNITS.items() if flag in flags)
    return None


def dtype_reason(setting: str, dtype: str, device: torch.device) -> str:
    """Return a run's dtype with its reason, in one line. ``setting`` is the user's dtype=."""
    is_auto = setting == "auto"
    if device.type != "cpu":
        if is_auto:
            return f"{dtype}: auto on a GPU"
        return f"{dtype}: as asked"
    unit_names = list(UNITS.values())
    names = f"{', '.join(unit_names[:-1])} or {unit_names[-1]}"
    units = bf16_units()
    if units is None:
        this_cpu = "of which this system does not tell"
    elif units:
        this_cpu = f"which this one has ({', '.join(units)})"
    else:
        this_cpu = "which this one has not"
    if dtype == "float32":
        reason = "as asked"
        if is_auto:
            reason = "auto on a CPU"
        return f"float32: {reason}; dtype=bfloat16 can read prompts faster on CPUs with {names}, {this_cpu}"
    if dtype == "float16":
        return "float16: as asked; slow on a CPU"
    return f"bfloat16: as asked; on a CPU it is fast only with {names}, {this_cpu}"


def has_better_dtype(setting: str, dtype: str, device: torch.device) -> bool:
    """Return True if ``dtype_reason`` names a better dtype for this machine."""
    if device.type != "cpu":
        return False
    if dtype == "float32":
        # a user who asked for fp32 gets no advice
        return setting == "auto" and bool(bf16_units())
    # half precision is slow on a CPU without such a unit
    return not bf16_units()


def compare_rounding(model: PreTrainedModel, prompts: Sequence[Tensor]) -> Rounding | None:
    """Return how the full cache's logits after ``prompts`` [n] differ from the logits of the same weights in fp32.

    Returns None for a model in fp32, or if memory cannot hold the model at twice its size.
    """
    # the same model is measured in both dtypes, and its weights take twice their bytes in fp32
    half, device = model.dtype, model.device
    weight_bytes = sum(p.nbytes for p in model.parameters())
    if half == torch.float32 or getattr(model, "hf_device_map", None) or 2 * weight_bytes > free_bytes(device):
        return None
    half_logits = [_compute_last_logits(model, ids) for ids in prompts]
    with _in_fp32(model, half):
        exact_logits = [_compute_last_logits(model, ids) for ids in prompts]
    differences = []
    same = 0
    for rounded, exact in zip(half_logits, exact_logits, strict=True):
        differences.append(float((rounded - exact).abs().max()))
        if rounded.argmax() == exact.argmax():
            same += 1
    return {"prompts": len(differences), "same": same, "largest": max(differences)}


def rounding_note(comparison: Rounding, dtype: str) -> str:
    """Describe the result of ``compare_rounding`` in a few sentences."""
    n = comparison["prompts"]
    tasks = "task"
    if n > 1:
        tasks = "tasks"
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
    """Convert the weights of dtype ``half`` to fp32, which represents them exactly. On exit they are restored."""
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

"""Half precision: the reason for a run's dtype, and the effect of rounding alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.engine.memory import free_bytes
from kvbench.engine.prefill import prefill_chains
from kvbench.methods.core.chain import Chain

UNITS = {"avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX", "bf16": "Arm's BF16"}
"""Units of CPUs that multiply bf16, by their flags in /proc/cpuinfo."""


@cache
def bf16_units() -> tuple[str, ...] | None:
    """Return the units that multiply bf16 of this CPU, named as in UNITS; None where its system does not tell."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = {word for line in lines if line.startswith(("flags", "Features")) for word in line.split()}
        return tuple(name for flag, name in UNITS.items() if flag in flags) if flags else None
    return None


def dtype_reason(setting: str, dtype: str, device: torch.device) -> str:
    """Return the dtype of a run with its reason, in one line; ``setting`` is the user's dtype=."""
    if device.type != "cpu":
        return f"{dtype}: {'auto on a GPU' if setting == 'auto' else 'as asked'}"
    units, unit_names = bf16_units(), list(UNITS.values())
    names = f"{', '.join(unit_names[:-1])} or {unit_names[-1]}"
    this_cpu = f"which this one has ({', '.join(units)})" if units else "which this one has not"
    this_cpu = this_cpu if units is not None else "of which this system does not tell"
    if dtype == "float32":
        reason = "auto on a CPU" if setting == "auto" else "as asked"
        return f"float32: {reason}; dtype=bfloat16 can read prompts faster on CPUs with {names}, {this_cpu}"
    if dtype == "float16":
        return "float16: as asked; slow on a CPU"
    return f"bfloat16: as asked; on a CPU it is fast only with {names}, {this_cpu}"


def has_better_dtype(setting: str, dtype: str, device: torch.device) -> bool:
    """Tell whether ``dtype_reason`` names a better dtype for this machine."""
    if device.type != "cpu":
        return False
    return bool(bf16_units()) if dtype == "float32" and setting == "auto" else dtype != "float32" and not bf16_units()


def compare_rounding(model: PreTrainedModel, prompts: Sequence[Tensor]) -> dict[str, Any] | None:
    """Return how the full cache's logits after ``prompts`` [n] differ from those of the same weights in fp32.

    prompts: the number of prompts.
    same: the number of prompts after which the first choice is the same.
    largest: the largest difference of a logit.

    Returns None for a model in fp32, and where memory does not hold it at twice its size.
    """
    half, device = model.dtype, model.device
    weights = sum(p.nbytes for p in model.parameters())
    if half == torch.float32 or getattr(model, "hf_device_map", None) or 2 * weights > free_bytes(device):
        return None
    rounded = [_logits(model, ids) for ids in prompts]
    with _in_fp32(model, half):
        exact = [_logits(model, ids) for ids in prompts]
    pairs = list(zip(rounded, exact, strict=True))
    largest = max(float((a - b).abs().max()) for a, b in pairs)
    return {"prompts": len(pairs), "same": sum(int(a.argmax() == b.argmax()) for a, b in pairs), "largest": largest}


def rounding_note(comparison: dict[str, Any], dtype: str) -> str:
    """Return the result of ``compare_rounding`` in a sentence."""
    n, equal = comparison["prompts"], comparison["same"]
    return (
        f"Rounding to {dtype} alone: against the same weights in float32 the logits after the first prompt of "
        f"{n} task{'s' if n > 1 else ''} differ by at most {comparison['largest']:.2g}, and the first choice is the "
        f"same after {equal} of {n}. Several answers at once round otherwise than one: batch_rows=1 decodes full as "
        "model.generate does."
    )


def _logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return prefill_chains(model, ids, [Chain()])[0].logits.float()


@contextmanager
def _in_fp32(model: PreTrainedModel, half: torch.dtype) -> Iterator[None]:
    """Turn the weights of dtype ``half`` to fp32, which holds them exactly; on exit they are restored."""
    weights = [p for p in model.parameters() if p.dtype == half]
    try:
        for p in weights:
            p.data = p.data.float()
        yield
    finally:
        for p in weights:
            p.data = p.data.to(half)

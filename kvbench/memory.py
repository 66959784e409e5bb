"""Memory that is free for caches, and what running out of it looks like."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

GIB = 2**30
USED_SHARE = 0.7
"""Of the free memory, what ``memory=auto`` takes: activations, padding and other processes need the rest."""


def limit(asked: float | None, device: torch.device) -> int:
    """Bytes that caches may take: ``asked`` in GiB, or a share of what is free on ``device`` now."""
    return int(asked * GIB) if asked is not None else int(USED_SHARE * free_bytes(device))


def free_bytes(device: torch.device) -> int:
    """Bytes that this process can still take on ``device``: of a GPU, or of the machine and its control group."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # what PyTorch holds without using it is free for our tensors, too
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return min(_free_of_machine(), *_free_of_group())


def _free_of_machine() -> int:
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with suppress(ValueError, OSError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 4 * GIB


def _free_of_group() -> Iterator[int]:
    """What Linux control groups (versions 2 and 1) leave of their limits; at least one number."""
    base = Path("/sys/fs/cgroup")
    for most, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):
            yield max(0, int((base / most).read_text()) - int((base / used).read_text()))
    yield 2**62


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on the CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        sign in text for sign in ("can't allocate memory", "DefaultCPUAllocator", "CUDA out of memory")
    )


def release() -> None:
    """Give back what an allocation that failed has left behind."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

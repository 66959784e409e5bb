"""Free memory for caches, out-of-memory errors, and work that continues in smaller parts after such an error."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from kvbench.base.errors import KvbenchError
from kvbench.models.interface import attention_modules

Item = TypeVar("Item")
Result = TypeVar("Result")

GIB = 2**30
CONTROL_GROUP = Path("/sys/fs/cgroup")
USED_SHARE = 0.7
"""The share of free memory that ``memory=auto`` takes. Activations, padding and other processes need the rest."""
OUT_OF_MEMORY = (
    "can't allocate memory",
    "DefaultCPUAllocator",
    "CUDA out of memory",
    "CUDA error: out of memory",  # from the driver, if the allocation bypasses PyTorch's allocator
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
"""Texts in the messages of out-of-memory errors that have no type of their own."""


def process_memory(key: str) -> int:
    """Return how many bytes of memory this process takes, by the measure that Linux names ``key``.

    VmRSS counts the bytes resident now, VmHWM the most that were ever resident, VmData the process's own data.
    """
    # a line of this file is "VmRSS:   12345 kB"; other systems than Linux have no such file
    status = Path("/proc/self/status")
    lines: list[str] = []
    if status.exists():
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
    for line in lines:
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024  # the file counts in kB
    raise KvbenchError(f"/proc/self/status has no {key}: a process's memory is measured on Linux")


def measure_device_shares(model: PreTrainedModel) -> dict[torch.device, float]:
    """Return each device's share of a model's attention layers, which is also its share of the model's caches."""
    device_of_layer = [next(module.parameters()).device for module in attention_modules(model)]
    return {device: count / len(device_of_layer) for device, count in Counter(device_of_layer).items()}


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on ``device``.

    On a CPU, the machine's free memory and the limits of control groups (of a container, for example) both count.
    """
    if device.type == "cuda":
        device_free, _ = torch.cuda.mem_get_info(device)
        # memory that PyTorch has reserved but does not use is free for our tensors as well
        return int(device_free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return min(_read_machine_free_bytes(), *_read_group_free_bytes())


def _read_machine_free_bytes() -> int:
    """Return the machine's free bytes: the number that Linux states, else half of the memory, else a guess of 4 GiB."""
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024  # the file counts in kB
    # other systems than Linux have no such file
    with suppress(ValueError, OSError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 4 * GIB


def _read_group_free_bytes() -> Iterator[int]:
    """Yield how many bytes each Linux control group (versions 2 and 1) still allows. At least one number is yielded."""
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        # a group without a limit says "max", which int() refuses with a ValueError
        with suppress(OSError, ValueError):
            limit = int((CONTROL_GROUP / limit_file).read_text())
            usage = int((CONTROL_GROUP / usage_file).read_text())
            yield max(0, limit - usage)
    yield 2**62  # more than any memory, so that a process without a limit gets a number as well


def cache_limit(
    gib: float | None,
    shares: Mapping[torch.device, float],
    count_free: Callable[[torch.device], int] = free_bytes,
) -> int:
    """Return the bytes that caches may take: ``gib`` GiB if the user gave it, else a share of the memory free now.

    The device with the least room for its part of the caches decides.

    shares: for each device, the share of every cache that it holds.
    count_free: returns the free bytes of a device.
    """
    if gib is not None:
        return int(gib * GIB)
    # a device with the share s of every cache has room for caches of free / s bytes
    room = min(count_free(device) / share for device, share in shares.items())
    return int(USED_SHARE * room)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the error is a failed allocation, on a GPU or on the CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)


def release() -> None:
    """Free memory that is no longer used, after an allocation has failed."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run_in_parts(
    items: Sequence[Item], work: Callable[[Sequence[Item]], Sequence[Result]]
) -> list[tuple[Item, Result | Exception]]:
    """Call ``work`` on all items at once. Return (item, result or exception) of each item.

    If ``work`` fails, it is called on parts: halves if memory ran out, else single items. Only an item that fails alone
    gets an exception.
    """
    try:
        return list(zip(items, work(items), strict=True))
    except Exception as error:
        if len(items) == 1:
            return [(items[0], error)]
        size = 1
        if is_out_of_memory(error):
            # memory depends on the number of items, but any other error belongs to a single item
            size = (len(items) + 1) // 2
    release()
    outcomes: list[tuple[Item, Result | Exception]] = []
    for start in range(0, len(items), size):
        outcomes += run_in_parts(items[start : start + size], work)
    return outcomes

"""The machine, clocks and versions with which times were measured."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import kvbench
from kvbench.storage import kernels
from kvbench.store.provenance import git_commit

GPU_FACTS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit", "driver_version")
PACKAGES = ("transformers", "triton", "accelerate", "optimum-quanto", "hqq", "kvpress", "deepspeed")


def facts(device: torch.device) -> dict[str, Any]:
    """Return device, threads, versions and more by name, and on a GPU its clocks if they can be read."""
    cuda = device.type == "cuda"
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if cuda else f"cpu {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "paths": paths(device),
        "kvbench": kvbench.__version__,
        "commit": git_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "versions": {p: v for p in PACKAGES if (v := _version(p))},
    }
    if cuda:
        result |= {"memory": torch.cuda.get_device_properties(device).total_memory, "cuda": torch.version.cuda}
        result |= {"clocks": clocks(device)}
    return result


def under_load(device: torch.device) -> dict[str, Any]:
    """Return a GPU's clocks right after work, since those of an idle one differ; {} on a CPU."""
    return {"clocks_after": clocks(device)} if device.type == "cuda" else {}


def paths(device: torch.device) -> str:
    """Return ``kernels`` if decode attention runs in kernels on this device, else ``plain`` for plain PyTorch."""
    return "kernels" if device.type != "cpu" and kernels.serves(device) else "plain"


def clocks(device: torch.device) -> dict[str, str]:
    """Return the device's clocks from nvidia-smi, or {} if it cannot be run."""
    if shutil.which("nvidia-smi") is None:
        return {}
    # by its UUID, since PyTorch's number for it depends on CUDA_VISIBLE_DEVICES
    card = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = ["nvidia-smi", f"--query-gpu={','.join(GPU_FACTS)}", "--format=csv,noheader", card]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(GPU_FACTS, (part.strip() for part in result.stdout.split(",")), strict=False))


def _processor() -> str:
    try:
        lines = open("/proc/cpuinfo", encoding="utf-8").read().splitlines()  # noqa: SIM115
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

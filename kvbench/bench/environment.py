"""The machine, clocks and versions with which times were measured."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from kvbench.base.version import version
from kvbench.storage import kernels
from kvbench.store.provenance import read_commit

# the names that nvidia-smi --query-gpu uses
GPU_FACTS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit", "driver_version")
PACKAGES = ("transformers", "triton", "accelerate", "optimum-quanto", "hqq", "kvpress", "deepspeed")


def read_machine_facts(device: torch.device) -> dict[str, object]:
    """Return device, threads, versions and more by name, and on a GPU its clocks if they can be read."""
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else f"cpu {platform.machine()}"
    # other processes slow measurements down; the stored load shows this later
    load = list(os.getloadavg()) if hasattr(os, "getloadavg") else None
    facts: dict[str, object] = {
        "device": name,
        "processor": _read_processor_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": load,
        "paths": find_attention_path(device),
        "kvbench": version(),
        "commit": read_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "versions": _read_versions(),
    }
    if on_gpu:
        facts["memory"] = torch.cuda.get_device_properties(device).total_memory
        facts["cuda"] = torch.version.cuda
        facts["clocks"] = read_clocks(device)
    return facts


def read_facts_after_work(device: torch.device) -> dict[str, object]:
    """Return the facts to read while the device is still warm from work: {"clocks_after": a GPU's clocks}.

    An idle GPU has other clocks. Return {} on a CPU.
    """
    if device.type != "cuda":
        return {}
    return {"clocks_after": read_clocks(device)}


def find_attention_path(device: torch.device) -> str:
    """Return ``kernels`` if decode attention runs in kernels on this device, else ``plain`` for plain PyTorch."""
    # on a CPU, kernels run only in Triton's interpreter, and its speed is not worth reporting
    if device.type != "cpu" and kernels.serves(device):
        return "kernels"
    return "plain"


def read_clocks(device: torch.device) -> dict[str, str]:
    """Return the device's clocks from nvidia-smi, or {} if it cannot be run."""
    if shutil.which("nvidia-smi") is None:
        return {}
    # PyTorch's number of a card depends on CUDA_VISIBLE_DEVICES and nvidia-smi's does not; both know the UUID
    card = f"--id=GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = ["nvidia-smi", f"--query-gpu={','.join(GPU_FACTS)}", "--format=csv,noheader", card]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    # one line for the card, with a value for each of GPU_FACTS in their order
    values = [part.strip() for part in completed.stdout.split(",")]
    return dict(zip(GPU_FACTS, values, strict=False))


def _read_processor_name() -> str:
    # platform.processor() is empty on most Linux systems
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    for line in text.splitlines():
        if line.startswith("model name"):
            _, _, name = line.partition(":")
            return name.strip()
    return ""


def _read_versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            installed = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        # a package with damaged metadata has no version
        if installed:
            versions[package] = installed
    return versions

"""The provenance of numbers: versions, device, threads and commit."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from kvbench.base.version import version
from kvbench.storage import kernels
from kvbench.storage.kernels import on_cpu
from kvbench.store.results import CellRecord, Facts


def collect_provenance(model: PreTrainedModel, threads: int) -> Facts:
    """Return the provenance of a run by name: versions, device, threads, dtype and more.

    ``torch`` is only the major and the minor version, since patches do not change results.

    threads: the number of threads that PyTorch uses.
    """
    device = model.device
    is_gpu = device.type == "cuda"
    device_name = torch.cuda.get_device_name(device) if is_gpu else f"cpu {platform.machine()}"
    # kernels sum in another order than plain attention, which changes the last digits
    if kernels.serves(device):
        attention = "triton"
    elif device.type == "cpu" and kernels.enabled() and on_cpu.installed():
        attention = "c"
    else:
        attention = "plain"
    return {
        "kvbench": version(),
        "commit": read_commit(),
        "device": device_name,
        "threads": threads,
        # 2.4.1+cu121 becomes 2.4
        "torch": ".".join(torch.__version__.split("+")[0].split(".")[:2]),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": attention,
    }


ROOT = Path(__file__).resolve().parents[2]
"""The folder that the package lies in: the root of a clone, or an installation's folder of packages."""
MEASURES = ("kvbench", "conf", "pyproject.toml", "constraints.txt")
"""The parts of a clone that decide the numbers."""


def describe_local_changes(records: Iterable[CellRecord]) -> str:
    """Return the note that some cells were measured with uncommitted changes, or '' if no cell was."""
    count = 0
    changed_count = 0
    base_commits: set[str] = set()
    for record in records:
        count += 1
        # outside a clone the commit is None
        commits = [str(facts.get("commit") or "") for facts in record.provenance]
        # in ``read_commit``, a + behind the commit marks a changed clone
        changed_commits = [commit for commit in commits if commit.endswith("+")]
        if changed_commits:
            changed_count += 1
            base_commits.update(commit.removesuffix("+") for commit in changed_commits)
    if not changed_count:
        return ""
    names = ", ".join(sorted(base_commits))
    return (
        f"{changed_count} of {count} results were measured with local changes to the code (behind commit {names}): "
        "commit and measure again before you publish them."
    )


def read_commit(root: Path = ROOT) -> str | None:
    """Return the commit of the clone that the package runs from, with ``+`` if a file of MEASURES has changed.

    Return None if ``root`` is no clone, or git cannot be run.
    """
    # an installed package may lie inside another project's clone, and that clone's commit says nothing about it
    if not (root / ".git").exists():
        return None
    git = ["git", "-C", os.fspath(root)]
    commit_command = git + ["rev-parse", "--short=12", "HEAD"]
    status_command = git + ["status", "--porcelain", "--"] + list(MEASURES)
    try:
        commit = subprocess.run(commit_command, capture_output=True, text=True, timeout=10)
        status = subprocess.run(status_command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    # a clone without a commit has no HEAD
    if commit.returncode:
        return None
    # git status prints a line per changed or new file, and nothing for a clean clone
    if status.stdout.strip():
        return f"{commit.stdout.strip()}+"
    return commit.stdout.strip()

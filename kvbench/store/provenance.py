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

import kvbench
from kvbench.storage import kernels
from kvbench.store.results import CellRecord, Facts


def provenance(model: PreTrainedModel, threads: int) -> Facts:
    """Return the provenance of a run by name: versions, device, threads, dtype and more.

    ``torch`` is only the major and the minor version, since patches do not change results.
    """
    device = model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {platform.machine()}"
    return {
        "kvbench": kvbench.__version__,
        "commit": git_commit(),
        "device": name,
        "threads": threads,
        "torch": ".".join(torch.__version__.split("+")[0].split(".")[:2]),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": "triton" if kernels.serves(device) else "plain",
    }


MEASURES = ("kvbench", "conf", "pyproject.toml", "constraints.txt")
"""The parts of a clone that decide the numbers."""


def local_changes(records: Iterable[CellRecord]) -> str:
    """Return the note that some cells were measured with uncommitted changes, or '' if none was."""
    commits = [[str(p.get("commit") or "") for p in r.provenance] for r in records]
    changed_commits = [c for some in commits for c in some if c.endswith("+")]
    if not changed_commits:
        return ""
    cells = sum(any(c.endswith("+") for c in some) for some in commits)
    base_commits = ", ".join(sorted({c.removesuffix("+") for c in changed_commits}))
    return (
        f"{cells} of {len(commits)} cells were measured with local changes to the code (behind commit {base_commits}): "
        "commit and measure again before you publish them."
    )


def git_commit() -> str | None:
    """Return the commit of the clone that the package runs from, with ``+`` if a file of MEASURES has changed.

    Return None if the package is not in a clone, or git cannot be run.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        git = ["git", "-C", os.fspath(root)]
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=10)
        status_command = [*git, "status", "--porcelain", "--", *MEASURES]
        dirty = subprocess.run(status_command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if commit.returncode:
        return None
    return commit.stdout.strip() + ("+" if dirty.stdout.strip() else "")

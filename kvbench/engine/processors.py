"""The processors that a process may use."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from kvbench.engine.memory import CONTROL_GROUP


def allowed() -> int:
    """Return the number of processors that this process may use: those it can run on, within its container's quota.

    A container gets its share of a machine by the quota of its control group (Linux, versions 2 and 1). PyTorch does
    not know it: more threads than that are stopped for most of each period.
    """
    if hasattr(os, "sched_getaffinity"):
        return within_quota(len(os.sched_getaffinity(0)))
    return within_quota(os.cpu_count() or 1)


def within_quota(processors: int, control_group: Path = CONTROL_GROUP) -> int:
    """Return how many of ``processors`` the quota of a control group leaves, at least 1."""
    count = float(processors)
    # version 2 writes both numbers into one file, "QUOTA PERIOD"
    for quota_file, period_file in (("cpu.max", "cpu.max"), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with suppress(OSError, ValueError):  # ValueError: no quota is "max"
            quota = int((control_group / quota_file).read_text().split()[0])
            if quota > 0:  # version 1 writes -1 for none
                period = int((control_group / period_file).read_text().split()[-1])
                count = min(count, quota / period)
    return max(1, int(count))

"""The processors that a process may use."""

from __future__ import annotations

import os
from contextlib import suppress

from kvbench.engine.memory import CONTROL_GROUP


def allowed() -> int:
    """Return the processors that this process may use: those it can run on, within its container's quota.

    A container gets its share of a machine by the quota of its control group (Linux, versions 2 and 1), of which
    PyTorch does not know: more threads than that are stopped for most of each period.
    """
    count = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    for quota, period in (("cpu.max", "cpu.max"), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with suppress(OSError, ValueError):  # ValueError: no quota is "max"
            most = int((CONTROL_GROUP / quota).read_text().split()[0])
            if most > 0:  # version 1 writes -1 for none
                count = min(count, most / int((CONTROL_GROUP / period).read_text().split()[-1]))
    return max(1, int(count))

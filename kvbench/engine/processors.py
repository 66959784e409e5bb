"""The processors that a process may use."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from kvbench.engine.memory import CONTROL_GROUP


def count_allowed() -> int:
    """Return the number of processors that this process may use, by its affinity and its container's quota.

    A container gets its share of a machine as a quota of its control group (Linux, versions 2 and 1). PyTorch ignores
    the quota, and threads above it would be stopped for most of each period.
    """
    if hasattr(os, "sched_getaffinity"):
        return limit_to_quota(len(os.sched_getaffinity(0)))
    # other systems than Linux may lack affinities, and some do not know their processors
    return limit_to_quota(os.cpu_count() or 1)


def limit_to_quota(processors: int, control_group: Path = CONTROL_GROUP) -> int:
    """Return how many of ``processors`` a process may use under the quota of a control group; at least 1."""
    count = float(processors)
    # version 2 writes quota and period into one file, as "QUOTA PERIOD"; version 1 has a file for each
    for quota_file, period_file in (("cpu.max", "cpu.max"), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        # the files of the other version are missing (OSError); without a quota the file says "max" (ValueError)
        with suppress(OSError, ValueError):
            # microseconds of processor time in each period, the first number of its file
            quota = int((control_group / quota_file).read_text().split()[0])
            if quota > 0:  # version 1 writes -1 for no quota
                # the last number of its file
                period = int((control_group / period_file).read_text().split()[-1])
                count = min(count, quota / period)
    return max(1, int(count))

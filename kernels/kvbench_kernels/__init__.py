"""Decode attention on a CPU, in plain C. kvbench calls it where it is installed."""

from __future__ import annotations

import ctypes
from pathlib import Path


def library() -> ctypes.CDLL:
    """Load the compiled functions. Raises OSError if there are none for this machine."""
    found = sorted(Path(__file__).parent.glob("_packed*.so"))
    if not found:
        raise OSError("kvbench_kernels has no compiled library beside it")
    return ctypes.CDLL(str(found[0]))

"""Where tests find real data: the folder named by KVBENCH_DATA, which is never part of the project."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def data_path(*parts: str) -> Path:
    """A file or folder under KVBENCH_DATA. Skips the test without it; fails if KVBENCH_REQUIRE_DATA=1."""
    root = os.environ.get("KVBENCH_DATA", "")
    path = Path(root, *parts)
    if root and path.exists():
        return path
    missing = f"needs real data: {path} is missing" if root else "needs real data: set KVBENCH_DATA to its folder"
    if os.environ.get("KVBENCH_REQUIRE_DATA") == "1":
        pytest.fail(missing)
    pytest.skip(missing)

"""The version of kvbench that is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version


def version() -> str:
    """Return the version that was installed. It comes from the tags of git."""
    try:
        return installed_version("kvbench")
    except PackageNotFoundError:
        return "0+source"

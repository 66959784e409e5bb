"""The version of kvbench that is installed."""

from __future__ import annotations


def version() -> str:
    """Return the installed version, which comes from the tags of git; ``0+source`` if kvbench is not installed."""
    # import late: otherwise every import of kvbench would wait for it
    from importlib import metadata

    try:
        return metadata.version("kvbench")
    except metadata.PackageNotFoundError:
        return "0+source"

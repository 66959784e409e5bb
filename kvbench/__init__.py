"""kvbench: measure KV-cache compression on real models, with the bytes really held."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbench.api import cache, calibrate, extend, generate, prefill
    from kvbench.kv.segment import LayerCache
    from kvbench.methods.core.prompt_cache import Cache
    from kvbench.models.load import load_model
    from kvbench.report.listing import results
    from kvbench.run.compare import compare

__all__ = [
    "Cache",
    "LayerCache",
    "cache",
    "calibrate",
    "compare",
    "extend",
    "generate",
    "load_model",
    "prefill",
    "results",
]

# where each public name is defined; the imports above are for type checkers alone
_HOMES = {
    "Cache": "kvbench.methods.core.prompt_cache",
    "LayerCache": "kvbench.kv.segment",
    "cache": "kvbench.api",
    "calibrate": "kvbench.api",
    "compare": "kvbench.run.compare",
    "extend": "kvbench.api",
    "generate": "kvbench.api",
    "load_model": "kvbench.models.load",
    "prefill": "kvbench.api",
    "results": "kvbench.report.listing",
}


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used: ``--help`` must not wait for torch."""
    if name == "__version__":
        return _version()
    if name not in _HOMES:
        raise AttributeError(f"module 'kvbench' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def _version() -> str:
    """Return the version that was installed; it comes from the tags of git."""
    from importlib.metadata import PackageNotFoundError, version

    # a folder of sources that is on the path, but not installed, has no version
    try:
        return version("kvbench")
    except PackageNotFoundError:
        return "0+source"


def __dir__() -> list[str]:
    """Return the public names, for completion, without importing them."""
    # __version__ is no part of ``from kvbench import *``
    return __all__ + ["__version__"]

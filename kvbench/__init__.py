"""kvbench: measure KV-cache compression on real models, with the bytes really held."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbench.api import calibrate, extend, generate, prefill
    from kvbench.cache.segment import LayerCache
    from kvbench.methods.prompt_cache import Cache
    from kvbench.models.load import load_model
    from kvbench.run.compare import compare

__version__ = "0.1.0"
__all__ = ["Cache", "LayerCache", "calibrate", "compare", "extend", "generate", "load_model", "prefill"]

_HOMES = {
    "Cache": "kvbench.methods.prompt_cache",
    "LayerCache": "kvbench.cache.segment",
    "calibrate": "kvbench.api",
    "compare": "kvbench.run.compare",
    "extend": "kvbench.api",
    "generate": "kvbench.api",
    "load_model": "kvbench.models.load",
    "prefill": "kvbench.api",
}


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used: ``--help`` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'kvbench' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Return the public names, for completion, without importing them."""
    return [*__all__, "__version__"]

"""kvbench: measure KV-cache compression on real models, with the bytes really held."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvbench.base.version import version

if TYPE_CHECKING:
    from kvbench.api import cache, calibrate, extend, generate, prefill
    from kvbench.kv.segment import LayerCache
    from kvbench.methods.core.chain import Chain
    from kvbench.methods.core.prompt_cache import PromptCache
    from kvbench.models.load import load_model
    from kvbench.report.of_store import results
    from kvbench.run.compare import compare

__all__ = [
    "Chain",
    "LayerCache",
    "PromptCache",
    "cache",
    "calibrate",
    "compare",
    "extend",
    "generate",
    "load_model",
    "prefill",
    "results",
]

# the module that defines each public name; the imports above are for type checkers alone
_HOMES = {
    "Chain": "kvbench.methods.core.chain",
    "LayerCache": "kvbench.kv.segment",
    "PromptCache": "kvbench.methods.core.prompt_cache",
    "cache": "kvbench.api",
    "calibrate": "kvbench.api",
    "compare": "kvbench.run.compare",
    "extend": "kvbench.api",
    "generate": "kvbench.api",
    "load_model": "kvbench.models.load",
    "prefill": "kvbench.api",
    "results": "kvbench.report.of_store",
}


def __getattr__(name: str) -> Any:
    """Return a public name, imported when it is first used: ``--help`` must not wait for torch."""
    if name == "__version__":
        return version()
    # PromptCache's old name, which differed from the function ``cache`` by a capital alone
    if name == "Cache":
        name = "PromptCache"
    if name not in _HOMES:
        raise AttributeError(f"module 'kvbench' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Return the public names, for completion, without importing them."""
    # __version__ is no part of ``from kvbench import *``
    return __all__ + ["__version__"]

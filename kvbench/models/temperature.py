"""Attention that sharpens with the position of a token: Llama 4's layers without rotation scale their queries.

The query at position p is multiplied by 1 + a log(1 + floor((p + 1) / f)), with a = ``attn_scale`` and f =
``floor_scale`` (the idea is from arXiv 2501.19399). transformers takes p from the cache, which knows one length. In
kvbench, rows of a batch have lengths of their own, so kvbench scales the queries itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_SCALED_HERE: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The modules whose queries kvbench scales now."""


@contextmanager
def scaled_here(modules: list[nn.Module]) -> Iterator[None]:
    """While the context is open, ``scale_queries`` scales the modules' queries, and the modules themselves do not.

    Modules without such a scaling are left as they are.
    """
    # the condition under which transformers itself scales a module's queries
    chosen = []
    for module in modules:
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            chosen.append(module)
    former = [module.attn_temperature_tuning for module in chosen]
    for module in chosen:
        module.attn_temperature_tuning = False  # type: ignore[assignment]
        _SCALED_HERE.add(module)
    try:
        yield
    finally:
        for module, tuning in zip(chosen, former, strict=True):
            module.attn_temperature_tuning = tuning
            _SCALED_HERE.discard(module)


def scale_queries(module: nn.Module, query: Tensor, positions_of: Callable[[int], Tensor]) -> Tensor:
    """Return a module's queries [B, Hq, T, D] scaled by position, or unchanged if its model does not scale queries.

    positions_of: maps the number T of newest tokens to their positions [B or 1, T].
    """
    if module not in _SCALED_HERE:
        return query
    positions = positions_of(query.shape[2]).to(query.device)
    # 1 + a log(1 + floor((p + 1) / f))
    steps = torch.floor((positions.float() + 1.0) / module.floor_scale)  # type: ignore[operator]
    factor = torch.log1p(steps) * module.attn_scale + 1.0  # type: ignore[operator]
    # the factor is fp32, and its product with half-precision queries as well
    return (query * factor[:, None, :, None]).to(query.dtype)

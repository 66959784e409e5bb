"""Sparse attention by an indexer (DSA, DeepSeek-V3.2, arXiv 2512.02556, section 2.1), on texts that it attends whole.

An indexer scores all earlier tokens for each query by small keys of its own, and the layer attends the k best of them
(``index_topk``, 2,048 in DeepSeek-V3.2 and GLM-5). A text of at most k tokens is therefore attended whole, whatever
the scores are. kvbench runs these models on such texts and leaves the scores and the indexer's keys out. On longer
texts each row would need the indexer's keys of the tokens that it has kept; no method says yet what to do with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from kvbench.models.latent import LatentCache


def find_indexers(modules: list[nn.Module]) -> list[nn.Module]:
    """Return the indexers of attention modules. A module that takes over another module's choice has no indexer."""
    candidates = (getattr(module, "indexer", None) for module in modules)
    return [indexer for indexer in candidates if isinstance(indexer, nn.Module)]


@contextmanager
def choosing_all(modules: list[nn.Module]) -> Iterator[None]:
    """While the context is open, keep the indexers of attention modules from scoring tokens.

    kvbench's attention takes every token as chosen.
    """
    patched = find_indexers(modules)
    # a user may have given an indexer a forward of its own
    own_forwards = {indexer: vars(indexer).get("forward") for indexer in patched}

    def choose(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return an empty choice under kvbench's cache, else the indexer's own choice (an indexer's forward)."""
        # families differ in the argument that holds the cache
        has_kvbench_cache = any(isinstance(value, LatentCache) for value in (*args, *kwargs.values()))
        # without kvbench's cache the model's own attention runs, which needs the choice
        if not has_kvbench_cache:
            own_forward = own_forwards.get(self)
            if own_forward is not None:
                return own_forward(hidden_states, *args, **kwargs)
            return type(self).forward(self, hidden_states, *args, **kwargs)
        # kvbench's attention does not read the choice, and layers that share a choice only ask whether there is one
        return hidden_states.new_empty(0, dtype=torch.int32)

    for indexer in patched:
        vars(indexer)["forward"] = MethodType(choose, indexer)
    try:
        yield
    finally:
        for indexer, own_forward in own_forwards.items():
            # without an entry of its own, the indexer has the forward of its class again
            del vars(indexer)["forward"]
            if own_forward is not None:
                vars(indexer)["forward"] = own_forward

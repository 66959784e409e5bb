"""The model as a chain's stages change it, for as long as a context is open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from transformers import PreTrainedModel

from kvbench.methods.core.chain import Chain
from kvbench.methods.core.prompt_cache import Cache


@contextmanager
def adapted(model: PreTrainedModel, chain: Chain) -> Iterator[None]:
    """Change the model by ``adapt`` of all of the chain's stages. On exit it is restored, whatever happens."""
    with ExitStack() as stack:
        for stage in chain.adaptation:
            stack.enter_context(stage.adapt(model))
        yield


def by_batch(caches: Sequence[Cache]) -> list[list[int]]:
    """Return the indices of caches in groups of equal ``batch_key``. A group can be the rows of one batch."""
    # groups keep the order of their first caches
    groups: dict[object, list[int]] = {}
    for i, cache in enumerate(caches):
        groups.setdefault(cache.batch_key, []).append(i)
    return list(groups.values())

"""The model as a chain's stages change it, for as long as a context is open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from transformers import PreTrainedModel

from kvbench.methods.chain import Chain
from kvbench.methods.prompt_cache import Cache


@contextmanager
def adapted(model: PreTrainedModel, chain: Chain) -> Iterator[None]:
    """The model under all ``adapt`` of the chain's stages; restored on exit, whatever happens."""
    with ExitStack() as stack:
        for stage in chain.adaptation:
            stack.enter_context(stage.adapt(model))
        yield


def alike(caches: Sequence[Cache]) -> list[list[int]]:
    """Indices of caches by ``Chain.batch``: those that can be rows of one batch."""
    groups: dict[object, list[int]] = {}
    for i, cache in enumerate(caches):
        groups.setdefault(cache.chain.batch, []).append(i)
    return list(groups.values())

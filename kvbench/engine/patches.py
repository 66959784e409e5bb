"""Changing the model as a chain's stages ask, and grouping caches whose chains change it alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from transformers import PreTrainedModel

from kvbench.methods.core.chain import Chain
from kvbench.methods.core.prompt_cache import PromptCache


@contextmanager
def adapted(model: PreTrainedModel, chain: Chain) -> Iterator[None]:
    """While the context is open, the model is changed by the ``adapt`` methods of the chain's stages."""
    with ExitStack() as stack:
        for stage in chain.adaptation:
            stack.enter_context(stage.adapt(model))
        yield


def group_by_batch(caches: Sequence[PromptCache]) -> list[list[int]]:
    """Return the indices of caches, grouped by ``batch_key``. The caches of a group can be rows of one batch."""
    # groups come in the order of their first caches
    groups: dict[object, list[int]] = {}
    for i, cache in enumerate(caches):
        groups.setdefault(cache.batch_key, []).append(i)
    return list(groups.values())

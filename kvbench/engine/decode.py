"""Decoding of prefilled caches: many to their endings at once, or one by given tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.engine.batch import Answer, DecodeBatch
from kvbench.engine.finite import no_answer
from kvbench.engine.limits import check_capacity, check_turn, check_window
from kvbench.engine.patches import adapted, by_batch
from kvbench.engine.prefill import as_prompt
from kvbench.engine.step import build, step
from kvbench.engine.stopping import Ending as Ending
from kvbench.engine.stopping import sample as sample
from kvbench.errors import UsageError
from kvbench.methods.foreign import contained
from kvbench.methods.prompt_cache import Cache
from kvbench.models.interface import attached


def generate_rows(model: PreTrainedModel, caches: Sequence[Cache], endings: Sequence[Ending]) -> list[Answer]:
    """Return the answer of each cache until its own ending, in order.

    Caches whose chains change the model alike are rows of one batch. Raises Refused where logits are not finite.
    """
    answers: dict[int, Answer] = {}
    for rows in by_batch(caches):
        batch: DecodeBatch[int] = DecodeBatch(model)
        batch.enter([(r, caches[r], endings[r]) for r in rows])
        while len(batch):
            answers.update(batch.advance())
    for r, answer in answers.items():
        if not answer.finite:
            raise no_answer(caches[r].chain, model.dtype)
    return [answers[r] for r in range(len(caches))]


def extend_cache(model: PreTrainedModel, cache: Cache, input_ids: Tensor | Sequence[int]) -> Cache:
    """Return a new cache that has also read ``input_ids`` [T] behind the compressed prompt.

    The new tokens are kept exactly as they are, unless the chain packs or evicts while decoding. Then they are stored
    one by one, as the tokens of an answer are.
    """
    ids = as_prompt(model, input_ids)
    check_continuation(model, cache, ids.shape[0])
    # methods that evict or pack while decoding do so after every token
    size = 1 if cache.chain.evicts or cache.chain.coder else len(ids)
    walls = contained(cache.chain.name, cache.chain.foreign)
    with walls, torch.no_grad(), adapted(model, cache.chain), attached(model):
        batch = build(model, [cache], len(ids), size)
        for start in range(0, len(ids), size):
            piece = ids[start : start + size]
            positions = torch.arange(cache.seen + start, cache.seen + start + len(piece), device=ids.device)
            logits = step(model, batch, piece[None], positions[None])
    of_kind = {False: iter(cache.layers), True: iter(cache.local)}
    continued = [(layer.local, layer.continued(next(of_kind[layer.local]))) for layer in batch]
    layers, local = (tuple(layer for is_local, layer in continued if is_local == kind) for kind in (False, True))
    return replace(cache, layers=layers, local=local, logits=logits[0, -1].clone())


def check_continuation(model: PreTrainedModel, cache: Cache, new_tokens: int) -> None:
    """Raise UsageError unless ``cache`` is of this model and can take ``new_tokens`` more."""
    if cache.model is not None and cache.model() is not model:
        raise UsageError("this cache was made by another model object; prefill the prompt with this one")
    check_capacity(model, cache.seen + new_tokens)
    check_window(model, cache.seen + new_tokens, [cache.chain])
    check_turn(model, cache.seen, cache.seen + new_tokens)

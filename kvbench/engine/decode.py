"""Decode prefilled caches: answer many at once, each to its ending, or let caches read given tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.base.errors import UsageError
from kvbench.engine.batch import Answer, DecodeBatch
from kvbench.engine.finite import build_answer_refusal
from kvbench.engine.limits import check_capacity, check_turn, check_window
from kvbench.engine.patches import adapted, group_by_batch
from kvbench.engine.prefill import prepare_ids
from kvbench.engine.step import BatchLayers, build, step
from kvbench.engine.stopping import Ending
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.prompt_cache import PromptCache
from kvbench.models.interface import attached
from kvbench.models.traits import reads_one_by_one

EXTENDED_BYTES = 2**30
"""The most bytes of caches that read more tokens in one batch. The limit exists because the batch copies them."""
PACKED_AT_ONCE = 128
"""The most tokens that packed caches read at once. Packed attention holds the logits of all of them."""


def generate_rows(model: PreTrainedModel, caches: Sequence[PromptCache], endings: Sequence[Ending]) -> list[Answer]:
    """Return the answer of each cache, in order. Each answer goes on until its own ending.

    Caches whose chains change the model alike are rows of one batch. Raises Refused if logits are not finite.
    """
    answers: dict[int, Answer] = {}
    for rows in group_by_batch(caches):
        batch: DecodeBatch[int] = DecodeBatch(model)
        batch.enter([(r, caches[r], endings[r]) for r in rows])
        while len(batch):
            answers.update(batch.advance())
    for r, answer in answers.items():
        if not answer.finite:
            raise build_answer_refusal(caches[r].chain, model.dtype)
    return [answers[r] for r in range(len(caches))]


def extend_cache(model: PreTrainedModel, cache: PromptCache, input_ids: Tensor | Sequence[int]) -> PromptCache:
    """Return a new cache that holds ``input_ids`` [T] behind its compressed prompt.

    ``extend_caches`` does the same for many caches, and says how the new tokens are stored.
    """
    return extend_caches(model, [cache], input_ids)[0]


def extend_caches(
    model: PreTrainedModel, caches: Sequence[PromptCache], input_ids: Tensor | Sequence[int]
) -> list[PromptCache]:
    """Return new caches that have also read ``input_ids`` [T] after their compressed prompts, in order.

    The new tokens stay exact, unless the chain packs or evicts while decoding. In that case each is stored as if it
    came alone, like the tokens of an answer. Caches whose chains change the model alike are rows of one batch, as many
    as EXTENDED_BYTES allow.
    """
    ids = prepare_ids(model, input_ids)
    for cache in caches:
        check_continuation(model, cache, len(ids))
    extended: dict[int, PromptCache] = {}
    for rows in group_by_batch(caches):
        # an eviction after one token decides which tokens the next one reads; other methods read all tokens at once
        one_by_one = [r for r in rows if caches[r].chain.evicts]
        at_once = [r for r in rows if not caches[r].chain.evicts]
        most_at_once = 1 if reads_one_by_one(model.config) else len(ids)
        if any(caches[r].chain.coder for r in at_once):
            most_at_once = min(most_at_once, PACKED_AT_ONCE)
        for members, size in ((one_by_one, 1), (at_once, most_at_once)):
            for batch in _divide_by_bytes(caches, members):
                batch_caches = _extend(model, [caches[r] for r in batch], ids, size=size)
                extended.update(zip(batch, batch_caches, strict=True))
    return [extended[r] for r in range(len(caches))]


def _divide_by_bytes(caches: Sequence[PromptCache], rows: Sequence[int]) -> list[list[int]]:
    """Return ``rows``, which are indices of ``caches``, divided into parts whose caches take at most EXTENDED_BYTES.

    A row whose cache takes more is a part of its own.
    """
    parts: list[list[int]] = []
    part_bytes = 0  # the size of the last part
    for row in rows:
        row_bytes = caches[row].nbytes()
        # a row that no longer fits begins the next part
        if not parts or part_bytes + row_bytes > EXTENDED_BYTES:
            parts.append([])
            part_bytes = 0
        parts[-1].append(row)
        part_bytes += row_bytes
    return parts


def _extend(model: PreTrainedModel, caches: Sequence[PromptCache], ids: Tensor, size: int) -> list[PromptCache]:
    """Return the caches of one batch after they read ``ids`` [T], T >= 1, ``size`` tokens at a time."""
    # all chains change the model alike (``group_by_batch``), so the first speaks for all
    chain = caches[0].chain
    seen = torch.tensor([cache.seen for cache in caches], device=ids.device)[:, None]  # [B, 1]
    with torch.no_grad(), adapted(model, chain), attached(model):
        # alone: of several tokens, each is packed and read as if it came in a step of its own
        batch = build(model, caches, capacity=len(ids), at_once=size, alone=True)
        for start in range(0, len(ids), size):
            piece = ids[start : start + size]
            # positions [B, t]: each row's new tokens follow the tokens that it has read
            positions = seen + torch.arange(start, start + len(piece), device=ids.device)
            logits = step(model, batch, piece.expand(len(caches), -1), positions)
    return [continue_cache(cache, batch, logits[i, -1], i) for i, cache in enumerate(caches)]


def continue_cache(cache: PromptCache, batch: BatchLayers, logits: Tensor, row: int = 0) -> PromptCache:
    """Return a copy of ``cache`` with the tokens that ``batch`` has read since it was built from it.

    row: the cache's row in the batch.
    logits: [V], the logits after the last of these tokens.
    """
    # the batch has all layers in the model's order; local layers stand between those that methods compress
    former_layers, former_local = iter(cache.layers), iter(cache.local)
    layers: list[LayerCache] = []
    local: list[LayerCache] = []
    for row_layer in batch.with_keys:
        if row_layer.local:
            local.append(row_layer.continue_cache(next(former_local), row))
        else:
            layers.append(row_layer.continue_cache(next(former_layers), row))
    states = tuple(layer.state(row) for layer in batch.with_states)
    return replace(cache, layers=tuple(layers), local=tuple(local), states=states, logits=logits.clone())


def check_continuation(model: PreTrainedModel, cache: PromptCache, new_tokens: int) -> None:
    """Raise UsageError unless ``cache`` belongs to this model and can read ``new_tokens`` more tokens."""
    # the cache refers to its model weakly, so that it does not keep the weights in memory
    if cache.model is not None and cache.model() is not model:
        raise UsageError("this cache was made by another model object; prefill the prompt with this one")
    check_capacity(model, cache.seen + new_tokens)
    check_window(model, cache.seen + new_tokens, [cache.chain])
    check_turn(model, cache.seen, cache.seen + new_tokens)

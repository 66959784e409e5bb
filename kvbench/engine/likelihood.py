"""Teacher forcing: a text's likelihood after its compressed beginning, and its divergence from the full cache's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.audit.decode_audit import Stored
from kvbench.base.errors import UsageError
from kvbench.engine.decode_layer import select_compressed
from kvbench.engine.divergence import Divergence, compare_logits, exact_head, nudge_cache
from kvbench.engine.limits import check_capacity, check_turn, check_window
from kvbench.engine.patches import adapted, group_by_batch
from kvbench.engine.prefill import prepare_ids
from kvbench.engine.step import build, step
from kvbench.methods.core.prompt_cache import PromptCache
from kvbench.methods.core.walls import contained
from kvbench.methods.core.watch import note_progress
from kvbench.models.interface import attached
from kvbench.models.traits import reads_one_by_one

CHUNK_BYTES = 2**28
"""The most bytes of one chunk's logits in fp32, over all rows."""


@dataclass(frozen=True)
class Forced:
    """The result of teacher forcing one cache: feeding it the T tokens of a text, whatever it would have predicted.

    losses: [T] fp32 on the CPU, the negative log likelihood of each token, in nats.
    held: for each layer, the most tokens that a head held.
    stored: the bytes of each layer after the last token that was fed.
    divergence: the divergence from a reference at all tokens but the first. The prompt's own logits predict the first.
    """

    losses: Tensor
    held: list[int]
    stored: Stored
    divergence: Divergence | None = None


def teacher_force(model: PreTrainedModel, caches: Sequence[PromptCache], tokens: Tensor, chunk: int) -> list[Forced]:
    """Return the losses of the text ``tokens`` [T] after each cache, in order. ``chunk`` tokens are fed at a time.

    Caches are not changed. Caches whose chains change the model alike are rows of one batch. Raises UsageError unless
    all caches have read equally many tokens, as caches of one prompt have.
    """
    ids = _check_continuation(model, caches, tokens)
    results: dict[int, Forced] = {}
    for rows in group_by_batch(caches):
        results.update(zip(rows, _force(model, [caches[r] for r in rows], ids, chunk), strict=True))
    return [results[i] for i in range(len(caches))]


def diverge(
    model: PreTrainedModel,
    full: PromptCache,
    caches: Sequence[PromptCache],
    tokens: Tensor,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[list[Forced], Divergence]:
    """Compare each cache with the full cache ``full`` on a text ``tokens`` [T] that follows the prompt.

    Returns (results, floor). ``results`` has the losses and the divergence from ``full`` of each cache, in order.
    ``floor`` is the divergence that rounding alone causes.

    ``full`` and its copy by ``nudge_cache`` are rows of each batch in which no chain changes the model, so that
    compared rows round alike. If ``full`` is among the caches, its result is taken from its own row. Rows that evict
    are fed token by token, like answers. All others are fed in chunks, with the same result. The output head is
    computed in fp32.

    Logits exist for one chunk at a time and take at most ``chunk_bytes``. If chains change the model, the [T, V] logits
    of ``full`` are kept for comparison.
    """
    ids = _check_continuation(model, [full, *caches], tokens)
    results: dict[int, Forced] = {}
    for one_by_one in (True, False):
        rows = [i for i, cache in enumerate(caches) if cache is not full and cache.chain.evicts == one_by_one]
        # the batch in chunks always runs, because it computes the full cache and the floor
        if rows or not one_by_one:
            # with no bytes for logits, a chunk has one token
            limit = 0 if one_by_one else chunk_bytes
            exact, forced, floor = _diverge_together(model, full, [caches[r] for r in rows], ids=ids, chunk_bytes=limit)
            results.update(zip(rows, forced, strict=True))
    for i, cache in enumerate(caches):
        if cache is full:
            results[i] = exact
    # the loop's second round always runs, and compares the nudged full cache as well
    assert floor.divergence is not None
    return [results[i] for i in range(len(caches))], floor.divergence


def _diverge_together(
    model: PreTrainedModel, full: PromptCache, caches: Sequence[PromptCache], *, ids: Tensor, chunk_bytes: int
) -> tuple[Forced, list[Forced], Forced]:
    """Return (result of the full cache, results of ``caches`` in order, result of the nudged full cache).

    ids: [T], the tokens that are fed after each cache.
    chunk_bytes: the most bytes of a chunk's logits. A chunk has at least one token, even if its logits take more.
    """
    rows = [full, *caches, nudge_cache(full)]
    groups = group_by_batch(rows)  # the full cache is in the first group
    token_bytes = len(rows) * model.config.vocab_size * 4  # one token's logits in fp32, over all rows
    chunk = max(1, chunk_bytes // token_bytes)
    references: dict[int, Tensor] = {}  # the full cache's logits [t, V], by the chunk's first index
    results: dict[int, Forced] = {}
    for group in groups:
        divergences = [Divergence.empty(len(ids) - 1) for _ in group]

        # the default value binds this group's list to the function
        def compare_chunk(start: int, logits: Tensor, divergences: list[Divergence] = divergences) -> None:
            """Compare a chunk's logits [B, t, V] with the full cache's, and write the result from ``start`` on."""
            # the first row of the first group is the full cache
            reference = references.get(start, logits[0])
            # only a later group reads the reference again
            if len(groups) > 1:
                references[start] = reference
            targets = ids[start + 1 : start + 1 + len(reference)]
            for divergence, compared in zip(divergences, compare_logits(reference, logits, targets), strict=True):
                divergence.put(start, compared)

        with exact_head(model):
            forced_rows = _force(model, [rows[r] for r in group], ids, chunk=chunk, on_logits=compare_chunk, alone=True)
        for r, forced, divergence in zip(group, forced_rows, divergences, strict=True):
            results[r] = replace(forced, divergence=divergence)
    floor_row = len(rows) - 1
    return results[0], [results[r] for r in range(1, floor_row)], results[floor_row]


def forced_logits(model: PreTrainedModel, cache: PromptCache, tokens: Tensor | Sequence[int]) -> Tensor:
    """Return the logits [T, V] by which the cache predicts each of ``tokens`` [T] when they are fed after it."""
    ids = _check_continuation(model, [cache], prepare_ids(model, tokens))
    # the prompt's own logits predict the first token
    logits = [cache.logits[None]]

    def collect(start: int, chunk_logits: Tensor) -> None:
        """Keep the logits [t, V] of the batch's only row."""
        logits.append(chunk_logits[0])

    # a chain that evicts reads an answer token by token
    chunk = 1 if cache.chain.evicts else len(ids)
    _force(model, [cache], ids, chunk=chunk, on_logits=collect, alone=True)
    return torch.cat(logits)


def _check_continuation(model: PreTrainedModel, caches: Sequence[PromptCache], tokens: Tensor) -> Tensor:
    """Return ``tokens`` [T] on the model's device.

    Raises UsageError unless the model can read them after all caches, and all caches have read equally many tokens.
    """
    if len({cache.seen for cache in caches}) > 1:
        raise UsageError("teacher forcing continues caches that have read equally many tokens")
    read = caches[0].seen
    check_capacity(model, read + len(tokens))
    check_window(model, read + len(tokens), [cache.chain for cache in caches])
    check_turn(model, read, read + len(tokens))
    return prepare_ids(model, tokens)


def _force(
    model: PreTrainedModel,
    caches: Sequence[PromptCache],
    ids: Tensor,
    chunk: int,
    on_logits: Callable[[int, Tensor], None] = lambda start, logits: None,
    alone: bool = False,
) -> list[Forced]:
    """Feed ``ids`` [T] after each cache, all caches in one batch, and return the result of each without divergence.

    All chains must change the model alike, since the batch runs in one adapted model.

    chunk: how many tokens are fed at a time.
    on_logits: called with each chunk's first index and the logits [B, t, V] after its tokens.
    alone: True if the tokens of a chunk are read and packed as if each came alone.
    """
    chain, prompt_tokens = caches[0].chain, caches[0].seen
    # caches of packed tokens make room for a chunk, and attend over it all
    chunk = 1 if reads_one_by_one(model.config) else min(chunk, len(ids))
    # the prompt's own logits predict the first token
    losses = torch.empty(len(caches), len(ids), device=ids.device)
    losses[:, :1] = _compute_losses(torch.stack([cache.logits for cache in caches])[:, None], ids[:1])
    with contained(chain.name, chain.foreign), adapted(model, chain), torch.no_grad(), attached(model):
        batch = build(model, caches, capacity=len(ids), at_once=chunk, alone=alone)
        # the last token is never fed, because nothing follows it
        for start in range(0, len(ids) - 1, chunk):
            note_progress()
            chunk_ids = ids[start : min(start + chunk, len(ids) - 1)]
            positions = torch.arange(prompt_tokens + start, prompt_tokens + start + len(chunk_ids), device=ids.device)
            rows = len(caches)
            logits = step(model, batch, chunk_ids.expand(rows, -1), positions.expand(rows, -1), whole=True)
            # logits after token i predict token i + 1
            scored = slice(start + 1, start + 1 + len(chunk_ids))
            losses[:, scored] = _compute_losses(logits, ids[scored])
            on_logits(start, logits)
    # each row gets the most tokens of a head, and the payload bytes, by layer
    most_tokens = torch.stack([layer.held() for layer in select_compressed(batch.with_keys)]).T.tolist()
    payload = zip(*(layer.payload() for layer in select_compressed(batch.with_keys)), strict=True)
    results = []
    for row_losses, row_tokens, row_payload in zip(losses.cpu(), most_tokens, payload, strict=True):
        stored = Stored(fed=batch.used, payload=row_payload)
        results.append(Forced(losses=row_losses, held=row_tokens, stored=stored))
    return results


def _compute_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the negative log likelihoods [B, t] of targets [t] under logits [B, t, V], in fp32."""
    logp = logits.float().log_softmax(dim=-1)
    return -logp.gather(2, targets.expand(len(logits), -1)[..., None])[..., 0]

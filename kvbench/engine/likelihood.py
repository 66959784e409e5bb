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
        forced_rows = _force(model, [caches[r] for r in rows], ids, chunk)
        results.update(zip(rows, forced_rows, strict=True))
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
    one_by_one: list[int] = []
    in_chunks: list[int] = []
    for i, cache in enumerate(caches):
        if cache is full:
            continue
        if cache.chain.evicts:
            one_by_one.append(i)
        else:
            in_chunks.append(i)
    results: dict[int, Forced] = {}
    if one_by_one:
        # with no bytes for logits, a chunk has one token
        _, evicting, _ = _diverge_together(model, full, [caches[i] for i in one_by_one], ids=ids, chunk_bytes=0)
        results.update(zip(one_by_one, evicting, strict=True))
    # this batch runs even without rows in chunks, because it computes the results of the full cache and the floor
    exact, others, floor = _diverge_together(
        model, full, [caches[i] for i in in_chunks], ids=ids, chunk_bytes=chunk_bytes
    )
    results.update(zip(in_chunks, others, strict=True))
    for i, cache in enumerate(caches):
        if cache is full:
            results[i] = exact
    assert floor.divergence is not None, "every row is compared"
    return [results[i] for i in range(len(caches))], floor.divergence


def _diverge_together(
    model: PreTrainedModel, full: PromptCache, caches: Sequence[PromptCache], *, ids: Tensor, chunk_bytes: int
) -> tuple[Forced, list[Forced], Forced]:
    """Return (result of the full cache, results of ``caches`` in order, result of the nudged full cache).

    Each result has the divergence from the full cache. The nudged full cache shows what rounding alone causes.

    ids: [T], the tokens that are fed after each cache.
    chunk_bytes: the most bytes of a chunk's logits. A chunk has at least one token, even if its logits take more.
    """
    rows = [full, *caches, nudge_cache(full)]
    groups = group_by_batch(rows)  # the full cache is in the first group
    token_bytes = len(rows) * model.config.vocab_size * 4  # one token's logits in fp32, over all rows
    chunk = max(1, chunk_bytes // token_bytes)
    references: dict[int, Tensor] = {}  # the full cache's logits [t, V], by the chunk's first index

    def compare_group(group: list[int]) -> list[Forced]:
        """Return the results of the rows ``group``, each with its divergence from the full cache."""
        divergences = [Divergence.empty(len(ids) - 1) for _ in group]

        def compare_chunk(start: int, logits: Tensor) -> None:
            """Compare a chunk's logits [B, t, V] with the full cache's, and write the result from ``start`` on."""
            # the first row of the first group is the full cache
            reference = references.get(start, logits[0])
            # only a later group reads the reference again
            if len(groups) > 1:
                references[start] = reference
            targets = ids[start + 1 : start + 1 + len(reference)]
            compared_rows = compare_logits(reference, logits, targets)
            for divergence, compared in zip(divergences, compared_rows, strict=True):
                divergence.put(start, compared)

        with exact_head(model):
            forced_rows = _force(model, [rows[r] for r in group], ids, chunk=chunk, on_logits=compare_chunk, alone=True)
        return [replace(forced, divergence=d) for forced, d in zip(forced_rows, divergences, strict=True)]

    results: dict[int, Forced] = {}
    for group in groups:
        results.update(zip(group, compare_group(group), strict=True))
    # rows were the full cache, ``caches`` and the nudged full cache
    full_row, nudged_row = 0, len(rows) - 1
    return results[full_row], [results[r] for r in range(1, nudged_row)], results[nudged_row]


def compute_forced_logits(model: PreTrainedModel, cache: PromptCache, tokens: Tensor | Sequence[int]) -> Tensor:
    """Return the logits [T, V] by which the cache predicts each of ``tokens`` [T] when they are fed after it.

    Raises UsageError if the model cannot read them after the cache.
    """
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
    on_logits: Callable[[int, Tensor], None] | None = None,
    alone: bool = False,
) -> list[Forced]:
    """Feed ``ids`` [T] after each cache, all caches in one batch, and return the result of each without divergence.

    All chains must change the model alike, since the batch runs in one adapted model.

    chunk: how many tokens are fed at a time.
    on_logits: called with each chunk's first index and the logits [B, t, V] after its tokens; None: nothing is called.
    alone: True if the tokens of a chunk are read and packed as if each came alone.
    """
    chain, prompt_tokens = caches[0].chain, caches[0].seen
    if reads_one_by_one(model.config):
        chunk = 1
    else:
        # caches of packed tokens make room for a chunk, and attend over it all
        chunk = min(chunk, len(ids))
    # the prompt's own logits predict the first token
    losses = torch.empty(len(caches), len(ids), device=ids.device)
    losses[:, :1] = _compute_losses(torch.stack([cache.logits for cache in caches])[:, None], ids[:1])
    with adapted(model, chain), torch.no_grad(), attached(model):
        batch = build(model, caches, capacity=len(ids), at_once=chunk, alone=alone)
        # the last token is never fed, because nothing follows it
        for start in range(0, len(ids) - 1, chunk):
            chunk_ids = ids[start : min(start + chunk, len(ids) - 1)]
            first_position = prompt_tokens + start
            positions = torch.arange(first_position, first_position + len(chunk_ids), device=ids.device)
            rows = len(caches)
            logits = step(model, batch, chunk_ids.expand(rows, -1), positions.expand(rows, -1), whole=True)
            # logits after token i predict token i + 1
            scored = slice(start + 1, start + 1 + len(chunk_ids))
            losses[:, scored] = _compute_losses(logits, ids[scored])
            if on_logits is not None:
                on_logits(start, logits)
    compressed_layers = select_compressed(batch.with_keys)
    # a list for each row, of the most tokens of a head by layer: the transpose of [layers, B]
    tokens_by_row = torch.stack([layer.held() for layer in compressed_layers]).T.tolist()
    # a tuple for each row, of the payload bytes by layer
    payload_by_row = zip(*(layer.payload() for layer in compressed_layers), strict=True)
    results = []
    for row_losses, row_tokens, row_payload in zip(losses.cpu(), tokens_by_row, payload_by_row, strict=True):
        stored = Stored(fed=batch.used, payload=row_payload)
        results.append(Forced(losses=row_losses, held=row_tokens, stored=stored))
    return results


def _compute_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the negative log likelihoods [B, t] of targets [t] under logits [B, t, V], in fp32."""
    logp = logits.float().log_softmax(dim=-1)
    return -logp.gather(2, targets.expand(len(logits), -1)[..., None])[..., 0]

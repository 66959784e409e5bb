"""Teacher forcing: a text's likelihood after its compressed beginning, and how far that is from the full cache's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.audit.decode_audit import Stored
from kvbench.base.errors import UsageError
from kvbench.engine.decode_layer import compressed
from kvbench.engine.divergence import Divergence, compare, exact_head, nudged
from kvbench.engine.limits import check_turn
from kvbench.engine.patches import adapted, by_batch
from kvbench.engine.prefill import as_prompt
from kvbench.engine.step import build, step
from kvbench.methods.core.prompt_cache import Cache
from kvbench.methods.core.walls import contained
from kvbench.methods.core.watch import note_progress
from kvbench.models.interface import attached

CHUNK_BYTES = 2**28


@dataclass(frozen=True)
class Forced:
    """The result of teacher forcing one cache: the losses of the text's T tokens and what the cache stored."""

    losses: Tensor  # [T] fp32, on the CPU: negative log likelihood of each token
    held: list[int]  # the most tokens that a head of each layer held
    stored: Stored  # of each layer, after the last token
    # from a reference, at all T tokens but the first, which the prompt's own logits predict
    divergence: Divergence | None = None


def teacher_force(model: PreTrainedModel, caches: Sequence[Cache], tokens: Tensor, chunk: int) -> list[Forced]:
    """Return the losses of ``tokens`` [T] after each cache, in order; ``chunk`` tokens are fed at a time.

    Caches are not changed. Those whose chains change the model alike are rows of one batch. Raises UsageError unless
    all have read equally many tokens, as caches of one prompt have.
    """
    ids = _continuation(model, caches, tokens)
    results: dict[int, Forced] = {}
    for rows in by_batch(caches):
        results.update(zip(rows, _force(model, [caches[r] for r in rows], ids, chunk), strict=True))
    return [results[i] for i in range(len(caches))]


def diverge(
    model: PreTrainedModel, full: Cache, caches: Sequence[Cache], tokens: Tensor
) -> tuple[list[Forced], Divergence]:
    """Return the losses and the divergence from ``full`` of ``tokens`` [T] after each cache, and the floor's.

    ``full`` and its ``nudged`` copy are rows of each batch in which the model is as it is, so that both sides round
    alike; among the caches ``full`` is that very row. Rows that evict are fed token by token, as answers are, all
    others in chunks, with the same result. The output head is computed in fp32. Logits exist of one chunk alone, but
    for those of ``full`` where chains change the model: these rows are compared with [T, V] logits of one row.
    """
    ids = _continuation(model, [full, *caches], tokens)
    results: dict[int, Forced] = {}
    for one_by_one in (True, False):
        rows = [i for i, c in enumerate(caches) if c is not full and c.chain.evicts == one_by_one]
        if rows or not one_by_one:
            exact, *forced, floor = _diverge(model, full, [caches[r] for r in rows], ids, one_by_one)
            results.update(zip(rows, forced, strict=True))
    assert floor.divergence is not None
    return [exact if c is full else results[i] for i, c in enumerate(caches)], floor.divergence


def _diverge(
    model: PreTrainedModel, full: Cache, caches: Sequence[Cache], ids: Tensor, one_by_one: bool
) -> list[Forced]:
    """Return the result of the full cache, of each cache, and at the end of the nudged full cache."""
    rows = [full, *caches, nudged(full)]
    groups = by_batch(rows)  # the full cache is in the first
    # logits of one chunk take at most CHUNK_BYTES
    chunk = 1 if one_by_one else max(1, CHUNK_BYTES // (len(rows) * model.config.vocab_size * 4))
    references: dict[int, Tensor] = {}
    results: dict[int, Forced] = {}
    for group in groups:
        divergences = [Divergence.empty(len(ids) - 1) for _ in group]

        def compare_chunk(start: int, logits: Tensor, divergences: list[Divergence] = divergences) -> None:
            reference = references.get(start, logits[0])
            if len(groups) > 1:
                references[start] = reference
            targets = ids[start + 1 : start + 1 + len(reference)]
            for divergence, part in zip(divergences, compare(reference, logits, targets), strict=True):
                divergence.put(start, part)

        with exact_head(model):
            forced = _force(model, [rows[r] for r in group], ids, chunk, compare_chunk, alone=True)
        compared = (replace(f, divergence=d) for f, d in zip(forced, divergences, strict=True))
        results.update(zip(group, compared, strict=True))
    return [results[r] for r in range(len(rows))]


def forced_logits(model: PreTrainedModel, cache: Cache, tokens: Tensor | Sequence[int]) -> Tensor:
    """Return the logits [T, V] by which the cache predicts each of ``tokens`` [T], as they are fed after it."""
    ids = as_prompt(model, tokens)
    logits = [cache.logits[None]]
    chunk = 1 if cache.chain.evicts else len(ids)
    _force(model, [cache], ids, chunk, lambda start, chunk_logits: logits.append(chunk_logits[0]), alone=True)
    return torch.cat(logits)


def _continuation(model: PreTrainedModel, caches: Sequence[Cache], tokens: Tensor) -> Tensor:
    if len({c.seen for c in caches}) > 1:
        raise UsageError("teacher forcing continues caches that have read equally many tokens")
    check_turn(model, caches[0].seen, caches[0].seen + len(tokens))
    return as_prompt(model, tokens)


def _force(
    model: PreTrainedModel,
    caches: Sequence[Cache],
    ids: Tensor,
    chunk: int,
    on_logits: Callable[[int, Tensor], None] = lambda start, logits: None,
    alone: bool = False,
) -> list[Forced]:
    """Return the losses of ``ids`` [T] after each cache of one batch, whose chains change the model alike.

    Under ``alone`` the tokens of a chunk are read and packed as if each came alone. ``on_logits`` gets each chunk's
    first index and the logits [B, t, V] after its tokens.
    """
    chain, prompt_tokens = caches[0].chain, caches[0].seen
    # the first token is predicted by the prompt's own logits
    losses = torch.empty(len(caches), len(ids), device=ids.device)
    losses[:, :1] = _loss(torch.stack([c.logits for c in caches])[:, None], ids[:1])
    with contained(chain.name, chain.foreign), adapted(model, chain), torch.no_grad(), attached(model):
        batch = build(model, caches, len(ids), chunk, alone)
        for start in range(0, len(ids) - 1, chunk):
            note_progress()
            chunk_ids = ids[start : min(start + chunk, len(ids) - 1)]
            positions = torch.arange(prompt_tokens + start, prompt_tokens + start + len(chunk_ids), device=ids.device)
            rows = len(caches)
            logits = step(model, batch, chunk_ids.expand(rows, -1), positions.expand(rows, -1), whole=True)
            scored = slice(start + 1, start + 1 + len(chunk_ids))
            losses[:, scored] = _loss(logits, ids[scored])
            on_logits(start, logits)
    most_tokens = torch.stack([layer.held() for layer in compressed(batch)]).T.tolist()
    payload = zip(*(layer.payload() for layer in compressed(batch)), strict=True)
    columns = zip(losses.cpu(), most_tokens, payload, strict=True)
    return [Forced(loss, held, Stored(batch[0].used, row)) for loss, held, row in columns]


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return negative log likelihoods [B, t] of targets [t] under logits [B, t, V], in fp32."""
    logp = logits.float().log_softmax(dim=-1)
    return -logp.gather(2, targets.expand(len(logits), -1)[..., None])[..., 0]

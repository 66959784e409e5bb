"""Teacher forcing: the likelihood of a text after its compressed beginning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.audit.decode_audit import Stored
from kvbench.engine.patches import adapted, by_batch
from kvbench.engine.prefill import as_prompt
from kvbench.engine.step import build, step
from kvbench.errors import UsageError
from kvbench.methods.foreign import contained
from kvbench.methods.prompt_cache import Cache
from kvbench.models.interface import attached


@dataclass(frozen=True)
class Forced:
    """The result of teacher forcing one cache: the losses of the text's T tokens and what the cache stored."""

    losses: Tensor  # [T] fp32, on the CPU: negative log likelihood of each token
    held: list[int]  # the most tokens that a head of each layer held
    stored: Stored  # of each layer, after the last token


def teacher_force(model: PreTrainedModel, caches: Sequence[Cache], tokens: Tensor, chunk: int) -> list[Forced]:
    """Return the losses of ``tokens`` [T] after each cache, in order; ``chunk`` tokens are fed at a time.

    Caches are not changed. Those whose chains change the model alike are rows of one batch. Raises UsageError unless
    all have read equally many tokens, as caches of one prompt have.
    """
    if len({c.seen for c in caches}) > 1:
        raise UsageError("teacher forcing continues caches that have read equally many tokens")
    ids = as_prompt(model, tokens)
    results: dict[int, Forced] = {}
    for rows in by_batch(caches):
        chain = caches[rows[0]].chain
        with contained(chain.name, chain.foreign), adapted(model, chain):
            results.update(zip(rows, _force(model, [caches[r] for r in rows], ids, chunk), strict=True))
    return [results[i] for i in range(len(caches))]


def _force(model: PreTrainedModel, caches: Sequence[Cache], ids: Tensor, chunk: int) -> list[Forced]:
    """Return the losses of ``ids`` [T] after each cache of one batch, in a model that is adapted to them."""
    prompt_tokens, rows = caches[0].seen, len(caches)
    # the first token is predicted by the prompt's own logits
    losses = [_loss(torch.stack([c.logits for c in caches])[:, None], ids[:1])]
    batch = build(model, caches, len(ids), chunk)
    with torch.no_grad(), attached(model):
        for start in range(0, len(ids) - 1, chunk):
            chunk_ids = ids[start : min(start + chunk, len(ids) - 1)]
            positions = torch.arange(prompt_tokens + start, prompt_tokens + start + len(chunk_ids), device=ids.device)
            logits = step(model, batch, chunk_ids.expand(rows, -1), positions.expand(rows, -1), whole=True)
            losses.append(_loss(logits, ids[start + 1 : start + 1 + len(chunk_ids)]))
    most_tokens = torch.stack([layer.held() for layer in batch]).T.tolist()
    payload = zip(*(layer.payload() for layer in batch), strict=True)
    columns = zip(torch.cat(losses, dim=1).cpu(), most_tokens, payload, strict=True)
    return [Forced(loss, held, Stored(batch[0].used, row)) for loss, held, row in columns]


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return negative log likelihoods [B, t] of targets [t] under logits [B, t, V], in fp32."""
    logp = logits.float().log_softmax(dim=-1)
    return -logp.gather(2, targets.expand(len(logits), -1)[..., None])[..., 0]

"""Teacher forcing: how likely a text is after its compressed beginning."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache as HFCache

from kvbench.audit.decode_audit import Stored
from kvbench.engine.patches import adapted, by_batch
from kvbench.engine.prefill import as_prompt
from kvbench.engine.step import build, stored_in
from kvbench.errors import UsageError
from kvbench.methods.foreign import contained
from kvbench.methods.prompt_cache import Cache
from kvbench.models.interface import attached


def teacher_force(
    model: PreTrainedModel,
    caches: Sequence[Cache],
    tokens: Tensor,
    chunk: int,
    held: dict[int, list[int]] | None = None,
    stored: dict[int, Stored] | None = None,
) -> list[Tensor]:
    """Negative log likelihood of each of ``tokens`` [T] after each cache, fed ``chunk`` tokens at a time.

    All caches have read equally many tokens (methods of one prompt) and are not changed; those whose chains leave the
    model alike are rows of one batch.
    Returns one fp32 tensor [T] per cache, on the CPU. ``held`` is filled with the most tokens that a head of each layer
    of each cache held, ``stored`` with what its storage held at the end.
    """
    if not caches:
        return []
    if len({c.seen for c in caches}) > 1:
        raise UsageError("teacher forcing continues caches that have read equally many tokens")
    ids = as_prompt(model, tokens)
    losses: dict[int, Tensor] = {}
    for rows in by_batch(caches):
        chain = caches[rows[0]].chain
        with contained(chain.name, chain.foreign), adapted(model, chain):
            found, peaks, sizes = _force(model, [caches[r] for r in rows], ids, chunk)
        losses.update(zip(rows, found, strict=True))
        if held is not None:
            held.update(zip(rows, peaks, strict=True))
        if stored is not None:
            stored.update(zip(rows, sizes, strict=True))
    return [losses[i] for i in range(len(caches))]


def _force(
    model: PreTrainedModel, caches: Sequence[Cache], ids: Tensor, chunk: int
) -> tuple[list[Tensor], list[list[int]], list[Stored]]:
    """``teacher_force`` of one batch in a model that is adapted to it: losses, tokens held by layer, and storage."""
    seen, rows = caches[0].seen, len(caches)
    losses = [_loss(torch.stack([c.logits for c in caches])[:, None], ids[:1])]
    batch = build(model, caches, len(ids), chunk)
    with torch.no_grad(), attached(model):
        for start in range(0, len(ids) - 1, chunk):
            fed = ids[start : min(start + chunk, len(ids) - 1)]
            positions = torch.arange(seen + start, seen + start + len(fed), device=ids.device)
            out = model(
                input_ids=fed.expand(rows, -1),
                position_ids=positions.expand(rows, -1),
                past_key_values=HFCache(layers=list(batch)),
                use_cache=True,
            )
            losses.append(_loss(out.logits, ids[start + 1 : start + 1 + len(fed)]))
    peaks = torch.stack([layer.held() for layer in batch]).T.tolist()
    return list(torch.cat(losses, dim=1).cpu()), peaks, stored_in(batch)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log likelihoods [B, t] of targets [t] under logits [B, t, V], in fp32."""
    logp = logits.float().log_softmax(dim=-1)
    return -logp.gather(2, targets.expand(len(logits), -1)[..., None])[..., 0]

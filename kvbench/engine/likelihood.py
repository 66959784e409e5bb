"""Teacher forcing: a text's likelihood after its compressed beginning, and how far that is from the full cache's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.audit.decode_audit import Stored
from kvbench.engine.divergence import Divergence, compare, exact_head, nudged
from kvbench.engine.patches import adapted, by_batch
from kvbench.engine.prefill import as_prompt
from kvbench.engine.step import build, step
from kvbench.errors import UsageError
from kvbench.methods.foreign import contained
from kvbench.methods.prompt_cache import Cache
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
        forcing = _Forcing(model, [caches[r] for r in rows], ids, chunk)
        for start in range(0, len(ids) - 1, chunk):
            forcing.feed(start, chunk)
        results.update(zip(rows, forcing.results(), strict=True))
    return [results[i] for i in range(len(caches))]


def diverge(
    model: PreTrainedModel, full: Cache, caches: Sequence[Cache], tokens: Tensor
) -> tuple[list[Forced], Divergence]:
    """Return the losses and the divergence from ``full`` of ``tokens`` [T] after each cache, and the floor's.

    ``full`` and its ``nudged`` copy are rows of the batch whose model is as it is; where chains change the model, that
    batch goes beside theirs, so that logits exist of one chunk alone. Rows that pack or evict while decoding are fed
    token by token, as answers are, all others in chunks. The output head is computed in fp32.
    """
    ids = _continuation(model, [full, *caches], tokens)
    results: dict[int, Forced] = {}
    for one_by_one in (True, False):
        rows = [i for i, c in enumerate(caches) if (c.chain.evicts or c.chain.coder is not None) == one_by_one]
        if rows or not one_by_one:
            *forced, floor = _diverge(model, full, [caches[r] for r in rows], ids, one_by_one)
            results.update(zip(rows, forced, strict=True))
    assert floor.divergence is not None
    return [results[i] for i in range(len(caches))], floor.divergence


def _diverge(
    model: PreTrainedModel, full: Cache, caches: Sequence[Cache], ids: Tensor, one_by_one: bool
) -> list[Forced]:
    """Return the result of each cache, and at the end that of the nudged full cache."""
    rows = [full, *caches, nudged(full)]
    groups = by_batch(rows)  # the full cache is in the first
    # logits of one chunk take at most CHUNK_BYTES
    chunk = 1 if one_by_one else max(1, CHUNK_BYTES // (len(rows) * model.config.vocab_size * 4))
    batches = [_Forcing(model, [rows[r] for r in group], ids, chunk) for group in groups]
    divergences: dict[int, list[Divergence]] = {r: [] for r in range(len(rows))}
    with exact_head(model):
        for start in range(0, len(ids) - 1, chunk):
            reference = None
            for group, batch in zip(groups, batches, strict=True):
                logits = batch.feed(start, chunk)
                reference = logits[0] if reference is None else reference
                targets = ids[start + 1 : start + 1 + len(reference)]
                for row, divergence in zip(group, compare(reference, logits, targets), strict=True):
                    divergences[row].append(divergence)
    forced = {
        r: f for group, batch in zip(groups, batches, strict=True) for r, f in zip(group, batch.results(), strict=True)
    }
    return [replace(forced[r], divergence=Divergence.joined(divergences[r])) for r in range(1, len(rows))]


def _continuation(model: PreTrainedModel, caches: Sequence[Cache], tokens: Tensor) -> Tensor:
    if len({c.seen for c in caches}) > 1:
        raise UsageError("teacher forcing continues caches that have read equally many tokens")
    return as_prompt(model, tokens)


class _Forcing:
    """A batch of caches that change the model alike, while a text of T tokens is fed to it chunk by chunk."""

    def __init__(self, model: PreTrainedModel, caches: Sequence[Cache], ids: Tensor, chunk: int) -> None:
        self.model, self.ids, self.rows = model, ids, len(caches)
        self.chain, self.prompt_tokens = caches[0].chain, caches[0].seen
        # the first token is predicted by the prompt's own logits
        self.losses = [_loss(torch.stack([c.logits for c in caches])[:, None], ids[:1])]
        with self._adapted():
            self.batch = build(model, caches, len(ids), chunk)

    @contextmanager
    def _adapted(self) -> Iterator[None]:
        with contained(self.chain.name, self.chain.foreign), torch.no_grad(), adapted(self.model, self.chain):
            yield

    def feed(self, start: int, chunk: int) -> Tensor:
        """Feed ``chunk`` tokens from ``start`` on, but not the text's last; return the logits [B, t, V] after them."""
        ids = self.ids[start : min(start + chunk, len(self.ids) - 1)]
        first = self.prompt_tokens + start
        positions = torch.arange(first, first + len(ids), device=ids.device)
        with self._adapted(), attached(self.model):
            logits = step(
                self.model, self.batch, ids.expand(self.rows, -1), positions.expand(self.rows, -1), whole=True
            )
        self.losses.append(_loss(logits, self.ids[start + 1 : start + 1 + len(ids)]))
        return logits

    def results(self) -> list[Forced]:
        """Return the losses of each row and what its cache has stored."""
        most_tokens = torch.stack([layer.held() for layer in self.batch]).T.tolist()
        payload = zip(*(layer.payload() for layer in self.batch), strict=True)
        columns = zip(torch.cat(self.losses, dim=1).cpu(), most_tokens, payload, strict=True)
        return [Forced(loss, held, Stored(self.batch[0].used, row)) for loss, held, row in columns]


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return negative log likelihoods [B, t] of targets [t] under logits [B, t, V], in fp32."""
    logp = logits.float().log_softmax(dim=-1)
    return -logp.gather(2, targets.expand(len(logits), -1)[..., None])[..., 0]

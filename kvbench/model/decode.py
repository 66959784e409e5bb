"""Greedy decoding of many caches at once: prompt x method, as rows of one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache as HFCache

from kvbench.cache.peak import Stored
from kvbench.cache.slots import Rotary
from kvbench.errors import UsageError
from kvbench.model.adapted import adapted, alike
from kvbench.model.interface import attached, sliding_window
from kvbench.model.lowrank import lifts
from kvbench.model.prefill import as_prompt, check_capacity, check_window
from kvbench.model.rows import RowLayer
from kvbench.types import Cache

FINISHED_SHARE = 0.25


@dataclass(frozen=True)
class Ending:
    """How one row's tokens are chosen and when its answer ends.

    It ends after ``limit`` tokens, or with the first of ``stop``, which cannot come before ``min_new_tokens`` others;
    ``forbid_first`` cannot be the first token. ``temperature`` 0 is greedy; else tokens are drawn from the smallest
    set with mass ``top_p``, by a generator of the row's own, so that the draw does not depend on the batch.
    """

    limit: int
    stop: frozenset[int] = frozenset()
    min_new_tokens: int = 0
    forbid_first: frozenset[int] = frozenset()
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def over(self, tokens: Sequence[int]) -> bool:
        """Whether an answer of these tokens is finished."""
        return len(tokens) >= self.limit or bool(tokens and tokens[-1] in self.stop)

    def forbidden(self, count: int) -> frozenset[int]:
        """Tokens that cannot come after ``count`` others."""
        early = self.stop if count < self.min_new_tokens else frozenset()
        return early | self.forbid_first if count == 0 else early


def generate_rows(
    model: PreTrainedModel,
    caches: Sequence[Cache],
    endings: Sequence[Ending],
    attended: dict[int, float] | None = None,
    held: dict[int, list[int]] | None = None,
    stored: dict[int, Stored] | None = None,
) -> list[list[int]]:
    """Greedy tokens of each cache until each row's own ending, as one batch of all that leave the model alike.

    ``attended`` is filled for rows whose method masks: tokens attended, the mean over steps, heads and masked layers.
    ``held`` is filled for all rows: the most tokens that a head of each layer held until the row's own ending.
    ``stored`` is filled for rows that read more than their prompt: what their storage held when they left the batch.
    """
    outputs: list[list[int]] = [[] for _ in caches]
    for rows in alike(caches):
        mine: dict[int, float] = {}
        peaks: dict[int, list[int]] = {}
        sizes: dict[int, Stored] = {}
        with adapted(model, caches[rows[0]].chain):
            found = _generate(model, [caches[r] for r in rows], [endings[r] for r in rows], mine, peaks, sizes)
        for r, tokens in zip(rows, found, strict=True):
            outputs[r] = tokens
        if attended is not None:
            attended.update({rows[i]: value for i, value in mine.items()})
        if held is not None:
            held.update({rows[i]: value for i, value in peaks.items()})
        if stored is not None:
            stored.update({rows[i]: value for i, value in sizes.items()})
    return outputs


def _generate(
    model: PreTrainedModel,
    caches: Sequence[Cache],
    endings: Sequence[Ending],
    attended: dict[int, float],
    held: dict[int, list[int]],
    stored: dict[int, Stored],
) -> list[list[int]]:
    """``generate_rows`` for rows of one batch, in a model that is adapted to them."""
    outputs: list[list[int]] = [[] for _ in caches]
    live = list(range(len(caches)))
    draws = [torch.Generator().manual_seed(e.seed) if e.temperature else None for e in endings]

    def choose(logits: Tensor, rows: Sequence[int]) -> Tensor:
        masked = _mask(logits, [endings[r].forbidden(len(outputs[r])) for r in rows])
        chosen = masked.argmax(dim=-1)
        for i, r in enumerate(rows):
            generator = draws[r]
            if generator is not None:
                chosen[i] = sample(masked[i], endings[r].temperature, endings[r].top_p, generator)
        return chosen

    tally: list[list[Tensor]] = [[] for _ in caches]
    tokens = choose(torch.stack([c.logits for c in caches]), live)
    batch: list[RowLayer] | None = None
    with torch.no_grad(), attached(model):
        while True:
            for row, token in zip(live, tokens.tolist(), strict=True):
                if not endings[row].over(outputs[row]):
                    outputs[row].append(token)
            going = [i for i, r in enumerate(live) if not endings[r].over(outputs[r])]
            ended = [(i, r) for i, r in enumerate(live) if r not in held and i not in going]
            if ended:
                peaks = torch.stack([layer.held() for layer in batch]).T.tolist() if batch else None
                held.update({r: peaks[i] if peaks else [c.tokens for c in caches[r].layers] for i, r in ended})
            if batch is not None and len(going) <= len(live) * (1 - FINISHED_SHARE):
                left = set(live) - {live[i] for i in going}
                stored.update({r: size for r, size in zip(live, stored_in(batch), strict=True) if r in left})
            if not going:
                attended.update({r: float(torch.stack(t).mean()) for r, t in enumerate(tally) if t})
                return outputs
            if len(going) <= len(live) * (1 - FINISHED_SHARE) or batch is None:
                kept = torch.tensor(going, device=tokens.device)
                tokens, live = tokens[kept], [live[i] for i in going]
                if batch is None:
                    batch = build(model, [caches[r] for r in live], max(endings[r].limit for r in live) - 1)
                    seen = torch.tensor([caches[r].seen for r in live], device=tokens.device)
                    limits = torch.tensor([endings[r].limit for r in live], device=tokens.device)
                    last = seen + (limits - 2).clamp(min=0)
                else:
                    for layer in batch:
                        layer.keep(kept)
                    seen, last = seen[kept], last[kept]
            # a row that has ended is fed on until it leaves, but never past its own last position
            positions = torch.minimum(seen + batch[0].used, last)
            logits = step(model, batch, tokens[:, None], positions[:, None])[:, -1]
            masked = [layer.attended for layer in batch if layer.attended is not None]
            if masked:
                mean = torch.stack(masked).mean(dim=0)
                for i, r in enumerate(live):
                    if caches[r].chain.masks and not endings[r].over(outputs[r]):
                        tally[r].append(mean[i])
            tokens = choose(logits, live)


def stored_in(batch: Sequence[RowLayer]) -> list[Stored]:
    """What the storage of each row of a batch holds now."""
    columns = zip(*(layer.stored() for layer in batch), strict=True)
    return [Stored(batch[0].used, column) for column in columns]


def sample(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """One token of logits [V]: softmax at ``temperature``, cut to the smallest set with mass ``top_p``, one draw."""
    probs, order = (logits.float() / temperature).softmax(dim=-1).cpu().sort(descending=True, stable=True)
    mass = probs.cumsum(dim=-1)
    kept = int((mass < top_p).sum()) + 1
    point = torch.rand((), generator=generator) * mass[min(kept, len(mass)) - 1]
    return int(order[min(int((mass < point).sum()), kept - 1, len(order) - 1)])


def _mask(logits: Tensor, forbidden: Sequence[frozenset[int]]) -> Tensor:
    """Logits [B, V] without the tokens that a row cannot produce now."""
    if any(forbidden):
        logits = logits.clone()
        for row, ids in enumerate(forbidden):
            logits[row, sorted(ids)] = -torch.inf
    return logits


def build(model: PreTrainedModel, caches: Sequence[Cache], capacity: int, at_once: int = 1) -> list[RowLayer]:
    """The decode batch of ``caches``, one RowLayer per model layer, with room for ``capacity`` new tokens.

    The model is as their chains adapt it, for as long as the batch is used.

    ``at_once`` of them at most come in one step.
    """
    window = sliding_window(model.config)
    windowed = window is not None and max(c.seen for c in caches) + capacity > window
    evictors = [c.chain.evictor for c in caches]
    lifted = lifts(model)
    rotary = rotation(model) if any(e is not None and e.rolled for e in evictors) else None
    return [
        RowLayer(
            [c.layers[i] for c in caches],
            capacity,
            windowed,
            evictors,
            i,
            rotary,
            [c.chain.masker(i) for c in caches],
            [c.chain.coder for c in caches],
            at_once,
            lifted[i] if lifted else None,
        )
        for i in range(len(caches[0].layers))
    ]


def rotation(model: PreTrainedModel) -> Rotary:
    """The model's rotary frequencies; raises UsageError for one with learned positions (OPT)."""
    found = next((m for m in model.modules() if hasattr(m, "inv_freq")), None)
    if found is None:
        raise UsageError(
            f"positions=rolled needs rotary positions, the family {model.config.model_type!r} learns its positions"
        )
    return Rotary(found.inv_freq)  # type: ignore[arg-type]


def step(model: PreTrainedModel, batch: Sequence[RowLayer], tokens: Tensor, positions: Tensor) -> Tensor:
    """Feed ``tokens`` [B, T] at ``positions`` [B, T]; returns the logits [B, 1, V] after the last."""
    out = model(
        input_ids=tokens,
        position_ids=positions,
        past_key_values=HFCache(layers=list(batch)),
        use_cache=True,
        logits_to_keep=1,
    )
    return out.logits


def extend_cache(model: PreTrainedModel, cache: Cache, input_ids: Tensor | Sequence[int]) -> Cache:
    """A new cache that has also read ``input_ids`` [T] behind the compressed prompt.

    The tokens stay whole, but where the chain goes on packing or evicting while decoding: then they are stored, one
    after the other, as tokens of an answer are.
    """
    ids = as_prompt(model, input_ids)
    check_continuation(model, cache, ids.shape[0])
    # methods that evict or pack while decoding do so after every token
    size = 1 if cache.chain.evicts or cache.chain.coder else len(ids)
    with torch.no_grad(), adapted(model, cache.chain), attached(model):
        batch = build(model, [cache], ids.shape[0])
        for start in range(0, len(ids), size):
            piece = ids[start : start + size]
            positions = torch.arange(cache.seen + start, cache.seen + start + len(piece), device=ids.device)
            logits = step(model, batch, piece[None], positions[None])
    layers = [new.continued(old) for old, new in zip(cache.layers, batch, strict=True)]
    return replace(cache, layers=tuple(layers), logits=logits[0, -1].clone())


def check_continuation(model: PreTrainedModel, cache: Cache, new_tokens: int) -> None:
    """Raise UsageError unless ``cache`` is of this model and can take ``new_tokens`` more."""
    if cache.model is not None and cache.model() is not model:
        raise UsageError("this cache was made by another model object; prefill the prompt with this one")
    check_capacity(model, cache.seen + new_tokens)
    check_window(model, cache.seen + new_tokens, [cache.chain])

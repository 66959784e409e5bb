"""Rows that decode together, prompt x method: they enter when there is room and leave when their answers end.

Rows that enter together are a cohort: they share the steps of their tails, so that nothing of those that run is moved.
Projections are batched over all rows, attention is that of each cohort.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.audit.decode_audit import Stored
from kvbench.engine.decode_layer import RowLayer
from kvbench.engine.patches import adapted
from kvbench.engine.row_bytes import allocated
from kvbench.engine.step import build, step, stored_in
from kvbench.engine.stopping import Ending, sample, without
from kvbench.errors import UsageError
from kvbench.methods.foreign import contained
from kvbench.methods.prompt_cache import Cache
from kvbench.models.interface import KvbenchLayer, attached

FINISHED_SHARE = 0.25
MOST_COHORTS = 4

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Answer:
    """One row's tokens with what was measured while they came."""

    tokens: list[int]
    held: list[int]  # the most tokens that a head of each layer held until the row's own ending
    attended: float | None  # where the method masks: tokens attended, the mean over steps, heads and masked layers
    seconds: float  # the row's share of the time of its steps
    rows: int  # rows that it ran beside at most, itself counted
    stored: Stored | None  # what its storage held at its ending; None if it read nothing but its prompt
    finite: bool = True  # whether all logits were that it was chosen by
    factor: float | None = None  # storage behind its batch over the payload of the rows in it, at the row's ending


@dataclass
class AnsweringRow(Generic[Key]):
    """A row that is being answered."""

    key: Key
    cache: Cache
    ending: Ending
    tokens: list[int] = field(default_factory=list)
    draw: torch.Generator | None = None
    tally: list[Tensor] = field(default_factory=list)
    held: list[int] | None = None
    stored: Stored | None = None
    factor: float | None = None
    seconds: float = 0.0
    rows: int = 0
    finite: bool = True

    @property
    def over(self) -> bool:
        return not self.finite or self.ending.over(self.tokens)

    def answer(self) -> Answer:
        assert self.held is not None
        attended = float(torch.stack(self.tally).mean()) if self.tally else None
        return Answer(self.tokens, self.held, attended, self.seconds, self.rows, self.stored, self.finite, self.factor)


class RowGroup(Generic[Key]):
    """Rows that entered together. One that has ended is fed on until enough have, and then they leave at once."""

    def __init__(self, model: PreTrainedModel, rows: Sequence[AnsweringRow[Key]], tokens: Tensor) -> None:
        self.rows = list(rows)
        self.tokens = tokens
        self.layers = build(model, [r.cache for r in rows], max(r.ending.limit for r in rows) - 1)
        self.seen = torch.tensor([r.cache.seen for r in rows], device=tokens.device)
        limits = torch.tensor([r.ending.limit for r in rows], device=tokens.device)
        self.last = self.seen + (limits - 2).clamp(min=0)

    def positions(self) -> Tensor:
        """Where the tokens that are fed next stand [B]; a row that has ended never goes past its own last position."""
        return torch.minimum(self.seen + self.layers[0].used, self.last)

    def tally(self) -> None:
        """Take down what the last step attended in rows whose method masks."""
        masked = [layer.attended for layer in self.layers if layer.attended is not None]
        if masked:
            mean = by_layer(masked, self.tokens.device).mean(dim=0)
            for i, row in enumerate(self.rows):
                if row.cache.chain.masks and not row.over:
                    row.tally.append(mean[i])

    def settle(self) -> list[AnsweringRow[Key]]:
        """Note what rows held that have ended just now, and return them; let ended rows go once they are many."""
        ended = [(i, r) for i, r in enumerate(self.rows) if r.over and r.held is None]
        if ended:
            peaks = by_layer([layer.held() for layer in self.layers], self.tokens.device).T.tolist()
            sizes = stored_in(self.layers)
            factor = allocated(self.layers) / max(1, sum(sum(size.payload) for size in sizes))
            for i, row in ended:
                row.held, row.stored, row.factor = peaks[i], sizes[i], factor
        going = [i for i, r in enumerate(self.rows) if not r.over]
        if going and len(going) <= len(self.rows) * (1 - FINISHED_SHARE):
            kept = torch.tensor(going, device=self.tokens.device)
            for layer in self.layers:
                layer.keep(kept)
            self.tokens, self.seen, self.last = self.tokens[kept], self.seen[kept], self.last[kept]
            self.rows = [self.rows[i] for i in going]
        return [r for _, r in ended]


def by_layer(found: Sequence[Tensor], device: torch.device) -> Tensor:
    """[layers, B] on ``device`` of a tensor [B] per layer, each of which lies where its layer does."""
    return torch.stack([f.to(device) for f in found])


class MergedLayer(KvbenchLayer):
    """One layer of several cohorts."""

    def __init__(self, parts: Sequence[RowLayer]) -> None:
        super().__init__()
        self.parts = parts
        self.counts = [len(p.starts) for p in parts]
        self.seen = max(p.seen for p in parts)

    def add(self, k: Tensor, v: Tensor) -> None:
        for part, own_k, own_v in zip(self.parts, k.split(self.counts), v.split(self.counts), strict=True):
            part.add(own_k, own_v)
        self.seen = max(p.seen for p in self.parts)

    def attend(self, query: Tensor, scale: float, window: int | None) -> Tensor:
        return torch.cat(
            [
                part.attend(q, scale, window if window is not None and part.seen > window else None)
                for part, q in zip(self.parts, query.split(self.counts), strict=True)
            ]
        )


class DecodeBatch(Generic[Key]):
    """Rows of chains that leave the model alike, by a key of the caller's. Its length is the number of rows that were
    not handed back yet.

    Whatever ``advance`` raises, the batch is then of no more use: rows begin again, from their caches, in another.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.cohorts: list[RowGroup[Key]] = []
        self.entering: list[AnsweringRow[Key]] = []

    def __len__(self) -> int:
        return len(self.entering) + sum(not r.over for c in self.cohorts for r in c.rows)

    @property
    def adapts(self) -> bool:
        """Whether the model is changed for these rows. It then stays so until all have ended: none can enter."""
        return any(r.cache.chain.adaptation for r in (*self.entering, *(r for c in self.cohorts for r in c.rows)))

    @property
    def open(self) -> bool:
        """Whether rows can enter."""
        return not len(self) or not (self.adapts or len(self.cohorts) >= MOST_COHORTS)

    def enter(self, rows: Sequence[tuple[Key, Cache, Ending]]) -> None:
        """Add rows, which start at the next step as one cohort."""
        if not self.open:
            raise UsageError("no rows can enter this batch now")
        for key, cache, ending in rows:
            draw = torch.Generator().manual_seed(ending.seed) if ending.temperature else None
            self.entering.append(AnsweringRow(key, cache, ending, draw=draw))

    def advance(self) -> list[tuple[Key, Answer]]:
        """Step until a row ends (all of them, where the model is adapted to these); those that have ended."""
        ended: list[AnsweringRow[Key]] = []
        everything = self.adapts
        chain = next((r.cache.chain for r in (*self.entering, *(r for c in self.cohorts for r in c.rows))), None)
        if chain is None:
            return []
        walls = contained(chain.name, chain.foreign)  # such rows run alone, see Chain.batch_key
        with walls, torch.no_grad(), adapted(self.model, chain), attached(self.model):
            while len(self) and (everything or not ended):
                start = time.perf_counter()
                entered, self.entering = self.entering, []
                going = [r for c in self.cohorts for r in c.rows if not r.over] + entered
                if entered:
                    ended += self._begin(entered)
                if any(not r.over for r in going):
                    ended += self._step()
                # the tokens were copied to the CPU: the step is over, on a GPU too
                share = (time.perf_counter() - start) / len(going)
                for row in going:
                    row.seconds += share
                    row.rows = max(row.rows, len(going))
        return [(r.key, r.answer()) for r in ended]

    def _begin(self, rows: list[AnsweringRow[Key]]) -> list[AnsweringRow[Key]]:
        """Choose the first tokens of entering rows; those whose answer ends with it never decode."""
        tokens = _choose(torch.stack([r.cache.logits for r in rows]), rows)
        for row in rows:
            if row.over:
                row.held = [layer.tokens for layer in row.cache.layers]
        going = [i for i, r in enumerate(rows) if not r.over]
        if going:
            kept = torch.tensor(going, device=tokens.device)
            self.cohorts.append(RowGroup(self.model, [rows[i] for i in going], tokens[kept]))
        return [r for r in rows if r.over]

    def _step(self) -> list[AnsweringRow[Key]]:
        """Feed every row its last token and choose the next; the rows that end with it."""
        cohorts = self.cohorts
        tokens = torch.cat([c.tokens for c in cohorts])
        positions = torch.cat([c.positions() for c in cohorts])
        layers: Sequence[KvbenchLayer] = cohorts[0].layers
        if len(cohorts) > 1:
            layers = [MergedLayer(parts) for parts in zip(*(c.layers for c in cohorts), strict=True)]
        logits = step(self.model, layers, tokens[:, None], positions[:, None])[:, -1]
        for cohort in cohorts:
            cohort.tally()
        chosen = _choose(logits, [r for c in cohorts for r in c.rows])
        ended: list[AnsweringRow[Key]] = []
        for cohort, mine in zip(cohorts, chosen.split([len(c.rows) for c in cohorts]), strict=True):
            cohort.tokens = mine
            ended += cohort.settle()
        self.cohorts = [c for c in cohorts if any(not r.over for r in c.rows)]
        return ended


def _choose(logits: Tensor, rows: Sequence[AnsweringRow[Key]]) -> Tensor:
    """The next token of each row [B] by logits [B, V], taken down in those that go on.

    A row whose logits hold NaN or +inf ends here: the largest, which such a number always is, tells.
    """
    masked = without(logits, [r.ending.forbidden(len(r.tokens)) for r in rows])
    chosen = masked.argmax(dim=-1)
    finite = masked.gather(1, chosen[:, None])[:, 0].isfinite()
    for i, row in enumerate(rows):
        if row.draw is not None and not row.over:
            chosen[i] = sample(masked[i], row.ending.temperature, row.ending.top_p, row.draw)
    # one copy to the CPU for both
    for row, token in zip(rows, torch.where(finite, chosen, -1).tolist(), strict=True):
        if row.over:
            continue
        if token < 0:
            row.finite = False
        else:
            row.tokens.append(token)
    return chosen

"""Rows (prompt x method) that decode together: they enter when there is room and leave when their answers end.

Rows that enter together share their storage, so that no storage of running rows is moved. Projections are batched over
all rows, attention over those of one storage format.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.audit.decode_audit import Stored
from kvbench.base.errors import UsageError
from kvbench.engine.decode_layer import RowLayer, allocated, compressed
from kvbench.engine.patches import adapted
from kvbench.engine.step import build, given_up, step
from kvbench.engine.stopping import Ending, sample, without
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.prompt_cache import Cache
from kvbench.methods.core.walls import contained
from kvbench.methods.core.watch import note_progress
from kvbench.models.interface import attached

ENDED_SHARE = 0.25  # of rows that entered together: ended ones leave once they are this share
MOST_ENTRIES = 4  # groups of rows that entered together: each is attended separately

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Answer:
    """One row's tokens with the measurements of their decoding."""

    tokens: list[int]
    held: list[int]  # the most tokens that a head of each layer held until the row's own ending
    attended: float | None  # tokens attended, the mean over steps, heads, masked layers; None: no masking
    seconds: float  # the row's share of the time of its steps
    rows: int  # the most rows that ran at once, itself counted
    stored: Stored | None  # its storage at its ending; None if it read nothing but its prompt
    finite: bool = True  # False if logits that its tokens are chosen by were not finite
    factor: float | None = None  # storage behind its batch over the payload of the rows in it, at the row's ending


@dataclass
class AnsweringRow(Generic[Key]):
    """A row that is being answered."""

    key: Key
    chain: Chain
    ending: Ending
    cache: Cache | None = None  # until the batch holds it
    tokens: list[int] = field(default_factory=list)
    draw: torch.Generator | None = None
    tally: list[Tensor] = field(default_factory=list)
    held: list[int] | None = None
    stored: Stored | None = None
    factor: float | None = None
    seconds: float = 0.0
    rows: int = 0
    finite: bool = True
    entry: int = 0  # the rows of equal number entered together
    fed: int = 0  # tokens that it has read since

    @property
    def over(self) -> bool:
        return not self.finite or self.ending.over(self.tokens)

    def give_up(self) -> Cache:
        """Return the cache, which is not kept here from now on."""
        cache, self.cache = self.cache, None
        assert cache is not None
        return cache

    def answer(self) -> Answer:
        assert self.held is not None
        attended = float(torch.stack(self.tally).mean()) if self.tally else None
        return Answer(self.tokens, self.held, attended, self.seconds, self.rows, self.stored, self.finite, self.factor)


def by_layer(values: Sequence[Tensor], device: torch.device) -> Tensor:
    """Stack one tensor [B] per layer, each on its layer's device, to [layers, B] on ``device``."""
    return torch.stack([v.to(device) for v in values])


class DecodeBatch(Generic[Key]):
    """Rows of chains that change the model alike, by the caller's keys. Its length is the number of unfinished rows.

    Rows that entered together are stored together. A row that has ended is fed on until ENDED_SHARE of the rows that
    entered with it have ended; then these leave at once. A cache is let go once the batch holds it: those that nobody
    else holds are freed layer by layer. After any exception of ``advance`` the batch is unusable, and its rows must
    begin again from their caches in another batch.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.entering: list[AnsweringRow[Key]] = []
        self.rows: list[AnsweringRow[Key]] = []
        self.layers: list[RowLayer] = []
        self.entries = 0  # how often rows have entered
        self.next = torch.empty(3, 0, dtype=torch.int64)
        """Each row's next token, its position, and the last position of the row's answer [3, B]."""

    def __len__(self) -> int:
        return len(self.entering) + sum(not r.over for r in self.rows)

    @property
    def adapts(self) -> bool:
        """True if the model is changed for these rows. It stays so until all have ended, and no row can enter."""
        return any(r.chain.adaptation for r in (*self.entering, *self.rows))

    @property
    def open(self) -> bool:
        """True if rows can enter now."""
        return not len(self) or not (self.adapts or len({r.entry for r in self.rows}) >= MOST_ENTRIES)

    def enter(self, rows: Sequence[tuple[Key, Cache, Ending]]) -> None:
        """Add rows, which start together at the next step."""
        if not self.open:
            raise UsageError("no rows can enter this batch now")
        for key, cache, ending in rows:
            draw = torch.Generator().manual_seed(ending.seed) if ending.temperature else None
            self.entering.append(AnsweringRow(key, cache.chain, ending, cache, draw=draw))

    def advance(self) -> list[tuple[Key, Answer]]:
        """Step until a row ends, or until all do if the model is adapted to them; return (key, answer) of each."""
        ended: list[AnsweringRow[Key]] = []
        until_all_end = self.adapts
        chain = next((r.chain for r in (*self.entering, *self.rows)), None)
        if chain is None:
            return []
        walls = contained(chain.name, chain.foreign)  # such rows run alone, see Chain.batch_key
        with walls, torch.no_grad(), adapted(self.model, chain), attached(self.model):
            while len(self) and (until_all_end or not ended):
                start = time.perf_counter()
                note_progress()
                entered, self.entering = self.entering, []
                going = [r for r in self.rows if not r.over] + entered
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
        """Choose the first token of each entering row; return the rows whose answer ends with it and never decode."""
        caches = [r.give_up() for r in rows]
        tokens = _choose(torch.stack([c.logits for c in caches]), rows)
        for i, row in enumerate(rows):
            row.entry = self.entries
            if row.over:
                row.held = [layer.tokens for layer in caches[i].layers]
        self.entries += 1
        going = [i for i, r in enumerate(rows) if not r.over]
        caches = [caches[i] for i in going]
        if going:
            entering = [rows[i] for i in going]
            seen = [c.seen for c in caches]
            layers = build(self.model, given_up(caches), max(r.ending.limit for r in entering) - 1)
            for layer, entering_layer in zip(self.layers, layers if self.rows else (), strict=True):
                layer.join(entering_layer)
            self.layers = self.layers or layers
            # the last token of an answer is never fed: of ``limit`` tokens, the one before it is the last that is
            ends = [n + max(r.ending.limit - 2, 0) for n, r in zip(seen, entering, strict=True)]
            columns = torch.tensor([going, seen, ends], device=tokens.device)
            columns[0] = tokens[columns[0]]  # from indices to the tokens there
            self.next = torch.cat([self.next.to(tokens.device), columns], dim=1)
            self.rows = [*self.rows, *entering]
        return [r for r in rows if r.over]

    def _step(self) -> list[AnsweringRow[Key]]:
        """Feed every row its last token and choose the next; return the rows that end with it."""
        tokens, positions, ends = self.next
        logits = step(self.model, self.layers, tokens[:, None], positions[:, None])[:, -1]
        attended = [layer.attended for layer in self.layers if layer.attended is not None]
        mean_attended = by_layer(attended, logits.device).nanmean(dim=0) if attended else None
        for i, row in enumerate(self.rows):
            row.fed += 1
            if mean_attended is not None and row.chain.masks and not row.over:
                row.tally.append(mean_attended[i])
        # a row that has ended never goes past its own last position
        self.next = torch.stack([_choose(logits, self.rows), torch.minimum(positions + 1, ends), ends])
        return self._settle()

    def _settle(self) -> list[AnsweringRow[Key]]:
        """Record the storage of rows that have just ended, and return them; drop ended rows once they are many."""
        ended = [(i, r) for i, r in enumerate(self.rows) if r.over and r.held is None]
        if not ended:
            return []
        peaks = by_layer([layer.held() for layer in compressed(self.layers)], self.next.device).T.tolist()
        payload = list(zip(*(layer.payload() for layer in compressed(self.layers)), strict=True))
        factor = allocated(self.layers) / max(1, sum(sum(layer.payload()) for layer in self.layers))
        for i, row in ended:
            row.held, row.stored, row.factor = peaks[i], Stored(row.fed, payload[i]), factor
        entered, going = Counter(r.entry for r in self.rows), Counter(r.entry for r in self.rows if not r.over)
        thinned = {entry for entry, count in entered.items() if going[entry] <= count * (1 - ENDED_SHARE)}
        staying = [i for i, r in enumerate(self.rows) if not (r.over and r.entry in thinned)]
        if len(staying) < len(self.rows):
            index = torch.tensor(staying, dtype=torch.int64, device=self.next.device)
            for layer in self.layers if staying else ():
                layer.keep(index)
            self.layers = self.layers if staying else []
            self.rows = [self.rows[i] for i in staying]
            self.next = self.next[:, index]
        return [r for _, r in ended]


def _choose(logits: Tensor, rows: Sequence[AnsweringRow[Key]]) -> Tensor:
    """Return the next token of each row [B] by logits [B, V], and append it to the rows that go on.

    A row whose logits hold NaN or +inf ends here. Either is always the largest logit, so only that is checked.
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

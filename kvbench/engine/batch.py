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

ENDED_SHARE = 0.25
"""Ended rows leave the batch once they are this share of the rows that entered together with them."""
MOST_ENTRIES = 4
"""The most groups of rows that entered together, as each group is attended separately."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Answer:
    """One row's tokens with the measurements of their decoding.

    held: for each layer, the most tokens that a head held until the row's own ending.
    attended: the tokens attended, the mean over steps, heads and masked layers; None for a method that masks nothing.
    seconds: the row's share of the time of its steps.
    rows: the most rows that ran at once, itself counted.
    stored: its storage at its ending; None if it read nothing but its prompt.
    finite: False if logits from which its tokens are chosen were not finite.
    factor: all storage of its batch, divided by the payload of the rows in it, at the row's ending.
    """

    tokens: list[int]
    held: list[int]
    attended: float | None
    seconds: float
    rows: int
    stored: Stored | None
    finite: bool = True
    factor: float | None = None


@dataclass
class AnsweringRow(Generic[Key]):
    """A row that is being answered. Fields that ``Answer`` has, too, are described there.

    cache: the cache to start from, until the batch holds it.
    draw: the generator of the row's random draws; None where the likeliest token is taken.
    tally: the mean number of tokens attended, one tensor [] for each step under a method that masks.
    entry: the group of rows with which this one entered the batch.
    fed: how many tokens it has read since it entered.
    """

    key: Key
    chain: Chain
    ending: Ending
    cache: Cache | None = None
    tokens: list[int] = field(default_factory=list)
    draw: torch.Generator | None = None
    tally: list[Tensor] = field(default_factory=list)
    held: list[int] | None = None
    stored: Stored | None = None
    factor: float | None = None
    seconds: float = 0.0
    rows: int = 0
    finite: bool = True
    entry: int = 0
    fed: int = 0

    @property
    def over(self) -> bool:
        return not self.finite or self.ending.over(self.tokens)

    def give_up(self) -> Cache:
        """Return the cache and drop it here, so that the batch can free it layer by layer."""
        cache, self.cache = self.cache, None
        assert cache is not None
        return cache

    def answer(self) -> Answer:
        """Return the answer of a row that has ended."""
        assert self.held is not None
        attended = None
        if self.tally:
            attended = float(torch.stack(self.tally).mean())
        return Answer(
            tokens=self.tokens,
            held=self.held,
            attended=attended,
            seconds=self.seconds,
            rows=self.rows,
            stored=self.stored,
            finite=self.finite,
            factor=self.factor,
        )


def by_layer(values: Sequence[Tensor], device: torch.device) -> Tensor:
    """Stack one tensor [B] per layer, each on its layer's device, to [layers, B] on ``device``."""
    return torch.stack([v.to(device) for v in values])


class DecodeBatch(Generic[Key]):
    """Rows of chains that change the model alike, by the caller's keys. Its length is the number of unfinished rows.

    Rows that entered together are stored together. A row that has ended is fed on until ENDED_SHARE of the rows that
    entered with it have ended. Then these leave at once. A cache is let go once the batch holds it, so that its layers
    are freed one by one if nothing else refers to them. After any exception of ``advance`` the batch is unusable, and
    its rows must begin again from their caches in another batch.

    next: [3, B], each row's next token, its position, and the last position of the row's answer.
    entries: how often rows have entered.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.entering: list[AnsweringRow[Key]] = []
        self.rows: list[AnsweringRow[Key]] = []
        self.layers: list[RowLayer] = []
        self.entries = 0
        self.next = torch.empty(3, 0, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.entering) + len(self._select_unfinished_rows())

    def _select_unfinished_rows(self) -> list[AnsweringRow[Key]]:
        """Return the rows in the batch whose answers have not ended."""
        return [row for row in self.rows if not row.over]

    @property
    def adapts(self) -> bool:
        """True if the model is changed for these rows. It stays so until all have ended, and no row can enter."""
        return any(row.chain.adaptation for row in self.entering + self.rows)

    @property
    def open(self) -> bool:
        """True if rows can enter now."""
        if not len(self):
            return True
        entries = {row.entry for row in self.rows}
        return not self.adapts and len(entries) < MOST_ENTRIES

    def enter(self, rows: Sequence[tuple[Key, Cache, Ending]]) -> None:
        """Add rows, which start together at the next step."""
        if not self.open:
            raise UsageError("no rows can enter this batch now")
        for key, cache, ending in rows:
            # a generator for each row: a draw does not depend on the other rows
            draw = None
            if ending.temperature:
                draw = torch.Generator().manual_seed(ending.seed)
            self.entering.append(AnsweringRow(key, cache.chain, ending, cache=cache, draw=draw))

    def advance(self) -> list[tuple[Key, Answer]]:
        """Step until a row ends, or until all do if the model is adapted to them. Return (key, answer) of each."""
        all_rows = self.entering + self.rows
        if not all_rows:
            return []
        chain = all_rows[0].chain
        ended: list[AnsweringRow[Key]] = []
        until_all_end = self.adapts
        walls = contained(chain.name, chain.foreign)  # such rows run alone, see Chain.batch_key
        with walls, torch.no_grad(), adapted(self.model, chain), attached(self.model):
            while len(self) and (until_all_end or not ended):
                start = time.perf_counter()
                note_progress()
                entering_rows, self.entering = self.entering, []
                # rows that have ended are fed on, but their answers pay no more time
                running_rows = self._select_unfinished_rows() + entering_rows
                if entering_rows:
                    ended += self._begin(entering_rows)
                # entering rows may end with their first token
                if any(not row.over for row in running_rows):
                    ended += self._step()
                # the tokens were copied to the CPU: the step is over, on a GPU too
                seconds = (time.perf_counter() - start) / len(running_rows)
                for row in running_rows:
                    row.seconds += seconds
                    row.rows = max(row.rows, len(running_rows))
        return [(row.key, row.answer()) for row in ended]

    def _begin(self, rows: list[AnsweringRow[Key]]) -> list[AnsweringRow[Key]]:
        """Choose the first token of each entering row. Return the rows whose answer ends with it and never decode."""
        caches = [row.give_up() for row in rows]
        tokens = _choose_tokens(torch.stack([cache.logits for cache in caches]), rows)
        # by index: a name for a cache would keep it alive while the batch copies it, see ``given_up``
        for i, row in enumerate(rows):
            row.entry = self.entries
            if row.over:
                row.held = [layer.tokens for layer in caches[i].layers]
        self.entries += 1
        decoding = [i for i, row in enumerate(rows) if not row.over]
        caches = [caches[i] for i in decoding]
        if decoding:
            decoding_rows = [rows[i] for i in decoding]
            seen = [cache.seen for cache in caches]
            most_new_tokens = max(row.ending.limit for row in decoding_rows) - 1
            layers = build(self.model, given_up(caches), most_new_tokens)
            if self.rows:
                for layer, entering_layer in zip(self.layers, layers, strict=True):
                    layer.join(entering_layer)
            else:
                self.layers = layers
            # the last token of an answer is never fed: of ``limit`` tokens, the one before it is the last that is
            ends = [n + max(row.ending.limit - 2, 0) for n, row in zip(seen, decoding_rows, strict=True)]
            columns = torch.tensor([decoding, seen, ends], device=tokens.device)
            columns[0] = tokens[columns[0]]  # from indices to the tokens there
            self.next = torch.cat([self.next.to(tokens.device), columns], dim=1)
            self.rows = self.rows + decoding_rows
        return [row for row in rows if row.over]

    def _step(self) -> list[AnsweringRow[Key]]:
        """Feed every row its last token and choose the next. Return the rows that end with it."""
        tokens, positions, ends = self.next
        logits = step(self.model, self.layers, tokens[:, None], positions[:, None])[:, -1]
        attended = [layer.attended for layer in self.layers if layer.attended is not None]
        mean_attended = None
        if attended:
            # rows whose method does not mask a layer are nan there
            mean_attended = by_layer(attended, logits.device).nanmean(dim=0)
        for i, row in enumerate(self.rows):
            row.fed += 1
            if mean_attended is not None and row.chain.masks and not row.over:
                row.tally.append(mean_attended[i])
        # a row that has ended never goes past its own last position
        self.next = torch.stack([_choose_tokens(logits, self.rows), torch.minimum(positions + 1, ends), ends])
        return self._settle()

    def _settle(self) -> list[AnsweringRow[Key]]:
        """Record the storage of rows that have just ended, and return them. Drop ended rows once they are many."""
        newly_ended = [(i, row) for i, row in enumerate(self.rows) if row.over and row.held is None]
        if not newly_ended:
            return []
        compressed_layers = compressed(self.layers)
        # [layers, B] -> for each row, the most tokens of a head in each layer
        peaks = by_layer([layer.held() for layer in compressed_layers], self.next.device).T.tolist()
        # for each row, the payload bytes in each layer
        payload = list(zip(*(layer.payload() for layer in compressed_layers), strict=True))
        all_payload = sum(sum(layer.payload()) for layer in self.layers)
        factor = allocated(self.layers) / max(1, all_payload)
        for i, row in newly_ended:
            row.held, row.stored, row.factor = peaks[i], Stored(row.fed, payload[i]), factor
        self._drop_ended_rows()
        return [row for _, row in newly_ended]

    def _drop_ended_rows(self) -> None:
        """Drop the ended rows of each group that entered together, once they are ENDED_SHARE of it."""
        group_sizes = Counter(row.entry for row in self.rows)
        running_counts = Counter(row.entry for row in self._select_unfinished_rows())
        thinned_groups = set()
        for entry, size in group_sizes.items():
            if running_counts[entry] <= size * (1 - ENDED_SHARE):
                thinned_groups.add(entry)
        staying = [i for i, row in enumerate(self.rows) if not row.over or row.entry not in thinned_groups]
        if len(staying) == len(self.rows):
            return
        index = torch.tensor(staying, dtype=torch.int64, device=self.next.device)
        if not staying:
            self.layers = []
        for layer in self.layers:
            layer.keep(index)
        self.rows = [self.rows[i] for i in staying]
        self.next = self.next[:, index]


def _choose_tokens(logits: Tensor, rows: Sequence[AnsweringRow[Key]]) -> Tensor:
    """Return the next token of each row [B] by logits [B, V], and append it to the rows that go on.

    A row whose logits hold NaN or +inf ends here. Either is always the largest logit, so only that is checked.
    """
    masked = without(logits, [row.ending.forbidden(len(row.tokens)) for row in rows])
    # NaN and +inf are the largest to argmax, so that the chosen logit tells whether there are any
    chosen = masked.argmax(dim=-1)
    finite = masked.gather(1, chosen[:, None])[:, 0].isfinite()
    for i, row in enumerate(rows):
        if row.draw is not None and not row.over:
            chosen[i] = sample(masked[i], row.ending.temperature, row.ending.top_p, row.draw)
    # one copy to the CPU for both the tokens and whether logits were finite: -1 stands for a row whose logits were not
    tokens_or_fault = torch.where(finite, chosen, -1).tolist()
    for row, token in zip(rows, tokens_or_fault, strict=True):
        if row.over:
            continue
        if token < 0:
            row.finite = False
        else:
            row.tokens.append(token)
    return chosen

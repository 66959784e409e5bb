"""Rows (prompt x method) that decode together. A row enters when there is room and leaves when its answer ends.

Rows that enter together share their storage, so that the storage of running rows never moves. Projections are batched
over all rows, attention over the rows of one storage format.
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
from kvbench.engine.decode_layer import count_allocated, select_compressed
from kvbench.engine.patches import adapted
from kvbench.engine.step import BatchLayers, build, give_up_caches, step
from kvbench.engine.stopping import Ending, draw_token, forbid_tokens
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.prompt_cache import PromptCache
from kvbench.models.interface import attached

ENDED_SHARE = 0.25
"""Ended rows leave the batch once they are this share of the rows that entered together with them."""
MOST_ENTRIES = 4
"""The most groups of rows that entered together. Each group is attended separately, so more groups cost time."""

Key = TypeVar("Key", bound=Hashable)


def default_rows(device: torch.device) -> int:
    """Return the most rows that decode together on a device, unless ``batch_rows`` is set."""
    return 128 if device.type == "cuda" else 96


@dataclass
class Answer:
    """One row's tokens with the measurements of their decoding. A batch fills it while the row is answered.

    tokens: the answer's token ids so far.
    held: for each layer, the most tokens that a head held before the row ended.
    attended: how many tokens were attended, as the mean over steps, heads and masked layers; None if the method masks
        nothing.
    seconds: the row's share of the time of its steps.
    rows: the most rows that ran at once, this row included.
    stored: the bytes that the row held when it ended; None if it read nothing but its prompt.
    finite: False if the logits that choose its tokens were not finite. The answer then ends.
    factor: the bytes of all storage of the batch, divided by the payload bytes of its rows, when the row ended; None
        if ``stored`` is None.
    """

    tokens: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    attended: float | None = None
    seconds: float = 0.0
    rows: int = 0
    stored: Stored | None = None
    finite: bool = True
    factor: float | None = None


@dataclass
class AnsweringRow(Generic[Key]):
    """A row that is being answered.

    key: the caller's name for the row.
    chain: the methods that compressed the row's cache.
    ending: the rules that choose its tokens and end its answer.
    cache: the cache to start from, until the batch holds it.
    answer: the row's tokens so far, and their measurements. It is complete once the row has ended.
    at_text: True if the answer has reached a stop text.
    settled: True if the row has ended and ``answer`` has the measurements of its storage.
    draw: the generator of the row's random draws; None if the likeliest token is taken.
    tally: the mean number of tokens attended, one tensor [] for each step under a method that masks.
    entry: the number of the group of rows with which this row entered the batch.
    fed: how many tokens the row has read since it entered.
    """

    key: Key
    chain: Chain
    ending: Ending
    cache: PromptCache | None = None
    answer: Answer = field(default_factory=Answer)
    at_text: bool = False
    settled: bool = False
    draw: torch.Generator | None = None
    tally: list[Tensor] = field(default_factory=list)
    entry: int = 0
    fed: int = 0

    @property
    def over(self) -> bool:
        """True if the answer has ended."""
        return self.at_text or not self.answer.finite or self.ending.is_over(self.answer.tokens)

    def give_up_cache(self) -> PromptCache:
        """Return the cache and drop the row's own reference to it, so that the batch can free it layer by layer."""
        cache, self.cache = self.cache, None
        # a row begins once, so its cache is asked for once
        assert cache is not None
        return cache


def stack_layers(values: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return ``values``, one tensor [B] for each layer on that layer's device, as [layers, B] on ``device``."""
    return torch.stack([v.to(device) for v in values])


class DecodeBatch(Generic[Key]):
    """Rows that are answered together. Their chains change the model alike, and the caller's keys identify them.

    ``len()`` is the number of unfinished rows. Rows that entered together are stored together. An ended row is fed on
    until ENDED_SHARE of the rows of its group have ended. All ended rows of the group then leave at once. A cache is
    released when the batch holds it, so that its layers are freed one by one if nothing else refers to them. After any
    exception of ``advance`` the batch is unusable. Its rows must then begin again from their caches in another batch.

    entering: the rows that start at the next step.
    rows: the B rows that are stored in ``layers``, some of which may have ended.
    layers: the storage of these rows.
    entries: how many groups of rows have entered.
    next: [3, B], each row's next token, its position, and the last position of the row's answer.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.entering: list[AnsweringRow[Key]] = []
        self.rows: list[AnsweringRow[Key]] = []
        self.layers = BatchLayers([], [])
        self.entries = 0
        self.next = torch.empty(3, 0, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.entering) + len(self._select_unfinished_rows())

    def _select_unfinished_rows(self) -> list[AnsweringRow[Key]]:
        return [row for row in self.rows if not row.over]

    @property
    def adapts(self) -> bool:
        """True if the model is changed for these rows. It then stays so until all have ended, and no row can enter."""
        return any(row.chain.adaptation for row in self.entering + self.rows)

    @property
    def open(self) -> bool:
        """True if rows can enter now: nothing runs, or no chain changes the model and few groups are in the batch."""
        if not len(self):
            return True
        entries = {row.entry for row in self.rows}
        return not self.adapts and len(entries) < MOST_ENTRIES

    def enter(self, rows: Sequence[tuple[Key, PromptCache, Ending]]) -> None:
        """Add rows, each given as (key, cache, ending). They start together at the next step."""
        if not self.open:
            raise UsageError("no rows can enter this batch now")
        for key, cache, ending in rows:
            # each row has a generator of its own, so that its draws do not depend on other rows
            draw = torch.Generator().manual_seed(ending.seed) if ending.temperature else None
            self.entering.append(AnsweringRow(key, cache.chain, ending, cache=cache, draw=draw))

    def advance(self) -> list[tuple[Key, Answer]]:
        """Step until a row ends, or until all end if the model is changed for them. Return the ended rows.

        Each ended row is returned as (key, answer).
        """
        all_rows = self.entering + self.rows
        if not all_rows:
            return []
        chain = all_rows[0].chain
        ended: list[AnsweringRow[Key]] = []
        until_all_end = self.adapts
        with torch.no_grad(), adapted(self.model, chain), attached(self.model):
            while len(self) and (until_all_end or not ended):
                start = time.perf_counter()
                entering_rows, self.entering = self.entering, []
                # ended rows are fed on, but time is divided among the running rows only
                running_rows = self._select_unfinished_rows() + entering_rows
                if entering_rows:
                    ended += self._begin_rows(entering_rows)
                # entering rows may end with their first token, and then there is nothing to step
                if any(not row.over for row in running_rows):
                    ended += self._step_rows()
                # the step's tokens were copied to the CPU, so that the step is over on a GPU as well
                seconds = (time.perf_counter() - start) / len(running_rows)
                for row in running_rows:
                    row.answer.seconds += seconds
                    row.answer.rows = max(row.answer.rows, len(running_rows))
        return [(row.key, row.answer) for row in ended]

    def _begin_rows(self, rows: list[AnsweringRow[Key]]) -> list[AnsweringRow[Key]]:
        """Choose the first token of each entering row. Return the rows that end with it and never decode."""
        caches = [row.give_up_cache() for row in rows]
        tokens = _choose_tokens(torch.stack([cache.logits for cache in caches]), rows)
        # caches are indexed: a name for one would keep it alive while the batch copies it (see ``give_up_caches``)
        for i, row in enumerate(rows):
            row.entry = self.entries
            if row.over:
                row.answer.held = [layer.tokens for layer in caches[i].layers]
                row.settled = True
        self.entries += 1
        decoding = [i for i, row in enumerate(rows) if not row.over]
        # the caches of rows that have ended are freed here
        caches = [caches[i] for i in decoding]
        if decoding:
            self._store_rows([rows[i] for i in decoding], caches, tokens[decoding])
        return [row for row in rows if row.over]

    def _store_rows(self, rows: list[AnsweringRow[Key]], caches: list[PromptCache], tokens: Tensor) -> None:
        """Add rows that decode to the batch, each behind the tokens of its cache.

        caches: the cache of each row. The list is empty afterwards, so that layers are freed while they are copied.
        tokens: [U], the next token of each row.
        """
        seen = [cache.seen for cache in caches]
        # the last token of an answer is never fed, so it needs no room
        most_new_tokens = max(row.ending.limit for row in rows) - 1
        layers = build(self.model, give_up_caches(caches), most_new_tokens)
        if self.rows:
            self.layers.join(layers)
        else:
            self.layers = layers
        # the last position is that of the token before an answer's last token; a row that decodes has a limit of 2 or
        # more
        ends = [n + row.ending.limit - 2 for n, row in zip(seen, rows, strict=True)]
        positions_and_ends = torch.tensor([seen, ends], device=tokens.device)
        columns = torch.cat([tokens[None], positions_and_ends])
        self.next = torch.cat([self.next.to(tokens.device), columns], dim=1)
        self.rows = self.rows + rows

    def _step_rows(self) -> list[AnsweringRow[Key]]:
        """Feed every row its last token and choose the next one. Return the rows that end with that token."""
        tokens, positions, ends = self.next
        logits = step(self.model, self.layers, tokens[:, None], positions[:, None])[:, -1]
        attended = [layer.attended for layer in self.layers.with_keys if layer.attended is not None]
        mean_attended = None
        if attended:
            # a layer has nan for rows whose method does not mask it, and nanmean leaves nan out
            mean_attended = stack_layers(attended, logits.device).nanmean(dim=0)
        for i, row in enumerate(self.rows):
            row.fed += 1
            if mean_attended is not None and row.chain.masks and not row.over:
                row.tally.append(mean_attended[i])
        # an ended row never goes past its own last position
        self.next = torch.stack([_choose_tokens(logits, self.rows), torch.minimum(positions + 1, ends), ends])
        return self._settle_ended_rows()

    def _settle_ended_rows(self) -> list[AnsweringRow[Key]]:
        """Record the storage of rows that have just ended, and return them. Drop ended rows once they are many."""
        newly_ended = [(i, row) for i, row in enumerate(self.rows) if row.over and not row.settled]
        if not newly_ended:
            return []
        compressed_layers = select_compressed(self.layers.with_keys)
        # a list for each row, of the most tokens of a head by layer: the transpose of [layers, B]
        peaks_by_row = stack_layers([layer.held() for layer in compressed_layers], self.next.device).T.tolist()
        # a tuple for each row, of the payload bytes by layer
        payload_by_row = list(zip(*(layer.payload() for layer in compressed_layers), strict=True))
        all_payload = sum(sum(layer.payload()) for layer in self.layers.with_keys)
        factor = count_allocated(self.layers.with_keys) / max(1, all_payload)
        for i, row in newly_ended:
            row.answer.held = peaks_by_row[i]
            row.answer.stored = Stored(row.fed, payload_by_row[i])
            row.answer.factor = factor
            if row.tally:
                row.answer.attended = float(torch.stack(row.tally).mean())
            row.settled = True
        self._drop_ended_rows()
        return [row for _, row in newly_ended]

    def _drop_ended_rows(self) -> None:
        """Drop the ended rows of each group that entered together, once they are ENDED_SHARE of the group."""
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
            # the storage of a batch without rows is dropped whole
            self.layers = BatchLayers([], [])
        self.layers.keep(index)
        self.rows = [self.rows[i] for i in staying]
        self.next = self.next[:, index]


def _choose_tokens(logits: Tensor, rows: Sequence[AnsweringRow[Key]]) -> Tensor:
    """Return the next token [B] of each row by logits [B, V], and append it to the answers that have not ended.

    A row whose logits hold NaN or +inf ends here. NaN or +inf is always the largest logit, so only that one is checked.
    """
    masked = forbid_tokens(logits, [row.ending.list_forbidden(len(row.answer.tokens)) for row in rows])
    # argmax takes NaN and +inf as the largest, so that the chosen logit shows whether there are any
    chosen = masked.argmax(dim=-1)
    finite = masked.gather(1, chosen[:, None])[:, 0].isfinite()
    for i, row in enumerate(rows):
        if row.draw is not None and not row.over:
            chosen[i] = draw_token(masked[i], row.ending.temperature, row.ending.top_p, row.draw)
    # copy tokens and faults to the CPU together: -1 stands for a row whose logits were not finite
    tokens_or_fault = torch.where(finite, chosen, -1).tolist()
    for i, (row, token) in enumerate(zip(rows, tokens_or_fault, strict=True)):
        if row.over:
            continue
        if token < 0:
            row.answer.finite = False
            continue
        row.answer.tokens.append(token)
        if row.ending.is_too_early(row.answer.tokens):
            chosen[i] = _replace_last_token(masked[i].clone(), row)
        row.at_text = row.ending.texts.stand_in(row.answer.tokens)
    return chosen


def _replace_last_token(logits: Tensor, row: AnsweringRow[Key]) -> int:
    """Replace the last token of a row by the next one of logits [V] that is not too early. Return that token.

    The tokens in between get the logit -inf.
    """
    tokens = row.answer.tokens
    while row.ending.is_too_early(tokens) and int(logits.isfinite().sum()) > 1:
        logits[tokens[-1]] = -torch.inf
        if row.draw is None:
            tokens[-1] = int(logits.argmax())
        else:
            tokens[-1] = draw_token(logits, row.ending.temperature, row.ending.top_p, row.draw)
    return tokens[-1]

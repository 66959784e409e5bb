"""The first tokens of prompts that begin alike, read once: instructions, examples, a text up to where it differs.

Each prompt is read in pieces of as many tokens, whether they are known or not: no digit depends on the prompts before.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.base.conf import check, is_whole
from kvbench.base.errors import UsageError
from kvbench.engine.prompt_layer import EXACT, LayerStart
from kvbench.engine.prompt_pass import observe
from kvbench.kv.model_shape import local_layers
from kvbench.kv.observation import Needs, Observation
from kvbench.models.interface import synchronise
from kvbench.models.traits import MOVING, rope_type

LEAST = 16
"""The fewest tokens of a piece. Smaller ones would cost more than reading whole."""


def check_size(size: int | None) -> None:
    """Raise UsageError unless prompts can be read in pieces of ``size`` tokens; None: they are read whole."""
    possible = size is None or (is_whole(size) and size >= LEAST)
    check("shared_prefix", size, possible, f"null, or tokens that are read at a time, {LEAST} or more")


def check_pieces(size: int | None, config: Any) -> None:
    """Raise UsageError unless the tokens of a model, by its configuration, can be read in pieces as they are whole."""
    reasons = {
        "some of its layers attend a window": local_layers(config),
        "its rotary positions depend on the length of the text": rope_type(config) in MOVING,
    }
    reason = next((reason for reason, applies in reasons.items() if applies), None)
    if size is not None and reason is not None:
        raise UsageError(f"shared_prefix={size} is not possible for this model: {reason}. Leave it out")


@dataclass(frozen=True)
class PieceEnd:
    """The end of a piece: the column sums [Hq, e] of each layer up to there, and what reading so far has taken.

    colsums: by the bit width of the keys, as their seconds are; () once they are dropped.
    forward_s: seconds without those of column sums.
    """

    colsums: tuple[Mapping[int, Tensor], ...]
    forward_s: float
    colsums_s: Mapping[int, float]


class SharedPrefix:
    """The first tokens of the prompt read last, as long as pieces of ``size`` tokens go, kept for the next one.

    Held are their keys and values, and what stages need of them: last queries and column sums of some pieces, or all
    queries or hidden states. The model's weights must stay as they are, until ``forget``. Raises UsageError for a model
    whose tokens cannot be read in pieces alike.
    """

    def __init__(self, model: PreTrainedModel, size: int) -> None:
        check_size(size)
        check_pieces(size, model.config)
        self.model, self.size, self.needs, self.plain = model, size, Needs(), False
        self.forget()

    def forget(self) -> None:
        """Drop what is kept."""
        self.ids = torch.empty(0, dtype=torch.int64)
        self._layers: list[LayerStart] = []
        self._ends: list[PieceEnd] = []
        self._parted = 0  # pieces that the last prompts had in common

    def read(
        self, model: PreTrainedModel, ids: Tensor, needs: Needs, most: int, plain: bool = False
    ) -> tuple[Sequence[LayerStart], PieceEnd] | None:
        """Return the pieces of a prompt [n] within its first ``most`` tokens, of which known ones are not read again.

        They come as layers, and as the end of the last one, whose seconds are those of reading, whenever that was.
        ``needs`` are those of all that the prompt is read for. None where there is no whole piece, or stages need more
        first queries than a piece has.
        """
        if model is not self.model:
            raise UsageError("this prefix was read by another model object: make one for this model")
        needs = self.needs | replace(needs, last_q=min(needs.last_q, self.size))
        pieces = 0 if needs.first_q > self.size else most // self.size
        shared = min(pieces * self.size, len(self.ids))
        differing = (ids[:shared].cpu() != self.ids[:shared]).nonzero()
        known = self._parted = (int(differing[0]) if len(differing) else shared) // self.size
        if (needs, plain) != (self.needs, self.plain):
            self.needs, self.plain, known = needs, plain, 0
        while known and not self._ends[known - 1].colsums:
            known -= 1
        self._cut(known, last=known == pieces)
        try:
            while len(self._ends) < pieces:
                self._read_on(ids)
        except BaseException:
            self.forget()  # some layers have the next piece, and others not
            raise
        return (tuple(self._layers), self._ends[-1]) if pieces else None

    def _cut(self, pieces: int, last: bool) -> None:
        """Keep the first pieces alone: copies of them if these are the ``last`` that the prompt has."""
        if pieces == len(self._ends):
            return
        end, self._ends = pieces * self.size, self._ends[:pieces]
        self.ids = self.ids[:end]

        def first(t: Tensor, dim: int) -> Tensor:
            part = t.narrow(dim, 0, end)
            return part.clone() if last else part

        self._layers = [
            replace(
                layer,
                keys=first(layer.keys, 1),
                values=first(layer.values, 1),
                hidden=None if layer.hidden is None else first(layer.hidden, 0),
                queries=layer.queries[:pieces],
                colsums=sums,
            )
            for layer, sums in zip(self._layers, self._ends[-1].colsums if pieces else (), strict=False)
        ]

    def _read_on(self, ids: Tensor) -> None:
        """Read one more piece."""
        end = len(self.ids) + self.size

        def on_layer(obs: Observation, k: Tensor, v: Tensor) -> None:
            sums = dict(obs.colsums_q) if obs.colsums is None else {**obs.colsums_q, EXACT: obs.colsums}
            earlier = self._layers[obs.layer].queries if self._ends else ()
            queries = earlier if obs.last_q is None else (*earlier, obs.last_q)
            # in the place of the former, which then is freed
            self._layers[obs.layer : obs.layer + 1] = [LayerStart(k, v, obs.hidden, obs.first_q, queries, sums)]

        synchronise(ids.device)
        start = time.perf_counter()
        _, seconds = observe(self.model, ids[:end], self.needs, on_layer, self.plain, starts=self._layers)
        synchronise(ids.device)
        forward_s = time.perf_counter() - start - sum(seconds.values())
        former = self._ends[-1] if self._ends else PieceEnd((), 0.0, {})
        by_bits = {bits: former.colsums_s.get(bits, 0.0) + s for (_, bits), s in seconds.items()}
        self._drop_sums()
        self._ends.append(PieceEnd(tuple(x.colsums for x in self._layers), former.forward_s + forward_s, by_bits))
        self.ids = ids[:end].cpu().clone()

    def _drop_sums(self) -> None:
        """Drop the column sums of the newest end, unless prompts parted there, or it is one of few that are kept.

        Those of all ends would grow as the square of the tokens; those behind 1, 2, 4, 8 ... pieces take what two do.
        """
        count = len(self._ends)
        few = count & (count - 1) == 0 or count == self._parted
        if not few and any(self._ends[-1].colsums):
            self._ends[-1] = replace(self._ends[-1], colsums=())

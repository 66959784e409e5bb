"""The first tokens of prompts that begin alike, read once: instructions, examples, a text up to where it differs.

Each prompt is read in pieces of as many tokens, whether they are known or not: no digit depends on the prompts before.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.conf import check, is_whole
from kvbench.engine.prompt_layer import EXACT, LayerStart
from kvbench.engine.prompt_pass import observe
from kvbench.errors import UsageError
from kvbench.kv.model_shape import local_layers
from kvbench.kv.observation import Needs, Observation
from kvbench.models.interface import synchronise
from kvbench.models.traits import MOVING, rope_type

LEAST = 16
"""The fewest tokens of a piece: stages that read the first queries read no more of them."""


def check_size(size: int | None) -> None:
    """Raise UsageError unless prompts can be read in pieces of ``size`` tokens; None: they are read whole."""
    possible = size is None or (is_whole(size) and size >= LEAST)
    check("shared_prefix", size, possible, f"null, or tokens that are read at a time, {LEAST} or more")


@dataclass(frozen=True)
class Mark:
    """The end of a piece: the column sums [Hq, e] of each layer up to there, and what reading so far has taken.

    colsums: by the bit width of the keys, as their seconds are.
    forward_s: seconds without those of column sums.
    """

    colsums: tuple[Mapping[int, Tensor], ...]
    forward_s: float
    colsums_s: Mapping[int, float]


@dataclass(frozen=True)
class Start:
    """A prompt's first tokens in every layer, with the seconds that reading them has taken, whenever that was."""

    layers: tuple[LayerStart, ...]
    forward_s: float
    colsums_s: Mapping[int, float]


class SharedPrefix:
    """The first tokens of the prompt read last, as long as pieces of ``size`` tokens go, kept for the next one.

    They take the bytes of the full cache. Raises UsageError for a model whose tokens cannot be read in pieces alike.
    """

    def __init__(self, model: PreTrainedModel, size: int, plain: bool = False) -> None:
        check_size(size)
        reasons = {
            "some of its layers attend a window": local_layers(model.config),
            "its rotary positions depend on the length of the text": rope_type(model.config) in MOVING,
        }
        for reason, applies in reasons.items():
            if applies:
                raise UsageError(f"shared_prefix={size} is not possible for this model: {reason}. Leave it out")
        self.model, self.size, self.plain, self.needs = model, size, plain, Needs()
        self.forget()

    def forget(self) -> None:
        """Drop what is kept."""
        self.ids = torch.empty(0, dtype=torch.int64)
        self._layers: list[LayerStart] = []
        self._marks: list[Mark] = []

    def read(self, ids: Tensor, needs: Needs, most: int) -> Start | None:
        """Return the pieces of a prompt [n] within its first ``most`` tokens, of which known ones are not read again.

        ``needs`` are those of all that the prompt is read for. None where there is no whole piece.
        """
        needs = self.needs | replace(needs, last_q=min(needs.last_q, self.size))
        pieces = most // self.size
        shared = min(pieces * self.size, len(self.ids))
        differing = (ids[:shared].cpu() != self.ids[:shared]).nonzero()
        known = (int(differing[0]) if len(differing) else shared) // self.size
        if needs != self.needs:
            self.needs, known = needs, 0
        self._cut(known)
        try:
            while len(self._marks) < pieces:
                self._read_on(ids)
        except BaseException:
            self.forget()  # some layers have the next piece, and others not
            raise
        return Start(tuple(self._layers), self._marks[-1].forward_s, self._marks[-1].colsums_s) if pieces else None

    def _cut(self, pieces: int) -> None:
        """Keep the first pieces alone."""
        if pieces == len(self._marks):
            return
        end, self._marks = pieces * self.size, self._marks[:pieces]
        self.ids = self.ids[:end]
        sums = self._marks[-1].colsums if pieces else ()
        self._layers = [
            replace(
                layer,
                keys=layer.keys[:, :end],
                values=layer.values[:, :end],
                hidden=None if layer.hidden is None else layer.hidden[:end],
                queries=layer.queries[:pieces],
                colsums=colsums,
            )
            for layer, colsums in zip(self._layers, sums, strict=False)
        ]

    def _read_on(self, ids: Tensor) -> None:
        """Read one more piece."""
        end = len(self.ids) + self.size

        def on_layer(obs: Observation, k: Tensor, v: Tensor) -> None:
            sums = dict(obs.colsums_q) if obs.colsums is None else {**obs.colsums_q, EXACT: obs.colsums}
            earlier = self._layers[obs.layer].queries if self._marks else ()
            queries = earlier if obs.last_q is None else (*earlier, obs.last_q)
            # in the place of the former, which then is freed
            self._layers[obs.layer : obs.layer + 1] = [LayerStart(k, v, obs.hidden, obs.first_q, queries, sums)]

        synchronise(ids.device)
        start = time.perf_counter()
        _, seconds = observe(self.model, ids[:end], self.needs, on_layer, self.plain, starts=self._layers)
        synchronise(ids.device)
        taken = time.perf_counter() - start - sum(seconds.values())
        former = self._marks[-1] if self._marks else Mark((), 0.0, {})
        by_bits = {bits: former.colsums_s.get(bits, 0.0) + s for (_, bits), s in seconds.items()}
        colsums = tuple(layer.colsums for layer in self._layers)
        self._marks.append(Mark(colsums, former.forward_s + taken, by_bits))
        self.ids = ids[:end].cpu().clone()

"""The records of calibration: what a stage wants measured, what that means for one model and text, what was found."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.observation import Needs, Observation
from kvbench.errors import UsageError

LONGEST = 4096

Observe = Callable[[Tensor, Needs, Callable[[Observation, Tensor, Tensor], None]], object]
"""Reads a window of ids and hands over what is needed of each layer, with its keys and values [Hk, n, D]."""


@dataclass(frozen=True)
class Recipe:
    """What a stage wants measured: everything that decides the result, but for the model and the text.

    ``kind`` names the statistics (stages that share them share files), ``revision`` is bumped when they change.
    ``samples`` windows of ``tokens`` tokens are read; None: up to ``longest``, as many as the model's context and the
    text allow. Where ``each``, a single window must be enough for the statistic (see ``check``), else all windows
    together. ``knobs`` are the stage's own that decide the result.
    """

    kind: str
    revision: int
    samples: int
    tokens: int | None = None
    each: bool = True
    knobs: Mapping[str, Any] = field(default_factory=dict)
    longest: int = LONGEST

    def settled(self, limit: int | None) -> Recipe:
        """The recipe with its number of tokens, for windows of at most ``limit``; raises UsageError if it is more."""
        room = limit if limit is not None else self.longest
        if self.tokens is not None and self.tokens > room:
            raise UsageError(
                f"tokens={self.tokens} is not possible: calibration of {self.kind} reads windows that fit into the "
                f"model's context of {room} tokens"
            )
        return replace(self, tokens=self.tokens if self.tokens is not None else min(self.longest, room))

    def check(self, dimension: int, what: str) -> None:
        """Raise UsageError for fewer tokens than the ``dimension`` (of ``what``) of the statistic."""
        assert self.tokens is not None
        found = self.tokens if self.each else self.tokens * self.samples
        if found < dimension:
            where = "a window has" if self.each else "all windows together have"
            raise UsageError(
                f"tokens={self.tokens} samples={self.samples} is not possible: calibration of {self.kind} estimates "
                f"{dimension} dimensions ({what}), and {where} only {found} tokens: give tokens={dimension} or more"
            )


@dataclass(frozen=True)
class CalibrationRun:
    """What a calibration is handed: the model, the settled recipe, and the windows [tokens] of ids to read.

    ``tick`` is called after each window; ``observe`` reads one and hands over each layer as the model finishes it.
    """

    model: PreTrainedModel
    samples: Iterable[Tensor]
    recipe: Recipe
    observe: Observe
    tick: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Request:
    """A recipe for one model and text, settled: it decides the result, and so it is part of a cell's identity.

    ``model`` identifies checkpoint, dtype and whatever else changes what the model computes.
    """

    recipe: Recipe
    model: str
    text: str
    text_sha256: str

    def identity(self) -> dict[str, Any]:
        """What decides the result, without the model: a cell names that by itself."""
        r = self.recipe
        return {
            "kind": r.kind,
            "revision": r.revision,
            "samples": r.samples,
            "tokens": r.tokens,
            "knobs": dict(r.knobs),
            "text": self.text,
            "text_sha256": self.text_sha256,
        }

    @property
    def key(self) -> str:
        """A hash of all of it: the name of its file."""
        text = json.dumps({**self.identity(), "model": self.model}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Calibration:
    """What was found for one request, bound to a stage. ``sha256`` is of the tensors: two are equal if that is.

    ``weights`` is the digest of the model that it was computed on: it is refused for any other. The tensors lie on the
    CPU; ``meta`` is the record that stands in the file beside them.
    """

    kind: str
    sha256: str
    weights: str
    tensors: Mapping[str, Tensor] = field(repr=False)
    meta: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Calibration) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[str, str, str]:
        return self.kind, self.sha256, self.weights


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and values."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name].detach().cpu().contiguous()
        found.update(f"{name}:{t.dtype}:{tuple(t.shape)}\n".encode())
        found.update(t.numpy().tobytes())
    return found.hexdigest()

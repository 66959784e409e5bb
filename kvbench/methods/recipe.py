"""The records of calibration: what a stage wants measured, the request for one model and text, and its result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.observation import Needs, Observation
from kvbench.errors import UsageError

LONGEST = 4096

Observe = Callable[[Tensor, Needs, Callable[[Observation, Tensor, Tensor], None]], object]
"""A function that reads a window of ids and hands over each layer as far as needed, with its k and v [Hk, n, D]."""


@dataclass(frozen=True)
class Recipe:
    """The measurement that a stage wants: everything that decides its result, but for the model and the text.

    ``kind`` names the statistics (stages that share them share files), ``revision`` is raised when they change.
    ``samples`` windows of ``tokens`` tokens are read; None: up to ``longest``, as many as the model's context and the
    text allow. With ``each``, a single window must be enough for the statistic (see ``check``), else all windows
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
        """Return the recipe with its tokens, for windows of at most ``limit``. Raises UsageError if it wants more."""
        most_tokens = limit if limit is not None else self.longest
        if self.tokens is not None and self.tokens > most_tokens:
            raise UsageError(
                f"tokens={self.tokens} is not possible: calibration of {self.kind} reads windows that fit into the "
                f"model's context of {most_tokens} tokens"
            )
        return replace(self, tokens=self.tokens if self.tokens is not None else min(self.longest, most_tokens))

    def check(self, dimension: int, name: str) -> None:
        """Raise UsageError for fewer tokens than the ``dimension`` of the statistic, which ``name`` describes."""
        assert self.tokens is not None
        tokens = self.tokens if self.each else self.tokens * self.samples
        if tokens < dimension:
            holder = "a window has" if self.each else "all windows together have"
            raise UsageError(
                f"tokens={self.tokens} samples={self.samples} is not possible: calibration of {self.kind} estimates "
                f"{dimension} dimensions ({name}), and {holder} only {tokens} tokens: give tokens={dimension} or more"
            )


@dataclass(frozen=True)
class CalibrationRun:
    """One calibration under way: a model, and the windows [tokens] of ids that it reads, once.

    ``tick`` is called after each window. ``observe`` reads a window and hands over each layer as the model finishes it.
    """

    model: PreTrainedModel
    samples: Iterable[Tensor]
    recipe: Recipe
    tick: Callable[[], None]
    observe: Observe

    def windows(self) -> Iterator[Tensor]:
        """Yield the windows, with a tick after each."""
        for window in self.samples:
            yield window
            self.tick()


@dataclass(frozen=True)
class Request:
    """A recipe settled for one model and text. It decides the result, and so it is part of a cell's identity.

    ``model`` identifies checkpoint, dtype and whatever else changes what the model computes.
    """

    recipe: Recipe
    model: str
    text: str
    text_sha256: str

    def identity(self) -> dict[str, Any]:
        """Return all that decides the result but the model, which a cell names by itself."""
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
        """A hash of all of it, which names the file."""
        text = json.dumps({**self.identity(), "model": self.model}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Calibration:
    """The result of one request, bound to a stage. ``sha256`` is of the tensors, by which two are compared.

    ``weights`` is the digest of the model that it was computed on; it is refused for any other. The tensors lie on the
    CPU; ``meta`` is the record that stands in the file beside them.
    """

    kind: str
    sha256: str
    weights: str
    tensors: Mapping[str, Tensor] = field(repr=False, compare=False)
    meta: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 over names, types, shapes and values."""
    sha256 = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name].detach().cpu().contiguous()
        sha256.update(f"{name}:{t.dtype}:{tuple(t.shape)}\n".encode())
        sha256.update(t.numpy().tobytes())
    return sha256.hexdigest()

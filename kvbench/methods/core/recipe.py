"""The records of calibration: what a stage wants measured, the request for one model and text, and its result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from kvbench.base.errors import UsageError
from kvbench.kv.observation import Needs, Observation

LONGEST = 4096

Observe = Callable[[Tensor, Needs, Callable[[Observation, Tensor, Tensor], None]], object]
"""A function that reads a window of ids and hands over each layer as far as needed, with its k and v [Hk, n, D]."""


@dataclass(frozen=True)
class Recipe:
    """The measurement that a stage wants: everything that decides its result, except the model and the text.

    kind: the name of the statistics; stages with the same statistics share files.
    revision: a number that is raised when the statistics change.
    samples: how many windows of text are read.
    tokens: the tokens of each window; None for as many as the model's context and the text allow, up to ``longest``.
    each: whether a single window must have enough tokens for the statistic (see ``check``), or only all together.
    knobs: the stage's knobs that decide the result.
    """

    kind: str
    revision: int
    samples: int
    tokens: int | None = None
    each: bool = True
    knobs: Mapping[str, Any] = field(default_factory=dict)
    longest: int = LONGEST

    def settled(self, limit: int | None) -> Recipe:
        """Return the recipe with ``tokens`` filled in, at most ``limit``. Raises UsageError if it asks for more."""
        most_tokens = limit if limit is not None else self.longest
        if self.tokens is not None and self.tokens > most_tokens:
            raise UsageError(
                f"tokens={self.tokens} is not possible: calibration of {self.kind} reads windows that fit into the "
                f"model's context of {most_tokens} tokens"
            )
        return replace(self, tokens=self.tokens if self.tokens is not None else min(self.longest, most_tokens))

    def check(self, dimension: int, name: str) -> None:
        """Raise UsageError if there are fewer tokens than dimensions of the statistic, which ``name`` describes."""
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

    ``tick`` is called after each window and each further step (``Stage.calibration_steps``). ``observe`` reads a window
    and hands over each layer as the model finishes it.
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
        """Return all that decides the result except the model, which is a part of a cell's identity already."""
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
        """A hash of all that decides the result; the file of the calibration is named after it."""
        text = json.dumps({**self.identity(), "model": self.model}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Calibration:
    """The result of one request, bound to a stage.

    sha256: the digest of the tensors, by which two calibrations are compared.
    weights: the digest of the model on which it was computed; the calibration is refused for any other model.
    tensors: what was measured, on the CPU.
    meta: the record in the file beside the tensors.
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

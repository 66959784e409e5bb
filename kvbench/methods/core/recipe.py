"""Records of calibration: the measurement that a stage wants, the request for one model and text, and the result."""

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
"""Tokens of the longest window that a recipe reads, unless the recipe says otherwise."""

Observe = Callable[[Tensor, Needs, Callable[[Observation, Tensor, Tensor], None]], object]
"""``observe(window, needs, on_layer)`` reads a window of token ids [tokens] with the model.

It calls ``on_layer(observation, k, v)`` after each layer. The observation has the parts that ``needs`` names, and k, v
are the layer's keys and values [Hk, n, D].
"""


@dataclass(frozen=True)
class Recipe:
    """The measurement of a model that a stage asks for: all that decides its result, except the model and the text.

    kind: the name of the statistics. Stages with the same statistics share files.
    revision: a number that is raised when the statistics change.
    samples: how many windows of text are read.
    tokens: the tokens of each window. None stands for as many as model and text allow, up to ``longest``.
    each: True if every single window must have enough tokens for the statistic (see ``check``), False if all windows
        together must have enough.
    knobs: the stage's knobs that decide the result.
    longest: the most tokens of a window whose length is left open.
    """

    kind: str
    revision: int
    samples: int
    tokens: int | None = None
    each: bool = True
    knobs: Mapping[str, Any] = field(default_factory=dict)
    longest: int = LONGEST

    def fill_tokens(self, limit: int | None) -> Recipe:
        """Return the recipe with ``tokens`` filled in, for a model whose context has ``limit`` tokens.

        Without a known limit, ``longest`` is the limit. Raises UsageError if the recipe asks for longer windows.
        """
        most_tokens = limit if limit is not None else self.longest
        if self.tokens is None:
            return replace(self, tokens=min(self.longest, most_tokens))
        if self.tokens > most_tokens:
            raise UsageError(
                f"tokens={self.tokens} is not possible: calibration of {self.kind} reads windows that fit into the "
                f"model's context of {most_tokens} tokens"
            )
        return self

    def check(self, dimension: int, name: str) -> None:
        """Raise UsageError if fewer tokens are read than the statistic has dimensions.

        ``name`` says in the error where the ``dimension`` comes from, such as "head_dim".
        """
        # ``fill_tokens`` has run before
        assert self.tokens is not None
        if self.each:
            tokens = self.tokens
            holder = "a window has"
        else:
            # the statistic is a sum over all windows
            tokens = self.tokens * self.samples
            holder = "all windows together have"
        # with fewer tokens than dimensions, a covariance has no full rank
        if tokens < dimension:
            raise UsageError(
                f"tokens={self.tokens} samples={self.samples} is not possible: calibration of {self.kind} estimates "
                f"{dimension} dimensions ({name}), and {holder} only {tokens} tokens: give tokens={dimension} or more"
            )


@dataclass(frozen=True)
class CalibrationRun:
    """One calibration under way, as ``Stage.calibrate`` gets it.

    model: the model to measure.
    samples: the windows of text, each the ids [tokens]. They can be read only once.
    recipe: the measurement that the stage asked for, with ``tokens`` filled in.
    tick: to be called after each window and each further step (``Stage.calibration_steps``), for the progress shown.
    observe: reads a window with the model and hands over each layer as the model finishes it.
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
            # the caller has finished with the window when it asks for the next
            self.tick()


@dataclass(frozen=True)
class Request:
    """A recipe for one model and one text: all that decides a calibration's result. It is part of a cell's identity.

    model: a text for the checkpoint, its dtype and all else that changes the model's numbers.
    text: the name of the calibration text.
    text_sha256: the digest of that text.
    """

    recipe: Recipe
    model: str
    text: str
    text_sha256: str

    def identity(self) -> dict[str, object]:
        """Return all that decides the result except the model, which a cell's identity has already."""
        recipe = self.recipe
        # ``each`` and ``longest`` only check and fill in ``tokens``
        return {
            "kind": recipe.kind,
            "revision": recipe.revision,
            "samples": recipe.samples,
            "tokens": recipe.tokens,
            "knobs": dict(recipe.knobs),
            "text": self.text,
            "text_sha256": self.text_sha256,
        }

    @property
    def key(self) -> str:
        """The first 16 digits of a SHA-256 over all that decides the result. They name the calibration's file."""
        identity = self.identity()
        identity["model"] = self.model
        # keys are sorted, because the hash must not depend on the order in which they are written above
        text = json.dumps(identity, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Calibration:
    """The result of one request. It is bound to a stage (``Stage.calibrated``).

    kind: the name of the statistics, as in the recipe.
    sha256: the digest of the tensors, by which two calibrations are compared.
    weights: the digest of the model on which it was computed. The calibration is refused for any other model.
    tensors: the statistics by name, on the CPU.
    meta: the record in the file beside the tensors.
    """

    kind: str
    sha256: str
    weights: str
    # stages compare calibrations often, and equal digests are equal tensors
    tensors: Mapping[str, Tensor] = field(repr=False, compare=False)
    meta: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 over the names, types, shapes and values of ``tensors``. Their order does not matter."""
    sha256 = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name].detach().cpu().contiguous()
        # bytes alone cannot distinguish [2, 3] from [3, 2], or fp16 from bf16
        sha256.update(f"{name}:{t.dtype}:{tuple(t.shape)}\n".encode())
        sha256.update(t.numpy().tobytes())
    return sha256.hexdigest()

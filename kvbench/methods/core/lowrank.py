"""Stages that replace the key and value projections by low-rank pairs and cache the latents between: Palu and ASVD.

A projection W [Hk D, d] becomes up @ down with down [R, d] and R below Hk D. For a token with the input x of its layer
the cache holds the latent down @ x, which has R numbers, in place of the Hk D numbers of W @ x.

Shapes: n prompt tokens, Hk kv heads, D head dimension, d hidden size, R latents of keys or of values.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from transformers import PreTrainedModel

from kvbench.kv import ops
from kvbench.kv.observation import Observation
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.knobs import Rule, at_least, knob
from kvbench.methods.core.recipe import Recipe
from kvbench.methods.core.stage import Role, Stage
from kvbench.models import lowrank
from kvbench.models.factors import Factors

Pairs = tuple[tuple[Factors, Factors], ...]
"""For each layer, the factors of its key projection and those of its value projection."""
LONGEST = 2048
"""The tokens of a window of calibration text, where the model's context allows so many."""
REMEMBERED = 4
"""Factorings of a model that are kept at a time, since a singular value decomposition for each prompt would be slow."""
_factored: weakref.WeakKeyDictionary[PreTrainedModel, OrderedDict[object, Pairs]] = weakref.WeakKeyDictionary()
"""The factorings of each model in memory, by (stage, device, dtype). The most recently used factoring stands last."""


@dataclass(frozen=True, kw_only=True)
class LowRankStage(Stage):
    """A stage that caches latents of keys and of values. Latents of keys are those before rotation (RoPE).

    The model reads the prompt and decodes with the low-rank pairs as its weights. The cache holds the latents, and
    attention rebuilds and rotates keys from them, a block at a time. All heads of a layer share its latents, and so its
    tokens. A selector beside this stage therefore decides for the whole layer, by the mean of its scores over the
    heads. It scores by the keys that attention read, rebuilt and rotated. The pairs count as weights, not as cache.

    ratio: the fraction of the rank removed, 0 (exact) or more and below 1.
    multiple: ranks are multiples of this number. Null stands for a sixteenth of the full rank, such as 32 of 512.
    samples: the number of windows of text that the calibration reads.
    tokens: the tokens of each window. Null stands for 2048, as far as the context allows (tiny: 1024).
    """

    # ``adapt`` swaps the projections of the model
    role: ClassVar[Role] = "lowrank"
    adapts: ClassVar[bool] = True

    ratio: float = knob(0.5, Rule("a fraction of the rank removed, 0 or more and below 1", lambda x: 0 <= x < 1))
    multiple: int | None = knob(None, at_least(1, null=True))
    samples: int = knob(256, at_least(1, "windows"))
    tokens: int | None = knob(None, at_least(1, null=True))

    @property
    def prefill_key(self) -> str:
        # the ranks, and so the weights that read the prompt, follow from the calibration
        calibration_hash = self.calibration.sha256[:16] if self.calibration is not None else ""
        return f"{self.id}({self.knobs()}, {calibration_hash})"

    def make_projection_recipe(self, kind: str, knobs: Mapping[str, object]) -> Recipe:
        """Return the recipe of a calibration whose statistics need all windows together.

        kind: the name of the calibration, such as ``palu``.
        knobs: the knobs that decide what is measured.
        """
        return Recipe(
            kind,
            revision=1,
            samples=self.samples,
            tokens=self.tokens,
            each=False,
            knobs=knobs,
            longest=LONGEST,
        )

    @property
    def shape(self) -> lowrank.ProjectionShape:
        """The projections of the model that the stage was calibrated for."""
        return lowrank.ProjectionShape(*self.tensor("shape").tolist())

    @cached_property
    def ranks(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """The ranks of each layer: (ranks of keys, ranks of values), each with one rank for each group of heads."""
        raise TypeError(f"{type(self).__name__} does not say which ranks it keeps")

    def factors(self, model: PreTrainedModel) -> Pairs:
        """Return the factors of the key and of the value projection of each layer."""
        raise TypeError(f"{type(self).__name__} does not say how it factors")

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor of the calibration by its name. Raises UsageError if the stage is not calibrated."""
        return self.measured("its ranks")[name]

    def widths(self, layer: int) -> tuple[int, int]:
        """Return how many numbers a token has in this layer as (latents of its key, latents of its value)."""
        # the latent of a group of heads has as many numbers as the group has ranks
        key_ranks, value_ranks = self.ranks[layer]
        return sum(key_ranks), sum(value_ranks)

    @contextmanager
    def adapt(self, model: PreTrainedModel) -> Iterator[None]:
        factorings = _factored.setdefault(model, OrderedDict())
        # equal stages have equal factors on one device and in one type
        key = (self, model.device, model.dtype)
        if key not in factorings:
            factorings[key] = self.factors(model)
            while len(factorings) > REMEMBERED:
                # the first factoring has been unused for longest
                factorings.popitem(last=False)
        # the most recently used factoring stands last
        factorings.move_to_end(key)
        with lowrank.swap_projections(model, factorings[key]):
            yield

    def compress(self, cache: LayerCache, obs: Observation) -> LayerCache:
        if obs.latents is None:
            raise ValueError(f"{self.id} caches latents, and the prompt was read without low-rank projections")
        # [n, R] of all heads together, stored as one head
        key_latents, value_latents = obs.latents
        segment = replace(ops.only_segment(cache), latents=(key_latents[None], value_latents[None]))
        return replace(cache, segments=(segment,))

"""Stages that replace the key and value projections by low-rank pairs and cache the latents between: Palu and ASVD."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from transformers import PreTrainedModel

from kvbench.kv import ops
from kvbench.kv.observation import Observation
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.base import Role, Stage
from kvbench.methods.core.knobs import Rule, at_least, knob
from kvbench.models import lowrank
from kvbench.models.factors import Factors

Pairs = tuple[tuple[Factors, Factors], ...]
LONGEST = 2048  # tokens of a window of calibration text, where the context allows
REMEMBERED = 4  # factorings of one model: a singular value decomposition per prompt would be slow
_factored: weakref.WeakKeyDictionary[PreTrainedModel, OrderedDict[object, Pairs]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class LowRankStage(Stage):
    """A stage that caches latents of keys and of values, as they are before rotation.

    The model reads and decodes with low-rank pairs of weights, the cache holds the latents, and attention rebuilds keys
    from them, a block at a time. All heads of a layer share its latents, and so its tokens: a selector beside it scores
    by the keys that attention read (rebuilt and rotated) and decides for the whole layer, by the mean over its heads.
    The pairs count as weights, not as cache.

    ratio: the fraction of the rank removed, 0 (exact) or more and below 1.
    multiple: the number of which ranks are multiples; null for a sixteenth of the full rank, 32 of 512.
    samples: the number of windows of text that the calibration reads.
    tokens: the tokens of each window; null for 2048, as far as the context allows (tiny: 1024).
    """

    role: ClassVar[Role] = "lowrank"
    adapts: ClassVar[bool] = True

    ratio: float = knob(0.5, Rule("a fraction of the rank removed, 0 or more and below 1", lambda x: 0 <= x < 1))
    multiple: int | None = knob(None, at_least(1, null=True))
    samples: int = knob(256, at_least(1, "windows"))
    tokens: int | None = knob(None, at_least(1, null=True))

    @property
    def prefill_key(self) -> str:
        content = "" if self.calibration is None else self.calibration.sha256[:16]
        return f"{self.id}({self.knobs()}, {content})"

    @property
    def shape(self) -> lowrank.ProjectionShape:
        """The projections of the model that the stage was calibrated for."""
        return lowrank.ProjectionShape(*self.tensor("shape").tolist())

    @cached_property
    def ranks(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """The ranks of the key and of the value projection of each layer, one for each group of heads."""
        raise TypeError(f"{type(self).__name__} does not say which ranks it keeps")

    def factors(self, model: PreTrainedModel) -> Pairs:
        """Return the factors of the key and of the value projection of each layer."""
        raise TypeError(f"{type(self).__name__} does not say how it factors")

    def tensor(self, name: str) -> torch.Tensor:
        """Return one of the calibration's tensors. Raises UsageError without a calibration."""
        return self.measured("its ranks")[name]

    def widths(self, layer: int) -> tuple[int, int]:
        """Return (latents of a token's keys, latents of its values) in this layer."""
        k, v = self.ranks[layer]
        return sum(k), sum(v)

    @contextmanager
    def adapt(self, model: PreTrainedModel) -> Iterator[None]:
        remembered, key = _factored.setdefault(model, OrderedDict()), (self, model.device, model.dtype)
        if key not in remembered:
            remembered[key] = self.factors(model)
            while len(remembered) > REMEMBERED:
                remembered.popitem(last=False)
        remembered.move_to_end(key)
        with lowrank.swapped(model, remembered[key]):
            yield

    def compress(self, cache: LayerCache, obs: Observation) -> LayerCache:
        if obs.latents is None:
            raise ValueError(f"{self.id} caches latents, and the prompt was read without low-rank projections")
        k, v = obs.latents
        return replace(cache, segments=(replace(ops.only_segment(cache), latents=(k[None], v[None])),))

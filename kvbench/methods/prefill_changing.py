"""Stages that change how the prompt is computed: fewer tokens in later layers, or heads that share logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.cache.observation import Observation
from kvbench.methods.base import Role, Stage


@dataclass(frozen=True, kw_only=True)
class AlteredPrefill(Stage):
    """A stage of which every knob changes how the prompt is computed."""

    @property
    def prefill_key(self) -> str:
        knobs = ",".join(f"{k}={v}" for k, v in self.knobs().items())
        content = "" if self.calibration is None else self.calibration.sha256
        return f"{self.id}.{self.revision}({knobs}){content}"


@dataclass(frozen=True, kw_only=True)
class HiddenPruner(AlteredPrefill):
    """A stage that drops hidden states between the layers of a prompt: later layers read fewer tokens.

    All that a layer holds of its tokens is then in the order of those it read, at their original positions.
    """

    role: ClassVar[Role] = "hidden"

    def sizes(self, n: int, n_layers: int) -> list[int]:
        """Return the tokens that each layer reads of a prompt of n: never more than the layer before."""
        raise TypeError(f"{type(self).__name__} does not say how many hidden states it keeps")

    def keep_hidden(self, keys: torch.Tensor, obs: Observation) -> torch.Tensor:
        """Return which tokens [m], ascending, the next layer reads of those that this one read, ``keys`` [Hk, n, D]."""
        raise TypeError(f"{type(self).__name__} does not say which hidden states it keeps")


@dataclass(frozen=True, kw_only=True)
class HeadSharer(AlteredPrefill):
    """A stage under which query heads take the logits of another, in the whole prompt and while decoding."""

    role: ClassVar[Role] = "share"

    def leading_heads(self, n: int, layer: int, n_layers: int, query_heads: int, kv_heads: int) -> int:
        """Return the number of query heads whose logits are computed for a prompt of n tokens."""
        raise TypeError(f"{type(self).__name__} does not say how many heads lead")

    def leads(
        self, first_q: torch.Tensor, first_k: torch.Tensor, n: int, layer: int, n_layers: int, scale: float
    ) -> torch.Tensor | None:
        """Return for each query head the one whose logits it takes [Hq] int64; None: each its own.

        first_q [Hq, m, D] and first_k [Hk, m, D] are those of the first tokens. Called before the layer attends.
        """
        raise TypeError(f"{type(self).__name__} does not say which heads lead")

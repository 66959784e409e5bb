"""Stages that change how the prompt is computed: fewer tokens in later layers, or heads that share logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.cache.observation import Observation
from kvbench.errors import UsageError
from kvbench.methods.base import Role, Stage


@dataclass(frozen=True, kw_only=True)
class AlteredPrefill(Stage):
    """A stage all of whose knobs change what the prompt computes."""

    @property
    def prefill_key(self) -> str:
        knobs = ",".join(f"{k}={v}" for k, v in self.knobs().items())
        found = "" if self.calibration is None else self.calibration.sha256
        return f"{self.id}.{self.revision}({knobs}){found}"

    def check_layers(self, n_layers: int) -> None:
        """Raise UsageError for a model of ``n_layers`` that the stage has no numbers for."""


@dataclass(frozen=True, kw_only=True)
class HiddenPruner(AlteredPrefill):
    """A stage that drops hidden states between the layers of a prompt: later layers read fewer tokens.

    All that a layer knows of its tokens is then in the order of those it read, at their original positions.
    """

    role: ClassVar[Role] = "hidden"

    def sizes(self, n: int, n_layers: int) -> list[int]:
        """Tokens that each layer reads of a prompt of n: never more than the layer before."""
        raise TypeError(f"{type(self).__name__} does not say how many hidden states it keeps")

    def keep_hidden(self, keys: torch.Tensor, obs: Observation) -> torch.Tensor:
        """Of the tokens that a layer read, with ``keys`` [Hk, n, D], those that the next one does [m], ascending."""
        raise TypeError(f"{type(self).__name__} does not say which hidden states it keeps")


@dataclass(frozen=True, kw_only=True)
class HeadSharer(AlteredPrefill):
    """A stage under which query heads take the logits of another, in the whole prompt and while decoding."""

    role: ClassVar[Role] = "share"

    def leading(self, n: int, layer: int, n_layers: int, query_heads: int, kv_heads: int) -> int:
        """Query heads whose logits are computed for a prompt of n tokens."""
        raise TypeError(f"{type(self).__name__} does not say how many heads lead")

    def leads(
        self, first_q: torch.Tensor, first_k: torch.Tensor, n: int, layer: int, n_layers: int, scale: float
    ) -> torch.Tensor | None:
        """For each query head the one whose logits it takes [Hq] int64; None: its own.

        first_q [Hq, m, D] and first_k [Hk, m, D] are those of the first tokens. It is asked before the layer attends.
        """
        raise TypeError(f"{type(self).__name__} does not say which heads lead")


def check_altered(stages: Sequence[Stage]) -> None:
    """Raise UsageError, with the reason, for what cannot stand beside stages that change how the prompt is computed."""
    written = "+".join(s.id for s in stages)
    sharing = next((s for s in stages if s.role == "share"), None)
    if sharing is not None and len(stages) > 1:
        raise UsageError(
            f"method={written!r}: {sharing.id} shares logits between heads and holds keys for some of them only, which "
            "other stages cannot choose by: it is written alone"
        )
    balancer = next((s for s in stages if s.rebalances), None)
    if balancer is not None and any(s.role == "hidden" for s in stages):
        raise UsageError(
            f"method={written!r}: {balancer.id} divides one budget over layers that all read the whole prompt; use "
            "another selector"
        )

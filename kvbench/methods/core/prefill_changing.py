"""Stages that change how the prompt is computed: fewer tokens in later layers, in blocks, or with shared logits.

Shapes: n prompt tokens, Hq query heads, Hk kv heads, D head dimension, m tokens chosen or observed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.kv.observation import Observation
from kvbench.methods.core.stage import Role, Stage


@dataclass(frozen=True, kw_only=True)
class AlteredPrefill(Stage):
    """A stage whose every knob changes how the prompt is computed. Only equal stages share a prefill."""

    @property
    def prefill_key(self) -> str:
        # prompts under equal stages share one prefill, whatever stages follow
        knobs = ",".join(f"{knob}={value}" for knob, value in self.knobs().items())
        # other measurements of the model change the prompt's computation as well
        calibration_hash = self.calibration.sha256 if self.calibration is not None else ""
        return f"{self.id}.{self.revision}({knobs}){calibration_hash}"


@dataclass(frozen=True, kw_only=True)
class HiddenPruner(AlteredPrefill):
    """A stage that drops hidden states between the layers of a prompt: later layers read fewer tokens.

    A layer then holds its tokens in the order in which it read them, at their original positions.
    """

    role: ClassVar[Role] = "hidden"

    def sizes(self, n: int, n_layers: int) -> list[int]:
        """Return how many tokens of a prompt of n each layer reads: never more than the layer before."""
        raise TypeError(f"{type(self).__name__} does not say how many hidden states it keeps")

    def keep_hidden(self, keys: torch.Tensor, obs: Observation) -> torch.Tensor:
        """Return the indices [m], ascending, of this layer's tokens that the next layer reads.

        ``keys`` [Hk, n, D] are the keys of the tokens that this layer read.
        """
        raise TypeError(f"{type(self).__name__} does not say which hidden states it keeps")


@dataclass(frozen=True, kw_only=True)
class HeadSharer(AlteredPrefill):
    """A stage under which query heads take another head's logits, in the whole prompt and while decoding.

    The heads whose logits are computed are the leading heads.
    """

    role: ClassVar[Role] = "share"
    on_latents: ClassVar[str] = "all heads read the same latents already"

    def leading_heads(self, n: int, layer: int, n_layers: int, query_heads: int, kv_heads: int) -> int:
        """Return how many of a layer's ``query_heads`` compute logits of their own, for a prompt of n tokens."""
        raise TypeError(f"{type(self).__name__} does not say how many heads lead")

    def leads(
        self, first_q: torch.Tensor, first_k: torch.Tensor, n: int, layer: int, n_layers: int, scale: float
    ) -> torch.Tensor | None:
        """Return [Hq] int64: for each query head, the head whose logits it takes. None if each takes its own.

        This is called before the layer attends.

        first_q, first_k: queries [Hq, m, D] and keys [Hk, m, D] of the prompt's first tokens, after RoPE.
        scale: the factor of q.k.
        """
        raise TypeError(f"{type(self).__name__} does not say which heads lead")


@dataclass(frozen=True, kw_only=True)
class BlockReader(Stage):
    """A stage that may have the prompt read in blocks. A block attends itself and the tokens kept before it."""

    def blocks(
        self, keys: torch.Tensor, n: int, layer: int, n_layers: int, heads: int
    ) -> list[tuple[int, torch.Tensor]]:
        """Return for each block (its first token, the earlier tokens [Hk, m] that it attends), both as indices.

        The list is empty if the whole prompt is read at once. keys [Hk, n, D] are those of the whole prompt in this
        layer, which stores ``heads`` heads.
        """
        raise TypeError(f"{type(self).__name__} does not say what its blocks hold")

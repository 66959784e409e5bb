"""VATP: attention received counts for as much as the value it fetches (arXiv 2406.12335, section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.kv import ops
from kvbench.kv.observation import Observation
from kvbench.kv.segment import LayerCache, per_head
from kvbench.methods.core.base import Modifier
from kvbench.methods.core.knobs import at_least, knob, one_of
from kvbench.methods.core.statistics import at_heads
from kvbench.storage.roles import Slots

NORMS = {"l1": 1.0, "l2": 2.0, "linf": torch.inf}
"""The values of ``norm``, each with the order p of ||v||_p."""


@dataclass(frozen=True, kw_only=True)
class Vatp(Modifier):
    """Importance I[h, j] = S[h, j] * ||v_j||_1. S is the attention score of the selector that it decorates.

    The paper leaves GQA out. Under GQA, S is the mean over a group's query heads, and v_j is the value that they share
    (our choice). While decoding, the selector's accumulated score is multiplied by the norm. This equals accumulating
    attention times norm. The norms are kept beside the values at their precision, 1 / (2 D) of the payload. VATP
    decorates H2O and Scissorhands as in the paper, and SnapKV after its pooling (our extension).

    norm: the norm of the values. The paper takes ``l1``, and compares it with ``l2`` and ``linf``.
    sinks: the number of first tokens that always stay, within the selector's budget.
    """

    id: ClassVar[str] = "vatp"
    on_latents: ClassVar[str] = "a token's value is another vector for each head"
    decorates: ClassVar[tuple[str, ...]] = ("h2o", "scissorhands", "snapkv")

    norm: str = knob("l1", one_of(*NORMS))
    sinks: int = knob(4, at_least(0, "tokens"))

    def sink_size(self) -> int:
        return self.sinks

    def compute_norms(self, values: torch.Tensor) -> torch.Tensor:
        """Return the norms ||v|| [...] of values [..., D], in fp32."""
        # ||v||_p with p = 1 in the paper
        return torch.linalg.vector_norm(values.float(), ord=NORMS[self.norm], dim=-1)

    def modify(self, scores: torch.Tensor, cache: LayerCache, obs: Observation) -> torch.Tensor:
        # I[h, j] = S[h, j] * ||v_j||, section 3
        return scores * at_heads(self.compute_norms(ops.only_segment(cache).v), cache.heads)

    def slot_bytes(self, itemsize: int) -> int:
        # one norm, in the precision of the values
        return itemsize

    def initial_state(self, cache: LayerCache) -> Mapping[str, torch.Tensor]:
        # the norms take the precision of the values, and 1 / D of their size
        values = ops.only_segment(cache).v
        return {"norm": per_head(self.compute_norms(values), cache.heads).to(values.dtype)}

    def reweigh(self, scores: torch.Tensor, slots: Slots) -> torch.Tensor:
        # I[h, j] = S[h, j] * ||v_j||; tokens that always stay are at +inf, which a norm of 0 would turn into NaN
        return torch.where(scores.isinf(), scores, scores * slots.state["norm"].float())

    def new_token_state(self, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"norm": self.compute_norms(values).to(values.dtype)}

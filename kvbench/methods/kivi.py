"""KIVI: keys packed by channel, values by token, the newest tokens exact (arXiv 2402.02750, sections 3.2 and 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.kv.packed import Packed, quantise_channels, quantise_tokens, run_bytes
from kvbench.kv.partly_packed import Residual
from kvbench.methods.core.knobs import CODE_BITS, at_least, knob
from kvbench.methods.core.quantiser import Quantiser


@dataclass(frozen=True, kw_only=True)
class Kivi(Quantiser):
    """Pack keys by channel, in groups of ``group`` consecutive tokens, and values by token, in groups of channels.

    Codes are c = round((x - min) / s) with s = (max - min) / (2^bits - 1) of a group, read as c * s + min. s and min
    are stored in fp16. The newest tokens stay exact. With R = ``residual``, the keys of the first R * floor(N / R) of N
    tokens are packed, and the values of the first N - R. While decoding, R keys are packed at once when R exact ones
    have gathered, and values one at a time. The step in which a token is packed still reads it exactly.

    Behind a token selector, N counts the tokens that stay. Behind a pruner the pruner's newest ``recent`` tokens stay
    exact, too. Keys are then packed in groups once they have left these ``recent`` tokens.
    """

    id: ClassVar[str] = "kivi"
    revision: ClassVar[int] = 2

    bits: int = knob(2, CODE_BITS)
    group: int = knob(32, at_least(1, "elements"))
    residual: int = 128

    def check(self) -> None:
        super().check()
        fits = self.residual >= 1 and self.residual % self.group == 0
        self.require("residual", fits, f"a multiple of group={self.group}, 1 or more")

    def residuals(self) -> tuple[Residual, Residual]:
        # of N tokens, the first R * floor(N / R) are packed as keys, and the first N - R as values
        key_rule = Residual(keep=0, block=self.residual, unit=self.group)
        value_rule = Residual(keep=self.residual, block=1, unit=1)
        return key_rule, value_rule

    def pack_keys(self, x: torch.Tensor) -> Packed:
        # c = round((x - min) / s), s = (max - min) / (2^bits - 1), over ``group`` tokens of one channel (section 3.2)
        return quantise_channels(x, self.bits, self.group)

    def pack_values(self, x: torch.Tensor) -> Packed:
        # the same formula over ``group`` channels of one token
        return quantise_tokens(x, self.bits, self.group)

    def key_bytes(self, tokens: int, channels: int) -> int:
        # a run is one group of a channel: its codes, and min and s in fp16
        return tokens // self.group * channels * run_bytes(self.group, self.bits, self.group)

    def value_bytes(self, tokens: int, channels: int) -> int:
        # a run is a token, whose last group may be shorter
        return tokens * run_bytes(channels, self.bits, self.group)

"""FlexGen's cache compression: keys and values of every token packed in groups (arXiv 2303.06865, section 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.kv.packed import Packed, quantise_tokens, run_bytes
from kvbench.kv.partly_packed import Residual
from kvbench.methods.core.knobs import CODE_BITS, at_least, knob
from kvbench.methods.core.quantiser import Quantiser


@dataclass(frozen=True, kw_only=True)
class FlexGen(Quantiser):
    """Pack keys and values of every token in groups of ``group`` consecutive channels, at most all of a head.

    Codes are c = round((x - min) / s) with s = (max - min) / (2^bits - 1) of a group, read as c * s + min. s and min
    are stored in fp16. A group of equal values stores s = 1. A new token is packed after its own step, which still
    reads it exactly. No other token stays exact.

    code_prefill: the prompt's own attention reads all keys and values packed, too (longctx_bench's simulation, arXiv
    2407.01527). Selectors then score by the packed keys.
    """

    id: ClassVar[str] = "flexgen"
    revision: ClassVar[int] = 2
    by_token: ClassVar[bool] = True

    bits: int = knob(4, CODE_BITS)
    group: int = knob(64, at_least(1, "channels"))
    code_prefill: bool = False

    @property
    def prefill_key(self) -> str:
        if not self.code_prefill:
            return ""
        # the knobs that decide which numbers the prompt's attention reads
        key = f"flexgen bits={self.bits} group={self.group}"
        if self.only:
            key += f" only={self.only}"
        return key

    def read(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.code_prefill:
            return k, v
        # ``only`` leaves the other half exact
        if self.only != "values":
            k = self.pack_keys(k).dequantise(k.dtype)
        if self.only != "keys":
            v = self.pack_values(v).dequantise(v.dtype)
        return k, v

    def residuals(self) -> tuple[Residual, Residual]:
        # no token stays exact: each is packed by itself, at once
        at_once = Residual(keep=0, block=1, unit=1)
        return at_once, at_once

    def pack_keys(self, x: torch.Tensor) -> Packed:
        # c = round((x - min) / s), s = (max - min) / (2^bits - 1), for each group of channels of a token; a group has
        # at most all channels of a head
        return quantise_tokens(x, self.bits, min(self.group, x.shape[-1]), constant_scale=1.0)

    def pack_values(self, x: torch.Tensor) -> Packed:
        # FlexGen packs values as it packs keys
        return self.pack_keys(x)

    def key_bytes(self, tokens: int, channels: int) -> int:
        return tokens * run_bytes(channels, self.bits, min(self.group, channels))

    def value_bytes(self, tokens: int, channels: int) -> int:
        return self.key_bytes(tokens, channels)

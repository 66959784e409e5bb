"""Quantisers that lose nothing: the bytes of the exact numbers in place of codes."""

from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from kvbench.kv.packed import MinMax
from kvbench.methods.core import registry
from kvbench.methods.core.quantiser import Quantiser


@dataclass(frozen=True)
class Raw(MinMax):
    dtype: torch.dtype = torch.float32

    def dequantise(self, dtype, scratch=None):
        return self.codes.contiguous().view(self.dtype).to(dtype)


def raw(self, x, frozen=None):
    codes = x.contiguous().view(torch.uint8)
    none = codes.new_zeros(*x.shape[:-1], 0).half()
    return Raw(codes, none, none, 8, x.shape[-1], "token", x.shape[-1], dtype=x.dtype)


@cache
def packing(methods):
    """The classes of those of ``methods`` that pack."""
    stages = [type(registry.make_stage(m, registry.defaults(m))) for m in methods if m != "full"]
    return [s for s in stages if issubclass(s, Quantiser) or getattr(s, "packs", False)]


@contextmanager
def quantisers_pass_through():
    """All registered quantisers keep what they are given, and so do selectors that pack."""
    with pytest.MonkeyPatch.context() as patch:
        for stage in packing(registry.available()):
            patch.setattr(stage, "pack_keys", raw)
            patch.setattr(stage, "pack_values", raw)
        yield

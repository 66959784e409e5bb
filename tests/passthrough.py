"""Quantisers that lose nothing: the bytes of the exact numbers in place of codes."""

from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from kvbench.cache.packed import MinMax
from kvbench.methods import registry
from kvbench.methods.quantiser import Quantiser


@dataclass(frozen=True)
class Raw(MinMax):
    dtype: torch.dtype = torch.float32

    def dequantise(self, dtype, scratch=None):
        return self.codes.contiguous().view(self.dtype).to(dtype)


def raw(self, x, frozen=None):
    codes = x.contiguous().view(torch.uint8)
    none = codes.new_zeros(*x.shape[:-1], 0).half()
    return Raw(codes, none, none, 8, x.shape[-1], "token", x.shape[-1], dtype=x.dtype)


@contextmanager
def quantisers_pass_through():
    """All registered quantisers keep what they are given, and so do selectors that pack."""
    with pytest.MonkeyPatch.context() as patch:
        for method in registry.available():
            if method != "full":
                stage = type(registry.make_stage(method, registry.defaults(method)))
                if issubclass(stage, Quantiser) or getattr(stage, "packs", False):
                    patch.setattr(stage, "pack_keys", raw)
                    patch.setattr(stage, "pack_values", raw)
        yield

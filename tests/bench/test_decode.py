"""The benchmark of decode attention measures packed formats by compiled code and by plain PyTorch, side by side."""

import os
from argparse import Namespace

import pytest
import torch

from kvbench.bench import decode
from kvbench.storage import native
from kvbench.storage.native.build import SWITCH

CPU = torch.device("cpu")
SMALL = Namespace(dtype="float32", heads=2, query_heads=4, head_dim=16, repeats=3, clock="wall")


def test_packed_formats_are_measured_on_both_paths(monkeypatch):
    if not native.available():
        pytest.skip("no C++ compiler")
    calls = []
    known = native.attend

    def counted(*given):
        found = known(*given)
        calls.append(found is not None)
        return found

    monkeypatch.setattr(native, "attend", counted)
    monkeypatch.setenv(SWITCH, "on")
    seconds, ratios = decode.measure(["kivi 2 bits", "snapkv 12.5 %"], 300, 1, SMALL, CPU)
    assert seconds > 0 and list(ratios) == ["kivi 2 bits", "kivi 2 bits, plain", "snapkv 12.5 %"]
    assert calls == [True, False] * 5  # a packed step and a plain one, each repeat
    assert os.environ[SWITCH] == "on"


def test_without_compiled_code_there_is_one_path(monkeypatch):
    monkeypatch.setenv(SWITCH, "off")
    _, ratios = decode.measure(["kivi 2 bits"], 300, 1, SMALL, CPU)
    assert list(ratios) == ["kivi 2 bits"]
    assert decode.limit("kivi 2 bits", 1024, 1, CPU) == float("inf")
    assert decode.limit("kivi 2 bits", 16384, 8, CPU) == 2.0

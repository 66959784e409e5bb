"""The benchmark of decode attention: each format's step over the full cache's."""

from argparse import Namespace

import torch

from kvbench.bench import decode

CPU = torch.device("cpu")
SMALL = Namespace(dtype="float32", heads=2, query_heads=4, head_dim=16, repeats=3, clock="wall")


def test_formats_are_measured_beside_the_full_cache():
    seconds, ratios = decode.measure(["kivi 2 bits", "snapkv 12.5 %"], 300, 1, SMALL, CPU)
    assert seconds > 0 and list(ratios) == ["kivi 2 bits", "snapkv 12.5 %"] and min(ratios.values()) > 0


def test_limits_are_those_of_a_format_at_a_size():
    assert decode.limit("kivi 2 bits", 1024, 1, CPU) == float("inf")
    assert decode.limit("kivi 2 bits", 16384, 8, CPU) == 2.0
    assert decode.limit("think 0.4", 4096, 1, CPU) == 1.2
    assert decode.limit("think 0.4", 16384, 8, torch.device("cuda")) == 1.0

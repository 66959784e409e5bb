"""The benchmark of decode attention: each format's step over the full cache's."""

import decode
import torch

CPU = torch.device("cpu")
SMALL = decode.StepShape(300, 1, heads=2, query_heads=4, head_dim=16, dtype=torch.float32)


def test_formats_are_measured_beside_the_full_cache():
    timer = decode.timer_of(CPU)
    rows = {name: decode.measure(name, SMALL, 3, timer, CPU) for name in ("kivi 2 bits", "snapkv 12.5 %")}
    assert all(r.step > 0 and r.full > 0 and r.plain is None for r in rows.values())
    lines = decode.table(rows, SMALL, 1e9).splitlines()
    assert lines[0] == "300 tokens x 1" and lines[2].split() == ["format", "step", "of", "full", "a", "byte"]
    assert lines[4].startswith("kivi 2 bits") and lines[5].startswith("snapkv 12.5 %")


def test_the_time_of_a_byte_is_compared():
    # 3 s for 10 bytes over 2 s for 20 bytes
    times = decode.StepTimes(step=3.0, full=2.0, moved=10, full_bytes=20)
    assert times.cells(bandwidth=1.0) == ["3000.000 ms", "1.50x", "3.00x"]


def test_limits_are_those_of_a_format_at_a_size():
    assert decode.limit("kivi 2 bits", 1024, 1, CPU) == float("inf")
    assert decode.limit("kivi 2 bits", 16384, 8, CPU) == 2.0
    assert decode.limit("think 0.4", 4096, 1, CPU) == 1.2
    assert decode.limit("think 0.4", 16384, 8, torch.device("cuda")) == 1.0
    assert decode.limit("full", 16384, 8, torch.device("cuda")) == float("inf")

"""The threads that a run takes, by what a container may use."""

import os
from types import SimpleNamespace

import pytest
import torch

from kvbench.engine import processors
from kvbench.plan.run_plan import threads

CORES = 8


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({}, CORES),
        ({"cpu.max": "max 100000"}, CORES),
        ({"cpu.max": "150000 100000"}, 1),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "20000 100000"}, 1),
        ({"cpu.max": "400000000 100000"}, CORES),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, CORES),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "50000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "50000"}, 6),
        ({"cpu.max": "nonsense"}, CORES),
    ],
)
def test_a_containers_quota_is_kept_to(files, most, tmp_path, monkeypatch):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(processors, "CONTROL_GROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(CORES)), raising=False)
    assert processors.allowed() == most
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    wide, narrow, auto = (
        SimpleNamespace(hidden_size=576),
        SimpleNamespace(hidden_size=128),
        SimpleNamespace(threads=None),
    )
    assert threads(auto, wide) == most and threads(auto, narrow) == 1
    assert threads(SimpleNamespace(threads=7), wide) == 7

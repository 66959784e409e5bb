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
def test_a_containers_quota_is_kept_to(files, most, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert processors.limit_to_quota(CORES, tmp_path) == most


def test_this_process_may_use_no_more_processors_than_it_can_run_on():
    assert 1 <= processors.count_allowed() <= len(os.sched_getaffinity(0))


def test_a_run_takes_the_threads_that_it_is_told_one_for_a_narrow_model_or_all(monkeypatch):
    wide, narrow = SimpleNamespace(hidden_size=576), SimpleNamespace(hidden_size=128)
    auto = SimpleNamespace(threads=None)
    assert threads(auto, wide, 6) == 6 and threads(auto, narrow, 6) == 1
    assert threads(SimpleNamespace(threads=7), wide, 6) == 7
    # PyTorch does not know of the quota
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64 * processors.count_allowed())
    assert threads(auto, wide) == processors.count_allowed()

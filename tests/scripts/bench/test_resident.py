"""The resident-memory benchmark: what it measures, and its verdict."""

import json
import os
import subprocess
import sys
from functools import cache

import pytest
import resident

from kvbench.kv.model_shape import Shape

pytestmark = pytest.mark.e2e("measures processes")


@pytest.fixture(autouse=True)
def no_growth(monkeypatch):
    """By how much this process grows is not looked at: to find that out, all that Python holds is gone through."""
    monkeypatch.setattr(resident, "in_use", lambda: 0)


def test_full_caches_are_accounted_to_the_byte():
    actual = resident.hold("full", 2, 64)
    assert actual["accounted"] == 2 * resident.SHAPE.full_bytes(64, 2) + 2 * resident.SHAPE.layers * 4 * 64


@pytest.mark.parametrize("name", resident.METHODS)
def test_every_method_is_built(name):
    shape = Shape(layers=2, query_heads=8, kv_heads=2, head_dim=64)
    full = shape.full_bytes(320, 2) + shape.layers * 4 * 320  # positions, shared by the heads of a layer
    assert 0 < resident.hold(name, 1, 320, shape=shape, warm=0)["accounted"] <= full


@pytest.mark.parametrize(
    ("grown", "status"), [((100, 25), 0), ((100, 26.2), 0), ((100, 26.3), 1), ((100, 23.7), 1), ((106, 26.5), 1)]
)
def test_a_ratio_off_by_more_than_a_twentieth_fails(grown, status, capsys):
    full, half = ({"grown": float(g), "accounted": float(a)} for g, a in zip(grown, (100, 25), strict=True))
    assert resident.report([("full", full), ("snapkv", half)]) == status
    assert ("MISSED" in capsys.readouterr().out) == bool(status)


@cache
def alone(part):
    """One row of a method that several mixes have."""
    return resident.decode(part, 1, 320, 4, warm=1)


@pytest.mark.parametrize("name", resident.MIXES)
def test_the_rows_of_a_mix_are_accounted_as_those_of_its_methods(name):
    parts = resident.MIXES[name]
    mix = resident.decode(name, len(parts), 320, 4, warm=1)
    rows = [alone(part) for part in parts]
    # the largest moments of methods that pack need not be that of all
    assert mix["accounted"] == pytest.approx(sum(a["accounted"] for a in rows), rel=0.02)
    assert mix["allocated"] <= 1.1 * sum(a["allocated"] for a in rows)


def test_rows_come_in_order(monkeypatch, capsys):
    requests = []

    def measured(room, one, name, *sizes, env):
        requests.append(name)
        return {"grown": 4.0, "accounted": 4.0}

    monkeypatch.setattr(resident, "in_process", measured)
    assert resident.main(["--only", "qhitter 4"]) == 0
    assert sorted(requests) == ["full", "qhitter 4 bits 12.5 %"]
    text = capsys.readouterr().out
    assert "rounded up to pages" in text and text.index("\nfull") < text.index("\nqhitter")


def test_rows_are_printed_as_they_are_measured(capsys):
    def measured():
        yield "full", {"grown": 4.0, "accounted": 4.0}
        assert "\nfull" in capsys.readouterr().out
        yield "snapkv", {"grown": 1.0, "accounted": 1.0}

    assert resident.report(measured()) == 0


@pytest.mark.parametrize(("free", "processors", "most"), [(2**30, 8, 1), (7 * 2**30, 8, 2), (2**40, 3, 3)])
def test_processes_run_at_once_as_memory_and_processors_allow(free, processors, most):
    assert resident.count_processes(64, 4096, free, processors) == most


EACH_FORKED = """
import os, sys
import resident
for name in sys.argv[2:]:
    pid = os.fork()
    if not pid:
        status = resident.main(["--one", name, *sys.argv[1].split()])
        sys.stdout.flush()
        os._exit(status)
    os.waitpid(pid, 0)
"""
"""Measures methods in processes that share the imports: those take longer than the measurement."""


def test_a_process_holds_what_is_accounted():
    names, sizes = ("full", "kivi 2 bits"), "--caches 6 --tokens 2048"
    environment = {**os.environ, **resident.ALLOCATOR, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", EACH_FORKED, sizes, *names]
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    assert resident.report(zip(names, map(json.loads, out.splitlines()), strict=True)) == 0


@pytest.mark.parametrize("name", resident.DECODING)
def test_rows_that_decode_allocate_what_is_accounted(name):
    """To a tenth; of 48 tokens a ring is a large part; thin caches behind H2O have places for whole tokens to come."""
    shape = Shape(layers=2, query_heads=4, kv_heads=2, head_dim=128)
    actual = resident.decode(name, 2, 384, 160, shape=shape, warm=1)
    most = {"h2o orig+think 12.5 %": 1.3, "snapkv+kivi 12.5 %": 1.2, "snapkv+think+kivi 12.5 %": 1.2}.get(name, 1.1)
    assert 0.9 < actual["allocated"] / actual["accounted"] < most


def test_resident_memory_of_rows_that_decode_is_judged(capsys):
    rows = [(name, {"grown": x, "allocated": 1.0, "accounted": 1.0}) for name, x in (("full", 1.05), ("snapkv", 1.2))]
    assert resident.report_decoding(rows[:1]) == 0 and resident.report_decoding(rows) == 1
    assert capsys.readouterr().out.count("MISSED") == 1

"""The benchmark of reading: its verdict on a method's own time, and that it runs."""

from types import SimpleNamespace

import pytest
import reading
import torch
from tables import load_host, plan_run

pytestmark = pytest.mark.e2e("runs benchmarks")


@pytest.mark.parametrize(("slow", "ok"), [(0.5, True), (1.1, False)])
def test_a_method_that_takes_over_a_tenth_of_the_pass_misses_its_aim(slow, ok, capsys):
    caches = [SimpleNamespace(prefill_s=10.0, compress_s=slow if name == "cake" else 0.1) for name in reading.METHODS]
    assert reading.judge_statistics([caches] * 3) == ok
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if "MISSED" in line] == ["cake"] * (not ok)


def test_both_kinds_of_numbers_and_prompts_at_once_are_timed(capsys):
    models = [
        load_host(plan_run("model=tiny", f"model.dtype={kind}", "dataset=tiny")).model
        for kind in ("float32", "bfloat16")
    ]
    assert [model.dtype for model in models] == [torch.float32, torch.bfloat16]
    reading.statistics(models[0], torch.arange(10, 60), 1)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(reading.METHODS)
    reading.passes(models, torch.arange(10, 60), 1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == ["  bfloat16 / float32", "  4 at once / one by one"]
    assert all(float(line.split(": ")[1].rstrip("x")) > 0 for line in lines)


def test_prompts_that_begin_alike_are_timed_whole_and_with_their_beginning_read_once(capsys):
    sizes = {"prompts": 3, "tokens": 80, "first": 64, "pieces": 32}
    reading.beginnings(load_host(plan_run("model=tiny", "dataset=tiny")).model, 1, sizes)
    lines = [line.split(": ") for line in capsys.readouterr().out.splitlines()]
    alike = "3 prompts of 80 tokens, of which 64 are alike, whole / shared_prefix=32"
    assert [words for words, _ in lines] == [alike, "one of them alone, in pieces / whole"]
    assert all(float(ratio.rstrip("x")) > 0 for _, ratio in lines)

"""``bench time`` end to end: rows whose numbers agree with each other, resumed, refused, out of memory."""

import json
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from support import processes

from kvbench.base.errors import KvbenchError
from kvbench.bench import architecture, environment, peak, records, roofline, time_table, timing
from kvbench.bench.request import OWN
from kvbench.bench.workload import Workload, parse_workload
from kvbench.cli.main import main
from kvbench.cli.verbs import VERBS
from kvbench.methods.core.base import Selector
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.resolve import ChainConfig
from kvbench.plan import config

pytestmark = pytest.mark.e2e("runs benchmarks")

SMALL = ["bench", "time", "method=full,snapkv,kivi", "kv_size=48", "workloads=96+9x3", "repeats=2", "warmup=1"]
SMALL += ["peers=dynamic,deepspeed"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("results") / "bench"


@pytest.fixture(scope="module", autouse=True)
def small_copies():
    """The bandwidth is that of copying 16 MiB."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(roofline.COPIED, "cpu", 2**24)
        yield


@pytest.fixture(scope="module")
def rows(folder):
    assert main([*SMALL, f"folder={folder}", "name=first"]) == 0
    records_read = {r["method"]: r for r in records.read_rows(folder / "first.jsonl")}
    assert records_read.pop("deepspeed")["status"] in ("not run", "measured")
    return records_read


def test_numbers_of_a_row_agree_with_each_other(rows):
    assert list(rows) == ["full", "snapkv kv_size=48", "kivi", "dynamic"]
    for row in rows.values():
        assert row["status"] == "measured", row["reason"]
        q = {name: actual["median"] for name, actual in row["quantities"].items()}
        # the clocks stop at different moments: a busy machine spends some time between them
        assert q["ttft"] + 8 * q["tpot"] == pytest.approx(q["total"], rel=0.25)
        total = row["quantities"]["total"]
        outside = (total["q3"] - total["q1"]) / 2  # of two values, each lies half the quartiles' distance beyond one
        both = (total["q1"] - outside, total["q3"] + outside)
        assert total["n"] == 2 and q["throughput"] == pytest.approx(sum(27 / t for t in both) / 2)
        assert row["roofline"]["fraction"] == pytest.approx(row["roofline"]["bound"] / q["tpot"])
        assert set(rows) <= set(row["orders"][0]) and len(row["orders"]) == 2


def test_the_peak_is_at_least_weights_and_cache(rows):
    for name in rows:
        q = {k: v["median"] for k, v in rows[name]["quantities"].items()}
        assert q["weight_bytes"] + q["cache_bytes"] <= q["peak_allocated"] <= q["peak_reserved"]
        assert rows[name]["facts"]["torch"] == torch.__version__ and rows[name]["facts"]["threads"]


def test_a_finished_row_is_not_measured_again(rows, folder, capsys, monkeypatch):
    def never(*args):
        raise AssertionError("nothing is missing")

    before = (folder / "first.jsonl").read_text()
    monkeypatch.setattr(architecture, "build_model", never)
    assert main([*SMALL, f"results={folder.parent}", "name=first"]) == 0
    assert (folder / "first.jsonl").read_text() == before
    out = capsys.readouterr().out
    assert "TTFT" in out and "reached" in out and all(len(line) <= 100 for line in out.splitlines())


def test_ratios_are_to_the_row_that_is_asked_for(rows, folder, capsys):
    there = [*SMALL, f"folder={folder}", "name=first", "over=dynamic"]
    assert main([*there, "--json"]) == 0
    shown = {r["method"]: r["ratios"] for r in json.loads(capsys.readouterr().out)}
    for name, row in rows.items():
        for q in ("tpot", "peak_allocated"):
            ours, peers_value = (r["quantities"][q]["median"] for r in (row, rows["dynamic"]))
            assert shown[name][q] == pytest.approx(ours / peers_value)
    assert main(there) == 0
    assert "N.NNx: over dynamic in" in " ".join(capsys.readouterr().out.split())
    assert main([*SMALL, f"folder={folder}", "name=first", "over=static"]) == 2
    assert "unknown value static of over" in capsys.readouterr().err


def test_a_new_method_is_measured_beside_the_full_cache(rows, folder, capsys, no_processes):
    more = [a.replace("full,snapkv,kivi", "full,snapkv,kivi,think") for a in SMALL]
    assert main([*more, f"folder={folder}", "name=first", "--json"]) == 0
    records_read = records.read_rows(folder / "first.jsonl")
    assert [r["method"] for r in records_read[len(rows) + 1 :]] == ["full", "think ratio=0.4"]
    shown = {r["method"]: r for r in json.loads(capsys.readouterr().out)}
    assert shown["think ratio=0.4"]["ratios"]["cache_bytes"] < 1
    # a ratio is to the full cache of the same session, or there is none
    assert shown["think ratio=0.4"]["session"] == shown["full"]["session"] != rows["kivi"]["session"]


def test_a_plan_measures_nothing(tmp_path, capsys):
    arguments = ["bench", "time", "model=llama2-7b", "method=kivi", "workloads=160+338x300", "peers=all"]
    assert main([*arguments, f"folder={tmp_path}", "--plan"]) == 0
    out = capsys.readouterr().out
    assert "160+338x300" in out and "to measure" in out and "deepspeed" in out and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("workloads=12", "workloads=12 is not possible"),
        ("workloads=512+32x00", "workloads=512+32x00 is not possible"),
        ("repeats=0", "repeats=0 is not possible: a whole number, 1 or more"),
        ("generate=some", "unknown value some of generate"),
        ("step=plain,fast", "unknown value fast of step"),
        ("peers=vllm", "unknown peer vllm"),
        ("memory_limit=-1", "memory_limit=-1 is not possible"),
        ("name=a/b", "name=a/b is not possible"),
        ("again=yes", "again=yes is not possible: true or false"),
        ("dataset=tiny", "unknown key dataset of bench time"),
        ("limit=3", "unknown key limit of bench time"),
        ("layers=0", "layers=0 is not possible"),
    ],
)
def test_mistakes_are_named(argument, message, tmp_path, capsys):
    assert main(["bench", "time", f"folder={tmp_path}", argument]) == 2
    assert message in capsys.readouterr().err


def constant_peak(*request, **options):
    """Answer as the process that measures memory does, at once."""
    return {"allocated": 1, "reserved": 2}


@pytest.fixture
def no_processes(monkeypatch):
    """Whole commands start no process to measure memory."""
    monkeypatch.setattr(timing.Trial, "ask", constant_peak)


def settings(**changes):
    facts = {"model": "tiny", "weights": "random", "dtype": "float32", "device": "cpu", "threads": 1, "torch": "0"}
    return timing.Settings(("model=tiny", "model.weights=random"), facts, **{"repeats": 1, "warmup": 0, **changes})


def entrants(*methods):
    if not methods:
        return [timing.Entrant("full", ChainConfig(Chain(), "full"))]
    cfg = config.read([f"method={','.join(methods)}"])
    return [timing.Entrant("full", ChainConfig(Chain(), "full")), *(timing.Entrant(c.label, c) for c in cfg.chains)]


@dataclass(frozen=True, kw_only=True)
class Failing(Selector):
    """A method whose every pass ends with ``error``."""

    id: ClassVar[str] = "failing"

    error: Exception

    def scores(self, cache, obs, capacity):
        raise self.error


@pytest.fixture(scope="module")
def model():
    cfg = config.read(["model=tiny", "weights=random"])
    return architecture.build_model(cfg.model, torch.device("cpu"))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "OOM"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "OOM"),
        (RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"), "OOM"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "OOM"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "OOM"),
        (KvbenchError("the model attends a sliding window"), "refused"),
        (ZeroDivisionError("x"), "failed"),
    ],
)
def test_what_happens_to_one_row_leaves_the_others(error, status, model):
    failing = timing.Entrant("failing", ChainConfig(Chain((Failing(error=error),)), "failing"))
    measured = timing.measure_entrants(model, [*entrants(), failing], Workload(40, 4, 1), settings(), constant_peak)
    assert [r["status"] for r in measured] == ["measured", status] and not measured[1]["quantities"]
    text = time_table.render([r | {"workload": "40+4x1"} for r in measured])
    assert f"{status}: failing at 40+4x1" in text


def test_processes_find_what_fits_and_die_alone():
    small = {"seed": 0, "layers": None, "sample": None, "graph": False}
    arguments = (("model=tiny", "model.weights=random"), "full")
    assert peak.ask_child("peak", *arguments, "256+4x64", **small, limit=0.03) == {"oom": True}
    most = peak.ask_child("largest", *arguments, "256+4xmax", **small, limit=0.05)["batch"]
    assert 1 <= most < 64
    measured = peak.ask_child("peak", *arguments, "256+4x2", **small, limit=None)
    # two rows of 256 tokens of 6 KiB, in their caches and in the batch
    assert 4 * 256 * 6144 < measured["allocated"] < measured["reserved"]
    with pytest.raises(KvbenchError, match=r"full at 256\+4x2: TypeError"):
        peak.ask_child("peak", *arguments, "256+4x2", **{**small, "layers": "x"}, limit=None)


def test_out_of_memory_in_one_row_is_its_result(model):
    """Really out of memory: 28 rows of 256 tokens take 42 MiB, and as much in their batch; of 16 tokens 3 MiB."""
    arguments = settings(limit=0.06, warmup=0)
    arguments = replace(
        arguments, overrides=(*arguments.overrides, "method=streamingllm", "method.streamingllm.kv_size=16")
    )
    cfg = config.read(arguments.overrides)
    row = timing.Entrant("small", cfg.chains[0])
    measured = timing.measure_entrants(model, [*entrants(), row], Workload(256, 2, 28), arguments)
    assert [(r["method"], r["status"], r["reason"]) for r in measured] == [
        ("full", "OOM", "out of memory in a process of its own"),
        ("small", "measured", ""),
    ]


def test_what_was_finished_outlives_an_end_in_the_middle(tmp_path, capsys, monkeypatch, no_processes):
    arguments = ["bench", "time", "method=full", "workloads=20+2,24+2,28+2", "repeats=1", "warmup=0", "peers=none"]
    arguments += [f"folder={tmp_path}", "name=x"]
    measure, begun = timing.measure_entrants, []

    def killed(model, entrants, workload, *rest):
        begun.append(workload.name)
        if begun == ["20+2x1", "24+2x1"]:
            raise KeyboardInterrupt
        return measure(model, entrants, workload, *rest)

    monkeypatch.setattr(timing, "measure_entrants", killed)
    assert main(arguments) == 130
    assert [r["workload"] for r in records.read_rows(tmp_path / "x.jsonl")] == ["20+2x1"]
    assert main(arguments) == 0 and begun[2:] == ["24+2x1", "28+2x1"]
    assert [r["workload"] for r in records.read_rows(tmp_path / "x.jsonl")] == ["20+2x1", "24+2x1", "28+2x1"]
    capsys.readouterr()


def test_a_recorded_step_is_a_row_of_its_own(tmp_path, capsys):
    arguments = ["bench", "time", "method=full,kivi", "workloads=40+4", "repeats=1", "warmup=0", "peers=none"]
    assert main([*arguments, "step=graph", f"folder={tmp_path}", "name=x"]) == 0
    rows = {r["method"]: r for r in records.read_rows(tmp_path / "x.jsonl")}
    assert {name: r["status"] for name, r in rows.items()} == {
        "full": "measured",
        "full step=graph": "measured",
        "kivi step=graph": "refused",
    }
    assert len({r["key"] for r in rows.values()}) == 3 and "attention" not in rows["full step=graph"]["quantities"]
    printed = " ".join(capsys.readouterr().out.split())
    assert "full step=graph: recording the graph is part of build." in printed
    assert "refused: kivi step=graph at 40+4x1" in printed and "quantises tokens" in printed


def test_what_others_print_is_no_output_of_ours():
    """A peer's chatter on standard output would spoil tables and JSON."""
    code = """
import os
from kvbench.bench import peak
class Writer: send = lambda self, answer: None
peak._answer_request = lambda request: os.system("echo chatter") or print(request)
peak._send_answer(Writer(), "more")
"""
    process = processes.start_code(code)
    out, err = process.communicate()
    assert process.returncode == 0 and out == "" and "chatter" in err and "more" in err


@pytest.mark.parametrize(
    ("found", "fitting", "status", "batch"),
    [
        (3, 3, "measured", 3),
        (9, 7, "measured", 7),  # the search stops short of a whole pass: what does not fit after all loses rows
        (0, 0, "OOM", None),
    ],
)
def test_the_largest_batch_is_timed(found, fitting, status, batch, model):
    def answer(quantity, overrides, label, workload, **options):
        if quantity == "largest":
            return {"batch": found}
        if parse_workload(workload).batch > fitting:
            return {"oom": True}
        return constant_peak()

    (row,) = timing.measure_entrants(model, entrants(), Workload(40, 4, None), settings(limit=1.0), answer)
    assert (row["status"], row["batch"]) == (status, batch)
    if status == "OOM":
        assert row["reason"] == "not even one row fits"
    else:
        assert row["quantities"]["batch"]["median"] == batch


@pytest.mark.parametrize("most", [0, 1, 2, 3, 7, 8, 9, 100])
def test_the_largest_batch_by_halving(most):
    tried = []

    def fits(b):
        tried.append(b)
        return b <= most

    assert peak.find_largest_batch(fits, 100) == most and len(tried) <= 14
    assert peak.find_largest_batch(lambda b: True, 100) == 100


def test_a_check_runs_all_steps_once(model):
    measured = timing.measure_entrants(
        model, entrants(), Workload(64, 60, 1), settings(sample=8, check=True), constant_peak
    )
    (row,) = measured
    assert row["marks"] == ["integrated"] and 0.2 < row["quantities"]["check"]["median"] < 5
    assert row["sampled"][0]["starts"] == (0, 17, 34, 51)
    assert "generation: full 0" in time_table.render([row | {"workload": "64+60x1"}]).replace("full 1", "full 0")


@pytest.mark.parametrize(
    ("changes", "there"),
    [({}, 1), ({"repeats": 2}, 0), ({"check": True}, 0), ({"check": True, "sample": None}, 1)],
)
def test_a_row_with_less_than_is_asked_for_is_measured_again(changes, there):
    arguments = settings(**{"sample": 8, **changes})
    (full,), at = entrants(), Workload(64, 60, 1)
    row = {"key": timing.make_row_key(full, at, arguments), "status": "measured", "reason": ""}
    row |= {"marks": ["integrated"] if arguments.sample else [], "quantities": {"total": {"median": 1.0, "n": 1}}}
    assert timing.is_finished(row, full, at, arguments) == there
    row["status"], row["quantities"] = "OOM", {}
    assert timing.is_finished(row, full, at, arguments)


def test_without_a_warm_up_a_gpus_peak_is_that_of_the_first_repeat(model, monkeypatch):
    seen = [peak.Peak(1 << 40, 1 << 41), peak.Peak(3, 4)]
    monkeypatch.setattr(peak, "watch_memory", lambda run, device: (run(), seen.pop(0)))
    monkeypatch.setattr(timing.Trial, "warm_up", lambda self: None)
    (row,) = timing.measure_entrants(model, entrants(), Workload(20, 3, 1), settings(repeats=2), constant_peak)
    assert row["quantities"]["peak_allocated"]["median"] == 1 << 40 and len(seen) == 1


def test_a_gpus_clocks_are_read_by_its_own_name_and_under_load(monkeypatch):
    cpu, requested = torch.device("cpu"), []

    def told(command, **how):
        requested.append(command)
        return SimpleNamespace(stdout="1980 MHz, 2619 MHz, 1980 MHz, 2619 MHz, 700.00 W, 570.1\n")

    monkeypatch.setattr(environment.shutil, "which", lambda name: name)
    monkeypatch.setattr(environment.subprocess, "run", told)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="4c1f-22"))
    measured = environment.read_facts_after_work(torch.device("cuda"))["clocks_after"]
    # the first device that PyTorch sees may be the machine's fourth
    assert requested[0][-1] == "--id=GPU-4c1f-22" and measured["clocks.sm"] == "1980 MHz" and len(measured) == 6
    assert environment.read_facts_after_work(cpu) == {}


def test_rows_survive_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "x.jsonl"
    records.append_rows(path, [{"key": "a", "v": 1}, {"key": "b"}])
    with path.open("a") as f:
        f.write('{"key": "c", "v"')
    assert [r["key"] for r in records.read_rows(path)] == ["a", "b"]
    records.append_rows(path, [{"key": "a", "v": 2}])
    assert [r["key"] for r in records.read_rows(path)] == ["a", "b", "a"] and records.index_latest(
        records.read_rows(path)
    )["a"]["v"] == 2
    path.write_text('{"key": "a"}\nnot json\n{"key": "b"}\n')
    with pytest.raises(KvbenchError, match="line 2"):
        records.read_rows(path)


def test_medians_and_quartiles():
    assert records.summarise_repeats([3.0]) == {"median": 3.0, "q1": 3.0, "q3": 3.0, "n": 1}
    assert records.summarise_repeats([1.0, 2.0, 3.0, 4.0, 10.0]) == {"median": 3.0, "q1": 2.0, "q3": 4.0, "n": 5}


def test_help_names_every_key():
    assert all(f"{key}=" in VERBS["bench"]["help"] for key in OWN)

"""What goes wrong in one cell, in memory or by a signal costs only that: everything else is measured, once."""

import json
import signal
import time
from functools import cache
from tempfile import TemporaryDirectory

import pytest
import torch
from support import processes
from support.runs import metrics_of, prepare, run_json

from kvbench.cli.main import main
from kvbench.engine import batch, likelihood, shared_prefix
from kvbench.methods.h2o import H2O
from kvbench.methods.snapkv import SnapKV
from kvbench.run import answers, experiment, host, runner
from kvbench.store.store import ResultStore
from kvbench.tasks import encoding
from kvbench.tasks.base import Task

pytestmark = pytest.mark.e2e("runs whole command lines")

SMALL = ["dataset=tiny/needle,tiny/code", "length=160", "examples=2"]
METHODS = "method=snapkv,h2o,think"


def cells_of(report):
    return {(row["method"].split()[0], cell["task"]): cell for row in report["rows"] for cell in row["cells"]}


@cache
def undisturbed(*arguments):
    """The metrics where nothing goes wrong; asked for before anything is broken."""
    with TemporaryDirectory() as folder:
        run = prepare(*arguments, f"results={folder}")
        experiment.measure(run, quiet=True)
        assert {run.store.status(c.id).status for g in run.groups for c in g.cells} == {"complete"}
        return metrics_of(folder)


def test_a_method_that_fails_is_recorded_and_tried_again_and_stops_nothing(tmp_path, capsys, monkeypatch):
    want = undisturbed(*SMALL, METHODS)
    original, calls = SnapKV.scores, []

    def scores(self, cache, obs, capacity):
        calls.append(obs.prompt)
        # always at the second prompt
        if obs.prompt == list(dict.fromkeys(calls))[:2][-1] and len(set(calls)) > 1:
            raise ZeroDivisionError("division\nby zero")
        return original(self, cache, obs, capacity)

    monkeypatch.setattr(SnapKV, "scores", scores)
    arguments = [*SMALL, METHODS, f"results={tmp_path / 'b'}", "batch_rows=3"]
    status, report = run_json(capsys, *arguments)
    assert status == 1
    cells = cells_of(report)
    failed = {key: c for key, c in cells.items() if c["status"] == "failed"}
    assert list(failed) == [("snapkv", "tiny/needle")]
    (cell,) = failed.values()
    assert cell["reason"].startswith("ZeroDivisionError: division by zero (example ")
    store = ResultStore(tmp_path / "b")
    known = store.status(cell["cell"])
    assert (known.status, known.n, known.reason) == ("failed", 1, cell["reason"])
    assert 'raise ZeroDivisionError("division' in (store.folder(cell["cell"]) / "traceback-0.txt").read_text()
    assert all(c["n"] == 2 for key, c in cells.items() if key not in failed)
    assert main(["run", *arguments]) == 1
    out, err = capsys.readouterr()
    assert "✗ failed" in out and "ZeroDivisionError" in out and "1 of the results failed" in err
    monkeypatch.setattr(SnapKV, "scores", original)
    assert run_json(capsys, *arguments)[0] == 0
    assert metrics_of(tmp_path / "b") == want
    assert store.status(cell["cell"]).status == "complete"


def test_a_method_that_fails_while_decoding_is_found_among_the_rows_of_its_batch(tmp_path, capsys, monkeypatch):
    want = undisturbed(*SMALL, METHODS, "variant=orig")
    original = H2O.fold

    def fold(self, slots, probs):
        raise IndexError("no such slot")

    monkeypatch.setattr(H2O, "fold", fold)
    arguments = [*SMALL, METHODS, "variant=orig", f"results={tmp_path / 'b'}"]
    status, report = run_json(capsys, *arguments)
    assert status == 1
    assert {key[0]: c["status"] for key, c in cells_of(report).items()} == {
        "full": "measured",
        "snapkv": "measured",
        "h2o": "failed",
        "think": "measured",
    }
    monkeypatch.setattr(H2O, "fold", original)
    assert run_json(capsys, *arguments)[0] == 0
    assert metrics_of(tmp_path / "b") == want


def test_out_of_memory_in_prefill_and_decode_loses_and_doubles_nothing(tmp_path, capsys, monkeypatch, steps):
    want = undisturbed(*SMALL, METHODS)
    prefill, short = host.prefill_chains, []

    def prefill_chains(model, ids, chains, **more):
        if len(chains) > 2:
            short.append("prefill")
            raise torch.OutOfMemoryError("CUDA out of memory")
        return prefill(model, ids, chains, **more)

    def fail(rows):
        if rows > 5:
            short.append("decode")
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(host, "prefill_chains", prefill_chains)
    steps.before = fail
    arguments = [*SMALL, METHODS, f"results={tmp_path / 'b'}"]
    assert run_json(capsys, *arguments)[0] == 0
    assert set(short) == {"prefill", "decode"}
    assert metrics_of(tmp_path / "b") == want
    for path in (tmp_path / "b").glob("cells/*/samples-0.jsonl"):
        ids = [json.loads(line)["id"] for line in path.read_text().splitlines()]
        assert len(ids) == len(set(ids)) == 2


@pytest.mark.parametrize("failing", [3, 6])
def test_rows_that_begin_again_read_their_own_prompt(failing, tmp_path, capsys, steps):
    """Columns share the ids of examples: two datasets, and one whose question is in view or withheld.

    Each dataset takes four steps.
    """
    arguments = [
        "dataset=tiny/needle,tiny/multikey",
        "length=160",
        "examples=2",
        "method=snapkv",
        "query_aware=true,false",
    ]
    want = undisturbed(*arguments)
    steps.rows.clear()

    def fail_once(rows):
        if len(steps.rows) == failing:
            raise torch.OutOfMemoryError("CUDA out of memory")

    steps.before = fail_once
    assert run_json(capsys, *arguments, f"results={tmp_path / 'b'}")[0] == 0
    assert len(steps.rows) > failing and metrics_of(tmp_path / "b") == want


def test_prompts_that_cannot_be_read_again_beside_others_wait_for_those(tmp_path, capsys, monkeypatch, queues, steps):
    arguments = [
        "dataset=tiny/listing,tiny/code",
        "length=160",
        "examples=3",
        "method=snapkv,h2o,streamingllm",
        "max_new_tokens=28",
    ]
    want, remade, short = undisturbed(*arguments), runner.remake_rows, []
    steps.rows.clear()

    def fail_once(rows):
        if len(steps.rows) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def only_alone(home, rows):
        if running := len(queues[-1].running):
            short.append(running)
            return [(row, torch.OutOfMemoryError("CUDA out of memory")) for row in rows]
        return remade(home, rows)

    steps.before = fail_once
    monkeypatch.setattr(runner, "remake_rows", only_alone)
    assert run_json(capsys, *arguments, f"results={tmp_path / 'b'}")[0] == 0
    assert short and metrics_of(tmp_path / "b") == want


def test_memory_that_other_rows_hold_is_waited_for(tmp_path, capsys, monkeypatch, queues):
    arguments = [*SMALL, "method=full", "query_aware=false"]
    want = undisturbed(*arguments)
    short = []

    def only_when_no_row_waits(home, name):
        original = getattr(home, name)

        def work(*args, **options):
            if any(len(q) for q in queues):
                short.append(name)
                raise torch.OutOfMemoryError("CUDA out of memory")
            return original(*args, **options)

        monkeypatch.setattr(home, name, work)

    only_when_no_row_waits(host, "prefill_chains")
    only_when_no_row_waits(answers, "extend_caches")
    assert run_json(capsys, *arguments, f"results={tmp_path / 'b'}")[0] == 0
    assert "prefill_chains" in short and metrics_of(tmp_path / "b") == want


@pytest.mark.parametrize("where", ["reading", "decoding"])
def test_the_beginning_of_a_prompt_is_given_up_where_memory_runs_out(where, tmp_path, capsys, monkeypatch):
    """A pass or a step that fails while one is held is tried again without, even where no other row makes room."""
    arguments = [*SMALL, "method=h2o", "shared_prefix=64"]
    want = undisturbed(*arguments)
    prefixes, read, short = [], [], []
    made, prefill = experiment.SharedPrefix, host.prefill_chains
    home, name = (shared_prefix, "observe_prompt") if where == "reading" else (batch, "step")
    work = getattr(home, name)

    def fails(*args, **options):
        once = where == "decoding" or not short  # each step fails, but only one pass: it holds pieces of its own
        if once and read and len(prefixes[-1].ids):
            short.append(where)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return work(*args, **options)

    def prefill_chains(*args, **options):
        caches = prefill(*args, **options)
        read.append(len(caches))
        return caches

    monkeypatch.setattr(experiment, "SharedPrefix", lambda *a: prefixes.append(made(*a)) or prefixes[-1])
    monkeypatch.setattr(host, "prefill_chains", prefill_chains)
    monkeypatch.setattr(home, name, fails)
    assert run_json(capsys, *arguments, "batch_rows=1", f"results={tmp_path / 'b'}")[0] == 0
    assert short and metrics_of(tmp_path / "b") == want


@pytest.mark.parametrize("name", ["score", "encode"])  # encode: by the estimate before the run, too
def test_a_prompt_or_an_answer_that_cannot_be_handled_costs_its_dataset_only(name, tmp_path, capsys, monkeypatch):
    home = Task if name == "score" else encoding
    original = getattr(home, name)

    def broken(*args):
        task = next(a for a in args if hasattr(a, "examples"))
        if task.id == "tiny/needle":
            raise ValueError("cannot be handled")
        return original(*args)

    monkeypatch.setattr(home, name, broken)
    arguments = [*SMALL, METHODS, f"results={tmp_path}"]
    status, report = run_json(capsys, *arguments)
    cells = cells_of(report)
    assert status == 1 and len(cells) == 8
    for (_, task), cell in cells.items():
        assert cell["status"] == ("failed" if task == "tiny/needle" else "measured"), cell
        assert task != "tiny/needle" or cell["reason"].startswith("ValueError: cannot be handled (example ")
    monkeypatch.setattr(home, name, original)
    assert run_json(capsys, *arguments)[0] == 0


def test_a_launcher_that_ends_its_worker_leaves_a_reason_in_words(tmp_path, monkeypatch):
    prepared = prepare(*SMALL, "limit=1", f"results={tmp_path}", "method=snapkv")

    def add(self, *args):
        raise SystemExit(1)  # Ray's worker on SIGTERM

    monkeypatch.setattr(runner.GroupRun, "store_answer", add)
    with pytest.raises(SystemExit):
        experiment.measure(prepared, quiet=True)
    status = [prepared.store.status(c.id) for c in prepared.groups[0].cells]
    assert {(s.status, s.reason) for s in status} == {("interrupted", "its process was told to end")}


def test_an_interrupt_marks_only_cells_that_have_something_left(tmp_path, capsys, monkeypatch):
    arguments = [*SMALL[:2], "examples=4", "limit=3", f"results={tmp_path}"]
    assert run_json(capsys, *arguments, "method=snapkv", "baseline=false")[0] == 0
    both = prepare(*arguments, "method=snapkv,h2o", "batch_rows=1")
    original, stored = runner.GroupRun.store_answer, []

    def add(self, row, *rest):
        original(self, row, *rest)
        stored.append(row.cell.label)
        if stored.count("full") == 3:
            raise KeyboardInterrupt("stopped by Ctrl-C")

    monkeypatch.setattr(runner.GroupRun, "store_answer", add)
    with pytest.raises(KeyboardInterrupt):
        experiment.measure(both, quiet=True)
    status = {c.label.split()[0]: both.store.status(c.id) for c in both.groups[0].cells}
    assert {name: (s.status, s.n) for name, s in status.items()} == {
        "full": ("done", 3),
        "snapkv": ("done", 3),
        "h2o": ("interrupted", 2),
    }
    assert status["h2o"].reason == "stopped by Ctrl-C"


def test_memory_for_nothing_fails_the_cells_with_the_reason(tmp_path, capsys, steps):
    def fail(rows):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    steps.before = fail
    status, report = run_json(capsys, *SMALL, "method=snapkv", f"results={tmp_path}")
    cells = cells_of(report).values()
    assert status == 1 and {c["status"] for c in cells} == {"failed"}
    assert all("Tried to allocate 2 GiB" in c["reason"] for c in cells)


def test_a_limit_on_memory_splits_the_group_and_changes_no_answer(tmp_path, capsys):
    want = undisturbed(*SMALL, METHODS)
    limit = "memory=0.0025"
    assert main(["run", *SMALL, METHODS, limit, f"results={tmp_path / 'b'}", "--plan", "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert not any(group["too_large"] for group in plan["groups"])
    for group in plan["groups"]:
        named = [label.split()[0] for part in group["parts"] for label in part]
        assert named == ["full", "snapkv", "h2o", "think"] and len(group["parts"]) > 1
        assert group["prefills"] == 2 * len(group["parts"])
        assert group["prefills"] + group["prefills_saved"] == group["answers_to_do"]
    assert main(["run", *SMALL, METHODS, limit, f"results={tmp_path / 'b'}", "--plan"]) == 0
    text = capsys.readouterr().out
    assert "2 parts, of which each reads the prompts" in text and "limit=2" in text
    assert "not within" not in text
    assert all(len(line) <= 100 for line in text.splitlines())
    assert main(["run", *SMALL, METHODS, "memory=0.00001", f"results={tmp_path / 'b'}", "--plan"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "run all the same: full, snapkv kv_ratio=0.25, h2o kv_ratio=0.25, think ratio=0.4. Raise memory=" in text
    assert run_json(capsys, *SMALL, METHODS, limit, f"results={tmp_path / 'b'}")[0] == 0
    assert metrics_of(tmp_path / "b") == want


def test_a_text_that_is_scored_fails_for_one_method_alone(tmp_path, capsys, monkeypatch):
    (tmp_path / "data" / "wikitext2").mkdir(parents=True)
    (tmp_path / "data" / "wikitext2" / "test.txt").write_text("the cold river shines slowly. " * 200)
    root = f"data.root={tmp_path / 'data'}"
    arguments = ["dataset=wikitext2", "length=160", "prefix=64", "method=snapkv,h2o", "kv_size=48", "limit=2", root]
    original = likelihood._force

    def force(model, caches, *a):
        if any(c.chain.name == "h2o" for c in caches):
            raise ValueError("not this one")
        return original(model, caches, *a)

    monkeypatch.setattr(likelihood, "_force", force)
    status, report = run_json(capsys, *arguments, f"results={tmp_path}")
    assert status == 1
    assert [c["status"] for c in cells_of(report).values()] == ["measured", "measured", "failed"]


@pytest.mark.parametrize(
    ("number", "sweep"), [(signal.SIGINT, []), (signal.SIGTERM, []), (signal.SIGTERM, ["-m", "shards=2"])]
)
def test_a_signal_ends_a_run_within_seconds_and_says_how_to_go_on(tmp_path, number, sweep):
    arguments = [
        *sweep,
        "dataset=tiny/needle,tiny/listing",
        "length=160",
        "examples=40",
        "batch_rows=2",
        "method=snapkv",
    ]
    command = ["run", *arguments, f"results={tmp_path}"]
    process = processes.start(*command)

    def lines():
        return sum(len(p.read_bytes().splitlines()) for p in tmp_path.glob("cells/*/samples-0.jsonl"))

    deadline = time.monotonic() + 120
    while lines() < 6 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    done = lines()
    assert out == "" and 6 <= done < 160
    assert f"interrupted. {done} of 160 answers are done and safe; to go on:" in err
    assert err.splitlines()[-1].split() == ["kvbench", *command]
    status = [ResultStore(tmp_path).status(p.name) for p in tmp_path.glob("cells/*")]
    assert "interrupted" in {s.status for s in status} and {s.status for s in status} <= {"interrupted", "complete"}
    name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    assert {s.reason for s in status if s.status == "interrupted"} == {f"stopped by {name}"}


def test_in_half_precision_too_the_batch_policy_stands_in_the_record(tmp_path, capsys):
    run = prepare(*SMALL, "method=snapkv", "dtype=bfloat16", "batch_rows=4", f"results={tmp_path}")
    experiment.measure(run, quiet=True)
    for group in run.groups:
        for cell in group.cells:
            (facts,) = run.store.cell(cell.id).provenance
            assert facts["batch"]["rows"] == 4 and "by example, then by cell" in facts["batch"]["order"]
            assert all(1 <= s["timing"]["batch_rows"] <= 4 for s in run.store.lines(cell.id).values())

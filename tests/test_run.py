"""The main job end to end: resuming after a kill, damage, shards, refusals that end."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from runs import SMALL, metrics_of, prepare, run_json

from kvbench.cli.main import main
from kvbench.engine import shared_prefix
from kvbench.errors import KvbenchError, UsageError
from kvbench.files import line_of, parse_line
from kvbench.methods.base import Selector
from kvbench.methods.chain import Chain
from kvbench.methods.resolve import ChainConfig
from kvbench.run import config, experiment
from kvbench.run import host as run_host
from kvbench.run.store import ResultStore

pytestmark = pytest.mark.e2e("runs whole command lines")


def test_second_run_measures_nothing_and_a_new_method_reads_only_for_itself(tmp_path, capsys, monkeypatch):
    arguments = [*SMALL, f"results={tmp_path}"]
    first = run_json(capsys, *arguments, "method=snapkv")[1]
    calls = []
    original = run_host.prefill_chains
    monkeypatch.setattr(
        run_host, "prefill_chains", lambda m, i, c, *a: calls.append([x.name for x in c]) or original(m, i, c, *a)
    )
    again = run_json(capsys, *arguments, "method=snapkv")[1]
    assert calls == []
    assert again == first
    run_json(capsys, *arguments, "method=snapkv,think")
    assert calls == [["think"]] * 12


def test_beginnings_that_prompts_share_are_read_once_and_change_no_score(tmp_path, capsys, monkeypatch):
    """Prompts of sixteen examples and a question, as few-shot prompts are: the examples are read with the first."""
    shots = "".join(f"Key k{i}: the number is {i * 37 % 100}. " for i in range(16))
    rows = [
        {"id": str(i), "prompt": f"{shots}Key k{i}: the number is", "answers": [f"{i * 37 % 100}"]} for i in range(6)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["dataset=file", f"path={tmp_path / 'rows.jsonl'}", "method=h2o", "kv_ratio=0.9", "max_new_tokens=4"]
    run_json(capsys, *arguments, f"results={tmp_path / 'a'}")
    read, original = [], shared_prefix.observe
    monkeypatch.setattr(
        shared_prefix, "observe", lambda model, ids, *a, **k: read.append(len(ids)) or original(model, ids, *a, **k)
    )
    arguments.append(f"results={tmp_path / 'b'}")
    assert run_json(capsys, *arguments, "shared_prefix=32")[0] == 0
    assert len(read) > 4 and read == [*range(32, read[-1] + 1, 32)]
    assert metrics_of(tmp_path / "b") == metrics_of(tmp_path / "a")
    for path in (tmp_path / "b").glob("cells/*/cell.json"):
        assert json.loads(path.read_text())["provenance"][0]["batch"]["shared_prefix"] == 32
    assert main(["run", *arguments, "shared_prefix=8"]) == 2
    assert "shared_prefix=8 is not possible: null, or tokens that are read" in capsys.readouterr().err


def test_killed_run_completes_to_the_same_metrics(tmp_path, capsys):
    arguments = ["dataset=tiny/needle,tiny/listing", "length=256", "examples=10", "batch_rows=2", "method=snapkv"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-m", "kvbench", "run", *arguments, f"results={tmp_path / 'a'}"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def lines():
        return sum(len(p.read_bytes().splitlines()) for p in tmp_path.glob("a/cells/*/samples-0.jsonl"))

    deadline = time.monotonic() + 120
    while lines() < 8 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    killed_at = lines()
    assert 8 <= killed_at < 40, "the run must be killed in its middle"
    for results in ("a", "b"):
        assert main(["run", *arguments, f"results={tmp_path / results}", "--json"]) == 0
    capsys.readouterr()
    resumed, undisturbed = metrics_of(tmp_path / "a"), metrics_of(tmp_path / "b")
    assert len(resumed) == 4
    assert resumed == undisturbed
    assert all(m["status"] == "complete" for m in resumed.values())


def test_torn_and_damaged_lines_are_measured_again(tmp_path, capsys):
    arguments = ["dataset=tiny/needle", "length=256", "examples=4", "method=snapkv", f"results={tmp_path}"]
    before = run_json(capsys, *arguments)[1]
    path = sorted(tmp_path.glob("cells/*/samples-0.jsonl"))[0]
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 4
    damaged = lines[1].replace(b'"score": ', b'"score": 7')
    path.write_bytes(lines[0] + damaged + lines[2] + lines[3][: len(lines[3]) // 2])
    after = run_json(capsys, *arguments)[1]
    assert any("damaged" in note for note in after["notes"])
    scores = [[(c["score"], c["n"]) for c in r["cells"]] for r in (*before["rows"], *after["rows"])]
    assert scores[:2] == scores[2:]
    assert len(ResultStore(tmp_path).lines(path.parent.name)) == 4


def test_line_with_every_kind_of_text_comes_back_and_any_flip_is_seen():
    sample = {"id": "a", "prediction": 'x "crc": 5, \u2028\n\x00 é 漢', "score": None}
    line = line_of(sample).encode()
    assert line.count(b"\n") == 1
    assert parse_line(line.rstrip()) == sample
    for i in range(len(line) - 1):
        flipped = line[:i] + bytes([line[i] ^ 1]) + line[i + 1 : -1]
        assert parse_line(flipped) != sample or parse_line(flipped) is None


def test_full_disk_is_one_message_and_keeps_what_was_written(tmp_path, monkeypatch):
    prepared = prepare("dataset=tiny/needle", "length=256", "examples=4", "batch_rows=2", f"results={tmp_path}")
    written = []

    def append(self, sample):
        if len(written) >= 3:
            raise KvbenchError("the disk is full")
        written.append(sample["id"])
        original(self, sample)

    from kvbench.run import store

    original = store.Writer.append
    monkeypatch.setattr(store.Writer, "append", append)
    with pytest.raises(KvbenchError, match="disk is full"):
        experiment.measure(prepared, quiet=True)
    monkeypatch.undo()
    stored = sum(len(prepared.store.lines(c.id)) for g in prepared.groups for c in g.cells)
    assert stored == 3
    experiment.measure(prepared, quiet=True)
    assert all(len(prepared.store.lines(c.id)) == 4 for g in prepared.groups for c in g.cells)


def test_disk_full_error_of_the_system_becomes_the_message(tmp_path):
    import errno

    from kvbench.files import disk_error

    assert "free some space" in str(disk_error(OSError(errno.ENOSPC, "x"), tmp_path))
    assert "could not be written" in str(disk_error(OSError(errno.EIO, "I/O error"), tmp_path))


def test_another_device_or_torch_is_refused_without_mix(tmp_path, capsys):
    arguments = ["dataset=tiny/needle", "length=256", "examples=3", f"results={tmp_path}"]
    assert main(["run", *arguments, "limit=1", "--json"]) == 0
    for path in tmp_path.glob("cells/*/cell.json"):
        record = json.loads(path.read_text())
        record["provenance"][0]["torch"] = "1.0"
        path.write_text(json.dumps(record))
    capsys.readouterr()
    assert main(["run", *arguments, "--json"]) == 2
    assert "mix=true" in capsys.readouterr().err
    assert main(["run", *arguments, "mix=true", "--json"]) == 0


def test_two_processes_on_one_cell_are_kept_apart(tmp_path):
    prepared = prepare("dataset=tiny/needle", "length=256", "examples=2", f"results={tmp_path}")
    cell = prepared.groups[0].cells[0]
    facts = {"device": "cpu", "torch": "2"}
    writer = prepared.store.open(cell, facts, 0, mix=False)
    with pytest.raises(KvbenchError, match="another process"):
        prepared.store.open(cell, facts, 0, mix=False)
    writer.close()
    prepared.store.open(cell, facts, 0, mix=False).close()


def test_shards_split_the_examples_and_the_sweep_prints_all(tmp_path, capsys):
    arguments = ["dataset=tiny/needle", "length=256", "examples=12", "method=snapkv"]
    parts = [
        {e.id for g in prepare(*arguments, f"results={tmp_path}", shard=i, shards=3).groups for e in g.examples}
        for i in range(3)
    ]
    assert sum(map(len, parts)) == len(set().union(*parts)) == 12
    status = main(["run", "-m", "shard=0,1", *arguments, f"results={tmp_path / 'm'}", "--json"])
    out = capsys.readouterr().out
    report = json.loads(out[out.index("{") :])
    assert status == 0
    assert {(c["n"], c["of"]) for r in report["rows"] for c in r["cells"]} == {(12, 12)}
    assert {p.name for p in (tmp_path / "m").glob("cells/*/samples-*.jsonl")} == {"samples-0.jsonl", "samples-1.jsonl"}
    main(["run", *arguments, f"results={tmp_path / 's'}", "--json"])
    capsys.readouterr()
    assert metrics_of(tmp_path / "m") == metrics_of(tmp_path / "s")


def test_plan_and_config_and_lists(tmp_path, capsys):
    arguments = [*SMALL, "method=snapkv,think", f"results={tmp_path}"]
    assert main(["run", *arguments, "--plan", "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert [g["prefills"] for g in plan["groups"]] == [6, 6]
    assert [g["prefills_saved"] for g in plan["groups"]] == [12, 12]
    assert main(["run", *arguments, "--plan", "calibration_text=absent"]) == 0
    plan_text = capsys.readouterr().out
    assert "calibration_text= is not read" in plan_text
    assert "12 saved by sharing" in " ".join(plan_text.split())
    assert max(map(len, plan_text.splitlines())) <= 100
    assert main(["run", *arguments, "--config"]) == 0
    assert "window: 32" in capsys.readouterr().out
    assert main(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {"full", "snapkv", "think"} <= {m["id"] for m in listed["methods"]}
    assert main(["list"]) == 0
    assert "snapkv" in capsys.readouterr().out


def test_a_plan_has_a_time_once_something_is_measured(tmp_path, capsys):
    arguments = ["run", *SMALL, "method=h2o", f"results={tmp_path}", "limit=1"]

    def seconds():
        assert main([*arguments, "--plan", "--json"]) == 0
        return [g["seconds"] for g in json.loads(capsys.readouterr().out)[0]["groups"]]

    assert seconds() == [None, None]
    assert main([*arguments, "--plan"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    hint = "for a time measure a few first (limit=2), then ask again"
    assert f"together: 4 answers in 2 prefills (2 saved by sharing); {hint}" in text
    assert main(["run", SMALL[0].replace(",tiny/code", ""), *SMALL[1:], *arguments[4:]]) == 0
    capsys.readouterr()
    # nothing is left of the group that is measured
    assert seconds() == [0.0, None]
    arguments[-1] = "limit=2"
    needle, code = seconds()
    assert needle > 0 and code is None
    assert main([*arguments, "--plan"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert ", about " in text and hint in text


def test_list_runs_and_show_cell(tmp_path, capsys):
    run_json(capsys, "dataset=tiny/needle", "length=256", "examples=2", f"results={tmp_path}")
    assert main(["list", "runs", "--results", str(tmp_path), "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert len(runs) == 2
    assert main(["show", runs[0]["id"], "--results", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "answer" in out
    assert "reference" in out


def test_interrupt_is_one_message_and_status_130(tmp_path, capsys, monkeypatch):
    def interrupt(*a, **k):
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "measure", interrupt)
    assert main(["run", f"results={tmp_path}"]) == 130
    assert f"to go on:\n  python -m kvbench run results={tmp_path}" in capsys.readouterr().err


def test_identity_changes_with_what_is_measured_and_only_then(tmp_path):
    def ids(*overrides):
        return [c.id for g in prepare(*SMALL, f"results={tmp_path}", *overrides).groups for c in g.cells]

    base = ids()
    assert ids("limit=2", "batch_rows=3", "threads=1", "mix=true", "shared_prefix=32") == base
    for change in ("ratio=0.5", "dtype=bfloat16", "per=query_head", "max_length=200", "kv_size=40"):
        assert ids(change) != base, change


def test_every_config_field_says_whether_it_is_identity():
    from dataclasses import fields

    for cls in (config.RunConfig, config.ModelConfig, config.DatasetConfig, ChainConfig):
        for f in fields(cls):
            assert f.metadata.get("role") in ("identity", "runtime"), f"{cls.__name__}.{f.name}"


def test_damaged_cell_record_names_the_file(tmp_path, capsys):
    arguments = ["dataset=tiny/needle", "length=256", "examples=2", f"results={tmp_path}"]
    run_json(capsys, *arguments)
    path = next(tmp_path.glob("cells/*/cell.json"))
    path.write_text("{")
    with pytest.raises(UsageError, match="move its folder away"):
        ResultStore(tmp_path).cell(path.parent.name)
    # told before anything is measured, whichever cell it is of
    assert main(["run", *arguments, "method=snapkv+think,h2o"]) == 2
    assert "cell.json cannot be read" in capsys.readouterr().err
    assert len(list(tmp_path.glob("cells/*"))) == 2


def test_progress_prints_plain_lines_off_a_terminal(capsys, monkeypatch):
    from kvbench import progress

    monkeypatch.setattr(progress, "PLAIN_EVERY_S", 0.0)
    with progress.progress({"a": 2}) as tick:
        tick("a", 1)
        tick("a", 1)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == ["kvbench: 1 of 2 answers", "kvbench: 2 of 2 answers"]


@pytest.mark.parametrize("dataset", ["tiny/needle", "needle"])
def test_withheld_question_is_read_after_compression(dataset, tmp_path, capsys):
    (tmp_path / "essay.txt").write_text("The river was cold. We walked home. " * 80)
    size = [f"haystack={tmp_path}", "lengths=256", "repeats=1"] if dataset == "needle" else ["length=256", "examples=4"]
    arguments = [f"dataset={dataset}", *size, "method=snapkv", f"results={tmp_path}"]
    aware = run_json(capsys, *arguments)[1]
    agnostic = run_json(capsys, *arguments, "query_aware=false")[1]
    a, b = aware["rows"][1]["cells"][0], agnostic["rows"][1]["cells"][0]
    assert a["cell"] != b["cell"]
    assert b["prompt_tokens"] < a["prompt_tokens"]
    full = agnostic["rows"][0]["cells"][0]
    assert full["score"] == aware["rows"][0]["cells"][0]["score"]


def test_both_protocols_stand_in_one_table_with_the_ids_that_each_has_alone(tmp_path, capsys, monkeypatch):
    read = []
    prefill = run_host.prefill_chains
    monkeypatch.setattr(run_host, "prefill_chains", lambda *a: read.append(len(a[1])) or prefill(*a))
    small = ["dataset=tiny/needle", "length=256", "examples=2", "method=snapkv,h2o,keydiff", f"results={tmp_path}"]
    assert main(["run", *small, "query_aware=true,false", "--plan", "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert [(g["prefills"], g["prefills_saved"]) for g in plan["groups"]] == [(2, 6), (0, 8)]
    status, both = run_json(capsys, *small, "query_aware=true,false")
    assert status == 0
    assert [c["task"] for c in both["columns"]] == [f"tiny/needle query_aware={x}" for x in ("true", "false")]
    assert "question withheld in tiny query_aware=false." in both["settings"]
    assert read == [256, 256]  # whole prompts, whose passes give the caches of their contexts, too
    store = ResultStore(tmp_path)
    for i, value in enumerate(("true", "false")):
        apart = [*small[:-1], f"results={tmp_path / value}", f"query_aware={value}"]
        alone = run_json(capsys, *apart)[1]
        cells = [r["cells"][i]["cell"] for r in both["rows"]]
        assert [r["cells"][0]["cell"] for r in alone["rows"]] == cells
        for cell in cells:
            ours, theirs = (
                [(s.prediction, s.n, s.kept, s.payload, s.overhead, s.score) for s in found.samples(cell).values()]
                for found in (store, ResultStore(tmp_path / value))
            )
            assert ours == theirs
    assert len(read) == 6
    run = prepare(
        "dataset=kv_retrieval,tiny/needle", "records=8", "contexts=1", "questions=2", "query_aware=true,false"
    )
    # several questions are withheld under either value
    columns = ["kv_retrieval/8", "tiny/needle query_aware=true", "tiny/needle query_aware=false"]
    assert [g.column for g in run.groups] == columns
    assert main(["run", *small, "query_aware=true,maybe"]) == 2 and "query_aware" in capsys.readouterr().err


@dataclass(frozen=True, kw_only=True)
class LiesOnce(Selector):
    """Keeps everything of one prompt only, until ``honest``."""

    id: ClassVar[str] = "liesonce"
    lies: ClassVar[list] = []

    def compress(self, cache, obs):
        return cache if obs.prompt in self.lies else super().compress(cache, obs)

    def scores(self, cache, obs, capacity):
        import torch

        return torch.arange(obs.n)[None].expand(cache.heads, -1)


def test_a_refusal_outlives_other_shards_and_ends_only_when_its_example_passes(tmp_path):
    import zlib

    import numpy as np

    chains = (ChainConfig(Chain((LiesOnce(kv_ratio=0.5),)), "liesonce"),)
    base = ["dataset=tiny/needle", "length=256", "examples=8", f"results={tmp_path}", "baseline=false"]
    shards = [prepare(*base, chains=chains, shard=i, shards=2) for i in range(2)]
    bad = shards[0].groups[0].examples[0]
    ids = shards[0].tokenizer.encode(bad.prompt)
    LiesOnce.lies[:] = [zlib.crc32(np.array(ids, dtype=np.int64).tobytes())]
    for shard in shards:
        experiment.measure(shard, quiet=True)
    complete = prepare(*base, chains=chains)
    (cell,) = experiment.report(complete).rows[0].cells
    assert cell.status == "refused"
    assert bad.id in cell.reason
    LiesOnce.lies.clear()
    (cell,) = experiment.measure(complete, quiet=True).rows[0].cells
    assert (cell.status, cell.summary.n) == ("measured", 8)


def test_samples_say_what_they_were_measured_with(tmp_path, capsys):
    arguments = ["dataset=tiny/needle", "length=256", "examples=2", f"results={tmp_path}", "method=full"]
    run_json(capsys, *arguments, "limit=1")
    for path in tmp_path.glob("cells/*/cell.json"):
        record = json.loads(path.read_text())
        record["provenance"][0]["commit"] = "other"
        path.write_text(json.dumps(record))
    run_json(capsys, *arguments)
    store = ResultStore(tmp_path)
    (cell,) = store.cells()
    assert sorted(s["provenance"] for s in store.lines(cell).values()) == [0, 1]
    assert len(store.cell(cell).provenance) == 2


def test_equal_budgets_are_one_cell_however_they_are_written(tmp_path):
    cells = (
        prepare(*SMALL, "method=snapkv+think", "kv_ratio=1,1.0", "ratio=0,0.0", f"results={tmp_path}").groups[0].cells
    )
    assert [c.label.split()[0] for c in cells] == ["full", "snapkv+think"]


def test_too_long_an_answer_is_refused_before_the_model_loads(tmp_path, capsys, monkeypatch):
    from kvbench.models import load

    monkeypatch.setattr(load, "load_weights", lambda *a: pytest.fail("weights were loaded"))
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "answers": ["b"], "max_new_tokens": 5000}\n')
    assert main(["run", "dataset=file", f"path={tmp_path / 'p.jsonl'}", f"results={tmp_path}"]) == 2
    assert "max_new_tokens=5000" in capsys.readouterr().err


def test_a_needle_text_longer_than_the_context_is_refused(tmp_path, capsys):
    (tmp_path / "essay.txt").write_text("The river was cold. We walked home. " * 80)
    arguments = ["dataset=needle", f"haystack={tmp_path}", "lengths=4096", "repeats=1", f"results={tmp_path}"]
    assert main(["run", *arguments]) == 2
    assert "could cut what is asked for" in capsys.readouterr().err

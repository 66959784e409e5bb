"""Runs that end early or meet damage, end to end: a kill, a full disk, torn lines, shards, refusals that end."""

import io
import json
import os
import re
import shutil
import signal
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import ClassVar

import pytest
from support import processes
from support.runs import metrics_of, prepare, run_json
from support.stored import Cell, measure

import kvbench
from kvbench.base.errors import KvbenchError, UsageError
from kvbench.base.files import format_line, parse_line
from kvbench.cli.main import main
from kvbench.methods.core.base import Selector
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.resolve import ChainConfig
from kvbench.report import of_run
from kvbench.run import experiment, runner
from kvbench.store.store import Busy, ResultStore

pytestmark = pytest.mark.e2e("runs whole command lines")


def test_killed_run_completes_to_the_same_metrics(tmp_path, capsys):
    arguments = ["dataset=tiny/needle,tiny/listing", "length=160", "examples=4", "batch_rows=2", "method=snapkv"]
    process = processes.start_until(6, *arguments, f"results={tmp_path / 'a'}")

    def lines():
        return sum(len(p.read_bytes().splitlines()) for p in tmp_path.glob("a/cells/*/samples-0.jsonl"))

    process.kill()
    process.wait()
    assert lines() == 6, "the run must be killed in its middle"
    for results in ("a", "b"):
        assert main(["run", *arguments, f"results={tmp_path / results}", "--json"]) == 0
    capsys.readouterr()
    resumed, undisturbed = metrics_of(tmp_path / "a"), metrics_of(tmp_path / "b")
    assert len(resumed) == 4
    assert resumed == undisturbed
    assert all(m["status"] == "complete" for m in resumed.values())


def test_torn_and_damaged_lines_are_measured_again(tmp_path, capsys):
    arguments = ["dataset=tiny/needle", "length=160", "examples=4", "method=snapkv", f"results={tmp_path}"]
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
    line = format_line(sample).encode()
    assert line.count(b"\n") == 1
    assert parse_line(line.rstrip()) == sample
    for i in range(len(line) - 1):
        flipped = line[:i] + bytes([line[i] ^ 1]) + line[i + 1 : -1]
        assert parse_line(flipped) != sample or parse_line(flipped) is None


def test_full_disk_is_one_message_and_keeps_what_was_written(tmp_path, monkeypatch):
    prepared = prepare("dataset=tiny/needle", "length=160", "examples=4", "batch_rows=2", f"results={tmp_path}")
    written = []

    def append(self, sample):
        if len(written) >= 3:
            raise KvbenchError("the disk is full")
        written.append(sample["id"])
        original(self, sample)

    from kvbench.store import store

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

    from kvbench.base.files import disk_error

    assert "free some space" in str(disk_error(OSError(errno.ENOSPC, "x"), tmp_path))
    assert "could not be written" in str(disk_error(OSError(errno.EIO, "I/O error"), tmp_path))


def test_another_device_or_torch_is_refused_without_mix(tmp_path, capsys):
    arguments = ["dataset=tiny/needle", "length=160", "examples=3", f"results={tmp_path}"]
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
    prepared = prepare("dataset=tiny/needle", "length=160", "examples=2", f"results={tmp_path}")
    cell = prepared.groups[0].cells[0]
    facts = {"device": "cpu", "torch": "2"}
    writer = prepared.store.open(cell, facts, 0, mix=False)
    with pytest.raises(Busy, match=f"result {cell.id}, shard 0"):
        prepared.store.open(cell, facts, 0, mix=False)
    writer.close()
    prepared.store.open(cell, facts, 0, mix=False).close()


def test_shards_split_the_examples_and_the_sweep_prints_all(tmp_path, capsys):
    arguments = ["dataset=tiny/needle", "length=160", "examples=12", "method=snapkv"]
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


def test_interrupt_is_one_message_and_status_130(tmp_path, capsys, monkeypatch):
    def interrupt(*a, **k):
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "measure", interrupt)
    assert main(["run", f"results={tmp_path}"]) == 130
    assert f"to go on:\n  kvbench run results={tmp_path}" in capsys.readouterr().err


def test_prompts_are_answered_before_much_reading_is_at_risk(tmp_path, monkeypatch):
    read = runner.GroupRun.read_prompt

    def stored_when_read(name, at_risk_s):
        """Return how many answers are stored when each prompt is about to be read, and all answers in the end."""
        monkeypatch.setattr(runner, "AT_RISK_S", at_risk_s)
        prepared = prepare(
            "dataset=tiny/needle", "length=160", "limit=4", "method=snapkv", f"results={tmp_path / name}"
        )
        cells = prepared.groups[0].cells
        counts = []

        def counting(self, *prompt):
            counts.append(sum(len(prepared.store.lines(c.id)) for c in cells))
            read(self, *prompt)

        monkeypatch.setattr(runner.GroupRun, "read_prompt", counting)
        experiment.measure(prepared, quiet=True)
        answers = [{i: (s.prediction, s.score) for i, s in prepared.store.samples(c.id).items()} for c in cells]
        return counts, answers

    together, answers = stored_when_read("together", 60.0)
    assert together == [0, 0, 0, 0]
    assert stored_when_read("one by one", 0.0) == ([0, 2, 4, 6], answers)


def test_an_interrupt_says_how_many_prompts_are_read_again(tmp_path, monkeypatch):
    prepared = prepare("dataset=tiny/needle", "length=160", "limit=4", "method=snapkv", f"results={tmp_path}")
    read = runner.GroupRun.read_prompt

    def interrupted(self, example, *rest):
        if example.id == prepared.groups[0].examples[3].id:
            raise KeyboardInterrupt("stopped by Ctrl-C")
        read(self, example, *rest)

    monkeypatch.setattr(runner.GroupRun, "read_prompt", interrupted)
    with pytest.raises(KeyboardInterrupt) as interrupt:
        experiment.measure(prepared, quiet=True)
    (note,) = interrupt.value.__notes__
    assert re.fullmatch(r"3 prompts were read and not answered yet \(\d+ s\): to be read again", note)


def truncated(path):
    path.write_text(path.read_text()[:40])


def a_folder(path):
    path.unlink(missing_ok=True)
    path.mkdir()


def a_pipe(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def a_link_to_itself(path):
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


def a_file(path):
    shutil.rmtree(path)
    path.write_text("what was here before?")


DAMAGES = {
    "a truncated record": ("cell.json", truncated),
    "an empty record": ("cell.json", lambda path: path.write_text("")),
    "a list for a record": ("cell.json", lambda path: path.write_text("[1]")),
    "a folder for a record": ("cell.json", a_folder),
    "a folder for samples": ("samples-0.jsonl", a_folder),
    "a pipe for a record": ("cell.json", a_pipe),
    "a pipe for samples": ("samples-0.jsonl", a_pipe),
    "samples that link to themselves": ("samples-0.jsonl", a_link_to_itself),
    "a folder for a lock": ("lock-0", a_folder),
    "a pipe for a lock": ("lock", a_pipe),
    "a file for the whole cell": ("", a_file),
}


@pytest.fixture(autouse=True)
def no_pipe_is_waited_for():
    """A minute for each test: opening a pipe that nobody else opens never ends."""

    def ended(number, frame):
        pytest.fail("a command hangs")

    before = signal.signal(signal.SIGALRM, ended)
    signal.setitimer(signal.ITIMER_REAL, 60, 5)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


TWO = ["dataset=tiny/needle", "length=160", "examples=2"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The folder of full and snapkv on two prompts, and what the run printed."""
    folder = tmp_path_factory.mktemp("measured")
    with redirect_stdout(io.StringIO()) as out:
        assert main(["run", *TWO, "method=snapkv", f"results={folder}", "--json"]) == 0
    return folder, json.loads(out.getvalue())


@pytest.fixture
def before(measured, tmp_path):
    """The text that was printed of the results, of which there is a copy in tmp_path."""
    shutil.copytree(measured[0], tmp_path, dirs_exist_ok=True)
    return measured[1]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cell_costs_itself_alone_until_it_is_set_aside(damage, tmp_path, capsys, before):
    arguments = [*TWO, f"results={tmp_path}"]
    name, act = DAMAGES[damage]
    damaged = before["rows"][1]["cells"][0]["cell"]
    act(tmp_path / "cells" / damaged / name)
    for verb, status in (("run", 1), ("show", 1)):
        assert main([verb, *arguments, "method=snapkv,h2o", "--json"]) == status
        out, err = capsys.readouterr()
        full, snapkv, h2o = (row["cells"][0] for row in json.loads(out)["rows"])
        assert full["n"] == h2o["n"] == 2 and h2o["delta"] is not None
        assert snapkv["status"] == "failed" and f"{name} cannot be read" in snapkv["reason"]
        assert "kvbench clean sets the result aside" in snapkv["reason"]
        assert ("snapkv kv_ratio=0.25 on tiny/needle is left out: " in err) == (verb == "run")
    assert main(["run", *arguments, "method=snapkv,h2o"]) == 1
    (end,) = (line for line in capsys.readouterr().err.splitlines() if "of the results" in line)
    assert "1 of the results could not be read" in end and "clean --yes` moves damaged results away" in end
    assert main(["show", damaged, f"results={tmp_path}"]) == 2
    assert f"{name} cannot be read" in capsys.readouterr().err
    assert main(["run", *arguments, "method=snapkv", "--plan"]) == 0
    assert main(["clean", f"results={tmp_path}"]) == 0
    assert f"aside      {damaged}: " in capsys.readouterr().out
    assert main(["clean", f"results={tmp_path}", "--yes"]) == 0
    (aside,) = tmp_path.glob(f"damaged/{damaged}-*")
    assert os.path.lexists(aside / name)  # nothing is deleted
    capsys.readouterr()
    _, after = run_json(capsys, *arguments, "method=snapkv")
    assert after["rows"][1]["cells"][0]["score"] == before["rows"][1]["cells"][0]["score"]
    assert main(["clean", f"results={tmp_path}"]) == 0
    assert "aside" not in capsys.readouterr().out


@pytest.mark.parametrize("damage", [a_folder, a_pipe, a_link_to_itself])
def test_what_is_no_file_in_the_place_of_metrics_costs_no_result(damage, tmp_path, capsys, before):
    arguments = [*TWO, "method=snapkv", f"results={tmp_path}"]
    path = next(tmp_path.glob("cells/*/metrics.json"))
    metrics = path.read_bytes()
    damage(path)
    assert main(["list", "runs", f"results={tmp_path}"]) == 0
    assert "metrics.json: " in " ".join(capsys.readouterr().out.split())
    assert main(["clean", f"results={tmp_path}"]) == 0
    assert f"aside      {path.relative_to(tmp_path / 'cells')}: " in capsys.readouterr().out
    status, after = run_json(capsys, *arguments)
    assert status == 0 and after["rows"] == before["rows"]
    if damage is a_folder:  # the others are replaced
        assert any("metrics.json: is a folder" in note for note in after["notes"])
        assert main(["clean", f"results={tmp_path}", "--yes"]) == 0
        capsys.readouterr()
        run_json(capsys, *arguments)
    assert path.read_bytes() == metrics


@pytest.mark.parametrize("name", ["state-0.json", "traceback-0.txt"])
@pytest.mark.parametrize("damage", [a_folder, a_pipe, a_link_to_itself])
def test_what_is_no_file_in_the_place_of_a_mark_is_set_aside(name, damage, tmp_path, capsys):
    store, cell = ResultStore(tmp_path), Cell()
    measure(store, cell, [0])
    damage(store.folder(cell.id) / name)
    assert (store.status(cell.id).status, store.status(cell.id).n) == ("done", 1)
    assert main(["clean", f"results={tmp_path}", "--yes"]) == 0
    assert f"aside      {cell.id}/{name}: " in capsys.readouterr().out
    assert not os.path.lexists(store.folder(cell.id) / name)
    assert store.status(cell.id).n == 1


VERBS = ("run limit=1", "show", "list runs", "clean", "export jsonl output=out.jsonl")


@pytest.mark.parametrize("verb", VERBS)
def test_a_file_in_the_place_of_all_cells_is_one_message(verb, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cells").write_text("")
    assert main([*verb.split(), f"results={tmp_path}"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert f"{tmp_path / 'cells'} is no folder. Move it away, or give another folder" in captured.err
    with pytest.raises(UsageError, match="is no folder"):
        kvbench.results(tmp_path)


def test_a_link_to_another_folder_costs_its_own_cell(tmp_path, capsys, before):
    arguments = [*TWO, f"results={tmp_path}"]
    path = tmp_path / "cells" / before["rows"][1]["cells"][0]["cell"]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    status, after = run_json(capsys, *arguments, "method=snapkv,h2o")
    assert status == 1
    assert [row["cells"][0]["status"] for row in after["rows"]] == ["measured", "failed", "measured"]
    assert "is a symbolic link: put the folder itself there" in after["rows"][1]["cells"][0]["reason"]


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
    base = ["dataset=tiny/needle", "length=160", "examples=8", f"results={tmp_path}", "baseline=false"]
    shards = [prepare(*base, chains=chains, shard=i, shards=2) for i in range(2)]
    bad = shards[0].groups[0].examples[0]
    ids = shards[0].tokenizer.encode(bad.prompt)
    LiesOnce.lies[:] = [zlib.crc32(np.array(ids, dtype=np.int64).tobytes())]
    for shard in shards:
        experiment.measure(shard, quiet=True)
    complete = prepare(*base, chains=chains)
    (cell,) = of_run.report_run(complete).rows[0].cells
    assert cell.status == "refused"
    assert bad.id in cell.reason
    LiesOnce.lies.clear()
    (cell,) = experiment.measure(complete, quiet=True).rows[0].cells
    assert (cell.status, cell.summary.n) == ("measured", 8)

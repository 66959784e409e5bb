"""Real processes on one cell: kept apart on one shard, safe side by side on several."""

import json
import multiprocessing
import os
import signal
import sys
import time

import pytest
from support import processes
from support.runs import metrics_of
from support.stored import FACTS, Cell, measure, sample

from kvbench.base import files
from kvbench.base.errors import KvbenchError
from kvbench.base.files import is_locked, lock
from kvbench.cli.main import main
from kvbench.store.store import ResultStore

pytestmark = pytest.mark.e2e("starts processes")

RUN = ["dataset=tiny/needle", "length=128", "method=snapkv"]


def start(*arguments):
    return processes.start("run", *arguments)


def answers(folder):
    """What is stored by task: of each cell the file's lines, of which the last may be half written."""
    store, files = ResultStore(folder), {}
    for cell in store.cells():
        for path in store.folder(cell).glob("samples-*.jsonl"):
            files.setdefault(store.cell(cell).column, {})[cell] = path.read_bytes().splitlines()
    return files


def numbers(report):
    """Return what a run's JSON says of each cell, without times."""
    return {
        (row["method"], cell["task"]): (cell["cell"], cell["n"], cell["score"], cell.get("delta"), cell["payload"])
        for row in report["rows"]
        for cell in row["cells"]
    }


def test_runs_in_one_folder_share_the_work_and_each_ends_with_its_whole_table(tmp_path, capsys):
    commands = [
        ["dataset=tiny/needle,tiny/code", "method=snapkv,h2o"],
        ["dataset=tiny/needle,tiny/code", "method=snapkv,h2o"],
        ["dataset=tiny/code", "method=h2o,streamingllm"],
        ["dataset=tiny/needle", "method=think"],
    ]
    arguments = ["length=128", "limit=3", "--json"]
    lines = [[*c, *arguments, f"results={tmp_path / 'one'}"] for c in commands]
    first = processes.start_until(4, *lines[0])
    try:
        second = start(*lines[1])
        # it leaves to the first what that measures, and measures all the rest
        while [*map(len, answers(tmp_path / "one").get("tiny/code", {}).values())] != [3] * 3:
            assert second.poll() is None, second.communicate()
            time.sleep(0.02)
        assert sum(map(len, answers(tmp_path / "one")["tiny/needle"].values())) == 4
        code = answers(tmp_path / "one")["tiny/code"]
        others = [start(*line) for line in lines[2:]]
    finally:
        first.send_signal(signal.SIGCONT)
    runs = [first, second, *others]
    ended = [run.communicate(timeout=240) for run in runs]
    assert [run.returncode for run in runs] == [0] * 4, ended
    stored = answers(tmp_path / "one")
    assert code.items() <= stored["tiny/code"].items()
    for command, (out, _) in zip(commands, ended, strict=True):
        assert main(["run", *command, *arguments, f"results={tmp_path / 'alone'}"]) == 0
        assert numbers(json.loads(out)) == numbers(json.loads(capsys.readouterr().out))
    cells = [lines for task in stored.values() for lines in task.values()]
    assert [len({json.loads(line)["id"] for line in lines}) for lines in cells] == [3] * 8
    assert [len(lines) for lines in cells] == [3] * 8  # nothing is measured twice


def test_a_run_that_waits_measures_what_a_killed_one_leaves(tmp_path, capsys):
    arguments = [*RUN, "examples=12", "limit=12", "batch_rows=2", f"results={tmp_path}"]
    first, store = processes.start_until(1, *arguments), ResultStore(tmp_path)
    try:
        second = start(*arguments)
        while "waiting for another run, which measures " not in (line := second.stderr.readline()):
            assert line and second.poll() is None
        assert main(["list", "runs", f"results={tmp_path}", "status=started", "--json"]) == 0
        assert [r["measuring"] for r in json.loads(capsys.readouterr().out)["runs"]] == [[0], [0]]
        cell = store.cells()[0]
        assert main(["clean", f"results={tmp_path}", f"cells={cell}", "--yes"]) == 1
        assert "is being measured now" in capsys.readouterr().err
        assert main(["clean", f"results={tmp_path}", "--yes"]) == 0
        assert capsys.readouterr().out.count("it is being measured now") == 2
        left = {c: store.lines(c) for c in store.cells()}
    finally:
        first.kill()
        first.communicate()
    _, error = second.communicate(timeout=240)
    assert second.returncode == 0, error
    assert [store.status(c).n for c in store.cells()] == [12, 12]
    assert all(lines.items() <= store.lines(c).items() for c, lines in left.items())


def test_shards_at_the_same_time_are_together_the_single_run(tmp_path, capsys):
    arguments = [*RUN, "examples=8"]
    shards = [start(*arguments, "shards=2", f"shard={i}", f"results={tmp_path / 'two'}") for i in range(2)]
    assert main(["run", *arguments, f"results={tmp_path / 'one'}"]) == 0
    for shard in shards:
        error = shard.communicate(timeout=240)[1]
        assert shard.returncode == 0, error
    lines = {p: len(p.read_bytes().splitlines()) for p in tmp_path.glob("two/cells/*/samples-*.jsonl")}
    assert sum(lines.values()) == 16
    assert len(lines) == 4
    assert main(["run", *arguments, f"results={tmp_path / 'two'}"]) == 0
    capsys.readouterr()
    assert lines == {p: len(p.read_bytes().splitlines()) for p in tmp_path.glob("two/cells/*/samples-*.jsonl")}
    assert metrics_of(tmp_path / "two") == metrics_of(tmp_path / "one")


def spawn(count, target, *arguments):
    """Run ``target(i, *arguments)`` in ``count`` processes at once; their exit statuses."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=target, args=(i, *arguments)) for i in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return [p.exitcode for p in processes]


def _own_shard(i, root):
    measure_with(ResultStore(root), i, {**FACTS, "threads": i})


def measure_with(store, shard, facts):
    writer = store.open(Cell(size=80), facts, shard, mix=False)
    for number in range(10):
        writer.append(sample(10 * shard + number))
    writer.close()


def test_eight_shards_that_start_together_are_all_registered_and_lose_nothing(tmp_path):
    assert spawn(8, _own_shard, tmp_path) == [0] * 8
    store = ResultStore(tmp_path)
    assert (store.status(Cell().id).status, store.status(Cell().id).n) == ("complete", 80)
    known = store.cell(Cell().id).provenance
    assert sorted(p["threads"] for p in known) == list(range(8))
    for actual in store.lines(Cell().id).values():
        assert known[actual["provenance"]]["threads"] == int(actual["id"][1:]) // 10


def _same_shard(i, root, refused):
    store = ResultStore(root)
    try:
        writer = store.open(Cell(size=8), FACTS, 0, mix=False)
    except KvbenchError:
        refused.release()
        sys.exit(3)
    for _ in range(4):  # it measures until all others have tried
        refused.acquire()
    writer.append(sample(i))
    writer.close()


def test_of_processes_that_start_together_on_one_shard_one_measures(tmp_path):
    ended = spawn(5, _same_shard, tmp_path, multiprocessing.get_context("fork").Semaphore(0))
    assert sorted(ended) == [0, 3, 3, 3, 3]
    assert len(ResultStore(tmp_path).lines(Cell().id)) == 1


def _look(root, looked, enough):
    store = ResultStore(root)
    while not enough.is_set():
        store.status(Cell().id)
        looked.release()


def test_looking_at_a_cell_never_keeps_a_process_from_measuring_it(tmp_path):
    measure(ResultStore(tmp_path), Cell(), [0])
    context = multiprocessing.get_context("fork")
    looked, enough = context.Semaphore(0), context.Event()
    lookers = [context.Process(target=_look, args=(tmp_path, looked, enough)) for _ in range(3)]
    for process in lookers:
        process.start()
    try:
        for _ in range(50):
            looked.acquire()  # they look all the while
            measure(ResultStore(tmp_path), Cell(), [1])
    finally:
        enough.set()
        for process in lookers:
            process.join()
    assert [p.exitcode for p in lookers] == [0] * 3


def test_a_lock_file_removed_between_opening_and_locking_is_made_again(tmp_path, monkeypatch):
    path, chosen = tmp_path / "lock-0", []
    take = files._try_lock

    def late(fd, kind, name):
        if not chosen:
            name.unlink()
        chosen.append(fd)
        return take(fd, kind, name)

    monkeypatch.setattr(files, "_try_lock", late)
    stored = lock(path, 5.0)
    monkeypatch.undo()
    assert len(chosen) == 2
    assert is_locked(path)
    os.close(stored)


def test_a_lock_whose_file_was_removed_locks_nothing(tmp_path):
    path = tmp_path / "lock-0"
    stored = lock(path, 0.1)
    assert is_locked(path)
    assert lock(path, 0.1) is None
    path.unlink()
    again = lock(path, 0.1)
    assert again is not None
    os.close(stored)
    assert is_locked(path)
    os.close(again)
    assert not is_locked(path)
    assert not is_locked(tmp_path / "absent")

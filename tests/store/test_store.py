"""What the store says of a cell from its files alone, and files that are damaged, doubled, or cannot be written."""

import json
import multiprocessing
import os

import pytest
from support.stored import FACTS, Cell, measure, sample

from kvbench.store.results import Status
from kvbench.store.store import ResultStore


def test_a_cell_from_never_to_complete(tmp_path):
    store, cell = ResultStore(tmp_path), Cell()
    assert store.status(cell.id) == Status("never", 0, None)
    writer = store.open(cell, FACTS, 0, mix=False)
    status = store.status(cell.id)
    assert (status.status, status.n, status.of, status.measuring) == ("started", 0, 4, (0,))
    writer.append(sample(0))
    assert store.status(cell.id).n == 1
    writer.close()
    status = store.status(cell.id)
    assert (status.status, status.n, status.measuring) == ("done", 1, ())
    assert abs(status.changed - os.stat(tmp_path).st_mtime) < 60
    measure(store, cell, [1, 2, 3])
    assert store.status(cell.id).status == "complete"
    store.refuse(cell, "kept too much", "e1")
    assert (store.status(cell.id).status, store.status(cell.id).reason) == ("refused", "kept too much")


@pytest.mark.parametrize("status", ["failed", "interrupted"])
def test_an_end_that_was_marked_stays_until_that_shard_is_opened_again(tmp_path, status):
    store, cell = ResultStore(tmp_path), Cell()
    writer = store.open(cell, FACTS, 2, mix=False)
    writer.append(sample(0))
    store.mark(cell, status, "why")
    assert store.status(cell.id).status == "started"
    writer.close()
    statuses = ResultStore(tmp_path).status(cell.id)
    assert (statuses.status, statuses.reason, statuses.n, statuses.measuring) == (status, "why", 1, ())
    measure(store, cell, [1], shard=1)
    assert store.status(cell.id).status == status
    measure(store, cell, [2], shard=2)
    assert store.status(cell.id).status == "done"


def test_a_mark_after_closing_and_one_of_a_cell_that_was_never_opened(tmp_path):
    store, opened, other = ResultStore(tmp_path), Cell(), Cell("badcafe", "h2o")
    measure(store, opened, [0], shard=3)
    store.mark(opened, "interrupted", "Ctrl-C")
    assert [p.name for p in store.folder(opened.id).glob("state-*")] == ["state-3.json"]
    store.mark(other, "failed", "no memory")
    assert (store.status(other.id).status, store.status(other.id).reason) == ("failed", "no memory")
    assert store.cell(other.id).label == "h2o"
    measure(store, other, [0])
    assert store.cell(other.id).provenance == (FACTS,)


@pytest.mark.parametrize("shards", [(0, 1), (1, 0)])
def test_of_several_answers_to_one_prompt_the_one_whose_bytes_sort_first_counts(tmp_path, shards):
    store, cell = ResultStore(tmp_path), Cell()
    for shard, prediction in zip(shards, ("a", "b"), strict=True):
        writer = store.open(cell, FACTS, shard, mix=False)
        writer.append(sample(0, prediction=prediction))
        writer.close()
    assert store.lines(cell.id)["e0"]["prediction"] == "a"


def _die(root):
    store = ResultStore(root)
    store.open(Cell(), FACTS, 1, mix=False).append(sample(0))
    os._exit(9)


def test_a_process_that_vanished_leaves_its_cell_interrupted(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_die, args=(tmp_path,))
    process.start()
    process.join()
    status = ResultStore(tmp_path).status(Cell().id)
    assert (status.status, status.n, status.measuring) == ("interrupted", 1, ())


def test_a_mark_that_is_damaged_or_cannot_be_written_is_no_error(tmp_path):
    store, cell = ResultStore(tmp_path), Cell()
    measure(store, cell, [0])
    (store.folder(cell.id) / "state-0.json").write_text("{half")
    assert store.status(cell.id).status == "done"
    (store.folder(cell.id) / "state-0.json").unlink()
    (store.folder(cell.id) / "state-0.json").mkdir()
    store.mark(cell, "failed", "x")
    assert store.status(cell.id).n == 1


def test_old_records_know_their_size_from_their_metrics(tmp_path):
    store, cell = ResultStore(tmp_path), Cell()
    measure(store, cell, range(4))
    path = store.folder(cell.id) / "cell.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "of"}))
    assert (store.status(cell.id).status, store.status(cell.id).of) == ("done", None)
    store.write_metrics(cell.id, {"n": 4, "of": 4})
    assert (store.status(cell.id).status, store.status(cell.id).of) == ("complete", 4)

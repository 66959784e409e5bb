"""list runs and clean, as a user calls them, on stores in every state."""

import json
import os
import time

import pytest
from support.stored import FACTS, NAMES, Cell, cell_id, measure, sample

from kvbench.base.errors import KvbenchError
from kvbench.base.files import write_json
from kvbench.cli.main import main
from kvbench.report.summary import summarise
from kvbench.store.store import ResultStore
from kvbench.store.store_clean import carry_out, list_removals

SIZE = 10
LONG = "a reason that is long enough to be broken into several lines, since lines of a hundred columns are the most"


@pytest.fixture
def store(tmp_path):
    """One cell of every status, by the status as its id."""
    store = ResultStore(tmp_path)
    full = dict.fromkeys(("complete", "done", "refused", "failed", "interrupted"), "tiny/needle length=256")
    for name, column in full.items():
        cell = Cell(name, f"snapkv+think kv_ratio=0.25 {name}=1", column, SIZE)
        measure(store, cell, range(SIZE if name == "complete" else 4))
        if name in ("complete", "done"):
            samples = list(store.samples(cell.id).values())
            store.write_metrics(cell.id, summarise(samples, "f1", SIZE).record())
    store.refuse(Cell("refused"), LONG, "e1")
    for name in ("failed", "interrupted"):
        store.mark(Cell(name), name, f"because {name}")
    store.open(Cell("never", "h2o", "longbench/qasper", 200), {**FACTS, "model": "llama2-7b"}, 0, mix=False).close()
    store.mark(Cell("empty", "h2o", "tiny/code"), "failed", "no memory")
    store.folder(cell_id("bare")).mkdir()
    return store


def listed(capsys, store, *arguments):
    assert main(["list", "runs", f"results={store.root}", *arguments, "--json"]) == 0
    return {NAMES[r["id"]]: r for r in json.loads(capsys.readouterr().out)["runs"]}


def cleaned(capsys, store, *arguments):
    assert main(["clean", f"results={store.root}", *arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    for item in result["items"]:
        item["cell"] = NAMES[item["cell"]] if item["cell"] else ""
    return result


def names(store):
    return {NAMES[cell] for cell in store.folders()}


def cells(*names):
    return "cells=" + ",".join(map(cell_id, names))


def test_every_status_is_listed_with_what_is_known(store, capsys):
    actual = listed(capsys, store)
    assert {name: r["status"] for name, r in actual.items()} == {
        **{s: s for s in ("complete", "done", "refused", "failed", "interrupted", "never")},
        "empty": "failed",
        "bare": "never",
    }
    assert [(actual[s]["n"], actual[s]["of"]) for s in ("complete", "done", "never")] == [
        (10, 10),
        (4, 10),
        (0, 200),
    ]
    scores = [100 * sample(i)["score"] for i in range(SIZE)]
    assert actual["complete"]["score"] == pytest.approx(sum(scores) / SIZE)
    assert actual["complete"]["ci"][0] < actual["complete"]["score"] < actual["complete"]["ci"][1]
    assert (actual["refused"]["reason"], actual["failed"]["reason"]) == (LONG, "because failed")
    assert "score" not in actual["refused"]
    assert actual["never"]["model"] == "llama2-7b"
    assert actual["done"]["folder"] == str(store.folder(cell_id("done")))
    age = time.time() - time.mktime(time.strptime(actual["done"]["changed"][:19], "%Y-%m-%dT%H:%M:%S"))
    assert -1 < age < 60


def test_an_imported_cell_is_told_apart(store, capsys):
    record = {"kind": "imported", "label": "full", "column": "a/b", "of": 4, "identity": {"model": "m" * 20}}
    write_json(store.folder(cell_id("bare")) / "cell.json", {**record, "provenance": []})
    assert {name: r["imported"] for name, r in listed(capsys, store).items()} == {
        name: name == "bare" for name in names(store)
    }
    assert main(["list", "runs", f"results={store.root}"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()].count(["imported"]) == 1


def test_cells_that_ended_alike_share_a_line(store, capsys):
    for name in ("done", "interrupted"):
        store.mark(Cell(name), "interrupted", "stopped by Ctrl-C")
    assert main(["list", "runs", f"results={store.root}"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "stopped by Ctrl-C" in out and out.count("stopped by") == 1


def test_a_score_of_fewer_samples_than_there_are_is_not_shown(store, capsys):
    measure(store, Cell("done"), [7])
    assert "score" not in listed(capsys, store)["done"]


def test_the_table_fits_a_hundred_columns(store, capsys):
    cell = Cell(
        "f" * 16, "refreekv+" + "x" * 40 + " " + " ".join(f"knob{i}=0.123456" for i in range(9)), "a/" + "b" * 60
    )
    writer = store.open(
        cell, {**FACTS, "model": "some-organisation/Some-Long-Model-Name-70B-Instruct-v0.1"}, 0, mix=False
    )
    assert main(["list", "runs", f"results={store.root}"]) == 0
    out = capsys.readouterr().out
    writer.close()
    assert max(map(len, out.splitlines())) <= 100
    assert "10 of 10" in out
    assert "is being measured now, shard 0" in out
    assert LONG in " ".join(out.split())
    assert "9 results in" in out
    assert "1 started, 1 complete, 1 done, 1 refused, 2 failed, 1 interrupted, 2 never." in " ".join(out.split())


def test_filters(store, capsys):
    assert set(listed(capsys, store, "status=failed,never")) == {"failed", "empty", "never", "bare"}
    assert set(listed(capsys, store, "method=h2o")) == {"never", "empty"}
    assert set(listed(capsys, store, "method=snapkv")) == set()
    assert set(listed(capsys, store, "dataset=longbench,tiny/code")) == {"never", "empty"}
    assert set(listed(capsys, store, "dataset=tiny", "status=complete")) == {"complete"}
    assert set(listed(capsys, store, "model=llama2-7b")) == {"never"}
    assert main(["list", "runs", f"results={store.root}", "model=x"]) == 0
    assert capsys.readouterr().out == f"no runs in {store.root} with model=x\n"


def test_a_damaged_record_is_listed_and_set_aside_with_its_answers(store, capsys):
    folder = store.folder(cell_id("done"))
    samples = (folder / "samples-0.jsonl").read_bytes()
    (folder / "cell.json").write_text("{")
    assert listed(capsys, store)["done"]["status"] == "damaged"
    (item,) = (i for i in cleaned(capsys, store, "--yes")["items"] if i["kind"] == "aside")
    assert (item["cell"], item["path"]) == ("done", str(folder))
    assert not folder.exists()
    (aside,) = store.root.glob(f"damaged/{folder.name}-*")
    assert (aside / "samples-0.jsonl").read_bytes() == samples
    assert "done" not in listed(capsys, store)


def test_damaged_metrics_cost_a_warning_and_nothing_measured(store, capsys):
    (store.folder(cell_id("done")) / "metrics.json").write_text('{"n": 4, "sco')
    assert main(["list", "runs", f"results={store.root}"]) == 0
    assert f"{cell_id('done')}/metrics.json: cannot be read; the same run makes it again" in " ".join(
        capsys.readouterr().out.split()
    )
    row = listed(capsys, store)["done"]
    assert (row["status"], row["n"], row.get("score")) == ("done", 4, None)


def test_clean_shows_first_and_then_keeps_every_intact_sample(store, capsys):
    folder = store.folder(cell_id("done"))
    stale, fresh = folder / "metrics.json.0a.tmp", folder / "metrics.json.0b.tmp"
    stale.write_text("{")
    fresh.write_text("{")
    os.utime(stale, (1, 1))
    (store.folder(cell_id("failed")) / "traceback-0.txt").write_text("ValueError")
    path = folder / "samples-0.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"x" + lines[1] + b"".join(lines[2:]) + lines[0][:40])
    before = {p: p.read_bytes() for p in sorted(store.root.rglob("*")) if p.is_file()}
    samples = {c: store.lines(c) for c in store.folders()}
    shown = cleaned(capsys, store)
    assert {p: p.read_bytes() for p in sorted(store.root.rglob("*")) if p.is_file()} == before
    kinds = {(i["kind"], i["cell"]) for i in shown["items"] if i["kind"] != "lock"}
    assert kinds == {
        *(("cell", c) for c in ("never", "empty", "bare")),
        *(("mark", c) for c in ("failed", "interrupted")),
        ("temporary", "done"),
        ("lines", "done"),
    }
    done = cleaned(capsys, store, "--yes")
    assert done["items"] == shown["items"]
    after = ResultStore(store.root)
    assert names(after) == {"complete", "done", "refused", "failed", "interrupted"}
    assert {c: after.lines(c) for c in after.folders()} == {c: s for c, s in samples.items() if s}
    assert (folder / "damaged-0.jsonl").read_bytes() == b"x" + lines[1] + lines[0][:40] + b"\n"
    assert not stale.exists()
    assert not list(store.root.rglob("traceback-*"))
    assert fresh.exists()
    assert not list(store.root.rglob("lock*"))
    assert {after.status(cell_id(c)).status for c in ("failed", "interrupted")} == {"done"}
    assert not after.warnings
    assert cleaned(capsys, store)["items"] == []
    measure(after, Cell("done"), [1])
    assert list(after.lines(cell_id("done"))) == ["e0", "e1", "e2", "e3"]


def test_cells_that_are_named_go_with_their_samples(store, capsys):
    shown = cleaned(capsys, store, "status=failed,complete", "dataset=tiny")
    assert {i["cell"]: i["about"] for i in shown["items"]} == {
        "complete": "10 samples",
        "failed": "4 samples",
        "empty": "nothing measured",
    }
    assert len(store.folders()) == 8
    cleaned(capsys, store, "status=failed,complete", "dataset=tiny", "--yes")
    assert names(store) == {"done", "refused", "interrupted", "never", "bare"}
    cleaned(capsys, store, cells("refused", "done"), "--yes")
    assert names(store) == {"interrupted", "never", "bare"}
    assert not list((store.root / "cells").glob(".*"))


def test_what_an_interrupted_cleaning_left_is_removed_by_the_next(store, capsys):
    gone = store.root / "cells" / ".removed-abc-00"
    gone.mkdir()
    (gone / "samples-0.jsonl").write_text("")
    assert ("cell", str(gone)) in {(i["kind"], i["path"]) for i in cleaned(capsys, store)["items"]}
    cleaned(capsys, store, "--yes")
    assert not gone.exists()


def test_what_is_measured_now_is_left_alone_or_refused(store, capsys):
    writer = store.open(Cell("done"), FACTS, 3, mix=False)
    assert cleaned(capsys, store, "status=started,partial", "--yes") == {
        "removed": True,
        "items": [],
        "busy": [cell_id("done")],
    }
    assert main(["clean", f"results={store.root}", cells("done"), "--yes"]) == 1
    assert f"{cells('done')}: shard 3 of it is being measured now. Stop that run first" in capsys.readouterr().err
    assert main(["clean", f"results={store.root}"]) == 0
    assert f"left alone {cell_id('done')}: it is being measured now" in capsys.readouterr().out
    writer.append(sample(9))
    writer.close()
    assert len(store.lines(cell_id("done"))) == 5


def test_a_cell_that_begins_to_be_measured_between_showing_and_removing_stays(store):
    actual = list_removals(store, [cell_id("done")], whole=True)
    writer = store.open(Cell("done"), FACTS, 0, mix=False)
    with pytest.raises(KvbenchError, match=f"{cell_id('done')} is being measured now"):
        carry_out(store, actual)
    writer.close()
    assert len(store.lines(cell_id("done"))) == 4
    carry_out(store, actual)
    assert not store.folder(cell_id("done")).exists()


def everything(folder):
    return {p: p.is_dir() or p.read_bytes() for p in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("verb", ["clean", "list", "show"])
@pytest.mark.parametrize(
    "named", ["", "ID,", ",ID", ".", "..", "../..", "../../victim", "*", "{absolute}", "ID/", "IDID"]
)
def test_only_ids_name_cells(store, capsys, verb, named):
    victim = store.root.parent / "victim"
    victim.mkdir(exist_ok=True)
    before = everything(store.root), everything(victim)
    named = named.replace("ID", cell_id("complete")).format(absolute=store.folder(cell_id("complete")))
    arguments = {"clean": [f"cells={named}", "--yes"], "list": ["runs", f"cells={named}"], "show": [named]}[verb]
    assert main([verb, *arguments, f"results={store.root}"]) == 2
    message = capsys.readouterr().err
    assert "value is missing" in message or "is no result's id" in message
    assert (everything(store.root), everything(victim)) == before


@pytest.mark.parametrize("key", ["results", "status", "model", "method", "dataset"])
def test_a_filter_without_a_value_is_no_filter(store, capsys, key):
    before = everything(store.root)
    assert main(["clean", f"{key}=", "--yes", *([] if key == "results" else [f"results={store.root}"])]) == 2
    assert f"{key}=: a value is missing" in capsys.readouterr().err
    assert everything(store.root) == before


def test_nothing_follows_a_link(store, capsys, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    for part in store.folder(cell_id("failed")).iterdir():
        (outside / part.name).write_bytes(part.read_bytes())
    link, half = store.root / "cells" / cell_id("link"), store.root / "cells" / ".removed-abc-00"
    link.symlink_to(outside)
    half.symlink_to(outside)
    before, kept_tokens = everything(outside), names(store)
    assert set(listed(capsys, store)) == kept_tokens
    assert main(["list", "runs", f"results={store.root}"]) == 0
    assert f"{link.name}: is a symbolic link" in " ".join(capsys.readouterr().out.split())
    for arguments in ([f"clean cells={link.name} --yes"], [f"list runs cells={link.name}"], [f"show {link.name}"]):
        assert main([*arguments[0].split(), f"results={store.root}"]) == 2
        assert "is a symbolic link" in capsys.readouterr().err
    with pytest.raises(KvbenchError, match="is a symbolic link"):
        store.open(Cell("link"), FACTS, 0, mix=False)
    assert main(["clean", f"results={store.root}", "status=failed", "--yes"]) == 0
    assert "is a symbolic link and is left alone" in capsys.readouterr().err
    assert main(["clean", f"results={store.root}", "--yes"]) == 0
    assert everything(outside) == before
    assert link.is_symlink() and half.is_symlink()


@pytest.mark.parametrize("record", ["[1]", "3", '"x"', '{"provenance": 3}', '{"identity": []}', '{"provenance": [1]}'])
def test_a_record_of_another_shape_costs_its_cell_alone(store, capsys, record):
    (store.folder(cell_id("done")) / "cell.json").write_text(record)
    actual = listed(capsys, store)
    assert {name for name, r in actual.items() if r["status"] == "damaged"} == {"done"}
    assert "cell.json cannot be read" in actual["done"]["reason"]
    assert main(["show", cell_id("done"), f"results={store.root}"]) == 2
    cleaned(capsys, store, "--yes")
    assert not store.folder(cell_id("done")).exists()
    assert len(list(store.root.glob("damaged/*/samples-0.jsonl"))) == 1


def test_an_answer_of_any_length_is_shown_by_its_beginning(store, capsys):
    cell = Cell("long", size=1)
    writer = store.open(cell, FACTS, 0, mix=False)
    writer.append(sample(0, prediction="word " * 40_000, answers=["a" * 2000, "b" * 2001]))
    writer.close()
    for results in (["--results", str(store.root)], [f"results={store.root}"]):
        assert main(["show", cell.id, *results]) == 0
        out = capsys.readouterr().out
        assert len(out) < 10_000 and "(200,000 characters; --json has all)" in out
        assert "(2,000 characters" not in out and "(2,001 characters" in out.replace("\n    ", " ")

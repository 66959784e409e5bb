"""Committed tables of a model: packed while they are measured, gone on with elsewhere, verified from samples alone."""

import gzip
import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import paper_tables
import pytest
import shards
from support import papers_data

from kvbench.papers.measured import coverage
from kvbench.papers.spec import stand_ins, table_spec
from kvbench.run import experiment
from kvbench.store import archive
from kvbench.store.store import ResultStore

pytestmark = pytest.mark.e2e("measures and packs tables")

TABLE = table_spec.load("vatp", "2")
TASKS = sorted(c.dataset for c in TABLE.scores)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A folder model's table of which one example a task is measured and packed: its folder, and a copy of that."""
    folder = tmp_path_factory.mktemp("tables") / "folder"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVBENCH_DATA", str(papers_data.data(folder / "data")))
        model = papers_data.model(folder / "model")
        of, results = paper_tables.target(str(model), folder / "committed"), str(folder / "results")
        experiment.measure(paper_tables.prepare(TABLE, of, results, "limit=1").run, quiet=True)
        assert script(of, "vatp", "--pack", "--results", results) == 0
    return folder, shutil.copytree(folder, folder.parent / "copy")


@pytest.fixture
def folder(pristine, monkeypatch):
    """The folder with the table as it was packed: paths in it are part of what is packed."""
    folder, copied = pristine
    shutil.rmtree(folder)
    shutil.copytree(copied, folder)
    monkeypatch.setenv("KVBENCH_DATA", str(folder / "data"))
    return folder


@pytest.fixture
def packed(folder):
    """The target of the table, and the results."""
    return paper_tables.target(str(folder / "model"), folder / "committed"), str(folder / "results")


def script(of, *words):
    """Return the exit status of the script for a target."""
    return paper_tables.main([*words, "--model", of.model, "--committed", str(of.root)])


def test_what_is_measured_so_far_is_packed_and_gone_on_with(packed, folder):
    of, _ = packed
    assert sorted(p.name for p in of.folder.iterdir()) == [
        "counts.csv",
        "numbers.csv",
        "vatp-1.md",
        "vatp-2.md",
    ]
    assert [p.name for p in packs(of)] == [f"vatp.longbench.{t}.samples.jsonl.gz" for t in TASKS]
    assert coverage.read_counts(of.folder)["vatp/2"]["measured"] == "12"
    assert "not measured yet: narrativeqa, qasper, multifieldqa_en" in (of.folder / "vatp-1.md").read_text()
    assert f"`python scripts/paper_tables.py vatp/2 --model {of.model}`" in of.page(TABLE).read_text()
    assert "min to read 4 prompts, once for all rows" in of.page(TABLE).read_text()
    fresh = str(folder / "fresh")
    paper_tables.restore([TABLE], of, fresh)
    run = paper_tables.prepare(TABLE, of, fresh).run
    assert [t.answers_done for t in run.todo()] == [4] * 4
    for path in packs(of):
        assert not any(archive.unpack(path, ResultStore(folder / "fresh")).values())  # nothing twice


def test_restoring_leaves_what_is_there(packed, folder):
    of, _ = packed
    store = ResultStore(folder / "results")
    cell = store.cells()[0]
    before = (store.folder(cell) / "samples-0.jsonl").read_bytes()
    assert not any(archive.unpack(path, store)[name] for path in packs(of) for name in archive.unpack(path, store))
    assert (store.folder(cell) / "samples-0.jsonl").read_bytes() == before


def test_verifying_covers_both_models_and_finds_another_digit(packed, capsys):
    of, _ = packed
    assert script(of, "vatp/2", "--verify") == 0
    page = of.page(TABLE)
    page.write_text(page.read_text().replace("n = 1 of", "n = 2 of"))
    capsys.readouterr()
    assert script(of, "vatp/2", "--verify", "--without", "data,model") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    command = f"python scripts/paper_tables.py --model {of.model}"
    assert captured.err == f"kvbench: tables/vatp-2.md differs from its samples; {command}\n"


def packs(of):
    """The files of committed samples."""
    return sorted(of.packs.iterdir())


def entries(of):
    """The lines of all files of samples."""
    return [json.loads(line) for path in packs(of) for line in gzip.decompress(path.read_bytes()).splitlines()]


def rewrite(of, lines):
    """Put other lines of samples in place of all."""
    first, *others = packs(of)
    for path in others:
        path.unlink()
    first.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))


@pytest.mark.parametrize("differs", ["budget", "task"])
def test_samples_of_another_cell_are_told(differs, packed, capsys):
    of, _ = packed
    identities = {e["cell"]["id"]: e["cell"]["identity"] for e in entries(of) if "cell" in e}
    full = {i for i, identity in identities.items() if not identity["chain"]["stages"]}
    one = min(full)
    if differs == "task":
        other = next(i for i in full if i != one)
    else:
        other = next(i for i in identities.keys() - full if identities[i]["task"] == identities[one]["task"])
    names = {one: other, other: one}
    rewrite(of, [e | {"of": names.get(e["of"], e["of"])} if "of" in e else e for e in entries(of)])
    assert script(of, "vatp/2", "--verify") == 1
    said = capsys.readouterr().err
    assert said.startswith("kvbench: tables/vatp-2.md differs from its samples; the samples of cell ")
    assert {"budget": "was asked to keep", "task": "is no example of its task"}[differs] in said


def test_a_record_of_another_cell_is_told(packed, capsys):
    of, _ = packed
    first, second = [e["cell"] for e in entries(of) if "cell" in e][:2]
    wrong = {"cell": first | {"identity": second["identity"]}}
    rewrite(of, [wrong if e.get("cell") == first else e for e in entries(of)])
    assert script(of, "vatp/2", "--verify") == 1
    assert f"the record of cell {first['id']} " in capsys.readouterr().err


def verify(capsys, of, *more):
    """(exit status, stdout, stderr) of verifying both tables of the paper."""
    capsys.readouterr()
    status = script(of, "vatp", "--verify", *more)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize("absent", ["data", "model"])
def test_what_cannot_be_verified_is_neither_different_nor_a_success(packed, folder, capsys, absent):
    """A missing data folder or model is named in one line with the tables; only ``--without`` makes it status 0."""
    of, _ = packed
    assert verify(capsys, of) == (
        0,
        "verified: 2 as their samples give them: tables/vatp-1.md, tables/vatp-2.md\n",
        "",
    )
    (folder / absent).rename(folder / "away")
    reason = {
        "data": f"data folder missing: KVBENCH_DATA={folder / 'data'} is no folder, set it to one",
        "model": f"model {of.model} missing: fetch it with kvbench model fetch {of.model}",
    }[absent]
    line = f"{reason}: tables/vatp-1.md, tables/vatp-2.md\n"
    assert verify(capsys, of) == (1, "", f"kvbench: not verified: {line}")
    other = {"data": "model", "model": "data"}[absent]
    assert verify(capsys, of, "--without", other)[0] == 1
    allowed = f"kvbench: not verified (allowed by --without {absent}): {line}"
    assert verify(capsys, of, "--without", absent) == (0, "", allowed)


def test_texts_that_are_missing_below_the_data_folder_are_named(packed, folder, monkeypatch, capsys):
    of, _ = packed
    triviaqa = folder / "data" / "longbench" / "triviaqa.jsonl"
    content = triviaqa.read_text()
    triviaqa.unlink()
    status, out, err = verify(capsys, of)
    where = f"longbench/triviaqa.jsonl missing below KVBENCH_DATA={folder / 'data'}"
    assert status == 1 and err == f"kvbench: not verified: {where}: tables/vatp-1.md\n"
    assert out == "verified: 1 as their samples give them: tables/vatp-2.md\n"  # which reads other texts
    triviaqa.write_text(content)
    for path in (folder / "data").rglob("*.json*"):  # other texts under these names are no reason to skip a table
        path.write_text(path.read_text().replace("river", "bridge"))
    status, _, err = verify(capsys, of)
    assert status == 1 and "tables/vatp-1.md, tables/vatp-2.md differ from their samples" in err
    assert "not verified" not in err
    monkeypatch.delenv("KVBENCH_DATA")
    assert "data folder missing: set KVBENCH_DATA=FOLDER: tables/vatp-1.md" in verify(capsys, of)[2]


def test_only_data_and_models_may_be_missing(capsys):
    with pytest.raises(SystemExit) as ended:
        paper_tables.main(["--verify", "--without", "data,time"])
    assert ended.value.code == 2 and "'time' is not one of data, model" in capsys.readouterr().err


def test_tables_of_other_methods_are_measured_as_one(packed, folder):
    of, _ = packed
    for path in (folder / "data" / "longbench").glob("*.jsonl"):
        if path.stem not in {*TASKS, "gov_report", "trec"}:  # two of the other table's own are enough
            path.unlink()
    results = str(folder / "joint")
    names = ("vatp/1", "vatp/2")
    shards.measure_shard((names, of.model, results, of.arguments), 0, 1, 1)
    for name in names:
        run = paper_tables.prepare(*table_spec.find_tables(name), of, results, "limit=1").run
        assert sum(t.answers_to_do for t in run.todo()) == 0


def test_processes_share_the_calibrations(packed, folder, monkeypatch):
    of, _ = packed
    few = {stage: {"samples": "2"} for stage in stand_ins.SAMPLES}
    monkeypatch.setattr(stand_ins, "choose_depth_knobs", lambda size: few)
    names, results = ("think/12",), str(folder / "shared")
    for shard in (0, 1):
        assert len(list(Path(results).glob("calibration/**/*.safetensors"))) == shard
        shards.calibrate_shard((names, of.model, results, ()), shard, 2)
    run = paper_tables.prepare(*table_spec.find_tables("think/12"), of, results).run
    chains = [c.chain for g in run.groups for c in g.cells if run.session.requests(c.chain)]
    assert chains and not any(run.session.missing(c) for c in chains)


def test_a_script_that_is_terminated_takes_its_processes_with_it(packed, monkeypatch, capsys):
    def measure(*_):
        child.start()
        os.kill(os.getpid(), signal.SIGTERM)

    of, results = packed
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    monkeypatch.setattr(paper_tables, "measure", measure)
    before = signal.getsignal(signal.SIGTERM)
    assert script(of, "vatp/2", "--results", results) == 130
    child.join(10)
    assert child.exitcode == -signal.SIGTERM and signal.getsignal(signal.SIGTERM) is before
    assert "run it again" in capsys.readouterr().err

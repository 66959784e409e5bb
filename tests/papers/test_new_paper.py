"""A paper of one table costs one folder: paper.yaml and published/table1.csv."""

import csv
import io
import json

import pytest
from support import worked

from kvbench.cli.main import main
from kvbench.papers.spec import catalogue, published_cells, table_spec
from kvbench.papers.spec.published import load_table

pytestmark = pytest.mark.e2e("measures a table")

FOLDER = "kvbench/papers/data/example"


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The folder of a paper beside the package's."""
    published = tmp_path / "papers" / "example" / "published"
    published.mkdir(parents=True)
    (published.parent / "paper.yaml").write_text(worked.block(f"{FOLDER}/paper.yaml"))
    (published / "table1.csv").write_text(worked.block(f"{FOLDER}/published/table1.csv"))
    monkeypatch.setenv("KVBENCH_PAPERS_DATA", str(tmp_path / "papers"))
    caches = (published_cells.read_published, catalogue.read_paper, table_spec.load, load_table)
    for cached in caches:
        cached.cache_clear()
    yield tmp_path
    for cached in caches:
        cached.cache_clear()


def test_one_folder_is_enough_to_measure_a_table(own, capsys):
    words = ["table", "example/1", f"results={own}", "limit=2", "length=256", "dataset.tiny.examples=2"]
    assert main([*words, "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {(r["method"], r["column"], r["status"]) for r in rows} == {
        (m, c, "measured") for m in ("full", "snapkv", "h2o") for c in ("needle", "hop", "avg")
    }
    assert {r["setting"] for r in rows} == {"", "kv_size=128", "kv_size=64"}
    assert all(r["ours_percent_of_full"] == "100.0" for r in rows if r["method"] == "full" and r["n"] == "2")


def test_datasets_and_knobs_of_its_own_stand_in_the_folder_too(own, capsys):
    folder = own / "papers" / "example"
    (folder / "tables.yaml").write_text("tasks: {stories: code}\n")
    path = folder / "published" / "table1.csv"
    path.write_text(path.read_text().replace("hotpotqa", "stories").replace("kv_size=128", "kv_size=128;kernel=5"))
    words = ["table", "example/1", f"results={own}", "limit=1", "length=256", "dataset.tiny.examples=1", "--json"]
    assert main(words) == 0
    result = json.loads(capsys.readouterr().out)
    assert {c["column"] for c in result["cells"]} == {"needle", "code", "avg"}
    assert "kv_size=128;kernel=5" in {c.get("setting") for c in result["cells"]}
    assert any("code for stories" in note for note in result["notes"])


def test_a_table_of_times_without_its_declaration_names_the_missing_file(own, capsys):
    path = own / "papers" / "example" / "paper.yaml"
    path.write_text(path.read_text().replace("kind: quality", "kind: efficiency"))
    assert main(["table", "example/1", f"results={own}"]) == 2
    assert "table example/1: example/bench1.yaml is missing" in capsys.readouterr().err


def test_every_verb_of_papers_knows_it(own, capsys):
    assert catalogue.papers_in_order()[-1] == "example" and table_spec.table_ids()[-1] == ("example", "1")
    assert main(["table", "example/1", "--show", "published", "--format", "md"]) == 0
    assert "| h2o<br>kv_size=64 | 20.0 | 21.0 | 20.50 |" in capsys.readouterr().out
    assert main(["reference", "example", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["title"] == "Caches: an example" and result["settings"] == []
    assert result["entries"][0]["reproduction"] == "with the paper's model; not here: llama-x"
    for words in (["reference", "example"], ["reference", "example", "--format", "md"], ["list", "tables"]):
        assert main(words) == 0
        assert "Two selections at two sizes" in capsys.readouterr().out
    assert main(["audit", "example"]) == 0
    assert not found_by_audit(capsys)
    assert main(["claims", "example"]) == 2
    assert "unknown paper example" in capsys.readouterr().err


def found_by_audit(capsys):
    capsys.readouterr()
    assert main(["audit", "example", "--json"]) == 0
    return [(f["row"], f["printed"], f["recomputed"]) for f in json.loads(capsys.readouterr().out)["findings"]]


def test_the_audit_finds_its_wrong_average(own, capsys):
    path = own / "papers" / "example" / "published" / "table1.csv"
    path.write_text(path.read_text().replace("avg,f1,31.0", "avg,f1,33.0"))
    assert found_by_audit(capsys) == [("llama-x snapkv kv_size=128", "33.0", "31.0")]

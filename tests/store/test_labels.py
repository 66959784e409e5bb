"""What lists call a cell is what its identity says, whatever table or figure measured it first."""

import json
from pathlib import Path

import pytest
from support.runs import run_json

from kvbench.base.files import write_json
from kvbench.cli.main import main
from kvbench.cli.runs import _break_text
from kvbench.methods.core import registry
from kvbench.plan import config, words
from kvbench.report.listing import list_cells
from kvbench.store import archive
from kvbench.store.labels import describe_differences, label_cell, list_settings
from kvbench.store.store import ResultStore

TABLES = Path(__file__).parents[2] / "results" / "samples"
SNAPKV = {"frozen_layers": [], "kernel": 7, "kv_size": 16, "pooling": "max", "window": 12}


def identity(**changed):
    stages = [{"id": "snapkv", "revision": 1, "knobs": {**SNAPKV, **changed.pop("knobs", {})}}]
    prompt = {"template": False, "system": None, "truncation": "tokens", "max_length": None, "query_aware": True}
    return {
        "model": {"fingerprint": "35ede91dc2f50768", "dtype": changed.pop("dtype", "float32")},
        "task": "tiny/needle",
        "content": "1bb9186c115d654a5e6f",
        "prompt": {**prompt, **changed},
        "chain": {"stages": stages, "per": "kv_head"},
    }


def stored(folder, *identities):
    """Cells that a table measured first and called by its own words."""
    store = ResultStore(folder)
    for i, known in enumerate(identities):
        facts = {"device": "cpu", "torch": "2", "model": "/home/me/smollm2"}
        record = {"id": f"{i:016x}", "label": "snapkv block=kv64;kv_size=64", "column": "tiny/needle", "of": 4}
        write_json(
            store.folder(record["id"]) / "cell.json",
            {**record, "identity": known, "provenance": [facts]},
        )
    return store


def called(store, capsys, *arguments, options=()):
    assert main([*arguments, f"results={store.root}", *options]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "method",
    [
        *(f"method={m}" for m in registry.available() if registry.defaults(m).get("_target_") and m != "vatp"),
        "method=full",
        "method=snapkv+think kv_size=64 ratio=0.5",
        "method=snapkv,h2o kv_ratio=0.125,0.5 per=query_head,kv_head",
        "method=h2o+vatp variant=orig kv_size=100",
        "method=refreekv frozen_layers=[1,2]",
        "method=snapkv+kivi method.snapkv.window=8 bits=4",
    ],
)
def test_the_label_of_a_cell_is_the_one_in_the_table_of_its_run(method):
    (overrides,) = words.read([*method.split(), "dataset=tiny/needle"])
    for chain in config.parse(overrides).chains:
        read = json.loads(json.dumps({"chain": chain.chain.identity()}))
        assert label_cell(read) == label_cell({"chain": chain.chain.identity()}) == chain.label


def test_a_knob_of_two_stages_says_whose_it_is():
    known = identity()
    known["chain"]["stages"].append({"id": "other", "revision": 1, "knobs": {"window": 3, "list": []}})
    assert label_cell(known) == "snapkv+other kv_size=16 snapkv.window=12 other.window=3 list=none"
    assert label_cell({"model": "m"}, "imported 64") == "imported 64"


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.samples.jsonl.gz"))[:4], ids=lambda p: p.name.split(".")[0])
def test_committed_cells_of_different_knobs_have_different_labels(path, tmp_path):
    store = ResultStore(tmp_path)
    chains = [store.cell(c).identity["chain"] for c in archive.unpack(path, store)]
    printed = {
        json.dumps([[[s["id"], s["knobs"]] for s in c["stages"]], c["per"]]): label_cell({"chain": c}) for c in chains
    }
    assert len(set(printed.values())) == len(printed) > 1
    assert not any(";" in text for text in printed.values())


def test_labels_of_other_tables_are_not_repeated(tmp_path, capsys):
    store = stored(tmp_path, identity(), identity(knobs={"kv_size": 64}))
    assert [r.label for r in list_cells(store, {})] == ["snapkv kv_size=16 window=12", "snapkv kv_size=64 window=12"]
    assert "block" not in called(store, capsys, "list", "runs")
    shown = called(store, capsys, "show", f"{0:016x}")
    assert shown.startswith("result 0000000000000000: snapkv kv_size=16 window=12 on tiny/needle\n")
    assert "kv_size 16" in shown and "query_aware True" in shown and "dtype float32" in shown
    result = json.loads(called(store, capsys, "show", f"{1:016x}", options=["--json"]))
    assert (result["label"], result["knobs"]) == ("snapkv kv_size=64 window=12", {"snapkv": {**SNAPKV, "kv_size": 64}})


def test_lines_that_would_be_equal_say_in_what_the_cells_differ(tmp_path, capsys):
    store = stored(
        tmp_path,
        identity(),
        identity(template="1a2b3c4d5e6f7081"),
        identity(query_aware=False),
        identity(dtype="bfloat16"),
        identity(knobs={"kv_size": 99}),
    )
    result = {r["id"]: r for r in json.loads(called(store, capsys, "list", "runs", options=["--json"]))["runs"]}
    assert [result[f"{i:016x}"]["differs"] for i in range(5)] == [
        "dtype=float32 template=off query_aware=true",
        "dtype=float32 template=1a2b3c4d query_aware=true",
        "dtype=float32 template=off query_aware=false",
        "dtype=bfloat16 template=off query_aware=true",
        "",
    ]
    one = result[f"{1:016x}"]
    assert (one["per"], one["query_aware"], one["dtype"]) == ("kv_head", True, "float32")
    assert one["prompt"]["template"] == "1a2b3c4d5e6f7081" and one["model"] == "/home/me/smollm2"
    out = called(store, capsys, "list", "runs")
    assert all(out.count(word) == 1 for word in ("template=1a2b3c4d", "query_aware=false", "dtype=bfloat16"))
    assert out.count("/home/me/smollm2") == 5


def test_a_cell_says_in_what_it_differs_if_only_a_revision_or_a_calibration_does():
    old, new = identity(), identity()
    new["chain"]["stages"][0] |= {"revision": 2, "code": "ab12"}
    new["chain"]["calibration"] = {"palu": {"samples": 32}}
    assert describe_differences([old, new]) == ["revision=1 code=null samples=null", "revision=2 code=ab12 samples=32"]
    scored = [identity() | {"metric": {"name": name}} for name in ("f1", "rouge_l")]
    assert describe_differences(scored) == ["metric=f1", "metric=rouge_l"]


@pytest.mark.parametrize("text", ["/home/me/smollm2", "a/b", "/" + "x" * 60 + "/y", "/"])
def test_a_path_keeps_its_slashes_when_it_is_folded(text):
    assert "".join(_break_text(text, "/")) == text


def test_a_run_says_what_its_cells_are(tmp_path, capsys):
    small = ["dataset=tiny/needle", "limit=1", "length=256", "examples=3", f"results={tmp_path}"]
    status, report = run_json(capsys, "method=snapkv", "kv_size=64", "per=query_head", "query_aware=false", *small)
    assert status == 0
    full, ours = (row["cells"][0] for row in report["rows"])
    assert (full["knobs"], full["per"]) == ({}, "kv_head")
    assert (ours["knobs"]["snapkv"]["kv_size"], ours["per"], ours["query_aware"]) == (64, "query_head", False)
    assert (ours["dtype"], ours["prompt"]["template"]) == ("float32", False)
    known = ResultStore(tmp_path).cell(ours["cell"])
    assert known.label == report["rows"][1]["method"] == "snapkv kv_size=64 per=query_head"
    assert list_settings(known.identity) == {k: ours[k] for k in ("knobs", "per", "prompt", "query_aware", "dtype")}

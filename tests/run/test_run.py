"""The main job end to end: shared reading, plans, lists, identities, protocols, and what is refused before it."""

import json
from itertools import count

import pytest
from support.runs import SMALL, metrics_of, prepare, run_json

import kvbench
from kvbench.base.errors import UsageError
from kvbench.cli.main import main
from kvbench.engine import shared_prefix
from kvbench.methods.core.resolve import ChainConfig
from kvbench.plan import config
from kvbench.run import host as run_host
from kvbench.store.store import ResultStore

pytestmark = pytest.mark.e2e("runs whole command lines")


def test_second_run_measures_nothing_and_a_new_method_reads_only_for_itself(tmp_path, capsys, monkeypatch):
    arguments = [*SMALL, f"results={tmp_path}"]
    first = run_json(capsys, *arguments, "method=snapkv")[1]
    calls = []
    original = run_host.prefill_chains
    monkeypatch.setattr(
        run_host,
        "prefill_chains",
        lambda m, i, c, **more: calls.append([x.name for x in c]) or original(m, i, c, **more),
    )
    again = run_json(capsys, *arguments, "method=snapkv")[1]
    assert calls == []
    assert again == first
    run_json(capsys, *arguments, "method=snapkv,think")
    assert calls == [["think"]] * 8


def test_beginnings_that_prompts_share_are_read_once_and_change_no_score(tmp_path, capsys, monkeypatch):
    """Prompts of sixteen examples and a question, as few-shot prompts are: the examples are read with the first."""
    shots = "".join(f"Key k{i}: the number is {i * 37 % 100}. " for i in range(16))
    rows = [
        {"id": str(i), "prompt": f"{shots}Key k{i}: the number is", "answers": [f"{i * 37 % 100}"]} for i in range(6)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["dataset=file", f"path={tmp_path / 'rows.jsonl'}", "method=h2o", "kv_ratio=0.9", "max_new_tokens=4"]
    run_json(capsys, *arguments, f"results={tmp_path / 'a'}")
    read, original = [], shared_prefix.observe_prompt
    monkeypatch.setattr(
        shared_prefix,
        "observe_prompt",
        lambda m, ids, *a, **k: read.append(len(ids)) or original(m, ids, *a, **k),
    )
    arguments.append(f"results={tmp_path / 'b'}")
    status, report = run_json(capsys, *arguments, "shared_prefix=32")
    assert status == 0 and any("read in pieces of 32 tokens (shared_prefix)" in note for note in report["notes"])
    assert len(read) > 4 and read == [*range(32, read[-1] + 1, 32)]
    assert metrics_of(tmp_path / "b") == metrics_of(tmp_path / "a")
    for path in (tmp_path / "b").glob("cells/*/cell.json"):
        assert json.loads(path.read_text())["provenance"][0]["batch"]["shared_prefix"] == 32
    assert main(["run", *arguments, "shared_prefix=8"]) == 2
    assert "shared_prefix=8 is not possible: null, or tokens that are read" in capsys.readouterr().err


def test_plan_and_config_and_lists(tmp_path, capsys):
    arguments = [*SMALL, "method=snapkv,think", f"results={tmp_path}"]
    assert main(["run", *arguments, "--plan", "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert [g["prefills"] for g in plan["groups"]] == [4, 4]
    assert [g["prefills_saved"] for g in plan["groups"]] == [8, 8]
    assert main(["run", *arguments, "--plan", "calibration_text=absent"]) == 0
    plan_text = capsys.readouterr().out
    assert "calibration_text= is not read" in plan_text
    assert "8 saved by sharing" in " ".join(plan_text.split())
    assert max(map(len, plan_text.splitlines())) <= 100
    assert main(["run", *arguments, "--config"]) == 0
    assert "window: 32" in capsys.readouterr().out
    assert main(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {"full", "snapkv", "think"} <= {m["id"] for m in listed["methods"]}
    assert main(["list", "methods"]) == 0
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
    run_json(capsys, "dataset=tiny/needle", "length=160", "examples=2", f"results={tmp_path}")
    assert main(["list", "runs", "--results", str(tmp_path), "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert len(runs) == 2
    assert main(["show", runs[0]["id"], "--results", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "answer" in out
    assert "reference" in out


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


def test_progress_prints_plain_lines_off_a_terminal(capsys):
    from kvbench.base import progress

    minutes = count(step=60)
    with progress.progress({"a": 2}, clock=lambda: next(minutes)) as tick:
        tick("a", 1)
        tick("a", 1)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == ["kvbench: 1 of 2 answers", "kvbench: 2 of 2 answers"]


@pytest.mark.parametrize("dataset", ["tiny/needle", "needle"])
def test_withheld_question_is_read_after_compression(dataset, tmp_path, capsys):
    (tmp_path / "essay.txt").write_text("The river was cold. We walked home. " * 80)
    size = [f"haystack={tmp_path}", "lengths=256", "repeats=1"] if dataset == "needle" else ["length=160", "examples=2"]
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
    monkeypatch.setattr(run_host, "prefill_chains", lambda *a, **more: read.append(len(a[1])) or prefill(*a, **more))
    small = ["dataset=tiny/needle", "length=160", "examples=2", "method=snapkv,h2o,keydiff", f"results={tmp_path}"]
    assert main(["run", *small, "query_aware=true,false", "--plan", "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert [(g["prefills"], g["prefills_saved"]) for g in plan["groups"]] == [(2, 6), (0, 8)]
    status, both = run_json(capsys, *small, "query_aware=true,false")
    assert status == 0
    assert [c["task"] for c in both["columns"]] == [f"tiny/needle query_aware={x}" for x in ("true", "false")]
    assert "question withheld in tiny query_aware=false." in both["settings"]
    assert read == [160, 160]  # whole prompts, whose passes give the caches of their contexts, too
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


def test_samples_say_what_they_were_measured_with(tmp_path, capsys):
    arguments = ["dataset=tiny/needle", "length=160", "examples=2", f"results={tmp_path}", "method=full"]
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


def test_too_long_an_answer_is_refused_before_the_model_loads(tmp_path, capsys, no_weights):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "answers": ["b"], "max_new_tokens": 5000}\n')
    assert main(["run", "dataset=file", f"path={tmp_path / 'p.jsonl'}", f"results={tmp_path}"]) == 2
    assert "max_new_tokens=5000" in capsys.readouterr().err


def test_a_context_that_leaves_next_to_nothing_of_a_prompt_is_refused_and_little_is_said(tmp_path, capsys):
    arguments = ["dataset=tiny/needle", "length=256", f"results={tmp_path}"]
    assert main(["run", *arguments, "model.context=10", "limit=2"]) == 2
    err = capsys.readouterr().err
    assert "the model's context of 10 tokens and an answer of 8 leave 2 of the prompt's 256 tokens" in err
    status, report = run_json(capsys, *arguments, "max_length=20", "limit=2", "method=snapkv")
    (note,) = (note for note in report["notes"] if "were cut" in note)
    assert status == 0 and note.startswith("tiny/needle: 2 of 2 prompts were cut, in all to 40 of 512 tokens")
    assert not any("were cut" in note for note in run_json(capsys, *arguments, "max_length=60", "limit=1")[1]["notes"])
    (tmp_path / "p.jsonl").write_text('{"prompt": "a b c", "answers": ["b"], "max_new_tokens": 4}\n')
    short = ["dataset=file", f"path={tmp_path / 'p.jsonl'}", "metric=f1", f"results={tmp_path}"]
    assert main(["run", *short, "model.context=10"]) == 0


def test_a_line_that_cannot_be_used_costs_itself_alone(tmp_path, capsys):
    """It is counted and named in a note, also where limit= does not reach it."""
    lines = [json.dumps({"prompt": f"the number is {i}", "answers": str(i)}) for i in range(20)]
    lines[7] = '{"prompt": "a"}'
    lines[12] = "{"
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    words = ["dataset=file", f"path={tmp_path / 'p.jsonl'}", "metric=f1", "max_new_tokens=2", "method=streamingllm"]
    status, report = run_json(capsys, *words, "limit=3", f"results={tmp_path}")
    assert status == 0 and {row["cells"][0]["n"] for row in report["rows"]} == {3}
    (note,) = [note for note in report["notes"] if "left out" in note]
    assert note.startswith("file/p: 2 of 20 lines are left out, since they cannot be used. The first: ")
    assert f"{tmp_path / 'p.jsonl'}, line 8: there is no key 'answers'" in note


def test_a_method_that_the_model_refuses_costs_its_row_alone(tmp_path, capsys):
    words = ["dataset=tiny/needle", "length=160", "limit=1", "method=snapkv,streamingllm", "snapkv.frozen_layers=[99]"]
    status, report = run_json(capsys, *words, f"results={tmp_path}")
    cells = {row["method"].split()[0]: row["cells"][0] for row in report["rows"]}
    assert status == 1 and {name: cell["status"] for name, cell in cells.items()} == {
        "full": "measured",
        "streamingllm": "measured",
        "snapkv": "refused",
    }
    assert "the model has layers 0 to 5" in cells["snapkv"]["reason"]
    # a run of nothing else is an error
    alone = ["run", "dataset=tiny/needle", "limit=1", "method=snapkv", "frozen_layers=[99]", f"results={tmp_path}"]
    assert main(alone) == 2
    assert "the model has layers 0 to 5" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_told(tmp_path, capsys, monkeypatch):
    for arguments in (["list", "runs"], ["show", "dataset=tiny/needle"]):
        assert main([*arguments, f"results={tmp_path / 'gone'}"]) == 2
        assert f"results={tmp_path / 'gone'}: there is no such folder" in capsys.readouterr().err
    assert main(["list", "runs", "--results", str(tmp_path / "gone")]) == 2
    with pytest.raises(UsageError, match="there is no such folder, so that nothing is measured there yet"):
        kvbench.results(tmp_path / "gone")
    assert not (tmp_path / "gone").exists()
    monkeypatch.chdir(tmp_path)
    assert main(["list", "runs"]) == 0 and main(["show", "dataset=tiny/needle"]) == 0
    assert "no runs in results yet\nnothing measured yet for " in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    assert main(["list", "runs", f"results={tmp_path / 'empty'}"]) == 0


def test_a_needle_text_longer_than_the_context_is_refused(tmp_path, capsys):
    (tmp_path / "essay.txt").write_text("The river was cold. We walked home. " * 80)
    arguments = ["dataset=needle", f"haystack={tmp_path}", "lengths=4096", "repeats=1", f"results={tmp_path}"]
    assert main(["run", *arguments]) == 2
    assert "could cut what is asked for" in capsys.readouterr().err

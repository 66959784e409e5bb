"""Many questions on one compressed cache: once compressed, asked alone or in turn, token for token a slow loop."""

import json

import pytest
import torch
from support.runs import counted, prepare, run_json

import kvbench
from kvbench.base.errors import UsageError
from kvbench.cli.main import main
from kvbench.report import turns as turns_table
from kvbench.run import answers, experiment
from kvbench.store.turns import TurnAnswer, compare_falls, summarise_turns

pytestmark = pytest.mark.e2e("whole answers")

FACTS = "the magic number of {} is {}. the river is calm. the magic number of {} is {}. it was a calm night."
ROWS = [
    {
        "id": name,
        "context": FACTS.format(one, first, two, second) + " the old house is quiet in the morning.",
        "questions": [
            {"question": f" what is the magic number of {city}? answer: {city} is", "answers": [f"{number}."]}
            for city, number in ((one, first), (two, second), (one, first))
        ],
    }
    for name, one, first, two, second in (("a", "paris", 471, "london", 902), ("b", "rome", 777, "cairo", 305))
]
METHODS = ["snapkv", "h2o", "kivi", "streamingllm"]
KNOBS = {"kv_ratio": 0.5}


def write(folder, rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return f"path={path}"


def flat(rows):
    """Every question as a line of its own."""
    return [
        {"id": f"{row['id']}#{i + 1}", "context": row["context"], **question}
        for row in rows
        for i, question in enumerate(row["questions"])
    ]


def measured(folder, rows, *words, methods=METHODS):
    """Return (the run, its samples by the first word of a label)."""
    folder.mkdir()
    words = [f"method={','.join(methods)}", "kv_ratio=0.5", *words]
    run = prepare("dataset=file", write(folder, rows), f"results={folder}", "metric=contains", *words)
    experiment.measure(run, quiet=True)
    return run, {c.label.split()[0]: run.store.samples(c.id) for c in run.groups[0].cells}


def test_isolated_questions_are_answered_as_each_alone_from_one_compression(tmp_path, monkeypatch):
    prefills, compressions = counted(monkeypatch)
    _, together = measured(tmp_path / "a", ROWS, "max_new_tokens=6")
    assert (prefills, len(compressions)) == ([5, 5], 2)
    _, alone = measured(tmp_path / "b", flat(ROWS), "max_new_tokens=6", "query_aware=false")
    # lines that follow each other with equal contexts share their caches, too
    assert (prefills, len(compressions)) == ([5] * 4, 4)
    for label, samples in together.items():
        for name, sample in samples.items():
            singles = [alone[label][f"{name}#{i + 1}"] for i in range(3)]
            assert [(t.prediction, t.score, t.new_tokens) for t in sample.turns] == [
                (s.prediction, s.score, s.new_tokens) for s in singles
            ]
            assert sample.score == pytest.approx(sum(s.score for s in singles) / 3)
            assert {t.bytes for t in sample.turns} == {sample.payload + sample.overhead}
            assert sample.n == singles[0].n and sample.kept == singles[0].kept


def test_25_questions_under_8_methods_cost_one_prefill_and_one_compression_each(tmp_path, monkeypatch, capsys):
    prefills, compressions = counted(monkeypatch)
    row = {**ROWS[0], "questions": (ROWS[0]["questions"] * 9)[:25]}
    methods = "method=snapkv,streamingllm,random,keynorm,think,expectedattention,h2o,l1"
    small = [write(tmp_path, [row]), methods, "kv_ratio=0.5", "max_new_tokens=1", f"results={tmp_path}"]
    status, report = run_json(capsys, "dataset=file", *small)
    assert status == 0 and (prefills, len(compressions)) == ([9], 1)
    assert {c["questions"]["questions"] for r in report["rows"] for c in r["cells"]} == {25}


def test_two_equal_contexts_of_a_file_are_compressed_once(tmp_path, monkeypatch):
    _, alone = measured(tmp_path / "a", flat(ROWS)[1:2], "query_aware=false", "max_new_tokens=6")
    prefills, compressions = counted(monkeypatch)
    _, both = measured(tmp_path / "b", flat(ROWS)[:2], "query_aware=false", "max_new_tokens=6")
    assert (prefills, len(compressions)) == ([5], 1)
    for label, samples in both.items():
        assert samples["a#2"].prediction == alone[label]["a#2"].prediction
        assert samples["a#2"].kept == samples["a#1"].kept == alone[label]["a#2"].kept


@pytest.mark.parametrize(("turns", "new", "other"), [("gold", 6, "kivi"), ("own", 6, "h2o"), ("own", 2, "snapkv")])
def test_turns_equal_a_loop_that_feeds_one_cache_token_by_token(turns, new, other, tmp_path):
    # the loop feeds every token of a question, so the questions are short
    asked = [{**q, "question": q["question"].rpartition(":")[2]} for q in ROWS[0]["questions"]]
    rows = [{**ROWS[0], "questions": asked}]
    run, samples = measured(tmp_path / "a", rows, f"turns={turns}", f"max_new_tokens={new}", "batch_rows=2")
    model, tokenizer = kvbench.load_model("tiny")
    stop = experiment.collect_stop_tokens(run)

    def whole(state, tokens):
        state = [*state, *tokens]
        with torch.no_grad():
            return state, model(torch.tensor([state])).logits[0, -1]

    def by_token(state, tokens):
        for token in tokens:
            state = kvbench.extend(model, state, [token])
        return state, state.logits

    for method in dict.fromkeys(["full", "snapkv", other]):
        feed = whole if method == "full" else by_token
        for row in rows:
            state = tokenizer.encode(row["context"])
            if method != "full":
                (state,) = kvbench.prefill(model, state, [method], **KNOBS if method != "kivi" else {})
            before, held = [], []
            for turn, question in zip(samples[method][row["id"]].turns, row["questions"], strict=True):
                ids = tokenizer.encode(question["question"], add_special_tokens=False)
                state, logits = feed(state, [*before, *ids])
                going, answer = state, []
                while len(answer) < new and not (answer and answer[-1] in stop):
                    answer.append(int(logits.argmax()))
                    going, logits = feed(going, answer[-1:])
                ended = answer[-1] in stop
                text = tokenizer.decode(answer[:-1] if ended else answer, skip_special_tokens=True)
                assert (turn.prediction, turn.new_tokens) == (text, len(answer)), (method, row["id"])
                if turns == "gold":
                    before = tokenizer.encode(" " + question["answers"][0], add_special_tokens=False)
                else:
                    state, before = going, [] if ended else [tokenizer.eos_token_id]
                held.append(turn.bytes)
            assert held == sorted(set(held)) and held[0] > samples[method][row["id"]].payload


@pytest.mark.parametrize("turns", ["isolated", "own"])
def test_memory_that_other_questions_hold_is_waited_for_and_a_failure_costs_one_cell(
    turns, tmp_path, monkeypatch, queues
):
    _, want = measured(tmp_path / "a", ROWS, f"turns={turns}", "max_new_tokens=6", methods=["snapkv", "h2o"])
    extend, short = answers.extend_caches, []

    def extend_caches(model, caches, ids):
        if any(cache.chain.name == "h2o" for cache in caches):
            raise ValueError("cannot be read")
        if any(len(q.waiting) > 1 for q in queues):
            short.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return extend(model, caches, ids)

    monkeypatch.setattr(answers, "extend_caches", extend_caches)
    run, samples = measured(tmp_path / "b", ROWS, f"turns={turns}", "max_new_tokens=6", methods=["snapkv", "h2o"])
    assert short and not samples.pop("h2o") and want.pop("h2o")
    for label, of_method in want.items():
        for name, sample in of_method.items():
            assert [(t.prediction, t.bytes) for t in samples[label][name].turns] == [
                (t.prediction, t.bytes) for t in sample.turns
            ]
    assert {run.store.status(c.id).status for c in run.groups[0].cells} == {"complete", "failed"}


def test_a_run_prints_falls_and_writes_scores_by_question(tmp_path, capsys):
    arguments = ["dataset=file", write(tmp_path, ROWS), "metric=contains", "max_new_tokens=6", f"results={tmp_path}"]
    arguments += ["method=snapkv", "kv_ratio=0.5", "turns=isolated,own"]
    status, report = run_json(capsys, *arguments)
    assert status == 0 and [c["task"] for c in report["columns"]] == ["file/rows turns=isolated", "file/rows turns=own"]
    for row in report["rows"]:
        isolated, own = row["cells"]
        for cell in (isolated, own):
            turns = cell["questions"]
            assert (turns["contexts"], turns["questions"], turns["pairs"]) == (2, 6, 2)
            assert [x["n"] for x in turns["by_index"]] == [2, 2, 2]
            assert turns["fall"] == pytest.approx(turns["last"] - turns["first"])
        assert isolated["questions"]["bytes_last"] == isolated["questions"]["bytes_compressed"]
        assert own["questions"]["bytes_last"] > own["questions"]["bytes_compressed"]
    assert report["rows"][1]["cells"][1]["fall_beside_full"]["mean"] is not None
    assert main(["run", *arguments]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "6 questions on 2 contexts" in shown and "earlier questions stay with the" in shown
    assert main(["run", *arguments, "--format", "csv"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert all(f"turns_{name}" in header.split(",") for name in turns_table.CSV_FIELDS) and len(lines) == 4
    # answered once: the second run read nothing
    assert len(list(tmp_path.glob("cells/*"))) == 4
    assert all(len(p.read_text().splitlines()) == 2 for p in tmp_path.glob("cells/*/samples-*.jsonl"))


def test_divergences_on_the_references_are_those_of_each_question_alone(tmp_path):
    words = ("max_new_tokens=6", "kl=true")
    _, together = measured(tmp_path / "a", ROWS, *words)
    _, alone = measured(tmp_path / "b", flat(ROWS), *words, "query_aware=false")
    for label, samples in together.items():
        for sample in samples.values():
            assert set(sample.fidelity) == {"reference"}
            text, first = sample.fidelity["reference"], 0
            for i in range(3):
                # a question alone has no prediction of its answer's first token, which its prefill made
                single = alone[label][f"{sample.id}#{i + 1}"].fidelity["reference"]
                end = first + 1 + len(single.kl)
                torch.testing.assert_close(
                    torch.tensor(text.kl[first + 1 : end]), torch.tensor(single.kl), atol=1e-6, rtol=1e-2
                )
                first = end
            assert first == len(text.kl) == len(text.same)
    # what the method loses is the sum over all answer tokens, and the full cache loses nothing
    assert all(abs(s.fidelity["reference"].log_ratio) < 1e-6 for s in together["full"].values())
    assert any(s.fidelity["reference"].log_ratio > 0.01 for s in together["streamingllm"].values())


def test_one_question_keeps_the_ids_that_cells_had(tmp_path):
    def ids(*words):
        run = prepare("dataset=file", write(tmp_path, flat(ROWS)), f"results={tmp_path}", *words)
        return [c.identity for g in run.groups for c in g.cells]

    assert ids("turns=own") == ids() and all("turns" not in identity for identity in ids())


def test_what_is_not_possible_is_said(tmp_path, capsys):
    path = write(tmp_path, ROWS)
    for words, message in (
        (["turns=all"], "isolated"),
        (["kl=true", "turns=own"], "take turns=isolated, not turns=own"),
    ):
        assert main(["run", "dataset=file", path, f"results={tmp_path}", *words]) == 2
        assert message in capsys.readouterr().err
    rows = [{"questions": ROWS[0]["questions"], "prompt": "x"}]
    with pytest.raises(UsageError, match="needs the context"):
        prepare("dataset=file", write(tmp_path, rows), f"results={tmp_path}")
    # a line of the other kind costs itself alone
    plan = prepare("dataset=file", write(tmp_path, [ROWS[0], flat(ROWS)[0]]), f"results={tmp_path}")
    (left_out,) = plan.groups[0].task.left_out
    assert "or none has" in left_out


def answered(*scores, held=(0,)):
    return tuple(
        TurnAnswer("", s, ("x",), 1, 0.0, b, {"f1": s}) for s, b in zip(scores, [*held] * len(scores), strict=False)
    )


def test_the_fall_by_hand():
    ours = {"a": answered(1.0, 0.0), "b": answered(1.0, 1.0), "alone": answered(0.0)}
    full = {"a": answered(1.0, 1.0), "b": answered(1.0, 1.0), "alone": answered(1.0)}
    summary = summarise_turns(ours, "squad_f1", [10, 20, 30])
    assert (summary.fall, summary.fall_ci, summary.first, summary.last, summary.pairs) == (-50.0, None, 100.0, 50.0, 2)
    assert [(x.n, x.score) for x in summary.by_index] == [(3, pytest.approx(200 / 3)), (2, 50.0)]
    assert summary.question_mean == 60.0 and summary.beside == {"f1": 50.0} and summary.bytes_compressed == 20
    assert summarise_turns(full, "squad_f1", [1]).fall == 0.0
    assert compare_falls(ours, full, "squad_f1") == (-50.0, None)
    del ours["alone"], full["alone"]
    assert summarise_turns(ours, "squad_f1", [1]).fall == -50.0 and compare_falls(ours, full, "squad_f1")[0] == -50.0
    many = {str(i): answered(1.0, i % 2) for i in range(10)}
    low, high = summarise_turns(many, "squad_f1", [1]).fall_ci
    assert -100 < low < -50 < high < 0


def test_positions_go_on_behind_the_uncompressed_context():
    model, tokenizer = kvbench.load_model("tiny")
    ids = (tokenizer.encode("the river is calm. " * 400))[:1000]
    (cache,) = kvbench.prefill(model, ids, ["snapkv"], kv_ratio=0.75)
    assert (cache.seen, {layer.tokens for layer in cache.layers}) == (1000, {750})
    asked = kvbench.extend(model, cache, ids[1:21])
    assert asked.seen == 1020
    for layer in asked.layers:
        for positions in layer.kept_positions():
            assert positions[-20:].tolist() == list(range(1000, 1020)) and len(positions) == 770


def test_rows_with_questions_are_compared_on_a_loaded_model(tmp_path):
    model, tokenizer = kvbench.load_model("tiny")
    report = kvbench.compare(model, tokenizer, ROWS, ["snapkv"], kv_ratio=0.5, results=tmp_path, progress=False)
    assert report.cells[1].summary.questions.contexts == 2
    assert report.to_pandas()["turns_questions"].tolist() == [6, 6]

"""Several answers drawn for each prompt: from one prefill and one compression, each as it would be drawn alone."""

import json

import pytest
from support.runs import counted, prepare, run_json

from kvbench.base.errors import UsageError
from kvbench.cli.main import main
from kvbench.run import experiment, runner
from kvbench.store.results import Sample

pytestmark = pytest.mark.e2e("whole answers")

TEXT = "the magic number of {} is {}. it was a calm night. the old house is quiet. question: {} answer:"
ROWS = [
    {"id": name, "prompt": TEXT.format(city, number, city), "answers": [f"{number}."]}
    for name, city, number in (("a", "paris", 471), ("b", "rome", 902), ("c", "cairo", 305))
]
METHODS = ["snapkv", "h2o", "kivi", "streamingllm"]
DRAWN = ["temperature=1.5", "top_p=0.9"]


def write(folder, rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return ["dataset=file", f"path={path}", "metric=contains", f"results={folder}"]


def measured(folder, rows, *words, methods=METHODS, new=6):
    """Return (the run, its samples by the first word of a label)."""
    folder.mkdir()
    methods = [f"method={','.join(methods)}", "kv_ratio=0.5"]
    run = prepare(*write(folder, rows), *methods, *DRAWN, f"max_new_tokens={new}", *words)
    experiment.measure(run, quiet=True)
    return run, {c.label.split()[0]: run.store.samples(c.id) for c in run.groups[0].cells}


def repeated(rows, count):
    """Every answer as a prompt of its own, under the id from which its seed is made."""
    return [row | {"id": f"{row['id']}#{i + 1}"} for row in rows for i in range(count)]


@pytest.mark.parametrize("words", [[], ["batch_rows=2"], ["query_aware=false"]])
def test_answers_of_one_prompt_are_drawn_as_alone_from_one_compression(words, tmp_path, monkeypatch):
    rows = ROWS[:2]
    if "query_aware=false" in words:
        rows = [
            {
                "id": row["id"],
                "context": row["prompt"][:-17],
                "question": row["prompt"][-17:],
                "answers": row["answers"],
            }
            for row in rows
        ]
    _, alone = measured(tmp_path / "a", repeated(rows, 3), *words)
    prefills, compressions = counted(monkeypatch)
    _, together = measured(tmp_path / "b", rows, "samples_per_prompt=3", *words)
    assert (prefills, len(compressions)) == ([5] * 2, 2)
    for label, samples in together.items():
        assert list(samples) == ["a", "b"]
        for name, sample in samples.items():
            singles = [alone[label][f"{name}#{i + 1}"] for i in range(3)]
            assert [(d.prediction, d.score, d.new_tokens) for d in sample.draws] == [
                (s.prediction, s.score, s.new_tokens) for s in singles
            ]
            assert sample.score == pytest.approx(sum(s.score for s in singles) / 3)
            assert sample.new_tokens == sum(s.new_tokens for s in singles)
            assert sample.decode_peak == max(s.decode_peak for s in singles)
            assert (sample.n, sample.kept, sample.answers) == (singles[0].n, singles[0].kept, singles[0].answers)
    # draws of one prompt have seeds of their own
    assert any(len({d.prediction for d in s.draws}) == 3 for s in together["full"].values())


def test_a_budget_while_decoding_holds_for_each_answer(tmp_path):
    words = ["decode_budget=24", "decode_every=8", "window=4", "min_new_tokens=30"]
    methods = ["snapkv", "streamingllm"]
    _, alone = measured(tmp_path / "a", repeated(ROWS[:1], 2), *words, methods=methods, new=40)
    _, together = measured(tmp_path / "b", ROWS[:1], "samples_per_prompt=2", *words, methods=methods, new=40)
    for label in methods:
        draws = together[label]["a"].draws
        assert [d.prediction for d in draws] == [alone[label][f"a#{i}"].prediction for i in (1, 2)]
        assert min(d.new_tokens for d in draws) >= 30 and together[label]["a"].decode_peak <= 24 + 8


def test_memory_that_runs_out_and_a_method_that_fails_cost_no_other_answer(tmp_path, monkeypatch, steps, queues):
    _, want = measured(tmp_path / "a", ROWS, "samples_per_prompt=3", methods=["snapkv", "h2o"])
    short = []

    def before(rows):
        if rows > 4 and not short:
            short.append(rows)
            raise RuntimeError("CUDA out of memory")

    steps.before = before
    peak = runner.check_peak

    def check_peak(cache, held, fed):
        if cache.chain.name == "h2o":
            raise ValueError("cannot be checked")
        return peak(cache, held, fed)

    monkeypatch.setattr(runner, "check_peak", check_peak)
    run, samples = measured(tmp_path / "b", ROWS, "samples_per_prompt=3", methods=["snapkv", "h2o"])
    assert short and not samples.pop("h2o") and want.pop("h2o")
    for label, of_method in want.items():
        for name, sample in of_method.items():
            assert samples[label][name].draws and samples[label][name].score == sample.score
            assert [d.prediction for d in samples[label][name].draws] == [d.prediction for d in sample.draws]
    assert {run.store.status(c.id).status for c in run.groups[0].cells} == {"complete", "failed"}


def test_a_run_prints_means_over_answers_and_is_not_repeated(tmp_path, capsys):
    drawn = [*DRAWN, "max_new_tokens=6", "samples_per_prompt=2", "kl=true"]
    arguments = [*write(tmp_path, ROWS), "method=snapkv", "kv_ratio=0.5", *drawn]
    assert main(["run", *arguments, "--plan"]) == 0
    assert "The 2 answers drawn for a prompt (samples_per_prompt=) are counted as one" in capsys.readouterr().out
    status, report = run_json(capsys, *arguments)
    assert status == 0 and "mean over 2 answers" in report["settings"]
    for row in report["rows"]:
        (cell,) = row["cells"]
        assert (cell["n"], cell["samples_per_prompt"]) == (3, 2)
        lines = [json.loads(x) for p in tmp_path.glob(f"cells/{cell['cell']}/samples-*") for x in p.open()]
        samples = [Sample.read({k: v for k, v in line.items() if k != "crc"}) for line in lines]
        assert len(samples) == 3 and all(len(s.draws) == 2 for s in samples)
        # the length is that of one answer
        assert cell["new_tokens"] == pytest.approx(sum(d.new_tokens for s in samples for d in s.draws) / 6)
        assert cell["score"] == pytest.approx(100 * sum(d.score for s in samples for d in s.draws) / 6)
        # a record that is read equals the one that was written
        assert all(Sample.read(s.record()) == s for s in samples)
    assert main(["show", report["rows"][0]["cells"][0]["cell"], f"results={tmp_path}"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("  answer    (score ") == 6 and "samples_per_prompt 2" in shown
    assert main(["run", *arguments]) == 0
    assert len([x for p in tmp_path.glob("cells/*/samples-*") for x in p.open()]) == 6


def test_worked_solutions_have_the_mean_length_of_an_answer_beside_the_score(tmp_path, capsys):
    rows = [row | {"answers": ["471"]} for row in ROWS]
    arguments = [*write(tmp_path, rows), "method=streamingllm", "metric=math_equal", "max_new_tokens=4"]
    arguments.remove("metric=contains")
    assert main(["run", *arguments]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "tokens an" in shown and "reach max_new_tokens=4 are cut off there" in shown
    assert main(["run", *arguments, "--format", "csv"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    at = header.split(",").index("new_tokens")
    assert all(0 < float(line.split(",")[at]) <= 4 for line in lines) and len(lines) == 2


def test_one_answer_a_prompt_keeps_the_ids_that_cells_had(tmp_path):
    def ids(*words):
        run = prepare(*write(tmp_path, ROWS), "method=full", *words)
        return [(c.id, "samples_per_prompt" in c.identity["decoding"]) for g in run.groups for c in g.cells]

    assert ids("temperature=1", "samples_per_prompt=1") == ids("temperature=1")
    assert ids("samples_per_prompt=1") == ids() and not ids()[0][1]
    two, four = (ids("temperature=1", f"samples_per_prompt={k}") for k in (2, 4))
    assert two[0][1] and len({two[0][0], four[0][0], ids("temperature=1")[0][0]}) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["samples_per_prompt=4"], "samples_per_prompt=4 is not possible with temperature=0"),
        (["samples_per_prompt=0"], "samples_per_prompt=0 is not possible: a whole number, 1 or more"),
        (["samples_per_prompt=true"], "samples_per_prompt=True is not possible"),
        (["samples_per_prompt=2", "temperature=1", "talk"], "not possible where a context has several questions"),
    ],
)
def test_what_is_not_possible_is_said(words, message, tmp_path):
    rows = ROWS
    if "talk" in words:
        words, rows = words[:-1], [{"context": "a b", "questions": [{"question": "b?", "answers": ["b"]}]}]
    with pytest.raises(UsageError, match=message):
        prepare(*write(tmp_path, rows), *words)

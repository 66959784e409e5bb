"""Published values: read as they are printed, and beside scores with an honest verdict."""

import pytest

from kvbench.base.errors import KvbenchError, UsageError
from kvbench.papers.spec import catalogue, published, table_spec
from kvbench.studies.imports.base import ImportedAnswer, Predictions
from kvbench.studies.imports.scoring import Scored
from kvbench.studies.imports.table import build_records, write_notes
from kvbench.studies.imports.verdict import PredictionSource, judge_published, read_published_means, write_verdict


def test_the_tables_are_complete():
    assert {("think", "12"), ("uncomp", "1"), ("vatp", "1")} <= set(published.table_ids())
    cells = published.load_table("think", "12")
    assert len(cells) == 102
    first = cells[0]
    assert (first.model, first.method, first.dataset) == ("mistral-7b-instruct-v0.2", "full", "narrativeqa")
    assert (first.value, first.certainty) == (26.63, "certain")


def test_a_row_is_found_under_either_name_of_its_model():
    for name in ("llama2-7b-chat", "llama-2-7b-chat", "LLaMA-2-7b-chat"):
        rows = {(paper, table): cells for paper, table, cells in published.rows_with_scores(name, "full")}
        assert rows[("vatp", "1")]["lcc"].value == 59.88
        assert len(rows[("think", "12")]) == 17 and "avg" in rows[("think", "12")]
    assert not list(published.rows_with_scores("llama2-7b", "full"))


def test_settings_tell_rows_apart():
    every = list(published.rows_with_scores("llama2-7b-chat", "uncomp-group"))
    assert all(len({c.setting for c in cells.values()}) == 1 for _, _, cells in every)
    chosen = list(published.rows_with_scores("llama2-7b-chat", "h2o", "kv_size=384"))
    assert [(p, t) for p, t, _ in chosen] == [("uncomp", "1"), ("uncomp", "4")]
    assert not list(published.rows_with_scores("llama2-7b-chat", "h2o", "kv_size=999"))


def table(tmp_path, monkeypatch, *rows):
    folder = tmp_path / "think" / "published"
    folder.mkdir(parents=True)
    lines = [",".join(published.COLUMNS), *rows]
    (folder / "table99.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    page = "title: T\nsource: S\nprompt: think\ntables:\n  '99': {title: T, kind: quality}\n"
    (tmp_path / "think" / "paper.yaml").write_text(page, encoding="utf-8")
    monkeypatch.setattr("kvbench.papers.DATA", tmp_path)
    clear()


def clear():
    for cached in (published.load_table, catalogue.read_paper, table_spec.load):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def fresh():
    yield
    clear()


def scored(low, high, dataset="qasper", extended=False):
    answer = ImportedAnswer("nine", ("nine",), None, 10, "line 1")
    predictions = Predictions(dataset, extended, None, "longbench", (answer,), "")
    return Scored(predictions, "f1", (0.5,), None if low is None else (low, high), (), 0.0)


def test_flags_are_carried_and_marked(tmp_path, monkeypatch):
    table(
        tmp_path,
        monkeypatch,
        "think,99,llama-2-7b-chat,full,,qasper,f1,20.00,pct,1,suspect:does not add up",
        "think,99,llama-2-7b-chat,full,,trec,accuracy,,pct,1,missing:not printed",
        "think,99,llama-2-7b-chat,full,,triviaqa,f1,80.00,pct,1,repaired:label",
    )
    files = [scored(0.1, 0.3), scored(0.1, 0.3, "trec"), scored(None, None, "triviaqa")]
    judged = judge_published(PredictionSource("llama2-7b-chat", "full", prompt="think"), files, "levenshtein")[
        ("think", "99")
    ]
    assert [write_verdict(judged[i]) for i in range(3)] == ["20.00? inside", "— no interval", "80.00~ no interval"]
    assert judged[0]["flag"] == "suspect:does not add up" and not judged[0]["indicative"]


@pytest.mark.parametrize(
    ("prompt", "dataset", "extended", "code_sim", "paper", "reasons"),
    [
        ("think", "qasper", False, "levenshtein", "think", []),
        ("uncomp", "qasper", False, "levenshtein", "think", []),  # the same policy for this model under another name
        (None, "qasper", False, "levenshtein", "think", ["prompt policy of these answers unknown"]),
        ("vatp", "qasper", False, "levenshtein", "think", ["prompt policy vatp here, think there"]),
        ("think", "qasper", True, "levenshtein", "think", ["LongBench-E here, the standard split there"]),
        ("think", "lcc", False, "difflib", "think", ["code_sim by difflib here, by levenshtein there"]),
        ("think", "qasper", False, "difflib", "think", []),
        ("vatp", "qasper", False, "levenshtein", "vatp", ["split unknown: the paper's scores fit LongBench-E"]),
        ("vatp", "qmsum", False, "levenshtein", "vatp", []),
    ],
)
def test_when_a_verdict_is_only_indicative(prompt, dataset, extended, code_sim, paper, reasons):
    published_values = judge_published(
        PredictionSource("llama2-7b-chat", "full", prompt=prompt), [scored(0, 1, dataset, extended)], code_sim
    )
    judged = next(j[0] for (p, _), j in published_values.items() if p == paper)
    assert judged["because"] == reasons
    assert judged["indicative"] == bool(reasons)
    assert judged["verdict"] == "inside"
    assert write_verdict(judged).endswith("inside*" if reasons else "inside")


def test_a_row_with_a_setting_that_was_not_given_is_indicative(tmp_path, monkeypatch):
    rows = [f"think,99,m,h2o,{s},qasper,f1,25.00,pct,1," for s in ("kv_size=64;window=8", "kv_size=128;window=8")]
    table(tmp_path, monkeypatch, *rows, "think,99,m,full,kv_size=full;budget=1.0,qasper,f1,25.00,pct,1,")

    def judged(*source):
        return judge_published(PredictionSource("m", *source, prompt="think"), [scored(0, 1)], "levenshtein")[
            ("think", "99")
        ][0]

    unknown = judged("h2o")
    assert unknown["because"] == ["setting unknown: kv_size=64;window=8"] and unknown["indicative"]
    assert unknown["matching"] == 2
    known = judged("h2o", "kv_size=128")
    assert (known["because"], known["setting"], known["matching"]) == ([], "kv_size=128;window=8", 1)
    assert judged("full")["because"] == []
    files = [scored(0, 1)]
    published_values = judge_published(PredictionSource("m", "h2o", "window=8", "think"), files, "levenshtein")
    text = write_notes(build_records(files, published_values), published_values)
    assert any("2 rows match; shown is table 99, kv_size=64;window=8" in line for line in text)


def test_the_ends_of_the_interval_are_inside(tmp_path, monkeypatch):
    table(tmp_path, monkeypatch, "think,99,m,full,,qasper,f1,25.00,pct,1,")
    verdicts = [
        judge_published(PredictionSource("m", "full"), [scored(low, high)], "levenshtein")[("think", "99")][0][
            "verdict"
        ]
        for low, high in ((0.25, 0.5), (0.125, 0.25), (0.2501, 0.5), (0.125, 0.2499))
    ]
    assert verdicts == ["inside", "inside", "outside", "outside"]


def test_published_means_and_those_of_their_cells(tmp_path, monkeypatch):
    published_values = read_published_means(PredictionSource("llama2-7b-chat", "full"), [scored(0, 1)])
    assert published_values[("think", "12")] == {"stated": 33.37, "of_cells": 33.37}
    assert published_values[("vatp", "1")] == {"stated": None, "of_cells": 32.66}
    from kvbench.tasks.longbench import task_names

    rows = [f"think,99,m,full,,{name},f1,{i}.00,pct,1," for i, name in enumerate(task_names("en"))]
    table(tmp_path, monkeypatch, *rows, "think,99,m,full,,avg,mean,9.00,pct,1,suspect:not that of its cells")
    assert read_published_means(PredictionSource("m", "full"), [scored(0, 1)]) == {
        ("think", "99"): {"stated": 9.0, "of_cells": 7.5}
    }


def test_nothing_is_guessed():
    assert judge_published(PredictionSource(), [scored(0, 1)], "levenshtein") == {}
    assert judge_published(PredictionSource("llama2-7b-chat"), [scored(0, 1)], "levenshtein") == {}
    assert judge_published(PredictionSource("llama2-7b-chat", "full"), [scored(0, 1, "mystery")], "levenshtein") == {}
    with pytest.raises(UsageError, match="unknown prompt policy"):
        PredictionSource("m", "full", prompt="thinc")


@pytest.mark.parametrize(
    ("row", "reason"),
    [("think,99,m,full,,qasper,f1,high,pct,1,", "line 2: 'high' is not a number"), (None, "its columns must be")],
)
def test_damaged_tables_are_named(tmp_path, monkeypatch, row, reason):
    table(tmp_path, monkeypatch, *([row] if row else []))
    if row is None:
        (tmp_path / "think" / "published" / "table99.csv").write_text("paper,value\nthink,1\n")
    with pytest.raises(KvbenchError, match=reason):
        published.load_table("think", "99")

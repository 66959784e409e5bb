"""The ranking of methods at equal bytes: ranks, their correlation and what measures disagree on, by hand."""

import json
from dataclasses import replace

import pytest

from kvbench.cli.main import main
from kvbench.store.fidelity import TextFidelity
from kvbench.studies import ranking
from kvbench.studies.byte_table import Line


def line(label, kls=(), scores=()):
    texts = {"reference": {str(i): TextFidelity((kl,), "1", 0.0, 0.0, 0.0, 0.0) for i, kl in enumerate(kls)}}
    answers = {"qa": {str(i): x for i, x in enumerate(scores)}} if scores else {}
    return Line(label, "", 25.0, {}, texts, {}, answers, (1.0, 2.0))


def column(name, by_label):
    """A column of rows with the given divergences, or scores in [0, 1]."""
    far = name == ranking.DIVERGENCE
    lines = {label: line(label, x) if far else line(label, scores=x) for label, x in by_label.items()}
    scale = 1 if far else 100
    return ranking.Measure(name, lines, {label: (scale * sum(x) / len(x), None) for label, x in by_label.items()})


NEAR, FAR = [0.1, 0.2, 0.1, 0.2, 0.1, 0.2, 0.1, 0.2], [0.9, 1.1, 0.8, 1.2, 0.9, 1.1, 0.8, 1.2]
GOOD, BAD = [1, 1, 1, 1, 1, 1, 0.5, 1], [0, 0, 0.5, 0, 0, 0, 0, 0.5]


def test_ranks_are_those_of_the_better_direction_and_ties_share_theirs():
    by_kl = column(ranking.DIVERGENCE, {"full": [0.0], "a": [0.1], "b": [0.3], "c": [0.2]})
    assert by_kl.ranks == {"a": 1, "c": 2, "b": 3}
    scored = column("QA", {"full": [1.0], "a": [0.2], "b": [0.5], "c": [0.2], "d": [0.0]})
    assert scored.ranks == {"b": 1, "a": 2.5, "c": 2.5, "d": 4}


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"a": 1, "b": 2, "c": 3, "d": 4}, 1.0),
        ({"a": 4, "b": 3, "c": 2, "d": 1}, -1.0),
        ({"a": 2, "b": 1, "c": 3, "d": 4}, (5 - 1) / 6),
        ({"a": 1.5, "b": 1.5, "c": 3, "d": 4}, 5 / 30**0.5),  # one tie: 5 of 6 and 5 ordered pairs
        ({"a": 1, "b": 1, "c": 1, "d": 1}, None),
    ],
)
def test_kendalls_tau_by_hand(other, expected):
    assert ranking.kendall_tau({"a": 1, "b": 2, "c": 3, "d": 4}, other) == (expected and pytest.approx(expected))


def test_rows_are_compared_on_the_prompts_that_all_of_them_have():
    long, short = line("a", [0.1, 0.3, 5.0], [1, 0, 1]), line("b", [0.2, 0.4], [0, 1])
    a, b = ranking.on_common_prompts([long, short])
    assert [*a.texts["reference"]] == [*b.texts["reference"]] == ["0", "1"]
    assert a.fidelity["reference"].kl_mean == pytest.approx(0.2) and b.fidelity["reference"].n == 2
    assert a.answers == {"qa": {"0": 1, "1": 0}} and b.answers == {"qa": {"0": 0, "1": 1}}
    assert ranking.on_common_prompts([]) == []


def test_measures_disagree_only_where_both_tell_a_pair_apart():
    by_kl = column(ranking.DIVERGENCE, {"a": NEAR, "b": FAR})
    same, opposite, equal = (
        column(name, {"a": a, "b": b})
        for name, a, b in (("same", GOOD, BAD), ("opposite", BAD, GOOD), ("equal", GOOD, GOOD))
    )
    assert (by_kl.better("a", "b"), by_kl.better("b", "a")) == (1, -1)
    assert (same.better("a", "b"), opposite.better("a", "b"), equal.better("a", "b")) == (1, -1, 0)
    assert ranking.disagreements([by_kl, same, equal]) == []
    assert ranking.disagreements([by_kl, opposite]) == [ranking.Disagreement("a", "b", "KL, nats", "opposite")]
    (said,) = [
        x for x in ranking.notes([by_kl, opposite], ranking.disagreements([by_kl, opposite])) if x.startswith("Told")
    ]
    assert "by KL, nats, and the other way round by opposite: a before b" in said


def test_a_row_that_compressed_nothing_is_neither_ranked_nor_told_apart():
    measures = [column(ranking.DIVERGENCE, {"full": [0.0] * 8, "a": NEAR, "b": FAR, "c": [0.0] * 8})]
    measures += [column(f"QA\n{x}", {"full": GOOD, "a": BAD, "b": GOOD, "c": GOOD}) for x in ("seen", "withheld")]
    assert measures[0].ranks == {"c": 1, "a": 2, "b": 3}
    measures = [
        replace(c, lines={x: replace(line, unchanged=x == "c") for x, line in c.lines.items()}) for c in measures
    ]
    assert [c.ranks for c in measures] == [{"a": 1, "b": 2}, {"a": 2, "b": 1}, {"a": 2, "b": 1}]
    assert ranking.told_apart(measures[0]) == "KL, nats 1 of 1"
    opposed = ranking.disagreements(measures)
    assert opposed and not any("c" in (d.first, d.second) for d in opposed)
    values, ranks, costs, _ = ranking.sheets(measures)
    (row,) = [row for row in values.rows if row[0] == "c"]
    assert row[2:5] == ("nothing was\ncompressed",) * 3 and values.rows[-1] == row and values.rows[0][0] == "full"
    assert "c" not in [row[0] for row in ranks.rows]
    assert next(row for row in costs.rows if row[0] == "c")[1:] == ("—",)
    assert any("nothing was compressed" in note for note in ranking.notes(measures, opposed))
    rows = ranking.records(measures, opposed)["measures"][0]["rows"]
    assert [(r["method"], r.get("nothing_compressed"), r["rank"]) for r in rows][-1] == ("c", True, None)


def test_a_key_that_the_ranking_decides_is_refused(capsys):
    assert main(["table", "ranking", "method=h2o"]) == 2
    assert "table ranking says it" in capsys.readouterr().err


@pytest.mark.e2e("24 rows in three runs")
def test_the_command_ranks_the_tiny_model(tmp_path, capsys, monkeypatch):
    """All rows and columns, of short texts: a prompt of 256 tokens is above each row's budget or window."""
    short = {"dataset": "fidelity/tiny", "forced": "16"}
    monkeypatch.setattr(ranking, "TINY", {**ranking.TINY, ranking.DIVERGENCE: short})
    words = ["table", "ranking", "limit=1", "length=256", "threads=1", f"results={tmp_path}"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "mean rank" in shown and "kvzip" in shown and "Kendall" in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert main([*words, "--stored", "--json"]) == 0
    measures = json.loads(capsys.readouterr().out)["measures"]
    assert [c["measure"] for c in measures] == ["KL, nats", "tiny seen", "tiny withheld"]
    assert all(len(c["rows"]) == 24 for c in measures)

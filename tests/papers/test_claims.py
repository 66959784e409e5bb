"""Claims: verdicts against hand-made differences, Holm by hand, and a ledger on the tiny model."""

import json

import numpy as np
import pytest

from kvbench import render
from kvbench.cli.main import main
from kvbench.errors import KvbenchError
from kvbench.papers import claims, ledger
from kvbench.papers.claims import CONTRADICTED, ELSEWHERE, SUPPORTED, UNDECIDED, Claim, decide, holm
from kvbench.papers.settings import knobs


def claim(test="better", margin=1.0, name="c"):
    return Claim("think", name, "says", "where", test, "a", "b", margin)


def verdict(found, **kwargs):
    made = claim(**kwargs)
    return decide([made], {made.id: ({k: np.array(v) for k, v in found.items()}, "")})[0]


def test_a_clear_difference_supports_and_its_opposite_contradicts():
    up, down = {"t": [50.0] * 30}, {"t": [-50.0] * 30}
    assert verdict(up).verdict == SUPPORTED
    assert verdict(down).verdict == CONTRADICTED
    assert verdict(up).mean == 50.0


def test_pairs_without_a_difference_exclude_a_loss_only_by_their_number():
    """One prompt of a hundred that loses everything costs a point: 40 pairs meet none of them two times in three."""
    few, many = {"t": [0.0] * 40}, {"t": [0.0] * 400}
    found = verdict(few, test="no_worse")
    assert found.verdict == UNDECIDED
    assert found.p_for == pytest.approx(0.99**40, abs=0.01)
    # 0.99^n < 0.05
    assert found.would_take == int(np.ceil(np.log(0.05) / np.log(0.99)))
    assert verdict(many, test="no_worse").verdict == SUPPORTED
    assert verdict(many, test="no_worse").p_for == pytest.approx(0.99**400, abs=0.005)
    assert verdict(many).verdict == UNDECIDED
    assert verdict({"t": [-20.0] * 40}, test="no_worse").verdict == CONTRADICTED


def test_each_task_must_pass_where_each_is_claimed():
    tasks = {"a": [0.0] * 400, "b": [-20.0] * 60, "c": [30.0] * 400}
    assert verdict(tasks, test="no_worse").verdict == SUPPORTED
    assert verdict(tasks, test="no_worse_each").verdict == CONTRADICTED


def test_few_examples_decide_nothing_and_say_how_many_would():
    found = verdict({"t": [100.0, -50.0, 75.0, -100.0]})
    assert found.verdict == UNDECIDED
    # (z_0.95 + z_0.8)^2 * (s / m)^2 with one test, m = 6.25
    spread = np.std([100, -50, 75, -100], ddof=1)
    assert found.would_take == int(np.ceil(((1.6449 + 0.8416) * spread / 6.25) ** 2))


def test_p_of_four_equal_signs_at_the_end_of_the_scale_is_one_sixteenth():
    assert claims.p_above(np.full(4, 100.0), 0.0) == pytest.approx(1 / 16, abs=0.01)


def test_p_of_ones_and_zeros_is_near_the_binomial_tail():
    """8 pairs, one better by 100 points each, 2 worse: binomial tail P(X >= 8 of 10 at 1/2) = 56/1024."""
    values = np.array([100.0] * 8 + [-100.0] * 2)
    # Beta(8, 3) below 1/2, which is that tail
    assert claims.p_above(values, 0.0) == pytest.approx(56 / 1024, abs=0.006)


@pytest.mark.parametrize("lost", [0.01, 0.02, 0.1])
def test_a_true_null_is_rejected_no_more_often_than_the_level_says(lost):
    """Prompts lose everything as often as the margin just forbids: 1 of 20 ledgers may say no worse."""
    rng = np.random.default_rng(1)
    wrong = [
        claims.p_above(np.where(rng.random(60) < lost, -100.0, 0.0), -100.0 * lost) < claims.LEVEL for _ in range(60)
    ]
    assert np.mean(wrong) <= 0.12  # 0.05 and two standard errors of 60


def test_holm_by_hand():
    # 3 * 0.01, then max(0.03, 2 * 0.02), then max(0.04, 0.5)
    assert holm({"a": 0.02, "b": 0.01, "c": 0.5}, 3) == {"b": 0.03, "a": 0.04, "c": 0.5}
    assert holm({"a": 0.01}, 4) == {"a": 0.04}


def test_looks_at_the_data_are_paid_for():
    made = claim()
    found = {made.id: ({"t": np.array([100.0] * 6)}, "")}  # p = 1/64
    assert decide([made], found, looks=1)[0].verdict == SUPPORTED
    assert decide([made], found, looks=4)[0].verdict == UNDECIDED


def test_the_ledger_is_corrected_for_claims_that_are_not_open_any_more():
    made = claim()
    found = {made.id: ({"t": np.array([100.0] * 6)}, "")}
    one, of_many = decide([made], found)[0], decide([made], found, family=10)[0]
    assert of_many.p_for == pytest.approx(10 * one.p_for)
    assert of_many.verdict == UNDECIDED


def test_a_side_that_cannot_run_is_not_testable_and_says_why():
    made = claim()
    found = decide([made], {made.id: ({}, "needs 32 layers")})[0]
    assert (found.verdict, found.reason) == (ELSEWHERE, "needs 32 layers")


def test_an_unknown_test_is_refused():
    with pytest.raises(KvbenchError, match="no_worse"):
        claim(test="nicer")


@pytest.mark.parametrize("paper", claims.PAPERS)
def test_the_claims_of_every_paper_load_and_name_rows_that_parse(paper):
    loaded = claims.load(paper)
    assert loaded
    assert len({c.id for c in loaded}) == len(loaded)
    for table in claims.sides(paper, loaded):
        for row in table.rows:
            knobs(row.method, row.setting)


def test_the_ledger_end_to_end(tmp_path, capsys):
    assert main(["claims", "vatp", "limit=2", "up_to=2", f"results={tmp_path}", "--json"]) == 0
    found = {v["claim"]["id"]: v for v in json.loads(capsys.readouterr().out)["verdicts"]}
    assert set(found) == {c.id for c in claims.load("vatp")}
    assert all(v["n"] == 2 * len(v["tasks"]) for v in found.values())


@pytest.mark.parametrize("style", ["text", "md", "latex"])
def test_the_ledger_on_the_page(style):
    """Every claim of every paper fits 100 columns with its whole name, and text stands left."""
    every = [c for paper in claims.PAPERS for c in claims.load(paper)]
    tested = [c for c in every if c.test != "elsewhere"]
    found = {c.id: ({"tiny/multikey": np.array([0.0, -100.0, 50.0])}, "") for c in tested}
    verdicts = decide(every, found)
    text = render.compose([ledger.sheet(verdicts)], ledger.notes(verdicts, "tiny", "float32", True), style)
    shown = text if style != "latex" else text.replace(r"\_", "_")
    assert all(c.id in shown for c in every)
    if style == "text":
        assert max(map(len, text.splitlines())) <= 100
        assert all(line == line.lstrip() or line.startswith(" " * 40) for line in text.splitlines())
    assert f"corrected for {len(tested)} claims" in " ".join(text.split())


def test_a_limit_above_up_to_is_refused(capsys):
    assert main(["claims", "vatp", "limit=8", "up_to=4"]) == 2
    assert "up_to=4" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["vatq", "vatp/1"])
def test_an_unknown_paper_is_refused(name, capsys):
    assert main(["claims", name]) == 2
    assert f"unknown paper '{name}'" in capsys.readouterr().err

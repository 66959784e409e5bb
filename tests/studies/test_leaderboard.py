"""The leaderboard of RULER: its means and intervals by hand, and the command on the tiny model."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from kvbench.cli.main import main
from kvbench.plan.run_plan import RunPlan
from kvbench.report import open_results
from kvbench.studies import leaderboard
from kvbench.tasks.metrics import stats


def test_a_mean_over_tasks_and_its_interval_by_hand():
    tasks = [[1, 1, 0, 0, 1, 0, 1, 0], [1, 0, 0, 0, 1, 0, 0, 0]]
    mean, (low, high) = stats.mean_over_tasks(tasks)
    assert mean == 0.375
    # variance of the mean of two means of 8: (2/7 + 1.5/7) / 8 / 4
    error = ((2 / 7 + 1.5 / 7) / 8 / 4) ** 0.5
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.12)
    assert low < mean < high and (low + high) / 2 > mean  # Wilson's lies nearer to a half


def test_few_examples_a_task_have_the_interval_of_as_many_in_one():
    rng = np.random.default_rng(0)
    truth, inside = 0.5, 0
    for _ in range(200):
        draws = rng.integers(2, size=(11, 2)).astype(float)
        low, high = stats.mean_over_tasks(list(draws))[1]
        inside += low <= truth <= high
    assert inside / 200 >= 0.88


@pytest.mark.parametrize(
    ("tasks", "interval"),
    [([[1.0, 0.0]], False), ([[1.0] * 8, [0.0]], False), ([[1.0] * 4, [1.0] * 4], True), ([[1.0, 0.0] * 4], True)],
)
def test_too_few_examples_have_no_interval(tasks, interval):
    found = stats.mean_over_tasks(tasks)[1]
    assert (found is not None) == interval
    if found and all(x == 1 for t in tasks for x in t):
        assert found[0] < 1 == found[1]  # eight equal answers do not prove the ninth


def test_a_difference_is_paired_by_prompt_and_a_mean_over_tasks():
    a = {"x": {"1": 1.0, "2": 1.0, "9": 0.0}, "y": {"1": 0.5}, "only a": {"1": 1.0}}
    b = {"x": {"1": 0.0, "2": 1.0}, "y": {"1": 1.0}}
    assert leaderboard.points_between(a, b) == (100 * (0.5 - 0.5) / 2, None)


def entry(method, withheld, score, kept):
    answers = {f"ruler/vt/{n}": dict.fromkeys("abcd", score / 100) for n in (1024, 2048)}
    return leaderboard.Standing(method, withheld, None, answers, score, None, 0.0, None, kept, kept, 1.0, 2.0)


def test_the_tables_show_each_protocol_and_what_withholding_costs():
    standings = [entry("full", True, 80, 100), entry("snapkv", True, 20, 25), entry("snapkv", False, 70, 25)]
    board, costs = leaderboard.sheets(standings)
    assert [row[0] for row in board.rows] == ["full", "snapkv"] and board.headers[1] == "mean of vt"
    (row,) = costs.rows
    assert [cell.split("\n")[0] for cell in row] == ["snapkv", "70.0", "20.0", "−50.0"]
    assert leaderboard.sheets(standings[2:]) == []
    assert "n = 4 prompts" in leaderboard.notes(standings)[0]


def test_its_lines_are_of_the_open_format(tmp_path):
    lines = leaderboard.records([entry("snapkv kv_ratio=0.25", True, 20, 25)], "m", "c")
    assert open_results.write_lines(lines, tmp_path / open_results.NAME) == 1
    (line,) = open_results.read_lines(tmp_path)
    assert line["protocol"]["query_aware"] is False and line["n"] == 8 and line["score"] == 20


@pytest.mark.e2e("a run on the tiny model")
def test_the_command_measures_both_protocols(capsys, tmp_path):
    small = ["dataset=ruler/niah_single_1", "lengths=1024", "limit=2", "method=snapkv,keynorm", "kv_ratio=0.5"]
    words = ["table", "leaderboard", *small, "seen=snapkv", "max_new_tokens=2", "prompt=plain", f"results={tmp_path}"]
    assert main([*words, "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)
    seen = {(line["method"].split()[0], line["protocol"]["query_aware"]) for line in lines}
    assert seen == {("full", False), ("snapkv", False), ("keynorm", False), ("full", True), ("snapkv", True)}
    assert {line["n"] for line in lines} == {2}
    assert main([*words, "--stored"]) == 0
    text = capsys.readouterr().out
    assert "question withheld" in text and "what withholding the question costs" in text
    assert main([*words, "--trace", "a", "b"]) == 2
    assert main(["table", "leaderboard", "--plan", *small, "prompt=plain", f"results={tmp_path}"]) == 0


def test_answers_are_those_of_the_examples_of_this_run():
    group = SimpleNamespace(
        task=SimpleNamespace(id="t"), examples=[SimpleNamespace(id="1")], cells=[SimpleNamespace(id=i) for i in "ab"]
    )
    stored = {"a": {"1": SimpleNamespace(score=1.0)}, "b": {"2": SimpleNamespace(score=1.0)}}
    run = RunPlan(None, None, None, (group,), None, "float32", SimpleNamespace(samples=stored.get), None)
    assert run.answers(0) == {"t": {"1": 1.0}}
    assert run.answers(1) == {}

"""What benchmarks share: turns, ratios, verdicts, and processes whose failure is told."""

import sys
from types import SimpleNamespace

import growth
import pytest
import ratio
import real_table
from ratio import in_process
from support import processes

from kvbench.base.errors import KvbenchError, UsageError

pytestmark = pytest.mark.e2e("starts processes")


@pytest.fixture
def forked(monkeypatch):
    """Benchmarks' processes are forked from one that has imported torch and transformers."""

    def run(command, capture_output, text, check, env):
        python, *script = command
        assert python == sys.executable and capture_output and text
        return processes.run_script(*script, env=env)

    monkeypatch.setattr(ratio, "subprocess", SimpleNamespace(run=run))


def test_each_variant_is_measured_once_a_repeat_and_begins_in_turn():
    order = []
    variants = {name: lambda name=name: order.append(name) or float(len(order)) for name in "abc"}
    times = ratio.in_turns(variants, 3)
    assert "".join(order) == "abcbcacab"
    assert times == {"a": [1.0, 6.0, 8.0], "b": [2.0, 4.0, 9.0], "c": [3.0, 5.0, 7.0]}


def test_a_drift_of_the_machine_cancels_in_the_ratio():
    assert ratio.median_ratio([2.0, 4.0, 8.0], [1.0, 2.0, 4.0]) == 2.0
    # the ratio of the medians would be 1
    assert ratio.median_ratio([1.0, 3.0, 9.0], [3.0, 1.0, 3.0]) == 3.0


@pytest.mark.parametrize(("ok", "word"), [(True, "ok"), (False, "MISSED")])
def test_a_verdict_is_printed_and_returned(ok, word, capsys):
    assert ratio.verdict("a / b", 1.234, ok, "at most 2x") is ok
    assert capsys.readouterr().out == f"  a / b: 1.23x (at most 2x: {word})\n"


def test_options_have_the_defaults_that_are_asked_for():
    assert vars(ratio.options("help", repeats=5, threads=1).parse_args(["--threads", "2"])) == {
        "repeats": 5,
        "threads": 2,
    }
    assert vars(ratio.options("help").parse_args([])) == {}


def test_a_process_that_fails_says_why(capsys, forked):
    with pytest.raises(KvbenchError, match=r"ended with status 2: .*memory.py nothing"):
        ratio.in_process("memory", "nothing")
    assert "invalid choice: 'nothing'" in capsys.readouterr().err


def test_what_is_refused_is_one_message_and_a_python_must_exist(capsys):
    def refuses():
        raise UsageError("no such thing")

    for end, status in ((lambda: 1, 1), (refuses, 2)):
        with pytest.raises(SystemExit) as stop:
            ratio.finish(end)
        assert stop.value.code == status
    assert capsys.readouterr().err == "kvbench: no such thing\n"
    parser = ratio.options("help")
    ratio.add_peers(parser)
    assert parser.parse_args(["--peers", sys.executable]).peers == sys.executable
    with pytest.raises(SystemExit):
        parser.parse_args(["--peers", "/nowhere/python"])
    assert "cannot be started: make .venv-peers/.ready installs one" in capsys.readouterr().err


def test_growth_is_the_slope_between_the_logarithms_of_the_last_three_points():
    assert growth.exponent([1, 2, 4, 8], [9, 3, 12, 48]) == pytest.approx(2)
    assert growth.exponent([1, 10, 100], [5, 5, 5]) == pytest.approx(0)


def test_a_point_of_growth_measures_a_run_of_so_many_rows(tmp_path, forked):
    assert len(growth.plan_run(*growth.arguments("methods", 12, tmp_path)).groups[0].cells) == 12
    (group,) = growth.plan_run(*growth.arguments("prompts", 3, tmp_path)).groups
    assert len(group.examples) == 3 and len(group.cells) == 5
    measured = in_process("growth", "--curve", "new", "--point", 2, "--threads", 1)
    assert measured["seconds"] > 0 and measured["memory"] > 0


@pytest.mark.parametrize(("rows", "ours", "theirs"), [(real_table.PLAIN, 18, 18), (real_table.ALL, 24, 22)])
def test_a_real_table_has_these_rows_on_whole_essays(tmp_path, rows, ours, theirs):
    (tmp_path / "state_union").mkdir()
    (tmp_path / "state_union" / "a.txt").write_text("The state of the union is strong. " * 400)
    host, run = real_table.prepare(rows, "tiny", str(tmp_path), tmp_path, length=256, new=4)
    (group,) = run.groups
    assert len({c.id for c in group.cells}) == len(group.cells) == ours and not host.stop
    assert group.cells[0].label == "full" and {len(host.encode(e, group.task).ids) for e in group.examples} == {256}
    # every row of kvpress's is one of ours
    assert len(real_table.possible_peer_rows(rows, host.model.config, 256)) == theirs
    assert real_table.bound(host, run, 4) > 0

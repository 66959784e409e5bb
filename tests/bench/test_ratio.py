"""What benchmarks share: turns, ratios, verdicts, and processes whose failure is told."""

import subprocess

import pytest

from kvbench.bench import ratio

pytestmark = pytest.mark.e2e("starts processes")


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


def test_a_process_that_fails_says_why(capsys):
    with pytest.raises(subprocess.CalledProcessError):
        ratio.in_process("memory", "nothing")
    assert "invalid choice: 'nothing'" in capsys.readouterr().err

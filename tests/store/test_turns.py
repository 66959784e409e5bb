"""Falls of scores over a context's questions: the ranges in which they and their differences lie."""

import pytest

from kvbench.store.turns import TurnAnswer, compare_falls, summarise_turns


def contexts(first, last):
    """Return eight contexts with two questions of these scores."""
    answers = tuple(TurnAnswer("", score, ("x",), 1, 0.0, 1) for score in (first, last))
    return {str(number): answers for number in range(8)}


def test_eight_equal_falls_have_the_interval_of_their_range():
    # with 95 % confidence at least q = 0.025^(1/8) of all contexts fall so, and the others lie anywhere in the range
    q = 0.025 ** (1 / 8)
    falls, rises = contexts(1.0, 0.0), contexts(0.0, 1.0)
    # a fall lies in [-1, 1], a difference of two falls in [-2, 2]; the metric's scores are printed in per cent
    assert summarise_turns(falls, "squad_f1", [1]).fall_ci == (-100.0, pytest.approx(100 * (1 - 2 * q)))
    assert compare_falls(falls, rises, "squad_f1") == (-200.0, (-200.0, pytest.approx(200 * (1 - 2 * q))))

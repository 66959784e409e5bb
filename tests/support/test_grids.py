import pytest
from support.grids import grid


def test_every_case_of_a_grid_runs_and_those_that_fail_are_told_together(tmp_path):
    seen = []

    @grid("a", [1, 2, 3])
    @grid(("b", "c"), [(0, 0), (1, 1)])
    def rule(a, b, c, folder):
        seen.append((a, b, c))
        assert folder is tmp_path and a * b < 2, "too large"

    with pytest.raises(AssertionError, match=r"^2 of 3 cases\n\{'a': 2\}: 1 of 2 cases\n\{'b': 1, 'c': 1\}: too large"):
        rule(folder=tmp_path)
    assert len(seen) == 6


def test_a_grid_is_skipped_only_if_all_its_cases_are():
    @grid("a", [1, 2])
    def rule(a, least):
        if a < least:
            pytest.skip(f"{a}")

    rule(least=2)
    with pytest.raises(pytest.skip.Exception):
        rule(least=3)

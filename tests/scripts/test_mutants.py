"""The list of mutations fits the code, and only a test that fails counts as one that notices."""

import mutants
import pytest

MUTATIONS = mutants.mutations([])


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.file} {mutation.old.strip()[:30]}")
def test_a_mutation_changes_one_place_and_names_tests_that_are_there(mutation):
    text = (mutants.ROOT / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1 and mutation.new not in ("", mutation.old)
    assert mutation.tests and all((mutants.ROOT / test).exists() for test in mutation.tests)


@pytest.mark.parametrize(
    ("statuses", "outcome"),
    [
        ([1], "noticed"),
        ([0], "survived"),
        ([5, 1], "noticed"),
        ([5, 0], "survived"),
        ([4], "broken"),
        ([5, 5], "broken"),
    ],
)
def test_the_status_of_pytest_decides(statuses, outcome, monkeypatch):
    class Done:
        def __init__(self, status):
            self.returncode = status

    left = list(statuses)
    monkeypatch.setattr(mutants, "COPIED", ("kvbench",))
    monkeypatch.setattr(mutants.subprocess, "run", lambda *args, **options: Done(left.pop(0)))
    assert mutants.tests_fail(MUTATIONS[0]).split(":")[0] == outcome and not left

"""Fixtures that look into a run while it goes on."""

import pytest

from kvbench.engine import batch
from kvbench.run import runner


class Steps:
    """The decode steps of batches.

    rows: the number of rows of each step, in order.
    before: called with that number before the step is made, and may raise.
    """

    def __init__(self):
        self.rows = []
        self.before = lambda rows: None


@pytest.fixture
def steps(monkeypatch):
    """The decode steps that are made from now on, which a test can make fail."""
    made, step = Steps(), batch.step

    def watched(model, layers, tokens, positions):
        made.rows.append(len(tokens))
        made.before(len(tokens))
        return step(model, layers, tokens, positions)

    monkeypatch.setattr(batch, "step", watched)
    return made


@pytest.fixture
def queues(monkeypatch):
    """The decode queues that runs make, in order; a run in its turn adds its own."""
    made = []

    class Listed(runner.DecodeQueue):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(runner, "DecodeQueue", Listed)
    return made

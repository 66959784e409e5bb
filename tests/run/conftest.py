"""What tests of runs look into while one goes on."""

import pytest

from kvbench.run import runner


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

"""What a listener hears of a run, and that one which fails costs nothing."""

import pytest
from support.runs import SMALL, metrics_of, prepare

from kvbench.run import experiment

pytestmark = pytest.mark.e2e("runs whole command lines")


class Heard:
    """Writes down what it is told; ``broken`` names the call that raises."""

    def __init__(self, broken=""):
        self.calls, self.broken = [], broken

    def _hear(self, *call):
        self.calls.append(call)
        if call[0] == self.broken:
            raise RuntimeError("no network")

    def begin(self, prepared):
        self._hear("begin", len(prepared.groups))

    def reading(self, column):
        self._hear("reading", column)

    def stored(self, cell, sample):
        self._hear("stored", cell.id, sample.id)

    def ended(self, cell, status, summary, reason):
        self._hear("ended", cell.id, status, summary and summary.n, reason)

    def close(self):
        self._hear("close")


def test_a_listener_hears_every_sample_and_how_every_cell_ended(tmp_path):
    run = prepare(*SMALL, "method=snapkv", "limit=3", f"results={tmp_path}")
    heard = Heard()
    experiment.measure(run, quiet=True, listeners=(heard,))
    ids = [c.id for g in run.groups for c in g.cells]
    stored = {(c, e.id) for g in run.groups for c in [x.id for x in g.cells] for e in g.examples}
    assert heard.calls[0] == ("begin", 2) and heard.calls[-1] == ("close",)
    assert {call[1:] for call in heard.calls if call[0] == "stored"} == stored
    assert [c[1] for c in heard.calls if c[0] == "reading"] == [g.column for g in run.groups for _ in g.examples]
    assert [c[1:] for c in heard.calls if c[0] == "ended"] == [(i, "done", 3, None) for i in ids]
    again = Heard()
    experiment.measure(prepare(*SMALL, "method=snapkv", f"results={tmp_path}"), quiet=True, listeners=(again,))
    assert [c[2:4] for c in again.calls if c[0] == "ended"] == [("complete", 4)] * 4
    assert sum(c[0] == "stored" for c in again.calls) == 4


def test_an_interrupt_is_heard_with_what_was_finished_before(tmp_path, steps):
    run = prepare(*SMALL, "method=snapkv", "batch_rows=2", f"results={tmp_path}")

    def interrupt(rows):
        if len(steps.rows) > 8:
            raise KeyboardInterrupt

    steps.before = interrupt
    heard = Heard()
    with pytest.raises(KeyboardInterrupt):
        experiment.measure(run, quiet=True, listeners=(heard,))
    ended = [c for c in heard.calls if c[0] == "ended"]
    stored = [c[1] for c in heard.calls if c[0] == "stored"]
    assert 0 < len(stored) < 16
    assert {c[1]: c[3] or 0 for c in ended} == {c.id: stored.count(c.id) for g in run.groups for c in g.cells}
    assert {c[2:5:2] for c in ended if (c[3] or 0) < 4} == {("interrupted", "KeyboardInterrupt")}
    assert {c[2] for c in ended if (c[3] or 0) == 4} <= {"complete"}
    assert heard.calls[-1] == ("close",)


def test_a_listener_that_fails_is_left_out_and_loses_nothing(tmp_path, capsys):
    """One fails in each call, and one that stands behind them hears all."""
    experiment.measure(prepare(*SMALL, "method=snapkv", f"results={tmp_path / 'unheard'}"), quiet=True)
    capsys.readouterr()
    fine, failing = Heard(), [Heard(call) for call in ("begin", "reading", "stored", "ended", "close")]
    run = prepare(*SMALL, "method=snapkv", f"results={tmp_path / 'heard'}")
    experiment.measure(run, quiet=True, listeners=(*failing, fine))
    assert capsys.readouterr().err.count("Heard failed (RuntimeError: no network)") == len(failing)
    for listener in failing:
        called = [c[0] for c in listener.calls]
        assert called.count(listener.broken) == 1 and called[-1] == listener.broken, "it is not asked again"
    assert sum(c[0] == "stored" for c in fine.calls) == 16 and fine.calls[-1] == ("close",)
    assert metrics_of(tmp_path / "heard") == metrics_of(tmp_path / "unheard") != {}

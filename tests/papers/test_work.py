"""The work that is left of a table: counted before and after a part is measured, cheap cells first."""

import pytest

from kvbench.papers.measured import plan, work
from kvbench.papers.spec import table_spec
from kvbench.run import experiment

pytestmark = pytest.mark.e2e("measures a table on the tiny model")


def test_work_is_counted_ordered_and_gone_once_it_is_done(tmp_path):
    def runs():
        ours = plan.prepare(table_spec.load("vatp", "2"), "tiny", [f"results={tmp_path}", "limit=2"])
        return [ours.run]

    before = work.list_work(runs(), None)
    (run,) = runs()
    assert sum(w.answers for w in before) == sum(len(g.cells) * 2 for g in run.groups)
    assert not before[0].timed and "is known once an answer is stored" in work.describe_work(before)
    one_each = work.list_work(runs(), 1)
    assert [w.answers * 2 for w in one_each] == [w.answers for w in before]
    first = one_each[0]
    experiment.fill(work.replace(first.run, groups=(first.group,)), quiet=True)
    after = work.list_work(runs(), None)
    assert sum(w.answers for w in before) - sum(w.answers for w in after) == first.answers
    assert after[0].timed and "by the times of stored answers" in work.describe_work(after)
    assert [w.seconds / w.filled for w in after] == sorted(w.seconds / w.filled for w in after)
    assert work.list_work(runs(), 1)[-1].group.column != first.group.column
    experiment.fill(run, quiet=True)
    assert work.list_work(runs(), None) == [] and work.describe_work([]) == ""

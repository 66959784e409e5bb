"""Several tables as one run: no prompt is read twice, and every table finds its own cells."""

from dataclasses import replace
from pathlib import Path

from kvbench.papers.measured import plan
from kvbench.papers.measured.plan import PaperTable
from kvbench.papers.measured.work import join_runs
from kvbench.papers.spec import table_spec
from kvbench.run import experiment


def prepared(table: str, results: Path) -> PaperTable:
    (spec,) = table_spec.find_tables(table)
    return plan.prepare(spec, "tiny", [f"results={results}", "limit=1"])


def test_tables_of_one_paper_are_one_run_and_each_finds_its_cells(tmp_path: Path) -> None:
    tables = [prepared("think/1", tmp_path), prepared("think/6", tmp_path)]
    runs = [t.run for t in tables if t.run is not None]
    (run,) = join_runs(runs)
    ids = [c.id for g in run.groups for c in g.cells]
    assert len(ids) == len(set(ids))
    assert set(ids) == {c.id for r in runs for g in r.groups for c in g.cells}
    assert len(run.groups) == len({g.task.id for r in runs for g in r.groups})
    one = join_runs([replace(run, groups=run.groups[:1])])
    experiment.measure(one[0], quiet=True)
    task = run.groups[0].task.id
    assert not [g for t in runs for g in t.groups if g.task.id == task and t.left(g)]


def test_tables_that_prompt_otherwise_are_apart(tmp_path: Path) -> None:
    runs = [prepared(t, tmp_path).run for t in ("think/6", "refreekv/7")]
    policies = {r.cfg.prompt.name for r in runs if r is not None}
    assert len(join_runs(r for r in runs if r is not None)) == len(policies)


def test_a_shared_task_has_the_examples_of_the_run_that_wants_most(tmp_path: Path) -> None:
    (table,) = table_spec.find_tables("think/6")
    few, many = (plan.prepare(table, "tiny", [f"results={tmp_path}", f"limit={n}"]).run for n in (1, 3))
    assert few is not None and many is not None
    (run,) = join_runs([few, many])
    assert [len(g.examples) for g in run.groups] == [3] * len(many.groups)

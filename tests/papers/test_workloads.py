"""Every table and claim runs on any model: one cell for each distinct row and column, in one unit with the paper's."""

import numpy as np
import pytest
from support import papers_data

from kvbench.base.errors import UsageError
from kvbench.cli.main import main
from kvbench.papers.claims import claims
from kvbench.papers.claims.evidence import read_evidence
from kvbench.papers.measured import coverage, page, plan, text
from kvbench.papers.measured.cells import read_cells
from kvbench.papers.measured.work import join_runs
from kvbench.papers.spec import catalogue, row_knobs, stand_ins, table_spec
from kvbench.run import experiment
from kvbench.tasks.longbench import TASKS, task_names
from kvbench.tasks.metrics import metric, stats

pytestmark = pytest.mark.e2e("measures every table on one example")

MEASURED = [t.id for t in table_spec.find_tables("all") if t.measurable]
# one task of LongBench for each of its metrics; every table with columns of LongBench has one of them
FEW_TASKS = ("qasper", "gov_report", "trec", "passage_retrieval_en", "passage_count", "lcc")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return papers_data.model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return papers_data.data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def few_data(tmp_path_factory):
    """Every dataset, but of LongBench FEW_TASKS alone."""
    root = papers_data.data(tmp_path_factory.mktemp("few"))
    for name in set(task_names("en")) - set(FEW_TASKS):
        (root / "longbench" / f"{name}.jsonl").unlink()
    return root


def prepared(table, folder, data, results, *more):
    return plan.prepare(table, str(folder), [f"results={results}", f"data.root={data}", *more])


def table(name):
    return table_spec.load(*name.split("/"))


@pytest.mark.parametrize("name", MEASURED)
def test_every_table_has_a_cell_for_each_distinct_row_and_column(name, folder, data, tmp_path):
    needle = any(c.dataset == "needle" for c in table(name).scores)
    ours = prepared(table(name), folder, data, tmp_path, *(["depths=50"] if needle else []))
    assert (ours.stand_in, ours.absent) == (True, {})
    rows = {}
    for line in ours.lines:
        for column in (c for c in ours.spec.scores if c.name in line.printed):
            assert line.refused or ours.find_parts(line, column), (line.name, column)
            method = row_knobs.translate_method(line.method, row_knobs.parse_setting(line.setting))
            knobs = sorted(row_knobs.run_arguments(line.method, line.setting).items())
            own_knobs = {k: v for k, v in row_knobs.parse_setting(line.setting).items() if k in ("shots", "context")}
            if not line.refused:
                ids = tuple(c.id for _, c in ours.find_parts(line, column))
                rows.setdefault((method, str(knobs), str(own_knobs), column.dataset), set()).add(ids)
    assert all(len(ids) == 1 for ids in rows.values())
    units = {metric(g.task.metric).formula is None for g in ours.run.groups}
    read = read_cells(ours)
    for line in read.lines if units == {True} else ():
        printed = [e.paper_value for e in read.pairs_of(line) if e.paper_value]
        assert not printed or max(printed) > 1, line.name  # of 100


def test_shots_are_read_of_each_row(folder, data, tmp_path):
    ours = prepared(table("qhitter/3"), folder, data, tmp_path)
    cells = [c.id for line in ours.lines for column in ours.spec.scores for _, c in ours.find_parts(line, column)]
    assert len(set(cells)) == len(cells) == 4 * 3 * 2
    prompts = {g.column: g.examples[0].prompt for g in ours.run.groups}
    assert [prompts[f"xsum shots={n}"].count("###") for n in (0, 1, 3, 5)] == [1, 2, 4, 6]
    assert coverage.count_cells(read_cells(ours))["missing"] == "24"


def test_printed_fractions_are_shown_in_per_cent(folder, data, tmp_path):
    ours = prepared(table("qhitter/3"), folder, data, tmp_path)
    assert read_cells(ours).pairs[0].paper_value == pytest.approx(17.1)
    assert "17.1" in page.render(read_cells(ours), show="published")
    assert "What the paper prints as fractions stands here in per cent" in " ".join(text.write_notes(read_cells(ours)))
    coqa = read_cells(plan.make_printed_table(table("refreekv/7"), "x", ""))
    assert next(e.paper_text for e in coqa.pairs_of(coqa.lines[1]) if e.paper_text) == "25.0"


def test_several_tasks_of_a_dataset_are_one_column(folder, data, tmp_path):
    by_paper = {p: claims.make_tables_of_sides(claims.load(p)) for p in claims.papers_with_claims()}
    for sides in by_paper.values():
        for side in sides:
            if "mdqa" in {c.dataset for c in side.scores}:
                ours = prepared(side, folder, data, tmp_path, "limit=1")
                (column,) = (c for c in side.scores if c.dataset == "mdqa")
                groups = [g for g, _ in ours.find_parts(ours.lines[0], column)]
                assert [g.task.id for g in groups] == ["mdqa/first", "mdqa/middle", "mdqa/last"]
                assert groups[0].examples[0].meta["documents"] == 10


def test_needles_have_the_papers_lengths_where_the_model_takes_them(folder, data, tmp_path):
    ours = prepared(table("uncomp/4"), folder, data, tmp_path, "depths=50")
    four, eight = (
        next(x for x in ours.lines if row_knobs.parse_setting(x.setting)["context"] == c) for c in ("4k", "8k")
    )
    column = ours.spec.scores[0]
    lengths = [[int(g.task.id.partition("/")[2]) for g, _ in ours.find_parts(line, column)] for line in (four, eight)]
    assert lengths == [[1000, 2000, 3000, 3900], [1000, 2000, 3000, 3900, 5000, 6000, 7000, 7900]]
    short = papers_data.model(tmp_path / "short", context=2048)
    ours = prepared(table("uncomp/4"), short, data, tmp_path, "depths=50")
    assert [g.task.id for g, _ in ours.find_parts(ours.lines[0], column)] == ["needle/1000", "needle/2000"]
    assert any("3000, 3900 tokens" in n and "beyond the model's context" in n for n in ours.notes)


def test_a_dataset_that_is_not_there_leaves_its_column_out_and_says_what_it_needs(folder, data, tmp_path):
    (data / "gpqa_main.csv").rename(data / "away.csv")
    try:
        ours = prepared(table("refreekv/1"), folder, data, tmp_path)
    finally:
        (data / "away.csv").rename(data / "gpqa_main.csv")
    assert text.list_reasons_for_absence(ours) == ["gpqa is missing: the file gpqa_main.csv is not in the data folder"]
    assert str(data) not in page.render(read_cells(ours))
    column = next(c for c in ours.spec.scores if c.dataset == "gpqa")
    assert not ours.find_parts(ours.lines[0], column) and ours.read_result(ours.lines[0], column).status == "missing"


def test_nothing_that_can_be_read_is_told_with_its_reasons(folder, tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    arguments = [f"model={folder}", f"data.root={empty}", f"results={tmp_path}"]
    assert main(["table", "refreekv/7", *arguments]) == 2
    message = capsys.readouterr().err
    assert "none of its datasets can be read" in message and "gsm8k_test.jsonl" in message and "coqa-dev" in message


def test_longbench_columns_are_never_a_mixture(folder, tmp_path):
    root = papers_data.longbench(tmp_path / "data", "longbench_mini")
    papers_data.longbench(root, "longbench", ("qasper", "hotpotqa"))
    some = prepared(table("vatp/2"), folder, root, tmp_path)
    assert {w.entry for w in some.groups} == {"longbench_mini"}
    assert "LongBench's columns have MiniLongBench's examples, 3 to 3 a task." in some.notes
    forced = prepared(table("vatp/2"), folder, root, tmp_path, "longbench=full")
    assert {w.entry for w in forced.groups} == {"longbench"}
    assert sorted(w.dataset for w in forced.absent) == ["2wikimqa", "multifieldqa_en"]
    papers_data.longbench(root, "longbench")
    assert {w.entry for w in prepared(table("vatp/2"), folder, root, tmp_path).groups} == {"longbench"}
    with pytest.raises(UsageError, match=r"unknown value some of longbench"):
        prepared(table("vatp/2"), folder, root, tmp_path, "longbench=some")
    with pytest.raises(UsageError, match="longbench=mini is not possible with model=tiny"):
        plan.prepare(table("vatp/2"), "tiny", ["longbench=mini"])


def test_where_the_full_cache_is_at_the_floor_no_share_is_shown():
    low, some = np.zeros(20), np.full(20, 0.5)
    low[0] = 0.1
    assert stats.at_floor(low) and not stats.at_floor(some)
    assert stats.at_floor(some, chance=0.48)  # as silence scores
    rare = np.zeros(20)
    rare[0] = 1.0  # 5 of 100, with an interval that reaches 0
    assert stats.at_floor(rare)
    assert stats.share_of_full([np.stack([x, x], 1) for x in (rare, some)]).point == pytest.approx(100)


def test_a_table_on_which_the_model_fails_shows_its_numbers_and_a_mark(folder, data, tmp_path):
    ours = prepared(table("vatp/2"), folder, data, tmp_path, "limit=1")
    experiment.measure(ours.run, quiet=True)
    seen = read_cells(ours)
    floored = [e for e in seen.pairs_of(seen.lines[0]) if e.floor]
    assert floored and all(e.value is not None for e in floored)
    assert [c.name for c in seen.columns][-1] == "avg"
    text = " ".join(page.render(seen).split())
    assert f"full {floored[0].full:.1f}†" in text and "n 1‡" in text
    assert "†: the model fails. Its full cache scores less than 3 points" in text
    # one example a task has no interval, so that no note explains one
    assert text.startswith("! n = 1 of ") and "Preview only: nothing here can be compared. vatp/2: " in text
    assert "Δ" not in page.render(seen)


@pytest.mark.parametrize("paper", catalogue.paper_ids())
def test_every_table_and_claim_is_measured(paper, folder, few_data, tmp_path, monkeypatch):
    left_out = set(task_names("en")) - set(FEW_TASKS)
    assert {TASKS[name].metric for name in FEW_TASKS} == {TASKS[name].metric for name in task_names("en")}
    few = {stage: {"samples": "2"} for stage in stand_ins.SAMPLES}
    few["uncomp-stage"]["schedule"] = "relative"
    monkeypatch.setattr(stand_ins, "choose_depth_knobs", lambda size: few)
    tables = [t for t in table_spec.find_tables(paper) if t.measurable]
    short = {"needle": ["lengths=300", "depths=50"], "wikitext103": ["length=128", "prefix=64", "chunk=8"]}
    all_ours = []
    for table in (*tables, *claims.make_tables_of_sides(claims.load(paper))):
        datasets = {c.dataset for c in table.scores}
        more = [x for name in short.keys() & datasets for x in short[name]]
        answers = [] if "wikitext103" in datasets else ["max_new_tokens=2"]
        all_ours.append(prepared(table, folder, few_data, tmp_path, "limit=1", *more, *answers))
        assert {w.dataset for w in all_ours[-1].absent} == datasets & left_out
    for run in join_runs(ours.run for ours in all_ours):
        experiment.fill(run, quiet=True)
    for ours in all_ours:
        seen = read_cells(ours)
        for line in seen.lines:
            scores = zip(seen.columns, seen.pairs_of(line), strict=True)
            columns = [c for c in ours.spec.scores if c.dataset not in left_out]
            states = {e.status for c, e in scores if c in columns} - {"none"}
            assert states == {"refused" if line.refused else "measured"}, (ours.spec.id, line.name)


@pytest.mark.parametrize("paper", claims.papers_with_claims())
def test_every_claim_finds_its_pairs(paper, folder, data, tmp_path):
    chosen = [c for c in claims.load(paper) if c.test != "elsewhere"]
    tables = []
    for side in claims.make_tables_of_sides(chosen):
        depths = ["depths=50"] if any(column.dataset == "needle" for column in side.scores) else []
        tables.append(prepared(side, folder, data, tmp_path, "limit=1", *depths))
    for claim in chosen:
        by_points = read_evidence(claim, tables)[claims.POINTS]
        assert len(by_points.cells) >= 2 or by_points.reason, claim.id


def test_a_difference_to_scores_made_under_other_conditions_is_marked(folder, few_data, tmp_path):
    """VATP's scores fit LongBench-E, and a prompt that the user chose is not the paper's: both had a bare Δ."""
    few = [f"model.path={folder}", f"data.root={few_data}", f"results={tmp_path}", "limit=1", "max_new_tokens=2"]
    ours = plan.prepare(table("vatp/2"), "llama2-7b-chat", few)
    experiment.measure(ours.run, quiet=True)
    notes = " ".join(page.render(read_cells(ours)).split())
    assert not ours.stand_in and notes.count("Δ") > 2
    assert "°: other conditions than the paper's" in notes and "LongBench-E, ours are of LongBench's own split" in notes
    assert "max_new_tokens=2 here" in notes
    assert "prompt=" not in notes.partition("°: ")[2].partition("n = ")[0]
    chosen = plan.prepare(table("think/4"), "llama2-7b-chat", [*few, "prompt=plain"])
    experiment.measure(chosen.run, quiet=True)
    assert "prompt=plain here, think there" in " ".join(page.render(read_cells(chosen)).split())
    cut = plan.prepare(table("vatp/2"), "llama2-7b-chat", [*few, "max_length=900"])
    experiment.measure(cut.run, quiet=True)
    assert "max_new_tokens=2 max_length=900 here" in " ".join(page.render(read_cells(cut)).split())

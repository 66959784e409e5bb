"""Figures of results: their numbers against the store by hand, their drawings from the CSV alone, and bad requests."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

from kvbench.base.errors import UsageError
from kvbench.cli.main import main
from kvbench.papers.figures import measured, registry, scores, think
from kvbench.papers.figures.measured import MEAN, VALUES, MeasuredFigure
from kvbench.papers.figures.sweep import Point, Sweep
from kvbench.plan import keys
from kvbench.report.of_run import report_cell
from kvbench.store.sample_reader import SampleReader
from kvbench.tasks.metrics import stats

pytestmark = pytest.mark.e2e("draws every measured figure")

RESULTS = {i: f for i, f in registry.FIGURES.items() if f.sweeps is not None and f.paper != "fidelity"}
DRAWN_TWICE = "qhitter/fig10"
TINY = ["length=128", "limit=3"]
SMALL = replace(
    RESULTS["results/budget"],
    id="results/small",
    sweeps=(
        Sweep(
            tuple(Point(m, 100 * r, m, {"kv_ratio": r}) for m in ("snapkv", "random") for r in (0.5, 0.25)),
            dataset="tiny/needle,tiny/listing",
        ),
    ),
)


def prepare(figure, arguments):
    return measured.prepare(figure, keys.parse_pairs(arguments))


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A small sweep, measured."""
    prepared = prepare(SMALL, [*TINY, f"results={tmp_path_factory.mktemp('store')}"])
    prepared.measure(quiet=True)
    return prepared


def invented(figure):
    """Data of a figure's columns for every point that it declares, each with two tasks."""
    if figure.id == "think/fig3b":
        return think.compute_memory(MeasuredFigure(()))
    rng = np.random.default_rng(0)
    if figure.id == "needle/heatmap":
        fields = [(m, n, d) for m in ("full", "h2o") for n in (256, 512) for d in (0, 50, 100)]
        return pd.DataFrame([(m, n, d, 100 * rng.random(), 2) for m, n, d in fields], columns=list(figure.columns))
    rows = []
    for sweep in figure.sweeps:
        tasks = sweep.dataset.split(",") if sweep.dataset != "tiny" else ["needle", "hop"]
        for point in (*([measured.FULL_POINT] if sweep.baseline else []), *sweep.points):
            for task in [*tasks, *([MEAN] if len(tasks) > 1 else [])]:
                score = 100 * rng.random()
                numbers = [score, score - 3, score + 3, score, score - 3, score + 3, 8, 25.0, 30.0 * rng.random() + 1]
                at = {"series": point.series, "x": point.x, "task": task, "metric": "f1"}
                rows.append({**at, **dict(zip(VALUES, numbers, strict=True))})
    data = pd.DataFrame(rows)
    # a column that only this figure has stands at 1, and its interval around it
    own = {c: float(1 - c.endswith("_low") + c.endswith("_high")) for c in figure.columns if c not in data}
    return data.assign(**own)


@pytest.mark.parametrize("name", RESULTS)
def test_every_point_that_a_figure_declares_is_drawn(name, tmp_path):
    figure = RESULTS[name]
    paths, finding = figure.write(invented(figure), {"runs": "invented"}, tmp_path)
    assert finding.endswith(".") and "nan" not in finding
    assert all(path.stat().st_size > 3000 for path in paths[:2])
    if name == DRAWN_TWICE:  # test_committed.py draws every figure's committed CSV again
        with mpl.rc_context({"font.size": 20, "savefig.dpi": 50}):
            again, text = figure.redraw(paths[2].read_text(), tmp_path / "again")
        assert text == finding
        assert [path.read_bytes() for path in paths[:2]] == [path.read_bytes() for path in again]


def test_rows_are_what_the_store_holds(ran):
    (sweep_run,) = ran.runs
    data = sweep_run.frame()
    assert set(data["task"]) == {"needle", "listing", MEAN} and len(data) == 5 * 3
    for point, group, cell in sweep_run.cells():
        at = (data["series"] == point.series) & (data["x"] == point.x)
        row = data[at & (data["task"] == group.task.id.partition("/")[2])].iloc[0]
        samples = list(sweep_run.run.store.lines(cell.id).values())
        full = next(c for c in group.cells if not c.chain.stages)
        complete = [s["score"] for s in sweep_run.run.store.lines(full.id).values()]
        assert len(samples) == row["n"] == 3
        assert row["score"] == pytest.approx(100 * fmean(s["score"] for s in samples))
        assert row["relative"] == pytest.approx(100 * fmean(s["score"] for s in samples) / fmean(complete))
        assert row["kept"] == pytest.approx(100 * sum(s["kept"] for s in samples) / sum(s["n"] for s in samples))
        held_bytes, all_of_it = (sum(s[k] for s in samples) for k in ("payload16", "full16"))
        held_bytes += sum(s["overhead16"] for s in samples)
        assert row["bytes"] == pytest.approx(100 * held_bytes / all_of_it)
        assert np.isnan(row["low"]), "three examples say nothing about an interval"
        assert row["score"] == report_cell(group, cell, SampleReader(sweep_run.run.store)).summary.score
    for (_, _), rows in data.groupby(["series", "x"]):
        each = rows[rows["task"] != MEAN]
        mean = rows[rows["task"] == MEAN].iloc[0]
        assert mean["score"] == pytest.approx(each["score"].mean()) and mean["n"] == 6
    assert np.isnan(data.loc[data["task"] == MEAN, "low"]).all(), "six examples in all are too few, too"
    facts = ran.facts()
    assert facts["examples"] == "3 of each task" and "dataset tiny length=128" in facts["runs"]


def test_a_gain_is_the_paired_difference_of_the_same_method_without_the_stage(tmp_path):
    knobs = {"method": "h2o+vatp", "knobs": {"kv_ratio": 0.25}}
    points = [
        Point("h2o+vatp", 25, **knobs),
        Point("h2o", 25, "h2o", {"kv_ratio": 0.25}),
        Point("h2o+vatp", 30, **knobs),
    ]
    figure = replace(SMALL, sweeps=(Sweep(tuple(points), dataset="tiny/hop,tiny/listing"),))
    source = prepare(figure, ["length=128", "limit=8", f"results={tmp_path}"])
    source.measure(quiet=True)
    gains = source.gains("vatp")
    assert set(zip(gains["series"], gains["x"], strict=True)) == {("h2o+vatp", 25.0)}, "no point without a partner"
    differences = {}
    for group in source.runs[0].run.groups:
        by_label = {c.chain.name: source.runs[0].run.store.samples(c.id) for c in group.cells}
        base = by_label["h2o"]
        pairs = [(s.score, base[e].score) for e, s in by_label["h2o+vatp"].items()]
        differences[group.task.id.partition("/")[2]] = pairs
    assert any(a != b for pairs in differences.values() for a, b in pairs)
    for task, pairs in differences.items():
        point, interval = stats.paired_difference(*zip(*pairs, strict=True))
        row = gains[gains["task"] == task].iloc[0]
        assert (row["gain"], row["gain_low"], row["gain_high"]) == pytest.approx([100 * x for x in (point, *interval)])
    mean = gains[gains["task"] == MEAN].iloc[0]
    assert mean["gain"] == pytest.approx(gains.loc[gains["task"] != MEAN, "gain"].mean())
    assert mean["gain_low"] < mean["gain"] < mean["gain_high"]
    fewer = prepare(figure, ["length=128", "limit=4", f"results={tmp_path}"]).gains("vatp")
    assert fewer.loc[fewer["task"] != MEAN, "gain_low"].isna().all(), "four pairs say nothing about an interval"


def test_gains_on_a_grid_of_a_datasets_option_are_those_of_each_of_its_values(tmp_path):
    stage, base = ("h2o+vatp", "h2o+vatp"), ("h2o", "h2o")
    points = tuple(Point(series, 25, method, {"kv_ratio": 0.25}) for series, method in (stage, base))
    figure = replace(SMALL, sweeps=(Sweep(points, dataset="tiny/listing"),))
    store = f"results={tmp_path}"
    grid = prepare(figure, ["length=128,256", "limit=4", store])
    grid.measure(quiet=True)
    marked = scores.measure_with_gains(grid, "vatp")
    rows = marked[marked["series"] == "h2o+vatp"].set_index("task")
    assert list(rows.index) == ["listing length=128", "listing length=256", MEAN]
    for length in (128, 256):
        alone = prepare(figure, [f"length={length}", "limit=4", store]).gains("vatp")
        assert rows.loc[f"listing length={length}", "gain"] == pytest.approx(alone["gain"].item())
    assert rows.loc[MEAN, "gain"] == pytest.approx(rows["gain"].iloc[:2].mean())
    assert rows["gain"].iloc[0] != rows["gain"].iloc[1]


def test_what_is_not_measured_is_left_out_and_said(ran, tmp_path):
    empty = prepare(SMALL, [*TINY, f"results={tmp_path}"])
    assert empty.frame().empty
    assert empty.facts()["left out"].count("not measured") == 10
    (sweep_run,) = ran.runs
    fewer = prepare(SMALL, ["length=128", "limit=2", f"results={sweep_run.run.store.root}"])
    assert set(fewer.frame()["n"]) == {2, 4}, "the store holds more, the figure counts what it was asked for"
    more = prepare(SMALL, ["length=128", "limit=4", f"results={sweep_run.run.store.root}"])
    assert sum(t.answers_to_do for t in more.runs[0].run.todo()) == 10, "what is there is not measured again"
    assert "left out" not in fewer.facts() and more.facts()["left out"].count("3 of 4 examples measured") == 10


def test_the_front_is_what_nothing_beats():
    rows = [("a", 10, 50), ("b", 20, 40), ("c", 20, 60), ("d", 30, 60), ("e", 40, 90)]
    data = pd.DataFrame(rows, columns=["series", "bytes", "score"])
    assert list(scores.find_pareto_front(data)["series"]) == ["a", "c", "e"]
    assert list(scores.find_pareto_front(data.iloc[::-1])["series"]) == ["a", "c", "e"]


def test_a_front_is_drawn_where_its_steps_can_be_told_apart():
    rows = [("a", 10, 50, 45, 55), ("c", 20, 54, 49, 59), ("e", 40, 90, 80, 95)]
    data = pd.DataFrame(rows, columns=["series", "bytes", "score", "low", "high"])
    assert list(scores.find_separate_front(data)["series"]) == ["a", "e"]
    assert scores.find_separate_front(data[data["series"] != "e"]).empty, "one point is no front"
    without_intervals = data.drop(columns=["low", "high"])
    assert scores.find_separate_front(without_intervals).empty, "without intervals nothing is told apart"
    shown = scores.add_front(data.assign(relative_low=[40, 95, 98], relative_high=[60, 130, 99]))
    assert list(shown.loc[shown["alike"], "series"]) == ["c"]
    assert list(shown.loc[shown["series"] == scores.FRONT, "bytes"]) == [10, 40, 100]


def test_bytes_of_copies_for_query_heads_stand_over_a_full_cache_of_as_many():
    rows = [("full", 100.0, 100.5), ("h2o", 20.0, 61.0), ("h2o+think", 20.0, 45.0)]
    data = scores.count_bytes_per_copy(pd.DataFrame(rows, columns=["series", "kept", "bytes"]), {})
    assert set(data["copies"]) == {3}
    np.testing.assert_allclose(data["bytes"], [100.5, 61 / 3, 15])


def test_a_needle_is_counted_from_silence():
    data = pd.DataFrame({"series": ["full", "full"], "length": 512, "depth": [0, 50], "score": [60.0, 80.0], "n": 2})
    figure = registry.FIGURES["needle/heatmap"]
    text = data.to_csv(index=False)
    counted = figure.parse("# runs: Model m, float32; dataset needle phrasing=completion\n" + text)
    assert list(counted["found"]) == [0, 50]
    assert "an empty answer: 60.0. Found, % of the score above an empty answer's: full 25." in figure.finding(counted)
    assert "1 prompt at each of 2 pairs of length and depth" in figure.finding(counted.assign(n=1))
    assert list(figure.parse("# runs: Model m, float32; dataset needle\n" + text)["found"]) == [60, 80]


def test_memory_of_think_by_hand():
    data = think.compute_memory(MeasuredFigure(())).groupby("method")["cache"].first()
    heads, complete, packed = 32 * 32, 497 * 128 * 2, 497 // 32 * 32
    scales = packed // 32 * 128 * 4  # a group of 32 tokens has a scale and a minimum of 2 bytes for each channel
    keys = packed * 128 * 2 // 8 + scales + (497 - packed) * 128 * 2
    values = (497 - 32) * (128 * 2 // 8 + 128 // 32 * 4) + 32 * 128 * 2
    assert data["full"] == pytest.approx(2 * heads * complete / 2**20, rel=1e-3)
    assert data["KIVI 2/2"] == pytest.approx(heads * (keys + values) / 2**20, rel=2e-3)
    thin = keys - 51 / 128 * (packed * 128 * 2 // 8 + scales)  # int(0.4 * 128) channels go
    assert data["KIVI 2/2 + ThinK 0.4"] == pytest.approx(heads * (thin + values) / 2**20, rel=5e-3)


@pytest.fixture(scope="module")
def needles(tmp_path_factory):
    """Words of a small map of needles, with its text and its results in a folder."""
    folder = tmp_path_factory.mktemp("needles")
    (folder / "essay.txt").write_text("The wind was cold by the river. It was a calm night in the village. " * 80)
    sizes = ["lengths=128,192", "depths=0,100", "repeats=2", "limit=4"]
    return [f"haystack={folder / 'essay.txt'}", *sizes, f"results={folder}"]


def test_needle_maps_are_means_of_fields(needles):
    figure = registry.FIGURES["needle/heatmap"]
    prepared = prepare(figure, needles)
    prepared.measure(quiet=True)
    data = figure.compute(prepared)
    assert len(data) == 5 * 2 * 2 and set(data["n"]) == {2}
    (sweep_run,) = prepared.runs
    for point, group, cell in sweep_run.cells():
        for depth in (0, 100):
            scores = [s["score"] for s in sweep_run.run.store.lines(cell.id).values() if s["meta"]["depth"] == depth]
            length = int(group.task.id.partition("/")[2])
            at = (data["series"] == point.series) & (data["length"] == length) & (data["depth"] == depth)
            assert data.loc[at, "score"].item() == pytest.approx(100 * fmean(scores))


def test_lines_and_words():
    data = invented(RESULTS["results/budget"])
    methods = ["pyramidkv", "snapkv", "cake", "h2o", "streamingllm", "tova", "random"]
    assert scores.list_series(data) == methods and scores.list_tasks(data) == ["needle", "hop"]
    assert set(scores.choose_rows(data, "mean")["over"]) == {"mean over tasks"}
    assert list(dict.fromkeys(scores.choose_rows(data, "all")["task"])) == [MEAN, "needle", "hop"]
    assert set(scores.choose_rows(data, "each")["task"]) == {"needle", "hop"}
    assert scores.describe_samples(data) == "n = 8 a task"
    only = data[data["task"] == "hop"]
    assert scores.describe_samples(only) == "n = 8"
    for tasks in ("mean", "each", "all"):
        assert len(scores.choose_rows(only, tasks)) == len(only) and set(scores.choose_rows(only, tasks)["over"]) == {
            "hop"
        }


def told(name, rows):
    """The finding of a figure on (series, x, task, score, kept, bytes, relative) rows."""
    columns = ["series", "x", "task", "score", "kept", "bytes", "relative"]
    return RESULTS[name].finding(pd.DataFrame(rows, columns=columns).assign(n=4))


def test_what_scores_say():
    full, base = ("full", 0, "a", 50, 100, 100, 100), ("h2o", 20, "a", 30, 20, 21, 60)
    text = told("think/fig3a", [full, base, ("h2o+think", 20, "a", 31.5, 20, 21, 63)])
    assert "Points that think adds: h2o +1.5 at pair 20." in text
    assert "Points that think adds" not in told("think/fig3a", [full, base])
    chain = ("h2o+think", 20, "mean", 31.5, 20, 21, 63)
    other_task = ("full", 0, "b", 50, 100, 100, 100)
    assert "Points that think adds" not in told("think/fig3a", [full, other_task, base, chain])
    gains = {"gain": [np.nan, np.nan, 1.5], "gain_low": [np.nan, np.nan, -2.0], "gain_high": [np.nan, np.nan, 5.0]}
    rows = pd.DataFrame(
        [full, base, ("h2o+vatp", 20, "a", 31.5, 20, 21, 63)],
        columns=["series", "x", "task", "score", "kept", "bytes", "relative"],
    )
    few = {name: [np.nan] * 3 for name in ("gain_low", "gain_high")}
    text = RESULTS["vatp/fig3"].finding(rows.assign(n=8, **gains))
    assert text == (
        "Full cache: a 50.0. Scores: h2o 30.0 at 20 %; h2o+vatp 31.5 at 20 %. "
        "Points that vatp adds: h2o +1.5 [−2.0, 5.0] at 20 %. Intervals that exclude 0: 0 of 1. Examples: n = 8."
    )
    assert "h2o +1.5 at 20 %. Examples: n = 4." in RESULTS["vatp/fig3"].finding(rows.assign(n=4, **gains | few))
    text = told("results/pareto", [full, base, ("think", 0, "a", 48.5, 100, 80, 97), ("kivi", 0, "a", 20, 100, 40, 40)])
    assert "on the front: none, as the intervals overlap." in text
    assert "Fewest bytes within 2 points of the full cache: think 80.0 %" in text
    rows = [("qhitter", x, task, s, 20, 21, 1) for task, s in (("a", 5), ("b", 7)) for x in (0, 0.5)]
    text = told("qhitter/fig9", [*rows, ("qhitter", 1, "b", 9, 20, 21, 1)])
    assert "Best (the smallest of equals): a 0, b 1." in text and "Full cache" not in text
    halves = [
        (f"{half} alone", b, t, s, 1, 1, 1) for half, s in (("keys", 3), ("values", 4)) for b in (2, 4) for t in "ab"
    ]
    assert "Tasks of 2 on which keys lose at 2 bits: more than values 2, less 0." in told("qhitter/fig10", halves)
    text = told("refreekv/fig3", [full, ("refreekv", 1, "a", 49, 40, 41, 98), ("refreekv", 5, "a", 40, 20, 21, 80)])
    assert "by T: 1 %: 98.0, 5 %: 80.0. Tokens kept, %, by T: 1 %: 40, 5 %: 20. Tokens kept at 1 %, %: a 40." in text


BAD = {
    "plot results/paretto": "Did you mean results/pareto",
    "plot vatp/fig3 layers=0": "layers= is not possible with vatp/fig3",
    "plot vatp/fig3 text=x": "text= is not possible with vatp/fig3",
    "plot vatp/fig3 method=snapkv": "take methods of your own",
    "plot vatp/fig3 limit=0": "limit=0 is not possible",
    "plot vatp/fig3 --stored results={tmp}": "no data of this figure in",
    "plot uncomp/fig1 --stored": "--stored is not possible with uncomp/fig1",
    "plot qhitter/fig7 dataset=tiny": "dataset=tiny is not possible with qhitter/fig7",
    "plot think/fig3b results={tmp} model=tiny": "model= is not possible with think/fig3b: it is computed",
    "plot qhitter/fig5 results={tmp}": "dataset=wikitext2 needs wikitext2/test.txt",
    "plot needle/heatmap results={tmp}": "give haystack=FOLDER",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_command_line(line, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("KVBENCH_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(line.format(tmp=tmp_path).split()) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("kvbench: ") and captured.err.count("\n") == 1
    assert BAD[line] in captured.err


def test_options_of_a_figures_dataset(needles, capsys):
    assert main(["plot", "needle/heatmap", *needles]) == 0
    assert "2 prompts at each of 4 pairs of length and depth" in " ".join(capsys.readouterr().out.split())


def test_a_dataset_given_keeps_the_figures_own_options(tmp_path):
    prepared = prepare(RESULTS["qhitter/fig8"], ["dataset=tiny_stream", f"results={tmp_path}"])
    assert [r.run.cfg.datasets[0].knobs["length"] for r in prepared.runs] == [512, 1024, 2048, 4096, 8192]
    prepared = prepare(RESULTS["qhitter/fig5"], ["dataset=tiny/needle", f"results={tmp_path}"])
    assert "chunk" not in prepared.runs[0].run.cfg.datasets[0].knobs


def test_datasets_that_are_not_there_can_be_left_out(tmp_path):
    prepared = prepare(RESULTS["qhitter/fig7"], ["dataset=tiny/needle,tiny/hop", f"results={tmp_path}"])
    assert [r.run.groups[0].task.id for r in prepared.runs] == ["tiny/hop", "tiny/needle"]
    assert [r.chains[0].stages[0].kv_ratio for r in prepared.runs] == [0.4, 0.5], "each with its own budget"


def test_a_dataset_that_stands_in_is_named(tmp_path):
    with pytest.raises(UsageError, match="Did you mean needle"):
        prepare(RESULTS["vatp/fig3"], ["dataset=tiny/nedle", f"results={tmp_path}"])


def test_end_to_end_and_again_without_measuring(tmp_path, capsys, request):
    line = ["plot", "vatp/fig3", "length=128", "limit=1", f"results={tmp_path}", "--json"]
    assert main(line) == 0
    (first,) = json.loads(capsys.readouterr().out)
    pictures = {p: Path(p).read_bytes() for p in first["files"]}
    request.getfixturevalue("no_weights")
    assert main([*line, "--stored"]) == 0
    assert json.loads(capsys.readouterr().out) == [first]
    assert {p: Path(p).read_bytes() for p in first["files"]} == pictures
    text = next(p for p in first["files"] if p.endswith(".csv"))
    message = Path(text).read_text()
    assert "# examples: 1 of each task" in message and "preset vatp" in message


def test_own_methods_in_place_of_the_figures(tmp_path, capsys):
    line = ["plot", "results/budget", "method=snapkv,think", "kv_size=40,64", "dataset=tiny/needle", *TINY]
    assert main([*line, f"results={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    assert "; think ratio=0.4 100.0 at 100." in printed and "\npaper:" not in printed and "\nopen:" not in printed
    stem = tmp_path / "own" / "tiny" / "figures" / "results" / "budget"
    text = stem.with_suffix(".csv").read_text()
    assert "# methods: snapkv kv_size=40, snapkv kv_size=64, think ratio=0.4\n" in text
    data = RESULTS["results/budget"].parse(text)
    own = data[data["series"] != "full"]
    assert list(own["series"]) == ["snapkv", "snapkv", "think ratio=0.4"]
    np.testing.assert_allclose(own["x"], own["kept"], rtol=0.05)
    assert own["x"].iloc[0] < own["x"].iloc[1] < own["x"].iloc[2] == 100
    assert not (tmp_path / "tiny").exists()
    assert main(["plot", "--from-csv", f"{stem}.csv", f"results={tmp_path / 'again'}"]) == 0
    assert "\npaper:" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("several", "names"),
    [(False, ["snapkv kv_size=40", "snapkv kv_size=64", "h2o"]), (True, ["snapkv", "snapkv", "h2o"])],
)
def test_a_map_has_one_budget_and_a_line_has_all(several, names):
    labels = ["snapkv kv_size=40", "snapkv kv_size=64", "h2o kv_size=40"]
    assert [p.series for p in measured._make_own_points(labels, several)] == names

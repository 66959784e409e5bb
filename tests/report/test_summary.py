"""The numbers of a table by hand: what samples come to, the difference to the full cache, and how both are printed."""

from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
from support.stored import sample

from kvbench.base.example import Example
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.resolve import chain_of
from kvbench.plan.cells import Group
from kvbench.report import render, verdict
from kvbench.report.data import CellResult, Delta
from kvbench.report.notes import note_lengths
from kvbench.report.of_run import collect
from kvbench.report.report import Report
from kvbench.report.summary import shown_delta, summarise
from kvbench.store.cell import Cell
from kvbench.store.results import Sample, Status
from kvbench.store.turns import TurnAnswer
from kvbench.tasks.base import Task
from kvbench.tasks.metrics import metric
from kvbench.tasks.metrics.stats import mean_over_tasks, paired_difference


def fake_store(samples):
    """A store with these samples by cell, where nothing is refused, damaged or failed."""
    nothing = {name: lambda i: None for name in ("refusal", "damage", "status")}
    return SimpleNamespace(samples=samples, root="results", **nothing)


def made(number, score, **more):
    """A stored sample; seconds as (prefill, compress, decode), or with the factor of its batch behind them."""
    seconds = dict(
        zip(("prefill_s", "compress_s", "decode_s", "batch_factor"), more.pop("s", (1.0, 1.0, 1.0)), strict=False)
    )
    bytes_16 = {"payload16": 500.0, "overhead16": 17.0, "full16": 2048.0}
    return Sample.read(sample(number, score=score, timing=seconds, **{**bytes_16, **more}))


def measured(scores, metric_name="f1", of=None, tasks=("tiny/a",), **of_row):
    """A report of rows {method: samples by task}, from groups, cells and a store that hold nothing else."""
    chains = {"full": Chain()} | {m: chain_of({"method": m}) for m in scores if m != "full"}
    groups, kept = [], {}
    for place, name in enumerate(tasks):
        ids = list(dict.fromkeys(s.id for row in scores.values() for s in row[place]))
        examples = tuple(Example(i, "p", ("a",), 5) for i in ids)
        extra = tuple(Example(f"more{i}", "p", ("a",), 5) for i in range((of or len(ids)) - len(ids)))
        task = Task(name, (*examples, *extra), metric_name, "a test")
        cells = []
        for method, row in scores.items():
            label = {} if method == "full" else {"label": method}
            identity = {"task": name, "chain": {**chains[method].identity(), **label}}
            cells.append(Cell(identity, chains[method], method, task, name))
            kept[cells[-1].id] = {s.id: s for s in row[place]}
        groups.append(Group(task, name, tuple(cells), examples))
    store = SimpleNamespace(
        samples=lambda i: kept.get(i, {}),
        refusal=lambda i: None,
        damage=lambda i: None,
        status=lambda i: Status("done", len(kept.get(i, {})), None),
    )
    return Report(model="", settings="", results="results", **vars(collect(groups, store)))


def rows_of(report):
    return {row.method: row for row in report.rows}


FULL = [1.0, 0.5, 0.0, 1.0, 0.5, 0.0, 1.0, 0.5]
BETTER = [1.0, 1.0, 0.5, 1.0, 1.0, 0.5, 1.0, 1.0]


def of_scores(scores):
    return [[made(i, x) for i, x in enumerate(scores)]]


def test_the_difference_to_the_full_cache_is_ours_minus_full_in_points():
    report = measured({"full": of_scores(FULL), "snapkv": of_scores(BETTER), "h2o": of_scores(FULL[:4] + [0.0] * 4)})
    rows = rows_of(report)
    better, worse = rows["snapkv"].cells[0].delta, rows["h2o"].cells[0].delta
    assert (better.mean, worse.mean) == (pytest.approx(31.25), pytest.approx(-25.0))  # 2.5 and -2 of 8
    assert rows["full"].cells[0].delta is None
    low, high = paired_difference(BETTER, FULL)[1]
    assert better.ci == pytest.approx((100 * low, 100 * high)) and 0 < better.ci[0] < 31.25 < better.ci[1] < 60
    assert worse.ci[0] < -25 < worse.ci[1]
    scores = {method: row.cells[0].summary.score for method, row in rows.items()}
    assert scores == {"full": 56.25, "snapkv": 87.5, "h2o": 31.25}
    lines = {method: render._write_score(row.cells[0], render.EVERYTHING).split("\n") for method, row in rows.items()}
    assert lines["snapkv"][0] == "87.5" and lines["snapkv"][2] == "Δ +31.3*"
    assert lines["h2o"][0] == "31.3" and lines["h2o"][2] in ("Δ −25.0", "Δ −25.0*") and len(lines["full"]) == 2
    record = {r["method"]: r for r in render.list_records(report)}
    assert (record["snapkv"]["delta"], record["h2o"]["delta"]) == (better.mean, worse.mean)
    assert (record["snapkv"]["delta_ci_low"], record["snapkv"]["delta_ci_high"]) == better.ci
    assert (record["snapkv"]["ci_low"], record["snapkv"]["ci_high"]) == rows["snapkv"].cells[0].summary.ci


def test_equal_differences_have_the_interval_of_equal_draws():
    report = measured({"full": of_scores([0.25] * 8), "snapkv": of_scores([0.5] * 8)})
    (cell,) = rows_of(report)["snapkv"].cells
    q = 0.025 ** (1 / 8)  # the share that eight equal draws cannot exclude; the others are -1 or 1
    assert cell.delta.mean == pytest.approx(25)
    assert cell.delta.ci == pytest.approx((100 * (q * 0.25 - (1 - q)), 100 * (q * 0.25 + 1 - q)))


def test_only_examples_that_both_answered_are_compared_and_fewer_than_eight_have_no_interval():
    full = [[made(i, 0.0) for i in range(8)]]
    ours = [[made(i, 1.0) for i in range(1, 8)] + [made(99, 0.0)]]
    (cell,) = rows_of(measured({"full": full, "snapkv": ours}))["snapkv"].cells
    assert (cell.delta.mean, cell.delta.ci) == (100, None) and cell.summary.score == 87.5
    unscored = [[made(0, None), *(made(i, 0.5) for i in range(1, 8))]]
    (cell,) = rows_of(measured({"full": full, "snapkv": unscored}))["snapkv"].cells
    assert (cell.delta.mean, cell.delta.ci) == (50, None)
    assert (cell.summary.unscored, cell.summary.score, cell.summary.n) == (1, 50, 8)
    assert rows_of(measured({"full": [[made(0, None)]], "snapkv": [[made(0, 1.0)]]}))["snapkv"].cells[0].delta is None


@pytest.mark.parametrize(
    ("mean", "ci", "printed"),
    [
        (12.34, (1.0, 20.0), "Δ +12.3*"),
        (-12.34, (-20.0, -1.0), "Δ −12.3*"),
        (12.34, (-1.0, 20.0), "Δ +12.3"),
        (-0.5, (-1.0, 0.0), "Δ −0.5"),
        (3.0, None, "Δ +3.0"),
    ],
)
def test_a_difference_has_its_sign_and_a_star_where_its_interval_excludes_0(mean, ci, printed):
    summary = summarise([made(0, 0.5)], "f1", 1)
    cell = CellResult("tiny/a", "id", "measured", summary=summary, delta=Delta(mean, ci))
    assert render._write_score(cell, render.EVERYTHING) == f"50.0\n{printed}"
    # without intervals, the star alone says that there is a difference
    assert render._write_score(cell, render.Detail()) == ("50.0*" if printed.endswith("*") else "50.0")
    assert render._write_delta(cell.delta, render.Detail()) == printed.removeprefix("Δ ")


def test_perplexities_are_compared_as_they_are_shown():
    show = metric("perplexity").show
    pairs = [(2.0 + 0.1 * (i % 3), 1.0) for i in range(9)]
    delta = shown_delta(pairs, show)
    mean = sum(a for a, _ in pairs) / 9
    assert delta.mean == pytest.approx(show(mean) - show(1.0)) and delta.mean > 5
    assert delta.ci[0] < delta.mean < delta.ci[1]


def test_means_of_a_cell_by_hand():
    one = made(
        1,
        0.25,
        s=(2.0, 0.5, 0.6),
        new_tokens=3,
        n=100,
        kept=20.0,
        nominal=16,
        payload=400.0,
        overhead=40.0,
        payload_kv_head=400.0,
        payload_query_head=800.0,
        payload16=200.0,
        overhead16=20.0,
        full16=1000.0,
        full_bytes=2000.0,
        decode_peak=23,
        cut=7,
        shrunk=True,
        attended=10.0,
    )
    two = made(
        2,
        0.75,
        s=(4.0, 1.5, 2.0),
        new_tokens=5,
        n=300,
        kept=80.0,
        nominal=64,
        payload=800.0,
        overhead=80.0,
        payload_kv_head=None,
        payload_query_head=1600.0,
        payload16=400.0,
        overhead16=40.0,
        full16=3000.0,
        full_bytes=6000.0,
        decode_peak=85,
        cut=0,
        shrunk=False,
        attended=None,
    )
    s = summarise([one, two], "f1", 7)
    assert (s.n, s.of, s.unscored, s.score, s.ci) == (2, 7, 0, 50, None)
    assert (s.prompt_tokens, s.kept, s.nominal, s.new_tokens) == (200, 50, 40, 4)
    assert (s.payload, s.overhead, s.full_bytes) == (600, 60, 4000)
    assert (s.payload_kv_head, s.payload_query_head) == (None, 1200)
    assert (s.payload16, s.overhead16, s.full16) == (300, 30, 2000)
    assert s.percent_of_full == pytest.approx(100 * 330 / 2000)
    assert (s.decode_peak, s.cut, s.shrunk, s.attended) == (85, 1, 1, 10)
    assert (s.timing.prefill_s, s.timing.compress_s) == (3.0, 1.0)
    # 2.6 s for 8 tokens: not 1.3 s for each of two answers, nor the mean of 0.2 and 0.4
    assert s.timing.decode_s_per_token == pytest.approx(0.325)


def test_scores_by_length_are_means_of_what_is_scored():
    some = [made(i, x, meta={"bucket": b}) for i, (x, b) in enumerate([(1.0, "0-4k"), (None, "0-4k"), (0.5, "4-8k")])]
    buckets = summarise(some, "f1", 3).buckets
    assert {name: (b.n, b.score) for name, b in buckets.items()} == {"0-4k": (2, 100), "4-8k": (1, 50)}


def test_intervals_of_a_score_are_in_points_and_in_order():
    s = summarise([made(i, x) for i, x in enumerate(FULL)], "f1", 8)
    assert 0 <= s.ci[0] < s.score == 56.25 < s.ci[1] <= 100 and s.ci[1] - s.ci[0] > 20
    text = render._write_score(CellResult("a", "id", "measured", summary=s), render.EVERYTHING)
    assert text == f"56.3\n[{s.ci[0]:.1f}, {s.ci[1]:.1f}]"


def row_samples():
    """Two samples of one task and six of another, so that means over cells and over prompts differ."""
    short = [
        made(
            i,
            0.5,
            n=100,
            kept=50.0,
            nominal=50,
            payload=1000.0,
            overhead=100.0,
            payload_kv_head=1000.0,
            payload_query_head=2000.0,
            payload16=500.0,
            overhead16=100.0,
            full16=1000.0,
            s=(1.0, 0.1, 0.2),
            new_tokens=2,
            attended=25.0,
            decode_peak=60,
        )
        for i in range(2)
    ]
    long = [
        made(
            i,
            1.0,
            n=500,
            kept=100.0,
            nominal=110,
            payload=3000.0,
            overhead=300.0,
            payload_kv_head=3000.0,
            payload_query_head=6000.0,
            payload16=1500.0,
            overhead16=300.0,
            full16=5000.0,
            s=(5.0, 0.5, 2.4),
            new_tokens=6,
            attended=75.0,
            decode_peak=130,
        )
        for i in range(6)
    ]
    return [short, long]


def test_means_of_a_row_weigh_cells_by_their_prompts():
    rows = rows_of(measured({"full": row_samples(), "snapkv": row_samples()}, tasks=("tiny/a", "tiny/b")))
    means = rows["snapkv"].means
    assert means.score_mean == 75  # of tasks, each alike
    assert means.kept_percent == pytest.approx(100 * (2 * 50 + 6 * 100) / (2 * 100 + 6 * 500))
    assert means.nominal_percent == pytest.approx(100 * (2 * 50 + 6 * 110) / 3200)
    assert means.attended_percent == pytest.approx(100 * (2 * 25 + 6 * 75) / 3200)
    assert (means.payload, means.overhead) == (2500, 250)
    assert (means.payload_kv_head, means.payload_query_head) == (2500, 5000)
    assert means.percent_of_full == pytest.approx(100 * (1250 + 250) / 4000)
    assert means.payload_percent_of_full == pytest.approx(100 * 1250 / 4000)
    assert (means.prefill_ms, means.compress_ms) == (pytest.approx(4000), pytest.approx(400))
    # 0.1 s a token of the short answers, 0.4 s of the long ones
    assert means.decode_ms_per_token == pytest.approx(1000 * (2 * 0.1 + 6 * 0.4) / 8)


def test_a_row_is_printed_with_its_means_under_their_heads():
    report = measured({"full": row_samples(), "snapkv": row_samples()}, tasks=("tiny/a", "tiny/b"))
    means = rows_of(report)["snapkv"].means
    cells = dict(zip(render.STORAGE, render._write_storage(means, evicts=False), strict=True))
    assert cells == {
        "kept\n%": "21.9\nasked 23.8",
        render.ATTENDED: "15.6",
        "payload": "2.4 KiB",
        "overhead": "250 B",
        render.SHARE: "37.5",
        "prefill\nms": "4000.0",
    }
    scores, storage = render.build_tables(report, render.Detail(notes=True))[1:]
    shown = dict(zip(scores.headers, scores.rows[1], strict=True))
    assert (shown["mean"], shown["Δ"], shown["size"]) == ("75.0", "+0.0", "1.5 KiB")
    assert storage.rows[1][-1] == "4000.0" and storage.headers[-1] == "prefill\nms"
    assert len(render.build_tables(report)) == 2  # storage is shown where it is asked for


def test_notes_of_a_report_by_hand():
    some, more = ([[made(i, 0.0, s=(1.0, 1.0, 1.0, factor + i)) for i in range(2)]] for factor in (1.2, 0.7))
    report = measured({"full": some, "snapkv": more}, of=5)
    (batches,) = (note for note in report.remarks if "a batch took" in note)
    assert "a batch took 1.2 to 1.7 times" in batches  # the means of cells
    assert not any("a batch took" in n for n in measured({"full": [[made(0, 1.0, s=(1, 1, 1, 1.04))]]}).remarks)
    assert "a batch took" not in render.render_report(report)
    assert "a batch took" in render.render_report(report, detail=render.EVERYTHING)
    first, second = render.write_header(report)
    assert first.startswith("! n = 2 a task: a smoke test") and second.endswith("n = 2 of 5 examples a task.")
    few = {"full": of_scores(FULL), "snapkv": of_scores(FULL[:4])}
    first, second = render.write_header(measured(few))
    assert first.startswith("! n = 4 a task") and second.endswith("n = all 8 or 4 of 8 examples a task.")
    cut = [[made(i, 1.0, cut=3 * (i < 2), shrunk=i < 1) for i in range(8)]]
    report = measured({"full": cut, "snapkv": of_scores(FULL)})
    assert render.write_header(report) == ["; n = all 8 examples a task."]
    assert "Up to 1 prompts of a task were given a budget" in "\n".join(render.write_legend(report))
    cuts = "Up to 2 prompts of a task were cut"
    assert cuts not in "\n".join(render.write_legend(report)) and cuts in "\n".join(
        render.write_legend(report, render.EVERYTHING)
    )


def verdict_texts(cells, **more):
    """The verdict on each method as one line of words."""
    return [" ".join(filter(None, v.texts())) for v in verdict.judge_methods(measured(cells, **more))]


def test_a_verdict_says_what_is_saved_and_what_is_lost():
    worse = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    rows = {"full": of_scores(FULL), "snapkv": of_scores(BETTER), "h2o": of_scores(worse), "tova": of_scores(FULL)}
    better, lost, same = verdict_texts(rows)
    assert better.startswith("snapkv same size 25.3 % of tokens 87.5 of 56.3 +31.3 [")
    assert better.endswith("] better than full")
    assert lost.startswith("h2o same size 25.3 % of tokens 0.0 of 56.3 −56.3 [−") and lost.endswith("] worse than full")
    assert same.startswith("tova same size 25.3 % of tokens 56.3 of 56.3 +0.0 [") and same.endswith("] not told apart")
    few = {"full": of_scores(FULL[:4]), "snapkv": of_scores(BETTER[:4])}
    assert verdict_texts(few)[0].endswith("too few examples to compare")
    assert verdict_texts({"snapkv": of_scores(FULL)})[0].endswith("56.3 no full cache to compare with")


def test_a_verdict_names_up_to_three_tasks_and_counts_more():
    one_task, other = of_scores(FULL)[0], of_scores([1.0] * 8)[0]
    zero = of_scores([0.0] * 8)[0]

    def outcome(*ours):
        names = tuple(f"tiny/{name}" for name in "abcdef"[: len(ours)])
        cells = {"full": [other] * len(ours), "snapkv": list(ours)}
        return verdict.judge_methods(measured(cells, tasks=names))[0].outcome

    assert outcome(zero, one_task, other).startswith("worse on a")
    assert outcome(zero, zero) == "worse on all 2"
    assert outcome(zero, zero, zero, zero, other) == "worse on 4 of 5 tasks"


@pytest.mark.parametrize(
    ("statuses", "outcome"),
    [
        (["refused"], "✗ refused"),
        (["failed", "measured", "failed"], "✗ failed in 2 of 3 tasks"),
        (["refused", "failed", "refused"], "✗ refused in 2, failed in 1 of 3 tasks"),
    ],
)
def test_a_verdict_tells_refused_tasks_from_failed_ones(statuses, outcome):
    tasks = tuple(f"tiny/{i}" for i in range(len(statuses)))
    cells = of_scores(FULL) * len(statuses)
    report = measured({"full": cells, "snapkv": cells}, tasks=tasks)
    full, own = report.rows
    own_cells = tuple(CellResult(task, "", status) for task, status in zip(tasks, statuses, strict=True))
    report = replace(report, rows=(full, replace(own, cells=own_cells, means=None)))
    assert verdict.judge_methods(report)[0].outcome == outcome


def test_a_row_without_tasks_has_no_divergence_and_no_verdict():
    report = measured({"full": of_scores(FULL), "snapkv": of_scores(FULL)})
    rows = tuple(replace(row, cells=(), means=None) for row in report.rows)
    without_tasks = replace(report, columns=(), rows=rows)
    (judged,) = verdict.judge_methods(without_tasks)
    assert judged.divergence is None and judged.outcome == ""
    assert verdict.build_table(without_tasks) is None


@pytest.mark.parametrize(
    ("times", "words"), [(4.64, "4.6x smaller"), (1.02, "same size"), (0.98, "same size"), (0.5, "2.0x larger")]
)
def test_a_size_in_words(times, words):
    assert verdict.describe_size(times) == words


@pytest.mark.parametrize(
    ("kept", "words"),
    [(12.5, "12.5 % of tokens"), (25.0, "25 % of tokens"), (1.25, "1.3 % of tokens"), (99.7, "99.7 % of tokens")]
    + [(99.97, "all tokens"), (100.0, "all tokens")],
)
def test_kept_tokens_in_words(kept, words):
    assert verdict.describe_tokens(kept) == words


def test_options_stand_beside_a_method_where_rows_differ_in_them():
    labels = ["snapkv kv_ratio=0.5 window=8", "snapkv kv_ratio=0.25 window=8", "h2o kv_ratio=0.5"]
    assert verdict._shorten(labels) == ["snapkv kv_ratio=0.5", "snapkv kv_ratio=0.25", "h2o"]


def test_lengths_of_answers_are_weighed_by_prompts_and_the_most_tokens_held_is_of_all():
    row = rows_of(measured({"full": row_samples()}, tasks=("tiny/a", "tiny/b")))["full"]
    (note,) = note_lengths([row])
    assert note.endswith("full 5.0 (at most 130 held).")  # (2 x 2 + 6 x 6) / 8


@pytest.mark.parametrize(("shown", "stars"), [(9, None), (10, 1), (20, 1), (21, 2), (60, 3)])
def test_stars_by_chance_are_one_in_twenty(shown, stars):
    note = render._note_chance([*[Delta(0.0, (-1.0, 1.0))] * shown, Delta(0.0, None)])
    assert note == ("" if stars is None else f"; of {shown} differences about {stars} would by chance alone")


def test_rows_that_read_their_own_prompts_are_named():
    def timed(*seconds):
        return [[made(i, 1.0, s=(t, 1.0, 1.0)) for i, t in enumerate(seconds)]]

    report = measured({"full": timed(1.0, 2.0), "snapkv": timed(1.0, 2.0), "h2o": timed(1.0, 3.0)})
    assert report.apart == ("h2o",)


def test_only_the_examples_of_this_run_count():
    examples = (Example("e0", "p", ("a",), 5), Example("e1", "p", ("a",), 5))
    task = Task("tiny/a", examples, "f1", "a test")
    cell = Cell({"task": "tiny/a", "chain": Chain().identity()}, Chain(), "full", task, "tiny/a")
    stored = {s.id: s for s in (made(0, 1.0), made(1, 0.0))}
    store = SimpleNamespace(
        samples=lambda i: stored, refusal=lambda i: None, damage=lambda i: None, status=lambda i: None, root="results"
    )
    (row,) = collect([Group(task, "tiny/a", (cell,), examples[:1])], store).rows
    assert (row.cells[0].summary.n, row.cells[0].summary.of, row.cells[0].summary.score) == (1, 2, 100)


def turn(score, held):
    return asdict(TurnAnswer("", score, ("a",), 1, 0.1, held))


def test_questions_of_a_context_by_hand():
    some = [
        made(0, 0.5, payload=1000.0, overhead=100.0, turns=(turn(1.0, 1500), turn(0.0, 1700))),
        made(1, 0.5, payload=3000.0, overhead=300.0, turns=(turn(0.75, 3500), turn(None, 3600), turn(0.25, 3900))),
    ]
    q = summarise(some, "f1", 2).questions
    assert (q.contexts, q.questions, q.pairs) == (2, 5, 2)
    assert [(i.n, i.score) for i in q.by_index] == [(2, 87.5), (1, 0), (1, 25)]
    assert (q.question_mean, q.first, q.last, q.fall, q.fall_ci) == (50, 87.5, 12.5, -75, None)
    assert (q.bytes_compressed, q.bytes_last) == (2200, 2800)


def test_a_fall_is_beside_the_full_caches_fall():
    def contexts(last):
        return [[made(i, 0.5, turns=(turn(1.0, 10), turn(x, 20))) for i, x in enumerate(last)]]

    report = measured({"full": contexts([0.75] * 4 + [0.5] * 4), "snapkv": contexts([0.5, 0.25] * 4)})
    beside = rows_of(report)["snapkv"].cells[0].fall_beside_full
    assert beside.mean == pytest.approx(-25)  # -62.5 beside -37.5
    assert beside.ci[0] < -25 < beside.ci[1] and beside.ci[0] > -75


def test_a_mean_has_its_interval_and_its_paired_difference():
    """Two tasks of eight: no task tells the method from the full cache, and the mean over both does not either."""
    report = measured(
        {"full": [*of_scores(FULL), *of_scores(FULL)], "snapkv": [*of_scores(BETTER), *of_scores(FULL)]},
        tasks=("tiny/a", "tiny/b"),
    )
    rows = rows_of(report)
    full, better = rows["full"].means, rows["snapkv"].means
    assert full.delta is None and full.score_ci[0] < full.score_mean == 56.25 < full.score_ci[1]
    differences = [np.subtract(BETTER, FULL), np.zeros(8)]
    mean, (low, high) = mean_over_tasks(differences, (-1.0, 1.0))
    assert better.delta.mean == pytest.approx(100 * mean) and better.delta.ci == pytest.approx((100 * low, 100 * high))
    assert rows["snapkv"].record()["delta_ci"] == better.delta.ci
    tied = measured({"full": [*of_scores(FULL)] * 2, "snapkv": [*of_scores(FULL)] * 2}, tasks=("tiny/a", "tiny/b"))
    assert rows_of(tied)["snapkv"].means.delta.mean == 0  # equal to the full cache is a difference, too
    (sheet,) = render.build_tables(report, render.Detail(intervals=True))[1:]
    shown = dict(zip(sheet.headers, sheet.rows[1], strict=True))
    assert shown["mean"].splitlines()[0] == "71.9" and shown["Δ"].startswith("+15.6")
    assert shown["Δ"].splitlines()[1] == f"[{low * 100:.1f}, {high * 100:.1f}]".replace("-", "−")


def test_empty_answers_are_counted_and_told():
    samples = [[replace(s, prediction="" if i < 3 else "x") for i, s in enumerate(of_scores(FULL)[0])]]
    report = measured({"full": samples, "snapkv": of_scores(FULL)})
    assert rows_of(report)["full"].cells[0].summary.empty == 3
    assert any("3 of 8 answers of the full cache are empty. min_new_tokens=1" in note for note in report.notes)
    assert not any("are empty" in n for n in measured({"full": of_scores(FULL)}).notes)

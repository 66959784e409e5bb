"""Claims: verdicts against hand-made differences, quotations in the papers' texts, and a ledger on the tiny model."""

import gzip
import io
import json
import re
import shutil
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paper_claims
import pytest
from support.papers_text import text_of

from kvbench.base.errors import KvbenchError, UsageError
from kvbench.cli.main import main
from kvbench.papers.claims import claim_runner, claims, evidence, ledger
from kvbench.papers.claims.claims import (
    CONTRADICTED,
    DIVERGENCE,
    ELSEWHERE,
    FLOOR,
    FRAGILE,
    IN_LINE,
    LEVEL,
    LIKELIHOOD,
    MIXED,
    NO_DIFFERENCE,
    NOT_DECIDABLE,
    NOT_REPRODUCED,
    SUPPORTED,
    UNDECIDED,
    Claim,
    Evidence,
    decide,
)
from kvbench.papers.measured import plan
from kvbench.papers.report import tables
from kvbench.papers.spec.row_knobs import run_arguments
from kvbench.report import writers
from kvbench.tasks.metrics import stats

pytestmark = pytest.mark.e2e("measures claims end to end")


def claim(test="better", margin=1.0, name="c"):
    return Claim("think", name, "quote", "where", "tested", test, (("a", "b"),), margin)


def shown(found, possible=10_000, **more):
    """Evidence of differences in points by task; of several settings where they are lists of lists."""
    each = {task: np.array(d, dtype=float).reshape(len(d), -1) / 100 for task, d in found.items()}
    return Evidence(each, possible=possible, **more)


def verdict(found, other=None, **kwargs):
    tested = claim(**kwargs)
    others = None if other is None else {tested.id: shown(other)}
    return decide([tested], {tested.id: shown(found)}, others)[0]


def test_a_clear_difference_supports_and_its_opposite_contradicts():
    up, down = {"t": [50.0] * 40}, {"t": [-50.0] * 40}
    assert verdict(up).verdict == SUPPORTED
    assert verdict(down).verdict == CONTRADICTED
    assert verdict(up).mean == 50.0
    low, high = verdict(up).ci
    assert (low, high) == pytest.approx([100 * x for x in stats.mean_interval([0.5] * 40, (-1.0, 1.0))])


def test_pairs_without_a_difference_exclude_a_loss_only_by_their_number():
    """One prompt of a hundred that loses everything costs a point: 40 pairs meet none of them two times in three."""
    few, many = {"t": [0.0] * 40}, {"t": [0.0] * 600}
    assert verdict(few, test="no_worse").verdict == UNDECIDED
    assert verdict(many, test="no_worse").verdict == SUPPORTED
    assert verdict({"t": [-20.0] * 60}, test="no_worse").verdict == CONTRADICTED


def test_a_claimed_gain_that_is_next_to_nothing_is_decided_too():
    """The whole difference lies within a point of 0; of too few pairs, or of a gain that may be larger, it is open."""
    rng = np.random.default_rng(0)
    small = list(rng.normal(0.05, 2.0, 900))
    assert verdict({"t": small}).verdict == NO_DIFFERENCE and verdict({"t": small}).p_same < LEVEL / 2
    assert verdict({"t": [0.0] * 900}).verdict == NO_DIFFERENCE
    assert verdict({"t": [0.0] * 40}).verdict == UNDECIDED
    assert verdict({"t": small[:100]}).verdict == UNDECIDED
    # of divergences 10 % is next to nothing
    tested = claim()
    spread = rng.normal(0.0, 20.0, 100)
    close = {tested.id: shown({"t": list(spread - spread.mean() + 1.0)})}
    assert decide([tested], close)[0].verdict == UNDECIDED
    assert decide([tested], close, measure=DIVERGENCE)[0].verdict == NO_DIFFERENCE
    # a claim of losing nothing has no such verdict
    assert verdict({"t": small}, test="no_worse").verdict == SUPPORTED


def test_an_open_claim_says_how_many_pairs_would_decide():
    """A tenth of the spread needs ((2.13 + 0.84) * 10)^2 pairs, at the level of one claim."""
    values = np.array([-1.0, 1.0] * 20)
    d = 50 * (values - values.mean()) / values.std(ddof=1) + 5.0
    found = verdict({"t": list(d)})
    assert found.verdict == UNDECIDED and found.needs == pytest.approx(882, abs=2)
    assert verdict({"t": [50.0] * 40}).needs is None  # decided
    assert verdict({"t": [0.0] * 40}).needs is None  # nothing is seen that could be
    # signs of 3 pairs cannot decide, however clear: the lowest p is 2^-3, and 0.0167 needs 2^-6
    assert verdict({"t": [50.0, 51.0, 52.0]}).needs == 6


def test_the_first_measure_that_decides_a_claim_decides_it():
    tested = claim()
    words = {"points": UNDECIDED, "likelihood": IN_LINE, "divergence": NOT_REPRODUCED}
    verdicts = {m: claims.Verdict(tested, word) for m, word in words.items()}
    assert claims.choose_deciding_measure(verdicts) == "likelihood"
    assert claims.choose_deciding_measure({**verdicts, "points": claims.Verdict(tested, NO_DIFFERENCE)}) == "points"
    assert claims.choose_deciding_measure({m: claims.Verdict(tested, UNDECIDED) for m in words}) == "points"
    floored = {**verdicts, "points": claims.Verdict(tested, FLOOR), "likelihood": claims.Verdict(tested, UNDECIDED)}
    assert claims.choose_deciding_measure({**floored, "divergence": claims.Verdict(tested, UNDECIDED)}) == "likelihood"


def test_what_the_data_cannot_decide_is_told_apart_from_what_is_open():
    tested = claim("no_worse")
    evidence = {tested.id: shown({"t": [0.0] * 40}, possible=100)}
    few = decide([tested], evidence)[0]
    # the best result is that nothing is lost: 220 pairs of it have a p above a third of the level, 230 one below it
    assert few.verdict == NOT_DECIDABLE and few.needs == 230
    assert stats.p_above(np.zeros(230), -0.01) < LEVEL / 3 < stats.p_above(np.zeros(220), -0.01)
    evidence = {tested.id: shown({"t": [0.0] * 40}, possible=600)}
    assert decide([tested], evidence)[0].verdict == UNDECIDED
    of_many = decide([tested], evidence, family=600)[0]
    assert of_many.verdict == NOT_DECIDABLE and of_many.needs is None


def test_a_verdict_that_a_task_or_a_setting_does_not_share_is_mixed():
    assert verdict({"a": [50.0] * 60, "b": [-30.0, -40.0] * 5}).verdict == MIXED
    # a mean of a few examples lies on the other side by chance
    assert verdict({"a": [50.0] * 60, "b": [-1.0, 1.0, -2.0, 1.0, -3.0, 2.0, 1.0, -1.0]}).verdict == SUPPORTED
    assert verdict({"a": [50.0] * 60, "b": [-1.0] * 4}).verdict == SUPPORTED
    assert verdict({"a": [50.0] * 60, "b": [0.0] * 10}).verdict == SUPPORTED
    assert verdict({"a": [[80.0, -5.0], [80.0, -7.0]] * 60}).verdict == MIXED
    # of no worse the margin decides the side of a task
    assert verdict({"a": [0.0] * 900, "b": [-0.5] * 90}, test="no_worse").verdict == SUPPORTED


def test_a_verdict_that_another_scaling_does_not_share_is_fragile():
    up = {"t": [50.0] * 40}
    assert verdict(up, other={"t": [-3.0] * 10}).verdict == FRAGILE
    assert verdict(up, other={"t": [3.0] * 10}).verdict == SUPPORTED
    assert verdict(up, other={"t": [-3.0] * 10}).mean_unscaled == pytest.approx(-3)


def test_one_example_asked_in_three_ways_is_one_pair(tmp_path):
    """MDQA asks each question with the answer in three places: three equal pairs rejected a true null too often."""
    numbers = SimpleNamespace(read=lambda measure, group, cell: cell)
    group = SimpleNamespace(
        examples=[SimpleNamespace(id="a"), SimpleNamespace(id="b")], task=SimpleNamespace(metric="f1")
    )
    sides = ({"a": 1.0, "b": 0.5}, {"a": 0.5, "b": 0.5}), ({"a": 0.0}, {"a": 1.0})
    actual = evidence.pair_differences(numbers, [evidence.Comparison(group, (pair,)) for pair in sides], claims.POINTS)
    assert actual.tolist() == [[-0.25], [0.0]]


def test_divergences_are_compared_even_where_both_are_zero():
    assert evidence.compare_nearness(0.0, 0.0) == 0
    assert evidence.compare_nearness(0.0, 0.5) > 0 > evidence.compare_nearness(0.5, 0.0)


def test_only_points_support_or_contradict_a_claim():
    tested = claim()
    up, down = ({tested.id: shown({"t": [d] * 40})} for d in (50.0, -50.0))
    for measure in (LIKELIHOOD, DIVERGENCE):
        assert decide([tested], up, measure=measure)[0].verdict == IN_LINE
        assert decide([tested], down, measure=measure)[0].verdict == NOT_REPRODUCED
        split = {tested.id: shown({"a": [50.0] * 60, "b": [-30.0, -40.0] * 5})}
        assert decide([tested], split, measure=measure)[0].side == IN_LINE


def read_divergences(path):
    """Return the divergences of a file of committed samples by row and example."""
    labels, found = {}, {}
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            if "cell" in record:
                labels[record["cell"]["id"]] = record["cell"]["label"].removesuffix(" per=query_head")
            elif (record["sample"].get("fidelity") or {}).get("greedy"):
                text = record["sample"]["fidelity"]["greedy"]
                row = found.setdefault(labels[record["of"]], {})
                row[record["sample"]["id"]] = max(float(np.mean(text["kl"])), text["floor"])
    return found


def test_rows_that_are_known_to_be_worse_do_not_lose_nothing():
    """A margin of 0.1 nats was two thirds of SnapKV's whole loss: fewer tokens, and channels by norms, passed it."""
    folder = Path(__file__).parents[2] / "results" / "samples"
    worse = (*(f"snapkv+{norm} kv_size=512 ratio=0.4 rounding=code" for norm in ("l1", "l2")), "snapkv kv_size=416")
    pairs = [(first, "snapkv kv_size=512") for first in worse]
    pairs.append(("think+kivi ratio=0.4 residual=32", "kivi residual=32"))
    tested = [claim("no_worse", name=first) for first, _ in pairs]
    differences = {c.id: {} for c in tested}
    for path in sorted(folder.glob("think.longbench_mini.*.samples.jsonl.gz")):
        rows = read_divergences(path)
        for first, second in pairs:
            if first in rows:
                both = [(own, rows[second][name]) for name, own in rows[first].items()]
                differences[first][path.name] = 100 * np.array([evidence.compare_nearness(*two) for two in both])
    found = {name: shown(some, possible=100) for name, some in differences.items()}
    verdicts = decide(tested, found, family=32, measure=DIVERGENCE, measures=3)
    assert [len(v.evidence.values) >= 90 for v in verdicts] == [True] * 4
    assert [v.verdict == IN_LINE for v in verdicts] == [False, False, False, True]
    assert all(v.mean < -10 for v in verdicts[:3])


def test_a_claim_that_is_not_measured_is_none_on_which_the_model_fails():
    tested = claim()
    waiting = Evidence(floors=("t",), waiting=("u",), reason="u: not measured yet")
    assert decide([tested], {tested.id: waiting})[0].verdict == "not measured yet"


def test_two_settings_of_one_example_count_as_one_pair():
    """Both read the same prompt: as if they were two, chance would be counted twice."""
    one, two = {"t": [5.0] * 40}, {"t": [[5.0, 5.0]] * 40}
    assert verdict(one).p_for == verdict(two).p_for


def test_three_hypotheses_share_the_level():
    """For, against and no difference are corrected apart, so each has a third: half of it each made 7.5 %."""
    # 8 of 9 equal differences on one side: p is 10 in 2^9, between a third and a half of the level
    found = verdict({"t": [50.0] * 8 + [-50.0]})
    assert LEVEL / 3 < found.p_for < LEVEL / 2 and found.verdict == UNDECIDED


def test_a_ledger_errs_in_five_of_a_hundred_at_most_both_ways_together():
    tested = [claim(name=str(i)) for i in range(8)]
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(100):
        evidence = {c.id: shown({"t": rng.choice([-60.0, 60.0], 30)}) for c in tested}
        wrong += any(v.verdict != UNDECIDED for v in decide(tested, evidence))
    assert wrong / 100 <= LEVEL


def test_the_ledger_is_corrected_for_all_of_its_claims():
    tested = claim()
    evidence = {tested.id: shown({"t": [100.0] * 7})}
    one, of_many = decide([tested], evidence)[0], decide([tested], evidence, family=10)[0]
    assert of_many.p_for == pytest.approx(10 * one.p_for)
    assert (one.verdict, of_many.verdict) == (SUPPORTED, UNDECIDED)


def test_a_side_that_cannot_run_is_not_testable_and_says_why():
    tested = claim()
    actual = decide([tested], {tested.id: Evidence(reason="needs 32 layers")})[0]
    assert (actual.verdict, actual.reason) == (ELSEWHERE, "needs 32 layers")
    assert decide([tested], {tested.id: Evidence(floors=("t",))})[0].verdict == FLOOR


def test_an_unknown_test_is_refused():
    with pytest.raises(KvbenchError, match="no_worse"):
        claim(test="nicer")


@pytest.mark.parametrize("paper", claims.papers_with_claims())
def test_the_claims_of_every_paper_load_and_name_rows_that_parse(paper):
    loaded = claims.load(paper)
    assert loaded
    assert len({c.id for c in loaded}) == len(loaded)
    for table in claims.make_tables_of_sides(loaded, scaled=True):
        for row in table.rows:
            run_arguments(row.method, row.setting)


def test_claims_on_the_same_datasets_share_a_table_whatever_their_order():
    first, second = (("h2o budget=0.2", "full"),), (("h2o budget=0.5", "full"),)
    given = {"paper": "qhitter", "quote": "", "where": "", "tested": "", "test": "better"}
    on_two = Claim(id="a", pairs=first, datasets=("xsum", "mdqa"), **given)
    reversed_order = Claim(id="b", pairs=second, datasets=("mdqa", "xsum"), **given)
    (shared,) = claims.make_tables_of_sides([on_two, reversed_order])
    assert [column.dataset for column in shared.scores] == ["xsum", "mdqa"]
    assert {row.name for row in shared.rows} == {"h2o budget=0.2", "full", "h2o budget=0.5"}


def plainly(text):
    return " ".join(re.sub(r"[*$]", "", text).split())


@pytest.mark.parametrize("paper", claims.papers_with_claims())
def test_every_claim_stands_in_the_papers_own_words(paper):
    """One claim was in no paper, three said what theirs do not; the texts belong to the papers and are not here."""
    text = plainly(text_of(paper))
    missing = [c.id for c in claims.load(paper) if plainly(c.quote) not in text]
    assert not missing


def test_budgets_by_dataset_are_those_of_the_paper():
    """Section 5.2 of Q-Hitter: 5, 2.5 and 2 times fewer tokens; all three ran at a fifth."""
    (three, _) = (t for t in claims.make_tables_of_sides(claims.load("qhitter")))
    ours = plan.prepare(three, "tiny", ["limit=1"])
    line = next(x for x in ours.lines if x.name == "qhitter bits=4")
    stages = {d: line.chains.get(d, line.chain).stages[0] for d in ("xsum", "cnn_dailymail", "mdqa")}
    assert (stages["xsum"].heavy_ratio, stages["xsum"].recent_ratio) == (0.15, 0.05)
    assert (stages["cnn_dailymail"].kv_ratio, stages["mdqa"].kv_ratio) == (0.4, 0.5)
    assert stages["mdqa"].heavy_ratio is None
    full = next(x for x in ours.lines if x.method == "full")
    assert "mdqa" not in full.chains


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Measure ``claims vatp`` with one example a task. Return (its results, its JSON)."""
    folder = tmp_path_factory.mktemp("vatp")
    with redirect_stdout(io.StringIO()) as out:
        assert main(["claims", "vatp", "limit=1", f"results={folder}", "--measure", "--json"]) == 0
    return folder, out.getvalue()


@pytest.fixture
def results(measured, tmp_path):
    """A copy of the results, in which a test may write."""
    return shutil.copytree(measured[0], tmp_path / "measured")


def test_the_ledger_end_to_end(measured, results, monkeypatch):
    content, tmp_path = json.loads(measured[1]), results
    actual = {v["id"]: v for v in content["verdicts"]}
    assert set(actual) == {c.id for c in claims.load("vatp")}
    assert all(set(v["measures"]["points"]["n"].values()) == {1} for v in actual.values())
    h2o = actual["vatp-h2o"]
    assert content["stand_in"] and "h2o+vatp" in h2o["ran"][0] and len(h2o["cells"]) == 12
    assert h2o["measures"]["points"]["elsewhere"] is not None and list(h2o["measures"]) == ["points"]
    assert ledger.read_ledgers(tmp_path) == [] and ledger.read_with_own(tmp_path) == [json.loads(json.dumps(content))]
    monkeypatch.setattr(tables, "build_tables", lambda *a: [])  # test_page.py reads these tables
    assert main(["report", "papers=true", f"results={tmp_path}", f"output={tmp_path / 'r.html'}"]) == 0
    page = (tmp_path / "r.html").read_text()
    assert "tiny, a substitute model" in page and "surpasses H₂O in 12 out of 16 tasks" in page and "h2o+vatp" in page
    ledger.own_path("tiny", tmp_path, ["vatp"]).write_text('{"verdicts": [{"verdict": "supported"}]}')
    with pytest.raises(UsageError, match="run kvbench claims --measure again"):
        ledger.read_with_own(tmp_path)


def test_stored_verdicts_are_shown_without_model_and_data_and_nothing_is_measured(tmp_path, monkeypatch, capsys):
    """The committed verdicts are printed, and their file keeps every byte. A user's own come before them."""
    monkeypatch.delenv("KVBENCH_DATA", raising=False)
    monkeypatch.setenv("KVBENCH_MODELS", str(tmp_path))
    words = ["claims", "vatp", "model=smollm2-135m-q4_1", f"results={tmp_path}"]
    assert main(words) == 2
    again = f"Measure them: kvbench {' '.join(words)} --measure"
    assert f"no verdicts on model=smollm2-135m-q4_1 are stored below {tmp_path}. {again}" in capsys.readouterr().err
    committed = Path(__file__).parents[2] / "results" / "claims" / "smollm2-135m-q4_1.json"
    copied = tmp_path / "claims" / committed.name
    copied.parent.mkdir()
    copied.write_bytes(committed.read_bytes())
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert f"those of {copied}; --measure" in err and "vatp-h2o" in out and "think-h2o" not in out
    assert copied.read_bytes() == committed.read_bytes() and not (tmp_path / "own").exists()
    assert main([*words, "limit=8"]) == 2
    assert "limit=8 is a setting of measurements, and stored verdicts are shown" in capsys.readouterr().err
    assert main([*words, "--measure"]) == 2
    assert "fetch it once: kvbench model fetch smollm2-135m-q4_1" in capsys.readouterr().err
    own = ledger.own_path("smollm2-135m-q4_1", tmp_path, claims.papers_with_claims())
    ledger.write_ledger(content("smollm2-135m-q4_1", decide(claims.load("vatp"), {})), own)
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert f"those of {own}; --measure" in err and "5 not testable here" in out
    assert {path.name for path in tmp_path.iterdir()} == {"claims", "own"}


@pytest.mark.usefixtures("smol")
def test_a_ledger_without_any_measurement_is_an_error_and_not_stored(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("KVBENCH_DATA", raising=False)
    assert main(["claims", "vatp", "model=smollm2-135m-q4_1", f"results={tmp_path}", "--measure"]) == 1
    err = capsys.readouterr().err
    assert "nothing could be measured: " in err and err.count("no data folder is named") == 1
    assert not (tmp_path / "own").exists()


def test_a_users_ledger_replaces_the_committed_one_of_the_same_claims_on_the_page(tmp_path):
    every = claims.load("vatp")
    committed = content("tiny", decide(every, {}))
    own = content("tiny", decide(every, {"vatp-h2o": shown({"t": [50.0] * 80})}))
    other = content("smollm2-135m-q4_1", decide(every, {}))
    ledger.write_ledger(committed, ledger.ledger_path("tiny", tmp_path, claims.papers_with_claims()))
    ledger.write_ledger(other, ledger.ledger_path("smollm2-135m-q4_1", tmp_path, claims.papers_with_claims()))
    ledger.write_ledger(own, ledger.own_path("tiny", tmp_path, claims.papers_with_claims()))
    page = ledger.read_with_own(tmp_path)
    assert [one["model"] for one in page] == ["smollm2-135m-q4_1", "tiny"]
    assert page[1]["verdicts"][0]["verdict"] == "supported"
    assert ledger.read_ledgers(tmp_path)[1]["verdicts"][0]["verdict"] == "not testable here"


def test_a_ledger_is_written_from_its_samples_and_verified(results, tmp_path, monkeypatch, capsys):
    committed = ["--committed", str(tmp_path / "committed")]
    monkeypatch.setattr(claims, "papers_with_claims", lambda: ("vatp",))
    assert paper_claims.main(["--pack", "--results", str(results), *committed]) == 0
    assert paper_claims.main(["--verify", "--model", "tiny", *committed]) == 0
    page = (tmp_path / "committed" / "claims.md").read_text()
    assert page.startswith("- tiny, points: 0 supported · 0 contradicted · 5 undecided\n") and "| ? vatp-h2o" in page
    path = ledger.ledger_path("tiny", tmp_path / "committed", ["vatp"])
    path.write_text(path.read_text().replace('"undecided"', '"supported"', 1))
    assert paper_claims.main(["--verify", "--model", "tiny", *committed]) == 1
    assert "claims/tiny.json differs from its samples" in capsys.readouterr().err


def test_the_committed_ledger_uses_the_papers_words_for_scores_alone():
    """Each measure has a tally of its own, and what no result can decide, or the full cache decides, has no verdict."""
    path = Path(__file__).parents[2] / "results" / "claims" / "smollm2-135m-q4_1.json"
    records = json.loads(path.read_text())["verdicts"]
    assert [line.split(":")[0] for line in ledger.tally_verdicts(records)] == list(claims.MEASURES)
    against_full = 0
    for record in records:
        for measure, numbers in record["measures"].items():
            if measure != claims.POINTS:
                assert not {numbers["verdict"], numbers["side"]} & {SUPPORTED, CONTRADICTED}
            if numbers["verdict"] == NOT_DECIDABLE:
                told = ledger.describe_evidence(record)
                assert f"about {numbers['needs']:,} pairs could decide" in told
        if any(second.startswith("full ") for _, second in record["pairs"]):
            against_full += 1
            assert record["measures"]["divergence"]["verdict"] == ELSEWHERE
    assert against_full == 4


def content(model, verdicts):
    return {**claim_runner.as_plain({}, model, {"points": verdicts}), "stand_in": True, "dtype": "float32"}


@pytest.mark.parametrize("style", ["text", "md", "latex"])
def test_the_ledger_on_the_page(style):
    """Every claim of every paper fits 100 columns with its whole name, and text stands left; two models fit, too."""
    every = [c for paper in claims.papers_with_claims() for c in claims.load(paper)]
    tested = [c for c in every if c.test != "elsewhere"]
    verdicts = decide(every, {c.id: shown({"tiny/multikey": [0.0, -100.0, 50.0]}) for c in tested})
    one = content("tiny", verdicts)
    text = writers.compose([ledger.compare_ledgers([one])], ledger.write_notes(one), style)
    message = text if style != "latex" else text.replace(r"\_", "_")
    assert all(c.id in message for c in every)
    if style == "text":
        assert max(map(len, text.splitlines())) <= 100
    assert f"wrong verdicts on the {len(tested)} claims" in " ".join(text.split())
    both = writers.compose([ledger.compare_ledgers([content("smollm2-135m-q4_1", verdicts), one])], [], "md")
    assert "smollm2-135m-q4_1, a substitute model: points | tiny, a substitute model: points" in both


def test_the_lines_of_a_ledger_begin_with_its_tally():
    """One line a claim: mark, id, difference, n and verdict; 100 columns; a statement below it; few n are a preview."""
    every = claims.load("vatp") + claims.load("think")
    found = {c.id: shown({"t": [0.0, -100.0, 50.0] * 4}) for c in every if c.test != "elsewhere"}
    found["vatp-h2o"] = shown({"t": [50.0] * 80})
    lines = ledger.write_brief(content("tiny", decide(every, found))).splitlines()
    assert lines[0] == "points: 1 supported · 0 contradicted · 12 undecided · 1 not testable here"
    assert not any(line.startswith("!") for line in lines) and max(map(len, lines)) <= 100
    (h2o,) = [line for line in lines if line.startswith("✓ vatp-h2o ")]
    assert re.search(r"\+50\.0 \[[\d.]+, [\d.]+\] +n 80 +supported$", h2o)
    assert lines[lines.index(h2o) + 1] == "  At half of the prompt H2O with value norms beats H2O."
    (l2,) = [line for line in lines if line.startswith("? vatp-norm-l2 ")]
    assert re.search(r"−16\.7 \[−[\d.]+, [\d.]+\] +n 12 +undecided, about [\d,]+ would decide$", l2)
    (throughput,) = [line for line in lines if line.startswith("— think-throughput ")]
    assert throughput.endswith("not testable here: a claim about GPU memory and time, see `bench`")
    few = ledger.write_brief(content("tiny", decide(every, {"vatp-h2o": shown({"t": [50.0] * 3})}))).splitlines()
    assert few[1] == "! n = 3 at most. Preview only: so few examples decide nothing."


def test_claims_print_their_lines_and_explain_them_if_asked(results, capsys):
    words = ["claims", "vatp", f"results={results}"]
    assert main(words) == 0
    short = capsys.readouterr().out
    assert short.startswith("points: 0 supported · 0 contradicted · 5 undecided\n! n = 6 at most")
    assert f"kvbench {' '.join(words)} --explain" in short and "surpasses" not in short
    assert main([*words, "--explain"]) == 0
    long = capsys.readouterr().out
    assert long.startswith(short[: short.index("Numbers:")])
    assert "surpasses H₂O in 12 out of 16 tasks" in " ".join(long.split()) and "Holm" in long
    assert main([*words, "--format", "md"]) == 0
    assert capsys.readouterr().out.startswith("- points: 0 supported · 0 contradicted · 5 undecided\n\n|")


@pytest.mark.parametrize("name", ["vatq", "vatp/1"])
def test_an_unknown_paper_is_refused(name, capsys):
    assert main(["claims", name]) == 2
    assert f"unknown paper {name}" in capsys.readouterr().err

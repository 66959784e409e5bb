"""A suite's score by hand-made answers: 0 are random tokens, 100 is the full cache; equal rows share a rank."""

import re
from dataclasses import replace
from math import exp, log

import numpy as np
import pytest
from support.stored import sample

from kvbench.base.errors import UsageError
from kvbench.store.fidelity import TextFidelity
from kvbench.store.results import Sample
from kvbench.suite import card, card_picture, scores
from kvbench.suite.definition import CHANCE, CONTROL, KL, METHOD, NEGATIVE, SCORE, Control, Suite, SuitePart
from kvbench.suite.scores import RowSamples
from kvbench.tasks.metrics import stats

FLOOR = 1e-4


def suite(measure=SCORE, budgets=(2,)):
    part = SuitePart(name="p", about="a part", measure=measure, keys={})
    return Suite(
        name="s",
        edition="full",
        about="",
        model="tiny",
        dtype="float32",
        tokens=64,
        budgets=budgets,
        parts=(part,),
        floor=FLOOR,
        controls=(Control(method="random", role=CHANCE),),
    )


def answers(values, fidelity=None):
    """Samples of one task with these scores, which hold half of the full cache's bytes each."""
    made = {}
    for number, value in enumerate(values):
        line = sample(
            number, score=value, prediction=f"{value}", payload16=50.0, overhead16=2.0, full16=100.0, kept=50.0
        )
        made[line["id"]] = replace(Sample.read(line), fidelity=fidelity)
    return {"t": made}


def row(name, role, values, budget=2, **more):
    return RowSamples(name=name, budget=budget, role=role, parts={"p": answers(values, **more)})


def full(values):
    return {"p": {"t": {i: replace(s, payload16=100.0) for i, s in answers(values)["t"].items()}}}


def test_the_score_is_the_share_of_the_way_from_random_to_full():
    # full 1.0, random 0.2, the method 0.6 on every prompt: (0.6 - 0.2) / (1.0 - 0.2) = 1/2
    n = 10
    rows = [row("random", CHANCE, [0.2] * n), row("m", METHOD, [0.6] * n)]
    by_name = {entry.name: entry for entry in scores.score_rows(suite(), rows, full([1.0] * n))}
    assert by_name["m"].parts["p"].retained == pytest.approx(50.0)
    assert (by_name["random"].mean, by_name["random"].parts["p"].retained) == (0.0, 0.0)
    part = by_name["m"].parts["p"]
    assert (part.raw, part.full, part.chance, part.n) == (60.0, 100.0, pytest.approx(20.0), n)
    assert by_name["m"].bytes == pytest.approx(52.0) and by_name["m"].worst == "p"


def test_a_score_may_lie_below_random_and_above_full():
    n = 12
    rows = [row("random", CHANCE, [0.4] * n), row("worse", METHOD, [0.2] * n), row("better", METHOD, [0.9] * n)]
    scored = scores.score_rows(suite(), rows, full([0.8] * n))
    assert [entry.name for entry in scored] == ["better", "random", "worse"]
    assert scored[0].mean == pytest.approx(125.0) and scored[2].mean == pytest.approx(-50.0)


def test_divergences_are_scored_on_their_logarithm_between_random_and_the_floor():
    def with_kl(nats):
        text = TextFidelity(kl=(nats,), same="1", log_ratio=0.0, shift=0.0, loss=0.0, floor=0.0)
        return {"fidelity": {"reference": text}}

    n = 8
    rows = [row("random", CHANCE, [None] * n, **with_kl(1.0)), row("m", METHOD, [None] * n, **with_kl(0.01))]
    rows.append(row("exact", METHOD, [None] * n, **with_kl(1e-9)))
    by_name = {entry.name: entry for entry in scores.score_rows(suite(KL), rows, full([None] * n))}
    # (ln 1 - ln 0.01) / (ln 1 - ln 0.0001) = 1/2; below the floor is the floor
    assert by_name["m"].mean == pytest.approx(50.0) and by_name["exact"].mean == pytest.approx(100.0)
    assert by_name["m"].parts["p"].raw == pytest.approx(0.01) and by_name["m"].parts["p"].full == pytest.approx(FLOOR)
    assert exp(-log(FLOOR)) == pytest.approx(1 / FLOOR)


def test_a_score_above_the_full_caches_is_told_if_its_whole_interval_is():
    rows = [row("random", CHANCE, [0.1, 0.2] * 8), row("near", METHOD, [0.6, 0.4] * 8), row("far", METHOD, [1.0] * 16)]
    (line,) = scores.list_above_full(scores.score_rows(suite(), rows, full([0.5, 0.45] * 8)))
    assert re.fullmatch(r"higher than the full cache: far at 1/2, p 262 \[\d+, \d+\]", line)


def test_a_part_in_which_full_is_not_above_random_says_nothing():
    values = [0.0, 1.0] * 6
    rows = [row("random", CHANCE, values[::-1]), row("m", METHOD, values)]
    (m,) = [entry for entry in scores.score_rows(suite(), rows, full(values)) if entry.name == "m"]
    assert m.parts["p"].retained is None and m.mean is None and m.rank is None


def test_the_card_names_the_budgets_at_which_a_part_says_nothing():
    n = 12
    low, high = [0.1] * n, [0.9] * n
    # half of the cache is enough for random tokens, a quarter is not
    rows = [row("random", CHANCE, high, budget=2), row("random", CHANCE, low, budget=4)]
    of_both = suite(budgets=(2, 4))
    notes = card.write_notes(of_both, scores.score_rows(of_both, rows, full(high)))
    (note,) = [line for line in notes if "says nothing" in line]
    assert "the full cache (90.0) is not above random tokens (90.0 at 1/2) by an interval" in note


def test_rows_that_are_not_told_apart_share_a_rank():
    rng = np.random.default_rng(0)
    base = rng.random(40)
    noisy = np.clip(base + rng.normal(0, 0.2, 40), 0, 1)
    rows = [
        row("random", CHANCE, base * 0.1),
        row("a", METHOD, base),
        row("b", CONTROL, noisy),
        row("c", METHOD, base * 0.4),
    ]
    ranks = {entry.name: entry.rank for entry in scores.score_rows(suite(), rows, full(base * 0.5 + 0.5))}
    assert ranks == {"a": 1, "b": 1, "c": 3, "random": 4}


def test_a_row_that_is_the_full_cache_has_no_rank():
    values = [1.0] * 10
    same = {"p": {"t": {i: replace(s, payload16=100.0, kept=float(s.n)) for i, s in answers(values)["t"].items()}}}
    rows = [row("random", CHANCE, [0.0] * 10), RowSamples(name="noop", budget=2, role=METHOD, parts=same)]
    (noop,) = [entry for entry in scores.score_rows(suite(), rows, full(values)) if entry.name == "noop"]
    assert noop.nothing_compressed and noop.unchanged == 1.0 and noop.rank is None


def test_no_control_may_be_below_the_negative_one():
    n = 20
    spread = [0.5, 0.7] * 10
    low = [0.05, 0.1] * 10
    rows = [row("random", CHANCE, [0.3, 0.31] * 10), row("first", NEGATIVE, spread), row("c", CONTROL, low)]
    rows.append(row("m", METHOD, low))
    scored = scores.score_rows(suite(), rows, full([0.9, 1.0] * 10))
    (problem,) = scores.list_control_problems(scored)
    assert problem.startswith("p at 1/2: c (") and "below the negative control first" in problem
    # a method may be below it, and the card says so
    assert {place.name for place in scores.find_below_negative(scored)} == {"c", "m"}
    assert any("p at 1/2, first (" in note and "m (−" in note for note in card.write_notes(suite(), scored))
    rows[1] = row("first", NEGATIVE, [0.0, 0.1] * (n // 2))
    assert scores.list_control_problems(scores.score_rows(suite(), rows, full([0.9, 1.0] * 10))) == []


def test_a_budget_without_random_tokens_has_no_scores():
    with pytest.raises(UsageError, match="1/2 has no row of random tokens"):
        scores.score_rows(suite(), [row("m", METHOD, [1.0] * 8)], full([1.0] * 8))


def test_the_interval_of_a_share_of_the_way_holds_the_truth():
    """Fieller's interval of a ratio that may be below 0 covers it in 93 to 97 of 100 draws."""
    rng = np.random.default_rng(1)
    held = 0
    draws = 600
    for _ in range(draws):
        gap = rng.normal(0.5, 0.4, (3, 12))
        way = -0.3 * gap + rng.normal(0, 0.2, (3, 12))
        share = stats.ratio_of_means([np.stack([w, g], axis=1) for w, g in zip(way, gap, strict=True)])
        held += share.ci[0] <= -30.0 <= share.ci[1]
    assert 0.925 <= held / draws <= 0.975


def test_parts_count_alike_whatever_their_tasks():
    mean, interval = stats.mean_over_parts([[[1.0, 0.8] * 6], [[0.0, 0.2] * 6, [0.4, 0.6] * 6]])
    # (0.9 + (0.1 + 0.5) / 2) / 2 = 0.6
    assert mean == pytest.approx(0.6)
    # variance of a mean = var / n; weights 1/2 and 1/4: sqrt(v (1/4 + 2/16)) with v = 0.01 * 12/11 / 12
    half = stats._t_quantile(33) * (0.01 * 12 / 11 / 12 * (1 / 4 + 2 / 16)) ** 0.5
    assert interval == (pytest.approx(0.6 - half), pytest.approx(0.6 + half))


def test_the_mean_over_parts_has_the_half_widths_of_its_parts():
    """On each side: that of the only part; of two equal parts, sqrt(w^2 + w^2) / 2 of it."""
    one = suite()
    two = replace(one, parts=(*one.parts, replace(one.parts[0], name="q")))
    gaps = np.linspace(0.2, 0.9, 12)
    rows = [row("random", CHANCE, [0.0] * 12), row("m", METHOD, gaps**3)]
    (m,) = [entry for entry in scores.score_rows(one, rows, full(gaps)) if entry.name == "m"]
    low, high = m.parts["p"].ci
    assert m.mean - low > 1.2 * (high - m.mean), "the sides differ"
    assert m.ci == (pytest.approx(low), pytest.approx(high))
    doubled = [replace(entry, parts={"p": entry.parts["p"], "q": entry.parts["p"]}) for entry in rows]
    both = {"p": full(gaps)["p"], "q": full(gaps)["p"]}
    (m,) = [entry for entry in scores.score_rows(two, doubled, both) if entry.name == "m"]
    assert m.ci == (pytest.approx(m.mean - (m.mean - low) / 2**0.5), pytest.approx(m.mean + (high - m.mean) / 2**0.5))


def test_means_stand_first_by_method_and_budget():
    rng = np.random.default_rng(2)
    base = rng.uniform(0.3, 0.9, 40)
    rows = [row("random", CHANCE, base * 0.1), row("c", CONTROL, base * 0.9), row("a", METHOD, base * 0.5)]
    rows += [row("b", METHOD, base * 0.7), row("d", METHOD, base * 0.1)]
    scored = scores.score_rows(suite(), rows, full(base * 0.5 + 0.5))
    table = card.build_mean_table(suite(), scored)
    assert [cells[0] for cells in table.rows] == ["b", "a", "d", "c"], "methods from the best, then controls"
    assert table.headings == {0: "", 3: "controls"}
    by_name = {cells[0]: cells[1] for cells in table.rows}
    assert by_name["d"] == "0", "no interval: all its prompts score what random tokens score"
    assert any(note.startswith("No brackets") for note in card.write_notes(suite(), scored))
    # the lines of three methods would hide the table
    text, markdown = (card.write_card(suite(), scored, style) for style in ("text", "md"))
    assert "worst p" not in text and markdown.index("worst p") > markdown.index("pages freed")
    few = [entry for entry in scored if entry.name != "d"]
    assert "worst p" in card.write_card(suite(), few, "text").split("mean  ")[0]


def test_the_picture_has_each_score_in_its_methods_row_and_budgets_column(tmp_path, monkeypatch):
    n = 10
    rows = []
    for budget, value in ((2, 0.6), (4, 0.4)):
        rows += [row("random", CHANCE, [0.2] * n, budget), row("m", METHOD, [value] * n, budget)]
    rows.append(row("c", CONTROL, [0.2] * n, 4))
    two = suite(budgets=(2, 4))
    drawn = []
    monkeypatch.setattr(
        card_picture, "heat", lambda ax, values, *names, **keys: drawn.append(values) or ax.imshow(values)
    )
    card_picture.draw_card(two, scores.score_rows(two, rows, full([1.0] * n)), tmp_path / "card.png")
    # S = (value - 0.2) / (1.0 - 0.2); the control was not measured at 1/2
    assert np.allclose(drawn[0], [[50, 25], [np.nan, 0]], equal_nan=True)
    assert (tmp_path / "card.png").stat().st_size > 1000


def test_a_mean_over_fewer_parts_is_marked_and_ranked_by_the_parts_that_both_rows_have():
    """A row that one part does not take has the higher mean without it, and is not ahead of the row that has both."""
    one = suite()
    two = replace(one, parts=(*one.parts, replace(one.parts[0], name="q")))
    spread = [0.0, 0.1] * 10
    exact = full([0.9, 1.0] * 10)

    def twice(name, role, first, second):
        return RowSamples(name=name, budget=2, role=role, parts={"p": answers(first), "q": answers(second)})

    rows = [twice("random", CHANCE, spread, spread), twice("both", METHOD, [0.8, 0.95] * 10, [0.3, 0.4] * 10)]
    rows.append(row("half", METHOD, [0.6, 0.7] * 10))
    scored = scores.score_rows(two, rows, {**exact, "q": exact["p"]})
    both, half, _ = scored
    assert (both.name, both.rank, half.name, half.rank) == ("both", 1, "half", 2) and half.mean > both.mean
    text = card.write_card(two, scored, "text")
    assert f"{half.mean:.0f}†" in text and f"{both.mean:.0f}†" not in text
    assert "(without q: half)" in text.replace("\n", " ") and "(p 67, not q)" in card.write_line(two, half)

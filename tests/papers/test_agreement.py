"""Order of rows, differences and filled cells of a table, on numbers whose agreement is known."""

from dataclasses import replace

import numpy as np
import pytest

from kvbench.papers.measured import agreement, plan
from kvbench.papers.measured.cells import read_cells
from kvbench.papers.spec import table_spec


@pytest.fixture(scope="module")
def printed():
    """ThinK's table 2 as printed."""
    return read_cells(plan.make_printed_table(table_spec.load("think", "2"), "tiny", ""))


def measured(table, score, floor=()):
    """The table as if each printed cell scored ``score(published)`` on ten examples; columns of ``floor`` fail."""
    noise = np.random.default_rng(0)
    cells = table.cells.copy()
    printed = cells[cells["side"] == "paper"].set_index(["row", "column"])["value"]
    for i, line in cells.iterrows():
        published = printed[line["row"], line["column"]]
        if line["side"] == "ours" and published is not None:
            value = score(published)
            scores = {str(i): (value + shift) / 100 for i, shift in enumerate(noise.normal(size=10))}
            facts = {"value": value, "score": value, "scores": scores, "n": 10, "cell": "x"}
            for name, fact in (facts | {"floor": line["column"] in floor}).items():
                cells.at[i, name] = fact
    return replace(table, cells=cells)


def test_the_papers_own_numbers_agree_and_their_negatives_are_reversed(printed):
    same, other = measured(printed, float), measured(printed, lambda value: 100 - value)
    assert set(agreement.order_of_rows(same).values()) == {1.0}
    assert set(agreement.order_of_rows(other).values()) == {-1.0}
    seen = [verdict for *_, verdict in agreement.differences_of_rows(same)]
    backwards = [verdict for *_, verdict in agreement.differences_of_rows(other)]
    assert min(seen.count(agreement.SEEN), backwards.count(agreement.REVERSED)) > len(seen) / 2
    # intervals of 95 %: chance may tell a few apart the wrong way
    assert seen.count(agreement.REVERSED) < len(seen) / 20
    assert agreement.count_filled(same) == (688, 688) and agreement.describe_agreement(printed) == []
    assert agreement.describe_agreement(same)[-1] == "Filled: all 688 cells."


def test_ties_lower_tau_and_failing_columns_are_left_out(printed):
    # one score for all: no pair of ours is told apart, and no tau can be computed
    assert agreement.order_of_rows(measured(printed, lambda value: 50.0)) == {}
    coarse = agreement.order_of_rows(measured(printed, lambda value: float(value > 38.5), floor=("qasper",)))
    # HotpotQA has rows on both sides of 38.5. A tau-b with ties on one side alone is below 1
    assert 0 < coarse["hotpotqa"] < 1 and "qasper" not in coarse


def test_tau_b_of_three_rows_by_hand(printed):
    """Printed 1, 2, 3 against ours 1, 1, 3: C = 2, D = 0, P = 3, O = 2, so tau = 2 / sqrt(6)."""
    table = measured(printed, float)
    cells = table.cells.copy()
    rows = zip((1, 2, 3), (1.0, 2.0, 3.0), (1.0, 1.0, 3.0), strict=True)
    first = cells["column"] == "narrativeqa"
    for row, paper, ours in rows:
        for side, value in (("paper", paper), ("ours", ours)):
            cells.loc[first & (cells["row"] == row) & (cells["side"] == side), "value"] = value
    kept = table.rows.drop(index=[i for i in table.rows.index if i not in (1, 2, 3)])
    taus = agreement.order_of_rows(replace(table, cells=cells, rows=kept))
    assert taus["narrativeqa"] == pytest.approx(2 / 6**0.5)

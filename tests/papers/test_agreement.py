"""Order of rows, differences and filled cells of a table, on numbers whose agreement is known."""

from dataclasses import replace

import numpy as np
import pytest

from kvbench.papers.measured import agreement, our_table
from kvbench.papers.measured.cell_view import build_view
from kvbench.papers.spec import table_spec


@pytest.fixture(scope="module")
def printed():
    """ThinK's table 2 as printed."""
    return build_view(our_table.make_printed_table(table_spec.load("think", "2"), "tiny", ""))


def measured(view, score, floor=()):
    """The view as if each printed cell scored ``score(published)`` on ten examples; columns of ``floor`` fail."""
    noise = np.random.default_rng(0)
    rows = []
    for line, entries in view.rows:
        cells = []
        for column, entry in zip(view.columns, entries, strict=True):
            if entry.published is None:
                cells.append(entry)
                continue
            value = score(entry.published)
            scores = {str(i): (value + shift) / 100 for i, shift in enumerate(noise.normal(size=10))}
            cells.append(
                replace(entry, ours=value, score=value, scores=scores, n=10, cell="x", floor=column.dataset in floor)
            )
        rows.append((line, tuple(cells)))
    return replace(view, rows=tuple(rows))


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
    view = measured(printed, float)
    block = view.rows[1:4]
    rows = []
    for (line, entries), paper, ours in zip(block, (1.0, 2.0, 3.0), (1.0, 1.0, 3.0), strict=True):
        rows.append((line, (replace(entries[0], published=paper, ours=ours), *entries[1:])))
    taus = agreement.order_of_rows(replace(view, rows=tuple(rows)))
    assert taus["narrativeqa"] == pytest.approx(2 / 6**0.5)

"""Averages that a paper prints are held to the cells that they average, whatever their metric is called."""

import pytest

from kvbench.base.errors import KvbenchError
from kvbench.papers.forensics import audit
from kvbench.papers.forensics.exact import recomputed_cells
from kvbench.papers.spec import catalogue, published
from kvbench.papers.spec.published import COLUMNS, Published
from kvbench.papers.spec.published_cells import Book


def book(*cells):
    """A book of one row of (dataset, metric, what is printed)."""
    return Book(
        tuple(
            Published("example", "1", "m", "snapkv", "", dataset, metric, float(text), "pct", "", text, 1)
            for dataset, metric, text in cells
        )
    )


TWO = (("qasper", "f1", "38.0"), ("hotpotqa", "f1", "24.0"))
MIXED = (*TWO, ("trec", "accuracy", "70.0"), ("lcc", "accuracy", "52.0"))


@pytest.mark.parametrize("metric", published.SCORES)
def test_a_wrong_average_is_found_whatever_its_metric_is_called(metric, monkeypatch):
    monkeypatch.setattr(catalogue, "choose_papers", lambda name: [type("Paper", (), {"id": "example"})])
    (right,) = recomputed_cells(book(*TWO, ("avg", metric, "31.0")))
    assert (right.grade, right.shown, right.formula) == ("equal", "31.0", "mean of the 2 scores")
    assert not audit(book(*TWO, ("avg", metric, "31.0")))
    (finding,) = audit(book(*TWO, ("avg", metric, "33.0")))
    assert (finding.check, finding.weight, finding.printed, finding.recomputed) == ("derived", "wrong", "33.0", "31.0")
    assert "the cells sum to 4.00 too little" in finding.why


@pytest.mark.parametrize("metric", ["perplexity", "latency", "string_match_all"])
def test_averages_of_what_is_no_score_are_held_too(metric):
    cells = [(dataset, metric, text) for dataset, _, text in TWO]
    (wrong,) = recomputed_cells(book(*cells, ("avg", metric, "33.0")))
    assert (wrong.grade, wrong.shown, wrong.formula) == ("off", "31.0", "mean of the 2 datasets")
    assert recomputed_cells(book(*cells)) == () == recomputed_cells(book(("avg", metric, "33.0")))


def test_one_average_is_of_all_scores_and_of_several_each_is_of_its_own():
    values = {e.cell.metric: float(e.recomputed) for e in recomputed_cells(book(*MIXED, ("avg", "f1", "1")))}
    assert values == {"f1": 46.0}
    several = book(*MIXED, ("avg", "f1", "1"), ("avg", "accuracy", "1"), ("avg", "mean", "1"))
    assert {e.cell.metric: float(e.recomputed) for e in recomputed_cells(several)} == {
        "f1": 31,
        "accuracy": 61,
        "mean": 46,
    }


def test_an_average_under_another_name_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "table1.csv"
    monkeypatch.setattr(published, "data_files", lambda pattern: [path])
    for name in ("average", "Avg.", "mean"):
        path.write_text(
            f"{','.join(COLUMNS)}\nexample,1,m,full,,qasper,f1,40.0,pct,1,\nexample,1,m,full,,{name},f1,1,pct,1,\n"
        )
        published.load_table.cache_clear()
        with pytest.raises(KvbenchError, match=f"line 3: the dataset '{name}' would be one more score .* write avg"):
            published.load_table("example", "1")
    published.load_table.cache_clear()

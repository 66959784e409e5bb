"""Queries for a paper's printed cells, and their numbers compared and put into words, by hand."""

import pytest

from kvbench.base.errors import KvbenchError
from kvbench.papers.forensics.queries import (
    PaperCells,
    count_rising,
    describe_falls,
    describe_lines,
    describe_values,
    divide_cells,
    group_lines,
    list_labels,
    read_numeric_labels,
    subtract_cells,
)
from kvbench.papers.spec.published import Published
from kvbench.papers.spec.published_cells import Book

ROWS = [
    ("m", "full", "", "qasper", "f1", 10.0),
    ("m", "full", "", "trec", "accuracy", 40.0),
    ("m", "full", "", "avg", "mean", 25.0),
    ("m", "h2o+think", "size=64;ratio=0.4", "qasper", "f1", 8.0),
    ("m", "h2o+think", "size=64;ratio=0.4", "trec", "accuracy", 42.0),
    ("m", "h2o+think", "size=64;ratio=0.4", "trec", "budget", 30.0),
    ("m", "h2o", "size=128", "qasper", "f1", 9.0),
    ("m", "h2o", "size=128", "trec", "accuracy", None),
]
CELLS = [
    Published("vatp", "1", model, method, setting, dataset, metric, value, "pct", "", str(value or ""), i)
    for i, (model, method, setting, dataset, metric, value) in enumerate(ROWS)
]
PAPER = PaperCells(Book(tuple(CELLS)), "vatp")


def test_one_number():
    assert PAPER.number(table=1, of="avg") == 25
    assert PAPER.number(table="1", of="trec", metric="budget") == 30
    rounded = PAPER.with_rounding().number(table=1, of="avg")
    assert (float(rounded.low), float(rounded.high)) == (24.95, 25.05)
    with pytest.raises(KvbenchError, match="several cells of one name"):
        PAPER.number(table=1, of="qasper")
    with pytest.raises(KvbenchError, match="finds no cell"):
        PAPER.number(table=1, of="gsm8k")


def test_numbers_by_fields():
    assert PAPER.series("dataset", table=1, of="scores", method="full").to_dict() == {"qasper": 10, "trec": 40}
    assert PAPER.series(["base", "size", "dataset"], table=1, of="scores", method="h2o*").to_dict() == {
        ("h2o", "64", "qasper"): 8,
        ("h2o", "64", "trec"): 42,
        ("h2o", "128", "qasper"): 9,
    }
    assert PAPER.series("method", table=1, of="qasper", ratio="").to_dict() == {"full": 10, "h2o": 9}
    without = {"method": ["full", "*+think"]}
    assert PAPER.series("method", table=[1, 2], of="qasper", without=without).to_dict() == {"h2o": 9}
    nothing = PAPER.series(["method", "size"], table=1, of="gsm8k")
    assert nothing.to_dict() == {} and nothing.index.names == ["method", "size"]
    with pytest.raises(KvbenchError, match="several cells of one name"):
        PAPER.series("model", table=1, of="qasper")


def test_labels_and_settings():
    assert PAPER.labels("method", table=1) == ["full", "h2o", "h2o+think"]
    assert PAPER.settings("size", "method", table=1, method="h2o*").to_dict() == {"h2o+think": 64, "h2o": 128}


@pytest.fixture
def own():
    return PAPER.series(["method", "dataset"], table=1, of="scores")


@pytest.fixture
def full():
    return PAPER.series("dataset", table=1, of="scores", method="full")


def test_a_series_beside_one_of_fewer_fields(own, full):
    assert list(subtract_cells(own, full)) == [0, 0, -2, 2, -1]
    assert list(divide_cells(own, full)) == [1, 1, 0.8, 1.05, 0.9]
    # cells that the other lacks are left out, in the order of the first
    assert subtract_cells(own, full.drop("trec")).to_dict() == {
        ("full", "qasper"): 0,
        ("h2o+think", "qasper"): -2,
        ("h2o", "qasper"): -1,
    }


def test_labels_of_a_series(own):
    assert list_labels(own, "method") == ["full", "h2o", "h2o+think"]
    sizes = PAPER.series("size", table=1, of="qasper", method="h2o*")
    assert read_numeric_labels(sizes).to_dict() == {"64": 64, "128": 128}


def test_lines(own):
    assert group_lines(own)[1:] == [
        (("h2o+think",), [("qasper", 8), ("trec", 42)]),
        (("h2o",), [("qasper", 9)]),
    ]
    assert count_rising(own) == 3 and count_rising(-own) == 1
    assert describe_falls("{method} {a:g} to {b:g} at {then}", -own, least=31) == ["h2o+think -8 to -42 at trec"]
    assert describe_falls("{method} {b:g}", own, least=31, rising=False) == ["h2o+think 42"]


def test_texts(own, full):
    many = own[own > 39]
    assert (
        describe_values("{method}/{dataset} {value:.0f} of {full:.0f}", many, full=full)
        == "full/trec 40 of 40, h2o+think/trec 42 of 40"
    )
    assert describe_values("{dataset} {value:g}", full, sep=" and ") == "qasper 10 and trec 40"
    assert describe_lines(own) == "full 10.0, 40.0; h2o+think 8.0, 42.0; h2o 9.0"
    assert describe_lines(own, "{:.2f}", sep=" / ").startswith("full 10.00 / 40.00; ")

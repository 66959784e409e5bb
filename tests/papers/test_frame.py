"""A paper's printed cells as a frame, and their numbers compared and put into words, by hand."""

import pytest

from kvbench.base.errors import KvbenchError
from kvbench.papers.forensics.frame import (
    count_rising,
    describe_falls,
    describe_lines,
    describe_values,
    divide,
    find,
    group_lines,
    labels,
    number,
    read_frame,
    series,
    subtract,
)
from kvbench.papers.spec.numbers import printed_number
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
BOOK = Book(
    tuple(
        Published("vatp", "1", model, method, setting, dataset, metric, value, "pct", "", str(value or ""), i)
        for i, (model, method, setting, dataset, metric, value) in enumerate(ROWS)
    )
)
CELLS = read_frame(BOOK, "vatp")


def test_one_number():
    assert number(CELLS, table=1, dataset="avg") == 25
    assert number(CELLS, table="1", dataset="trec", metric="budget") == 30
    rounded = number(read_frame(BOOK, "vatp", printed_number), table=1, dataset="avg")
    assert (float(rounded.low), float(rounded.high)) == (24.95, 25.05)
    with pytest.raises(KvbenchError, match="several cells of one name"):
        number(CELLS, table=1, dataset="qasper")
    with pytest.raises(KvbenchError, match="finds no cell"):
        number(CELLS, table=1, dataset="gsm8k")


def test_numbers_by_columns():
    assert series(CELLS, "dataset", score=True, method="full").to_dict() == {"qasper": 10, "trec": 40}
    assert series(CELLS, ["base", "size", "dataset"], score=True, method="h2o*").to_dict() == {
        ("h2o", "64", "qasper"): 8,
        ("h2o", "64", "trec"): 42,
        ("h2o", "128", "qasper"): 9,
    }
    assert series(CELLS, "method", dataset="qasper", ratio="").to_dict() == {"full": 10, "h2o": 9}
    assert find(CELLS, dataset="gsm8k").empty
    assert labels(CELLS, "method") == ["full", "h2o", "h2o+think"]
    with pytest.raises(KvbenchError, match="several cells of one name"):
        series(CELLS, "model", dataset="qasper")


@pytest.fixture
def own():
    return series(CELLS, ["method", "dataset"], score=True)


@pytest.fixture
def full():
    return series(CELLS, "dataset", score=True, method="full")


def test_a_series_beside_one_of_fewer_levels(own, full):
    assert list(subtract(own, full)) == [0, 0, -2, 2, -1]
    assert list(divide(own, full)) == [1, 1, 0.8, 1.05, 0.9]
    # cells that the other lacks are left out, in the order of the first
    assert subtract(own, full.drop("trec")).to_dict() == {
        ("full", "qasper"): 0,
        ("h2o+think", "qasper"): -2,
        ("h2o", "qasper"): -1,
    }


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

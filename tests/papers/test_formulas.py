"""The language of statements.yaml: queries, expressions and texts, by hand."""

import pytest

from kvbench.base.errors import KvbenchError
from kvbench.papers.forensics.formulas import evaluate, query, text
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
BOOK = Book(tuple(CELLS))


def found(**entry):
    values = query(BOOK, "vatp", {"table": 1, **entry})
    return values.to_dict() if hasattr(values, "to_dict") else values


def test_queries():
    assert found(of="avg") == 25 and found(of="trec", metric="budget") == 30
    assert found(of="scores", method="full", by="dataset") == {"qasper": 10, "trec": 40}
    assert found(of="scores", method="h2o*", by=["base", "size", "dataset"]) == {
        ("h2o", "64", "qasper"): 8,
        ("h2o", "64", "trec"): 42,
        ("h2o", "128", "qasper"): 9,
    }
    assert found(of="qasper", ratio="", by="method") == {"full": 10, "h2o": 9}
    assert found(of="qasper", by="method", **{"not": {"method": ["full", "*+think"]}}) == {"h2o": 9}
    assert found(labels="method") == ["full", "h2o", "h2o+think"]
    assert found(take="size", method="h2o*", by="method") == {"h2o+think": 64, "h2o": 128}
    assert found(of="gsm8k", by="method") == {}
    with pytest.raises(KvbenchError, match="several cells of one name"):
        found(of="qasper", by="model")
    with pytest.raises(KvbenchError, match="finds no cell"):
        found(of="gsm8k")


def names():
    own_value = query(BOOK, "vatp", {"table": 1, "of": "scores", "by": ["method", "dataset"]})
    return {
        "own": own_value,
        "full": query(BOOK, "vatp", {"table": 1, "of": "scores", "method": "full", "by": "dataset"}),
    }


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3 - 4 / 2", 5),
        ("2 < 3 <= 3 and not 4 > 5", True),
        ("2 < 3 < 3 or 0", 0),
        ("1 > 2 and 3 or 'none'", "none"),
        ("'yes' if 2 in [1, 2] else 'no'", "yes"),
        ("-min(own - full)", 2),
        ("list(own / full)", (1, 1, 0.8, 1.05, 0.9)),
        ("list(mean(own, 'method'))", (25, 25, 9)),
        ("sum(own - full > 0)", 1),
        ("best(full), worst(full)", ("trec", "qasper")),
        ("own['h2o', 'qasper']", 9),
        ("list(only(full, full > 20))", (40,)),
        ("list(only(full, ['trec', 'qasper']))", (40, 10)),
        ("level(own, 'method')", ["full", "h2o", "h2o+think"]),
        (
            "listed('{0}/{1} {2:.0f} of {3:.0f}', only(own, own > 39), full)",
            "full/trec 40 of 40, h2o+think/trec 42 of 40",
        ),
        ("rises(own)", 3),
        ("falls('{0} {a:g} to {b:g} at {then}', -own, 31)", ["h2o+think -8 to -42 at trec"]),
        ("falls('{0} {b:g}', own, 31, rising=False)", ["h2o+think 42"]),
        ("list(winners(own))", ("qasper", "qasper", "qasper")),
        ("rows(own)", "full 10.0, 40.0; h2o+think 8.0, 42.0; h2o 9.0"),
    ],
)
def test_expressions(expression, value):
    assert evaluate(expression, names()) == value


@pytest.mark.parametrize(
    "expression", ["open('x')", "own.mean()", "absent", "[i for i in own]", "lambda: 1", "2 ** 3", "1 +"]
)
def test_nothing_else_is_possible(expression):
    with pytest.raises(KvbenchError, match=r"not possible in a formula|is no expression"):
        evaluate(expression, names())


def test_texts():
    assert text("{max(own):.1f} of {len(own)}: {best(full)}", names()) == "42.0 of 5: trec"

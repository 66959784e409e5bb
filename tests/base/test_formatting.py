"""Numbers, intervals, sizes and shares as kvbench prints them."""

import random
import re
from decimal import Decimal
from pathlib import Path

import pytest

import kvbench
from kvbench.base.formatting import (
    MORE,
    format_number,
    format_percent,
    format_significant,
    format_size,
    format_sizes,
    with_interval,
)

METRICS = {
    "perplexity": (5.0, 20.0, {}),
    "points of 100": (0.0, 100.0, {}),
    "difference in points": (-20.0, 20.0, {"sign": True}),
    "whole scores of the suite": (-100.0, 200.0, {"digits": 0}),
    "perplexity ratio": (0.99, 1.2, {"digits": 4}),
    "nats": (1e-7, 3.0, {"digits": 3, "significant": True}),
    "seconds": (1e-3, 500.0, {"digits": 3, "significant": True}),
    "bytes": (1e3, 1e12, {"digits": 3, "significant": True}),
}
"""What is printed with an interval, by name: its range, and how it is written."""


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (6.14, 1, "6.1"),
        (56.25, 1, "56.3"),  # halves away from zero, which the floats' own format rounds to the even 56.2
        (-56.25, 1, "−56.3"),
        (0.15, 1, "0.2"),  # the float is 0.1499999999999999944, but the number that was written is 0.15
        (100 * 0.285, 0, "29"),
        (2.5, 0, "3"),
        (-0.04, 1, "0.0"),
        (1e30, 0, "1" + 30 * "0"),
        (float("inf"), 1, "inf"),
        (float("nan"), 1, "nan"),
        (None, 1, "—"),
    ],
)
def test_numbers(value, digits, text):
    assert format_number(value, digits) == text


def test_a_difference_keeps_its_sign():
    assert [format_number(value, sign=True) for value in (1.25, -1.25, 0, -0.04)] == ["+1.3", "−1.3", "+0.0", "−0.0"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.1, "0.100"),
        (0.01234, "0.0123"),
        (1.2345e-5, "1.23e-05"),
        (9.996, "10.0"),
        (99.95, "100"),
        (1234, "1234"),
        (2.5e9, "2.50e+09"),
        (None, "—"),
    ],
)
def test_significant_digits(value, text):
    assert format_significant(value) == text


@pytest.mark.parametrize(
    ("value", "ci", "options", "text"),
    [
        (6.14, (6.04, 6.24), {}, "6.1 [6.0, 6.2]"),
        (98.77, (98.74, 98.8), {}, "98.77 [98.74, 98.80]"),
        (-1.24, (-1.62, -0.84), {"sign": True, "mark": "*"}, "−1.2* [−1.6, −0.8]"),
        (0.0004, (0.0003, 0.0005), {}, "0.0004 [0.0003, 0.0005]"),
        (55.2, (44.2, 61.9), {"digits": 0, "mark": "†"}, "55† [44, 62]"),
        (1.23e-5, (0.9e-5, 1.4e-5), {"digits": 3, "significant": True}, "1.23e-05 [0.90e-05, 1.40e-05]"),
        (100, (100, 100), {}, "100.0 [100.0, 100.0]"),
        (100, (100 - 1e-13, 100), {}, "100.0 [100.0, 100.0]"),
        (6.14, None, {}, "6.1"),
        (None, (0, 1), {}, "—"),
    ],
)
def test_intervals(value, ci, options, text):
    assert with_interval(value, ci, gap=" ", **options) == text


@pytest.mark.parametrize("metric", METRICS)
def test_an_interval_holds_its_number_and_has_two_ends(metric):
    least, most, options = METRICS[metric]
    rng = random.Random(metric)
    for _ in range(500):
        low = rng.uniform(least, most)
        high = low + rng.choice((1e-9, 1e-3, 0.01, 0.1, 1)) * abs(low) * rng.random()
        value = rng.uniform(low, high)
        texts = re.findall(r"[^\s,\[\]]+", with_interval(value, (low, high), gap=" ", **options).replace("−", "-"))
        shown, shown_low, shown_high = map(Decimal, texts)
        assert shown_low <= shown <= shown_high
        # all have equal decimals
        assert len({number.as_tuple().exponent for number in (shown, shown_low, shown_high)}) == 1
        unit = Decimal(1).scaleb(shown.as_tuple().exponent)
        for exact, rounded in ((value, shown), (low, shown_low), (high, shown_high)):
            assert abs(Decimal(exact) - rounded) <= unit * Decimal("0.5001")
        # ends that differ by 1 % of the number look different, and so do all that differ by what MORE decimals show
        if high - low > 10.0 ** -(options.get("digits", 1) + MORE) and not options.get("significant"):
            assert shown_low < shown_high
        if options.get("significant") and high - low > 0.01 * abs(value):
            assert shown_low < shown_high


@pytest.mark.parametrize(
    ("share", "text"), [(12.5, "12.5 %"), (50.0, "50 %"), (0.4, "0.4 %"), (33.333, "33.3 %"), (100, "100 %")]
)
def test_shares(share, text):
    assert format_percent(share) == text


def test_sizes_have_one_unit():
    assert format_sizes([3 * 2**20, 0.65 * 2**20, None, 12.5 * 2**20]) == ["3.0 MiB", "0.65 MiB", "—", "12.5 MiB"]
    assert format_sizes([100, 7]) == ["100 B", "7 B"] and format_sizes([None]) == ["—"]
    assert [format_size(n) for n in (0, 512, 1.25 * 2**10, 3 * 2**40)] == ["0 B", "512 B", "1.3 KiB", "3.0 TiB"]


def test_no_other_code_writes_an_interval():
    package = Path(kvbench.__file__).parent
    files = [*package.rglob("*.py"), *(package.parent / "scripts").glob("*.py")]
    # [{low:.1f}, or [{ci[0]:.2g}: an end in brackets with a format of its own
    own = re.compile(r"\[\{[^\"]+[fge]\}, \{")
    found = [f"{path}: {line}" for path in files for line in path.read_text("utf-8").splitlines() if own.search(line)]
    assert not found

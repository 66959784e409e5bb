"""Rounding: what a printed number stands for, carried through arithmetic; hand-computed."""

from fractions import Fraction

import pytest

from kvbench.papers.spec.numbers import exact_number, format_fixed, grade, mean, printed_number


def test_a_printed_number_stands_for_its_interval():
    n = printed_number("41.86")
    assert (n.value, n.low, n.high) == (Fraction(4186, 100), Fraction(41855, 1000), Fraction(41865, 1000))
    assert (printed_number("7").low, printed_number("7").high) == (Fraction(13, 2), Fraction(15, 2))
    assert printed_number("-0.5").low == Fraction(-55, 100)


def test_intervals_are_carried():
    a, b = printed_number("2.0"), printed_number("4.0")
    assert ((a + b).low, (a + b).high) == (Fraction(59, 10), Fraction(61, 10))
    assert ((b - a).low, (b - a).high) == (Fraction(19, 10), Fraction(21, 10))
    assert (a * b).high == Fraction(205, 100) * Fraction(405, 100)
    assert (a / b).low == Fraction(195, 100) / Fraction(405, 100)
    assert (a * -1).low == Fraction(-205, 100)
    assert mean([a, b]).value == 3 and mean([a, b]).high == Fraction(305, 100)
    with pytest.raises(ZeroDivisionError):
        a / printed_number("0.0")


@pytest.mark.parametrize(
    ("text", "recomputed", "expected"),
    [
        ("41.86", exact_number(Fraction(41864, 1000)), "equal"),
        ("41.87", exact_number(Fraction(41865, 1000)), "equal"),  # ties go up, as papers round
        ("-1.07", exact_number(Fraction(-10651, 10000)), "equal"),
        ("1.58", exact_number(Fraction(15855, 10000)), "rounding"),  # cut instead of rounded
        ("37.22", mean([printed_number("37.20"), printed_number("37.255")]), "rounding"),
        ("41.86", exact_number(Fraction(41875, 1000)), "off"),
        ("-2.74", exact_number(Fraction(-2757, 1000)), "off"),
        ("1.4", exact_number(Fraction(133, 100)), "off"),
    ],
)
def test_grades(text, recomputed, expected):
    assert grade(text, recomputed) == expected


def test_fixed_point_text():
    assert [format_fixed(Fraction(x), 2) for x in ("0.005", "-0.005", "-0.004", "12")] == [
        "0.01",
        "-0.01",
        "0.00",
        "12.00",
    ]
    assert format_fixed(Fraction(5, 2), 0) == "3"

"""Printed numbers with the interval that rounding hides, and arithmetic that carries this interval along."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Number:
    """A number and the interval that it can lie in: 41.86 as printed stands for anything from 41.855 to 41.865.

    The number and both ends are exact fractions, so arithmetic adds no error of its own.
    """

    value: Fraction
    low: Fraction
    high: Fraction

    def __add__(self, other: Number | int) -> Number:
        b = _as_number(other)
        return Number(self.value + b.value, self.low + b.low, self.high + b.high)

    def __sub__(self, other: Number | int) -> Number:
        b = _as_number(other)
        # the difference is smallest where this is low and the other high
        return Number(self.value - b.value, self.low - b.high, self.high - b.low)

    def __mul__(self, other: Number | int | Fraction) -> Number:
        b = _as_number(other)
        # signs decide which two ends give the smallest product, so try all four
        ends = (self.low * b.low, self.low * b.high, self.high * b.low, self.high * b.high)
        return Number(self.value * b.value, min(ends), max(ends))

    def __truediv__(self, other: Number | int | Fraction) -> Number:
        b = _as_number(other)
        if b.low <= 0 <= b.high:
            raise ZeroDivisionError(f"{float(b.value)} cannot be told from zero")
        # a / b = a * (1 / b); 1 / b falls as b grows, so its ends change places
        return self * Number(1 / b.value, 1 / b.high, 1 / b.low)

    def __float__(self) -> float:
        return float(self.value)

    def text(self, digits: int) -> str:
        """Return the value with ``digits`` digits behind the point. Ties round away from zero, as in papers."""
        return format_fixed(self.value, digits)


def exact_number(value: int | float | Fraction) -> Number:
    """Return a number with an interval of length 0. A float stands for its shortest decimal."""
    # 0.1 is meant as 1/10, not as the binary fraction nearest to it
    exact = Fraction(str(value)) if isinstance(value, float) else Fraction(value)
    return Number(exact, exact, exact)


def printed_number(text: str) -> Number:
    """Return the number that printed characters stand for. Its interval is half a unit of the last digit either way."""
    value = Fraction(text)
    half = Fraction(1, 2 * 10 ** decimals(text))
    return Number(value, value - half, value + half)


def decimals(text: str) -> int:
    """Return the number of digits behind the point of a printed number; 0 without a point."""
    return len(text.partition(".")[2])


def grade(text: str, recomputed: Number) -> str:
    """Compare a recomputed number with printed characters, and return how well they agree.

    ``equal``: the number rounds to these characters. ``rounding``: it does not, but digits that rounding hides, or that
    the paper cut off, can explain the difference. ``off``: they cannot.
    """
    digits = decimals(text)
    if format_fixed(recomputed.value, digits) == format_fixed(Fraction(text), digits):
        return "equal"
    shown = printed_number(text)
    # one unit of the last printed digit
    unit = Fraction(1, 10**digits)
    # 1.585 may be printed as 1.58, cut towards zero instead of rounded: a whole unit away from zero is possible
    if shown.value >= 0:
        low, high = shown.low, shown.value + unit
    else:
        low, high = shown.value - unit, shown.high
    # rounding can explain the difference if the two intervals overlap
    if recomputed.low <= high and low <= recomputed.high:
        return "rounding"
    return "off"


def mean(numbers: Iterable[Number]) -> Number:
    """Return the plain mean of one or more numbers, with the interval that follows from the numbers' intervals."""
    values = list(numbers)
    total = exact_number(0)
    for number in values:
        total = total + number
    return total / len(values)


def format_fixed(value: Fraction, digits: int) -> str:
    """Return a fraction as text with ``digits`` digits behind the point. Ties round away from zero; -0 becomes 0."""
    scaled = abs(value) * 10**digits
    # floor(scaled + 1/2) whole units of the last digit; for scaled = n / d this is floor((2 n + d) / 2 d)
    units = (2 * scaled.numerator + scaled.denominator) // (2 * scaled.denominator)
    # zeros in front leave a digit before the point: 5 units of 0.01 are 005, which becomes 0.05
    text = f"{units:0{digits + 1}d}"
    if digits:
        text = f"{text[:-digits]}.{text[-digits:]}"
    if value < 0 and units:
        return f"-{text}"
    return text


def _as_number(other: Number | int | Fraction) -> Number:
    if isinstance(other, Number):
        return other
    return exact_number(other)

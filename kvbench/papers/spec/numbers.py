"""Printed numbers with what rounding hides, and arithmetic that carries it along."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Number:
    """A number and the interval that it can lie in: 41.86 as printed stands for anything from 41.855 to 41.865."""

    value: Fraction
    low: Fraction
    high: Fraction

    def __add__(self, other: Number | int) -> Number:
        b = _number(other)
        return Number(self.value + b.value, self.low + b.low, self.high + b.high)

    def __sub__(self, other: Number | int) -> Number:
        b = _number(other)
        return Number(self.value - b.value, self.low - b.high, self.high - b.low)

    def __mul__(self, other: Number | int | Fraction) -> Number:
        b = _number(other)
        ends = [x * y for x in (self.low, self.high) for y in (b.low, b.high)]
        return Number(self.value * b.value, min(ends), max(ends))

    def __truediv__(self, other: Number | int | Fraction) -> Number:
        b = _number(other)
        if b.low <= 0 <= b.high:
            raise ZeroDivisionError(f"{float(b.value)} cannot be told from zero")
        return self * Number(1 / b.value, 1 / b.high, 1 / b.low)

    def __float__(self) -> float:
        return float(self.value)

    def text(self, decimals: int) -> str:
        """Return the value with as many decimals, ties rounded away from zero as papers do."""
        return fixed(self.value, decimals)


def exactly(value: int | float | Fraction) -> Number:
    """Return a number that hides nothing; a float stands for its shortest decimal."""
    exact = Fraction(str(value)) if isinstance(value, float) else Fraction(value)
    return Number(exact, exact, exact)


def printed(text: str) -> Number:
    """Return the number of these characters, with half a unit of the last digit either way."""
    value, half = Fraction(text), Fraction(1, 2 * 10 ** decimals(text))
    return Number(value, value - half, value + half)


def decimals(text: str) -> int:
    """Return the number of digits behind the point."""
    return len(text.partition(".")[2])


def grade(text: str, recomputed: Number) -> str:
    """Return ``equal`` (rounds to these characters), ``rounding`` (hidden or cut digits explain them) or ``off``."""
    if fixed(recomputed.value, decimals(text)) == fixed(Fraction(text), decimals(text)):
        return "equal"
    shown, unit = printed(text), Fraction(1, 10 ** decimals(text))
    # 1.585 printed as 1.58 is cut, not rounded; towards zero
    low, high = (shown.low, shown.value + unit) if shown.value >= 0 else (shown.value - unit, shown.high)
    return "rounding" if recomputed.low <= high and low <= recomputed.high else "off"


def mean(numbers: Iterable[Number]) -> Number:
    """Return the plain mean."""
    values = list(numbers)
    total = exactly(0)
    for n in values:
        total = total + n
    return total / len(values)


def fixed(value: Fraction, digits: int) -> str:
    """Return fixed-point text, with ties away from zero and no negative zero."""
    scaled = abs(value) * 10**digits
    # floor(x + 1/2) of the absolute value, in whole units of the last digit
    units = (2 * scaled.numerator + scaled.denominator) // (2 * scaled.denominator)
    text = f"{units:0{digits + 1}d}"
    text = f"{text[:-digits]}.{text[-digits:]}" if digits else text
    return f"-{text}" if value < 0 and units else text


def _number(other: Number | int | Fraction) -> Number:
    """Return an exact number for an int or a fraction."""
    return other if isinstance(other, Number) else exactly(other)

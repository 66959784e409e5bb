"""Numbers, intervals, sizes and shares as texts, for everything that kvbench prints.

Halves are rounded away from zero, by the decimals that a number has: 0.15 is 0.2, and 2.5 is 3. A minus sign is U+2212,
which is as wide as a plus sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Context, Decimal
from math import isfinite

DASH = "—"
"""The text of a number that is not known."""
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
"""The bytes in each unit of a size, the smallest unit first."""
MORE = 3
"""The decimals that a number gets at most beyond those asked for, so that the ends of its interval differ."""
# a float holds 15 digits, and arithmetic spoils the last: 100 * 0.285 is 28.499999999999996
HELD = 14
# quantize refuses a number with more digits than the context, and a float has up to 309 before the point
CONTEXT = Context(prec=400, rounding=ROUND_HALF_UP)


def format_number(value: float | None, digits: int = 1, *, sign: bool = False) -> str:
    """Return a number with ``digits`` decimals; a dash for None. With ``sign``, it has its sign."""
    if value is None:
        return DASH
    return _write(value, digits, sign)


def format_significant(value: float | None, digits: int = 3) -> str:
    """Return a number with ``digits`` significant digits: 12.3, 0.0120, 1.20e-05, but 1234; a dash for None."""
    if value is None:
        return DASH
    decimals, exponent = _find_decimals(value, digits)
    return _write(value, decimals, exponent=exponent)


def with_interval(
    value: float | None,
    ci: Sequence[float] | None,
    digits: int = 1,
    *,
    significant: bool = False,
    sign: bool = False,
    mark: str = "",
    gap: str = "\n",
) -> str:
    """Return a number and its interval, with equal decimals: ``6.1 [6.0, 6.2]``. A dash for None.

    Both get up to MORE decimals more, until a unit of the last is not more than the distance of the ends: 98.77 [98.74,
    98.80]. With equal decimals, the number lies between the ends as printed.

    digits: the decimals, or with ``significant`` the significant digits of the number.
    sign: True to write the sign of the number also if it is a plus. Ends have none.
    mark: the text behind the number.
    gap: the text between the number and the interval.
    """
    if value is None:
        return DASH
    decimals, exponent = _find_decimals(value, digits) if significant else (digits, 0)
    if ci is None:
        return _write(value, decimals, sign, exponent) + mark
    low, high = ci
    # the factor is for a distance of 0.0999...
    distance = (high - low) * 10.0**-exponent * (1 + 1e-9)
    for tried in range(decimals, decimals + MORE + 1):
        if 10.0**-tried <= distance:
            decimals = tried
            break
    ends = f"[{_write(low, decimals, exponent=exponent)}, {_write(high, decimals, exponent=exponent)}]"
    return f"{_write(value, decimals, sign, exponent)}{mark}{gap}{ends}"


def format_percent(value: float) -> str:
    """Return a share, given in per cent, with one decimal where it has one: 12.5 %, 50 %."""
    return f"{_write(value, 1).removesuffix('.0')} %"


def format_size(n: float) -> str:
    """Return ``n`` bytes as text in the largest unit that they reach: ``1.5 MiB``."""
    return format_sizes([n])[0]


def format_sizes(values: Sequence[float | None]) -> list[str]:
    """Return numbers of bytes as texts in one unit, the largest that any number reaches; a dash for None."""
    largest = max((value for value in values if value is not None), default=0.0)
    reached = [(unit, unit_bytes) for unit, unit_bytes in UNITS.items() if largest >= unit_bytes]
    unit, unit_bytes = reached[-1] if reached else ("B", 1)
    texts = []
    for value in values:
        if value is None:
            texts.append(DASH)
            continue
        amount = value / unit_bytes
        digits = 1
        if unit == "B":
            digits = 0
        elif amount < 1:
            # 0.65 MiB, but 3.0 and 12.5 MiB
            digits = 2
        texts.append(f"{_write(amount, digits)} {unit}")
    return texts


def _find_decimals(value: float, digits: int) -> tuple[int, int]:
    """Return (the decimals that show so many significant digits, the power of ten in front of which they stand).

    The power is 0 unless the number is so small or so large that it would be mostly zeros.
    """
    if not isfinite(value) or not value:
        return 0, 0
    # 9.996 has the three digits of 10.0
    place = Context(prec=digits, rounding=ROUND_HALF_UP).create_decimal_from_float(value).adjusted()
    if place < -4 or place >= 6:
        return digits - 1, place
    return max(0, digits - 1 - place), 0


def _write(value: float, decimals: int, sign: bool = False, exponent: int = 0) -> str:
    """Return value / 10^exponent with so many decimals, and the power of ten behind it if it is not 1."""
    if not isfinite(value):
        return str(value)
    exact = Decimal(f"{value:.{HELD}g}").scaleb(-exponent)
    rounded = exact.quantize(Decimal(1).scaleb(-decimals), context=CONTEXT)
    if sign:
        text = f"{rounded:+f}"
    else:
        # what rounds to 0 is 0 and not -0; only a difference keeps the sign
        text = f"{rounded or abs(rounded):f}"
    text = text.replace("-", "−")
    if exponent:
        text += f"e{exponent:+03d}"
    return text

"""The final answer of a worked solution: a number (GSM8K) or the letter of an option (GPQA). Scores are 0 or 1."""

from __future__ import annotations

import re
from decimal import Decimal

_NUMBER = re.compile(
    r"((?<![0-9A-Za-z.)])-\$?(?=[0-9.]))?"  # a sign, but not the minus of 7-3
    r"((?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE]([-+]?[0-9]{1,3})(?![0-9A-Za-z]))?"
    r"(?:\s?/\s?([0-9]+(?:\.[0-9]+)?))?"
)
_MARKUP = re.compile(r"\\(?:boxed|text|textbf|mathbf|mathrm)\b")
_ANNOUNCED = re.compile(
    r"\b(?i:answer)\b(?:\s+is|\s*[:=])+[^A-Za-z]*(?:(?i:option|choice|letter)\b[^A-Za-z]*)?([A-D])\b"
)
_MARKED = re.compile(r"\(([A-Da-d])\)|\b([A-D])(?=[).:](?![A-Za-z0-9]))")
_ALONE = re.compile(r"\b([B-D]|A(?!\s+[a-z]))\b(?![-'’])")


def last_number(text: str) -> Decimal | None:
    """Return the last number of a text, or None.

    It may have commas between thousands, a sign before ``$``, an exponent, a fraction. ``%``, ``$`` and units do not
    change it; only ASCII digits count.
    """
    numbers = _NUMBER.findall(text.replace("−", "-").replace("{,}", ",").replace("\\$", "$"))
    if not numbers:
        return None
    sign, digits, exponent, divisor = numbers[-1]
    try:
        value = Decimal(digits.replace(",", "") + (f"e{exponent}" if exponent else ""))
        value = value / Decimal(divisor) if divisor else value
    except ArithmeticError:
        return None
    return value.copy_negate() if sign else value


def gsm8k(prediction: str, reference: str) -> float | None:
    """Return 1 if the last number of the prediction, behind its last ``:`` if it has one, is the reference's, else 0.

    Numbers are equal by value: ``$1,200.00`` is ``1200``. Returns None for a reference without a number.
    """
    expected = last_number(reference)
    if expected is None:
        return None
    return float(last_number(prediction.rpartition(":")[2]) == expected)


def letter(prediction: str, reference: str) -> float | None:
    """Return 1 if the prediction chooses the reference's letter, else 0; None for a reference other than A to D."""
    expected = reference.strip().upper()
    return float(chosen_letter(prediction) == expected) if expected in ("A", "B", "C", "D") else None


def chosen_letter(text: str) -> str | None:
    """Return the option A to D that a text chooses, or None.

    The rules are tried in this order: the text is nothing but a letter; the first letter announced by "answer is" or
    "answer:"; the first that stands in parentheses or before ``)``, ``.`` or ``:``; the first capital that stands alone
    and is not the article of a sentence.
    """
    text = _MARKUP.sub("", text)
    bare = text.strip(" \t\r\n()[]{}.,:;*$\"'`").upper()
    if bare in ("A", "B", "C", "D"):
        return bare
    for pattern in (_ANNOUNCED, _MARKED, _ALONE):
        if match := pattern.search(text):
            return next(group for group in match.groups() if group).upper()
    return None


def last_integer(prediction: str, reference: str) -> float | None:
    """Return 1 if the last run of digits in the prediction is the reference's number, else 0, as LongEval scores.

    Returns None for a reference that is no whole number.
    """
    wanted, found = reference.strip(), re.findall(r"[0-9]+", prediction)
    if not re.fullmatch(r"[0-9]+", wanted):
        return None
    return float(bool(found) and found[-1].lstrip("0") == wanted.lstrip("0"))

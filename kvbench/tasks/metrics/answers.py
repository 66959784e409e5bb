"""The final answer of a worked solution: a number (GSM8K) or the letter of an option (GPQA). Scores are 0 or 1."""

from __future__ import annotations

import re
from decimal import Decimal

_NUMBER = re.compile(
    r"((?<![0-9A-Za-z.)])-\$?(?=[0-9.]))?"  # a sign, but not the minus of 7-3
    r"((?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"  # 1,234.5 or 1234.5 or .5
    r"(?:[eE]([-+]?[0-9]{1,3})(?![0-9A-Za-z]))?"  # an exponent
    r"(?:\s?/\s?([0-9]+(?:\.[0-9]+)?))?"  # the divisor of a fraction
)
_MARKUP = re.compile(r"\\(?:boxed|text|textbf|mathbf|mathrm)\b")
# "the answer is (B)", "answer: option B"
_ANNOUNCED = re.compile(
    r"\b(?i:answer)\b(?:\s+is|\s*[:=])+[^A-Za-z]*(?:(?i:option|choice|letter)\b[^A-Za-z]*)?([A-D])\b"
)
# "(B)", or a letter before a closing parenthesis, a full stop or a colon
_MARKED = re.compile(r"\(([A-Da-d])\)|\b([A-D])(?=[).:](?![A-Za-z0-9]))")
# an A before a word in lower case is an article; the letters in D-day and A's choose nothing
_ALONE = re.compile(r"\b([B-D]|A(?!\s+[a-z]))\b(?![-'’])")


def find_last_number(text: str) -> Decimal | None:
    """Return the last number of a text; None if there is none or it has no value, as 1/0.

    The number may have commas between thousands, a sign before ``$``, an exponent or a divisor, as in 3/4. ``%``, ``$``
    and units do not change it. Only ASCII digits count.
    """
    # typeset texts have the sign − for a minus, and LaTeX writes 1{,}234 and \$5
    numbers = _NUMBER.findall(text.replace("−", "-").replace("{,}", ",").replace("\\$", "$"))
    if not numbers:
        return None
    sign, digits, exponent, divisor = numbers[-1]
    digits = digits.replace(",", "")
    if exponent:
        digits += f"e{exponent}"
    try:
        # Decimal keeps integers of any length exact
        value = Decimal(digits)
        if divisor:
            value = value / Decimal(divisor)
    except ArithmeticError:
        return None  # the divisor is 0
    if sign:
        value = value.copy_negate()  # unlike -value, this does not round
    return value


def gsm8k(prediction: str, reference: str) -> float | None:
    """Return 1 if the last number of the prediction is the reference's, else 0.

    If the prediction has a ``:``, only the text behind the last one counts. Numbers are equal by value: ``$1,200.00``
    is ``1200``. Returns None for a reference without a number.
    """
    expected = find_last_number(reference)
    if expected is None:
        return None
    return float(find_last_number(prediction.rpartition(":")[2]) == expected)


def letter(prediction: str, reference: str) -> float | None:
    """Return 1 if the prediction chooses the reference's letter, else 0; None for a reference that is not A to D."""
    expected = reference.strip().upper()
    if expected not in ("A", "B", "C", "D"):
        return None
    return float(find_chosen_letter(prediction) == expected)


def find_chosen_letter(text: str) -> str | None:
    """Return the option A to D that a text chooses, as a capital; None if it chooses none.

    These rules are tried in order. First, the text is nothing but a letter. Second, "answer is" or "answer:" announces
    a letter. Third, a letter stands in parentheses or before ``)``, ``.`` or ``:``. Fourth, a capital stands alone and
    is not the article of a sentence. Each rule takes its first match.
    """
    text = _MARKUP.sub("", text)
    bare = text.strip(" \t\r\n()[]{}.,:;*$\"'`").upper()
    if bare in ("A", "B", "C", "D"):
        return bare
    for pattern in (_ANNOUNCED, _MARKED, _ALONE):
        match = pattern.search(text)
        if match:
            # _MARKED has a group for each of its two forms; the group of the other form is None
            matched_groups = [group for group in match.groups() if group]
            return matched_groups[0].upper()
    return None


def last_integer(prediction: str, reference: str) -> float | None:
    """Return 1 if the last run of digits in the prediction is the reference's number, else 0, as LongEval scores.

    Returns None for a reference that is no whole number.
    """
    expected = reference.strip()
    if not re.fullmatch(r"[0-9]+", expected):
        return None
    numbers = re.findall(r"[0-9]+", prediction)
    if not numbers:
        return 0.0
    # 007 is 7; texts are compared, since Python refuses to read numbers of thousands of digits
    return float(numbers[-1].lstrip("0") == expected.lstrip("0"))

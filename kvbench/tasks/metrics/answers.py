"""The final answer of a worked solution: a number (GSM8K) or the letter of an option (GPQA). Scores are 0 or 1."""

from __future__ import annotations

import re
from decimal import Decimal

from kvbench.tasks.metrics.math_equal import find_last_boxed
from kvbench.tasks.metrics.text import cut_next_question

_NUMBER = re.compile(
    r"((?<![0-9A-Za-z.)])-\$?(?=[0-9.]))?"  # a sign, but not the minus of 7-3
    r"((?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"  # 1,234.5 or 1234.5 or .5
    r"(?:[eE]([-+]?[0-9]{1,3})(?![0-9A-Za-z]))?"  # an exponent
    r"(?:\s?/\s?([0-9]+(?:\.[0-9]+)?))?"  # the divisor of a fraction
)
# GSM8K's own mark of the final answer, but not a heading such as "#### 1. Count the eggs"
_MARKED_RESULT = re.compile(r"####(?![^\S\n]*[0-9]+[.)][^\S\n]*[A-Za-z])([^\n]*)")
_ANNOUNCED_RESULT = re.compile(r"\banswer\b[^\w\n]{0,3}(?:is\b|are\b|:|=)[\s:*]*", re.IGNORECASE)
# the end of the line, or of the sentence
_SENTENCE_END = re.compile(r"\n|[.!?](?=\s)")
# a time of day, a ratio or a choice is not one number
_SEVERAL = re.compile(r"[^A-Za-z0-9]*[0-9][0-9,.]*\s*(?::|or\b)\s*\$?[0-9]")
_MARKUP = re.compile(r"\\(?:boxed|text|textbf|mathbf|mathrm)\b")
# "the answer is (B)", "answer: option B"
_ANNOUNCED = re.compile(
    r"\b(?i:answer)\b(?:\s+is|\s*[:=])+[^A-Za-z]*(?:(?i:option|choice|letter)\b[^A-Za-z]*)?([A-D])\b"
)
# "(B)", or a letter before a closing parenthesis, a full stop or a colon
_MARKED = re.compile(r"\(([A-Da-d])\)|\b([A-D])(?=[).:](?![A-Za-z0-9]))")
# an A before a word in lower case is an article; the letters in D-day and A's choose nothing
_ALONE = re.compile(r"\b([B-D]|A(?!\s+[a-z]))\b(?![-'’])")


def list_numbers(text: str) -> list[Decimal | None]:
    """Return the numbers of a text in order; None in place of one that has no value, as 1/0.

    A number may have commas between thousands, a sign before ``$``, an exponent or a divisor, as in 3/4. ``%``, ``$``
    and units do not change it. Only ASCII digits count.
    """
    values: list[Decimal | None] = []
    # typeset texts have the sign − for a minus, and LaTeX writes 1{,}234 and \$5
    text = text.replace("−", "-").replace("{,}", ",").replace("\\$", "$")
    for sign, digits, exponent, divisor in _NUMBER.findall(text):
        digits = digits.replace(",", "")
        if exponent:
            digits += f"e{exponent}"
        try:
            # Decimal keeps integers of any length exact
            value = Decimal(digits)
            if divisor:
                value = value / Decimal(divisor)
        except ArithmeticError:
            values.append(None)  # the divisor is 0
            continue
        if sign:
            value = value.copy_negate()  # unlike -value, this does not round
        values.append(value)
    return values


def find_last_number(text: str) -> Decimal | None:
    """Return the last number of a text; None if there is none or it has no value."""
    return next(reversed(list_numbers(text)), None)


def find_result(text: str) -> Decimal | None:
    """Return the number of a worked solution's final answer; None if there is none.

    The final answer stands behind the first ``####``, else in the last ``\\boxed{}``, else behind the last "answer is"
    or "answer:", where these have a number. Otherwise the last number counts. What follows the final answer does not.
    """
    text = cut_next_question(text)
    announced = [match[1] for match in _MARKED_RESULT.finditer(text)]
    announced.append(find_last_boxed(text) or "")
    for match in reversed(list(_ANNOUNCED_RESULT.finditer(text))):
        announced.append(_SENTENCE_END.split(text[match.end() :], maxsplit=1)[0])
    for part in announced:
        if _SEVERAL.match(part):
            return None
        numbers = list_numbers(part)
        if numbers:
            return _pick_number(part, numbers)
    return find_last_number(text)


def _pick_number(part: str, numbers: list[Decimal | None]) -> Decimal | None:
    """Return the result in an announced answer: "18 dollars for 9 eggs", "9 * 2 = 18" and "9 and 9, thus 18" are 18.

    numbers: the numbers of the answer, at least one.
    """
    beginning = re.split(r"[A-Za-z(]", part, maxsplit=1)[0]
    # an expression ends with its result
    direct = list_numbers(beginning.rpartition("=")[2])
    if direct:
        return direct[0]
    return numbers[-1]


def gsm8k(prediction: str, reference: str) -> float | None:
    """Return 1 if the number of the prediction's final answer is the reference's, else 0.

    Numbers are equal by value: ``$1,200.00`` is ``1200``. Returns None for a reference without a number.
    """
    expected = find_last_number(reference)
    if expected is None:
        return None
    return float(find_result(prediction) == expected)


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
    is not the article of a sentence. The last announced letter counts, and the first match of the other rules.
    """
    text = _MARKUP.sub("", cut_next_question(text))
    bare = text.strip(" \t\r\n()[]{}.,:;*$\"'`").upper()
    if bare in ("A", "B", "C", "D"):
        return bare
    announced = _ANNOUNCED.findall(text)
    if announced:
        return str(announced[-1])
    for pattern in (_MARKED, _ALONE):
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

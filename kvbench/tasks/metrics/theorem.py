"""TheoremQA: answers of five types, each compared in its own way.

A small evaluator reads numbers, in place of the official script's LaTeX library and ``eval``. It knows sums, products,
powers, roots, fractions, a few functions and pi. If an answer is announced ("the answer is", ``\\boxed``), only the
text behind it counts. Otherwise the last number, list, letter or truth value of the text counts. Tolerances are the
official evaluator's: 4 per cent of the reference for floats, rounding for integers, lists sorted first. Source:
github.com/TIGER-AI-Lab/TheoremQA.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import TypeVar

from kvbench.tasks.metrics.arithmetic import evaluate_first, read_numbers, rewrite_operators
from kvbench.tasks.metrics.text import cut_next_question

T = TypeVar("T")
Answer = bool | int | float | str | tuple[int | float, ...]
"""A truth value, a number, an option such as ``(c)``, or a list of numbers."""

TOLERANCE = 0.04
"""The largest error of a float, relative to the reference, with which it counts as right."""
_ANNOUNCED = re.compile(r"\banswer\s*(?:is|are|:|=)\s*:?", re.IGNORECASE)
_TRUTH = re.compile(r"\b(not\s+)?(true|yes|false|no)\b", re.IGNORECASE)
_OPTION = re.compile(r"\(([a-f])\)", re.IGNORECASE)
# the end of a sentence behind a number or a bracket: "approx. 3" goes on
_SENTENCE_END = re.compile(r"(?<=[0-9)\]}%$])[.;!](?=\s)|\n")
_CLOSING = {"[": "]", "(": ")", "{": "}"}


def theorem_match(prediction: str, reference: str) -> float | None:
    """Return 1 if the prediction's final answer is the reference by the rule of the reference's type, else 0.

    Returns None for a reference of no known type.
    """
    expected = parse_reference(reference)
    if expected is None:
        return None
    # an announced answer begins its text, and words may follow; without one, the last answer of the prediction counts
    announced = find_announced_answer(prediction)
    if announced is not None:
        text, first = announced, True
    else:
        text, first = cut_next_question(prediction), False
    # truth values come before numbers, since Python counts True as 1
    if isinstance(expected, bool):
        return float(_find_truth(text, first) == expected)
    if isinstance(expected, str):
        return float(_find_option(text, first) == expected)
    if isinstance(expected, tuple):
        return float(_are_same_numbers(_find_list(text, first), expected))
    value = _find_number(text, first)
    return float(value is not None and is_close(value, expected))


def parse_reference(text: str) -> Answer | None:
    """Return the value of ``True``, ``11760``, ``1.0``, ``[0, 5]`` or ``(c)`` by its form; None for other texts."""
    stripped = text.strip()
    if stripped.lower() in ("true", "false"):
        return stripped.lower() == "true"
    if _OPTION.fullmatch(stripped):
        return stripped.lower()
    try:
        value = json.loads(stripped)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, list):
        if not value or not all(_is_number(entry) for entry in value):
            return None
        return tuple(value)
    if not _is_number(value):
        return None
    return value


def _is_number(value: object) -> bool:
    """Return True if a JSON value is a finite number. Truth values are not numbers, although Python counts them so."""
    if isinstance(value, bool):
        return False
    if isinstance(value, int):
        return True  # an integer of any size is finite: isfinite would make a float of it, and floats end at 10**308
    return isinstance(value, float) and math.isfinite(value)


def find_announced_answer(text: str) -> str | None:
    """Return the announced answer; None if the text announces no answer.

    It follows the last "answer is" or "answer:", or stands in the last ``\\boxed{}``. The later of the two counts.
    """
    text = cut_next_question(text)
    # both places are -1 without such words
    box_start = text.rfind("\\boxed{")
    words_end = max((match.end() for match in _ANNOUNCED.finditer(text)), default=-1)
    if words_end > box_start:
        # the answer ends with its sentence
        return _SENTENCE_END.split(text[words_end:].strip(), maxsplit=1)[0]
    if box_start < 0:
        return None
    return _read_text_in_braces(text, box_start + len("\\boxed"))


def is_close(value: float, reference: float) -> bool:
    """Return True if a number is right: after rounding for an integer reference, else within 4 per cent of it."""
    if not math.isfinite(value):
        return False
    if isinstance(reference, int):
        return round(value) == reference
    margin = TOLERANCE * abs(reference)
    return reference - margin <= value <= reference + margin


def _find_truth(text: str, first: bool) -> bool | None:
    """Return the first truth value of a text, or without ``first`` the last one; None if there is none.

    A "not" before the word reverses it.
    """
    matches = _TRUTH.findall(text)
    if not matches:
        return None
    negation, word = _pick_first_or_last(matches, first)
    value = word.lower() in ("true", "yes")
    if negation:
        return not value
    return value


def _find_option(text: str, first: bool) -> str | None:
    """Return the first option of a text, or without ``first`` the last one, as ``(c)``; None if there is none."""
    letters = _OPTION.findall(text)
    if letters:
        return f"({_pick_first_or_last(letters, first).lower()})"
    # an answer that is only a letter needs no parentheses
    bare = text.strip(" \t\r\n.,:;*$").lower()
    if re.fullmatch("[a-f]", bare):
        return f"({bare})"
    return None


def _find_number(text: str, first: bool) -> float | None:
    """Return the first number of a text, or without ``first`` the last one; None if there is none.

    The first number is that of an announced answer, which may be an expression. The last one is read without
    arithmetic.
    """
    if first:
        # the result of "x = 2 + 3 = 5" stands behind the last sign
        _, _, result = text.rpartition("=")
        return evaluate_first(result)
    values = read_numbers(text)
    if not values:
        return None
    return values[-1]


def _find_list(text: str, first: bool) -> list[float | None]:
    """Return the numbers of the first bracketed list of a text, or without ``first`` of the last one.

    Entries that are no numbers are None; without a list the result is []. The first list is that of an announced
    answer. It may lack brackets, and its numbers then stand between commas.
    """
    text = rewrite_operators(text)
    lists = []
    for stretch in _list_bracketed_stretches(text):
        # parentheses and braces also group an expression: with a comma or a semicolon inside they are a list
        if "," in stretch or ";" in stretch or stretch.startswith("["):
            lists.append(stretch)
    if lists:
        text = _pick_first_or_last(lists, first)[1:-1]  # without the brackets
    elif not first:
        return []
    # without their inner brackets, matrices and nested lists are flat
    flat = re.sub(r"[\[\]{}]", "", text)
    numbers = []
    for entry in re.split(r"[,;]|\band\b", flat):
        if entry.strip():
            # the result of "x = 2 + 3 = 5" stands behind the last sign
            _, _, result = entry.rpartition("=")
            numbers.append(evaluate_first(result))
    return numbers


def _pick_first_or_last(matches: Sequence[T], first: bool) -> T:
    if first:
        return matches[0]
    return matches[-1]


def _list_bracketed_stretches(text: str) -> list[str]:
    """Return the outermost stretches between a bracket and its partner, brackets included, in order."""
    # the places of open brackets, by the bracket that closes them: each kind of bracket pairs by itself
    open_places: dict[str, list[int]] = {closing: [] for closing in _CLOSING.values()}
    # (the place of the opening bracket, the place behind the closing one)
    pairs = []
    for i, character in enumerate(text):
        if character in _CLOSING:
            open_places[_CLOSING[character]].append(i)
        elif open_places.get(character):
            # a closing bracket belongs to the last open one; without an open one it has no partner
            pairs.append((open_places[character].pop(), i + 1))
    # the pairs are sorted by their beginnings, so a pair that begins before the last one has ended lies inside it
    outermost, end = [], 0
    for start, stop in sorted(pairs):
        if start >= end:
            outermost.append(text[start:stop])
            end = stop
    return outermost


def _read_text_in_braces(text: str, start: int) -> str:
    """Return the text between the brace at ``start`` and its partner; without a partner, all text behind the brace."""
    depth = 0  # the number of open braces
    for i in range(start, len(text)):
        if text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
        if depth == 0:
            return text[start + 1 : i]
    # a generation that was cut off may lack the closing brace
    return text[start + 1 :]


def _are_same_numbers(numbers: Sequence[float | None], expected: tuple[int | float, ...]) -> bool:
    """Return True if both hold the same numbers within tolerance, in any order. An entry that is no number is wrong."""
    values = [value for value in numbers if value is not None]
    if len(values) != len(numbers) or len(values) != len(expected):
        return False
    pairs = zip(sorted(values), sorted(expected), strict=True)
    return all(is_close(value, reference) for value, reference in pairs)

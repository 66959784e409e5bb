"""TheoremQA: answers of five types, each compared in its own way.

Numbers are read by a small evaluator instead of the official one's LaTeX library and ``eval``: sums, products,
powers, roots, fractions, a few functions and pi. Where an answer is announced ("the answer is", ``\\boxed``) only what
follows counts, else the last number, list, letter or truth value of the text. Tolerances are the official
evaluator's: 4 per cent of the reference for floats, rounding for integers, lists sorted first. Source:
github.com/TIGER-AI-Lab/TheoremQA.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence

from kvbench.tasks.metrics.arithmetic import clean, evaluate, numbers

Answer = bool | int | float | str | tuple[int | float, ...]

TOLERANCE = 0.04
_ANNOUNCED = re.compile(r"\banswer\s*(?:is|are|:|=)\s*:?", re.IGNORECASE)
_TRUTH = re.compile(r"\b(not\s+)?(true|yes|false|no)\b", re.IGNORECASE)
_OPTION = re.compile(r"\(([a-f])\)", re.IGNORECASE)
_CLOSING = {"[": "]", "(": ")", "{": "}"}


def theorem_match(prediction: str, reference: str) -> float | None:
    """Return 1 if the prediction's final answer is the reference by the rule of the reference's type, else 0.

    Returns None for a reference of no known type.
    """
    expected = parse_reference(reference)
    if expected is None:
        return None
    final = announced(prediction)
    text = prediction if final is None else final
    first = final is not None
    if isinstance(expected, bool):
        return float(_truth(text, first) == expected)
    if isinstance(expected, str):
        return float(_option(text, first) == expected)
    if isinstance(expected, tuple):
        return float(_same_numbers(_list(text, first), expected))
    value = _number(text, first)
    return float(value is not None and close(value, expected))


def parse_reference(text: str) -> Answer | None:
    """Return the value of ``True``, ``11760``, ``1.0``, ``[0, 5]`` or ``(c)`` by its form, None for anything else."""
    stripped = text.strip()
    if stripped.lower() in ("true", "false"):
        return stripped.lower() == "true"
    if _OPTION.fullmatch(stripped):
        return stripped.lower()
    try:
        value = json.loads(stripped)
    except (ValueError, RecursionError):
        return None
    values = value if isinstance(value, list) else [value]
    if not values or not all(type(v) in (int, float) and math.isfinite(v) for v in values):
        return None
    return tuple(value) if isinstance(value, list) else values[0]


def announced(text: str) -> str | None:
    """Return the announced answer: what follows the last "answer is" or "answer:", or stands in the last ``\\boxed{}``.

    Whichever is later in the text counts. Returns None if there is neither.
    """
    box = text.rfind("\\boxed{")
    after = max((m.end() for m in _ANNOUNCED.finditer(text)), default=-1)
    if after > box:
        return text[after:].strip().partition("\n")[0]
    return _boxed(text, box + len("\\boxed")) if box >= 0 else None


def close(value: float, reference: float) -> bool:
    """Tell if a number is right: after rounding for an integer, within 4 per cent of the reference for a float."""
    if not math.isfinite(value):
        return False
    margin = TOLERANCE * abs(reference)
    return (
        round(value) == reference if isinstance(reference, int) else reference - margin <= value <= reference + margin
    )


def _truth(text: str, first: bool) -> bool | None:
    matches = _TRUTH.findall(text)
    if not matches:
        return None
    negated, word = matches[0 if first else -1]
    return (word.lower() in ("true", "yes")) != bool(negated)


def _option(text: str, first: bool) -> str | None:
    matches = _OPTION.findall(text)
    if matches:
        return f"({matches[0 if first else -1].lower()})"
    bare = text.strip(" \t\r\n.,:;*$").lower()
    return f"({bare})" if re.fullmatch("[a-f]", bare) else None


def _number(text: str, first: bool) -> float | None:
    if not first:
        values = numbers(text)
        return values[-1] if values else None
    return evaluate(text.rpartition("=")[2])


def _list(text: str, first: bool) -> list[float | None]:
    """Return the numbers of the last bracketed list, or of the ``first``; None in place of what is no number.

    An announced list, which is the first, may lack brackets: then its numbers stand between commas.
    """
    text = clean(text)
    groups = [g for g in _bracketed(text) if "," in g or ";" in g or g.startswith("[")]
    if groups:
        text = groups[0 if first else -1]
    elif not first:
        return []
    parts = re.split(r"[,;]|\band\b", re.sub(r"[\[\]{}]", "", text if not groups else text[1:-1]))
    return [evaluate(part.rpartition("=")[2]) for part in parts if part.strip()]


def _bracketed(text: str) -> list[str]:
    """Return the outermost stretches between a bracket and its partner, brackets included, in order."""
    openings: dict[str, list[int]] = {closing: [] for closing in _CLOSING.values()}
    pairs = []
    for i, character in enumerate(text):
        if character in _CLOSING:
            openings[_CLOSING[character]].append(i)
        elif openings.get(character):
            pairs.append((openings[character].pop(), i + 1))
    outermost, end = [], 0
    for start, stop in sorted(pairs):
        if start >= end:
            outermost.append(text[start:stop])
            end = stop
    return outermost


def _boxed(text: str, start: int) -> str:
    """Return the text between the brace at ``start`` and its partner, or the end of the text."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if not depth:
            return text[start + 1 : i]
    return text[start + 1 :]


def _same_numbers(numbers: Sequence[float | None], expected: tuple[int | float, ...]) -> bool:
    values = [v for v in numbers if v is not None]
    if len(values) != len(numbers) or len(values) != len(expected):
        return False
    return all(close(v, e) for v, e in zip(sorted(values), sorted(expected), strict=True))

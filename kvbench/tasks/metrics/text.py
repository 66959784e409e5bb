"""Metrics that compare words or characters of an answer with one reference. Scores are in [0, 1]."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NEXT_QUESTION = re.compile(r"(?<=\S)\s*\n\s*(?:Question|Problem|Q)\s?:")


def first_line(text: str) -> str:
    """Return the first line after leading newlines. It is the scored part of an answer in few-shot tasks."""
    return text.lstrip("\n").split("\n")[0]


def cut_next_question(text: str) -> str:
    """Return a worked solution up to the next question with which a base model goes on, as after solved examples."""
    match = _NEXT_QUESTION.search(text)
    if match is None:
        return text
    return text[: match.start()]


def normalise_answer(text: str) -> str:
    """Return SQuAD's normal form: lower case, no ASCII punctuation, no English articles, single spaces.

    Source: rajpurkar.github.io/SQuAD-explorer, evaluate-v1.1.py.
    """
    # SQuAD's order: punctuation goes first, so that "a-b" becomes the word "ab" and contains no article
    lowered = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", lowered).split())


def token_f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall of the prediction's tokens; 0 if no token is shared."""
    # a token counts as often as it stands in both texts
    shared = sum((Counter(prediction) & Counter(reference)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(prediction), shared / len(reference)
    # F1 = 2 P R / (P + R)
    return (2 * precision * recall) / (precision + recall)


def qa_f1(prediction: str, reference: str) -> float:
    """Return token F1 of the normalised answers, as LongBench scores question answering.

    Two answers that are both empty after normalisation score 0, as in LongBench. Source: github.com/THUDM/LongBench.
    """
    return token_f1(normalise_answer(prediction).split(), normalise_answer(reference).split())


def exact_match(prediction: str, reference: str) -> float:
    """Return 1 if both texts are equal after merging and stripping whitespace, else 0."""
    return float(prediction.split() == reference.split())


def contains_any_case(prediction: str, reference: str) -> float | None:
    """Return 1 if the reference occurs in the prediction whatever its case, else 0; None if the reference is blank."""
    return contains(prediction.lower(), reference.lower())


def contains(prediction: str, reference: str) -> float | None:
    """Return 1 if the reference occurs literally in the prediction, else 0; None if the reference is blank."""
    if not reference.strip():
        return None  # a blank reference would be part of nearly every prediction
    return float(reference in prediction)

"""Slow copies of the metrics, written from their definitions and sharing nothing with the package: the oracles."""

from __future__ import annotations

import random
import string
from unittest import mock

import numpy as np


def lcs_length(a: str, b: str) -> int:
    codes = np.array([ord(y) for y in b], dtype=np.int64)
    row = np.zeros(len(b) + 1, dtype=np.int64)
    for x in a:
        # above, or one more than above and before where the characters are equal; then the largest of all before
        row[1:] = np.maximum(row[1:], np.where(codes == ord(x), row[:-1] + 1, 0))
        row = np.maximum.accumulate(row)
    return int(row[-1])


def indel_ratio(a: str, b: str) -> float:
    """1 - characters to insert and delete over the sum of the lengths (in this order: ties round as in the package)."""
    total = len(a) + len(b)
    return 1.0 - (total - 2 * lcs_length(a, b)) / total if total else 1.0


def fuzz_ratio(a: str, b: str) -> int:
    if a == b:
        return 100
    return round(100 * indel_ratio(a, b)) if a and b else 0


def squad_words(text: str) -> list[str]:
    kept_tokens = "".join(c for c in text.lower() if c not in string.punctuation)
    words: list[str] = []
    current = ""
    for character in [*kept_tokens, " "]:
        if character.isalnum() or character == "_":
            current += character
            continue
        words.append(" " if current in ("a", "an", "the") else current)
        words.append(character)
        current = ""
    return "".join(words).split()


def f1(prediction: str, reference: str) -> float:
    p, r = squad_words(prediction), squad_words(reference)
    rest = list(r)
    same = 0
    for word in p:
        if word in rest:
            rest.remove(word)
            same += 1
    return 2 * same / (len(p) + len(r)) if same else 0.0


def classification(prediction: str, reference: str, classes: list[str]) -> float:
    collected = []
    for name in classes:
        if name in prediction:
            collected.append(name)
    for name in collected:  # removing while iterating, as the benchmark does
        if name in reference and name != reference:
            collected.remove(name)
    return 1.0 / len(collected) if reference in collected else 0.0


def share_of_numbers(prediction: str, right: str) -> float:
    numbers, digits = [], ""
    for character in prediction + " ":
        if character.isdecimal():
            digits += character
        elif digits:
            numbers.append(digits)
            digits = ""
    return sum(n == right for n in numbers) / len(numbers) if numbers else 0.0


def lcs_table(x: list[str], y: list[str]) -> np.ndarray:
    """Return the lengths of the longest common subsequences of all beginnings of x and y, [1 + len(x), 1 + len(y)]."""
    numbers = {word: i for i, word in enumerate({*x, *y})}
    codes = np.array([numbers[word] for word in y], dtype=np.int64)
    table = np.zeros((len(x) + 1, len(y) + 1), dtype=np.int64)
    for above, row, word in zip(table, table[1:], x, strict=False):
        row[1:] = np.maximum(above[1:], np.where(codes == numbers[word], above[:-1] + 1, 0))
        np.maximum.accumulate(row, out=row)
    return table


def rouge_l(prediction: str, reference: str) -> float:
    """The package itself, as LongBench calls it: 0 where it raises. Its table of lengths is made by rows."""
    from rouge import Rouge, rouge_score

    try:
        with mock.patch.object(rouge_score, "_lcs", lcs_table):
            return Rouge().get_scores([prediction], [reference], avg=True)["rouge-l"]["f"]
    except Exception:
        return 0.0


# Code points that LongBench drops from Chinese beside ASCII punctuation, as ranges.
CHINESE_MARKS = (
    *(range(0xFF01, 0xFF0E), range(0xFF0F, 0xFF10), range(0xFF1A, 0xFF21), range(0xFF3B, 0xFF41)),
    *(range(0xFF5B, 0xFF65), range(0x3001, 0x3004), range(0x300B, 0x3012), range(0x3014, 0x3020)),
    *(range(0x3030, 0x3031), range(0x303E, 0x3040), range(0x2013, 0x2015), range(0x2018, 0x201A)),
    *(range(0x201B, 0x2020), range(0x2026, 0x2028), range(0xFE4F, 0xFE50)),
)


def chinese_words(text: str) -> list[str]:
    import jieba

    words = []
    for word in jieba.cut(text, cut_all=False):
        kept_tokens = ""
        for c in word.lower():
            mark = c in string.punctuation or any(ord(c) in r for r in CHINESE_MARKS)
            kept_tokens += "" if mark or c.isspace() else c
        if kept_tokens:
            words.append(kept_tokens)
    return words


def f1_zh(prediction: str, reference: str) -> float:
    p, rest = chinese_words(prediction), chinese_words(reference)
    total, same = len(p) + len(rest), 0
    for word in p:
        if word in rest:
            rest.remove(word)
            same += 1
    return 2 * same / total if same else 0.0


def rouge_zh(prediction: str, reference: str) -> float:
    import jieba

    return rouge_l(" ".join(jieba.cut(prediction)), " ".join(jieba.cut(reference)))


def code_line(prediction: str) -> str:
    for line in prediction.lstrip("\n").split("\n"):
        if "`" not in line and "#" not in line and "//" not in line:
            return line
    return ""


def difflib_ratio(a: str, b: str) -> int:
    import difflib

    return round(100 * difflib.SequenceMatcher(None, a, b).ratio()) if a and b else 100 * (a == b)


ALPHABETS = (
    "ab .",
    "the a an cat. ,;'\n",
    "aäß€é 漢字。١٢3 .\u200b\u2028\u00a0",
    "x`#/\n\t =(){}",
    "0123 Paragraph\n",
    "🙂👩‍👩‍👧 é.",
)


def texts(n: int, longest: int, seed: int = 0) -> list[str]:
    """Adversarial strings: empty, blank, dots only, unicode, and ``n`` random ones."""
    rng = random.Random(seed)
    fixed = ["", " ", "\n", ".", "...", " . . ", "a", "A.", "the", "```", "# only a comment\n", "\ud800", "\x00", "ﬁ İ"]
    return fixed + ["".join(rng.choices(rng.choice(ALPHABETS), k=rng.randrange(1, longest))) for _ in range(n)]


def pairs(n: int, longest: int, seed: int = 0) -> list[tuple[str, str]]:
    """Pairs of such strings, related ones among them."""
    rng = random.Random(f"pairs/{seed}")
    pool = texts(n, longest, seed)
    out = [(rng.choice(pool), rng.choice(pool)) for _ in range(n)]
    for text in pool:
        cut = rng.randrange(len(text) + 1)
        out.append((text[:cut] + rng.choice(pool) + text[cut:], text))
    return out

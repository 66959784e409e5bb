"""The words and the essays of RULER's prompts. Their content is pinned, since other lists would be another data set."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cache
from importlib.resources import files as package_files
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

from kvbench.base.errors import UsageError
from kvbench.base.extras import require

LISTS = ("noun", "adjective", "verb")
VERSION = "2.2.0"
"""The version of wonderwords whose lists are the data."""
# SHA-256 of the three lists of wonderwords 2.2.0; the published keys need exactly these
DIGEST = "cf46787c2791534b14ff97f8f4a70add1f363fd246099957ba66b7b9c8db3df3"
# SHA-256 of the words of 49 essays, with which RULER's own haystack begins
ESSAYS_DIGEST = "14ca63813ed994265c91e1d53f181afb6e3bca26193131c86f6ea78f5e52da86"


@cache
def read_word_lists() -> tuple[tuple[str, ...], ...]:
    """Return wonderwords' (nouns, adjectives, verbs). Raises UsageError for other lists than version 2.2.0 has."""
    require("wonderwords", "dataset ruler")
    folder = package_files("wonderwords") / "assets"
    texts = [(folder / f"{name}list.txt").read_text(encoding="utf-8") for name in LISTS]
    if hashlib.sha256("\0".join(texts).encode()).hexdigest() != DIGEST:
        raise UsageError(
            f"dataset ruler: the installed wonderwords has other words than its version {VERSION}, so that keys would "
            f"differ from RULER's: pip install wonderwords=={VERSION}"
        )
    word_lists = []
    for text in texts:
        word_lists.append(tuple(line.rstrip() for line in text.splitlines()))
    return tuple(word_lists)


class _Block(NamedTuple):
    """Pairs of one adjective that are neighbours in the sorted order of all pairs.

    first_pair: the first pair, by which blocks are sorted.
    prefix: the adjective and a dash.
    low, high: the range of the pairs' nouns in ``KeyWords.nouns``, without the end.
    """

    first_pair: str
    prefix: str
    low: int
    high: int


class KeyWords(Sequence[str]):
    """All ``adjective-noun`` pairs in sorted order, six million. Each pair is made when it is drawn."""

    def __init__(self) -> None:
        nouns, adjectives, _ = read_word_lists()
        self.nouns = sorted(set(nouns))
        prefixes = sorted({f"{adjective}-" for adjective in adjectives})
        blocks = []
        for prefix in prefixes:
            # in sorted order, the pairs of ``blue-eyed-`` divide those of ``blue-`` into two blocks: they stand where a
            # noun ``eyed-`` would stand
            edges = [0, len(self.nouns)]
            for other in prefixes:
                if other.startswith(prefix) and other != prefix:
                    edges.append(bisect_left(self.nouns, other.removeprefix(prefix)))
            for low, high in pairwise(sorted(edges)):
                blocks.append(_Block(prefix + self.nouns[low], prefix, low, high))
        self.blocks = sorted(blocks)
        # the number of pairs up to the end of each block
        self.ends = list(accumulate(block.high - block.low for block in self.blocks))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: Any) -> Any:
        """Return the pair with this index, which counts from 0. Slices and negative indices are not served."""
        # the block of the pair is the first that ends behind the index
        number = bisect_right(self.ends, index)
        block = self.blocks[number]
        # count from the end of the block, since the block's end among all pairs is known
        pairs_from_end = self.ends[number] - index
        return block.prefix + self.nouns[block.high - pairs_from_end]


def list_all_words() -> list[str]:
    """Return all different nouns, adjectives and verbs, sorted."""
    return sorted(set(chain.from_iterable(read_word_lists())))


class Essays:
    """A text whose first words are returned in sentences. Its length is its number of words.

    NLTK's Punkt for English finds the sentences. Punkt looks only at neighbouring words. The text is therefore divided
    once and then cut.
    """

    def __init__(self, text: str) -> None:
        """Divide a text into words and sentences. Raises UsageError for an empty text, or without the package punkt."""
        require("punkt", "dataset ruler")
        import punkt

        words = text.split()
        if not words:
            raise UsageError("dataset ruler: the haystack holds no text: give haystack=FOLDER of .txt files")
        self.text = " ".join(words)
        # the end of each word among the characters
        self.ends: list[int] = []
        start = 0
        for word in words:
            self.ends.append(start + len(word))
            start += len(word) + 1  # a space follows
        # the (start, end) of each sentence among the characters
        self.spans = list(punkt.tokenizer_for("english").span_tokenize(self.text))

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def are_rulers(self) -> bool:
        """True if RULER's own haystack begins with these words."""
        return hashlib.sha256(self.text.encode()).hexdigest() == ESSAYS_DIGEST

    def sentences(self, words: int) -> list[str]:
        """Return the sentences that make up the first ``words`` words, at least one. The last sentence may be cut."""
        cut = self.ends[min(words, len(self)) - 1]
        # the number of sentences that begin before the cut: a span (start, end) is less than (cut, 0) if start < cut
        count = bisect_left(self.spans, (cut, 0))
        return [self.text[start : min(end, cut)] for start, end in self.spans[:count]]

"""The choice of an answer's tokens from logits, and the end of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

WIDEST_CHARACTER = 4
"""The most tokens that one character takes: one for each byte of its UTF-8."""
WITHOUT_TEXT = 16
"""How many tokens without a text of their own may stand inside a stop text."""


@dataclass(frozen=True)
class StopTexts:
    """Texts that are looked for in the decoded text of an answer. Special tokens are written out in it.

    texts: the texts, none of them empty.
    tokenizer: the tokenizer that decodes answers; it may be None without texts.
    """

    texts: tuple[str, ...] = ()
    tokenizer: Any = None

    def stand_in(self, tokens: Sequence[int]) -> bool:
        """Return True if a text stands in an answer of ``tokens``, given that none stood before its last token."""
        if not self.texts or not _may_complete(self.tokenizer, self.texts, tokens[-1]):
            return False
        # the last token completes the text, so the text lies in the last tokens
        longest = max(map(len, self.texts))
        last_tokens = tokens[-(WIDEST_CHARACTER * longest + WITHOUT_TEXT) :]
        # the beginning of a few last tokens may decode differently: the whole answer decides
        return self._hold(last_tokens) and self._hold(tokens)

    def _hold(self, tokens: Sequence[int]) -> bool:
        decoded = self.tokenizer.decode(tokens, skip_special_tokens=False)
        return any(text in decoded for text in self.texts)

    def cut(self, tokens: Sequence[int]) -> tuple[list[int], str]:
        """Return (the tokens before the first text, the characters behind them and before the text).

        There are such characters if the text begins inside a token. Without a text, all tokens are returned.
        """
        if not self.texts:
            return list(tokens), ""
        decode = self.tokenizer.decode
        before = cut_text(decode(tokens, skip_special_tokens=False), self.texts)
        count = len(tokens)
        # also tokens that end inside a character decode to something else than the text's beginning
        while not before.startswith(decoded := decode(tokens[:count], skip_special_tokens=False)):
            count -= 1
        return list(tokens[:count]), before[len(decoded) :]


def cut_text(text: str, stop_texts: Sequence[str]) -> str:
    """Return the part of ``text`` before the first of ``stop_texts`` in it, or all of it."""
    return text[: min((text.index(stop) for stop in stop_texts if stop in text), default=len(text))]


@lru_cache(maxsize=2**16)
def _may_complete(tokenizer: Any, texts: tuple[str, ...], token: int) -> bool:
    """Return False if no text can end in a token's characters. Most tokens need no look at the answer then."""
    piece = tokenizer.decode([token], skip_special_tokens=False)
    # a tokenizer may drop the space at the beginning of a text, and a byte of a longer character has no text of its own
    if not piece.strip(" ") or "\N{REPLACEMENT CHARACTER}" in piece:
        return True
    return any(text[-1] in piece or text[-1] == " " for text in texts)


def find_special_token(tokenizer: Any, text: str) -> int | None:
    """Return the id of the special token whose text is ``text``; None if the text is not that of a special token."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    # special tokens are those that decoding can leave out
    if len(ids) == 1 and not tokenizer.decode(ids, skip_special_tokens=True):
        return int(ids[0])
    return None


@dataclass(frozen=True)
class Ending:
    """The rules that choose one row's tokens and end its answer.

    limit: the most tokens of an answer.
    stop: tokens that end an answer.
    texts: texts that end an answer. It ends with the token that completes one of them.
    min_new_tokens: how many other tokens an answer has before its end can come.
    forbid_first: texts that cannot stand in the first token.
    temperature: 0 takes the likeliest token. Otherwise tokens are drawn from the softmax of logits / temperature.
    top_p: tokens are drawn from the smallest set of likeliest tokens that has this probability together.
    seed: the seed of the row's own random generator, so that its draws do not depend on the batch.
    """

    limit: int
    stop: frozenset[int] = frozenset()
    texts: StopTexts = StopTexts()
    min_new_tokens: int = 0
    forbid_first: StopTexts = StopTexts()
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def is_over(self, tokens: Sequence[int]) -> bool:
        """Return True if an answer of these ``tokens`` has ended, stop texts apart."""
        return len(tokens) >= self.limit or bool(tokens and tokens[-1] in self.stop)

    def list_forbidden(self, count: int) -> frozenset[int]:
        """Return the tokens that may not follow the first ``count`` tokens of an answer."""
        return self.stop if count < self.min_new_tokens else frozenset()

    def is_too_early(self, tokens: Sequence[int]) -> bool:
        """Return True if the last of ``tokens`` completes a text that may not stand in an answer yet."""
        if len(tokens) <= self.min_new_tokens and self.texts.stand_in(tokens):
            return True
        return len(tokens) == 1 and self.forbid_first.stand_in(tokens)

    def cut(self, tokens: Sequence[int]) -> tuple[list[int], str]:
        """Return (an answer's tokens without its end, the characters behind them that belong to the answer, too)."""
        if tokens and tokens[-1] in self.stop:
            tokens = tokens[:-1]
        return self.texts.cut(tokens)


def draw_token(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """Return a token drawn by logits [V], from the smallest set of likeliest tokens that has the mass ``top_p``.

    The probabilities are softmax(logits / temperature).
    """
    probs, order = (logits.float() / temperature).softmax(dim=-1).cpu().sort(descending=True, stable=True)
    # mass[i] is the probability of the i + 1 likeliest tokens together
    mass = probs.cumsum(dim=-1)
    # the smallest set with the mass top_p ends with the first token whose mass reaches top_p; rounding may leave even
    # the mass of all tokens below top_p
    count = min(int((mass < top_p).sum()) + 1, len(mass))
    # inversion: a uniform point in the set's mass falls on each token with the token's probability
    point = torch.rand((), generator=generator) * mass[count - 1]
    place = min(int((mass < point).sum()), count - 1)
    return int(order[place])


def forbid_tokens(logits: Tensor, forbidden: Sequence[frozenset[int]]) -> Tensor:
    """Return logits [B, V] with -inf for the tokens that each row must not produce now."""
    if any(forbidden):
        logits = logits.clone()
        for row, ids in enumerate(forbidden):
            logits[row, sorted(ids)] = -torch.inf
    return logits

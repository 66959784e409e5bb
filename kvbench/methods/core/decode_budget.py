"""A budget while decoding for selectors that choose from the prompt. They choose again after a number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.kv.observation import Observation
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.base import Modifier, Selector
from kvbench.storage.roles import Evictor, Packer

LONG = 2**20
"""A text length, in tokens, beyond any window or budget. ``refusal`` asks selectors for their needs at it."""


@dataclass(frozen=True)
class DecodeBudget(Evictor):
    """A selector that chooses again while decoding, over all tokens that a layer holds.

    Its budget is a number of tokens (``decode_budget``), or a share of the tokens read so far (``decode_ratio``). After
    every ``every`` new tokens it chooses among the tokens held, by attention over these tokens alone. The last of them
    are its window. Between two choices new tokens are added. kvpress's DecodingPress does the same for a number.
    """

    selector: Selector
    modifiers: tuple[Modifier, ...]
    every: int = 0
    packer: Packer | None = None

    @property
    def queries(self) -> int:
        return self.selector.needs(LONG).last_q

    @property
    def grows(self) -> bool:
        return self.selector.kv_size is None

    def choose_again(self, cache: LayerCache, obs: Observation) -> LayerCache:
        return self.selector.choose(cache, obs, self.modifiers)

    def head_budgets(self, cache: LayerCache, layer: int) -> Sequence[int]:
        assert cache.observed is not None
        # a head holds its budget and the new tokens that come before the next choice
        return [self.selector.budget(cache.seen, layer, cache.observed.n_layers) + self.every] * cache.heads

    def tokens_after(self, cache: LayerCache, layer: int, new: int) -> tuple[list[int], list[int]]:
        assert cache.observed is not None
        tokens = most = cache.tokens
        seen, end = cache.seen, cache.seen + new
        while seen < end:
            # read counts new tokens so far; the selector chooses again after each ``every`` of them
            read = seen - cache.prompt_tokens
            if read and read % self.every == 0:
                tokens = min(tokens, self.selector.budget(seen, layer, cache.observed.n_layers))
            # all tokens up to the next choice are added to those held
            added = min(end - seen, self.every - read % self.every)
            tokens, seen = tokens + added, seen + added
            most = max(most, tokens)
        return [tokens] * cache.heads, [most] * cache.heads


def refusal(selector: Selector) -> str:
    """Return why a selector with a budget while decoding cannot choose again, or '' if it can."""
    if selector.evicts:
        return "it evicts while decoding by itself, to its own budget"
    again = selector.while_decoding()
    needs = again.needs(LONG)
    if again.rebalances:
        return "it divides one budget over layers, which a step computes one after the other"
    if needs.colsums or needs.colsums_bits:
        return "it reads the attention of all queries, and a step has only its own"
    # the number of queries grows with the text, so the selector reads all of them
    if needs.last_q != again.needs(2 * LONG).last_q:
        return "it reads all queries, and only the last are kept while decoding"
    if needs.first_q > 0:
        return "it reads the prompt's first queries"
    if needs.hidden or needs.call:
        return "it reads hidden states or the attention module, of the prompt alone"
    # two lengths are tried, because whole chunks may happen to fit one of them
    for n in (LONG, LONG + 1):
        expected = again.expected(n, 0, 2, heads=2)
        if expected is None or expected.low != expected.high:
            return "how many tokens each head keeps follows from the data, and slots are reserved for a fixed number"
    return ""

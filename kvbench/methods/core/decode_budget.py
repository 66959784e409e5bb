"""A budget while decoding for selectors that choose of the prompt: they are asked again after every so many tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.kv.observation import Observation
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.base import Modifier, Selector
from kvbench.storage.roles import Evictor, Packer

LONG = 2**20  # tokens of a text, at which a selector is asked what it needs


@dataclass(frozen=True)
class DecodeBudget(Evictor):
    """A selector that is asked again while decoding, over all tokens that a layer holds.

    After every ``every`` new tokens it chooses among the tokens held, the last of them its window, by attention over
    these tokens alone. Between two choices new tokens are added to them. kvpress's DecodingPress does the same.
    """

    selector: Selector
    modifiers: tuple[Modifier, ...]
    every: int = 0
    packer: Packer | None = None

    @property
    def queries(self) -> int:
        return self.selector.needs(LONG).last_q

    def choose_again(self, cache: LayerCache, obs: Observation) -> LayerCache:
        return self.selector.choose(cache, obs, self.modifiers)

    def head_budgets(self, cache: LayerCache, layer: int) -> Sequence[int]:
        assert cache.observed is not None
        return [self.selector.budget(cache.seen, layer, cache.observed.n_layers) + self.every] * cache.heads

    def tokens_after(self, cache: LayerCache, layer: int, new: int) -> tuple[list[int], list[int]]:
        assert cache.observed is not None
        held = most = cache.tokens
        seen, end = cache.seen, cache.seen + new
        while seen < end:
            read = seen - cache.prompt_tokens
            if read and read % self.every == 0:
                held = min(held, self.selector.budget(seen, layer, cache.observed.n_layers))
            added = min(end - seen, self.every - read % self.every)
            held, seen = held + added, seen + added
            most = max(most, held)
        return [held] * cache.heads, [most] * cache.heads


def refusal(selector: Selector) -> str:
    """Return why a selector with a ``decode_budget`` cannot be asked again while decoding; '' if it can."""
    if selector.evicts:
        return "it evicts while decoding by itself, to its own budget"
    again = selector.while_decoding()
    needs, longer = again.needs(LONG), again.needs(2 * LONG)
    expected = [again.expected(n, 0, 2, 2) for n in (LONG, LONG + 1)]  # whole chunks may fit one of the two
    reasons = {
        "it divides one budget over layers, which a step computes one after the other": again.rebalances,
        "it reads the attention of all queries, and a step has only its own": needs.colsums or bool(needs.colsums_bits),
        "it reads all queries, and only the last are kept while decoding": needs.last_q != longer.last_q,
        "it reads the prompt's first queries": needs.first_q > 0,
        "it reads hidden states or the attention module, of the prompt alone": needs.hidden or needs.call,
        "how many tokens each head keeps follows from the data, and slots are reserved for a fixed number": (
            any(e is None or e.low != e.high for e in expected)
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")

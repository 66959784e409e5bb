"""A budget while decoding (``decode_budget``) for selectors that by themselves compress only the prompt.

Such a selector chooses again after every ``decode_every`` new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.kv.observation import Observation
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.base import Modifier, Selector
from kvbench.storage.roles import Evictor, Packer

LONG = 2**20
"""A text length, in tokens, beyond any window or budget. ``explain_refusal`` asks selectors for their needs at it."""


@dataclass(frozen=True)
class DecodeBudget(Evictor):
    """A selector that chooses again while decoding, over all tokens that a layer holds, old and new.

    Its budget is a number of tokens (``decode_budget``), or a share of the tokens read so far (``decode_ratio``).
    Between two choices the cache grows by ``every`` tokens. Each choice scores the tokens held by attention over these
    tokens alone, and the last of them are its window. kvpress's DecodingPress does the same for a number.

    selector: the selector with the budget while decoding as its only one, see ``Selector.while_decoding``.
    modifiers: the stages that change its scores.
    every: the number of new tokens between two choices.
    packer: the packer of every token, or None if tokens stay exact.
    """

    selector: Selector
    modifiers: tuple[Modifier, ...]
    # without defaults here, the dataclass would take the properties of ``Evictor`` as defaults
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
        """Return (tokens, most) after ``new`` more tokens, each for every stored head.

        A head gains every new token, and falls to its budget at each choice.
        """
        assert cache.observed is not None
        # held and most_held count the tokens of one head, ``seen`` the tokens of the text read so far
        held, most_held = cache.tokens, cache.tokens
        seen, end = cache.seen, cache.seen + new
        while seen < end:
            behind_prompt = seen - cache.prompt_tokens
            since_choice = behind_prompt % self.every
            # the selector chooses when ``every`` tokens are new, and then holds its budget
            if behind_prompt and since_choice == 0:
                held = min(held, self.selector.budget(seen, layer, cache.observed.n_layers))
            # until the next choice, or the end, every new token is added
            added = min(self.every - since_choice, end - seen)
            held += added
            seen += added
            most_held = max(most_held, held)
        # all heads hold equally many tokens
        return [held] * cache.heads, [most_held] * cache.heads


def explain_refusal(selector: Selector) -> str:
    """Return why a selector cannot choose again while decoding, under ``decode_budget`` or ``decode_ratio``.

    Return '' if it can. A decode step has the last queries and the cached tokens of one layer, and no more of the
    prompt. A selector that needs more than these is refused.
    """
    if selector.evicts:
        return "it evicts while decoding by itself, to its own budget"
    decoding_selector = selector.while_decoding()
    needs = decoding_selector.needs(LONG)
    if decoding_selector.rebalances:
        return "it divides one budget over layers, which a step computes one after the other"
    if needs.colsums or needs.colsums_bits:
        return "it reads the attention of all queries, and a step has only its own"
    # the number of queries grows with the text, so the selector reads all of them
    if needs.last_q != decoding_selector.needs(2 * LONG).last_q:
        return "it reads all queries, and only the last are kept while decoding"
    if needs.first_q > 0:
        return "it reads the prompt's first queries"
    if needs.hidden or needs.call:
        return "it reads hidden states or the attention module, of the prompt alone"
    # two lengths are tried, because whole chunks may happen to fit one of them
    for n in (LONG, LONG + 1):
        # layer 0 of 2 layers, with 2 heads, stands for any layer
        expected = decoding_selector.expected(n, 0, 2, heads=2)
        if expected is None or expected.low != expected.high:
            return "how many tokens each head keeps follows from the data, and slots are reserved for a fixed number"
    return ""

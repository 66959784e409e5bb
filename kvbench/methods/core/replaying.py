"""Selectors that score a prompt's tokens by further passes, in which the model reads the prompt again."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.methods.core.base import Selector

QUOTED = 8
"""The number of tokens before a later chunk that its instruction quotes."""


@dataclass(frozen=True)
class Replay:
    """Passes that read a prompt again behind its whole cache, chunk by chunk.

    chunk: tokens of the prompt that one pass repeats.
    sinks: first tokens of the prompt whose keys compete for attention with those of the chunk.
    instruction: the text before a chunk, see conf/method/kvzip.yaml.
    """

    chunk: int
    sinks: int
    instruction: str

    def spans(self, n: int) -> list[tuple[int, int]]:
        """Return (start, end) of each chunk of a prompt of n tokens."""
        # the last chunk may be shorter
        return [(start, min(start + self.chunk, n)) for start in range(0, n, self.chunk)]


@dataclass(frozen=True, kw_only=True)
class ReplayingSelector(Selector):
    """A selector that scores tokens by further passes over the prompt, and chooses over all layers at once.

    ``compress`` leaves each layer as it is. After the prompt the engine runs the passes of ``replay``. It stores the
    scores of each layer as the state ``score`` [heads, n] of its tokens. ``rebalance`` then trims all layers. A score
    is the most attention that a token receives in the passes, over all their queries and all query heads of a group.
    """

    def replay(self, n: int) -> Replay | None:
        """Return the passes that a prompt of n tokens needs, or None if all its tokens stay. Subclasses define it."""
        # the passes cost about a second prefill, which a prompt within the budget does not need
        raise TypeError(f"{type(self).__name__} does not say what it reads again")

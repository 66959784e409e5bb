"""Count the pages that an inference engine could give back after a prompt is compressed.

An engine with paged attention stores tokens in pages of PAGE_TOKENS. It can give back a page that holds no kept token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.base.numbers import ceil_div
from kvbench.kv.pages import PAGE_BITS, PAGE_TOKENS, PagesFreed
from kvbench.kv.segment import LayerCache, per_head


def pages_freed(layers: Sequence[LayerCache], n: int, alike: Sequence[int] | None = None) -> PagesFreed:
    """Return the shares of pages that are free right after a prompt of n tokens was compressed to ``layers``.

    A page is free if no kept token lies in it. Each head has pages of its own (``apart``), or all heads of a layer have
    common pages (``united``). In a compacted cache the kept tokens are moved together first.

    alike: how many layers of the model each of ``layers`` stands for; None: each stands for itself.
    """
    pages = ceil_div(n, PAGE_TOKENS)
    rows = _Rows(layers, n)
    if rows.whole:
        return PagesFreed(apart=0.0, united=0.0, apart_compacted=0.0, united_compacted=0.0)
    occupied = rows.occupied(pages)
    used = occupied.sum(dim=2).tolist()
    used_united = occupied.any(dim=1).sum(dim=1).tolist()
    # the numbers of free pages for the four fields of ``PagesFreed``, and the number of layers that they are taken over
    apart = united = apart_compacted = united_compacted = tables = 0
    for i, kept in enumerate(rows.kept):
        count = 1 if alike is None else alike[i]
        # a row stands for all heads that keep its tokens
        heads_of_row = rows.heads // len(kept)
        # the pages of each row once its tokens are moved together
        compacted_pages = [ceil_div(tokens, PAGE_TOKENS) for tokens in kept]
        apart += count * heads_of_row * sum(pages - used[i][row] for row in range(len(kept)))
        apart_compacted += count * heads_of_row * sum(pages - needed for needed in compacted_pages)
        united += count * (pages - used_united[i])
        united_compacted += count * (pages - max(compacted_pages))
        tables += count
    return PagesFreed(
        apart=apart / (tables * rows.heads * pages),
        united=united / (tables * pages),
        apart_compacted=apart_compacted / (tables * rows.heads * pages),
        united_compacted=united_compacted / (tables * pages),
    )


class _Rows:
    """The positions kept by each layer, in rows. Heads that share their positions share a row.

    heads: the number of stored heads of a layer.
    kept: for each layer, the number of tokens in each of its rows.
    whole: True if every row has all tokens of the prompt.
    """

    def __init__(self, layers: Sequence[LayerCache], n: int) -> None:
        """Collect the positions that ``layers`` keep of a prompt of n tokens."""
        self.heads = max(layer.stored_heads for layer in layers)
        self.kept: list[list[int]] = []
        self._positions: list[Tensor] = []
        # for each piece of ``_positions``: (layer, row, number of tokens)
        self._pieces: list[tuple[int, int, int]] = []
        for i, layer in enumerate(layers):
            if any(s.lengths is not None for s in layer.segments):
                rows = self.heads  # ragged heads keep tokens of their own
            else:
                rows = max((s.positions.shape[0] for s in layer.segments), default=1)
            kept = [0] * rows
            for s in layer.segments:
                if s.lengths is None:
                    positions, counts = per_head(s.positions, rows), [s.tokens] * rows
                else:
                    # the tokens of ragged heads lie one head after the other
                    positions, counts = s.positions, s.counts
                self._positions.append(positions.flatten())
                for row, tokens in enumerate(counts):
                    self._pieces.append((i, row, tokens))
                    kept[row] += tokens
            self.kept.append(kept)
        self.whole = all(set(kept) == {n} for kept in self.kept)

    def occupied(self, pages: int) -> Tensor:
        """Return a mask [layers, rows, pages] of the pages with a kept token. Rows that a layer lacks are empty.

        pages: the number of pages that the whole prompt takes.
        """
        most_rows = max(len(kept) for kept in self.kept)
        # the place of each piece's first page in the flat mask
        starts = torch.tensor([(layer * most_rows + row) * pages for layer, row, _ in self._pieces])
        counts = torch.tensor([tokens for _, _, tokens in self._pieces])
        positions = torch.cat(self._positions)
        # the place of each token's page in the flat mask; a shift is ten times as fast as a division
        places = starts.repeat_interleave(counts).to(positions.device) + (positions >> PAGE_BITS)
        mask = torch.zeros(len(self.kept) * most_rows * pages, dtype=torch.bool, device=positions.device)
        return mask.index_fill_(0, places, True).view(len(self.kept), most_rows, pages)

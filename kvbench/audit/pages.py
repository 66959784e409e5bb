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
    occupied = rows.find_occupied(pages)
    # pages with a kept token: of each layer's rows [layers, rows], and of all rows of a layer together [layers]
    used_by_row = occupied.sum(dim=2).tolist()
    used_by_layer = occupied.any(dim=1).sum(dim=1).tolist()
    # the numbers of free pages, summed over the model's layers
    apart = united = apart_compacted = united_compacted = 0
    model_layers = 0
    for i, kept in enumerate(rows.kept):
        count = 1 if alike is None else alike[i]
        model_layers += count
        # a row stands for all heads that keep its tokens
        heads_of_row = rows.heads // len(kept)
        # the pages of each row once its tokens are moved together
        compacted_pages = [ceil_div(tokens, PAGE_TOKENS) for tokens in kept]
        # ``find_occupied`` has further rows if another layer has more
        used_pages = used_by_row[i][: len(kept)]
        apart += count * heads_of_row * sum(pages - used for used in used_pages)
        apart_compacted += count * heads_of_row * sum(pages - used for used in compacted_pages)
        united += count * (pages - used_by_layer[i])
        # the heads' tokens lie in common pages, of which the longest row takes most
        united_compacted += count * (pages - max(compacted_pages))
    pages_of_layers = model_layers * pages
    pages_of_heads = model_layers * rows.heads * pages
    return PagesFreed(
        apart=apart / pages_of_heads,
        united=united / pages_of_layers,
        apart_compacted=apart_compacted / pages_of_heads,
        united_compacted=united_compacted / pages_of_layers,
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
            if any(segment.lengths is not None for segment in layer.segments):
                rows = self.heads  # ragged heads keep tokens of their own
            else:
                rows = max((segment.positions.shape[0] for segment in layer.segments), default=1)
            kept = [0] * rows
            for segment in layer.segments:
                if segment.lengths is None:
                    # heads that share one row of positions get a copy each if other segments have a row for each head
                    positions, counts = per_head(segment.positions, rows), [segment.tokens] * rows
                else:
                    # the tokens of ragged heads lie one head after the other
                    positions, counts = segment.positions, segment.counts
                self._positions.append(positions.flatten())
                for row, tokens in enumerate(counts):
                    self._pieces.append((i, row, tokens))
                    kept[row] += tokens
            self.kept.append(kept)
        self.whole = all(set(kept) == {n} for kept in self.kept)

    def find_occupied(self, pages: int) -> Tensor:
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

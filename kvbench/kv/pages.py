"""The shares of a prompt's pages that an inference engine could give back after compression.

An engine holds a cache in pages of PAGE_TOKENS tokens, and a table lists the pages of each sequence (PagedAttention,
arXiv 2309.06180, section 4). A method that drops tokens saves memory there only if whole pages become free.
``audit.pages`` computes ``PagesFreed``. This module does not import torch, because stored results are read without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

PAGE_BITS = 4
PAGE_TOKENS = 2**PAGE_BITS
"""The tokens of a page: 16, vLLM's default (arXiv 2309.06180, section 7.2)."""


@dataclass(frozen=True)
class PagesFreed:
    """Shares (0 to 1) of a prompt's pages that are free after compression, over the layers that methods compress.

    A prompt of n tokens has ceil(n / PAGE_TOKENS) pages in each table. An engine either has a table for each stored
    head (heads apart) or one table for each layer (heads united). Under ``per=query_head`` each query head has a table.

    apart, united: the shares if tokens stay where they were written. With heads apart, a head's page is free if the
    head keeps none of its tokens. With heads united, a page is free if no head keeps any of its tokens.
    apart_compacted, united_compacted: the shares if each head's kept tokens are moved together. A head then needs
    ceil(kept / PAGE_TOKENS) pages. With heads united, a layer needs as many pages as the head with most tokens.
    """

    apart: float
    united: float
    apart_compacted: float
    united_compacted: float

    @classmethod
    def mean(cls, records: Sequence[PagesFreed | None], weights: Sequence[float] | None = None) -> PagesFreed | None:
        """Return the mean of each share over ``records``, weighted by ``weights`` if there are any.

        Return None if there are no records or one of them is None. Then some pages are unknown.
        """
        known = [record for record in records if record is not None]
        if not known or len(known) < len(records):
            return None
        record_weights = weights or [1] * len(known)
        # each field is a share of its own
        means = {}
        for share in fields(cls):
            weighted = [w * getattr(record, share.name) for w, record in zip(record_weights, known, strict=True)]
            means[share.name] = sum(weighted) / sum(record_weights)
        return cls(**means)

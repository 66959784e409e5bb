"""The table of the pages that an inference engine could give back (see ``kv.pages``), and its notes."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.base.formatting import format_number
from kvbench.kv.pages import PAGE_TOKENS, PagesFreed
from kvbench.report.table import Table

IN_PLACE, COMPACTED = "pages freed, in place", "pages freed, compacted"
NOTES = (
    f"pages freed: per cent of a prompt's pages of {PAGE_TOKENS} tokens that an inference engine could give back after "
    "compression. apart: each head has its own page table. united: one table a layer, where a page is free only if no "
    "head keeps any of its tokens. in place: tokens stay where they were written. compacted: kept tokens are moved "
    "together.",
    "Methods that keep every token free no page: pruned channels, codes of few bits and low-rank latents make pages "
    "smaller, not fewer.",
)


def build_table(rows: Sequence[tuple[str, PagesFreed]]) -> Table:
    """Return a table in per cent, with a line for each (method, shares of pages freed)."""
    lines = []
    for method, freed in rows:
        shares = (freed.apart, freed.united, freed.apart_compacted, freed.united_compacted)
        # one option a line keeps the first column narrow, so that the table fits its page
        lines.append((method.replace(" ", "\n"), *(format_number(100 * share) for share in shares)))
    heads = ("method", "heads\napart", "heads\nunited", "heads\napart", "heads\nunited")
    return Table(heads, tuple(lines), groups=("", IN_PLACE, IN_PLACE, COMPACTED, COMPACTED))

"""Tell which rows print the same measurement, though tables name its settings in different ways."""

from __future__ import annotations

from kvbench.papers.spec.published_cells import PublishedRow

SILENT = {
    "think": {"mem_m", "matched_to", "where", "batch", "prompt", "gen", "same_memory"},
    "refreekv": {"where"},
    "uncomp": {"block", "compress_pct", "where"},
    "vatp": {"id", "batch"},
    "qhitter": {"where"},
}
"""By paper, the parts of a setting that only say where a number stands, or repeat another part."""
DEFAULTS = {"think": {"recent": "32"}, "vatp": {"norm": "l1"}}
"""By paper, the values of parts of a setting where a table does not state the part."""
UNCOMP_MAIN = ({"topk": "32"}, {"group_sizes": "256/512"}, {"kv_high": "512", "kv_low": "256"})
"""UNComp's main configuration, two groups with 512 and 256 tokens, as tables 7, 6 and 2 state it, in this order."""


def identity(row: PublishedRow) -> tuple[str, str, str, tuple[tuple[str, str], ...]]:
    """Return (paper, model, method, settings). Two rows of the same measurement have equal tuples.

    The settings are the parts that tell measurements apart, as sorted (key, value) pairs.
    """
    silent, defaults = SILENT.get(row.paper, set()), DEFAULTS.get(row.paper, {})
    # a table that states a default measures the same as a table that omits it
    parts = {key: value for key, value in row.settings.items() if key not in silent and defaults.get(key) != value}
    if row.paper == "uncomp":
        # the paper's tables name one configuration by the part that each of them varies
        if parts.get("partition") == "effective_rank":
            parts = {"kv_size": "64"}
        elif any(main.items() <= parts.items() for main in UNCOMP_MAIN):
            parts = {"kv_size": "384"}
    return row.paper, row.model, row.method, tuple(sorted(parts.items()))

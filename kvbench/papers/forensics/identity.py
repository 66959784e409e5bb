"""When two printed rows are the same measurement: settings that say nothing new, and two names for one thing."""

from __future__ import annotations

from kvbench.papers.spec.published_cells import PublishedRow

SILENT = {
    "think": {"mem_m", "matched_to", "where", "batch", "prompt", "gen", "same_memory"},
    "refreekv": {"where"},
    "uncomp": {"block", "compress_pct", "where"},
    "vatp": {"id", "batch"},
    "qhitter": {"where"},
}
"""Parts of a setting that place a number or repeat another part."""
DEFAULTS = {"think": {"recent": "32"}, "vatp": {"norm": "l1"}}
"""Parts that hold wherever a table does not say otherwise."""
UNCOMP_MAIN = ({"topk": "32"}, {"group_sizes": "256/512"}, {"kv_high": "512", "kv_low": "256"})
"""UNComp's main configuration, 512 and 256 tokens for two groups, under the names of tables 7, 6 and 2."""


def settings(row: PublishedRow) -> tuple[tuple[str, str], ...]:
    """The part of a row's setting that tells measurements apart, sorted."""
    own = {k: v for k, v in row.settings.items() if k not in SILENT.get(row.paper, ())}
    own = {k: v for k, v in own.items() if DEFAULTS.get(row.paper, {}).get(k) != v}
    if row.paper == "uncomp":
        if own.get("partition") == "effective_rank":
            own = {"kv_size": "64"}
        elif any(main.items() <= own.items() for main in UNCOMP_MAIN):
            own = {"kv_size": "384"}
    return tuple(sorted(own.items()))


def identity(row: PublishedRow) -> tuple[str, str, str, tuple[tuple[str, str], ...]]:
    """(paper, model, method, settings): rows with the same one print the same measurement."""
    return row.paper, row.model, row.method, settings(row)


def family(model: str) -> str:
    """Versions of a model that papers take for one another: ``mistral-7b-instruct-v0.2`` is ``mistral-7b-instruct``."""
    return "mistral-7b-instruct" if model.startswith("mistral-7b-instruct") else model

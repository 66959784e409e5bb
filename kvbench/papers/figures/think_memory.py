"""ThinK's figure 3: (a) score against memory with and without thin keys, and (b) memory against batch size with KIVI.

arXiv 2407.21018, sections 4.3 and 4.4. (a) are the rows of table 7, pairs of equal memory. (b) is computed from the
bytes of weights and caches alone: prompts of 160 tokens and answers of 338 on LLaMA-2-7B in fp16, as in KIVI's own
test. What KIVI leaves exact is all that ThinK leaves whole (appendix on KIVI: keys are pruned when they are packed).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from kvbench.audit.accounting import bytes_declared
from kvbench.cache.model_shape import from_entry
from kvbench.conf import entries
from kvbench.methods.resolve import chain_of
from kvbench.papers.figures.figure import Code, Fact
from kvbench.papers.figures.measured import MeasuredFigure
from kvbench.run import presets

MODEL = "llama2-7b-chat"
PARAMETERS = 6_738_415_616
FP16, GIB = 2, 2**30
TOKENS = 160 + 338 - 1  # the last token is never read
BATCHES = (1, 50, 100, 150, 200, 250, 300, 350, 400)
ROOM = 80  # GiB, of an A100
METHODS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "KIVI 4/4": {"method": "kivi", "bits": 4},
    "KIVI 4/4 + ThinK 0.4": {"method": "think+kivi", "bits": 4, "think.recent": 0},
    "KIVI 2/2": {"method": "kivi", "bits": 2},
    "KIVI 2/2 + ThinK 0.4": {"method": "think+kivi", "bits": 2, "think.recent": 0},
}


def memory(_: MeasuredFigure) -> pd.DataFrame:
    """Return bytes of weights and caches at the end of the answers, by method and batch size."""
    shape = from_entry(entries("model")[MODEL]["shape"])
    values = presets.values("think", MODEL)
    rows = []
    for name, entry in METHODS.items():
        cache = bytes_declared(chain_of(entry, preset=values), shape, TOKENS, FP16)
        assert cache is not None
        for batch in BATCHES:
            total = (FP16 * PARAMETERS + batch * cache.total) / GIB
            rows.append({"method": name, "batch": batch, "cache": cache.total / 2**20, "memory": total})
    return pd.DataFrame(rows)


def largest(data: pd.DataFrame) -> dict[str, int]:
    """Return the largest batch by method whose weights and caches fit into ROOM."""
    each = data.groupby("method", sort=False)["cache"].first()
    return {str(m): int((ROOM * GIB - FP16 * PARAMETERS) / (2**20 * cache)) for m, cache in each.items()}


def memory_facts(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield the cache bytes of one sequence, and how many sequences fit, against the full cache."""
    each, fit = data.groupby("method", sort=False)["cache"].first(), largest(data)
    yield Fact(f"One sequence of {TOKENS} tokens", each, "{:.1f} MiB")
    yield Fact("Times less than in full", each["full"] / each.drop("full"), "{:.2f}")
    yield Fact(f"Caches that fit into {ROOM} GiB beside the weights", fit, "{}")
    yield Fact("Times more than in full", {m: b / fit["full"] for m, b in fit.items() if m != "full"})


CODE = {"think/fig3b": Code(memory, memory_facts)}

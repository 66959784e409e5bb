"""ThinK's figure 3b: memory against batch size with KIVI, by the bytes of weights and caches alone.

arXiv 2407.21018, section 4.3: prompts of 160 tokens and answers of 338 on LLaMA-2-7B in fp16, as in KIVI's own test.
What KIVI leaves exact is all that ThinK leaves whole (appendix on KIVI: keys are pruned when they are packed).
"""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure as Canvas

from kvbench import presets
from kvbench.accounting import declared
from kvbench.cli.rewrite import entries
from kvbench.figures import style
from kvbench.figures.measured import Measured, ResultFigure
from kvbench.methods import registry
from kvbench.shape import from_entry

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


def memory(_: Measured) -> pd.DataFrame:
    """Bytes of weights and caches at the end of the answers, by method and batch size."""
    shape = from_entry(entries("model")[MODEL]["shape"])
    values = presets.values("think", MODEL)
    rows = []
    for name, entry in METHODS.items():
        held = declared(registry.parse(entry, preset=values), shape, TOKENS, FP16)
        assert held is not None
        for batch in BATCHES:
            total = (FP16 * PARAMETERS + batch * held.total) / GIB
            rows.append({"method": name, "batch": batch, "cache": held.total / 2**20, "memory": total})
    return pd.DataFrame(rows)


def largest(data: pd.DataFrame) -> dict[str, int]:
    """The largest batch whose weights and caches fit into ROOM, by method."""
    each = data.groupby("method", sort=False)["cache"].first()
    return {str(m): int((ROOM * GIB - FP16 * PARAMETERS) / (2**20 * cache)) for m, cache in each.items()}


def draw_memory(data: pd.DataFrame) -> Canvas:
    """Batch size to the right, GiB upwards."""
    fig = style.canvas(style.COLUMN, 2.4)
    ax = fig.subplots()
    for i, (name, rows) in enumerate(data.groupby("method", sort=False)):
        ax.plot(rows["batch"], rows["memory"], label=name, **style.series(i, 1))
    ax.axhline(FP16 * PARAMETERS / GIB, color=style.GREY, lw=0.6, ls=":")
    ax.text(
        ax.get_xlim()[1], FP16 * PARAMETERS / GIB - 1, "weights", fontsize=6, color=style.GREY, ha="right", va="top"
    )
    ax.set_ylim(bottom=0)
    ax.set_xlabel("batch size")
    ax.set_ylabel("weights and caches, GiB")
    ax.set_title("LLaMA-2-7B, fp16, 160 + 338 tokens, computed", loc="left")
    ax.legend(loc="upper left")
    return fig


def say_memory(data: pd.DataFrame) -> str:
    """Cache bytes of one sequence, and how many sequences fit, against the full cache."""
    each, fit = data.groupby("method", sort=False)["cache"].first(), largest(data)
    caches = ", ".join(f"{m} {c:.1f} MiB ({each['full'] / c:.2f}x less)" for m, c in each.items() if m != "full")
    batches = ", ".join(f"{m} {b} ({b / fit['full']:.1f}x)" for m, b in fit.items() if m != "full")
    return (
        f"One sequence of {TOKENS} tokens holds {each['full']:.1f} MiB in full; {caches}. Into {ROOM} GiB beside the "
        f"weights fit {fit['full']} full caches; {batches}."
    )


FIGURES = (
    ResultFigure(
        id="think/fig3",
        title="memory against batch size, ThinK with KIVI",
        shows="Panel (b), computed: bytes of LLaMA-2-7B's weights and of as many caches as the batch has sequences, in "
        "fp16, after prompts of 160 tokens and answers of 338, by the formula that every stored cache is audited with "
        "(payload and overhead). Nothing was run, and activations are not in it.",
        claim="KIVI alone allows four times the batch of the full cache in the same memory, with ThinK (0.4) over "
        "five; the gap widens with the batch, at 2 and at 4 bits.",
        unsaid="The paper shows peak memory, with whatever its code allocates besides; it does not say the group and "
        "residual of KIVI here: 32 and 32, as in its released test. Keys are pruned when KIVI packs them; if 32 more "
        "stayed whole, ThinK would save 2 MiB instead of 9 at 2 bits. Panel (a) is the points of its table 7.",
        columns=("method", "batch", "cache", "memory"),
        compute=memory,
        draw=draw_memory,
        finding=say_memory,
    ),
)

"""ThinK's figure 3: (a) score against memory with and without thin keys, and (b) memory against batch size with KIVI.

arXiv 2407.21018, sections 4.3 and 4.4. (a) are the rows of table 7, pairs of equal memory. (b) is computed from the
bytes of weights and caches alone: prompts of 160 tokens and answers of 338 on LLaMA-2-7B in fp16, as in KIVI's own
test. What KIVI leaves exact is all that ThinK leaves whole (appendix on KIVI: keys are pruned when they are packed).
"""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from matplotlib.figure import Figure as Canvas

from kvbench.audit.accounting import bytes_declared
from kvbench.cache.model_shape import from_entry
from kvbench.conf import entries
from kvbench.methods import registry
from kvbench.papers.figures import curves
from kvbench.papers.figures.measured import COLUMNS, FULL, MeasuredFigure, Point, ResultFigure, Sweep
from kvbench.run import presets
from kvbench.tables import style

MODEL = "llama2-7b-chat"
PARAMETERS = 6_738_415_616
FP16, GIB = 2, 2**30
TOKENS = 160 + 338 - 1  # the last token is never read
BATCHES = (1, 50, 100, 150, 200, 250, 300, 350, 400)
ROOM = 80  # GiB, of an A100
PAIRED = (128, 512, 1024, 2048)  # sizes of ThinK's rows, and below those of plain caches of the same memory (table 7)
PLAIN = (109, 416, 826, 1645)
PRUNED = 0.4
METHODS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "KIVI 4/4": {"method": "kivi", "bits": 4},
    "KIVI 4/4 + ThinK 0.4": {"method": "think+kivi", "bits": 4, "think.recent": 0},
    "KIVI 2/2": {"method": "kivi", "bits": 2},
    "KIVI 2/2 + ThinK 0.4": {"method": "think+kivi", "bits": 2, "think.recent": 0},
}


def pairs() -> tuple[Point, ...]:
    """The rows of table 7; ``x`` numbers the pairs."""
    return tuple(
        point
        for base in ("h2o", "snapkv")
        for i, (size, plain) in enumerate(zip(PAIRED, PLAIN, strict=True))
        for point in (
            Point(base, i, base, {"kv_size": plain}),
            Point(f"{base}+think", i, f"{base}+think", {"kv_size": size, "ratio": PRUNED}),
        )
    )


def draw_pairs(data: pd.DataFrame) -> Canvas:
    """Bytes held to the right (logarithmic), mean score upwards."""
    rows, names = curves.whole(data), curves.series_of(data)
    fig = style.canvas(style.COLUMN, 2.6)
    ax = fig.subplots()
    curves.level(ax, rows)
    curves.lines(ax, rows.assign(x=rows["bytes"]), names)
    held = rows.loc[rows["series"] != FULL, "bytes"]
    low, high = (int(f(math.log2(x))) for f, x in ((math.floor, held.min()), (math.ceil, held.max())))
    curves.percent_axis(ax, [2.0**k for k in range(low, high + 1)], "bytes, % of the full cache's, at 16 bits")
    ax.set_ylabel("score")
    tasks = curves.tasks_of(data)
    ax.set_title(f"{'mean over tasks' if len(tasks) > 1 else tasks[0]}; {curves.samples(data)}", loc="left")
    curves.legend_below(fig, ax, 3)
    return fig


def say_pairs(data: pd.DataFrame) -> str:
    """What thin keys add at each pair of equal memory, with the bytes of both."""
    rows, parts = curves.whole(data), []
    for base in (s for s in curves.series_of(rows) if f"{s}+think" in curves.series_of(rows)):
        plain, thin = (rows[rows["series"] == s].set_index("x").sort_index() for s in (base, f"{base}+think"))
        both = plain.join(thin, rsuffix="_thin", how="inner")
        gains = ", ".join(f"{g:+.1f}" for g in both["score_thin"] - both["score"])
        held, plainly = (", ".join(f"{x:.1f}" for x in both[c]) for c in ("bytes_thin", "bytes"))
        parts.append(f"{base} {gains} with {held} % of the bytes ({plainly} without)")
    return (
        f"Thin keys add, in points, from the smallest to the largest size: {'; '.join(parts)}; {curves.samples(data)}."
    )


def memory(_: MeasuredFigure) -> pd.DataFrame:
    """Bytes of weights and caches at the end of the answers, by method and batch size."""
    shape = from_entry(entries("model")[MODEL]["shape"])
    values = presets.values("think", MODEL)
    rows = []
    for name, entry in METHODS.items():
        held = bytes_declared(registry.parse(entry, preset=values), shape, TOKENS, FP16)
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
        id="think/fig3a",
        title="score at equal memory, ThinK against a smaller cache with all channels",
        shows="Mean score over the tasks against the bytes taken after the prompt at 16 bits, payload and overhead, "
        "in per cent of the full cache's: H2O and SnapKV alone, and with two fifths of the key channels gone and more "
        "tokens instead; bands are 95 % intervals, the dashed line is the full cache. These are the cells of table 7.",
        claim="At the same memory H2O and SnapKV with ThinK (0.4) are ahead of themselves without it, at all sizes.",
        unsaid="The paper counts payload alone; here positions and the numbers of the channels kept are counted, too, "
        "which on the tiny model, whose heads have 32 channels, weigh more.",
        columns=COLUMNS,
        compute=MeasuredFigure.frame,
        draw=draw_pairs,
        finding=say_pairs,
        each=20,
        sweeps=(Sweep(pairs(), published="longbench", preset="think", length=8192),),
    ),
    ResultFigure(
        id="think/fig3b",
        title="memory against batch size, ThinK with KIVI",
        shows="Computed: bytes of LLaMA-2-7B's weights and of as many caches as the batch has sequences, in "
        "fp16, after prompts of 160 tokens and answers of 338, by the formula that every stored cache is audited with "
        "(payload and overhead). Nothing was run, and activations are not in it.",
        claim="KIVI alone allows four times the batch of the full cache in the same memory, with ThinK (0.4) over "
        "five; the gap widens with the batch, at 2 and at 4 bits.",
        unsaid="The paper shows peak memory, with whatever its code allocates besides; it does not say the group and "
        "residual of KIVI here: 32 and 32, as in its released test. Keys are pruned when KIVI packs them; if 32 more "
        "stayed whole, ThinK would save 2 MiB instead of 9 at 2 bits.",
        columns=("method", "batch", "cache", "memory"),
        compute=memory,
        draw=draw_memory,
        finding=say_memory,
    ),
)

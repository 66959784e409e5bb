"""Q-Hitter against its own tables (MLSys 2024).

Each function judges the statement, or recomputes the printed cells, that its decorator names.
"""

from __future__ import annotations

from typing import Any

from kvbench.papers.forensics.paper_audit import NOTE, PARTLY, Outcome, PaperAudit, decide
from kvbench.papers.forensics.queries import (
    PaperCells,
    by_field,
    describe_falls,
    describe_values,
    difference,
    labels_of,
    ratio,
)

QHITTER = PaperAudit("qhitter")
SUMMARIES = ["xsum", "cnn_dailymail"]
"""The datasets of table 3."""


@QHITTER.states("section 5.4", table="3", text="It gains in every setting, most, 0.097, without shots")
def gains_by_shots(paper: PaperCells) -> Outcome:
    """Compute the gains over H2O with quantisation, and ask where the largest is."""
    qhitter = paper.series(["dataset", "shots"], table=3, of=SUMMARIES, method="qhitter")
    h2o = paper.series(["dataset", "shots"], table=3, of=SUMMARIES, method="h2o+quant")
    gains = difference(qhitter, h2o)
    dataset, shots = gains.idxmax()
    holds = gains.min() > 0 and round(gains.max(), 3) == 0.097 and shots == "0"
    positive = f"{sum(gains > 0)} of {len(gains)} positive"
    return decide(holds, f"largest {gains.max():.3f} ({dataset}, {shots} shots), {positive}")


@QHITTER.states("contributions, section 5.2", table="3", text="4 bits lose nothing against the full cache")
def losses_at_4_bits(paper: PaperCells) -> Outcome:
    """Compute Q-Hitter's losses to the full cache in per cent, by dataset and number of shots."""
    qhitter = paper.series(["dataset", "shots"], table=3, of=SUMMARIES, method="qhitter")
    full = paper.series(["dataset", "shots"], table=3, of=SUMMARIES, method="full")
    losses = 100 * (1 - ratio(qhitter, full))
    lost = losses[losses > 0]
    if lost.empty:
        return decide(True, f"below the full cache in none of {len(losses)}")
    dataset, shots = lost.idxmax()
    shown = (
        f"below the full cache in {len(lost)} of {len(losses)}, by {lost.min():.1f} to {lost.max():.1f} % "
        f"({dataset}, {shots} shots)"
    )
    return decide(False, shown, otherwise=PARTLY)


@QHITTER.states("section 5.2", table="3", text="It gains up to 78.17 % over H2O with quantisation")
def largest_gain(paper: PaperCells) -> Outcome:
    """Compare the gain that the prose states with the largest relative gain in table 3."""
    qhitter = paper.series(["dataset", "shots"], table=3, of=SUMMARIES, method="qhitter")
    h2o = paper.series(["dataset", "shots"], table=3, of=SUMMARIES, method="h2o+quant")
    stated = paper.number(table="text", of="cnn_dailymail", metric="max_gain")
    most = (100 * (ratio(qhitter, h2o) - 1)).max()
    shown = f"table 3 has at most {most:.1f} % at 4 bits; it can only be read off figure 7"
    return decide(abs(most - stated) < 0.05, shown, otherwise=PARTLY)


@QHITTER.states("section 5.2", table="text", text="5 to 12.5 % of the memory")
def shares_of_memory(paper: PaperCells) -> Outcome:
    """Compute the share of the memory that is left on each dataset, in per cent."""
    # 4 bits in place of 16 leave a quarter of the bytes, and sparsity keeps one of ``sparsity_factor`` tokens
    shares = 100 / (4 * paper.series("dataset", table="text", metric="sparsity_factor"))
    return decide(shares.min() == 5 and shares.max() == 12.5, f"{describe_values('{dataset} {value:.1f}', shares)} %")


@QHITTER.states("abstract", table="2", text="33, 7, 4 and 1.3 times faster than Accelerate, DeepSpeed, FlexGen and H2O")
def speedups(paper: PaperCells) -> Outcome:
    """Compare the stated speed-ups with the largest of table 2, within half a unit of the last stated digit."""
    holds, parts = True, []
    # (system, stated speed-up, how far the true one may be off); a bit more than 0.05 allows for binary fractions
    for system, stated, within in (
        ("accelerate", 33, 0.5),
        ("deepspeed", 7, 0.5),
        ("flexgen", 4, 0.5),
        ("h2o", 1.3, 0.051),
    ):
        largest = largest_speedup(paper, system)
        holds = holds and abs(largest - stated) <= within
        parts.append(f"{system} {largest:.2f}")
    return decide(holds, ", ".join(parts))


def largest_speedup(paper: PaperCells, system: str) -> Any:
    """Return the largest ratio in table 2 of Q-Hitter's throughput to another system's."""
    qhitter = paper.series(["model", "gen"], table=2, of="throughput", method="qhitter")
    other = paper.series(["model", "gen"], table=2, of="throughput", method=system)
    # numbers with intervals cannot be compared with each other, but as floats
    return max(ratio(qhitter, other), key=float)


@QHITTER.states("abstract, contributions", table="1", text="Few bits harm the choice of tokens: from how many on")
def bits_that_harm(paper: PaperCells) -> Outcome:
    """Ask whether table 1 tests 4 bits, which the abstract names, and how far perplexities rise at each width."""
    quant = paper.series(["selection_bits", "dataset", "model"], table=1, of=["wikitext103", "ptb"], method="h2o+quant")
    full = paper.series(["dataset", "model"], table=1, of=["wikitext103", "ptb"], method="full")
    bits = labels_of(quant, "selection_bits")
    most = by_field(difference(quant, full), "selection_bits").max()
    rises = describe_values("{selection_bits} bits {value:.2f}", most[labels_of(most, "selection_bits")])
    shown = f"<= 4 in the abstract, <= 3 in the contributions; table 1 tests {', '.join(bits)}, largest rises {rises}"
    return decide("4" in bits, shown, otherwise=PARTLY)


@QHITTER.states("section 5.4", table="text", text="128 and 1920 tokens make a cache of 2048")
def size_of_stream(paper: PaperCells) -> Outcome:
    """Add the chosen and the local tokens of the stream, and compare the sum with the stated size."""
    ((_, row, _),) = paper.cells(table="text", of="pg19")
    chosen, local = int(row.settings["selected"]), int(row.settings["local"])
    return decide(chosen + local == int(row.settings["kv_size"]), f"{chosen} + {local} = {chosen + local}")


@QHITTER.states("table 2", table="2", text="What 33 times rests on")
def rounding_of_speedup(paper: PaperCells) -> Outcome:
    """Compute the range of speed-ups that rounding allows, since Accelerate's throughput has a single digit."""
    cells = paper.with_rounding()
    accelerate = cells.number(table=2, of="throughput", model="opt-30b", gen=512, method="accelerate")
    qhitter = cells.number(table=2, of="throughput", model="opt-30b", gen=512, method="qhitter")
    speedup = qhitter / accelerate
    digit = f"rests on one printed digit, {float(accelerate):.1f} token/s"
    return NOTE, f"{digit}: {float(speedup.low):.1f} to {float(speedup.high):.1f}"


@QHITTER.states("table 3", table="3", text="Rouge-L rises with the number of shots")
def scores_by_shots(paper: PaperCells) -> Outcome:
    """List the falls of Rouge-L from one number of shots to the next; smaller ones than 0.0015 are rounding."""
    methods = ["full", "h2o+quant", "qhitter"]
    scores = paper.series(["method", "dataset", "shots"], table=3, of=SUMMARIES, method=methods)
    found = describe_falls(
        "{method} on {dataset} falls from {a:.3f} ({first}) to {b:.3f} ({then})", scores, least=0.0015
    )
    return decide(not found, "; ".join(found) or "every row rises", otherwise=NOTE)


@QHITTER.recomputes("table 2, largest ratio to accelerate", table="text", metric="speedup", versus="accelerate")
def speedup_over_accelerate(paper: PaperCells) -> Any:
    return largest_speedup(paper, "accelerate")


@QHITTER.recomputes("table 2, largest ratio to deepspeed", table="text", metric="speedup", versus="deepspeed")
def speedup_over_deepspeed(paper: PaperCells) -> Any:
    return largest_speedup(paper, "deepspeed")


@QHITTER.recomputes("table 2, largest ratio to flexgen", table="text", metric="speedup", versus="flexgen")
def speedup_over_flexgen(paper: PaperCells) -> Any:
    return largest_speedup(paper, "flexgen")


@QHITTER.recomputes("table 2, largest ratio to h2o", table="text", metric="speedup", versus="h2o")
def speedup_over_h2o(paper: PaperCells) -> Any:
    return largest_speedup(paper, "h2o")


@QHITTER.recomputes("sparsity 5 x 16 / 4 bits", table="text", metric="reduction_vs_full")
def reduction(paper: PaperCells) -> Any:
    # 4 bits in place of 16 divide the bytes by 4 once more
    return paper.number(table="text", of="xsum", metric="sparsity_factor") * 4


@QHITTER.recomputes("table 1, 2 bits − full", table="text", metric="ppl_increase")
def rise_of_perplexity(paper: PaperCells) -> Any:
    coarse = paper.number(table=1, of="ptb", model="pythia-70m", method="h2o+quant", selection_bits=2)
    return coarse - paper.number(table=1, of="ptb", model="pythia-70m", method="full")


@QHITTER.recomputes(
    "table 3, Q-Hitter − H2O at 4 bits", table="text", of="cnn_dailymail", metric="gain", where="section 5.4"
)
def gain_without_shots(paper: PaperCells) -> Any:
    qhitter = paper.number(table=3, of="cnn_dailymail", method="qhitter", shots=0)
    return qhitter - paper.number(table=3, of="cnn_dailymail", method="h2o+quant", shots=0)

"""VATP against its own tables (arXiv 2406.12335).

Each function judges the statement, or recomputes the printed cells, that its decorator names.
"""

from __future__ import annotations

from typing import Any

from kvbench.papers.forensics.paper_audit import NOTE, Outcome, PaperAudit, decide
from kvbench.papers.forensics.queries import (
    PaperCells,
    by_field,
    count_rising,
    describe_lines,
    describe_values,
    difference,
    ratio,
)

VATP = PaperAudit("vatp")


@VATP.states("section 4.2", table="1", text="VATP wins 12 and 13 of 16 tasks with LLaMA-2, 12 and 14 with Vicuna")
def wins(paper: PaperCells) -> Outcome:
    """Count the tasks on which VATP is above and level with its base method, by model and base method."""
    vatp = paper.series(["model", "base", "dataset"], table=1, of="scores", method="*+vatp")
    base = paper.series(["model", "base", "dataset"], table=1, of="scores", method=["h2o", "scissorhands"])
    gaps = difference(vatp, base)
    won = by_field(gaps > 0, "model", "base").sum()
    level = by_field(gaps == 0, "model", "base").sum()
    return decide(
        list(won) == [12, 13, 12, 14], describe_values("{model} {base} {value} (+{level} level)", won, level=level)
    )


@VATP.states("appendix B", table="2", text="The l1 norm is the best")
def best_norm(paper: PaperCells) -> Outcome:
    """Find the norm with the best average in table 2."""
    averages = paper.series("norm", table=2, of="avg")
    return decide(averages.idxmax() == "l1", describe_values("{norm} {value:.2f}", averages))


@VATP.states("section 4.2", table="3", text="It costs next to no throughput and no memory")
def costs(paper: PaperCells) -> Outcome:
    """Compare Scissorhands with and without VATP: less than 1 % of the throughput may be lost, and no memory."""
    speed = paper.series("method", table=3, of="throughput")
    memory = paper.series("method", table=3, of="peak_memory")
    slower = 100 * (1 - speed["scissorhands+vatp"] / speed["scissorhands"])
    more = memory["scissorhands+vatp"] - memory["scissorhands"]
    return decide(slower < 1 and more <= 0, f"{slower:.2f} % slower, {more:+.0f} MiB")


@VATP.states("section 4.2", table="1", text="Norms are 1/256 of the cache")
def bytes_of_norms(paper: PaperCells) -> Outcome:
    """Compare the stated share with the bytes of one norm over those of one key and one value."""
    # a norm is one number of fp16 (2 bytes); key and value are 128 such numbers each
    share = 2 / (2 * 128 * 2)
    return decide(share == 1 / 256, f"one fp16 number a token and head beside its key and value: 1/{1 / share:.0f}")


@VATP.states("appendix C", table="4", text="Speed-ups at half and a quarter of the cache")
def stated_speedups(paper: PaperCells) -> Outcome:
    """Compare the stated speed-ups with the ratios of throughputs."""
    stated = paper.series(["gpu", "budget"], table=4, metric="speedup_vs_full")
    # two printed decimals are right to 0.005; a bit more allows for binary fractions
    largest = difference(speedups(paper), stated).abs().max()
    return decide(largest < 0.0051, f"largest gap {largest:.3f}")


@VATP.states("appendix C", table="4", text="Throughput rises as the cache shrinks")
def throughput_by_budget(paper: PaperCells) -> Outcome:
    """Ask whether, on every GPU, no smaller budget has less throughput than the larger one before it in table 4."""
    throughput = paper.series(["gpu", "budget"], table=4, metric="throughput")
    gpus = paper.labels("gpu", table=4)
    return decide(count_rising(throughput) == len(gpus), describe_lines(throughput))


@VATP.states("table 1", table="1", text="Averages of table 1")
def averages_of_table1(paper: PaperCells) -> Outcome:
    """Compute the averages that table 1 does not print, by method and model."""
    scores = paper.series(["method", "model", "dataset"], table=1, of="scores")
    means = describe_lines(by_field(scores, "method", "model").mean(), "{:.2f}", sep=" / ")
    return NOTE, f"no averages are printed; of 16 tasks (llama-2-7b-chat / vicuna-7b-v1.5-16k): {means}"


@VATP.recomputes("throughput / that of the full cache", table=4, metric="speedup_vs_full")
def speedups(paper: PaperCells) -> Any:
    throughput = paper.series(["gpu", "budget"], table=4, metric="throughput")
    return ratio(throughput, paper.series("gpu", table=4, metric="throughput", method="full"))

"""VATP against its own tables (arXiv 2406.12335).

Each function judges the statement, or recomputes the printed cells, that its decorator names.
"""

from __future__ import annotations

from typing import Any

from kvbench.papers.forensics.paper_audit import NOTE, Outcome, PaperAudit, decide
from kvbench.papers.forensics.queries import (
    PaperCells,
    count_rising,
    describe_lines,
    describe_values,
    divide_cells,
    group_by_field,
    subtract_cells,
)

VATP = PaperAudit("vatp")


@VATP.states("section 4.2", table="1", text="VATP wins 12 and 13 of 16 tasks with LLaMA-2, 12 and 14 with Vicuna")
def judge_wins(paper: PaperCells) -> Outcome:
    """Count the tasks on which VATP is above and level with its base method, by model and base method."""
    vatp = paper.series(["model", "base", "dataset"], table=1, of="scores", method="*+vatp")
    base = paper.series(["model", "base", "dataset"], table=1, of="scores", method=["h2o", "scissorhands"])
    gaps = subtract_cells(vatp, base)
    wins = group_by_field(gaps > 0, "model", "base").sum()
    draws = group_by_field(gaps == 0, "model", "base").sum()
    shown = describe_values("{model} {base} {value} (+{level} level)", wins, level=draws)
    return decide(list(wins) == [12, 13, 12, 14], shown)


@VATP.states("appendix B", table="2", text="The l1 norm is the best")
def judge_best_norm(paper: PaperCells) -> Outcome:
    """Find the norm with the best average in table 2."""
    averages = paper.series("norm", table=2, of="avg")
    return decide(averages.idxmax() == "l1", describe_values("{norm} {value:.2f}", averages))


@VATP.states("section 4.2", table="3", text="It costs next to no throughput and no memory")
def judge_costs(paper: PaperCells) -> Outcome:
    """Compare Scissorhands with and without VATP: less than 1 % of the throughput may be lost, and no memory."""
    speed = paper.series("method", table=3, of="throughput")
    memory = paper.series("method", table=3, of="peak_memory")
    slower_percent = 100 * (1 - speed["scissorhands+vatp"] / speed["scissorhands"])
    more_mib = memory["scissorhands+vatp"] - memory["scissorhands"]
    return decide(slower_percent < 1 and more_mib <= 0, f"{slower_percent:.2f} % slower, {more_mib:+.0f} MiB")


@VATP.states("section 4.2", table="1", text="Norms are 1/256 of the cache")
def judge_bytes_of_norms(paper: PaperCells) -> Outcome:
    """Compare the stated share with the bytes of one norm over those of one key and one value."""
    # a norm is one number of fp16 (2 bytes); key and value are 128 such numbers each
    share = 2 / (2 * 128 * 2)
    return decide(share == 1 / 256, f"one fp16 number a token and head beside its key and value: 1/{1 / share:.0f}")


@VATP.states("appendix C", table="4", text="Speed-ups at half and a quarter of the cache")
def judge_stated_speedups(paper: PaperCells) -> Outcome:
    """Compare the stated speed-ups with the ratios of throughputs."""
    stated = paper.series(["gpu", "budget"], table=4, metric="speedup_vs_full")
    # two printed decimals are right to 0.005; a bit more allows for binary fractions
    largest = subtract_cells(recompute_speedups(paper), stated).abs().max()
    return decide(largest < 0.0051, f"largest gap {largest:.3f}")


@VATP.states("appendix C", table="4", text="Throughput rises as the cache shrinks")
def judge_throughput_by_budget(paper: PaperCells) -> Outcome:
    """Ask whether, on every GPU, no smaller budget has less throughput than the larger one before it in table 4."""
    throughput = paper.series(["gpu", "budget"], table=4, metric="throughput")
    gpus = paper.labels("gpu", table=4)
    return decide(count_rising(throughput) == len(gpus), describe_lines(throughput))


@VATP.states("table 1", table="1", text="Averages of table 1")
def judge_averages_of_table1(paper: PaperCells) -> Outcome:
    """Compute the averages that table 1 does not print, by method and model."""
    scores = paper.series(["method", "model", "dataset"], table=1, of="scores")
    means = describe_lines(group_by_field(scores, "method", "model").mean(), "{:.2f}", sep=" / ")
    return NOTE, f"no averages are printed; of 16 tasks (llama-2-7b-chat / vicuna-7b-v1.5-16k): {means}"


@VATP.recomputes("throughput / that of the full cache", table=4, metric="speedup_vs_full")
def recompute_speedups(paper: PaperCells) -> Any:
    """Return each throughput of table 4 over the full cache's on the same GPU."""
    throughput = paper.series(["gpu", "budget"], table=4, metric="throughput")
    return divide_cells(throughput, paper.series("gpu", table=4, metric="throughput", method="full"))

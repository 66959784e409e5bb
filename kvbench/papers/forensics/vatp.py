"""VATP against its own tables (arXiv 2406.12335).

Each function judges the statement, or recomputes the printed cells, that its decorator names.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from kvbench.papers.forensics.frame import (
    count_rising,
    describe_lines,
    describe_values,
    divide,
    group,
    labels,
    series,
    subtract,
)
from kvbench.papers.forensics.paper_audit import NOTE, Outcome, decide, recomputes, states


@states("vatp", "section 4.2", table="1", text="VATP wins 12 and 13 of 16 tasks with LLaMA-2, 12 and 14 with Vicuna")
def _judge_wins(cells: pd.DataFrame) -> Outcome:
    vatp = series(cells, ["model", "base", "dataset"], table=1, score=True, method="*+vatp")
    base = series(cells, ["model", "base", "dataset"], table=1, score=True, method=["h2o", "scissorhands"])
    gaps = subtract(vatp, base)
    wins = group(gaps > 0, "model", "base").sum()
    draws = group(gaps == 0, "model", "base").sum()
    shown = describe_values("{model} {base} {value} (+{level} level)", wins, level=draws)
    return decide(list(wins) == [12, 13, 12, 14], shown)


@states("vatp", "appendix B", table="2", text="The l1 norm is the best")
def _judge_best_norm(cells: pd.DataFrame) -> Outcome:
    averages = series(cells, "norm", table=2, dataset="avg")
    return decide(averages.idxmax() == "l1", describe_values("{norm} {value:.2f}", averages))


@states("vatp", "section 4.2", table="3", text="It costs next to no throughput and no memory")
def _judge_costs(cells: pd.DataFrame) -> Outcome:
    speed = series(cells, "method", table=3, dataset="throughput")
    memory = series(cells, "method", table=3, dataset="peak_memory")
    slower_percent = 100 * (1 - speed["scissorhands+vatp"] / speed["scissorhands"])
    more_mib = memory["scissorhands+vatp"] - memory["scissorhands"]
    return decide(slower_percent < 1 and more_mib <= 0, f"{slower_percent:.2f} % slower, {more_mib:+.0f} MiB")


@states("vatp", "section 4.2", table="1", text="Norms are 1/256 of the cache")
def _judge_bytes_of_norms(cells: pd.DataFrame) -> Outcome:
    # a norm is one number of fp16 (2 bytes); key and value are 128 such numbers each
    share = 2 / (2 * 128 * 2)
    return decide(share == 1 / 256, f"one fp16 number a token and head beside its key and value: 1/{1 / share:.0f}")


@states("vatp", "appendix C", table="4", text="Speed-ups at half and a quarter of the cache")
def _judge_stated_speedups(cells: pd.DataFrame) -> Outcome:
    stated = series(cells, ["gpu", "budget"], table=4, metric="speedup_vs_full")
    # two printed decimals are right to 0.005; a bit more allows for binary fractions
    largest = subtract(_recompute_speedups(cells), stated).abs().max()
    return decide(largest < 0.0051, f"largest gap {largest:.3f}")


@states("vatp", "appendix C", table="4", text="Throughput rises as the cache shrinks")
def _judge_throughput_by_budget(cells: pd.DataFrame) -> Outcome:
    throughput = series(cells, ["gpu", "budget"], table=4, metric="throughput")
    gpus = labels(cells, "gpu", table=4)
    return decide(count_rising(throughput) == len(gpus), describe_lines(throughput))


@states("vatp", "table 1", table="1", text="Averages of table 1")
def _judge_averages_of_table1(cells: pd.DataFrame) -> Outcome:
    scores = series(cells, ["method", "model", "dataset"], table=1, score=True)
    means = describe_lines(group(scores, "method", "model").mean(), "{:.2f}", sep=" / ")
    return NOTE, f"no averages are printed; of 16 tasks (llama-2-7b-chat / vicuna-7b-v1.5-16k): {means}"


@recomputes("vatp", "throughput / that of the full cache", table=4, metric="speedup_vs_full")
def _recompute_speedups(cells: pd.DataFrame) -> Any:
    throughput = series(cells, ["gpu", "budget"], table=4, metric="throughput")
    return divide(throughput, series(cells, "gpu", table=4, metric="throughput", method="full"))

"""ThinK against its own tables (arXiv 2407.21018).

Each function judges the statement, or recomputes the printed cells, that its decorator names.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from kvbench.papers.forensics.frame import (
    count_rising,
    describe_values,
    drop,
    group,
    group_lines,
    labels,
    number,
    series,
    subtract,
)
from kvbench.papers.forensics.paper_audit import NOTE, PARTLY, Outcome, decide, recomputes, states

MODELS = ["llama-3-8b*", "mistral*"]
"""Patterns for the models of ThinK's main experiments; tables 9 and 12 have others as well."""


@states("think", "section 4.3", table="5", text="The needle score at 1024 tokens and 50 % of channels is 90.6")
def _judge_needle_at_half(cells: pd.DataFrame) -> Outcome:
    query = {"dataset": "needle", "model": "mistral*", "method": "snapkv+think"}
    in_table = number(cells, table=5, kv_size=1024, ratio=0.5, **query)
    in_figure = number(cells, table="fig6", kv_size=1024, ratio=0.5, **query)
    at_40_percent = number(cells, table=5, kv_size=1024, ratio=0.4, **query)
    stated = number(cells, table="text", **query)
    shown = f"table 5 {in_table:.1f}, figure 6 {in_figure:.1f}; {at_40_percent:.1f} is the score at 0.4"
    return decide(stated == in_table == in_figure, shown)


@states("think", "appendix G", table="7", text="The cache shrinks by 80 %")
def _judge_shrinkage(cells: pd.DataFrame) -> Outcome:
    memory = series(cells, "kv_size", table=7, dataset="kv_memory", method="snapkv+think")
    # by the paper's formula a whole token takes half a MiB
    saved = 100 * (1 - memory / (0.5 * pd.Series(memory.index.astype(float), memory.index)))
    shown = f"table 7's memory is {saved.min():.0f} to {saved.max():.0f} % smaller, so to 80 %"
    return decide(saved.min() > 75, shown)


@states("think", "section 4.2", table="7", text="Dropping 40 % of key channels saves 20 % of the cache")
def _judge_savings_by_size(cells: pd.DataFrame) -> Outcome:
    memory = series(cells, "kv_size", table=7, dataset="kv_memory", method="snapkv+think")
    # the share of the tokens that are not recent times 20 %
    shares = 20 * (1 - 32 / pd.Series(memory.index.astype(float), memory.index))
    shown = f"{describe_values('{value:.1f} % of {kv_size} tokens', shares)}: 32 tokens keep all channels"
    return decide(shares.min() > 19.5, shown, otherwise=PARTLY)


@states(
    "think",
    "section 4.2",
    table="2",
    text="2048 tokens with 40 % of channels gone beat the full cache of LLaMA-3-8B",
)
def _judge_full_against_2048(cells: pd.DataFrame) -> Outcome:
    pruned = number(cells, table=2, dataset="avg", model="llama-3-8b*", method="snapkv+think", kv_size=2048, ratio=0.4)
    full = number(cells, table=2, dataset="avg", model="llama-3-8b*", method="full")
    return decide(pruned > full, f"{pruned:.2f} against {full:.2f}")


@states(
    "think",
    "tables 2 and 3",
    table="2",
    text="Averages rise with the cache size, which the repaired block titles need",
)
def _judge_averages_by_size(cells: pd.DataFrame) -> Outcome:
    averages = series(
        cells,
        ["table", "method", "ratio", "kv_size"],
        table=[2, 3],
        dataset="avg",
        model=MODELS,
        method=["h2o*", "snapkv*"],
        ratio=["", 0.4, 0.5],
    )
    rising, count = count_rising(averages), len(group_lines(averages))
    return decide(rising == count, f"{rising} of {count} series rise")


@states("think", "section 4.4", table="7", text="At equal memory ThinK wins over a smaller plain cache")
def _judge_equal_memory(cells: pd.DataFrame) -> Outcome:
    pruned = series(cells, ["method", "kv_size"], table=7, dataset="avg", method=["h2o+think", "snapkv+think"])
    plain = series(cells, ["method", "kv_size"], table=7, dataset="avg", method=["h2o", "snapkv"], matched_to="?*")
    # a pair has two cache sizes, so its rows cannot be matched by them; both series have the pairs in one order
    gaps = pruned.to_numpy() - plain.to_numpy()
    shown = f"{sum(gaps > 0)} of {len(gaps)} pairs, by {gaps.min():.2f} to {gaps.max():.2f}"
    return decide(gaps.min() > 0, shown)


@states("think", "section 4.3", table="5", text="At 40 % the needle score is never below SnapKV's")
def _judge_needle_against_snapkv(cells: pd.DataFrame) -> Outcome:
    pruned = series(cells, ["model", "kv_size"], table=5, dataset="needle", ratio=0.4)
    base = series(cells, ["model", "kv_size"], table=5, dataset="needle", method="snapkv")
    gaps = subtract(pruned, base)
    return decide(gaps.min() >= 0, f"{sum(gaps >= 0)} of {len(gaps)}, up to {gaps.max():+.1f}")


@states("think", "section 3.1", table="1", text="30 % of channels go without loss, 40 % hurts, l1 more than l2")
def _judge_losses_by_ratio(cells: pd.DataFrame) -> Outcome:
    # rows without a ratio keep all channels
    plain = series(cells, "base", table=1, dataset="avg", ratio="")
    losses_at_30 = -subtract(series(cells, ["base", "method"], table=1, dataset="avg", ratio=0.3), plain)
    losses_at_40 = -subtract(series(cells, ["base", "method"], table=1, dataset="avg", ratio=0.4), plain)
    l1 = series(cells, "base", table=1, dataset="avg", ratio=0.4, method="*+l1")
    l2 = series(cells, "base", table=1, dataset="avg", ratio=0.4, method="*+l2")
    gaps = subtract(l1, l2)
    bases_with_worse_l1 = sorted(set(gaps[gaps < 0].index.get_level_values("base")))
    shown = (
        f"falls of {losses_at_30.min():.2f} to {losses_at_30.max():.2f} at 30 %, "
        f"at 40 % {describe_values('{method} {value:.2f}', losses_at_40)}; "
        f"l1 falls further for {' and '.join(bases_with_worse_l1) or 'none'} "
        "(six labels are repaired, in part by this)"
    )
    is_worse_at_40 = losses_at_40.min() > losses_at_30.max()
    return decide(is_worse_at_40 and len(bases_with_worse_l1) == 2, shown, otherwise=PARTLY)


@states("think", "section 4.4", table="8", text="Dropping value channels costs Mistral, not LLaMA-3")
def _judge_value_channels(cells: pd.DataFrame) -> Outcome:
    pruned = series(cells, ["model", "base", "kv_size", "ratio", "v_ratio"], table=8, dataset="avg", method="*+thinkv")
    plain = series(cells, ["model", "base", "kv_size"], table=8, dataset="avg", method=["h2o", "snapkv"])
    changes = group(subtract(pruned, plain), "model")
    means = changes.mean()
    mistral, llama = means["mistral-7b-instruct-v0.2"], means["llama-3-8b-instruct"]
    pattern = "{model} {value:+.2f} to {most:+.2f}, mean {mean:+.2f}"
    shown = describe_values(pattern, changes.min(), sep="; ", most=changes.max(), mean=means)
    return decide(mistral < llama and mistral < 0, shown)


@states("think", "appendix E", table="9", text="40 % of channels go without loss where all tokens stay")
def _judge_losses_with_all_tokens(cells: pd.DataFrame) -> Outcome:
    full = series(cells, "model", table=9, dataset="avg", model=MODELS, method="full")
    pruned = series(cells, "model", table=9, dataset="avg", model=MODELS, method="full+think", ratio=0.4)
    gaps = subtract(pruned, full)
    return decide(gaps.min() > -0.2, describe_values("{model} {value:+.2f}", gaps))


@states("think", "section 4.1", table="2", text="LongBench has 17 datasets")
def _judge_number_of_datasets(cells: pd.DataFrame) -> Outcome:
    tables = [1, 2, 3, 4, 6, 7, 8, 9, 12]
    scores = series(cells, ["table", "row", "dataset"], table=tables, score=True)
    counts = sorted(set(group(scores, "table", "row").size()))
    return decide(counts == [17], f"every row of its LongBench tables has {', '.join(map(str, counts))}")


@states("think", "tables 2 and 8", table="2", text="Plain SnapKV rows of tables 2 and 8 have the same averages")
def _judge_snapkv_rows(cells: pd.DataFrame) -> Outcome:
    query = {"dataset": "avg", "model": "llama-3-8b*", "method": "snapkv", "kv_size": [512, 2048]}
    table2 = series(cells, "kv_size", table=2, **query)
    table8 = series(cells, "kv_size", table=8, **query)
    largest = subtract(table2, table8).abs().max()
    return decide(largest == 0, f"largest difference of averages {largest:.2f}")


@states("think", "table 7", table="7", text="What the memory column counts")
def _judge_memory_column(cells: pd.DataFrame) -> Outcome:
    memory = series(cells, "kv_size", table=7, dataset="kv_memory", method="snapkv+think")
    tokens = pd.Series(memory.index.astype(float), memory.index)
    # a token in MiB: 32 layers x 32 heads x 128 channels of keys and of values x 2 bytes
    token_mib = 32 * 32 * 2 * 128 * 2 / 1048576
    # half of a token's bytes are its key; pruned keys have 76 of 128 channels, and the 32 most recent keys have all
    keys = (tokens - 32) * token_mib / 2 * 76 / 128 + 32 * token_mib / 2
    values = tokens * token_mib / 2
    pruned = keys + values
    return NOTE, (
        f"{token_mib:.1f} MiB a token is 32 heads; Mistral stores 8, a quarter. The paper's floor((1 − 0.4) 128) = 76 "
        f"channels would give {describe_values('{value:.2f}', pruned, sep=' / ')}, "
        f"76.8 give the printed {describe_values('{value:.1f}', memory, sep=' / ')}"
    )


@states("think", "tables 10 and 11", table="10", text="What the times are per")
def _judge_unit_of_times(cells: pd.DataFrame) -> Outcome:
    prefill_ms = number(cells, table=10, metric="ttft", method="kivi")
    token_ms = number(cells, table=10, metric="tpot", method="kivi")
    stated = number(cells, table=11, metric="throughput", method="kivi")
    # FLOP = 2 x tokens x weights, with prompts of 160 tokens in a batch of 300 and 6.7e9 weights
    flop = 300 * 160 * 2 * 6.7e9
    flop_per_second = flop / (prefill_ms / 1000)
    # an A100 reaches 312 TFLOP/s in half precision
    n_a100 = flop_per_second / 312e12
    return NOTE, (
        f"a prefill of 300 x 160 tokens takes {flop:.1e} FLOP; in {prefill_ms} ms that is "
        f"{flop_per_second / 1e15:.0f} PFLOP/s, {n_a100:.0f} times an A100, so times are shares of the batch. "
        f"1000 / TPOT is {1000 / token_ms:.0f} token/s, table 11 has {stated:.0f}: another run, or prompt tokens are "
        "counted"
    )


@states("think", "table 4", table="4", text="Whose scores table 4 has")
def _judge_model_of_table4(cells: pd.DataFrame) -> Outcome:
    models = labels(cells, "model", table=4)
    return NOTE, f"the paper names no model; {', '.join(models)} is our reading"


@recomputes("think", "table 12, full − Palu, Mistral", table="text", metric="drop_vs_full", method="palu")
def _recompute_drop_of_palu(cells: pd.DataFrame) -> Any:
    return drop(cells, "palu", table=12, dataset="avg", model="mistral*")


@recomputes("think", "table 12, full − ThinK, LLaMA-2", table="text", metric="drop_vs_full", method="full+think")
def _recompute_drop_of_think(cells: pd.DataFrame) -> Any:
    return drop(cells, "full+think", table=12, dataset="avg", model="llama-2*")


@recomputes("think", "table 12, full − ASVD, LLaMA-2", table="text", metric="drop_vs_full", method="asvd")
def _recompute_drop_of_asvd(cells: pd.DataFrame) -> Any:
    return drop(cells, "asvd", table=12, dataset="avg", model="llama-2*")

"""ThinK against its own tables (arXiv 2407.21018).

Each function judges the statement, or recomputes the printed cells, that its decorator names.
"""

from __future__ import annotations

from typing import Any

from kvbench.papers.forensics.paper_audit import NOTE, PARTLY, Outcome, PaperAudit, decide
from kvbench.papers.forensics.queries import (
    PaperCells,
    count_rising,
    describe_values,
    group_by_field,
    group_lines,
    list_labels,
    read_numeric_labels,
    subtract_cells,
)

THINK = PaperAudit("think")
MODELS = ["llama-3-8b*", "mistral*"]
"""Patterns for the models of ThinK's main experiments; tables 9 and 12 have others as well."""


@THINK.states("section 4.3", table="5", text="The needle score at 1024 tokens and 50 % of channels is 90.6")
def judge_needle_at_half(paper: PaperCells) -> Outcome:
    """Compare the number in the prose with those in table 5 and in figure 6."""
    query = {"of": "needle", "model": "mistral*", "method": "snapkv+think"}
    in_table = paper.number(table=5, kv_size=1024, ratio=0.5, **query)
    in_figure = paper.number(table="fig6", kv_size=1024, ratio=0.5, **query)
    at_40_percent = paper.number(table=5, kv_size=1024, ratio=0.4, **query)
    stated = paper.number(table="text", **query)
    shown = f"table 5 {in_table:.1f}, figure 6 {in_figure:.1f}; {at_40_percent:.1f} is the score at 0.4"
    return decide(stated == in_table == in_figure, shown)


@THINK.states("appendix G", table="7", text="The cache shrinks by 80 %")
def judge_shrinkage(paper: PaperCells) -> Outcome:
    """Compare table 7's memory with that of as many whole tokens.

    The statement holds if every row saves more than 75 %, which rounds to the stated 80 %.
    """
    memory = paper.series("kv_size", table=7, of="kv_memory", method="snapkv+think")
    # by the paper's formula a whole token takes half a MiB
    saved = 100 * (1 - memory / (0.5 * read_numeric_labels(memory)))
    shown = f"table 7's memory is {saved.min():.0f} to {saved.max():.0f} % smaller, so to 80 %"
    return decide(saved.min() > 75, shown)


@THINK.states("section 4.2", table="7", text="Dropping 40 % of key channels saves 20 % of the cache")
def judge_savings_by_size(paper: PaperCells) -> Outcome:
    """Compute the saving by cache size: 40 % of the keys are 20 % of the cache, but 32 recent tokens stay whole.

    The statement holds if every saving rounds to 20 %.
    """
    memory = paper.series("kv_size", table=7, of="kv_memory", method="snapkv+think")
    # the share of the tokens that are not recent times 20 %
    shares = 20 * (1 - 32 / read_numeric_labels(memory))
    shown = f"{describe_values('{value:.1f} % of {kv_size} tokens', shares)}: 32 tokens keep all channels"
    return decide(shares.min() > 19.5, shown, otherwise=PARTLY)


@THINK.states(
    "section 4.2",
    table="2",
    text="2048 tokens with 40 % of channels gone beat the full cache of LLaMA-3-8B",
)
def judge_full_against_2048(paper: PaperCells) -> Outcome:
    """Compare the average of SnapKV with ThinK at 2048 tokens with the full cache's, on LLaMA-3-8B."""
    pruned = paper.number(table=2, of="avg", model="llama-3-8b*", method="snapkv+think", kv_size=2048, ratio=0.4)
    full = paper.number(table=2, of="avg", model="llama-3-8b*", method="full")
    return decide(pruned > full, f"{pruned:.2f} against {full:.2f}")


@THINK.states(
    "tables 2 and 3",
    table="2",
    text="Averages rise with the cache size, which the repaired block titles need",
)
def judge_averages_by_size(paper: PaperCells) -> Outcome:
    """Count the series of averages over cache sizes that never fall."""
    averages = paper.series(
        ["table", "method", "ratio", "kv_size"],
        table=[2, 3],
        of="avg",
        model=MODELS,
        method=["h2o*", "snapkv*"],
        ratio=["", 0.4, 0.5],
    )
    rising, count = count_rising(averages), len(group_lines(averages))
    return decide(rising == count, f"{rising} of {count} series rise")


@THINK.states("section 4.4", table="7", text="At equal memory ThinK wins over a smaller plain cache")
def judge_equal_memory(paper: PaperCells) -> Outcome:
    """Compare each row with pruned channels with the row without pruning that takes equal memory, by their averages."""
    pruned = paper.series(["method", "kv_size"], table=7, of="avg", method=["h2o+think", "snapkv+think"])
    plain = paper.series(["method", "kv_size"], table=7, of="avg", method=["h2o", "snapkv"], matched_to="?*")
    # a pair has two cache sizes, so its rows cannot be matched by them; both series have the pairs in one order
    gaps = pruned.to_numpy() - plain.to_numpy()
    shown = f"{sum(gaps > 0)} of {len(gaps)} pairs, by {gaps.min():.2f} to {gaps.max():.2f}"
    return decide(gaps.min() > 0, shown)


@THINK.states("section 4.3", table="5", text="At 40 % the needle score is never below SnapKV's")
def judge_needle_against_snapkv(paper: PaperCells) -> Outcome:
    """Compare needle scores with SnapKV's, by model and cache size."""
    pruned = paper.series(["model", "kv_size"], table=5, of="needle", ratio=0.4)
    base = paper.series(["model", "kv_size"], table=5, of="needle", method="snapkv")
    gaps = subtract_cells(pruned, base)
    return decide(gaps.min() >= 0, f"{sum(gaps >= 0)} of {len(gaps)}, up to {gaps.max():+.1f}")


@THINK.states("section 3.1", table="1", text="30 % of channels go without loss, 40 % hurts, l1 more than l2")
def judge_losses_by_ratio(paper: PaperCells) -> Outcome:
    """Compare how much scores fall with 30 % and with 40 % of channels gone, and by which norm channels are chosen.

    The statement holds if every loss at 40 % is above every loss at 30 %, and l1 loses more with both base methods.
    """
    # rows without a ratio keep all channels
    plain = paper.series("base", table=1, of="avg", ratio="")
    losses_at_30 = -subtract_cells(paper.series(["base", "method"], table=1, of="avg", ratio=0.3), plain)
    losses_at_40 = -subtract_cells(paper.series(["base", "method"], table=1, of="avg", ratio=0.4), plain)
    l1 = paper.series("base", table=1, of="avg", ratio=0.4, method="*+l1")
    l2 = paper.series("base", table=1, of="avg", ratio=0.4, method="*+l2")
    gaps = subtract_cells(l1, l2)
    bases_with_worse_l1 = list_labels(gaps[gaps < 0], "base")
    shown = (
        f"falls of {losses_at_30.min():.2f} to {losses_at_30.max():.2f} at 30 %, "
        f"at 40 % {describe_values('{method} {value:.2f}', losses_at_40)}; "
        f"l1 falls further for {' and '.join(bases_with_worse_l1) or 'none'} "
        "(six labels are repaired, in part by this)"
    )
    is_worse_at_40 = losses_at_40.min() > losses_at_30.max()
    return decide(is_worse_at_40 and len(bases_with_worse_l1) == 2, shown, otherwise=PARTLY)


@THINK.states("section 4.4", table="8", text="Dropping value channels costs Mistral, not LLaMA-3")
def judge_value_channels(paper: PaperCells) -> Outcome:
    """Compare the averages with and without pruned value channels, model by model.

    The statement holds if Mistral loses in the mean, and more than LLaMA-3.
    """
    pruned = paper.series(["model", "base", "kv_size", "ratio", "v_ratio"], table=8, of="avg", method="*+thinkv")
    plain = paper.series(["model", "base", "kv_size"], table=8, of="avg", method=["h2o", "snapkv"])
    changes = group_by_field(subtract_cells(pruned, plain), "model")
    means = changes.mean()
    mistral, llama = means["mistral-7b-instruct-v0.2"], means["llama-3-8b-instruct"]
    pattern = "{model} {value:+.2f} to {most:+.2f}, mean {mean:+.2f}"
    shown = describe_values(pattern, changes.min(), sep="; ", most=changes.max(), mean=means)
    return decide(mistral < llama and mistral < 0, shown)


@THINK.states("appendix E", table="9", text="40 % of channels go without loss where all tokens stay")
def judge_losses_with_all_tokens(paper: PaperCells) -> Outcome:
    """Compare the averages without token eviction with the full cache's. A loss below 0.2 points counts as none."""
    full = paper.series("model", table=9, of="avg", model=MODELS, method="full")
    pruned = paper.series("model", table=9, of="avg", model=MODELS, method="full+think", ratio=0.4)
    gaps = subtract_cells(pruned, full)
    return decide(gaps.min() > -0.2, describe_values("{model} {value:+.2f}", gaps))


@THINK.states("section 4.1", table="2", text="LongBench has 17 datasets")
def judge_number_of_datasets(paper: PaperCells) -> Outcome:
    """Count the scores of every row of the tables with LongBench."""
    tables = [1, 2, 3, 4, 6, 7, 8, 9, 12]
    scores = paper.series(["table", "row", "dataset"], table=tables, of="scores")
    counts = sorted(set(group_by_field(scores, "table", "row").size()))
    return decide(counts == [17], f"every row of its LongBench tables has {', '.join(map(str, counts))}")


@THINK.states("tables 2 and 8", table="2", text="Plain SnapKV rows of tables 2 and 8 have the same averages")
def judge_snapkv_rows(paper: PaperCells) -> Outcome:
    """Compare the averages of both tables at each cache size."""
    query = {"of": "avg", "model": "llama-3-8b*", "method": "snapkv", "kv_size": [512, 2048]}
    table2 = paper.series("kv_size", table=2, **query)
    table8 = paper.series("kv_size", table=8, **query)
    largest = subtract_cells(table2, table8).abs().max()
    return decide(largest == 0, f"largest difference of averages {largest:.2f}")


@THINK.states("table 7", table="7", text="What the memory column counts")
def judge_memory_column(paper: PaperCells) -> Outcome:
    """Recompute table 7's memory with whole numbers of channels, as the paper's text defines pruning."""
    memory = paper.series("kv_size", table=7, of="kv_memory", method="snapkv+think")
    tokens = read_numeric_labels(memory)
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


@THINK.states("tables 10 and 11", table="10", text="What the times are per")
def judge_unit_of_times(paper: PaperCells) -> Outcome:
    """Show that the printed times cannot be those of a whole batch.

    Compute the FLOP/s that a prefill in the printed time to the first token would need. Compute the tokens per second
    that follow from the printed time per output token (TPOT), and compare them with the printed throughput.
    """
    prefill_ms = paper.number(table=10, metric="ttft", method="kivi")
    token_ms = paper.number(table=10, metric="tpot", method="kivi")
    stated = paper.number(table=11, metric="throughput", method="kivi")
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


@THINK.states("table 4", table="4", text="Whose scores table 4 has")
def judge_model_of_table4(paper: PaperCells) -> Outcome:
    """Name the model under which table 4 is stored, since the paper names none."""
    models = paper.labels("model", table=4)
    return NOTE, f"the paper names no model; {', '.join(models)} is our reading"


@THINK.recomputes("table 12, full − Palu, Mistral", table="text", metric="drop_vs_full", method="palu")
def recompute_drop_of_palu(paper: PaperCells) -> Any:
    """Return how far Palu's average is below the full cache's, on Mistral."""
    return paper.drop("palu", table=12, of="avg", model="mistral*")


@THINK.recomputes("table 12, full − ThinK, LLaMA-2", table="text", metric="drop_vs_full", method="full+think")
def recompute_drop_of_think(paper: PaperCells) -> Any:
    """Return how far ThinK's average is below the full cache's, on LLaMA-2."""
    return paper.drop("full+think", table=12, of="avg", model="llama-2*")


@THINK.recomputes("table 12, full − ASVD, LLaMA-2", table="text", metric="drop_vs_full", method="asvd")
def recompute_drop_of_asvd(paper: PaperCells) -> Any:
    """Return how far ASVD's average is below the full cache's, on LLaMA-2."""
    return paper.drop("asvd", table=12, of="avg", model="llama-2*")

"""ThinK against its own tables (arXiv 2407.21018).

Each function judges the statement, or recomputes the printed cells, that its decorator names.
"""

from __future__ import annotations

from typing import Any

from kvbench.papers.forensics.paper_audit import NOTE, PARTLY, Outcome, PaperAudit, decide
from kvbench.papers.forensics.queries import (
    PaperCells,
    by_field,
    count_rising,
    describe_values,
    difference,
    group_lines,
    labels_of,
    numeric_labels,
)

THINK = PaperAudit("think")
MODELS = ["llama-3-8b*", "mistral*"]
"""Patterns for the models of ThinK's main experiments; tables 9 and 12 have others as well."""


@THINK.states("section 4.3", table="5", text="The needle score at 1024 tokens and 50 % of channels is 90.6")
def needle_at_half(paper: PaperCells) -> Outcome:
    """Compare the number in the prose with those in table 5 and in figure 6."""
    query = {"of": "needle", "model": "mistral*", "method": "snapkv+think"}
    half = paper.number(table=5, kv_size=1024, ratio=0.5, **query)
    less = paper.number(table=5, kv_size=1024, ratio=0.4, **query)
    panel = paper.number(table="fig6", kv_size=1024, ratio=0.5, **query)
    stated = paper.number(table="text", **query)
    return decide(stated == half == panel, f"table 5 {half:.1f}, figure 6 {panel:.1f}; {less:.1f} is the score at 0.4")


@THINK.states("appendix G", table="7", text="The cache shrinks by 80 %")
def shrinkage(paper: PaperCells) -> Outcome:
    """Compare table 7's memory with that of as many whole tokens.

    The statement holds if every row saves more than 75 %, which rounds to the stated 80 %.
    """
    memory = paper.series("kv_size", table=7, of="kv_memory", method="snapkv+think")
    # by the paper's formula a whole token takes half a MiB
    saved = 100 * (1 - memory / (0.5 * numeric_labels(memory)))
    shown = f"table 7's memory is {saved.min():.0f} to {saved.max():.0f} % smaller, so to 80 %"
    return decide(saved.min() > 75, shown)


@THINK.states("section 4.2", table="7", text="Dropping 40 % of key channels saves 20 % of the cache")
def savings_by_size(paper: PaperCells) -> Outcome:
    """Compute the saving by cache size: 40 % of the keys are 20 % of the cache, but 32 recent tokens stay whole.

    The statement holds if every saving rounds to 20 %.
    """
    memory = paper.series("kv_size", table=7, of="kv_memory", method="snapkv+think")
    # the share of the tokens that are not recent times 20 %
    shares = 20 * (1 - 32 / numeric_labels(memory))
    shown = f"{describe_values('{value:.1f} % of {kv_size} tokens', shares)}: 32 tokens keep all channels"
    return decide(shares.min() > 19.5, shown, otherwise=PARTLY)


@THINK.states(
    "section 4.2",
    table="2",
    text="2048 tokens with 40 % of channels gone beat the full cache of LLaMA-3-8B",
)
def full_against_2048(paper: PaperCells) -> Outcome:
    """Compare the average of SnapKV with ThinK at 2048 tokens with the full cache's, on LLaMA-3-8B."""
    pruned = paper.number(table=2, of="avg", model="llama-3-8b*", method="snapkv+think", kv_size=2048, ratio=0.4)
    full = paper.number(table=2, of="avg", model="llama-3-8b*", method="full")
    return decide(pruned > full, f"{pruned:.2f} against {full:.2f}")


@THINK.states(
    "tables 2 and 3",
    table="2",
    text="Averages rise with the cache size, which the repaired block titles need",
)
def averages_by_size(paper: PaperCells) -> Outcome:
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
def equal_memory(paper: PaperCells) -> Outcome:
    """Compare each row with pruned channels with the row without pruning that takes equal memory, by their averages."""
    pruned = paper.series(["method", "kv_size"], table=7, of="avg", method=["h2o+think", "snapkv+think"])
    plain = paper.series(["method", "kv_size"], table=7, of="avg", method=["h2o", "snapkv"], matched_to="?*")
    # a pair has two cache sizes, so its rows cannot be matched by them; both series have the pairs in one order
    gaps = pruned.to_numpy() - plain.to_numpy()
    return decide(gaps.min() > 0, f"{sum(gaps > 0)} of {len(gaps)} pairs, by {gaps.min():.2f} to {gaps.max():.2f}")


@THINK.states("section 4.3", table="5", text="At 40 % the needle score is never below SnapKV's")
def needle_against_snapkv(paper: PaperCells) -> Outcome:
    """Compare needle scores with SnapKV's, by model and cache size."""
    pruned = paper.series(["model", "kv_size"], table=5, of="needle", ratio=0.4)
    base = paper.series(["model", "kv_size"], table=5, of="needle", method="snapkv")
    gaps = difference(pruned, base)
    return decide(gaps.min() >= 0, f"{sum(gaps >= 0)} of {len(gaps)}, up to {gaps.max():+.1f}")


@THINK.states("section 3.1", table="1", text="30 % of channels go without loss, 40 % hurts, l1 more than l2")
def losses_by_ratio(paper: PaperCells) -> Outcome:
    """Compare how much scores fall with 30 % and with 40 % of channels gone, and by which norm channels are chosen.

    The statement holds if every loss at 40 % is above every loss at 30 %, and l1 loses more with both base methods.
    """
    # rows without a ratio keep all channels
    plain = paper.series("base", table=1, of="avg", ratio="")
    easy = -difference(paper.series(["base", "method"], table=1, of="avg", ratio=0.3), plain)
    hard = -difference(paper.series(["base", "method"], table=1, of="avg", ratio=0.4), plain)
    l1 = paper.series("base", table=1, of="avg", ratio=0.4, method="*+l1")
    l2 = paper.series("base", table=1, of="avg", ratio=0.4, method="*+l2")
    gaps = difference(l1, l2)
    worse = labels_of(gaps[gaps < 0], "base")
    hard_falls = describe_values("{method} {value:.2f}", hard)
    shown = (
        f"falls of {easy.min():.2f} to {easy.max():.2f} at 30 %, at 40 % {hard_falls}; "
        f"l1 falls further for {' and '.join(worse) or 'none'} (six labels are repaired, in part by this)"
    )
    return decide(hard.min() > easy.max() and len(worse) == 2, shown, otherwise=PARTLY)


@THINK.states("section 4.4", table="8", text="Dropping value channels costs Mistral, not LLaMA-3")
def value_channels(paper: PaperCells) -> Outcome:
    """Compare the averages with and without pruned value channels, model by model.

    The statement holds if Mistral loses in the mean, and more than LLaMA-3.
    """
    pruned = paper.series(["model", "base", "kv_size", "ratio", "v_ratio"], table=8, of="avg", method="*+thinkv")
    plain = paper.series(["model", "base", "kv_size"], table=8, of="avg", method=["h2o", "snapkv"])
    changes = by_field(difference(pruned, plain), "model")
    means = changes.mean()
    mistral, llama = means["mistral-7b-instruct-v0.2"], means["llama-3-8b-instruct"]
    pattern = "{model} {value:+.2f} to {most:+.2f}, mean {mean:+.2f}"
    return decide(
        mistral < llama and mistral < 0,
        describe_values(pattern, changes.min(), sep="; ", most=changes.max(), mean=means),
    )


@THINK.states("appendix E", table="9", text="40 % of channels go without loss where all tokens stay")
def losses_with_all_tokens(paper: PaperCells) -> Outcome:
    """Compare the averages without token eviction with the full cache's. A loss below 0.2 points counts as none."""
    full = paper.series("model", table=9, of="avg", model=MODELS, method="full")
    pruned = paper.series("model", table=9, of="avg", model=MODELS, method="full+think", ratio=0.4)
    gaps = difference(pruned, full)
    return decide(gaps.min() > -0.2, describe_values("{model} {value:+.2f}", gaps))


@THINK.states("section 4.1", table="2", text="LongBench has 17 datasets")
def number_of_datasets(paper: PaperCells) -> Outcome:
    """Count the scores of every row of the tables with LongBench."""
    tables = [1, 2, 3, 4, 6, 7, 8, 9, 12]
    scores = paper.series(["table", "row", "dataset"], table=tables, of="scores")
    counts = sorted(set(by_field(scores, "table", "row").size()))
    return decide(counts == [17], f"every row of its LongBench tables has {', '.join(map(str, counts))}")


@THINK.states("tables 2 and 8", table="2", text="Plain SnapKV rows of tables 2 and 8 have the same averages")
def snapkv_rows(paper: PaperCells) -> Outcome:
    """Compare the averages of both tables at each cache size."""
    cell = {"of": "avg", "model": "llama-3-8b*", "method": "snapkv", "kv_size": [512, 2048]}
    largest = difference(paper.series("kv_size", table=2, **cell), paper.series("kv_size", table=8, **cell)).abs().max()
    return decide(largest == 0, f"largest difference of averages {largest:.2f}")


@THINK.states("table 7", table="7", text="What the memory column counts")
def memory_column(paper: PaperCells) -> Outcome:
    """Recompute table 7's memory with whole numbers of channels, as the paper's text defines pruning."""
    memory = paper.series("kv_size", table=7, of="kv_memory", method="snapkv+think")
    tokens = numeric_labels(memory)
    # MiB of a token: 32 layers x 32 heads x 128 channels of keys and of values x 2 bytes
    token = 32 * 32 * 2 * 128 * 2 / 1048576
    # half of a token's bytes are its key; pruned keys have 76 of 128 channels, and the 32 most recent keys have all
    keys = (tokens - 32) * token / 2 * 76 / 128 + 32 * token / 2
    values = tokens * token / 2
    pruned = keys + values
    return NOTE, (
        f"{token:.1f} MiB a token is 32 heads; Mistral stores 8, a quarter. The paper's floor((1 − 0.4) 128) = 76 "
        f"channels would give {describe_values('{value:.2f}', pruned, sep=' / ')}, "
        f"76.8 give the printed {describe_values('{value:.1f}', memory, sep=' / ')}"
    )


@THINK.states("tables 10 and 11", table="10", text="What the times are per")
def unit_of_times(paper: PaperCells) -> Outcome:
    """Show that the printed times cannot be those of a whole batch.

    Compute the FLOP/s that a prefill in the printed time to the first token would need. Compute the tokens per second
    that follow from the printed time per output token (TPOT), and compare them with the printed throughput.
    """
    prefill_ms = paper.number(table=10, metric="ttft", method="kivi")
    token_ms = paper.number(table=10, metric="tpot", method="kivi")
    stated = paper.number(table=11, metric="throughput", method="kivi")
    # FLOP = 2 x tokens x weights, with prompts of 160 tokens in a batch of 300 and 6.7e9 weights
    work = 300 * 160 * 2 * 6.7e9
    rate = work / (prefill_ms / 1000)
    return NOTE, (
        f"a prefill of 300 x 160 tokens takes {work:.1e} FLOP; in {prefill_ms} ms that is {rate / 1e15:.0f} PFLOP/s, "
        f"{rate / 312e12:.0f} times an A100, so times are shares of the batch. 1000 / TPOT is {1000 / token_ms:.0f} "
        f"token/s, table 11 has {stated:.0f}: another run, or prompt tokens are counted"
    )


@THINK.states("table 4", table="4", text="Whose scores table 4 has")
def model_of_table4(paper: PaperCells) -> Outcome:
    """Name the model under which table 4 is stored, since the paper names none."""
    models = paper.labels("model", table=4)
    return NOTE, f"the paper names no model; {', '.join(models)} is our reading"


@THINK.recomputes("table 12, full − Palu, Mistral", table="text", metric="drop_vs_full", method="palu")
def drop_of_palu(paper: PaperCells) -> Any:
    return paper.drop("palu", table=12, of="avg", model="mistral*")


@THINK.recomputes("table 12, full − ThinK, LLaMA-2", table="text", metric="drop_vs_full", method="full+think")
def drop_of_think(paper: PaperCells) -> Any:
    return paper.drop("full+think", table=12, of="avg", model="llama-2*")


@THINK.recomputes("table 12, full − ASVD, LLaMA-2", table="text", metric="drop_vs_full", method="asvd")
def drop_of_asvd(paper: PaperCells) -> Any:
    return paper.drop("asvd", table=12, of="avg", model="llama-2*")

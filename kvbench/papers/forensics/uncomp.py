"""UNComp against its own tables (arXiv 2410.03090).

Each function judges the statement, or recomputes the printed cells, that its decorator names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbench.papers.forensics.paper_audit import FAILS, NOTE, PARTLY, Outcome, PaperAudit, decide
from kvbench.papers.forensics.queries import PaperCells, by_field, describe_falls, describe_values, difference, ratio
from kvbench.papers.forensics.repeats import repeats
from kvbench.papers.spec.numbers import Number, exact_number, grade, mean, printed_number
from kvbench.papers.spec.published_cells import PublishedRow

UNCOMP = PaperAudit("uncomp")


@UNCOMP.states("abstract, section 4.2", table="1", text="The cache of LLaMA-3-8B is cut to one stated share")
def share_of_llama3(paper: PaperCells) -> Outcome:
    """Ask whether the paper's text states the same share everywhere, and compute 384 tokens over two contexts."""
    stated = paper.series("where", table="text", of="kv_ratio", model="llama-3-8b*")
    shares = describe_values("{value:.2f}", stated, sep=" and ")
    shown = f"{shares}; 384 / 8096 is {38400 / 8096:.2f} %; 384 / 8192 is {38400 / 8192:.2f} %"
    return decide(stated.min() == stated.max(), shown)


@UNCOMP.states("caption of table 1, section 4.2", table="1", text="CHAI has one compression rate")
def share_of_chai(paper: PaperCells) -> Outcome:
    """Ask whether the paper's text states the same share for CHAI everywhere."""
    stated = paper.series("where", table="text", of="kv_ratio", method="chai")
    return decide(stated.min() == stated.max(), describe_values("{value:.2f} %", stated, sep=" and "))


@UNCOMP.states("section 4.2", table="3", text="It is 5.4 times faster than CHAI")
def speed_against_chai(paper: PaperCells) -> Outcome:
    """Ask whether any table of times has a time of CHAI."""
    timed = paper.labels("method", table=[3, 10])
    return decide("chai" in timed, f"no table has a time of CHAI; timed are {', '.join(timed)}", otherwise=PARTLY)


@UNCOMP.states("caption of table 1", table="3", text="The stage makes it 1.4 times faster than the group alone")
def speed_of_stage(paper: PaperCells) -> Outcome:
    """Compute how many times faster the stage is than the group alone, and than the full cache."""
    stage = paper.series("gpu", table=3, metric="attention_time", method="uncomp-stage")
    over_group = ratio(paper.series("gpu", table=3, metric="attention_time", method="uncomp-group"), stage)
    over_full = ratio(paper.series("gpu", table=3, metric="attention_time", method="full"), stage)
    shown = (
        f"{over_group['a100-80g']:.2f} on the A100, {over_group['mi210-64g']:.2f} on the MI210; "
        f"{over_full['a100-80g']:.2f} is over the full cache"
    )
    return decide(round(over_group["a100-80g"], 1) == 1.4, shown)


@UNCOMP.states("abstract, section 4.2", table="1", text="Losses of 0.77 % and 1.41 %")
def stated_losses(paper: PaperCells) -> Outcome:
    """Compute the losses to the full cache in points and in per cent, and ask whether the stated ones are per cent."""
    full = paper.series("model", table=1, of="avg", model="llama*", method="full")
    uncomp = paper.series("model", table=1, of="avg", model="llama*", method="uncomp-group")
    stated = paper.series("model", table="text", of="avg", metric="drop_vs_full")
    lost = difference(full, uncomp)[["llama-2-7b-chat", "llama-2-13b-chat", "llama-3-8b-instruct"]]
    share = 100 * ratio(lost, full)
    losses = describe_values("{model} {value:.2f} points or {share:.1f} %", lost, share=share)
    shown = f"{losses}: what is stated are points"
    return decide(difference(share, stated).abs().max() < 0.05, shown, otherwise=PARTLY)


@UNCOMP.states("section 4.2", table="1", text="LLaMA-2 7B and 13B lose no more than 0.77")
def losses_of_llama2(paper: PaperCells) -> Outcome:
    """Compare the losses to the full cache with the stated 0.77, which anything below 0.775 rounds to."""
    full = paper.series("model", table=1, of="avg", model="llama-2*", method="full")
    uncomp = paper.series("model", table=1, of="avg", model="llama-2*", method="uncomp-group")
    lost = difference(full, uncomp)[["llama-2-7b-chat", "llama-2-13b-chat"]]
    return decide(lost.max() <= 0.775, describe_values("{model} {value:.2f}", lost))


@UNCOMP.states("section 4.2", table="1", text="It is the best method on LLaMA-3-8B")
def best_on_llama3(paper: PaperCells) -> Outcome:
    """Find the compressed method with the best average."""
    averages = paper.series("method", table=1, of="avg", model="llama-3-8b*", without={"method": "full"})
    best = averages.idxmax()
    return decide(best == "uncomp-group", f"best of those compressed: {best} {averages.max():.2f}")


@UNCOMP.states("appendix D", table="6", text="Groups change 0.23 and 0.96, truncation 0.70")
def changes_of_averages(paper: PaperCells) -> Outcome:
    """Compute the range of averages over group sizes without and with a group of 32, and over truncations."""
    narrow = paper.series("row", table=6, of="avg", without={"group_sizes": "32/*"})
    wide = paper.series("row", table=6, of="avg", group_sizes="32/*")
    truncated = paper.series("row", table=7, of="avg")
    changes = [averages.max() - averages.min() for averages in (narrow, wide, truncated)]
    shown = ", ".join(f"{change:.2f}" for change in changes)
    return decide([round(change, 2) for change in changes] == [0.23, 0.96, 0.7], shown)


@UNCOMP.states("table 6", table="6", text="Sizes of the groups average 384")
def sizes_of_groups(paper: PaperCells) -> Outcome:
    """List the rows of table 6 whose group sizes are not as many as the groups, or do not have the stated mean."""
    odd = []
    for row in paper.rows("6"):
        # group_sizes=256/384/512 lists a size for each group
        sizes = [int(size) for size in row.settings["group_sizes"].split("/")]
        groups = row.settings["groups"]
        # all groups have equally many heads, so the mean of their sizes is the cache's size
        average = sum(sizes) / len(sizes)
        # a mean within 2 tokens of the stated size counts as equal
        has_stated_mean = abs(average - int(row.settings["kv_size"])) <= 2
        if len(sizes) != int(groups) or not has_stated_mean:
            odd.append(f"{groups} groups list {len(sizes)} sizes with mean {average:.0f}")
    if not odd:
        return decide(True, "every list has its number of sizes and mean")
    return decide(False, f"{'; '.join(odd)}; 636 would fill 436/536/736")


@UNCOMP.states("abstract, section 4.3", table="4", text="It beats the full cache in the needle test")
def needle_against_full(paper: PaperCells) -> Outcome:
    """Count in how many of the four comparisons (two models, two variants of UNComp) the needle score is higher."""
    models = ["llama-2-7b*", "llama-3-8b*"]
    uncomp = paper.series(["model", "method"], table=4, of="needle", model=models, method="uncomp-*")
    full = paper.series("model", table=4, of="needle", method="full")
    better = sum(difference(uncomp, full) > 0)
    parts = []
    for model in ("llama-2-7b-chat", "llama-3-8b-instruct"):
        parts.append(f"{model} {describe_values('{method} {value:.2f}', uncomp[model])} against {full[model]:.2f}")
    otherwise = PARTLY if better else FAILS
    return decide(better == 4, f"{better} of 4: {'; '.join(parts)}", otherwise)


@UNCOMP.states("caption of table 3", table="3", text="Which schedule keeps 63.09 % of hidden states")
def kept_hidden_states(paper: PaperCells) -> Outcome:
    """Compute the share of hidden states that each appendix's schedule keeps, to see which one the caption states."""
    # the dataset and the metric of a cell of this quantity have one name
    key = ("hidden_state_size", "hidden_state_size")
    rows = [row for row in paper.rows("text") if row.model == "llama-2-7b-chat" and key in row.cells]
    early = kept_share([row for row in rows if row.settings["where"] == "appendix A.3"], 4096)
    late = kept_share([row for row in rows if row.settings["where"] == "appendix E"], 4096)
    # the paper states the share once, without naming its schedule
    ((_, _, cell),) = paper.cells(table="text", of="hidden_state_ratio")
    matching_place = "neither"
    if grade(cell.printed, early) == "equal":
        matching_place = "appendix A.3"
    elif grade(cell.printed, late) == "equal":
        matching_place = "appendix E; tables of scores name appendix A.3, so times seem to be of a stronger compression"
    return NOTE, (
        f"appendix A.3 keeps {early.text(2)} %, appendix E keeps {late.text(2)} %; "
        f"the stated {cell.printed} % is that of {matching_place}"
    )


def kept_share(rows: Sequence[PublishedRow], most: int) -> Number:
    """Return how many hidden states a schedule keeps over all layers, in per cent of those without a schedule.

    rows: each states a number of hidden states for one layer or a range of layers.
    most: the number of hidden states of a layer that drops none.
    """
    sizes = []
    for row in rows:
        # layers=5-8, or one layer alone
        first, _, last = row.settings["layers"].partition("-")
        layers = int(last or first) - int(first) + 1
        size = printed_number(row.cells["hidden_state_size", "hidden_state_size"].printed).value
        sizes.extend([exact_number(size)] * layers)
    return mean(sizes) / most * 100


@UNCOMP.states("conclusion", table="10", text="It takes much less memory than the full cache")
def peak_memory(paper: PaperCells) -> Outcome:
    """Compare the peaks of memory with the full cache's in per cent: HOLDS if none is above, else PARTLY."""
    uncomp = paper.series(["prompt", "batch", "method"], table=10, metric="peak_memory", method="uncomp-*")
    full = paper.series(["prompt", "batch"], table=10, metric="peak_memory", method="full")
    over = 100 * (ratio(uncomp, full) - 1)
    prompts = by_field(over, "prompt")
    gaps = describe_values("prompt={prompt} {value:+.2f} to {most:+.2f} %", prompts.min(), sep="; ", most=prompts.max())
    above = sum(over > 0)
    shown = f"peaks against the full cache's: {gaps}; {above} of {len(over)} are above"
    return decide(above == 0, shown, otherwise=PARTLY)


@UNCOMP.states("tables 1, 2, 6, 7", table="1", text="Groups of 512 and 256 tokens have one set of scores")
def two_sets_of_scores(paper: PaperCells) -> Outcome:
    """List the datasets on which tables print different scores for the main configuration."""
    datasets = []
    for finding in repeats(paper.book):
        # identity.UNCOMP_MAIN gives the main configuration this name
        is_main = finding.row.startswith("llama-2-7b-chat") and "kv_size=384" in finding.row
        if finding.paper == "uncomp" and is_main:
            datasets.append(finding.cell)
    return decide(not datasets, f"they differ on {len(datasets)} datasets: {', '.join(datasets)}")


@UNCOMP.states("table 10", table="10", text="Time per token falls and memory rises with the batch")
def times_by_batch(paper: PaperCells) -> Outcome:
    """List the batch sizes at which the time per token rises, or the memory falls."""
    by = ["method", "prompt", "batch"]
    times = paper.series(by, table=10, metric="tpot", method="uncomp-*")
    memory = paper.series(by, table=10, metric="peak_memory", method="uncomp-*")
    found = describe_falls("{method} prompt={prompt} tpot {a:g} to {b:g} at batch {then}", times, rising=False)
    found += describe_falls("{method} prompt={prompt} peak_memory {a:g} to {b:g} at batch {then}", memory)
    shown = "; ".join(sorted(found)) or "time falls and memory rises with the batch"
    return decide(not found, shown, otherwise=NOTE)


@UNCOMP.states("appendix E", table="10", text="What 2.96 times the throughput compares")
def batches_of_speedup(paper: PaperCells) -> Outcome:
    """Compute the ratio of times per token with the batches that the paper compares, and with equal batches."""
    full = paper.series("batch", table=10, metric="tpot", method="full", prompt=3712)
    fast = paper.series("batch", table=10, metric="tpot", method="uncomp-stage", prompt=3712)
    return NOTE, (
        f"{full['8'] / fast['12']:.2f} is batch 12 over batch 8; at batch 8 for both it is {full['8'] / fast['8']:.2f}"
    )


@UNCOMP.states("tables 8 and 9", table="8", text="The random partition's row and column titles")
def random_partition(paper: PaperCells) -> Outcome:
    """Compute the average of the random partition if one of its scores were 0.50 higher."""
    scores = paper.series("dataset", table=8, of="scores", partition="random")
    stated = paper.number(table=8, of="avg", partition="random")
    corrected = (scores.sum() + 0.5) / len(scores)
    titles = paper.labels("partition", table=[8, 9], without={"partition": "effective_rank"})
    return NOTE, (
        f"TREC {scores['trec']:.2f}, LCC {scores['lcc']:.2f}, average {stated:.2f}; 0.50 more in one cell gives "
        f"{corrected:.2f}. Tables 8 and 9 head {' and '.join(titles)} alike"
    )


@UNCOMP.states("sections 4.1 and A.2", table="1", text="Which Mistral it is")
def version_of_mistral(paper: PaperCells) -> Outcome:
    """List the versions that the paper's text states, and the name under which table 1 is stored."""
    models = paper.labels("model", table=1, model="mistral*")
    return NOTE, f"v0.1 in section 4.1, v0.2 in appendix A.2; stored without version: {', '.join(models)}"


@UNCOMP.states("table 3", table="3", text="What the attention time is")
def what_attention_time_is(paper: PaperCells) -> Outcome:
    """Compare the attention time of each row of table 3 with the sum of prefill and decoding."""
    attention = paper.series("row", table=3, metric="attention_time")
    gaps = difference(sum_of_times(paper), attention).abs()
    # three rounded times can disagree by 0.015 s
    return NOTE, (
        f"prefill + decoding in {sum(gaps < 0.015)} of {len(gaps)} rows (largest gap {gaps.max():.2f} s): the total, "
        "not a part"
    )


@UNCOMP.recomputes("prefill + decoding", table=3, metric="attention_time")
def sum_of_times(paper: PaperCells) -> Any:
    return paper.series("row", table=3, metric="prefill_time") + paper.series("row", table=3, metric="decode_time")


@UNCOMP.recomputes(
    "time per token, full / stage, 2048+8096",
    table="text",
    metric="speedup_vs_full",
    of="throughput",
    where="abstract",
)
def speedup_of_abstract(paper: PaperCells) -> Any:
    # the full cache in batches of 6, the stage in batches of 32
    full = paper.number(table="text", of="wikitext2", method="full")
    return full / paper.number(table="text", of="wikitext2", method="uncomp-stage")


@UNCOMP.recomputes(
    "table 10, full at batch 8 / stage at 12, 3712+384",
    table="text",
    metric="speedup_vs_full",
    of="throughput",
    where="appendix E",
)
def speedup_of_appendix(paper: PaperCells) -> Any:
    # the best batch of the stage over the largest batch that the full cache can run
    full = paper.number(table=10, metric="tpot", method="full", batch=8, prompt=3712)
    return full / paper.number(table=10, metric="tpot", method="uncomp-stage", batch=12, prompt=3712)


@UNCOMP.recomputes("table 3, full / stage, A100", table="text", metric="speedup_vs_full", of="prefill_time")
def speedup_of_prefill(paper: PaperCells) -> Any:
    full = paper.number(table=3, metric="prefill_time", method="full", gpu="a100-80g")
    return full / paper.number(table=3, metric="prefill_time", method="uncomp-stage", gpu="a100-80g")


@UNCOMP.recomputes("table 3, attention time, group / stage, A100", table="text", metric="speedup", of="overall_time")
def speedup_of_stage(paper: PaperCells) -> Any:
    group = paper.number(table=3, metric="attention_time", method="uncomp-group", gpu="a100-80g")
    return group / paper.number(table=3, metric="attention_time", method="uncomp-stage", gpu="a100-80g")


@UNCOMP.recomputes("table 1, group − stage, LLaMA-2-7B", table="text", metric="drop")
def drop_of_stage(paper: PaperCells) -> Any:
    return paper.drop("uncomp-stage", below="uncomp-group", table=1, of="avg", model="llama-2-7b*")


@UNCOMP.recomputes("table 1, full − group, LLaMA-2-7B", table="text", metric="drop_vs_full", where="section 4.2")
def drop_on_llama2(paper: PaperCells) -> Any:
    return paper.drop("uncomp-group", table=1, of="avg", model="llama-2-7b*")


@UNCOMP.recomputes("table 1, full − group, LLaMA-3-8B", table="text", metric="drop_vs_full", where="abstract")
def drop_on_llama3(paper: PaperCells) -> Any:
    return paper.drop("uncomp-group", table=1, of="avg", model="llama-3-8b*")

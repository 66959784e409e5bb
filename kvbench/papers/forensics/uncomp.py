"""UNComp against its own tables (arXiv 2410.03090).

Each function judges the statement, or recomputes the printed cells, that its decorator names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbench.papers.forensics.paper_audit import FAILS, NOTE, PARTLY, Outcome, PaperAudit, decide
from kvbench.papers.forensics.queries import (
    PaperCells,
    describe_falls,
    describe_values,
    divide_cells,
    group_by_field,
    subtract_cells,
)
from kvbench.papers.forensics.repeats import find_repeats
from kvbench.papers.spec.numbers import Number, exact_number, grade, mean, printed_number
from kvbench.papers.spec.published_cells import PublishedRow

UNCOMP = PaperAudit("uncomp")


@UNCOMP.states("abstract, section 4.2", table="1", text="The cache of LLaMA-3-8B is cut to one stated share")
def judge_share_of_llama3(paper: PaperCells) -> Outcome:
    """Ask whether the paper's text states the same share everywhere, and compute 384 tokens over two contexts."""
    stated = paper.series("where", table="text", of="kv_ratio", model="llama-3-8b*")
    shares = describe_values("{value:.2f}", stated, sep=" and ")
    # 100 * 384 tokens over the longest prompt of the paper, and over the model's context
    shown = f"{shares}; 384 / 8096 is {38400 / 8096:.2f} %; 384 / 8192 is {38400 / 8192:.2f} %"
    return decide(stated.min() == stated.max(), shown)


@UNCOMP.states("caption of table 1, section 4.2", table="1", text="CHAI has one compression rate")
def judge_share_of_chai(paper: PaperCells) -> Outcome:
    """Ask whether the paper's text states the same share for CHAI everywhere."""
    stated = paper.series("where", table="text", of="kv_ratio", method="chai")
    return decide(stated.min() == stated.max(), describe_values("{value:.2f} %", stated, sep=" and "))


@UNCOMP.states("section 4.2", table="3", text="It is 5.4 times faster than CHAI")
def judge_speed_against_chai(paper: PaperCells) -> Outcome:
    """Ask whether any table of times has a time of CHAI."""
    timed = paper.labels("method", table=[3, 10])
    return decide("chai" in timed, f"no table has a time of CHAI; timed are {', '.join(timed)}", otherwise=PARTLY)


@UNCOMP.states("caption of table 1", table="3", text="The stage makes it 1.4 times faster than the group alone")
def judge_speed_of_stage(paper: PaperCells) -> Outcome:
    """Compute how many times faster the stage is than the group alone, and than the full cache."""
    stage = paper.series("gpu", table=3, metric="attention_time", method="uncomp-stage")
    group = paper.series("gpu", table=3, metric="attention_time", method="uncomp-group")
    full = paper.series("gpu", table=3, metric="attention_time", method="full")
    over_group, over_full = divide_cells(group, stage), divide_cells(full, stage)
    shown = (
        f"{over_group['a100-80g']:.2f} on the A100, {over_group['mi210-64g']:.2f} on the MI210; "
        f"{over_full['a100-80g']:.2f} is over the full cache"
    )
    return decide(round(over_group["a100-80g"], 1) == 1.4, shown)


@UNCOMP.states("abstract, section 4.2", table="1", text="Losses of 0.77 % and 1.41 %")
def judge_stated_losses(paper: PaperCells) -> Outcome:
    """Compute the losses to the full cache in points and in per cent, and ask whether the stated ones are per cent."""
    full = paper.series("model", table=1, of="avg", model="llama*", method="full")
    uncomp = paper.series("model", table=1, of="avg", model="llama*", method="uncomp-group")
    stated = paper.series("model", table="text", of="avg", metric="drop_vs_full")
    lost = subtract_cells(full, uncomp)[["llama-2-7b-chat", "llama-2-13b-chat", "llama-3-8b-instruct"]]
    share = 100 * divide_cells(lost, full)
    losses = describe_values("{model} {value:.2f} points or {share:.1f} %", lost, share=share)
    shown = f"{losses}: what is stated are points"
    return decide(subtract_cells(share, stated).abs().max() < 0.05, shown, otherwise=PARTLY)


@UNCOMP.states("section 4.2", table="1", text="LLaMA-2 7B and 13B lose no more than 0.77")
def judge_losses_of_llama2(paper: PaperCells) -> Outcome:
    """Compare the losses to the full cache with the stated 0.77, which anything below 0.775 rounds to."""
    full = paper.series("model", table=1, of="avg", model="llama-2*", method="full")
    uncomp = paper.series("model", table=1, of="avg", model="llama-2*", method="uncomp-group")
    lost = subtract_cells(full, uncomp)[["llama-2-7b-chat", "llama-2-13b-chat"]]
    return decide(lost.max() <= 0.775, describe_values("{model} {value:.2f}", lost))


@UNCOMP.states("section 4.2", table="1", text="It is the best method on LLaMA-3-8B")
def judge_best_on_llama3(paper: PaperCells) -> Outcome:
    """Find the compressed method with the best average."""
    averages = paper.series("method", table=1, of="avg", model="llama-3-8b*", without={"method": "full"})
    best = averages.idxmax()
    return decide(best == "uncomp-group", f"best of those compressed: {best} {averages.max():.2f}")


@UNCOMP.states("appendix D", table="6", text="Groups change 0.23 and 0.96, truncation 0.70")
def judge_changes_of_averages(paper: PaperCells) -> Outcome:
    """Compute the range of averages over group sizes without and with a group of 32, and over truncations."""
    narrow = paper.series("row", table=6, of="avg", without={"group_sizes": "32/*"})
    wide = paper.series("row", table=6, of="avg", group_sizes="32/*")
    truncated = paper.series("row", table=7, of="avg")
    changes = [averages.max() - averages.min() for averages in (narrow, wide, truncated)]
    shown = ", ".join(f"{change:.2f}" for change in changes)
    return decide([round(change, 2) for change in changes] == [0.23, 0.96, 0.7], shown)


@UNCOMP.states("table 6", table="6", text="Sizes of the groups average 384")
def judge_sizes_of_groups(paper: PaperCells) -> Outcome:
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
def judge_needle_against_full(paper: PaperCells) -> Outcome:
    """Count in how many of the four comparisons (two models, two variants of UNComp) the needle score is higher."""
    models = ["llama-2-7b*", "llama-3-8b*"]
    uncomp = paper.series(["model", "method"], table=4, of="needle", model=models, method="uncomp-*")
    full = paper.series("model", table=4, of="needle", method="full")
    better = sum(subtract_cells(uncomp, full) > 0)
    parts = []
    for model in ("llama-2-7b-chat", "llama-3-8b-instruct"):
        parts.append(f"{model} {describe_values('{method} {value:.2f}', uncomp[model])} against {full[model]:.2f}")
    otherwise = PARTLY if better else FAILS
    return decide(better == 4, f"{better} of 4: {'; '.join(parts)}", otherwise)


@UNCOMP.states("caption of table 3", table="3", text="Which schedule keeps 63.09 % of hidden states")
def judge_kept_hidden_states(paper: PaperCells) -> Outcome:
    """Compute the share of hidden states that each appendix's schedule keeps, to see which share the caption states."""
    # the dataset and the metric of a cell of this quantity have one name
    key = ("hidden_state_size", "hidden_state_size")
    rows = [row for row in paper.rows("text") if row.model == "llama-2-7b-chat" and key in row.cells]
    share_of_a3 = compute_kept_share([row for row in rows if row.settings["where"] == "appendix A.3"], 4096)
    share_of_e = compute_kept_share([row for row in rows if row.settings["where"] == "appendix E"], 4096)
    # the paper states the share once, without naming its schedule
    ((_, _, stated),) = paper.cells(table="text", of="hidden_state_ratio")
    matching_place = "neither"
    if grade(stated.printed, share_of_a3) == "equal":
        matching_place = "appendix A.3"
    elif grade(stated.printed, share_of_e) == "equal":
        matching_place = "appendix E; tables of scores name appendix A.3, so times seem to be of a stronger compression"
    return NOTE, (
        f"appendix A.3 keeps {share_of_a3.text(2)} %, appendix E keeps {share_of_e.text(2)} %; "
        f"the stated {stated.printed} % is that of {matching_place}"
    )


def compute_kept_share(rows: Sequence[PublishedRow], most: int) -> Number:
    """Return how many hidden states a schedule keeps over all layers, in per cent of those without a schedule.

    rows: each states a number of hidden states for one layer or a range of layers.
    most: the number of hidden states of a layer that drops none.
    """
    # the number of hidden states of each layer
    sizes = []
    for row in rows:
        # layers=5-8, or one layer alone
        first, _, last = row.settings["layers"].partition("-")
        layers = int(last or first) - int(first) + 1
        size = printed_number(row.cells["hidden_state_size", "hidden_state_size"].printed).value
        sizes.extend([exact_number(size)] * layers)
    return mean(sizes) / most * 100


@UNCOMP.states("conclusion", table="10", text="It takes much less memory than the full cache")
def judge_peak_memory(paper: PaperCells) -> Outcome:
    """Compare the peaks of memory with the full cache's in per cent: HOLDS if none is above, else PARTLY."""
    uncomp = paper.series(["prompt", "batch", "method"], table=10, metric="peak_memory", method="uncomp-*")
    full = paper.series(["prompt", "batch"], table=10, metric="peak_memory", method="full")
    over = 100 * (divide_cells(uncomp, full) - 1)
    by_prompt = group_by_field(over, "prompt")
    pattern = "prompt={prompt} {value:+.2f} to {most:+.2f} %"
    gaps = describe_values(pattern, by_prompt.min(), sep="; ", most=by_prompt.max())
    n_above = sum(over > 0)
    shown = f"peaks against the full cache's: {gaps}; {n_above} of {len(over)} are above"
    return decide(n_above == 0, shown, otherwise=PARTLY)


@UNCOMP.states("tables 1, 2, 6, 7", table="1", text="Groups of 512 and 256 tokens have one set of scores")
def judge_two_sets_of_scores(paper: PaperCells) -> Outcome:
    """List the datasets on which tables print different scores for the main configuration."""
    datasets = []
    for finding in find_repeats(paper.book):
        # identity.UNCOMP_MAIN gives the main configuration this name
        is_main = finding.row.startswith("llama-2-7b-chat") and "kv_size=384" in finding.row
        if finding.paper == "uncomp" and is_main:
            datasets.append(finding.cell)
    return decide(not datasets, f"they differ on {len(datasets)} datasets: {', '.join(datasets)}")


@UNCOMP.states("table 10", table="10", text="Time per token falls and memory rises with the batch")
def judge_times_by_batch(paper: PaperCells) -> Outcome:
    """List the batch sizes at which the time per token rises, or the memory falls."""
    # lines run along the last field, the batch
    fields = ["method", "prompt", "batch"]
    times = paper.series(fields, table=10, metric="tpot", method="uncomp-*")
    memory = paper.series(fields, table=10, metric="peak_memory", method="uncomp-*")
    exceptions = describe_falls("{method} prompt={prompt} tpot {a:g} to {b:g} at batch {then}", times, rising=False)
    exceptions += describe_falls("{method} prompt={prompt} peak_memory {a:g} to {b:g} at batch {then}", memory)
    shown = "; ".join(sorted(exceptions)) or "time falls and memory rises with the batch"
    return decide(not exceptions, shown, otherwise=NOTE)


@UNCOMP.states("appendix E", table="10", text="What 2.96 times the throughput compares")
def judge_batches_of_speedup(paper: PaperCells) -> Outcome:
    """Compute the ratio of times per token with the batches that the paper compares, and with equal batches."""
    full = paper.series("batch", table=10, metric="tpot", method="full", prompt=3712)
    stage = paper.series("batch", table=10, metric="tpot", method="uncomp-stage", prompt=3712)
    as_compared, at_equal_batches = full["8"] / stage["12"], full["8"] / stage["8"]
    return NOTE, f"{as_compared:.2f} is batch 12 over batch 8; at batch 8 for both it is {at_equal_batches:.2f}"


@UNCOMP.states("tables 8 and 9", table="8", text="The random partition's row and column titles")
def judge_random_partition(paper: PaperCells) -> Outcome:
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
def judge_version_of_mistral(paper: PaperCells) -> Outcome:
    """List the versions that the paper's text states, and the name under which table 1 is stored."""
    models = paper.labels("model", table=1, model="mistral*")
    return NOTE, f"v0.1 in section 4.1, v0.2 in appendix A.2; stored without version: {', '.join(models)}"


@UNCOMP.states("table 3", table="3", text="What the attention time is")
def judge_meaning_of_attention_time(paper: PaperCells) -> Outcome:
    """Compare the attention time of each row of table 3 with the sum of prefill and decoding."""
    attention = paper.series("row", table=3, metric="attention_time")
    gaps = subtract_cells(recompute_attention_time(paper), attention).abs()
    # three rounded times can disagree by 0.015 s
    n_equal = sum(gaps < 0.015)
    return NOTE, (
        f"prefill + decoding in {n_equal} of {len(gaps)} rows (largest gap {gaps.max():.2f} s): the total, not a part"
    )


@UNCOMP.recomputes("prefill + decoding", table=3, metric="attention_time")
def recompute_attention_time(paper: PaperCells) -> Any:
    """Return prefill time + decoding time of each row of table 3, in seconds."""
    return paper.series("row", table=3, metric="prefill_time") + paper.series("row", table=3, metric="decode_time")


@UNCOMP.recomputes(
    "time per token, full / stage, 2048+8096",
    table="text",
    metric="speedup_vs_full",
    of="throughput",
    where="abstract",
)
def recompute_speedup_of_abstract(paper: PaperCells) -> Any:
    """Return the full cache's time per token over that of UNComp with its stage."""
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
def recompute_speedup_of_appendix(paper: PaperCells) -> Any:
    """Return the full cache's time per token over that of UNComp with its stage, in larger batches."""
    # the best batch of the stage over the largest batch that the full cache can run
    full = paper.number(table=10, metric="tpot", method="full", batch=8, prompt=3712)
    return full / paper.number(table=10, metric="tpot", method="uncomp-stage", batch=12, prompt=3712)


@UNCOMP.recomputes("table 3, full / stage, A100", table="text", metric="speedup_vs_full", of="prefill_time")
def recompute_speedup_of_prefill(paper: PaperCells) -> Any:
    """Return the full cache's prefill time over that of UNComp with its stage, on the A100."""
    full = paper.number(table=3, metric="prefill_time", method="full", gpu="a100-80g")
    return full / paper.number(table=3, metric="prefill_time", method="uncomp-stage", gpu="a100-80g")


@UNCOMP.recomputes("table 3, attention time, group / stage, A100", table="text", metric="speedup", of="overall_time")
def recompute_speedup_of_stage(paper: PaperCells) -> Any:
    """Return the attention time of UNComp's group alone over that with its stage, on the A100."""
    group = paper.number(table=3, metric="attention_time", method="uncomp-group", gpu="a100-80g")
    return group / paper.number(table=3, metric="attention_time", method="uncomp-stage", gpu="a100-80g")


@UNCOMP.recomputes("table 1, group − stage, LLaMA-2-7B", table="text", metric="drop")
def recompute_drop_of_stage(paper: PaperCells) -> Any:
    """Return how far the average of UNComp with its stage is below that of the group alone, on LLaMA-2-7B."""
    return paper.drop("uncomp-stage", below="uncomp-group", table=1, of="avg", model="llama-2-7b*")


@UNCOMP.recomputes("table 1, full − group, LLaMA-2-7B", table="text", metric="drop_vs_full", where="section 4.2")
def recompute_drop_on_llama2(paper: PaperCells) -> Any:
    """Return how far the average of UNComp's group is below the full cache's, on LLaMA-2-7B."""
    return paper.drop("uncomp-group", table=1, of="avg", model="llama-2-7b*")


@UNCOMP.recomputes("table 1, full − group, LLaMA-3-8B", table="text", metric="drop_vs_full", where="abstract")
def recompute_drop_on_llama3(paper: PaperCells) -> Any:
    """Return how far the average of UNComp's group is below the full cache's, on LLaMA-3-8B."""
    return paper.drop("uncomp-group", table=1, of="avg", model="llama-3-8b*")

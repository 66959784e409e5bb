"""UNComp against its own tables (arXiv 2410.03090).

Each function judges the statement, or recomputes the printed cells, that its decorator names.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from kvbench.papers.forensics.frame import (
    describe_falls,
    describe_values,
    divide,
    drop,
    find,
    group,
    labels,
    number,
    series,
    subtract,
)
from kvbench.papers.forensics.paper_audit import FAILS, NOTE, PARTLY, Outcome, decide, recomputes, states
from kvbench.papers.forensics.repeats import find_repeats
from kvbench.papers.spec.numbers import Number, exact_number, grade, mean
from kvbench.papers.spec.published_cells import Book


@states("uncomp", "abstract, section 4.2", table="1", text="The cache of LLaMA-3-8B is cut to one stated share")
def _judge_share_of_llama3(cells: pd.DataFrame) -> Outcome:
    stated = series(cells, "where", table="text", dataset="kv_ratio", model="llama-3-8b*")
    shares = describe_values("{value:.2f}", stated, sep=" and ")
    # 100 * 384 tokens over the longest prompt of the paper, and over the model's context
    shown = f"{shares}; 384 / 8096 is {38400 / 8096:.2f} %; 384 / 8192 is {38400 / 8192:.2f} %"
    return decide(stated.min() == stated.max(), shown)


@states("uncomp", "caption of table 1, section 4.2", table="1", text="CHAI has one compression rate")
def _judge_share_of_chai(cells: pd.DataFrame) -> Outcome:
    stated = series(cells, "where", table="text", dataset="kv_ratio", method="chai")
    return decide(stated.min() == stated.max(), describe_values("{value:.2f} %", stated, sep=" and "))


@states("uncomp", "section 4.2", table="3", text="It is 5.4 times faster than CHAI")
def _judge_speed_against_chai(cells: pd.DataFrame) -> Outcome:
    timed = labels(cells, "method", table=[3, 10])
    return decide("chai" in timed, f"no table has a time of CHAI; timed are {', '.join(timed)}", otherwise=PARTLY)


@states("uncomp", "caption of table 1", table="3", text="The stage makes it 1.4 times faster than the group alone")
def _judge_speed_of_stage(cells: pd.DataFrame) -> Outcome:
    stage = series(cells, "gpu", table=3, metric="attention_time", method="uncomp-stage")
    group = series(cells, "gpu", table=3, metric="attention_time", method="uncomp-group")
    full = series(cells, "gpu", table=3, metric="attention_time", method="full")
    over_group, over_full = divide(group, stage), divide(full, stage)
    shown = (
        f"{over_group['a100-80g']:.2f} on the A100, {over_group['mi210-64g']:.2f} on the MI210; "
        f"{over_full['a100-80g']:.2f} is over the full cache"
    )
    return decide(round(over_group["a100-80g"], 1) == 1.4, shown)


@states("uncomp", "abstract, section 4.2", table="1", text="Losses of 0.77 % and 1.41 %")
def _judge_stated_losses(cells: pd.DataFrame) -> Outcome:
    full = series(cells, "model", table=1, dataset="avg", model="llama*", method="full")
    uncomp = series(cells, "model", table=1, dataset="avg", model="llama*", method="uncomp-group")
    stated = series(cells, "model", table="text", dataset="avg", metric="drop_vs_full")
    lost = subtract(full, uncomp)[["llama-2-7b-chat", "llama-2-13b-chat", "llama-3-8b-instruct"]]
    share = 100 * divide(lost, full)
    losses = describe_values("{model} {value:.2f} points or {share:.1f} %", lost, share=share)
    shown = f"{losses}: what is stated are points"
    return decide(subtract(share, stated).abs().max() < 0.05, shown, otherwise=PARTLY)


@states("uncomp", "section 4.2", table="1", text="LLaMA-2 7B and 13B lose no more than 0.77")
def _judge_losses_of_llama2(cells: pd.DataFrame) -> Outcome:
    full = series(cells, "model", table=1, dataset="avg", model="llama-2*", method="full")
    uncomp = series(cells, "model", table=1, dataset="avg", model="llama-2*", method="uncomp-group")
    lost = subtract(full, uncomp)[["llama-2-7b-chat", "llama-2-13b-chat"]]
    return decide(lost.max() <= 0.775, describe_values("{model} {value:.2f}", lost))


@states("uncomp", "section 4.2", table="1", text="It is the best method on LLaMA-3-8B")
def _judge_best_on_llama3(cells: pd.DataFrame) -> Outcome:
    averages = series(cells[cells["method"] != "full"], "method", table=1, dataset="avg", model="llama-3-8b*")
    best = averages.idxmax()
    return decide(best == "uncomp-group", f"best of those compressed: {best} {averages.max():.2f}")


@states("uncomp", "appendix D", table="6", text="Groups change 0.23 and 0.96, truncation 0.70")
def _judge_changes_of_averages(cells: pd.DataFrame) -> Outcome:
    narrow = series(cells[~cells["group_sizes"].str.startswith("32/")], "row", table=6, dataset="avg")
    wide = series(cells, "row", table=6, dataset="avg", group_sizes="32/*")
    truncated = series(cells, "row", table=7, dataset="avg")
    changes = [averages.max() - averages.min() for averages in (narrow, wide, truncated)]
    shown = ", ".join(f"{change:.2f}" for change in changes)
    return decide([round(change, 2) for change in changes] == [0.23, 0.96, 0.7], shown)


@states("uncomp", "table 6", table="6", text="Sizes of the groups average 384")
def _judge_sizes_of_groups(cells: pd.DataFrame) -> Outcome:
    odd = []
    for row in find(cells, table=6, dataset="avg").itertuples():
        # group_sizes=256/384/512 lists a size for each group
        sizes = [int(size) for size in row.group_sizes.split("/")]
        # all groups have equally many heads, so the mean of their sizes is the cache's size
        average = sum(sizes) / len(sizes)
        # a mean within 2 tokens of the stated size counts as equal
        has_stated_mean = abs(average - int(row.kv_size)) <= 2
        if len(sizes) != int(row.groups) or not has_stated_mean:
            odd.append(f"{row.groups} groups list {len(sizes)} sizes with mean {average:.0f}")
    if not odd:
        return decide(True, "every list has its number of sizes and mean")
    return decide(False, f"{'; '.join(odd)}; 636 would fill 436/536/736")


@states("uncomp", "abstract, section 4.3", table="4", text="It beats the full cache in the needle test")
def _judge_needle_against_full(cells: pd.DataFrame) -> Outcome:
    models = ["llama-2-7b*", "llama-3-8b*"]
    uncomp = series(cells, ["model", "method"], table=4, dataset="needle", model=models, method="uncomp-*")
    full = series(cells, "model", table=4, dataset="needle", method="full")
    better = sum(subtract(uncomp, full) > 0)
    parts = []
    for model in ("llama-2-7b-chat", "llama-3-8b-instruct"):
        parts.append(f"{model} {describe_values('{method} {value:.2f}', uncomp[model])} against {full[model]:.2f}")
    otherwise = PARTLY if better else FAILS
    return decide(better == 4, f"{better} of 4: {'; '.join(parts)}", otherwise)


@states("uncomp", "caption of table 3", table="3", text="Which schedule keeps 63.09 % of hidden states")
def _judge_kept_hidden_states(cells: pd.DataFrame) -> Outcome:
    sizes = find(cells, table="text", model="llama-2-7b-chat", metric="hidden_state_size")
    share_of_a3 = compute_kept_share(series(sizes, "layers", where="appendix A.3"), 4096)
    share_of_e = compute_kept_share(series(sizes, "layers", where="appendix E"), 4096)
    # the paper states the share once, without naming its schedule
    (stated,) = find(cells, table="text", dataset="hidden_state_ratio")["cell"]
    matching_place = "neither"
    if grade(stated.printed, share_of_a3) == "equal":
        matching_place = "appendix A.3"
    elif grade(stated.printed, share_of_e) == "equal":
        matching_place = "appendix E; tables of scores name appendix A.3, so times seem to be of a stronger compression"
    return NOTE, (
        f"appendix A.3 keeps {share_of_a3.text(2)} %, appendix E keeps {share_of_e.text(2)} %; "
        f"the stated {stated.printed} % is that of {matching_place}"
    )


def compute_kept_share(schedule: pd.Series[float], most: int) -> Number:
    """Return how many hidden states a schedule keeps over all layers, in per cent of those without a schedule.

    schedule: the number of hidden states by layer, or range of layers.
    most: the number of hidden states of a layer that drops none.
    """
    sizes = []
    for layers, size in schedule.items():
        # layers=5-8, or one layer alone
        first, _, last = str(layers).partition("-")
        sizes += [exact_number(size)] * (int(last or first) - int(first) + 1)
    return mean(sizes) / most * 100


@states("uncomp", "conclusion", table="10", text="It takes much less memory than the full cache")
def _judge_peak_memory(cells: pd.DataFrame) -> Outcome:
    uncomp = series(cells, ["prompt", "batch", "method"], table=10, metric="peak_memory", method="uncomp-*")
    full = series(cells, ["prompt", "batch"], table=10, metric="peak_memory", method="full")
    over = 100 * (divide(uncomp, full) - 1)
    by_prompt = group(over, "prompt")
    pattern = "prompt={prompt} {value:+.2f} to {most:+.2f} %"
    gaps = describe_values(pattern, by_prompt.min(), sep="; ", most=by_prompt.max())
    n_above = sum(over > 0)
    shown = f"peaks against the full cache's: {gaps}; {n_above} of {len(over)} are above"
    return decide(n_above == 0, shown, otherwise=PARTLY)


@states("uncomp", "tables 1, 2, 6, 7", table="1", text="Groups of 512 and 256 tokens have one set of scores")
def _judge_two_sets_of_scores(cells: pd.DataFrame) -> Outcome:
    datasets = []
    for finding in find_repeats(Book(tuple(cells["cell"]))):
        # identity.UNCOMP_MAIN gives the main configuration this name
        is_main = finding.row.startswith("llama-2-7b-chat") and "kv_size=384" in finding.row
        if finding.paper == "uncomp" and is_main:
            datasets.append(finding.cell)
    return decide(not datasets, f"they differ on {len(datasets)} datasets: {', '.join(datasets)}")


@states("uncomp", "table 10", table="10", text="Time per token falls and memory rises with the batch")
def _judge_times_by_batch(cells: pd.DataFrame) -> Outcome:
    # lines run along the last field, the batch
    fields = ["method", "prompt", "batch"]
    times = series(cells, fields, table=10, metric="tpot", method="uncomp-*")
    memory = series(cells, fields, table=10, metric="peak_memory", method="uncomp-*")
    exceptions = describe_falls("{method} prompt={prompt} tpot {a:g} to {b:g} at batch {then}", times, rising=False)
    exceptions += describe_falls("{method} prompt={prompt} peak_memory {a:g} to {b:g} at batch {then}", memory)
    shown = "; ".join(sorted(exceptions)) or "time falls and memory rises with the batch"
    return decide(not exceptions, shown, otherwise=NOTE)


@states("uncomp", "appendix E", table="10", text="What 2.96 times the throughput compares")
def _judge_batches_of_speedup(cells: pd.DataFrame) -> Outcome:
    full = series(cells, "batch", table=10, metric="tpot", method="full", prompt=3712)
    stage = series(cells, "batch", table=10, metric="tpot", method="uncomp-stage", prompt=3712)
    as_compared, at_equal_batches = full["8"] / stage["12"], full["8"] / stage["8"]
    return NOTE, f"{as_compared:.2f} is batch 12 over batch 8; at batch 8 for both it is {at_equal_batches:.2f}"


@states("uncomp", "tables 8 and 9", table="8", text="The random partition's row and column titles")
def _judge_random_partition(cells: pd.DataFrame) -> Outcome:
    scores = series(cells, "dataset", table=8, score=True, partition="random")
    stated = number(cells, table=8, dataset="avg", partition="random")
    corrected = (scores.sum() + 0.5) / len(scores)
    titles = labels(cells[cells["partition"] != "effective_rank"], "partition", table=[8, 9])
    return NOTE, (
        f"TREC {scores['trec']:.2f}, LCC {scores['lcc']:.2f}, average {stated:.2f}; 0.50 more in one cell gives "
        f"{corrected:.2f}. Tables 8 and 9 head {' and '.join(titles)} alike"
    )


@states("uncomp", "sections 4.1 and A.2", table="1", text="Which Mistral it is")
def _judge_version_of_mistral(cells: pd.DataFrame) -> Outcome:
    models = labels(cells, "model", table=1, model="mistral*")
    return NOTE, f"v0.1 in section 4.1, v0.2 in appendix A.2; stored without version: {', '.join(models)}"


@states("uncomp", "table 3", table="3", text="What the attention time is")
def _judge_meaning_of_attention_time(cells: pd.DataFrame) -> Outcome:
    attention = series(cells, "row", table=3, metric="attention_time")
    gaps = subtract(_recompute_attention_time(cells), attention).abs()
    # three rounded times can disagree by 0.015 s
    n_equal = sum(gaps < 0.015)
    return NOTE, (
        f"prefill + decoding in {n_equal} of {len(gaps)} rows (largest gap {gaps.max():.2f} s): the total, not a part"
    )


@recomputes("uncomp", "prefill + decoding", table=3, metric="attention_time")
def _recompute_attention_time(cells: pd.DataFrame) -> Any:
    return series(cells, "row", table=3, metric="prefill_time") + series(cells, "row", table=3, metric="decode_time")


@recomputes(
    "uncomp",
    "time per token, full / stage, 2048+8096",
    table="text",
    metric="speedup_vs_full",
    dataset="throughput",
    where="abstract",
)
def _recompute_speedup_of_abstract(cells: pd.DataFrame) -> Any:
    # the full cache in batches of 6, the stage in batches of 32
    full = number(cells, table="text", dataset="wikitext2", method="full")
    return full / number(cells, table="text", dataset="wikitext2", method="uncomp-stage")


@recomputes(
    "uncomp",
    "table 10, full at batch 8 / stage at 12, 3712+384",
    table="text",
    metric="speedup_vs_full",
    dataset="throughput",
    where="appendix E",
)
def _recompute_speedup_of_appendix(cells: pd.DataFrame) -> Any:
    # the best batch of the stage over the largest batch that the full cache can run
    full = number(cells, table=10, metric="tpot", method="full", batch=8, prompt=3712)
    return full / number(cells, table=10, metric="tpot", method="uncomp-stage", batch=12, prompt=3712)


@recomputes("uncomp", "table 3, full / stage, A100", table="text", metric="speedup_vs_full", dataset="prefill_time")
def _recompute_speedup_of_prefill(cells: pd.DataFrame) -> Any:
    full = number(cells, table=3, metric="prefill_time", method="full", gpu="a100-80g")
    return full / number(cells, table=3, metric="prefill_time", method="uncomp-stage", gpu="a100-80g")


@recomputes(
    "uncomp", "table 3, attention time, group / stage, A100", table="text", metric="speedup", dataset="overall_time"
)
def _recompute_speedup_of_stage(cells: pd.DataFrame) -> Any:
    group = number(cells, table=3, metric="attention_time", method="uncomp-group", gpu="a100-80g")
    return group / number(cells, table=3, metric="attention_time", method="uncomp-stage", gpu="a100-80g")


@recomputes("uncomp", "table 1, group − stage, LLaMA-2-7B", table="text", metric="drop")
def _recompute_drop_of_stage(cells: pd.DataFrame) -> Any:
    return drop(cells, "uncomp-stage", below="uncomp-group", table=1, dataset="avg", model="llama-2-7b*")


@recomputes("uncomp", "table 1, full − group, LLaMA-2-7B", table="text", metric="drop_vs_full", where="section 4.2")
def _recompute_drop_on_llama2(cells: pd.DataFrame) -> Any:
    return drop(cells, "uncomp-group", table=1, dataset="avg", model="llama-2-7b*")


@recomputes("uncomp", "table 1, full − group, LLaMA-3-8B", table="text", metric="drop_vs_full", where="abstract")
def _recompute_drop_on_llama3(cells: pd.DataFrame) -> Any:
    return drop(cells, "uncomp-group", table=1, dataset="avg", model="llama-3-8b*")

"""ReFreeKV against its own tables (arXiv 2502.16886).

Each function judges the statement, or recomputes the printed cells, that its decorator names.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvbench.papers.forensics.granularity import fit_grids
from kvbench.papers.forensics.paper_audit import FAILS, NOTE, PARTLY, Outcome, PaperAudit, decide
from kvbench.papers.forensics.queries import (
    PaperCells,
    describe_falls,
    describe_values,
    divide_cells,
    group_by_field,
    group_lines,
    list_labels,
    subtract_cells,
)
from kvbench.papers.spec.numbers import exact_number

REFREEKV = PaperAudit("refreekv")
ODD = ("pyramidkv", "cake")
"""The methods with many scores that no whole number of right answers gives."""


@REFREEKV.states("section 3.3", table="10", text="Throughput rises by 10 to 20 %")
def judge_rises_of_throughput(paper: PaperCells) -> Outcome:
    """Compute the rises of throughput over Accelerate in per cent, and count those in the stated range."""
    query = {"table": 10, "of": "narrativeqa", "metric": "throughput"}
    refreekv = paper.series(["batch", "input", "output"], method="refreekv", **query)
    accelerate = paper.series(["batch", "input", "output"], method="accelerate", **query)
    rises = 100 * (divide_cells(refreekv, accelerate) - 1)
    # a rise from 9.5 to 20.5 % rounds to 10 to 20 %
    n_inside = sum(rises.between(9.5, 20.5))
    shown = f"{rises.min():.0f} to {rises.max():.0f} %, {n_inside} of {len(rises)} inside 10 to 20"
    return decide(n_inside == len(rises), shown)


@REFREEKV.states("section 3.3", table="3", text="Fastest in 8 of 12 comparisons of overall time")
def judge_fastest_method(paper: PaperCells) -> Outcome:
    """Count on how many pairs of a model and a dataset ReFreeKV has the lowest overall time."""
    fields = ["model", "dataset", "method"]
    times = paper.series(fields, table=3, metric="overall_time", without={"dataset": "avg"})
    # a line of times, one for each method, for each pair of a model and a dataset
    lines = group_lines(times)
    won = 0
    for _, cells in lines:
        time_by_method = dict(cells)
        fastest_method = min(time_by_method, key=lambda method: time_by_method[method])
        if fastest_method == "refreekv":
            won += 1
    return decide(won == 8, f"{won} of {len(lines)}")


@REFREEKV.states("section 3.4", table="5", text="One row of attention needs a much smaller budget than 5 % of the rows")
def judge_budget_of_one_row(paper: PaperCells) -> Outcome:
    """Compare the budgets by one row of attention with those by 5 % of the rows.

    HOLDS if the first are larger on no dataset, and smaller on average; else PARTLY.
    """
    query = {"table": 5, "metric": "budget", "method": "refreekv", "t": 0.01, "ranking": ""}
    one_row = paper.series("dataset", k=1, **query)
    five_percent = paper.series("dataset", k="5%n", **query)
    larger = one_row[subtract_cells(one_row, five_percent) > 0]
    pattern = "; larger on {dataset} ({value:.1f} against {other:.1f})"
    exceptions = describe_values(pattern, larger, sep="", other=five_percent)
    is_smaller_on_average = one_row.mean() < five_percent.mean()
    shown = f"mean {one_row.mean():.1f} against {five_percent.mean():.1f} %{exceptions}"
    return decide(len(larger) == 0 and is_smaller_on_average, shown, otherwise=PARTLY)


@REFREEKV.states("section 3.4", table="9", text="Summing 10 % of the rows fails on NarrativeQA")
def judge_tenth_of_rows(paper: PaperCells) -> Outcome:
    """Compare the score at 10 % of the rows with that at 9 %: PARTLY for a fall of a fifth or more, else FAILS."""
    scores = paper.series("k", table=9, of="narrativeqa", metric="f1", k=["7%n", "8%n", "9%n", "10%n"])
    shown = f"k = {describe_values('{k} {value:.2f}', scores)}; the last, on which this rests, looks like 19.74"
    if scores["10%n"] > 0.8 * scores["9%n"]:
        return FAILS, shown
    # the statement rests on this one fall, and a lost digit of the score at 10 % would explain it
    return PARTLY, shown


@REFREEKV.states("section 3.2", table="2", text="Budgets on mathematics and science are over 90 %")
def judge_budgets_on_mathematics(paper: PaperCells) -> Outcome:
    """Count the budgets above 90 % on the three datasets."""
    datasets = ["gsm8k", "gpqa", "theoremqa"]
    budgets = paper.series(["model", "dataset"], table=2, of=datasets, metric="budget")
    shown = f"{sum(budgets > 90)} of {len(budgets)}, from {budgets.min():.1f} to {budgets.max():.1f} %"
    return decide(budgets.min() > 90, shown, otherwise=PARTLY)


@REFREEKV.states("section 3.2", table="2", text="With Qwen2.5-7B it beats the full cache by 2.63 %")
def judge_gain_on_qwen(paper: PaperCells) -> Outcome:
    """Compute the mean gain over the full cache with and without the dataset LCC, from which most of the gain comes."""
    refreekv = paper.series("dataset", table=2, of="scores", model="qwen2.5-7b*", method="refreekv")
    full = paper.series("dataset", table=2, of="scores", model="qwen2.5-7b*", method="full")
    gains = 100 * (divide_cells(refreekv, full) - 1)
    # the part of the mean gain that comes from LCC
    lcc_part = gains["lcc"] / len(gains)
    without_lcc = gains.drop("lcc").mean()
    gain_of_sums = 100 * (refreekv.sum() / full.sum() - 1)
    shown = (
        f"LCC goes from {full['lcc']:.2f} to {refreekv['lcc']:.2f} and adds {lcc_part:+.2f} of "
        f"{gains.mean():+.2f}; without it {without_lcc:+.2f} %, "
        f"summed scores {gain_of_sums:+.2f} %"
    )
    return decide(without_lcc > 0, shown, otherwise=PARTLY)


@REFREEKV.states("section 3.2", table="2", text="It beats the three baselines at a budget of 90 %")
def judge_baselines_at_90(paper: PaperCells) -> Outcome:
    """Compare the mean ratios to the full cache, model by model: ReFreeKV's with those of the baselines.

    HOLDS if ReFreeKV is better than three baselines on every model, PARTLY if table 2 has another number of them.
    """
    refreekv = paper.series(["model", "dataset"], table=2, of="scores", method="refreekv")
    full = paper.series(["model", "dataset"], table=2, of="scores", method="full")
    baselines = paper.series(["model", "method", "dataset"], table=2, of="scores", budget=0.9)
    ratios = group_by_field(divide_cells(baselines, full), "model", "method").mean()
    refreekv_ratios = group_by_field(divide_cells(refreekv, full), "model").mean()
    count = len(list_labels(ratios, "method"))
    # the baselines that are as good as ReFreeKV, or better
    unbeaten = ratios[subtract_cells(ratios, refreekv_ratios) >= 0]
    if len(unbeaten):
        return decide(False, f"not better than {describe_values('{model} {method}', unbeaten)}")
    return decide(count == 3, f"better than all {count} of table 2", otherwise=PARTLY)


@REFREEKV.states("limitations", table="8", text="QMSum with Mistral needs only half of the cache")
def judge_half_on_qmsum(paper: PaperCells) -> Outcome:
    """Compare the best method at a budget of 50 % with the full cache."""
    full = paper.number(table=8, of="qmsum", model="mistral*", method="full")
    half = paper.series("method", table=8, of="qmsum", model="mistral*", budget=0.5)
    refreekv = paper.number(table=8, of="qmsum", metric="budget", model="mistral*", method="refreekv")
    shown = f"{half.idxmax()} at 50 % has {half.max():.2f}, full {full:.2f}; ReFreeKV takes {refreekv} %"
    return decide(half.max() >= full, shown)


@REFREEKV.states("section 3.4", table="12", text="Larger models stay near the full cache on five datasets")
def judge_larger_models(paper: PaperCells) -> Outcome:
    """Compare the scores with the full cache's. No score may lose 5 % or more."""
    refreekv = paper.series(["model", "dataset"], table=12, of="scores", method="refreekv")
    full = paper.series(["model", "dataset"], table=12, of="scores", method="full")
    gaps = 100 * (divide_cells(refreekv, full) - 1)
    means = describe_values("{model} {value:+.2f} %", group_by_field(gaps, "model").mean())
    shown = f"mean ratio {means}; worst {' '.join(gaps.idxmin())} {gaps.min():+.1f} %"
    return decide(gaps.min() > -5, shown, otherwise=PARTLY)


@REFREEKV.states("section 3.4", table="12", text="Longer contexts reach nearly 50 % compression on larger models")
def judge_budgets_of_larger_models(paper: PaperCells) -> Outcome:
    """Compute the mean budgets on the datasets with long contexts. A budget below 52 % is nearly 50 % compression."""
    datasets = ["narrativeqa", "musique", "qmsum"]
    budgets = paper.series(["model", "dataset"], table=12, of=datasets, metric="budget")
    means = group_by_field(budgets, "model").mean()
    shown = f"mean budget on narrativeqa, musique, qmsum: {describe_values('{model} {value:.1f}', means)} %"
    return decide(means.min() < 52, shown, otherwise=PARTLY)


@REFREEKV.states("table 7", table="7", text="Keeping one more layer whole cannot lower the mean budget")
def judge_budgets_by_frozen_layers(paper: PaperCells) -> Outcome:
    """List the falls of the budget from one number of whole (frozen) layers to the next."""
    frozen = ["none", "0", "0+1", "0+1+2", "0+1+2+3"]
    budgets = paper.series(["dataset", "frozen"], table=7, of=["gsm8k", "coqa"], metric="budget", frozen=frozen)
    falls = describe_falls("{dataset} falls from {a} ({first}) to {b} ({then})", budgets)
    return decide(not falls, "; ".join(falls) or "budgets rise", otherwise=NOTE)


@REFREEKV.states("caption of table 8", table="8", text="Five pruning methods are compared at 50 %")
def judge_methods_of_table8(paper: PaperCells) -> Outcome:
    """Count the methods of table 8 except the full cache and ReFreeKV."""
    methods = paper.labels("method", table=8, without={"method": ["full", "refreekv"]})
    return decide(len(methods) == 5, f"{len(methods)} are there: {', '.join(methods)}")


@REFREEKV.states("caption of table 12", table="12", text="One of the models has 34B parameters")
def judge_models_of_table12(paper: PaperCells) -> Outcome:
    """List the models of table 12, and ask whether one of their names has 34b."""
    models = ", ".join(paper.labels("model", table=12))
    return decide("34b" in models, f"the blocks are {models}")


@REFREEKV.states("table 10", table="10", text="Whose times table 10 has")
def judge_model_of_table10(paper: PaperCells) -> Outcome:
    """Ask which model table 10 names, and whether its longest sequence would fit LLaMA-3-8B."""
    models = paper.labels("model", table=10)
    tokens = paper.settings("input", "row", table=10) + paper.settings("output", "row", table=10)
    return NOTE, (f"no model is named ({', '.join(models)}); {tokens.max():.0f} tokens would not fit LLaMA-3-8B's 8192")


@REFREEKV.states("tables 2 and 8", table="2", text="Scores that no whole number of right answers gives, by method")
def judge_off_grid_by_method(paper: PaperCells) -> Outcome:
    """Count the scores that no whole number of right answers gives, for the methods ODD and for all others."""
    # how many scores each method has, and how many of them are off the grid
    scores: Counter[str] = Counter()
    off: Counter[str] = Counter()
    for fit in fit_grids(paper.book):
        if fit.grid.paper == "refreekv" and fit.grid.holds:
            scores.update(row.method for row, _ in fit.cells)
            off.update(row.method for row, _ in fit.off)
    odd_scores = sum(scores[method] for method in ODD)
    odd_off = sum(off[method] for method in ODD)
    other_scores, other_off = scores.total() - odd_scores, off.total() - odd_off
    return NOTE, (
        f"PyramidKV and CAKE {odd_off} of {odd_scores}, all others {other_off} of {other_scores}: with the "
        "copied scores and Qwen's NarrativeQA, other scoring for these two would explain it; the paper says nothing"
    )


@REFREEKV.recomputes("100 x batch / latency", table=10, metric="throughput")
def recompute_throughput(paper: PaperCells) -> Any:
    """Return the tokens per second of each row of table 10, from its batch size and latency."""
    # the latency is printed in seconds for 100 tokens of each sequence
    latency = paper.series("row", table=10, metric="latency")
    batch = paper.settings("batch", "row", table=10, metric="latency")
    # an int cannot be divided by a number with an interval, so 1 becomes such a number first
    return latency.map(lambda seconds: exact_number(1) / seconds) * (100 * batch)

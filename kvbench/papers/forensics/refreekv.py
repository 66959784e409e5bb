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
    by_field,
    describe_falls,
    describe_values,
    difference,
    group_lines,
    labels_of,
    ratio,
)
from kvbench.papers.spec.numbers import exact_number

REFREEKV = PaperAudit("refreekv")
ODD = ("pyramidkv", "cake")
"""The methods with many scores that no whole number of right answers gives."""


@REFREEKV.states("section 3.3", table="10", text="Throughput rises by 10 to 20 %")
def rises_of_throughput(paper: PaperCells) -> Outcome:
    """Compute the rises of throughput over Accelerate in per cent, and count those in the stated range."""
    query = {"table": 10, "of": "narrativeqa", "metric": "throughput"}
    refreekv = paper.series(["batch", "input", "output"], method="refreekv", **query)
    accelerate = paper.series(["batch", "input", "output"], method="accelerate", **query)
    rises = 100 * (ratio(refreekv, accelerate) - 1)
    # a rise from 9.5 to 20.5 % rounds to 10 to 20 %
    inside = sum(rises.between(9.5, 20.5))
    shown = f"{rises.min():.0f} to {rises.max():.0f} %, {inside} of {len(rises)} inside 10 to 20"
    return decide(inside == len(rises), shown)


@REFREEKV.states("section 3.3", table="3", text="Fastest in 8 of 12 comparisons of overall time")
def fastest(paper: PaperCells) -> Outcome:
    """Count on how many pairs of a model and a dataset ReFreeKV has the lowest overall time."""
    fields = ["model", "dataset", "method"]
    times = paper.series(fields, table=3, metric="overall_time", without={"dataset": "avg"})
    winners = []
    for _, time_by_method in group_lines(times):
        winner, _ = min(time_by_method, key=lambda cell: cell[1])
        winners.append(winner)
    won = winners.count("refreekv")
    return decide(won == 8, f"{won} of {len(winners)}")


@REFREEKV.states("section 3.4", table="5", text="One row of attention needs a much smaller budget than 5 % of the rows")
def budget_of_one_row(paper: PaperCells) -> Outcome:
    """Compare the budgets by one row of attention with those by 5 % of the rows.

    HOLDS if the first are larger on no dataset, and smaller on average; else PARTLY.
    """
    query = {"table": 5, "metric": "budget", "method": "refreekv", "t": 0.01, "ranking": ""}
    one = paper.series("dataset", k=1, **query)
    five = paper.series("dataset", k="5%n", **query)
    larger = one[difference(one, five) > 0]
    exceptions = describe_values("; larger on {dataset} ({value:.1f} against {five:.1f})", larger, sep="", five=five)
    holds = len(larger) == 0 and one.mean() < five.mean()
    return decide(holds, f"mean {one.mean():.1f} against {five.mean():.1f} %{exceptions}", otherwise=PARTLY)


@REFREEKV.states("section 3.4", table="9", text="Summing 10 % of the rows fails on NarrativeQA")
def tenth_of_rows(paper: PaperCells) -> Outcome:
    """Compare the score at 10 % of the rows with that at 9 %: PARTLY for a fall of a fifth or more, else FAILS."""
    scores = paper.series("k", table=9, of="narrativeqa", metric="f1", k=["7%n", "8%n", "9%n", "10%n"])
    shown = f"k = {describe_values('{k} {value:.2f}', scores)}; the last, on which this rests, looks like 19.74"
    if scores["10%n"] > 0.8 * scores["9%n"]:
        return FAILS, shown
    # the statement rests on this one fall, and a lost digit of the score at 10 % would explain it
    return PARTLY, shown


@REFREEKV.states("section 3.2", table="2", text="Budgets on mathematics and science are over 90 %")
def budgets_on_mathematics(paper: PaperCells) -> Outcome:
    """Count the budgets above 90 % on the three datasets."""
    datasets = ["gsm8k", "gpqa", "theoremqa"]
    budgets = paper.series(["model", "dataset"], table=2, of=datasets, metric="budget")
    shown = f"{sum(budgets > 90)} of {len(budgets)}, from {budgets.min():.1f} to {budgets.max():.1f} %"
    return decide(budgets.min() > 90, shown, otherwise=PARTLY)


@REFREEKV.states("section 3.2", table="2", text="With Qwen2.5-7B it beats the full cache by 2.63 %")
def gain_on_qwen(paper: PaperCells) -> Outcome:
    """Compute the mean gain over the full cache with and without the dataset LCC, from which most of the gain comes."""
    refreekv = paper.series("dataset", table=2, of="scores", model="qwen2.5-7b*", method="refreekv")
    full = paper.series("dataset", table=2, of="scores", model="qwen2.5-7b*", method="full")
    gains = 100 * (ratio(refreekv, full) - 1)
    without_lcc = gains.drop("lcc").mean()
    shown = (
        f"LCC goes from {full['lcc']:.2f} to {refreekv['lcc']:.2f} and adds {gains['lcc'] / len(gains):+.2f} of "
        f"{gains.mean():+.2f}; without it {without_lcc:+.2f} %, "
        f"summed scores {100 * (refreekv.sum() / full.sum() - 1):+.2f} %"
    )
    return decide(without_lcc > 0, shown, otherwise=PARTLY)


@REFREEKV.states("section 3.2", table="2", text="It beats the three baselines at a budget of 90 %")
def baselines_at_90(paper: PaperCells) -> Outcome:
    """Compare the mean ratios to the full cache, model by model: ReFreeKV's with those of the baselines."""
    refreekv = paper.series(["model", "dataset"], table=2, of="scores", method="refreekv")
    full = paper.series(["model", "dataset"], table=2, of="scores", method="full")
    baselines = paper.series(["model", "method", "dataset"], table=2, of="scores", budget=0.9)
    ratios = by_field(ratio(baselines, full), "model", "method").mean()
    refreekv_ratios = by_field(ratio(refreekv, full), "model").mean()
    # the baselines that are as good as ReFreeKV, or better
    unbeaten = ratios[difference(ratios, refreekv_ratios) >= 0]
    count = len(labels_of(ratios, "method"))
    if len(unbeaten):
        return decide(False, f"not better than {describe_values('{model} {method}', unbeaten)}")
    return decide(count == 3, f"better than all {count} of table 2", otherwise=PARTLY)


@REFREEKV.states("limitations", table="8", text="QMSum with Mistral needs only half of the cache")
def half_on_qmsum(paper: PaperCells) -> Outcome:
    """Compare the best method at a budget of 50 % with the full cache."""
    full = paper.number(table=8, of="qmsum", model="mistral*", method="full")
    half = paper.series("method", table=8, of="qmsum", model="mistral*", budget=0.5)
    refreekv = paper.number(table=8, of="qmsum", metric="budget", model="mistral*", method="refreekv")
    shown = f"{half.idxmax()} at 50 % has {half.max():.2f}, full {full:.2f}; ReFreeKV takes {refreekv} %"
    return decide(half.max() >= full, shown)


@REFREEKV.states("section 3.4", table="12", text="Larger models stay near the full cache on five datasets")
def larger_models(paper: PaperCells) -> Outcome:
    """Compare the scores with the full cache's. No score may lose 5 % or more."""
    refreekv = paper.series(["model", "dataset"], table=12, of="scores", method="refreekv")
    full = paper.series(["model", "dataset"], table=12, of="scores", method="full")
    gaps = 100 * (ratio(refreekv, full) - 1)
    means = describe_values("{model} {value:+.2f} %", by_field(gaps, "model").mean())
    shown = f"mean ratio {means}; worst {' '.join(gaps.idxmin())} {gaps.min():+.1f} %"
    return decide(gaps.min() > -5, shown, otherwise=PARTLY)


@REFREEKV.states("section 3.4", table="12", text="Longer contexts reach nearly 50 % compression on larger models")
def budgets_of_larger_models(paper: PaperCells) -> Outcome:
    """Compute the mean budgets on the datasets with long contexts. A budget below 52 % is nearly 50 % compression."""
    datasets = ["narrativeqa", "musique", "qmsum"]
    budgets = paper.series(["model", "dataset"], table=12, of=datasets, metric="budget")
    means = by_field(budgets, "model").mean()
    shown = f"mean budget on narrativeqa, musique, qmsum: {describe_values('{model} {value:.1f}', means)} %"
    return decide(means.min() < 52, shown, otherwise=PARTLY)


@REFREEKV.states("table 7", table="7", text="Keeping one more layer whole cannot lower the mean budget")
def budgets_by_frozen_layers(paper: PaperCells) -> Outcome:
    """List the falls of the budget from one number of whole (frozen) layers to the next."""
    frozen = ["none", "0", "0+1", "0+1+2", "0+1+2+3"]
    budgets = paper.series(["dataset", "frozen"], table=7, of=["gsm8k", "coqa"], metric="budget", frozen=frozen)
    found = describe_falls("{dataset} falls from {a} ({first}) to {b} ({then})", budgets)
    return decide(not found, "; ".join(found) or "budgets rise", otherwise=NOTE)


@REFREEKV.states("caption of table 8", table="8", text="Five pruning methods are compared at 50 %")
def methods_of_table8(paper: PaperCells) -> Outcome:
    """Count the methods of table 8 except the full cache and ReFreeKV."""
    methods = paper.labels("method", table=8, without={"method": ["full", "refreekv"]})
    return decide(len(methods) == 5, f"{len(methods)} are there: {', '.join(methods)}")


@REFREEKV.states("caption of table 12", table="12", text="One of the models has 34B parameters")
def models_of_table12(paper: PaperCells) -> Outcome:
    """List the models of table 12, and ask whether one of their names has 34b."""
    models = ", ".join(paper.labels("model", table=12))
    return decide("34b" in models, f"the blocks are {models}")


@REFREEKV.states("table 10", table="10", text="Whose times table 10 has")
def model_of_table10(paper: PaperCells) -> Outcome:
    """Ask which model table 10 names, and whether its longest sequence would fit LLaMA-3-8B."""
    models = paper.labels("model", table=10)
    tokens = paper.settings("input", "row", table=10) + paper.settings("output", "row", table=10)
    return NOTE, (f"no model is named ({', '.join(models)}); {tokens.max():.0f} tokens would not fit LLaMA-3-8B's 8192")


@REFREEKV.states("tables 2 and 8", table="2", text="Scores that no whole number of right answers gives, by method")
def off_grid_by_method(paper: PaperCells) -> Outcome:
    """Count the scores that no whole number of right answers gives, for the methods ODD and for all others."""
    # numbers of scores, and of those off the grid, by whether their method is one of ODD
    scores: Counter[bool] = Counter()
    off: Counter[bool] = Counter()
    for fit in fit_grids(paper.book):
        if fit.grid.paper == "refreekv" and fit.grid.holds:
            scores.update(row.method in ODD for row, _ in fit.cells)
            off.update(row.method in ODD for row, _ in fit.off)
    return NOTE, (
        f"PyramidKV and CAKE {off[True]} of {scores[True]}, all others {off[False]} of {scores[False]}: with the "
        "copied scores and Qwen's NarrativeQA, other scoring for these two would explain it; the paper says nothing"
    )


@REFREEKV.recomputes("100 x batch / latency", table=10, metric="throughput")
def throughput(paper: PaperCells) -> Any:
    # the latency is printed in seconds for 100 tokens of each sequence
    latency = paper.series("row", table=10, metric="latency")
    batch = paper.settings("batch", "row", table=10, metric="latency")
    # an int cannot be divided by a number with an interval, so 1 becomes such a number first
    return latency.map(lambda seconds: exact_number(1) / seconds) * (100 * batch)

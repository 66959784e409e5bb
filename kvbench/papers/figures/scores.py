"""Prepare measured scores for figures, and state their findings: scores by task, their means, and needle maps."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NotRequired, TypedDict

import pandas as pd

from kvbench.base.formatting import format_number, with_interval
from kvbench.papers.figures.figure import Code, Fact
from kvbench.papers.figures.sweep import FULL, MEAN, ROW
from kvbench.report import heatmap
from kvbench.tasks.metrics import metric
from kvbench.tasks.needle import EMPTY_SCORES

if TYPE_CHECKING:
    from kvbench.papers.figures.measured import MeasuredFigure

CLOSE = 2.0  # so many points below the full cache's mean score are next to no loss
LOST = 50  # needles with a lower mean score are lost
FRONT = "Pareto front"
"""The name of the series that ``add_front`` adds."""


class FactTable(TypedDict):
    """An entry of ``says`` in a figure's YAML: the arguments of ``build_table_fact``, which explains them."""

    label: str
    y: NotRequired[str]
    tasks: NotRequired[str]
    x: NotRequired[float]
    at: NotRequired[str]
    form: NotRequired[str]


def list_series(data: pd.DataFrame) -> list[str]:
    """Return the names of the series in the order of the data, without the full cache."""
    return [series for series in dict.fromkeys(data["series"]) if series != FULL]


def list_tasks(data: pd.DataFrame) -> list[str]:
    """Return the names of the tasks in the order of the data, without the mean over tasks."""
    return [task for task in dict.fromkeys(data["task"]) if task != MEAN]


def describe_samples(data: pd.DataFrame) -> str:
    """Return the number of examples behind each point in words, such as ``n = 4 to 8 a task``."""
    counts = data.loc[data["task"] != MEAN, "n"].astype(int)
    text = f"n = {_format_range(counts)}"
    if len(list_tasks(data)) > 1:
        text += " a task"
    return text


def _format_range(counts: pd.Series[int]) -> str:
    lowest, highest = int(counts.min()), int(counts.max())
    if lowest == highest:
        return str(lowest)
    return f"{lowest} to {highest}"


def choose_rows(data: pd.DataFrame, tasks: str) -> pd.DataFrame:
    """Return the rows that a figure shows, with columns for its titles.

    samples: the number of examples in words.
    over: ``mean over tasks``, or the name of the only task.
    share: the mean per cent of tokens that compressed methods keep on the row's task.

    data: measured scores (``measured.COLUMNS``).
    tasks: ``mean`` for the rows of the mean over tasks, ``each`` for those of each task, ``all`` for both. If there is
    only one task, its rows are returned in any case.
    """
    names = list_tasks(data)
    has_several_tasks = len(names) > 1
    if has_several_tasks:
        mean_task, over = MEAN, "mean over tasks"
    else:
        # a single task has no rows of a mean, so its own rows take their place
        mean_task, over = names[0], names[0]
    # the full cache keeps all tokens and would raise the mean share
    share_by_task = data[data["series"] != FULL].groupby("task")["kept"].mean()
    shown = data.assign(samples=describe_samples(data), over=over)
    shown["share"] = data["task"].map(share_by_task).round()
    mean_rows = shown[shown["task"] == mean_task]
    if tasks == "mean":
        return mean_rows
    task_rows = shown[shown["task"] != MEAN]
    if tasks == "each" or not has_several_tasks:
        return task_rows
    return pd.concat([mean_rows, task_rows])


def find_pareto_front(data: pd.DataFrame) -> pd.DataFrame:
    """Return the points whose score no point with fewer or as many bytes reaches, fewest bytes first.

    data: rows of measured scores (``measured.COLUMNS``).
    """
    # the best of several points with equal bytes comes first, so the others cannot be on the front
    rows = data.dropna(subset=["score"]).sort_values(["bytes", "score"], ascending=[True, False], kind="stable")
    # the best score of the points before this one; the first point has none before it
    best_before = rows["score"].cummax().shift(fill_value=float("-inf"))
    return rows[rows["score"] > best_before]


def find_separate_front(data: pd.DataFrame) -> pd.DataFrame:
    """Return those points of the Pareto front whose scores can be told apart, fewest bytes first.

    The interval of each returned point lies wholly above that of the point before it. If no two points can be told
    apart, none is returned.

    data: rows of measured scores (``measured.COLUMNS``).
    """
    separate: list[pd.Series] = []
    if "low" in data:
        for _, point in find_pareto_front(data).dropna(subset=["low", "high"]).iterrows():
            if not separate or point["low"] > separate[-1]["high"]:
                separate.append(point)
    if len(separate) < 2:
        return data.iloc[:0]
    return pd.DataFrame(separate)


def add_front(data: pd.DataFrame) -> pd.DataFrame:
    """Return the data with the points of ``find_separate_front`` as one more series, named FRONT.

    The front ends at 100 % of the bytes with its last score. The column ``alike`` is True for points that cannot be
    told from the full cache.

    data: rows of measured scores (``measured.COLUMNS``).
    """
    marked = data.assign(alike=_mark_like_full(data))
    # NaN keeps the front from showing the intervals of its points a second time
    front = find_separate_front(data).assign(series=FRONT, low=float("nan"), alike=False)
    end = front.iloc[-1:].assign(bytes=100.0)
    return pd.concat([marked, front, end])


def _mark_like_full(data: pd.DataFrame) -> pd.Series[bool]:
    if "relative_low" not in data:
        return pd.Series(False, index=data.index)
    includes_full = (data["relative_low"] <= 100) & (data["relative_high"] >= 100)
    return includes_full & (data["series"] != FULL)


def count_bytes_per_copy(data: pd.DataFrame, _facts: Mapping[str, str]) -> pd.DataFrame:
    """Return the data with the methods' bytes for one copy of keys and values, and the number of ``copies`` they store.

    ``Code.complete`` passes the CSV's facts as well, which are not needed.

    With per=query_head methods repeat keys and values for the query heads of a group. The full cache beside them does
    so as well, but the CSV counts bytes in per cent of a full cache with one copy.
    """
    # one copy of k % of the tokens holds k % of the bytes and some overhead, and c copies hold c times as much
    methods = data[data["series"] != FULL]
    # a method that stores a part of each token holds less, so the method with most bytes per token decides
    bytes_per_token = (methods["bytes"] / methods["kept"]).max()
    # the overhead is less than another copy, so the ratio is rounded down
    copies = max(1, math.floor(bytes_per_token))
    bytes_held = data["bytes"].where(data["series"] == FULL, data["bytes"] / copies)
    return data.assign(bytes=bytes_held, copies=copies)


def build_table_fact(
    data: pd.DataFrame,
    label: str,
    y: str = "score",
    tasks: str = "mean",
    x: float | None = None,
    at: str = "{:g}",
    form: str = "{:.1f}",
) -> Fact:
    """Build a fact with the values of the column ``y`` by name and x. A name is the task and the series.

    A task or series that is the only one is left out of the names.

    data: measured scores (``measured.COLUMNS``).
    label: the words before the values.
    y: the column of the values.
    tasks: the rows to show, ``mean``, ``each`` or ``all``, as in ``choose_rows``.
    x: the only x to show. Names are then tasks alone. None shows every x.
    at: the format of an x.
    form: the format of a value.
    """
    rows = choose_rows(data[data["series"] != FULL], tasks).sort_values("x", kind="stable")
    if x is not None:
        return Fact(label, rows[rows["x"] == x].set_index("task")[y], form)
    name_columns = []
    if rows["task"].nunique() > 1:
        name_columns.append("task")
    if len(list_series(data)) > 1:
        name_columns.append("series")
    # numbers without a name are named by their x, as in "4 bits: 31.2"
    if not name_columns:
        at = f"{at}:"
    return Fact(label, rows.set_index(name_columns + ["x"])[y], form, at)


def state_facts(
    data: pd.DataFrame, fact_tables: Sequence[FactTable], state_more: Callable[[pd.DataFrame], Iterable[Fact]]
) -> Iterator[Fact]:
    """Yield the facts below a figure of measured scores.

    They are the full cache's scores, one fact for each of ``fact_tables``, the figure's own facts, and n.

    state_more: returns the figure's own facts from the data.
    """
    full_rows = data[data["series"] == FULL]
    if len(full_rows):
        yield Fact("Full cache", full_rows.set_index("task")["score"])
    for fact_table in fact_tables:
        yield build_table_fact(data, **fact_table)
    yield from state_more(data)
    yield Fact("Examples", describe_samples(data))


def state_front(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield the points on the front, the points like the full cache, and the fewest bytes at next to no loss.

    Data without intervals have no points like the full cache. The full cache must be among the data.

    data: measured scores (``measured.COLUMNS``).
    """
    rows = choose_rows(data, "mean")
    points = []
    for point in find_separate_front(rows).itertuples():
        points.append(f"{point.series} {format_number(point.bytes)} % with {format_number(point.score)}")
    yield Fact("Bytes and score on the front", ", ".join(points) or "none, as the intervals overlap")
    if "relative_low" in rows:
        alike = _mark_like_full(rows)
        n_methods = int((rows["series"] != FULL).sum())
        yield Fact("Points that cannot be told from the full cache", f"{int(alike.sum())} of {n_methods}")
        # head: without such points there is no row, and the fact is left out
        smallest_alike = rows[alike].sort_values("bytes").head(1)
        yield Fact("Fewest bytes among them", smallest_alike.set_index("series")["bytes"], "{:.1f} %")
    full_score = rows.loc[rows["series"] == FULL, "score"].iloc[0]
    # the full cache's own row is within CLOSE, so there is always one
    smallest = rows[rows["score"] >= full_score - CLOSE].sort_values("bytes").iloc[0]
    yield Fact(
        f"Fewest bytes within {CLOSE:g} points of the full cache",
        {smallest["series"]: smallest["bytes"]},
        form="{:.1f} %",
    )


def state_gains(data: pd.DataFrame, stage: str, at: str) -> Iterator[Fact]:
    """Yield how many points of score ``stage`` adds at every x to each series that also ran with it.

    The gain is a difference of mean scores.

    data: measured scores (``measured.COLUMNS``).
    at: the format of an x.
    """
    # [x, series]
    scores = choose_rows(data, "mean").pivot_table(index="x", columns="series", values="score")
    gains = {}
    for base in list_series(data):
        # a chain is named after its stages in order, as in snapkv+think
        chain = f"{base}+{stage}"
        # a series has no mean if one of its tasks is left out
        if base in scores and chain in scores:
            gains[base] = (scores[chain] - scores[base]).dropna()
    # every chain of the stage may be left out
    if not gains:
        return
    yield Fact(f"Points that {stage} adds", pd.concat(gains), "{:+.1f}", at)


def measure_with_gains(measured: MeasuredFigure, stage: str) -> pd.DataFrame:
    """Return a figure's scores. Rows of chains that end with ``stage`` also have the columns of its gain."""
    return measured.frame().merge(measured.gains(stage), how="left", on=ROW)


def choose_gains(data: pd.DataFrame) -> pd.DataFrame:
    """Return the rows to draw: those of the mean over tasks, or of the only task, that have a gain.

    data: the rows of ``measure_with_gains``.
    """
    rows = choose_rows(data, "mean")
    return rows[rows["gain"].notna()]


def state_paired_gains(data: pd.DataFrame, stage: str) -> Iterator[Fact]:
    """Yield how many points of score ``stage`` adds at every x to each series, and how many intervals exclude 0.

    data: the rows of ``measure_with_gains``.
    """
    rows = choose_gains(data)
    names = rows["series"].str.removesuffix(f"+{stage}")
    index = pd.MultiIndex.from_arrays([names, rows["x"]])
    texts = []
    for gain, low, high in zip(rows["gain"], rows["gain_low"], rows["gain_high"], strict=True):
        ci = None if pd.isna(low) else (low, high)
        texts.append(with_interval(gain, ci, sign=True, gap=" "))
    yield Fact(f"Points that {stage} adds", pd.Series(texts, index=index), "{}", "{:g} %")
    bounded = rows.dropna(subset=["gain_low", "gain_high"])
    if len(bounded):
        excludes_zero = (bounded["gain_low"] > 0) | (bounded["gain_high"] < 0)
        yield Fact("Intervals that exclude 0", f"{int(excludes_zero.sum())} of {len(bounded)}")


def state_best(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield, for each task, the x with the best score; the smallest x if several have it.

    The rows of a task must be in ascending order of x, as the figure's sweep declares them.
    """
    rows = choose_rows(data[data["series"] != FULL], "each")
    # of equal scores idxmax takes the first
    best = rows.loc[rows.groupby("task", sort=False)["score"].idxmax()]
    yield Fact("Best (the smallest of equals)", best.set_index("task")["x"], "{:g}")


def state_halves(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield one fact: on how many tasks quantised keys lose more score than quantised values, and on how many less.

    The scores compared are those at the fewest bits, with keys alone and with values alone quantised.
    """
    rows = choose_rows(data[data["series"] != FULL], "each")
    fewest_bits = rows["x"].min()
    # [task, series]
    scores = rows[rows["x"] == fewest_bits].pivot_table(index="task", columns="series", values="score")
    # below 0 where quantised keys lose more of the score than quantised values
    differences = scores["keys alone"] - scores["values alone"]
    counts = {"more than values": (differences < 0).sum(), "less": (differences > 0).sum()}
    yield Fact(f"Tasks of {len(differences)} on which keys lose at {fewest_bits:g} bits", counts, "{:d}")


def collect_needle_maps(measured: MeasuredFigure) -> pd.DataFrame:
    """Return the data of the needle maps: mean score and number of prompts for every method, length and depth."""
    # (length, depth, score) of each prompt, by the name of the method's series
    points: dict[str, list[tuple[float, float, float]]] = {}
    for sweep_run in measured.runs:
        for point, group, cell in sweep_run.cells():
            cell_samples = list(sweep_run.run.samples(group, cell).values())
            # a refused cell can have older samples, but they are not shown
            is_refused = sweep_run.run.store.refusal(cell.id) is not None
            # the user may name a dataset without needles, whose samples have no depth
            if group.task.category == "needle" and cell_samples and not is_refused:
                shown_points = heatmap.read_points(cell_samples, metric(group.task.metric).show)
                points.setdefault(point.series, []).extend(shown_points)
    rows = []
    for series, series_points in points.items():
        for length, depth, score, n in heatmap.build_map(series_points).rows():
            rows.append((series, length, depth, score, n))
    return pd.DataFrame(rows, columns=["series", "length", "depth", "score", "n"])


def add_silence(data: pd.DataFrame, facts: Mapping[str, str]) -> pd.DataFrame:
    """Return the data with the score of an empty answer, and with scores rescaled to it.

    silence: the score of an empty answer to the phrasing; 0 for a phrasing that does not score the empty answer.
    found: the score rescaled so that ``silence`` is 0 and the best score 100.

    An empty answer can score above 0: a phrasing that asks to complete a sentence scores the sentence's beginning with
    every answer.

    facts: the facts of the CSV, which name the phrasing.
    """
    silence = 0.0
    match = re.search(r"phrasing=(\w+)", facts.get("runs", ""))
    if match is not None:
        phrasing = match.group(1)
        silence = EMPTY_SCORES.get(phrasing, 0.0)
    return data.assign(silence=silence, found=heatmap.rescale_score(data["score"], silence))


def add_map_means(data: pd.DataFrame) -> pd.DataFrame:
    """Return the data with texts for titles: ``mean`` of the series' map, and ``samples``, the prompts of a field.

    data: the rows of ``collect_needle_maps``, completed by ``add_silence``.
    """
    mean_texts = _average_over_prompts(data, "series", "found").map("{:.0f} %".format)
    return data.assign(mean=data["series"].map(mean_texts), samples=f"n = {_format_range(data['n'])} a field")


def state_needles(data: pd.DataFrame) -> Iterator[Fact]:
    """Yield the mean score by method, its part above an empty answer's, the depths where needles are lost, and n.

    data: the rows of ``collect_needle_maps``.
    """
    yield Fact("Mean score", _average_over_prompts(data, "series", "score"))
    value_column = "score"
    # without the score of an empty answer, scores are not rescaled
    if "silence" in data and data["silence"].iloc[0] > 0:
        value_column = "found"
        yield Fact("Score of an empty answer", data["silence"].iloc[0])
        rescaled = _average_over_prompts(data, "series", "found")
        yield Fact("Found, % of the score above an empty answer's", rescaled, "{:.0f}")
    depth_means = _average_over_prompts(data, ["series", "depth"], value_column)
    lost = depth_means[depth_means < LOST]
    if len(lost):
        yield Fact(f"Depths with a mean below {LOST}", lost, at="{:g} %")
    fields = data.groupby(["length", "depth"]).ngroups
    least = int(data["n"].min())
    prompts = f"{least} prompts" if least > 1 else "1 prompt"
    yield Fact("Examples", f"{prompts} at each of {fields} pairs of length and depth")


def _average_over_prompts(data: pd.DataFrame, by: str | list[str], value: str) -> pd.Series[float]:
    # sum(n * mean) / sum(n)
    sums = data.assign(total=data[value] * data["n"]).groupby(by, sort=False)[["total", "n"]].sum()
    return sums["total"] / sums["n"]


CODE = {
    "needle/heatmap": Code(collect_needle_maps, state_needles, add_map_means, add_silence),
    "results/pareto": Code(None, state_front, add_front),
    "vatp/fig3": Code(
        partial(measure_with_gains, stage="vatp"),
        partial(
            state_facts,
            fact_tables=[FactTable(label="Scores", at="{:g} %")],
            state_more=partial(state_paired_gains, stage="vatp"),
        ),
        choose_gains,
    ),
    "think/fig3a": Code(None, partial(state_gains, stage="think", at="pair {:g}"), complete=count_bytes_per_copy),
    "qhitter/fig9": Code(None, state_best),
    "qhitter/fig10": Code(None, state_halves),
}

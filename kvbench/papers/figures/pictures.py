"""The drawings of all figures: functions that take a figure's data and its head, and draw with matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pandas as pd
from matplotlib.figure import Figure as Canvas

from kvbench.papers.figures.draw import Head, Sheet, bars, heat, lines, mark_x, mark_y, reverse_x, set_x, set_y
from kvbench.report.heatmap import BAR, DEPTH
from kvbench.report.style import PALE

ENDS = ("low", "high")
RELATIVE_ENDS = ("relative_low", "relative_high")
BYTES = "bytes, % of the full cache's, at 16 bits"
THRESHOLDS = (0.1, 0.5, 1, 5, 20, 60)
NORM = "$\\Vert\\mathbf{v}\\Vert_1$"

Drawing = Callable[[pd.DataFrame, Head], Canvas]


def draw_needles(data: pd.DataFrame, head: Head) -> Canvas:
    """Draw a map of the needles that each method finds, by length and depth."""
    sheet = Sheet(data, head, 6.9, 2.1, columns="series", wrap=5, sharey=True)
    for panel in sheet.panels:
        image = heat(panel, "length", "depth", "found", limits=(0, 100), numbers="%.0f")
        panel.color(image, BAR)
        panel.label("{series}: {mean}".format(**panel.named), "tokens", DEPTH)
    return sheet.finish()


def draw_budgets(data: pd.DataFrame, head: Head) -> Canvas:
    """Draw scores against the tokens kept, with a panel for each task."""
    sheet = Sheet(data, head, 6.9, 1.75, columns="task", wrap=4, sharey=True)
    for panel in sheet.panels:
        curves = lines(panel, "x", "score", "series", interval=ENDS, level=True, fails=True, log_x=True)
        set_x(panel, curves["x"], "log", ticks="data")
        set_y(panel, curves["score"], top=curves["high"])
        panel.label(panel.named["task"], "tokens kept, %", "score")
    return sheet.finish(columns=8)


def draw_pareto(data: pd.DataFrame, head: Head) -> Canvas:
    """Draw scores against bytes, with names beside the points and the front as a grey line."""
    sheet = Sheet(data, head, 6.9, 3.5)
    (panel,) = sheet.panels
    front = {"color": "#8C8C8C", "linestyle": "-", "drawstyle": "steps-post", "marker": "", "lw": 2.2, "alpha": 0.45}
    full = {"color": "#6E6E6E", "marker": "*", "markersize": 7, "label": "full cache"}
    curves = lines(
        panel,
        "bytes",
        "score",
        "series",
        interval=ENDS,
        shaded="alike",
        look={"linestyle": "none", "markevery": 1, "mew": 0.9},
        looks_of={"Pareto front": front, "full": full},
    )
    set_x(panel, curves["bytes"], "log", ticks=(5, 10, 20, 40, 60, 80, 100))
    panel.ax.set_ylim(bottom=0)
    panel.label(x=BYTES, y="score")
    return sheet.finish(legend="", direct=True)


def draw_divergence_by_bytes(data: pd.DataFrame, head: Head) -> Canvas:
    """Draw divergences against bytes, with a panel for each kind of text."""
    sheet = Sheet(_name_texts(data), head, 6.9, 2.9, columns="text", sharey=True)
    for panel in sheet.panels:
        curves = lines(panel, "bytes", "kl", "series", interval=ENDS, log_x=True)
        set_x(panel, curves["bytes"], "log", ticks=(5, 10, 20, 40, 60, 80))
        set_y(panel, curves["kl"], "log")
        panel.label(panel.named["text"], BYTES, "KL divergence, nats a token")
    return sheet.finish(columns=5)


def _name_texts(data: pd.DataFrame) -> pd.DataFrame:
    names = {"reference text": "on the text's own continuation", "full cache's answer": "on the full cache's answer"}
    return data.assign(text=data["text"].replace(names))


def draw_divergence_by_position(data: pd.DataFrame, head: Head) -> Canvas:
    """Draw divergences by position after the prompt, with a panel for each method."""
    sheet = Sheet(_name_texts(data), head, 6.9, 1.7, columns="series", wrap=4, sharey=True)
    for panel in sheet.panels:
        curves = lines(panel, "position", "kl", "text", interval=ENDS)
        set_y(panel, curves["kl"], "log")
        panel.label(panel.named["series"], "tokens after the prompt", "KL, nats a token")
    return sheet.finish()


def draw_divergence_by_layer(data: pd.DataFrame, head: Head) -> Canvas:
    """Draw divergences by the layer that is compressed, with a panel for each method."""
    sheet = Sheet(_name_texts(data), head, 6.9, 1.9, columns="series", wrap=5, sharey=True)
    for panel in sheet.panels:
        curves = lines(panel, "layer", "kl", "text", interval=ENDS)
        set_y(panel, curves["kl"], "log")
        panel.label(panel.named["series"], "the layer", "KL, nats a token")
    return sheet.finish()


def draw_long_answers(data: pd.DataFrame, head: Head) -> Canvas:
    """Draw divergences over long continuations, with a panel for each method."""
    sheet = Sheet(data, head, 6.9, 1.9, columns="method", wrap=5, sharey=True)
    dashed: dict[str, object] = {"linestyle": "--", "markerfacecolor": "white"}
    own: dict[str, Mapping[str, object]] = {f"{name}, budget": dashed for name in ("snapkv", "keydiff", "streamingllm")}
    own["h2o orig"] = dashed | {"label": "H2O, its own budget"}
    for panel in sheet.panels:
        curves = lines(panel, "position", "running", "series", interval=ENDS, looks_of=own)
        set_y(panel, curves["running"], "log")
        panel.label(panel.named["method"], "new tokens", "KL, nats a token")
    return sheet.finish()


def draw_shifts(data: pd.DataFrame, head: Head) -> Canvas:
    """Draw a map of overlaps by layer and head for each kind of quantisation and number of bits."""
    data = data.assign(kind=data["kind"].replace({"own": "keys of this layer", "all": "whole cache"}))
    sheet = Sheet(data, head, 6.9, 1.35, base=0.5, rows="kind", columns="bits", sharex=True, sharey=True)
    for panel in sheet.panels:
        image = heat(panel, "layer", "head", "overlap", limits=(0, 1))
        panel.color(image, "overlap $|S_o \\cap S_q|\\,/\\,|S_o|$")
        panel.label("{bits} bits, {kind}".format(**panel.named), "layer", "head")
    return sheet.finish()


def draw_errors(data: pd.DataFrame, head: Head) -> Canvas:
    """Draw the error of quantising each token against its attention, keys above values."""
    sheet = Sheet(data, head, 6.9, 1.6, rows="half", columns="layer", sharex=True)
    looks: dict[str, Mapping[str, object]] = {
        "other tokens": {"color": "#8C8C8C", "marker": ".", "markersize": 2.6, "zorder": 1.9},
        "top 20 % by attention and error": {"color": "#D55E00", "marker": "^", "markersize": 2.8},
        "attention above 5 times the mean": {"color": "#E69F00", "marker": "o", "markersize": 4, "mec": "black"}
        | {"mew": 0.4, "rasterized": False},
    }
    points = {"linestyle": "none", "mew": 0, "markevery": 1, "rasterized": True}
    for panel in sheet.panels:
        curves = lines(panel, "attention", "error", "mark", look=points, looks_of=looks)
        set_x(panel, curves["attention"], "log")
        panel.ax.set_ylim(bottom=0)
        named = panel.named
        panel.label("{half}, layer {layer}".format(**named), "accumulated attention", f"error at {named['bits']} bits")
    return sheet.finish()


def draw_cache_sizes(data: pd.DataFrame, head: Head) -> Canvas:
    """Draw perplexities against cache sizes."""
    sheet = Sheet(data, head, 3.35, 2.4)
    (panel,) = sheet.panels
    star = {"color": "#D55E00", "linestyle": "none", "marker": "*", "markersize": 9, "label": "H2O of outliers alone"}
    own = {"outliers alone": star}
    curves = lines(panel, "x", "score", "series", interval=ENDS, level=True, looks_of=own, log_x=True)
    set_x(panel, curves["x"], "log", ticks="data")
    set_y(panel, curves["score"], "auto")
    panel.label(x="cache, % of the prefix", y="perplexity")
    return sheet.finish(columns=3)


def draw_bits(data: pd.DataFrame, head: Head) -> Canvas:
    """Draw scores against bits, with a panel for each task."""
    sheet = Sheet(data, head, 6.9, 2.1, columns="task", sharey=True)
    for panel in sheet.panels:
        curves = lines(panel, "x", "score", "series", interval=ENDS, level=True, fails=True)
        set_x(panel, curves["x"], ticks="data")
        reverse_x(panel)
        set_y(panel, curves["score"], top=curves["high"])
        panel.label("{task}, {share:.0f} % kept".format(**panel.named), "bits", "score")
    return sheet.finish()


def draw_streams(data: pd.DataFrame, head: Head) -> Canvas:
    """Draw perplexities against the length of a stream."""
    sheet = Sheet(data, head, 3.35, 2.4)
    (panel,) = sheet.panels
    curves = lines(panel, "x", "score", "series", interval=ENDS, log_x=True)
    set_x(panel, curves["x"], "log", ticks="data")
    set_y(panel, curves["score"], "auto")
    mark_x(panel, "x", 4096)
    panel.label(x="tokens of the text", y="perplexity")
    return sheet.finish(columns=3)


def draw_balance(data: pd.DataFrame, head: Head) -> Canvas:
    """Draw the score of each task, and their mean with its interval, against lambda."""
    sheet = Sheet(data, head, 3.35, 2.5)
    (panel,) = sheet.panels
    lines(
        panel,
        "x",
        "score",
        "task",
        interval=ENDS,
        first_band=True,
        level=True,
        look={"lw": 0.7, "markersize": 2.5},
        looks_of={"mean": {"color": "#3A3A3A", "linestyle": "-", "marker": "", "lw": 1.8}},
    )
    mark_x(panel, "x", 0.5, "the paper's choice")
    panel.label(x="$\\lambda$, weight of attention", y="score")
    return sheet.finish(columns=4)


def draw_halves(data: pd.DataFrame, head: Head) -> Canvas:
    """Draw scores against bits with keys alone, values alone and both packed."""
    sheet = Sheet(data, head, 3.35, 2.4)
    (panel,) = sheet.panels
    own: dict[str, Mapping[str, object]] = {
        "keys alone": {"color": "#0072B2", "linestyle": "-", "marker": "o", "label": "keys alone"},
        "values alone": {"color": "#D55E00", "linestyle": "--", "marker": "s", "label": "values alone"},
        "both": {"color": "#4F7F2F", "linestyle": "-.", "marker": "^", "label": "both"},
    }
    curves = lines(panel, "x", "score", "series", interval=ENDS, level=True, fails=True, looks_of=own)
    set_x(panel, curves["x"], ticks="data")
    reverse_x(panel)
    panel.label(x="bits of what is packed", y=f"score, {panel.named['over']}")
    return sheet.finish(columns=4)


def draw_relative_scores(data: pd.DataFrame, head: Head) -> Canvas:
    """Draw mean relative scores against the threshold, with the paper's range in grey."""
    sheet = Sheet(data, head, 3.35, 2.1)
    (panel,) = sheet.panels
    curves = lines(panel, "x", "relative", "series", interval=RELATIVE_ENDS, level=True, log_x=True)
    set_x(panel, curves["x"], "log", ticks=THRESHOLDS)
    panel.ax.set_ylim(bottom=0)
    panel.ax.axvspan(0.1, 5, color=PALE, alpha=0.4, lw=0)
    mark_x(panel, "x", 1, "the paper's T")
    panel.label(x="threshold T, %", y="score, % of the full cache's")
    return sheet.finish(legend="")


def draw_thresholds(data: pd.DataFrame, head: Head) -> Canvas:
    """Draw relative scores against the threshold, with a panel for each task, and the budgets of all at the right."""
    sheet = Sheet(data, head, 6.9, 1.6, columns="task", wrap=2, sharey=True, share=1.7)
    for panel in sheet.panels:
        curves = lines(panel, "x", "relative", "task", interval=RELATIVE_ENDS, level=True, log_x=True)
        set_x(panel, curves["x"], "log", ticks=THRESHOLDS)
        panel.ax.set_ylim(bottom=0)
        if panel.ax.get_ylim()[1] > 200:
            panel.ax.set_ylim(top=200)
        mark_x(panel, "x", 1)
        panel.label(panel.named["task"], "threshold T, %", "score, %")
    panel = sheet.open_right(data)
    curves = lines(panel, "x", "kept", "task", level=True)
    set_x(panel, curves["x"], "log", ticks=THRESHOLDS)
    set_y(panel, curves["kept"], top=curves["kept"])
    mark_x(panel, "x", 1)
    panel.label("budget", "threshold T, %", "tokens kept, %")
    return sheet.finish(legend="right")


def draw_equal_memory(data: pd.DataFrame, head: Head) -> Canvas:
    """Draw mean scores against bytes."""
    sheet = Sheet(data, head, 3.35, 2.6)
    (panel,) = sheet.panels
    curves = lines(panel, "bytes", "score", "series", interval=ENDS, level=True, fails=True, log_x=True)
    set_x(panel, curves["bytes"], "log", ticks=(1, 2, 5, 10, 20, 40, 70, 100), right=100)
    panel.ax.set_ylim(bottom=0)
    panel.label(x=BYTES, y=f"score, {panel.named['over']}")
    return sheet.finish(columns=3)


def draw_batches(data: pd.DataFrame, head: Head) -> Canvas:
    """Draw memory against batch size."""
    sheet = Sheet(data, head, 3.35, 2.6)
    (panel,) = sheet.panels
    lines(panel, "batch", "memory", "method")
    panel.ax.set_ylim(bottom=0)
    mark_y(panel, 12.55)
    panel.label(x="batch size", y="weights (dotted) and caches, GiB")
    return sheet.finish(columns=2)


def draw_magnitudes(data: pd.DataFrame, head: Head) -> Canvas:
    """Draw a map of magnitudes by channel and token for the keys and the values of each head, and means above it."""
    data = data.assign(what=data["what"].replace({"k": "keys", "v": "values"}))
    layout = {"rows": "place", "columns": "what", "heights": (1, 3), "sharex": "col", "sharey": "row"}
    sheet = Sheet(data, head, 6.9, 1.75, **layout)  # type: ignore[arg-type]
    for upper, lower in sheet.places:
        bars(upper, "channel", "mean")
        upper.ax.set_ylim(bottom=0)
        mark_y(upper, 1)
        upper.label("{what}, {place}".format(**upper.named), y="times\nthe mean")
        image = heat(lower, "channel", "token", "magnitude", runs=True)
        lower.color(image, f"|{lower.named['what']}|", own=True)
        lower.label(x="channel", y="token")
    return sheet.finish()


def draw_energies(data: pd.DataFrame, head: Head) -> Canvas:
    """Draw energies and their cumulative sums by singular value, of attention above those of keys."""
    sheet = Sheet(data, head, 6.9, 1.8, rows="what", side_by_side=2)
    for left, right in sheet.places:
        panel = left.of(quantity="energy")
        curves = lines(panel, "index", "shown", "name", unit="head", shades=True)
        set_y(panel, curves["shown"], "log", decades=8)
        mark_y(panel, 0.01)
        panel.label(panel.named["what"], "singular value", "energy")
        panel = right.of(quantity="cumulative")
        curves = lines(panel, "index", "shown", "name", unit="head", shades=True)
        set_y(panel, curves["shown"], top=curves["shown"])
        mark_x(panel, "index", 50)
        mark_y(panel, 0.9)
        panel.label(panel.named["what"], "singular value", "cumulative energy")
    return sheet.finish()


def draw_ranks_by_layer(data: pd.DataFrame, head: Head) -> Canvas:
    """Draw effective ranks by layer, with a panel for queries, keys and values each."""
    names = {name[0]: f"{name} $\\mathbf{{{letter}}}_m$" for name, letter in (("keys", "K"), ("values", "V"))}
    names["q"] = "queries $\\mathbf{Q}_m$"
    sheet = Sheet(data.assign(what=data["what"].replace(names)), head, 6.9, 2.0, columns="what", sharey=True)
    for panel in sheet.panels:
        curves = lines(panel, "layer", "erank", "source")
        set_x(panel, curves["layer"], ticks="even")
        panel.label(panel.named["what"], "layer", "effective rank")
    return sheet.finish()


def draw_spectra(data: pd.DataFrame, head: Head) -> Canvas:
    """Draw the eigenvalues of each head's queries, with a panel for each text."""
    sheet = Sheet(data, head, 6.9, 1.75, columns="panel", wrap=3, sharex=True, sharey=True)
    for panel in sheet.panels:
        look = {"marker": "", "lw": 1.2}
        curves = lines(panel, "index", "shown", "name", unit="head", quiet=["other heads"], look=look)
        set_x(panel, curves["index"], ticks="even")
        set_y(panel, curves["shown"], "log", decades=5)
        panel.label(panel.named["panel"], "eigenvalue's rank", "eigenvalue of $\\Sigma_{\\mathbf{Q}_m}$")
    return sheet.finish()


def draw_head_ranks(data: pd.DataFrame, head: Head) -> Canvas:
    """Draw a map of truncated effective ranks by layer and head."""
    sheet = Sheet(data, head, 3.35, 2.1)
    (panel,) = sheet.panels
    image = heat(panel, "layer", "head", "erank_k", numbers="%.1f")
    panel.color(image, "$\\mathrm{erank}_k(\\Sigma_{\\mathbf{Q}_m})$")
    panel.label(x="layer", y="head")
    return sheet.finish()


def draw_hidden_entropy(data: pd.DataFrame, head: Head) -> Canvas:
    """Draw the entropy of hidden states by depth, with a line for each prompt."""
    sheet = Sheet(data, head, 3.35, 2.4)
    (panel,) = sheet.panels
    curves = lines(panel, "layer", "entropy", "name", crowd="samples")
    set_x(panel, curves["layer"], ticks="even")
    panel.label(x="layers passed", y="matrix entropy $H(\\Sigma)$ (nats)")
    return sheet.finish(columns=3)


def draw_sinks(data: pd.DataFrame, head: Head) -> Canvas:
    """Draw maps of attention above the norms of values, and every head's most attended token at the right."""
    sheet = Sheet(data, head, 6.9, 2.35, columns="place", heights=(3.2, 1), sharex="col", share=2.2)
    for upper, lower in sheet.places:
        attention = upper.of(quantity="attention")
        image = heat(attention, "token", "query", "value", floor=1.0e-4)
        attention.color(image, "attention")
        attention.label(attention.named["place"], y="query")
        norms = lower.of(quantity="norm")
        bars(norms, "token", "value", marked="sink")
        norms.ax.set_ylim(bottom=0)
        norms.label(x="token", y=NORM)
    heads = data[data["quantity"] == "head"]
    panel = sheet.open_right(heads)
    points = panel.ax.scatter(
        heads["share"], heads["ratio"], c=heads["layer"], s=11, linewidths=0.3, edgecolors="black"
    )
    set_x(panel, heads["share"], "log")
    set_y(panel, heads["ratio"], "log2")
    mark_x(panel, "share", 0.3)
    mark_y(panel, 1)
    panel.label("most attended tokens", "share of the head's attention", f"{NORM} / median")
    panel.color(points, "layer")
    return sheet.finish(legend="")


def draw_gains(data: pd.DataFrame, head: Head) -> Canvas:
    """Draw the points that a stage adds against the tokens kept, with a panel for each method."""
    sheet = Sheet(data, head, 4.6, 2.1, columns="series", sharey=True)
    for panel in sheet.panels:
        points = {"linestyle": "none", "markevery": 1}
        curves = lines(panel, "x", "gain", "series", interval=("gain_low", "gain_high"), look=points)
        set_x(panel, curves["x"], ticks="data")
        mark_y(panel, 0)
        panel.label(panel.named["series"], "tokens kept, %", "points, with minus without")
    return sheet.finish(legend="")


def draw_scores(data: pd.DataFrame, head: Head) -> Canvas:
    """Draw scores against x, with a line for each series: a figure that has no drawing of its own."""
    sheet = Sheet(data, head, 3.4, 2.4)
    (panel,) = sheet.panels
    lines(panel, "x", "score", "series", interval=ENDS)
    panel.label("{over}; {samples}".format(**panel.named), "x", "score")
    return sheet.finish()


DRAWINGS: dict[str, Drawing] = {
    "fidelity/answers": draw_long_answers,
    "fidelity/budget": draw_divergence_by_bytes,
    "fidelity/layers": draw_divergence_by_layer,
    "fidelity/positions": draw_divergence_by_position,
    "needle/heatmap": draw_needles,
    "qhitter/fig2": draw_shifts,
    "qhitter/fig3": draw_errors,
    "qhitter/fig5": draw_cache_sizes,
    "qhitter/fig7": draw_bits,
    "qhitter/fig8": draw_streams,
    "qhitter/fig9": draw_balance,
    "qhitter/fig10": draw_halves,
    "refreekv/fig2": draw_relative_scores,
    "refreekv/fig3": draw_thresholds,
    "results/budget": draw_budgets,
    "results/pareto": draw_pareto,
    "think/fig3a": draw_equal_memory,
    "think/fig3b": draw_batches,
    "think/fig4": draw_magnitudes,
    "think/fig5": draw_energies,
    "uncomp/fig1": draw_ranks_by_layer,
    "uncomp/fig2": draw_spectra,
    "uncomp/fig4": draw_head_ranks,
    "uncomp/fig6": draw_hidden_entropy,
    "vatp/fig1": draw_sinks,
    "vatp/fig3": draw_gains,
}
"""The drawing of each figure by its id."""

"""Set two models beside each other: what retrieval keeps on each, and where four bits are lost, part by part.

python scripts/second_model.py                measure what is missing, write results/second-model.md and its picture
python scripts/second_model.py --stored       write what is measured so far
python scripts/second_model.py --verify       fail if the committed page differs from what its samples give

Retrieval is read from the committed suites. The parts of four bits are divergences on texts of 2,048 tokens, whose
samples are in results/second-model.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import exp, log
from pathlib import Path

import matplotlib as mpl
import shards
import verification
from matplotlib.figure import Figure
from scipy.stats import kendalltau
from verification import Verification

from kvbench.base.formatting import format_number, format_significant, with_interval
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.resolve import resolve
from kvbench.plan import config, run_plan
from kvbench.plan.run_plan import RunPlan
from kvbench.report import writers
from kvbench.report.table import Table
from kvbench.run import experiment
from kvbench.store import archive
from kvbench.store.store import ResultStore
from kvbench.suite import definition, folder
from kvbench.tasks.metrics import stats

RESULTS = Path(__file__).resolve().parent.parent / "results"
NAME = "second-model"
SUITES = {"smollm2-135m-q4_1": "retain-v1-mini", "gemma3-270m-q4_k_m": "retain-v1-4k"}
"""The models, each with the suite in which its retrieval was measured."""
TEXTS = {"dataset": ["fidelity/essays", "fidelity/wikitext2"], "length": 2048, "forced": 64, "limit": 6}


@dataclass(frozen=True, kw_only=True)
class Part:
    """A way to code a part of the cache in q4_0. label: its words. knobs: what it sets, by model."""

    label: str
    knobs: Mapping[str, Mapping[str, object]]

    @classmethod
    def alike(cls, label: str, **knobs: object) -> Part:
        return cls(label=label, knobs=dict.fromkeys(SUITES, knobs))


def _some_layers(label: str, smollm: range, gemma: Sequence[int] | None) -> Part:
    """Return the part that codes everything but some layers: of SmolLM2's 30, and of Gemma's 3 that attend all."""
    knobs: dict[str, Mapping[str, object]] = {"smollm2-135m-q4_1": {"exact_layers": [*smollm]}}
    if gemma is not None:
        knobs["gemma3-270m-q4_k_m"] = {"exact_layers": [*gemma]}
    return Part(label=label, knobs=knobs)


PARTS = (
    Part.alike("keys and values"),
    Part.alike("keys alone", only="keys"),
    Part.alike("values alone", only="values"),
    Part.alike("keys and values, rotated", rotate="hadamard"),
    Part.alike("keys alone, rotated", rotate="hadamard", only="keys"),
    Part.alike("values alone, rotated", rotate="hadamard", only="values"),
    Part.alike("blocks of 16 channels", group=16),
    Part.alike("blocks of 64 channels", group=64),
    _some_layers("all but the first third of the layers", range(10), [0]),
    _some_layers("all but the second third", range(10, 20), [1]),
    _some_layers("all but the last third", range(20, 30), [2]),
    Part(label="all but the windows", knobs={"gemma3-270m-q4_k_m": {"local": "exact"}}),
    Part(label="the windows alone", knobs={"gemma3-270m-q4_k_m": {"exact_layers": [0, 1, 2]}}),
)


def prepare(model: str, results: str) -> RunPlan:
    """Return the run over all parts of four bits on a model, with its results in ``results``."""
    cfg = config.configure({"model": model, "model.dtype": "float32", "method": "full", "results": results} | TEXTS)
    chains = {}
    for part in PARTS:
        if model in part.knobs:
            (chain,) = resolve([{"method": "q4_0"} | dict(part.knobs[model])])
            chains[chain.chain] = chain
    return run_plan.prepare(replace(cfg, chains=tuple(chains.values())))


def read_divergences(plan: RunPlan) -> dict[Chain, list[list[float]]]:
    """Return each chain's mean divergence in nats a token on every text, by dataset."""
    found: dict[Chain, list[list[float]]] = {}
    for group in plan.groups:
        for cell in group.cells:
            samples = plan.store.samples(cell.id).values()
            texts = [s.fidelity["reference"].kl for s in samples if s.fidelity]
            found.setdefault(cell.chain, []).append([sum(kl) / len(kl) for kl in texts])
    return found


def geometric_mean(texts: Sequence[Sequence[float]]) -> tuple[float, tuple[float, float]]:
    """Return the geometric mean over the texts of all datasets, and its 95 % interval."""
    mean, interval = stats.mean_over_tasks([[log(value) for value in some] for some in texts], None)
    assert interval is not None, "there are enough texts for an interval"
    return exp(mean), (exp(interval[0]), exp(interval[1]))


def measured_parts(model: str, plan: RunPlan) -> list[tuple[str, tuple[float, tuple[float, float]]]]:
    """Return (label, divergence with its interval) of each part that has a meaning on the model."""
    divergences = read_divergences(plan)
    rows = []
    for part in PARTS:
        if model in part.knobs:
            (chain,) = resolve([{"method": "q4_0"} | dict(part.knobs[model])])
            rows.append((part.label, geometric_mean(divergences[chain.chain])))
    return rows


def retrieval(model: str) -> list[folder.Line]:
    """Return the committed rows of a model's suite that have a score in *retrieval*, at half or a quarter."""
    rows = folder.read_rows(RESULTS / definition.FOLDER / SUITES[model] / "kvbench")
    return [row for row in rows if row["role"] != "full" and row["budget"] in (2, 4) and "retrieval" in row["parts"]]


def _base(row: folder.Line) -> str:
    """Return a row's method without the options by which two models' rows differ."""
    return str(row["name"] if "keep_window" in row["name"] else row["name"].split(" ")[0])


def compare_retrieval() -> Table:
    """Return the scores of retrieval on both models, for the methods that both have at a budget."""
    by_model = {model: {(_base(row), row["budget"]): row for row in retrieval(model)} for model in SUITES}
    first, second = by_model.values()
    lines = []
    for key in sorted(
        first.keys() & second.keys(), key=lambda key: (key[1], -first[key]["parts"]["retrieval"]["retained"])
    ):
        method, budget = key
        cells = [method, f"1/{budget}"]
        for rows in (first, second):
            score = rows[key]["parts"]["retrieval"]
            cells.append(with_interval(score["retained"], score["ci"], 0, gap=" ") if score["ci"] else _plain(score))
            cells.append(format_number(rows[key]["bytes"]))
        lines.append(tuple(cells))
    heads = ["method", "budget"]
    for model in SUITES:
        heads += [f"{model}, retained", "bytes %"]
    return Table(tuple(heads), tuple(lines), left=2)


def describe_correlation(model: str) -> str:
    """Return how the order of a model's rows by divergence agrees with their order by retrieval."""
    rows = [row for row in retrieval(model) if row["role"] in (definition.METHOD, definition.CONTROL)]
    parts = [row["parts"] for row in rows if "distance" in row["parts"]]
    result = kendalltau([-p["distance"]["raw"] for p in parts], [p["retrieval"]["raw"] for p in parts])
    return f"{model}: Kendall's tau {result.statistic:.2f} (p {result.pvalue:.2g}) over {len(parts)} rows."


def _plain(score: Mapping[str, float]) -> str:
    return format_number(score["retained"], 0)


def compare_parts(measured: Mapping[str, Sequence[tuple[str, tuple[float, tuple[float, float]]]]]) -> Table:
    """Return the divergence of each part of four bits on both models."""
    by_label = {model: dict(rows) for model, rows in measured.items()}
    lines = []
    for part in PARTS:
        cells = [part.label]
        for model in SUITES:
            value = by_label[model].get(part.label)
            if value is None:
                cells.append("—")
            else:
                mean, (low, high) = value
                cells.append(
                    f"{format_significant(mean, 2)} [{format_significant(low, 2)}, {format_significant(high, 2)}]"
                )
        lines.append(tuple(cells))
    return Table(("coded in q4_0", *SUITES), tuple(lines), left=1)


def draw(measured: Mapping[str, Sequence[tuple[str, tuple[float, tuple[float, float]]]]]) -> Figure:
    """Return the picture: a line a part, a point a model, divergence to the right, intervals as lines."""
    figure = Figure(figsize=(8.6, 4.8), layout="constrained")
    axes = figure.subplots()
    labels = [part.label for part in PARTS][::-1]
    for model, colour, marker in zip(SUITES, ("#0072B2", "#D55E00"), ("o", "s"), strict=True):
        places = [labels.index(label) for label, _ in measured[model]]
        means = [mean for _, (mean, _) in measured[model]]
        below = [mean - low for _, (mean, (low, _)) in measured[model]]
        above = [high - mean for _, (mean, (_, high)) in measured[model]]
        axes.errorbar(means, places, xerr=[below, above], fmt=marker, color=colour, elinewidth=0.9, label=model)
    axes.set_xscale("log")
    axes.set_yticks(range(len(labels)), labels)
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)
    axes.set_xlabel("divergence from the full cache, nats a token, [95 %] (12 texts)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    axes.set_title("Where four bits are lost: what is coded in q4_0", loc="left")
    return figure


def page(results: str) -> str:
    """Return the page in Markdown, from the samples in ``results`` and the committed suites."""
    measured = {model: measured_parts(model, prepare(model, results)) for model in SUITES}
    about = {model: definition.load(suite).about for model, suite in SUITES.items()}
    texts = [
        "# Two models beside each other\n",
        "`python scripts/second_model.py`\n",
        "What of the findings on SmolLM2-135M holds on Gemma 3 270M stands in [the findings](README.md). Here are the "
        "numbers.\n",
        "## Retrieval, the question withheld\n",
        "100 is as good as the full cache, 0 as good as random tokens at the same bytes. "
        + " ".join(f"{model}: {SUITES[model]} ({text})." for model, text in about.items())
        + " On Gemma a budget counts the bytes of the 3 of 18 layers that methods compress, *bytes %* those of all.\n",
        writers.markdown(compare_retrieval()),
        "Does a small divergence go with retrieval? At half and a quarter of the bytes, "
        + " ".join(describe_correlation(model) for model in SUITES)
        + "\n",
        "## Where four bits are lost\n",
        f"![Divergence of q4_0 by what it codes, on both models]({NAME}.png)\n",
        "Divergence from the full cache in nats a token: geometric means over 12 texts of 2,048 tokens, 64 tokens "
        "each.\n",
        writers.markdown(compare_parts(measured)),
    ]
    return "\n".join(texts)


def samples_path(model: str) -> Path:
    """Return the file of the committed samples of a model."""
    return RESULTS / NAME / f"{model}.samples.jsonl.gz"


def write(results: str, measure: bool) -> None:
    """Write the page, its picture and its samples. ``measure`` completes the samples first."""
    measured = {}
    for model in SUITES:
        plan = prepare(model, results)
        if samples_path(model).exists():
            archive.unpack(samples_path(model), plan.store)
        if measure:
            experiment.fill(plan)
        samples_path(model).parent.mkdir(exist_ok=True)
        archive.pack(plan.store, {c.id for g in plan.groups for c in g.cells}, samples_path(model))
        measured[model] = measured_parts(model, plan)
    (RESULTS / f"{NAME}.md").write_text(page(results), encoding="utf-8")
    with mpl.rc_context({"svg.hashsalt": "kvbench"}):
        draw(measured).savefig(RESULTS / f"{NAME}.png", dpi=150)


def _page_of_samples() -> str:
    with tempfile.TemporaryDirectory() as temporary:
        store = ResultStore(Path(temporary))
        for model in SUITES:
            archive.unpack(samples_path(model), store, temporary=True)
        return page(temporary)


def verify(found: Verification) -> None:
    """Add the page to ``found``."""
    found.add_text(RESULTS / f"{NAME}.md", _page_of_samples, f"{NAME}.md", "python scripts/second_model.py")


def main() -> int:
    """Write or verify the page. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verification.add_options(parser)
    parser.add_argument("--stored", action="store_true", help="measure nothing")
    parser.add_argument("--results", default="results", help="folder of measured cells")
    args = parser.parse_args()
    if args.verify:
        return verification.verified(verify, args.without)
    return shards.ended(partial(_write_all, args))


def _write_all(args: argparse.Namespace) -> int:
    write(args.results, measure=not args.stored)
    return 0


if __name__ == "__main__":
    sys.exit(main())

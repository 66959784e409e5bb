"""Figures of divergences, measured on two texts: by budget, by position and by layer."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from kvbench.cli.main import main
from kvbench.papers.figures import fidelity, measured, registry
from kvbench.plan import keys
from kvbench.store.fidelity import TextFidelity, mean_divergence
from kvbench.tasks.metrics import stats

pytestmark = pytest.mark.e2e("measures and draws figures")
WORDS = ["dataset=fidelity/tiny", "length=128", "forced=24", "limit=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("results")


@pytest.mark.parametrize("name", ["fidelity/budget", "fidelity/positions", "fidelity/layers"])
def test_own_methods_are_drawn_and_drawn_again(name, folder, capsys):
    words = ["plot", name, *WORDS, "method=snapkv,think", "kv_ratio=0.5,0.25", f"results={folder}", "--json"]
    assert main(words) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert "nats" in record["finding"].lower() and "nan" not in record["finding"]
    figure = registry.FIGURES[name]
    (csv,) = (path for path in record["files"] if path.endswith(".csv"))
    data = figure.parse(Path(csv).read_text(encoding="utf-8"))
    assert {"snapkv", "think"} <= {series.split()[0] for series in data["series"]}
    assert set(data["text"]) == {"reference text", "full cache's answer"} and (data["kl"] > 0).all()


def test_numbers_are_those_of_the_samples(folder):
    words = [*WORDS, "method=snapkv", "kv_ratio=0.25", f"results={folder}"]
    source = measured.prepare(registry.FIGURES["fidelity/budget"], keys.parse_pairs(words))
    source.measure(quiet=True)
    data = registry.FIGURES["fidelity/budget"].compute(source)
    (sweep_run,) = source.runs
    cell = next(c for c in sweep_run.run.groups[0].cells if c.chain.stages)
    kl = [s.fidelity["reference"].kl for s in sweep_run.run.store.samples(cell.id).values()]
    row = data[data["text"] == "reference text"].iloc[0]
    assert row["kl"] == pytest.approx(sum(map(sum, kl)) / sum(map(len, kl))) and row["n"] == len(kl) == 2
    positions = registry.FIGURES["fidelity/positions"].compute(source)
    first = positions[(positions["text"] == "reference text") & (positions["position"] == 4.5)].iloc[0]
    assert first["kl"] == pytest.approx(sum(sum(x[:8]) for x in kl) / 16)


def samples(kl):
    """Comparisons on as many texts as there are lists of divergences."""
    return [TextFidelity(tuple(x), "1" * len(x), 0.0, 0.0, 0.0, 0.0) for x in kl]


def test_a_run_of_positions_is_over_the_texts_that_reach_it():
    texts = samples([[0.1 * (i + 1)] * 8 + [1.0 + i] * (4 if i else 0) for i in range(9)])
    run = mean_divergence(texts, 0, 8)
    assert run.kl == pytest.approx(0.5) and run.n == 9 and run.ci[0] < run.kl < run.ci[1]
    sums = np.array([(8 * 0.1 * (i + 1), 8) for i in range(9)])
    assert run.ci == pytest.approx(stats.ratio_interval(sums))
    later = mean_divergence(texts, 8, 16)
    assert later.kl == pytest.approx(5.5) and later.n == 8
    assert mean_divergence(texts[:7], 0, 8).ci is None, "seven texts say nothing about an interval"
    assert mean_divergence(texts, 12) is None


def test_windows_of_one_document_are_one_draw():
    texts = samples([[0.1 * (i + 1)] * 4 for i in range(9)])
    alike = [replace(text, document=f"{i // 2}") for i, text in enumerate(texts)]
    assert mean_divergence(alike).ci is None, "five documents"
    assert mean_divergence(texts).ci is not None


@pytest.fixture(scope="module")
def eight(folder):
    """A short sweep of two methods over eight texts, measured."""
    words = ["dataset=fidelity/tiny", "length=64", "forced=40", "limit=8", "method=snapkv,kivi", "kv_ratio=0.25"]
    source = measured.prepare(registry.FIGURES["fidelity/positions"], keys.parse_pairs([*words, f"results={folder}"]))
    source.measure(quiet=True)
    return source


def kl_of(source, series):
    cells = next(cells for point, cells in source.runs[0].points() if point.series == series)
    return [s.fidelity["reference"].kl for s in source.runs[0].run.store.samples(cells[0][1].id).values()]


def test_a_running_mean_has_the_interval_of_its_own_positions(eight, monkeypatch):
    monkeypatch.setattr(fidelity, "SMOOTH_LONG", 5)
    monkeypatch.setattr(fidelity, "RUNNING", 4)
    data = registry.FIGURES["fidelity/answers"].compute(eight)
    series = data["series"].iloc[0]
    kl = kl_of(eight, series)
    row = data[(data["series"] == series) & (data["position"] == 13.0)].iloc[0]
    # 39 positions are eight runs of five: a mean is over two, this run and the one before it
    around = np.array([(sum(x[5:15]), 10) for x in kl])
    assert row["running"] == pytest.approx(around[:, 0].sum() / 80)
    assert (row["low"], row["high"]) == pytest.approx(stats.ratio_interval(around))
    assert row["kl"] == pytest.approx(sum(sum(x[10:15]) for x in kl) / 40) and row["n"] == 8
    shown = registry.FIGURES["fidelity/answers"].prepare(data)
    assert set(shown["method"]) == {"snapkv", "kivi"} and set(shown["tokens"]) == {10}


def test_a_layers_interval_is_over_prompts():
    kl = [0.1, 0.2, 0.4, 0.1, 0.3, 0.2, 0.5, 0.2]
    place = {"series": "snapkv", "task": "t", "text": "reference text", "layer": 3}
    data = fidelity._average_over_prompts(pd.DataFrame([place | {"kl": x} for x in kl]))
    (row,) = data.to_dict("records")
    assert row["n"] == 8 and row["kl"] == pytest.approx(0.25)
    assert (row["low"], row["high"]) == pytest.approx(stats.ratio_interval(np.array([(x, 1) for x in kl])))


def test_one_layer_diverges_less_than_all_and_a_layer_that_is_exact_not_at_all(folder):
    words = [*WORDS, "method=streamingllm,kivi", "kv_ratio=0.25", "bits=2", "residual=32", f"results={folder}"]
    words += ["method.streamingllm.frozen_layers=[0]"]
    source = measured.prepare(registry.FIGURES["fidelity/layers"], keys.parse_pairs(words))
    data = registry.FIGURES["fidelity/layers"].compute(source)
    table = data[data["text"] == "reference text"].pivot_table(index="layer", columns="series", values="kl")
    assert isinstance(table, pd.DataFrame) and list(table.index) == [-1, 0, 1, 2, 3, 4, 5]
    for series in table:
        assert table[series].drop(-1).max() < table.loc[-1, series]
        assert (table.loc[0, series] < 1e-9) == series.startswith("streamingllm")

"""Figures of divergences, measured on two texts: by budget, by position and by layer."""

import json
from pathlib import Path

import pandas as pd
import pytest

from kvbench.cli.main import main
from kvbench.papers.figures import measured, registry
from kvbench.plan import keys

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
    source = measured.prepare(registry.FIGURES["fidelity/budget"], keys.pairs(words))
    source.measure(quiet=True)
    data = registry.FIGURES["fidelity/budget"].compute(source)
    (ran,) = source.ran
    cell = next(c for c in ran.run.groups[0].cells if c.chain.stages)
    kl = [s.fidelity["reference"].kl for s in ran.run.store.samples(cell.id).values()]
    row = data[data["text"] == "reference text"].iloc[0]
    assert row["kl"] == pytest.approx(sum(map(sum, kl)) / sum(map(len, kl))) and row["n"] == len(kl) == 2
    positions = registry.FIGURES["fidelity/positions"].compute(source)
    first = positions[(positions["text"] == "reference text") & (positions["position"] == 4.5)].iloc[0]
    assert first["kl"] == pytest.approx(sum(sum(x[:8]) for x in kl) / 16)


def test_one_layer_diverges_less_than_all_and_a_layer_that_is_exact_not_at_all(folder):
    words = [*WORDS, "method=streamingllm,kivi", "kv_ratio=0.25", "bits=2", "residual=32", f"results={folder}"]
    words += ["method.streamingllm.frozen_layers=[0]"]
    source = measured.prepare(registry.FIGURES["fidelity/layers"], keys.pairs(words))
    data = registry.FIGURES["fidelity/layers"].compute(source)
    table = data[data["text"] == "reference text"].pivot_table(index="layer", columns="series", values="kl")
    assert isinstance(table, pd.DataFrame) and list(table.index) == [-1, 0, 1, 2, 3, 4, 5]
    for series in table:
        assert table[series].drop(-1).max() < table.loc[-1, series]
        assert (table.loc[0, series] < 1e-9) == series.startswith("streamingllm")

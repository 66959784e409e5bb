"""The worked examples of CONTRIBUTING.md run: a selector, a family that nobody tested, a metric, figures.

Those of a storage format, a dataset and a paper run in tests/storage/test_registry.py, tests/tasks/test_rowset.py and
tests/papers/test_new_paper.py.
"""

import json
import re
import sys

import pytest
import torch
import worked
import yaml

import kvbench.methods
from kvbench import metrics
from kvbench.cli.main import main
from kvbench.methods import registry
from kvbench.methods.resolve import chain_of
from kvbench.papers.figures import measured
from kvbench.papers.figures import registry as registry_of_figures

CACHES = registry.available, registry.defaults, registry._modules


@pytest.fixture
def keydiff(tmp_path, monkeypatch):
    """The selector of the page, as if its file lay in kvbench/methods."""
    monkeypatch.setattr(kvbench.methods, "__path__", [*kvbench.methods.__path__, str(tmp_path)])
    (tmp_path / "keydiff.py").write_text(worked.block("kvbench/methods/keydiff.py"))
    for known in CACHES:
        known.cache_clear()
    yield
    monkeypatch.undo()
    sys.modules.pop("kvbench.methods.keydiff", None)
    for known in CACHES:
        known.cache_clear()


def test_a_selector_is_one_file(keydiff, tmp_path, capsys):
    words = ["method=keydiff,keydiff+think", "kv_size=64", "keydiff.recent=4", "dataset=tiny/needle", "limit=2"]
    assert main(["run", *words, f"results={tmp_path / 'r'}", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    cells = {row["method"]: row["cells"][0] for row in report["rows"]}
    assert {c["status"] for c in cells.values()} == {"measured"}
    assert cells["keydiff kv_size=64 recent=4"]["kept"] == 64


def test_it_keeps_the_keys_that_differ_most_from_their_mean(keydiff):
    (stage,) = chain_of({"method": "keydiff", "kv_size": 2}).stages
    keys = torch.tensor([[[1.0, 0.0], [2.0, 0.1], [0.0, 1.0], [1.0, 0.05]]])
    unit = keys / keys.norm(dim=-1, keepdim=True)
    wanted = -torch.nn.functional.cosine_similarity(keys, unit.mean(dim=1, keepdim=True), dim=-1)
    segment = type("Segment", (), {"k": keys})()
    cache = type("Cache", (), {"segments": (segment,), "heads": 1})()
    torch.testing.assert_close(stage.scores(cache, None, None), wanted)
    assert wanted[0].argmax() == 2


def test_a_family_that_nobody_tested_runs_with_a_note(capsys):
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="Untested family"):
        exec(worked.block("families.py"), {})
    full, small = json.loads(capsys.readouterr().out)
    assert len(full) == len(small) == 4


def test_a_metric_is_a_function_and_a_line(monkeypatch):
    example = {}
    exec(worked.block("kvbench/metrics/first_word.py"), example)
    (line,) = re.findall(r"`(Metric\(.*?\)\))`", worked.PAGE.read_text("utf-8"))
    metric = eval(line, {"Metric": metrics.Metric, "_pair": metrics._pair, **example})
    monkeypatch.setattr(metrics, "METRICS", {**metrics.METRICS, metric.name: metric})
    assert metrics.metric("first_word").name == "first_word"
    assert example["first_word"]("Paris, of course", "Paris, France") == 1
    assert example["first_word"]("", "Paris") == 0


@pytest.mark.e2e("measures and draws figures")
def test_a_figure_is_a_few_lines_or_an_entry(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(worked.block("figure.py"), {})
    assert "<svg" in (tmp_path / "mine.svg").read_text()
    ((name, entry),) = yaml.safe_load(worked.block("kvbench/papers/figures/ours.yaml")).items()
    figure = registry_of_figures._figure(name, entry)
    source = measured.prepare(figure, ["dataset=tiny/needle", "limit=2", f"results={tmp_path}"])
    source.measure(quiet=True)
    paths, finding = figure.write(figure.compute(source), source.facts(), tmp_path)
    assert all(path.stat().st_size for path in paths) and "n = 2" in finding

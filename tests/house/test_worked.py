"""The worked examples of CONTRIBUTING.md and docs/own.md run: methods, a family that nobody tested, a metric, figures.

Those of a storage format, a dataset and a paper run in tests/storage/test_registry.py, tests/tasks/test_rowset.py and
tests/papers/test_new_paper.py.
"""

import json
import os
import re
import sys

import pytest
import torch
import yaml
from support import processes, worked
from support.families import build

import kvbench
from kvbench.base.example import Example
from kvbench.cli.main import main
from kvbench.methods.core import registry
from kvbench.papers.figures import measured
from kvbench.papers.figures import registry as registry_of_figures
from kvbench.tasks import metrics


@pytest.fixture
def towards(tmp_path, monkeypatch):
    """The selector of the page, as if its file lay in kvbench/methods."""
    monkeypatch.setattr(kvbench.methods, "__path__", [*kvbench.methods.__path__, str(tmp_path)])
    (tmp_path / "towards.py").write_text(worked.block("kvbench/methods/towards.py"))
    registry.forget_files()
    yield
    monkeypatch.undo()
    sys.modules.pop("kvbench.methods.towards", None)
    registry.forget_files()


def test_a_selector_is_one_file(towards, tmp_path, capsys):
    words = [
        "method=towards,towards+think",
        "kv_size=64",
        "towards.recent=4",
        "dataset=tiny/needle",
        "length=256",
        "limit=2",
    ]
    assert main(["run", *words, f"results={tmp_path / 'r'}", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    cells = {row["method"]: row["cells"][0] for row in report["rows"]}
    assert {c["status"] for c in cells.values()} == {"measured"}
    assert cells["towards kv_size=64 recent=4"]["kept"] == 64


def test_it_keeps_the_tokens_of_keydiff(towards):
    model, ids = build("llama"), torch.randperm(100, generator=torch.Generator().manual_seed(0)) + 3
    ours, keydiff = kvbench.prefill(model, ids, ["towards", "keydiff"], kv_size=20)
    for a, b in zip(ours.layers, keydiff.layers, strict=True):
        assert torch.equal(a.segments[0].positions, b.segments[0].positions)


def test_the_files_of_the_two_methods_are_there():
    (table,) = re.findall(r"^\| formula, .*?\n\n", worked.PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    root = worked.PAGE.parent
    paths = re.findall(r"`((?:methods|conf|tests|docs)/[\w/]+\.\w+|CHANGELOG\.md)`", table)
    assert len(paths) == 10
    assert all((root / p).exists() or (root / "kvbench" / p).exists() for p in paths)


@pytest.mark.e2e("runs a whole command line in a process")
def test_budgets_of_layers_and_heads_and_a_method_for_channels(tmp_path):
    """The methods of docs/own.md are measured, with the tokens and channels that the page names."""
    text = (worked.PAGE.parent / "docs" / "own.md").read_text("utf-8")
    blocks = dict(re.findall(r"`my_methods/(\w+)\.py`\n+```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    for name, code in blocks.items():
        (tmp_path / f"{name}.py").write_text(code)
    line = ["run", "method=strided,taper,pooled,snapkv+peaks,l2,newest", "kv_ratio=0.5", "ratio=0.5", "recent=0"]
    line += ["dataset=tiny/needle", "length=256", "limit=1", f"results={tmp_path}", "--json"]
    done = processes.run(*line, env={**os.environ, "KVBENCH_METHODS": str(tmp_path)})
    cells = {row["method"].split()[0]: row["cells"][0] for row in json.loads(done.stdout)["rows"]}
    # the page shows what is refused, too
    assert cells.pop("newest")["status"] == "refused"
    assert {cell["status"] for cell in cells.values()} == {"measured"}
    # scores.py holds a metric
    assert blocks.keys() <= {*cells, "newest", "peaks", "scores"}
    assert cells["taper"]["kept"] == cells["pooled"]["kept"] == 128
    # of keys and values, keys lose half of their channels
    assert cells["snapkv+peaks"]["payload"] == 0.75 * cells["strided"]["payload"]


def test_a_family_that_nobody_tested_runs_with_a_note(capsys):
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="Untested family"):
        exec(worked.block("families.py"), {})
    full, small = json.loads(capsys.readouterr().out)
    assert len(full) == len(small) == 4


def test_a_metric_is_a_function_and_a_line(monkeypatch):
    example = {}
    exec(worked.block("kvbench/tasks/metrics/first_word.py"), example)
    (line,) = re.findall(r"`(Metric\(.*?\)\))`", worked.PAGE.read_text("utf-8"))
    metric = eval(line, {"Metric": metrics.Metric, "by_pair": metrics.by_pair, **example})
    monkeypatch.setattr(metrics, "METRICS", {**metrics.METRICS, metric.name: metric})
    assert metrics.metric("first_word").name == "first_word"
    assert example["first_word"]("Paris, of course", "Paris, France") == 1
    assert example["first_word"]("", "Paris") == 0


def test_a_metric_of_ones_own_is_a_file(tmp_path, monkeypatch, capsys):
    page = (worked.PAGE.parent / "docs" / "own.md").read_text("utf-8")
    (code,) = re.findall(r"^`my_methods/scores.py`\n\n```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (words,) = re.findall(r"^KVBENCH_METHODS=my_methods kvbench (run .*metric=.*)$", page, re.MULTILINE)
    monkeypatch.setenv("KVBENCH_METHODS", str(tmp_path / "my_methods"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_methods").mkdir()
    (tmp_path / "my_methods" / "scores.py").write_text(code)
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "the number is 471.", "answers": ["471"]}))
    assert main([*words.split(), "max_new_tokens=2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [column["metric"] for column in report["columns"]] == ["scores.py:close_number"]
    example = Example(id="", prompt="", answers=("100",), max_new_tokens=1)
    scores = [metrics.score("scores.py:close_number", text, example) for text in ("about 104.5", "94", "many")]
    assert scores == [1.0, 0.0, 0.0]


@pytest.mark.e2e("measures and draws figures")
def test_a_figure_is_a_few_lines_or_an_entry(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(worked.block("figure.py"), {})
    assert "<svg" in (tmp_path / "mine.svg").read_text()
    ((name, entry),) = yaml.safe_load(worked.block("kvbench/papers/figures/ours.yaml")).items()
    figure = registry_of_figures._build_figure(name, entry)
    source = measured.prepare(figure, {"dataset": "tiny/needle", "limit": "2", "results": str(tmp_path)})
    source.measure(quiet=True)
    paths, finding = figure.write(figure.compute(source), source.facts(), tmp_path)
    assert all(path.stat().st_size for path in paths) and "n = 2" in finding

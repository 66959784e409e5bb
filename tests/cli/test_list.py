"""`list`: ten lines that say what there is, and a line for each method, dataset and model."""

import json
import re

import pytest
from support import worked

from kvbench.cli.main import main
from kvbench.methods.core import kinds, registry


def lines(arguments, capsys):
    assert main(arguments) == 0
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 100
    return shown


def test_without_a_kind_it_counts(capsys, tmp_path):
    shown = lines(["list", f"results={tmp_path}"], capsys)
    assert len(shown) <= 12
    counts = {line.split()[0]: int(line.split()[1]) for line in shown if re.match(r"  \w+ +\d", line)}
    assert counts["methods"] == len(registry.available()) and counts["runs"] == 0
    assert any("ready on this machine" in line and "tiny" in line for line in shown)
    assert "kvbench list methods" in shown[-1]


def test_methods_have_a_line_each_below_their_kind(capsys):
    shown = lines(["list", "methods"], capsys)
    headings = [line.partition(" (")[0].rstrip(":") for line in shown if line.endswith(":")]
    assert headings == list(kinds.METHODS)
    listed = [line.split()[0] for line in shown if line.startswith("  ")]
    assert sorted(listed) == sorted(registry.available())
    assert not any("decode_budget" in line or "arXiv" in line for line in shown)
    assert any("share of tokens kept" in line for line in shown)
    assert any("share of channels removed" in line for line in shown)


def test_every_method_of_kvbench_has_a_kind():
    known = [method for methods in kinds.METHODS.values() for method in methods]
    assert len(known) == len(set(known))
    assert set(known) == {method for method in registry.available() if kinds.kind_of(method) != kinds.YOURS}
    assert kinds.kind_of("kvpress:snapkv") == kinds.OTHERS


def test_ones_own_method_is_described_by_its_docstring(tmp_path, capsys, monkeypatch):
    path = tmp_path / "towards.py"
    path.write_text(worked.block("kvbench/methods/towards.py").replace('id: ClassVar[str] = "towards"', 'id = "mine"'))
    monkeypatch.setattr("kvbench.methods.__path__", [*__import__("kvbench.methods").methods.__path__, str(tmp_path)])
    registry.forget_files()
    try:
        shown = lines(["list", "methods"], capsys)
    finally:
        monkeypatch.undo()
        registry.forget_files()
    assert "yours:" in shown
    assert any(line.startswith("  mine ") and "Keep the tokens whose keys point away" in line for line in shown)


@pytest.mark.parametrize("kind", ["models", "datasets"])
def test_those_on_this_machine_come_first(kind, capsys):
    shown = lines(["list", kind], capsys)
    assert shown[2] == "ready:"
    listed = [line.split()[0] for line in shown if line.startswith("  ")]
    assert "hf" not in listed and len(listed) == int(shown[0].split()[0])
    tiny = next(i for i, line in enumerate(shown) if line.startswith("  tiny "))
    absent = [i for i, line in enumerate(shown) if line == "not on this machine:"]
    assert all(tiny < i for i in absent)
    assert not any("architecture" in line for line in shown)


def test_json_keeps_everything(capsys):
    assert main(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {"methods", "datasets", "models", "metrics", "presets", "figures"} == listed.keys()
    (llama,) = [m for m in listed["models"] if m["id"] == "llama2-7b"]
    assert "architecture" in llama["knobs"]
    (snapkv,) = [m for m in listed["methods"] if m["id"] == "snapkv"]
    assert snapkv["knobs"]["window"] == 32 and "arXiv 2404.14469" in snapkv["about"]


def test_show_of_nothing_says_what_to_run(tmp_path, capsys):
    assert main(["show", "method=pyramidkv", f"results={tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert said == (
        f"nothing measured yet for method=pyramidkv results={tmp_path}. Measure it:\n"
        f"kvbench run method=pyramidkv results={tmp_path}\n"
    )


def test_model_list_and_model_status_are_the_same(capsys):
    assert main(["model", "list", "tiny"]) == 0
    listed = capsys.readouterr().out
    assert main(["model", "status", "tiny"]) == 0
    assert capsys.readouterr().out == listed and "embedded" in listed

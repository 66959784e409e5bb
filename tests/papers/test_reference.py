"""The reference page: every preset value with its source, every table with what of it can be reproduced."""

import json

from kvbench.cli.main import main
from kvbench.papers.report import reference
from kvbench.papers.spec import catalogue
from kvbench.papers.spec.published_cells import read_published
from kvbench.plan import presets


def entry(paper, number):
    return next(e for e in catalogue.read_paper(paper).entries if e.id == number)


def test_every_value_of_every_preset_is_there_with_its_source():
    page = reference.write_markdown(catalogue.choose_papers("all"))
    names = {paper.preset for paper in catalogue.choose_papers("all")} - {""}
    assert names == {*presets.available()} - {"kvpress"}  # which is no paper's
    for name in names:
        for setting in presets.settings(name):
            row = next(line for line in page.splitlines() if line.startswith(f"| {setting.key} |"))
            assert row.count("|") == 5
            assert setting.source and f"| {setting.source} |" in page


def test_what_can_be_reproduced():
    book = read_published()
    assert reference.describe_reproduction(entry("think", "figure1"), book) == "a drawing"
    assert "without a model: averages, the memory column (32 values, 0 off)" in reference.describe_reproduction(
        entry("think", "7"), book
    )
    assert (
        reference.describe_reproduction(entry("refreekv", "4"), book)
        == "with llama3-8b-instruct, mistral-7b-instruct-v0.3"
    )
    assert "not here: accelerate, deepspeed" in reference.describe_reproduction(entry("qhitter", "2"), book)
    assert reference.describe_reproduction(entry("uncomp", "1"), book).endswith("; not here: mistral-7b-instruct")


def test_the_verb(capsys):
    assert main(["reference", "think"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    assert "snapkv.window=32" in shown and "table 12" in shown and "does not hold" in shown
    assert main(["reference", "thinc"]) == 2
    assert "Did you mean think" in capsys.readouterr().err


def test_the_verb_as_json(capsys):
    assert main(["reference", "vatp", "--json"]) == 0
    (paper,) = json.loads(capsys.readouterr().out)
    assert (paper["paper"], paper["preset"]["name"]) == ("vatp", "vatp")
    assert [s["key"] for s in paper["settings"]] == [s.key for s in presets.settings("vatp")]
    assert [e["title"] for e in paper["entries"]] == [e.title for e in catalogue.read_paper("vatp").entries]
    assert all(s["verdict"] for s in paper["statements"])

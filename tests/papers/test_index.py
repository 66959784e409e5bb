"""The index of tables and figures, and that the cells are those of the papers' pages."""

import random
import re
from dataclasses import replace

import pytest
from support.papers_text import text_of

from kvbench.base.errors import KvbenchError, UsageError
from kvbench.cli.main import main
from kvbench.papers.spec import catalogue
from kvbench.papers.spec.published import load_table, table_ids
from kvbench.papers.spec.published_cells import read_published

TABLES = {"think": 12, "refreekv": 12, "uncomp": 10, "vatp": 5, "qhitter": 3}
FIGURES = {"think": 7, "refreekv": 3, "uncomp": 6, "vatp": 3, "qhitter": 10}


def test_every_table_and_figure_is_there():
    for name in catalogue.paper_ids():
        entries = catalogue.read_paper(name).entries
        assert [e.id for e in entries if e.id.isdigit()] == [str(i + 1) for i in range(TABLES[name])]
        assert [e.id for e in entries if e.is_figure] == [f"figure{i + 1}" for i in range(FIGURES[name])]
        assert all(e.title and not e.title.endswith(".") for e in entries)
        assert all(e.cells for e in entries if not e.is_figure)
    listed = {(p, e.id) for p in catalogue.paper_ids() for e in catalogue.read_paper(p).entries if not e.is_figure}
    assert listed == set(table_ids()) and sum(t.isdigit() for _, t in listed) == 42


def test_counts():
    entry = next(e for e in catalogue.read_paper("uncomp").entries if e.id == "10")
    assert entry.count_cells() == {"published": 54, "suspect": 0, "repaired": 0, "missing": 6}
    # one cell of it is both
    entry = next(e for e in catalogue.read_paper("think").entries if e.id == "4")
    assert entry.count_cells() == {"published": 34, "suspect": 17, "repaired": 2, "missing": 0}
    assert (
        sum(len(e.cells) for p in catalogue.choose_papers("all") for e in p.entries)
        == len(read_published().cells)
        == 5403
    )


def test_cells_keep_what_is_printed():
    cells = {(c.dataset, c.metric): c for c in load_table("vatp", "5")}
    assert cells["trec", "metric_name"].printed == "Accuracy (CLS)" and cells["trec", "metric_name"].value is None
    assert (cells["trec", "n_samples"].value, cells["trec", "n_samples"].row) == (200, 10)
    text = load_table("think", "text")
    assert text[0].settings == {"seq": "2048", "batch": "13"}
    double = next(c for c in load_table("think", "4") if len(c.flags) == 2)
    assert set(double.flags) == {"suspect", "repaired"} and double.certainty == "suspect"


def test_names_that_are_none(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"unknown paper thinc. Did you mean think"):
        catalogue.read_paper("thinc")
    with pytest.raises(UsageError, match=r"unknown table think/13"):
        load_table("think", "13")
    (tmp_path / "x").mkdir()
    page = "title: X\nsource: S\npreset: think\ntables:\n  '1': {title: T, kind: odd}\nfigures: {}\n"
    (tmp_path / "x" / "paper.yaml").write_text(page)
    monkeypatch.setattr("kvbench.papers.DATA", tmp_path)
    monkeypatch.setattr(catalogue, "paper_ids", lambda: ("x",))
    with pytest.raises(KvbenchError, match="tables 1 needs a kind of quality"):
        catalogue.read_paper("x")


def test_list_tables(capsys):
    assert main(["list", "tables"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"uncomp/10 +efficiency: .*\(54 published,\s+6 missing;\s+tiny: 60 measured\)", shown)
    assert "think/fig6" in shown and "qhitter/figure10" in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert main(["list"]) == 0
    assert "think/fig6" not in capsys.readouterr().out


LABELS = {
    "full": r"full|vanilla|all kv|all budget|100%",
    "h2o": r"h2o|h_2o|h ?₂ ?o|s_o",
    "snapkv": r"snapkv",
    "streamingllm": r"slm|streamllm|streamingllm",
    "pyramidkv": r"pyramid",
    "scissorhands": r"scissorhand|\b(50|25)%",
    "twilight": r"twi",
    "refreekv": r"ours|refreekv|att|budget",
    "vatp": r"vatp|\b(50|25)%|l_?1|ℓ",
    "think": r"think",
    "thinkv": r"thinkv",
    "l1": r"l_1",
    "l2": r"l_2",
    "uncomp-group": r"ours|group|top",
    "uncomp-stage": r"ours-group-stage",
    "quant": r"4 bits|s_q|bit",
    "qhitter": r"ours",
}
"""How the papers write each method, in lower case."""
ABOVE = 14


def near_its_label(cell, lines):
    """Whether a line holds the printed value, and it or one of those above it the row's label."""
    name = cell.method.rpartition("+")[2]
    label = LABELS.get(name, re.escape(name)) if name else re.escape(cell.dataset[:3])
    shown = re.escape(f"{int(cell.printed):,}" if cell.metric == "avg_len" else cell.printed.removesuffix(".0"))
    value = re.compile(rf"(?<![\d.]){shown}0*(?!\d)")
    near = re.compile(label)
    rows = (i for i, line in enumerate(lines) if value.search(line))
    return any(near.search("\n".join(lines[max(0, i - ABOVE) : i + 1])) for i in rows)


@pytest.mark.parametrize("paper", catalogue.paper_ids())
def test_certain_cells_stand_in_the_paper_near_their_row_label(paper):
    lines = text_of(paper).lower().splitlines()
    certain = [
        c
        for c in read_published().cells
        if c.paper == paper and c.table.isdigit() and not c.flag and c.value is not None
    ]
    chosen = random.Random(0).sample(certain, min(50, len(certain)))
    lost = [c for c in chosen if not near_its_label(c, lines)]
    assert not lost, [(c.table, c.method, c.dataset, c.printed) for c in lost]
    # a value that is not there is not found, but where another cell happens to have it
    others = [replace(c, printed=f"{c.value + 0.07:.2f}", metric="") for c in chosen]
    assert sum(near_its_label(c, lines) for c in others) < len(others) / 4

"""A paper's table: our side beside the printed one, in every format, traced to the store's lines."""

import csv
import io
import json
import re

import pytest

from kvbench import presets
from kvbench.cli.main import main
from kvbench.cli.rewrite import rewrite
from kvbench.config import compose_config, parse
from kvbench.papers import declared, grid, measured, page, standin
from kvbench.papers.declared import Column
from kvbench.papers.view import view
from kvbench.store_files import line_of

MEASURED = [t.id for t in declared.find("all") if t.measurable]
SMALL = ["limit=2", "length=256", "dataset.tiny.examples=2"]


def table(name):
    return declared.load(*name.split("/"))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """think/4 on the tiny model, two short examples a task."""
    folder = tmp_path_factory.mktemp("results")
    assert main(["table", "think/4", f"results={folder}", *SMALL]) == 0
    return folder


def shown(capsys, *arguments):
    capsys.readouterr()
    status = main(["table", *arguments])
    return status, capsys.readouterr().out


def test_all_tables_of_the_papers_are_declared():
    assert len(declared.ids()) == 42
    assert {t.paper for t in declared.find("all")} == set(declared.PAPERS)
    assert all(t.title and t.rows and t.columns for t in declared.find("all"))


@pytest.mark.parametrize("name", MEASURED)
def test_every_row_of_every_measured_table_runs_on_the_stand_in(name, tmp_path):
    ours = measured.prepare(table(name), "tiny", [f"results={tmp_path}", "limit=1"])
    assert [line.refused for line in ours.lines if line.refused] == []
    assert all(ours.cell(line, c) for line in ours.lines for c in ours.declared.scores)


def test_a_row_is_what_run_would_make_of_the_same_words(tmp_path):
    ours = measured.prepare(table("think/2"), "tiny", [f"results={tmp_path}", "limit=1"])
    line = next(x for x in ours.lines if x.row.name == "snapkv+think kv_size=512;ratio=0.4")
    windows = ["method.snapkv.window=4", "method.think.recent=4", "method.think.observed=4"]
    typed = rewrite(["preset=think", "method=snapkv+think", "kv_size=64", "ratio=0.4", *windows])
    assert parse(compose_config(typed.runs[0])).chains[0].chain == line.chain


def test_on_a_model_of_the_paper_numbers_are_those_printed():
    values = presets.values("think", "llama3-8b-instruct")
    row = next(r for r in table("think/2").rows if r.name == "snapkv+think kv_size=512;ratio=0.4")
    chain = measured._line(table("think/2"), row, values, None).chain
    assert chain.selector.kv_size == 512
    assert chain.selector.window == 32


def test_averages_follow_from_the_cells_and_a_stated_one_that_differs_is_kept():
    seen = view(measured.printed(table("think/4"), "tiny", "not run"))
    line, entries = next(x for x in seen.rows if x[0].row.method == "kivi+think")
    cells = [line.row.cells[c.name].value for c in seen.ours.declared.scores]
    assert entries[-1].published == pytest.approx(sum(cells) / 16)
    assert round(entries[-1].published, 2) == 31.67
    assert entries[-1].stated == 31.77


def test_relative_averages_are_those_of_refreekv():
    seen = view(measured.printed(table("refreekv/2"), "tiny", "not run"))
    line, entries = next(x for x in seen.rows if x[0].row.method == "refreekv" and "llama" in x[0].row.model)
    full = seen.ours.declared.full_row(line.row.model)
    shares = [line.row.cells[c.name].value / full.cells[c.name].value for c in seen.ours.declared.scores]
    assert entries[-1].published == pytest.approx(100 * sum(shares) / len(shares) - 100)


def test_the_stand_in_maps_every_dataset_and_counts_each_task_once(store, tmp_path):
    ours = measured.prepare(table("think/4"), "tiny", [f"results={store}", *SMALL])
    seen = view(ours)
    assert len(set(ours.tasks.values())) == 6
    _, entries = seen.rows[0]
    distinct = {ours.tasks[c.dataset]: e.ours for c, e in zip(seen.columns[:-1], entries, strict=False)}
    assert entries[-1].ours == pytest.approx(sum(distinct.values()) / 6)
    assert "needle for narrativeqa, qasper, multifieldqa_en" in page.render(seen, "md")
    assert standin.task_of("gsm8k") == "hop"


def test_shares_are_paired_with_the_full_cache(store):
    ours = measured.prepare(table("think/4"), "tiny", [f"results={store}", *SMALL])
    column = ours.declared.scores[3]
    line, entries = view(ours).rows[0]
    entry = entries[3]
    _, cell = ours.cell(line, column)
    scores = [s["score"] for s in ours.run.store.samples(cell.id).values()]
    full = [s["score"] for s in ours.run.store.samples(ours.full(column)[1].id).values()]
    assert entry.relative == pytest.approx(100 * sum(scores) / sum(full))
    assert entry.published_relative == pytest.approx(
        100 * entry.published / declared.load("think", "12").full_row("llama-2-7b-chat").cells[column.name].value
    )


@pytest.mark.parametrize("show", grid.SHOWS)
@pytest.mark.parametrize("style", ["text", "md", "latex", "html"])
def test_every_view_in_every_format(store, capsys, style, show):
    arguments = ["think/4", f"results={store}", *SMALL, "--stored", "--format", style, "--show", show]
    _, out = shown(capsys, *arguments)
    assert "kivi+think" in out
    if style == "text":
        assert max(map(len, out.splitlines())) <= 100
    if style == "latex":
        assert out.count(r"\begin{tabular}") == out.count(r"\end{tabular}") == 1
        assert not re.search(r"\\\\\[", out)


def test_csv_has_one_line_per_cell(store, capsys):
    _, out = shown(capsys, "think/4", f"results={store}", *SMALL, "--stored", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert len(rows) == 2 * 17
    assert {r["status"] for r in rows} == {"measured"}
    assert all(r["stand_in"] == "tiny" and r["delta"] == "" for r in rows)


def test_a_number_traces_to_its_lines(store, capsys):
    _, out = shown(capsys, "think/4", f"results={store}", *SMALL, "--stored", "--trace", "kivi bits=2/2", "hotpotqa")
    cell = re.search(r"cell (\w{16})", out)[1]
    lines = [json.loads(x) for x in (store / "cells" / cell / "samples-0.jsonl").read_text().splitlines()]
    assert all(line["id"] in out for line in lines)


def test_another_score_changes_exactly_the_cells_that_hold_it(store, tmp_path, capsys):
    arguments = [*SMALL, "--stored", "--format", "csv"]
    _, before = shown(capsys, "think/4", f"results={store}", *arguments)
    ours = measured.prepare(table("think/4"), "tiny", [f"results={store}", *SMALL])
    line = ours.lines[0]
    _, cell = ours.cell(line, Column("lcc", declared.SCORE))
    path = store / "cells" / cell.id / "samples-0.jsonl"
    old = path.read_text()
    first, *rest = old.splitlines(keepends=True)
    sample = {k: v for k, v in json.loads(first).items() if k != "crc"}
    path.write_text("".join([line_of({**sample, "score": 0.125}), *rest]))
    _, after = shown(capsys, "think/4", f"results={store}", *arguments)
    path.write_text(old)
    changed = {
        (a["method"], a["column"])
        for a, b in zip(*(csv.DictReader(io.StringIO(x)) for x in (before, after)), strict=True)
        if a != b
    }
    assert changed == {("kivi", "lcc"), ("kivi", "repobench-p"), ("kivi", "avg")}


def test_nothing_stored_shows_dashes(tmp_path, capsys):
    status, out = shown(capsys, "think/4", f"results={tmp_path}", "--stored")
    assert status == 0
    assert "—" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["think/99"], "unknown table"),
        (["thick/1"], "unknown paper"),
        (["think/4", "method=h2o"], "method=h2o is not possible here"),
        (["think/4", "--show", "all"], "--show"),
        (["think/4", "--format", "pdf"], "--format"),
        (["think", "--trace", "a", "b"], "--trace needs one table"),
        (["think/4", "--stored", "--trace", "nothing", "lcc"], "unknown row"),
        (["think/4", "--stored", "--trace", "kivi bits=2/2", "nothing"], "unknown column"),
        (["think/4", "model=nowhere/absent"], "download=true"),
    ],
)
def test_bad_requests_name_what_is_wrong(arguments, message, tmp_path, capsys):
    assert main(["table", *arguments[:1], f"results={tmp_path}", *arguments[1:]]) == 2
    assert message in capsys.readouterr().err


def test_the_printed_side_needs_no_model(capsys):
    status, out = shown(capsys, "refreekv/2", "model=llama3-8b-instruct", "--show", "published")
    assert status == 0
    assert "75.28" in out
    assert "24.46?" in out

"""A paper's table: our side beside the printed one, in every format, traced to the store's lines."""

import csv
import io
import json
import re
import shutil
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest

from kvbench.base.files import format_line
from kvbench.cli.main import main
from kvbench.methods.core.chain import Chain
from kvbench.papers.measured import coverage, page, plan, text, trace
from kvbench.papers.measured.cells import read_cells
from kvbench.papers.spec import catalogue, stand_ins, table_spec
from kvbench.papers.spec.table_spec import Column
from kvbench.plan import presets, words
from kvbench.plan.config import parse
from kvbench.tasks.metrics import stats

pytestmark = pytest.mark.e2e("reads every table")

MEASURED = [t.id for t in table_spec.find_tables("all") if t.measurable]
SMALL = ["limit=2", "length=256", "dataset.tiny.examples=2"]


def table(name):
    return table_spec.load(*name.split("/"))


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
    assert len(table_spec.table_ids()) == 42
    assert {t.paper for t in table_spec.find_tables("all")} == set(catalogue.paper_ids())
    assert all(t.title and t.rows and t.columns for t in table_spec.find_tables("all"))


@pytest.mark.parametrize("name", MEASURED)
def test_every_row_of_every_measured_table_runs_on_the_stand_in(name, tmp_path):
    ours = plan.prepare(table(name), "tiny", [f"results={tmp_path}", "limit=1"])
    assert [line.refused for line in ours.lines if line.refused] == []
    cells = [ours.find_parts(line, c) for line in ours.lines for c in ours.spec.scores]
    assert all(len(actual) == 1 for actual in cells)
    assert len({actual[0][1].id for actual in cells}) == len(cells)  # each cell once


def test_a_row_is_what_run_would_make_of_the_same_words(tmp_path):
    ours = plan.prepare(table("think/2"), "tiny", [f"results={tmp_path}", "limit=1"])
    line = next(x for x in ours.lines if x.name == "snapkv+think kv_size=64;ratio=0.4")
    windows = ["method.snapkv.window=4", "method.think.recent=4", "method.think.observed=4"]
    typed = words.read(["preset=think", "method=snapkv+think", "kv_size=64", "ratio=0.4", *windows])
    assert parse(typed[0]).chains[0].chain == line.chain


def test_on_a_model_of_the_paper_numbers_are_those_printed():
    values = presets.values("think", "llama3-8b-instruct")
    row = next(r for r in table("think/2").rows if r.name == "snapkv+think kv_size=512;ratio=0.4")
    chain = plan._build_line(table("think/2"), row, values, size=None)["chain"]
    assert chain.selector.kv_size == 512
    assert chain.selector.window == 32


def test_averages_follow_from_the_cells_and_a_stated_one_that_differs_is_kept():
    seen = read_cells(plan.make_printed_table(table("think/4"), "tiny", "not run"))
    line = next(x for x in seen.lines if x.method == "kivi+think")
    average = seen.pairs_of(line)[-1]
    cells = [line.printed[c.name].value for c in seen.spec.scores]
    assert average.paper_value == pytest.approx(sum(cells) / 16)
    assert round(average.paper_value, 2) == 31.67
    assert average.paper_stated == 31.77


def test_relative_averages_are_those_of_refreekv():
    seen = read_cells(plan.make_printed_table(table("refreekv/2"), "tiny", "not run"))
    line = next(x for x in seen.lines if x.method == "refreekv" and "llama" in x.model)
    full = seen.spec.full_row(line.model)
    shares = [line.printed[c.name].value / full.cells[c.name].value for c in seen.spec.scores]
    assert seen.pairs_of(line)[-1].paper_value == pytest.approx(100 * sum(shares) / len(shares) - 100)


def test_the_papers_own_full_row_has_an_average_that_is_right():
    seen = read_cells(plan.make_printed_table(table("refreekv/8"), "tiny", "not run"))
    full = [seen.pairs_of(line)[-1] for line in seen.lines if line.method == "full"]
    assert [(e.paper_value, e.paper_stated) for e in full] == [(100, None)] * 3
    wrong = read_cells(plan.make_printed_table(table("refreekv/2"), "tiny", "not run"))
    assert sum(e.paper_stated is not None for e in wrong.pairs) == 8


def test_printed_shares_are_averaged_as_printed():
    seen = read_cells(plan.make_printed_table(table("refreekv/1"), "tiny", "not run"))
    line = seen.lines[3]
    entries = seen.pairs_of(line)
    assert line.name == "h2o budget=0.2"
    assert [e.paper_share for e in entries[:-1]] == [3.2, 8.5, 96.5]
    assert entries[-1].paper_value == pytest.approx((3.2 + 8.5 + 96.5) / 3)
    assert entries[-1].paper_stated is None  # 36.1 is 36.07, rounded
    assert "3.2 ✓" in page.render(seen, show="published")


def test_the_interval_of_an_average_of_equal_scores_is_not_a_point():
    ones = np.ones((10, 2))
    share, (low, high) = stats.share_of_full([ones, ones])
    assert (share, high) == (100, 100)
    assert low == pytest.approx(100 * 0.025 ** (1 / 20))


def test_the_share_of_a_perplexity_has_an_interval():
    losses = np.array([[2.0, 1.9], [3.0, 2.8], [2.5, 2.5], [2.2, 2.1], [2.9, 2.6]] * 2)
    share, (low, high) = stats.share_of_full([losses], log_losses=True)
    assert share == pytest.approx(100 * np.exp((losses[:, 1] - losses[:, 0]).mean()))
    assert low < share < high < 100


def test_tiny_shows_its_own_tasks_each_once(store):
    ours = plan.prepare(table("think/4"), "tiny", [f"results={store}", *SMALL])
    seen = read_cells(ours)
    assert [c.name for c in seen.columns] == ["needle", "hop", "listing", "labels", "multikey", "code", "avg"]
    entries = seen.pairs_of(seen.lines[0])
    assert entries[-1].value == pytest.approx(sum(e.value for e in entries[:-1]) / 6)
    assert all(e.paper_value is None for e in seen.pairs)
    assert "needle for narrativeqa, qasper, multifieldqa_en" in page.render(seen, "md")
    assert stand_ins.choose_tiny_task("gsm8k", ours.spec) == "hop"


def test_rows_that_are_one_chain_on_tiny_stand_there_once(tmp_path):
    ours = plan.prepare(table("qhitter/3"), "tiny", [f"results={tmp_path}", "limit=1"])
    assert [line.name for line in ours.lines] == ["full", "h2o+quant bits=4", "qhitter bits=4"]
    counted = coverage.count_cells(read_cells(ours))
    assert [counted[state] for state in coverage.STATES] == ["0", "0", "6"]


def test_shares_are_paired_with_the_full_cache(store):
    ours = plan.prepare(table("think/4"), "tiny", [f"results={store}", *SMALL])
    column = ours.spec.scores[3]
    line = ours.lines[0]
    entries = read_cells(ours).pairs_of(line)
    ((_, cell),), ((_, full_cache),) = ours.find_parts(line, column), ours.find_parts(line, column, Chain())
    scores = [s["score"] for s in ours.run.store.lines(cell.id).values()]
    full = [s["score"] for s in ours.run.store.lines(full_cache.id).values()]
    assert entries[3].share == pytest.approx(100 * sum(scores) / sum(full))


@pytest.mark.parametrize("show", text.SHOWS)
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


@pytest.mark.parametrize("name", ["refreekv/1", "refreekv/10", "uncomp/5", "think/4", "think/10"])
def test_latex_has_no_sign_that_its_fonts_lack(name):
    ours = plan.make_printed_table(table(name), "tiny", "")
    latex = page.render(read_cells(ours), "latex", "both" if ours.timings else "published")
    lines = [line for line in latex.splitlines() if not line.startswith("%")]
    assert all(line.isascii() for line in lines)
    assert not any(re.search(r"(?<!\\)[%_#]", line) for line in lines)
    assert (r"\checkmark" in latex) == (name not in ("think/4", "think/10"))


def test_notes_say_what_the_view_shows(store):
    seen = read_cells(plan.prepare(table("think/4"), "tiny", [f"results={store}", *SMALL]))
    notes = {show: " ".join(text.write_notes(seen, show)) for show in (*text.SHOWS, "beside")}
    assert [show for show in notes if "Per cent of the full cache" in notes[show]] == ["share"]
    assert [show for show in notes if "Our score, in brackets the published one" in notes[show]] == ["both"]
    assert "n = " not in notes["published"]
    assert text.write_title(seen, "published").endswith("as printed")
    as_printed = read_cells(plan.make_printed_table(table("think/4"), "tiny", ""))
    printed = " ".join(text.write_notes(as_printed, "published"))
    assert "suspect" in printed and "stated: the average that the paper states" in printed


def test_groups_of_tasks_stand_over_their_columns():
    seen = read_cells(plan.make_printed_table(table("think/4"), "tiny", ""))
    lines = page.render(seen, "text", "published").splitlines()
    above, names = next((a, b) for a, b in pairwise(lines) if "single-document QA" in a)
    rule = next(line for line in lines[lines.index(names) :] if line.startswith("─"))
    names = lines[lines.index(rule) - 1]
    start = above.index("single-document QA")
    assert names.index("narrativeqa") <= start < start + len("single-document QA") <= names.index("hotpotqa")
    assert above.index("multi-document QA") >= names.index("hotpotqa")
    assert "|  | *single-document QA* |  |  | *multi-document QA* |" in page.render(seen, "md")
    assert '<th colspan="3">few-shot</th>' in page.render(seen, "html")
    assert "\x1b[1m" in page.render(seen, "text", "published", terminal=True)
    assert "\x1b" not in page.render(seen, "text", "published")


def test_groups_of_one_column_each_are_left_out(tmp_path):
    seen = read_cells(plan.prepare(table("uncomp/2"), "tiny", [f"results={tmp_path}", "limit=1"]))
    assert not any(text.format_cells(seen, "both").groups)
    for name in ("refreekv/2", "refreekv/8", "think/1", "vatp/1"):  # names of groups in folded pieces
        lines = page.render(read_cells(plan.make_printed_table(table(name), "tiny", "")), "text").splitlines()
        assert any("summarisation" in line for line in lines)
        assert max(map(len, lines)) <= 100


def test_csv_has_one_line_per_cell(store, capsys):
    _, out = shown(capsys, "think/4", f"results={store}", *SMALL, "--stored", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert len(rows) == 2 * 7
    assert {r["status"] for r in rows} == {"measured"}
    assert all(r["stand_in"] == "tiny" and r["delta"] == "" for r in rows)


def test_json_has_what_csv_has_and_the_notes(store, capsys):
    arguments = ["think/4", f"results={store}", *SMALL, "--stored"]
    rows = list(csv.DictReader(io.StringIO(shown(capsys, *arguments, "--format", "csv")[1])))
    status, out = shown(capsys, *arguments, "--json")
    result = json.loads(out)
    assert status == 0 and result["table"] == "think/4" and "tiny (substitute model), n = " in result["title"]
    assert [{k: str(v) for k, v in c.items()} for c in result["cells"]] == [
        {k: v for k, v in row.items() if v} for row in rows
    ]
    ours = plan.prepare(table("think/4"), "tiny", [f"results={store}", *SMALL])
    assert len(result["notes"]) > 2 and result["notes"] == text.write_notes(read_cells(ours))
    both = json.loads(shown(capsys, "vatp", f"results={store}", *SMALL, "--stored", "--json")[1])
    assert [t["table"] for t in both] == [t.id for t in table_spec.find_tables("vatp")]
    assert main(["table", "think/4", "--json", "--plan"]) == 2 and "leave it out with" in capsys.readouterr().err


def test_a_number_traces_to_its_lines(store, capsys):
    _, out = shown(capsys, "think/4", f"results={store}", *SMALL, "--stored", "--trace", "kivi bits=2", "hop")
    cell = re.search(r"result (\w{16})", out)[1]
    lines = [json.loads(x) for x in (store / "cells" / cell / "samples-0.jsonl").read_text().splitlines()]
    assert all(line["id"] in out for line in lines)


def test_an_average_traces_to_its_cells(store, capsys):
    arguments = ["think/4", f"results={store}", *SMALL, "--stored"]
    _, out = shown(capsys, *arguments, "--trace", "kivi bits=2", "avg")
    ours = plan.prepare(table("think/4"), "tiny", [f"results={store}", *SMALL])
    seen = read_cells(ours)
    cells = {c.id for column in ours.spec.scores for _, c in ours.find_parts(ours.lines[0], column)}
    assert len(cells) == 6
    assert all(out.count(f"result {cell}") == 1 for cell in cells)
    average = seen.pairs_of(seen.lines[0])[-1]
    assert f"shown: {average.value:.6g}, {average.share:.6g} % of its full cache" in out


def test_of_rows_with_one_name_the_one_that_is_run_is_traced(tmp_path):
    ours = plan.prepare(table("think/4"), "tiny", [f"results={tmp_path}", "limit=1"])
    line = ours.lines[0]
    skipped = ours.rows.iloc[[0]].assign(chain=None, skipped="another model")
    rows = pd.concat([skipped, ours.rows], ignore_index=True)
    out = trace.trace_number(replace(ours, rows=rows), line.name, "hop")
    assert f"result {ours.find_parts(line, Column('hop', table_spec.SCORE))[0][1].id}" in out


def test_another_score_changes_exactly_the_cells_that_hold_it(store, tmp_path, capsys):
    arguments = [*SMALL, "--stored", "--format", "csv"]
    _, before = shown(capsys, "think/4", f"results={store}", *arguments)
    ours = plan.prepare(table("think/4"), "tiny", [f"results={store}", *SMALL])
    line = ours.lines[0]
    ((_, cell),) = ours.find_parts(line, Column("code", table_spec.SCORE))
    path = store / "cells" / cell.id / "samples-0.jsonl"
    old = path.read_text()
    first, *rest = old.splitlines(keepends=True)
    sample = {k: v for k, v in json.loads(first).items() if k != "crc"}
    path.write_text("".join([format_line({**sample, "score": 0.125}), *rest]))
    _, after = shown(capsys, "think/4", f"results={store}", *arguments)
    path.write_text(old)
    changed = {
        (a["method"], a["column"])
        for a, b in zip(*(csv.DictReader(io.StringIO(x)) for x in (before, after)), strict=True)
        if a != b
    }
    assert changed == {("kivi", "code"), ("kivi", "avg")}


def test_an_average_is_refused_if_any_of_its_columns_is(store, tmp_path):
    folder = shutil.copytree(store, tmp_path / "refused")
    ours = plan.prepare(table("think/4"), "tiny", [f"results={folder}", *SMALL])
    line = ours.lines[0]
    ((group, cell),) = ours.find_parts(line, Column("code", table_spec.SCORE))
    ours.run.store.refuse(cell, "holds too much", group.examples[0].id)
    # the average of a stand-in would leave out columns with so few examples
    view = read_cells(replace(ours, stand_in=False))
    entries = {column.name: entry for column, entry in zip(view.columns, view.pairs_of(view.lines[0]), strict=True)}
    assert entries["needle"].status == "measured"
    for name in ("code", "avg"):
        assert (entries[name].status, entries[name].reason) == ("refused", "holds too much")
    assert view.pairs_of(view.lines[1])[-1].status == "measured"


def test_facts_of_datasets_stand_as_printed(capsys):
    status, out = shown(capsys, "vatp/5", "--format", "md")
    assert status == 0 and " abs" not in out
    assert "| narrativeqa | —<br>(18409) | (F1 ✓) | (200 ✓) |" in out


def test_nothing_stored_shows_dashes(tmp_path, capsys):
    status, out = shown(capsys, "think/4", f"results={tmp_path}", "--stored")
    assert status == 0
    assert "—" in out
    status, out = shown(capsys, "think/4", f"results={tmp_path}", "--stored", "--format", "latex")
    assert status == 0 and "tabular" not in out and "% There is no number in it yet: leave out --stored" in out


@pytest.mark.parametrize("name", ["formats", "through_cache"])
def test_nothing_stored_of_a_table_of_our_own_is_told(name, tmp_path, capsys):
    status, out = shown(capsys, name, f"results={tmp_path / 'absent'}", "--stored")
    assert status == 0 and f"nothing of table {name} is measured yet" in out
    assert not (tmp_path / "absent").exists()


def test_a_long_plan_names_methods_and_counts_cells(tmp_path, capsys):
    _, out = shown(capsys, "think/2", f"results={tmp_path}", "--plan")
    assert "186 results of 31 methods: full, h2o kv_size=16" in out and len(out.splitlines()) < 60
    assert not re.search(r"[0-9a-f]{16}", out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["think/99"], "unknown table"),
        (["thick/1"], "unknown table thick/1"),
        (["nosuch"], "unknown table nosuch. All tables: `kvbench list tables`."),
        (["think/4", "method=h2o"], "method=h2o is not possible here"),
        (["think/4", "--show", "all"], "--show"),
        (["think/4", "--format", "pdf"], "--format"),
        (["think", "--trace", "a", "b"], "--trace needs one table"),
        (["think/4", "--trace", "nothing", "lcc"], "unknown row"),  # before anything is measured
        (["think/4", "--stored", "--trace", "kivi bits=2", "nothing"], "unknown column"),
        (["uncomp/5", "--trace", "qasper", "length"], "no numbers of ours"),
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

"""What results and tables say: tokens, bytes, budgets, peaks, refusals, notes."""

import json
import math
from dataclasses import dataclass
from types import SimpleNamespace as of
from typing import ClassVar

import pytest
from support.runs import SMALL, metrics_of, prepare, run_json

import kvbench
from kvbench.base.files import parse_line
from kvbench.cli.main import main
from kvbench.methods.core.base import Selector
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.resolve import ChainConfig
from kvbench.methods.streamingllm import StreamingLLM
from kvbench.plan import config
from kvbench.report import notes, settings
from kvbench.report.render import _write_kept, render_report
from kvbench.run import experiment
from kvbench.store.store import ResultStore

pytestmark = pytest.mark.e2e("runs whole command lines")


def test_run_measures_what_it_says(tmp_path, capsys):
    status, report = run_json(capsys, *SMALL, "method=snapkv+think", "ratio=0.4", f"results={tmp_path}")
    assert status == 0
    full, small = report["rows"]
    assert [full["method"], small["method"]] == ["full", "snapkv+think kv_ratio=0.25 ratio=0.4"]
    layers, heads, d, n = 6, 4, 32, 160
    c, t = 40, 32 - int(0.4 * 32)
    assert full["payload"] == layers * heads * n * 2 * d * 4
    assert small["payload"] == layers * 4 * heads * ((c - 32) * t + 32 * d + c * d)
    assert small["overhead"] == layers * heads * (4 * c + 2 * t)
    assert small["kept_percent"] == 25.0
    for cell in small["cells"]:
        assert cell["status"] == "measured"
        assert (cell["n"], cell["of"]) == (4, 4)
        assert "delta" in cell
    assert all("delta" not in c for c in full["cells"])
    line = next(tmp_path.glob("cells/*/samples-0.jsonl")).read_bytes().splitlines()[0]
    sample = parse_line(line)
    assert {"id", "prediction", "score", "kept", "payload", "overhead", "new_tokens", "timing"} <= set(sample)


def test_both_byte_counts_stand_in_lines_metrics_and_table(tmp_path, capsys):
    arguments = ["dataset=tiny/needle", "length=256", "examples=2", "method=snapkv", "per=kv_head,query_head"]
    _, report = run_json(capsys, *arguments, f"results={tmp_path}")
    full, native, expanded = report["rows"]
    one = 6 * 64 * 2 * 32 * 4
    for row, stored in ((native, 4 * one), (expanded, 8 * one)):
        cell = row["cells"][0]
        lines = ResultStore(tmp_path).lines(cell["cell"]).values()
        for record in (row, cell, metrics_of(tmp_path)[cell["cell"]], *lines):
            assert record["payload"] == stored
            assert (record["payload_kv_head"], record["payload_query_head"]) == (4 * one, 8 * one)
    assert expanded["payload_percent_of_full"] == 2 * native["payload_percent_of_full"] == 50
    assert full["payload_query_head"] == 2 * full["payload"]
    assert main(["show", *arguments, f"results={tmp_path}"]) == 0
    out = capsys.readouterr().out
    # bytes of caches that were not held stand in the records alone
    assert "q 768.0 KiB" not in out
    assert max(map(len, out.splitlines())) <= 100


def test_a_nominal_budget_is_shown_where_it_is_not_what_was_kept_and_missing_where_there_is_none(tmp_path, capsys):
    arguments = ["dataset=tiny/needle", "length=256", "examples=2", f"results={tmp_path}"]
    methods = ["method=snapkv,pyramidkv,refreekv,twilight", "kv_size=65", "exact_total=false"]
    _, report = run_json(capsys, *arguments, *methods)
    full, snap, pyramid, free, mask = report["rows"]
    assert (full["nominal_percent"], snap["nominal_percent"]) == (100, snap["kept_percent"])
    assert pyramid["nominal_percent"] == 100 * 65 / 256 < pyramid["kept_percent"]
    for row in (free, mask):
        assert row["nominal_percent"] is None
        assert all(s["nominal"] is None for s in ResultStore(tmp_path).lines(row["cells"][0]["cell"]).values())
    assert free["kept_percent"] < 100 == mask["kept_percent"]
    assert main(["show", *arguments, *methods, "--notes"]) == 0
    out = capsys.readouterr().out
    assert f"asked {pyramid['nominal_percent']:.1f}" in out
    assert out.count("asked —") == 2


def test_what_masks_shows_what_it_attends_and_only_tables_with_such_a_method_have_the_column(tmp_path, capsys):
    arguments = ["dataset=tiny/needle,tiny/listing", "length=256", "examples=3", f"results={tmp_path}"]
    _, report = run_json(capsys, *arguments, "method=twilight,snapkv+think+twilight", "per=kv_head,query_head")
    full, *masked = report["rows"]
    assert full["attended_percent"] is None and full["cells"][0]["attended"] is None
    for row in masked:
        lines = [s for c in row["cells"] for s in ResultStore(tmp_path).lines(c["cell"]).values()]
        assert len(lines) == 6
        assert row["attended_percent"] == pytest.approx(100 * sum(s["attended"] for s in lines) / 6 / 256)
        assert 0 < row["attended_percent"] < row["kept_percent"]
    for method, shown in (("twilight,snapkv+think+twilight", True), ("snapkv", False)):
        per = ["per=kv_head,query_head"] if shown else []
        assert main(["show", *arguments, f"method={method}", *per, "--format", "text", "--notes"]) == 0
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= 100
        assert ("attended" in out) == shown
        assert not shown or f"{masked[0]['attended_percent']:.1f}" in out
        assert "…" not in out
    assert main(["show", *arguments, "method=twilight", "--format", "md", "--notes"]) == 0
    head = "| method | kept % | attended % | payload | overhead | % of full at 16 bits | prefill ms |"
    assert head in capsys.readouterr().out


def test_a_difference_of_less_than_a_tenth_of_a_per_cent_is_shown():
    assert _write_kept(25.04, 25.0, evicts=False) == "25.04\nasked 25.00"
    assert _write_kept(25.0, 25.0, evicts=False) == "25.0"


@pytest.mark.parametrize(
    ("factors", "words"), [((1.08, 1.12), "took 1.1 times the"), ((1.1, 1.6), "took 1.1 to 1.6 times the")]
)
def test_bytes_of_batches_are_a_range_only_where_they_differ(factors, words):
    rows = [of(cells=[of(summary=of(timing=of(batch_factor=factor)))]) for factor in factors]
    (note,) = notes.note_batches(rows)
    assert words in note


def test_table_shows_scores_bytes_n_and_where_results_lie(tmp_path, capsys):
    assert main(["run", *SMALL, "method=snapkv", "limit=3", f"results={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "n = 3 of 4 examples a task." in " ".join(out.split())
    assert str(tmp_path) in out
    assert out.startswith("! n = 3 a task: a smoke test")
    assert "Δ" in out
    assert max(map(len, out.splitlines())) <= 100
    for style, mark in (("md", "| method |"), ("csv", "method,task,status,metric,score"), ("latex", r"\toprule")):
        assert main(["show", *SMALL, "method=snapkv", "limit=3", f"results={tmp_path}", "--format", style]) == 0
        assert mark in capsys.readouterr().out


def test_show_runs_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(experiment, "measure", lambda *a, **k: pytest.fail("show measured something"))
    assert main(["show", *SMALL, "method=snapkv", f"results={tmp_path}", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {c["status"] for r in report["rows"] for c in r["cells"]} == {"missing"}


@dataclass(frozen=True, kw_only=True)
class Liar(Selector):
    id: ClassVar[str] = "liar"

    def compress(self, cache, obs):
        return cache


def test_broken_method_is_refused_in_the_table_and_others_go_on(tmp_path, capsys):
    prepared = prepare(
        *SMALL,
        "method=snapkv",
        f"results={tmp_path}",
        chains=(
            ChainConfig(Chain((Liar(kv_ratio=0.125),)), "liar"),
            *config.read(["method=snapkv"]).chains,
        ),
    )
    report = experiment.measure(prepared, quiet=True)
    status = {r.method: {c.status for c in r.cells} for r in report.rows}
    assert status == {"full": {"measured"}, "liar": {"refused"}, "snapkv kv_ratio=0.25": {"measured"}}
    liar = next(r for r in report.rows if r.method == "liar")
    assert "keeps 160 tokens per head of 160, but the method declares exactly 20" in liar.cells[0].reason
    text = render_report(report)
    assert "✗ refused" in text
    assert "declares exactly 20" in text.replace("\n", " ")


@dataclass(frozen=True, kw_only=True)
class Hoards(StreamingLLM):
    """Keeps its budget of the prompt, then one token more while decoding than it declares."""

    id: ClassVar[str] = "hoards"

    def layer_budget(self, cache, layer):
        return super().layer_budget(cache, layer) + 1


@pytest.mark.parametrize("scored", [False, True])
def test_a_method_that_holds_too_much_while_decoding_is_refused_and_others_tell_their_peak(scored, tmp_path):
    if scored:
        (tmp_path / "wikitext2").mkdir()
        (tmp_path / "wikitext2" / "test.txt").write_text("The river was cold. We walked home. " * 80)
        dataset = ["dataset=wikitext2", "length=128", "prefix=96", "chunk=32", "limit=2", f"data.root={tmp_path}"]
        prompt, new = 96, 32
    else:
        dataset, prompt, new = ["dataset=tiny/listing", "length=256", "examples=3"], 256, None
    knobs = {"mode": "mask", "kv_size": 40}
    chains = (
        ChainConfig(Chain(()), "full"),
        ChainConfig(Chain((Hoards(**knobs),)), "hoards"),
        ChainConfig(Chain((StreamingLLM(**knobs),)), "streamingllm"),
    )
    prepared = prepare(*dataset, f"results={tmp_path / 'r'}", "baseline=false", chains=chains)
    report = experiment.measure(prepared, quiet=True)
    full, hoards, stream = (r.cells[0] for r in report.rows)
    assert hoards.status == "refused"
    assert "layer 0 holds 41 tokens per head while decoding, declared are at most 40" in hoards.reason
    assert "✗ refused" in render_report(report)
    assert (full.status, stream.status, stream.summary.decode_peak) == ("measured", "measured", 40)
    lines = prepared.store.lines(full.cell).values()
    assert {s["decode_peak"] - s["new_tokens"] for s in lines} == {prompt - 1}
    assert all(new in (None, s["new_tokens"]) for s in lines)
    assert full.summary.decode_peak == max(s["decode_peak"] for s in lines)
    assert len(prepared.store.lines(hoards.cell)) == 0


def test_tiny_model_on_other_text_says_that_it_was_not_trained_on_it(tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"prompt": "Éa 漢 <x>\\n What?", "answers": ["a", "b"]}\n')
    arguments = ["dataset=file", f"path={tmp_path / 'p.jsonl'}", f"results={tmp_path}"]
    status, report = run_json(capsys, *arguments)
    assert status == 0
    assert any("trained on synthetic text only" in note for note in report["notes"])
    result = run_json(capsys, "dataset=tiny/needle", "length=256", "examples=1", f"results={tmp_path}")[1]["notes"]
    assert [n for n in result if "local changes" not in n] == []


def test_few_examples_get_no_interval_and_settings_stand_in_the_legend(tmp_path, capsys):
    assert main(["run", *SMALL, "method=snapkv", "limit=3", f"results={tmp_path}"]) == 0
    out = capsys.readouterr().out
    said = " ".join(out.split())
    assert said.startswith("! n = 3 a task: a smoke test") and said.count("too few examples to compare") == 2
    assert "bootstrap" not in said and "excludes 0" not in said
    assert "dataset tiny length=160" in out
    assert "[" not in out


def test_rows_of_another_run_are_named_since_their_times_do_not_compare(tmp_path, capsys):
    for methods, apart in (("streamingllm", ""), ("streamingllm,random", "random kv_ratio=0.25")):
        arguments = [f"method={methods}", "dataset=tiny/needle", "length=256", "limit=1", f"results={tmp_path}"]
        assert main(["run", *arguments, "--notes"]) == 0
        note = " ".join(capsys.readouterr().out.split()).partition("so that times do not compare: ")[2]
        assert note.partition(". ")[0] == apart


def test_perplexity_names_its_text_and_says_that_less_is_better(tmp_path, capsys):
    arguments = ["dataset=tiny_stream", "limit=1", "method=full", f"results={tmp_path}"]
    assert main(["run", *arguments]) == 0
    out = capsys.readouterr().out
    assert "tiny_stream/" in out and "perplexity: lower is better." in out
    (cell,) = (tmp_path / "cells").iterdir()
    assert main(["show", cell.name, f"results={tmp_path}"]) == 0
    assert "score" in capsys.readouterr().out.splitlines()[-1]  # a text that was read has no answer to show


def test_an_interval_has_the_decimals_of_its_number(tmp_path, capsys):
    arguments = ["dataset=tiny_stream", "limit=8", "method=full,streamingllm", f"results={tmp_path}"]
    assert main(["run", *arguments, "kv_ratio=0.125", "--intervals"]) == 0
    out = capsys.readouterr().out
    assert " 12.5 % of tokens " in out
    measured = [json.loads(path.read_text()) for path in tmp_path.glob("cells/*/metrics.json")]
    assert len(measured) == 2
    assert main(["list", "runs", f"results={tmp_path}"]) == 0
    for table in (out, capsys.readouterr().out):
        for summary in measured:
            low, high = summary["ci"]
            assert f" {summary['score']:.1f} " in table and f" [{low:.1f}, {high:.1f}]" in table


def test_references_that_a_metric_cannot_read_are_counted(tmp_path, capsys):
    lines = ['{"prompt": "a b c", "answers": "7"}', '{"prompt": "a b d", "answers": "seven"}']
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    arguments = ["dataset=file", f"path={tmp_path / 'p.jsonl'}", "max_new_tokens=2", f"results={tmp_path}"]
    notes = run_json(capsys, *arguments, "metric=theorem")[1]["notes"]
    assert sum(n.startswith("file/p: 1 of 2 answers have no score: theorem (final answer by type") for n in notes) == 1
    assert main(["run", *arguments, "metric=perplexity"]) == 2
    assert "metric=perplexity is not possible for answers" in capsys.readouterr().err


def test_show_without_a_run_and_results_show_what_the_folder_holds(tmp_path, capsys):
    """Scores, differences and bytes are those that the run printed, each setting of a task has a table of its own."""
    words = ["dataset=tiny/code", "limit=2", "kv_size=48", f"results={tmp_path}"]
    _, report = run_json(capsys, *words, "length=160", "method=snapkv,streamingllm")
    _, shorter = run_json(capsys, *words, "length=64", "method=snapkv")
    assert main(["show", f"results={tmp_path}", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [[row["method"] for row in one["rows"]] for one in shown] == [
        [row["method"] for row in report["rows"]],
        [row["method"] for row in shorter["rows"]],
    ]
    frame = kvbench.results(tmp_path).set_index("id")
    for one, stored in zip((report, shorter), shown, strict=True):
        for row, same in zip(one["rows"], stored["rows"], strict=True):
            cells = {cell["task"]: cell for cell in row["cells"]}
            for cell in same["cells"]:
                expected = cells[cell["task"]]
                line = frame.loc[cell["cell"]]
                for key in ("score", "ci", "payload", "percent_of_full", "evicts"):
                    assert cell[key] == expected[key]
                assert line["bytes"] == expected["payload"] + expected["overhead"]
                assert line["percent_of_full"] == expected["percent_of_full"]
                if row["method"] == "full":
                    assert math.isnan(line["delta"])
                else:
                    assert cell["delta"] == line["delta"] == expected["delta"]
    assert main(["show", f"results={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert out.count("model tiny") == 2 and max(map(len, out.splitlines())) <= 100
    # a filter that leaves the full cache out changes no difference
    chosen = kvbench.results(tmp_path, method="snapkv").set_index("id")
    assert chosen["delta"].equals(frame.loc[chosen.index, "delta"])


def test_a_printed_report_is_its_tables(tmp_path):
    model, tokenizer = kvbench.load_model("tiny")
    rows = [{"prompt": "the code is red", "answers": ["red"]}]
    report = kvbench.compare(model, tokenizer, rows, ["snapkv"], results=tmp_path, kv_ratio=0.5, progress=False)
    assert str(report) == repr(report) == render_report(report).rstrip("\n")
    assert "method" in str(report) and "ReportRow(" not in str(report)


def test_settings_are_written_as_they_are_typed(tmp_path):
    (tmp_path / "text.txt").write_text("The harbour was quiet. " * 200)
    words = ["lengths=256", "depths=0,50", "repeats=1"]
    run = prepare("dataset=needle", f"haystack={tmp_path / 'text.txt'}", *words, f"results={tmp_path}")
    assert " ".join(words) in settings.describe_settings(run)


def test_show_of_nothing_says_so_and_writes_nothing(tmp_path, capsys):
    assert main(["show", *SMALL, f"results={tmp_path / 'absent'}"]) == 2
    assert "absent: there is no such folder, so that nothing is measured there yet" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["show", *SMALL, f"results={tmp_path / 'empty'}"]) == 0
    assert "nothing measured yet for " in capsys.readouterr().out
    assert main(["show", f"results={tmp_path / 'empty'}"]) == 0
    assert capsys.readouterr().out.endswith(f"Measure the default run:\nkvbench run results={tmp_path / 'empty'}\n")
    assert not (tmp_path / "absent").exists()

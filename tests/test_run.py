"""The main job end to end: results, resuming after a kill, refusals, damage, shards."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from kvbench import config, experiment, runner
from kvbench.cli.main import main
from kvbench.cli.rewrite import rewrite
from kvbench.config import ChainConfig
from kvbench.errors import KvbenchError, UsageError
from kvbench.methods.base import Selector
from kvbench.methods.chain import Chain
from kvbench.methods.streamingllm import StreamingLLM
from kvbench.store import ResultStore, line_of, parse_line

SMALL = ["dataset=tiny/needle,tiny/code", "length=256", "examples=6"]


def prepare(*overrides, **changes):
    cfg = config.parse(config.compose_config(rewrite(list(overrides)).runs[0]))
    return experiment.prepare(type(cfg)(**{**cfg.__dict__, **changes}))


def metrics_of(results):
    """Every cell's metrics without what depends on the clock."""
    found = {}
    for path in sorted(Path(results).glob("cells/*/metrics.json")):
        metrics = json.loads(path.read_text())
        metrics.pop("timing")
        found[path.parent.name] = metrics
    return found


def run_json(capsys, *arguments):
    status = main(["run", *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_run_measures_what_it_says(tmp_path, capsys):
    status, report = run_json(capsys, *SMALL, "method=snapkv+think", "ratio=0.4", f"results={tmp_path}")
    assert status == 0
    full, small = report["rows"]
    assert [full["method"], small["method"]] == ["full", "snapkv+think kv_ratio=0.25 ratio=0.4"]
    layers, heads, d, n = 6, 4, 32, 256
    c, t = 64, 32 - int(0.4 * 32)
    assert full["payload"] == layers * heads * n * 2 * d * 4
    assert small["payload"] == layers * 4 * heads * ((c - 32) * t + 32 * d + c * d)
    assert small["overhead"] == layers * heads * (4 * c + 2 * t)
    assert small["kept_percent"] == 25.0
    for cell in small["cells"]:
        assert cell["status"] == "measured"
        assert (cell["n"], cell["of"]) == (6, 6)
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
    for row, held in ((native, 4 * one), (expanded, 8 * one)):
        cell = row["cells"][0]
        lines = ResultStore(tmp_path).samples(cell["cell"]).values()
        for record in (row, cell, metrics_of(tmp_path)[cell["cell"]], *lines):
            assert record["payload"] == held
            assert (record["payload_kv_head"], record["payload_query_head"]) == (4 * one, 8 * one)
    assert expanded["payload_percent_of_full"] == 2 * native["payload_percent_of_full"] == 50
    assert full["payload_query_head"] == 2 * full["payload"]
    assert main(["show", *arguments, f"results={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "q 768.0 KiB" in out and "kv 384.0 KiB" in out and "by formula" in out
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
        assert all(s["nominal"] is None for s in ResultStore(tmp_path).samples(row["cells"][0]["cell"]).values())
    assert free["kept_percent"] < 100 == mask["kept_percent"]
    assert main(["show", *arguments, *methods]) == 0
    out = capsys.readouterr().out
    assert f"asked {pyramid['nominal_percent']:.1f}" in out
    assert out.count("asked —") == 2


def test_what_masks_shows_what_it_attends_and_only_tables_with_such_a_method_have_the_column(tmp_path, capsys):
    arguments = ["dataset=tiny/needle,tiny/listing", "length=256", "examples=3", f"results={tmp_path}"]
    _, report = run_json(capsys, *arguments, "method=twilight,snapkv+think+twilight", "per=kv_head,query_head")
    full, *masked = report["rows"]
    assert full["attended_percent"] is None and full["cells"][0]["attended"] is None
    for row in masked:
        lines = [s for c in row["cells"] for s in ResultStore(tmp_path).samples(c["cell"]).values()]
        assert len(lines) == 6
        assert row["attended_percent"] == pytest.approx(100 * sum(s["attended"] for s in lines) / 6 / 256)
        assert 0 < row["attended_percent"] < row["kept_percent"]
    for method, shown in (("twilight,snapkv+think+twilight", True), ("snapkv", False)):
        per = ["per=kv_head,query_head"] if shown else []
        assert main(["show", *arguments, f"method={method}", *per, "--format", "text"]) == 0
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= 100
        assert ("attended" in out) == shown
        assert not shown or f"{masked[0]['attended_percent']:.1f}" in out
        assert "…" not in out
    assert main(["show", *arguments, "method=twilight", "--format", "md"]) == 0
    assert "| method | kept % | attended % | payload | overhead | % of full |" in capsys.readouterr().out


def test_a_difference_of_less_than_a_tenth_of_a_per_cent_is_shown():
    from kvbench.render import _kept

    assert _kept({"kept_percent": 25.04, "nominal_percent": 25.0}) == "25.04\nasked 25.00"
    assert _kept({"kept_percent": 25.0, "nominal_percent": 25.0}) == "25.0"


def test_heads_that_share_nothing_need_no_second_count():
    from kvbench.render import _payload

    assert _payload({"payload": 8.0, "payload_kv_head": 8.0, "payload_query_head": 8.0}) == "8 B"


def test_table_shows_scores_bytes_n_and_where_results_lie(tmp_path, capsys):
    assert main(["run", *SMALL, "method=snapkv", "limit=3", f"results={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "n = 3 of 6 examples" in out
    assert str(tmp_path) in out
    assert "95 %" in out
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


def test_second_run_measures_nothing_and_a_new_method_reads_only_for_itself(tmp_path, capsys, monkeypatch):
    arguments = [*SMALL, f"results={tmp_path}"]
    first = run_json(capsys, *arguments, "method=snapkv")[1]
    calls = []
    original = runner.prefill_chains
    monkeypatch.setattr(
        runner, "prefill_chains", lambda m, i, c, *a: calls.append([x.name for x in c]) or original(m, i, c, *a)
    )
    again = run_json(capsys, *arguments, "method=snapkv")[1]
    assert calls == []
    assert again == first
    run_json(capsys, *arguments, "method=snapkv,think")
    assert calls == [["think"]] * 12


def test_killed_run_completes_to_the_same_metrics(tmp_path, capsys):
    arguments = ["dataset=tiny/needle,tiny/listing", "length=256", "examples=10", "batch_rows=2", "method=snapkv"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-m", "kvbench", "run", *arguments, f"results={tmp_path / 'a'}"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def lines():
        return sum(len(p.read_bytes().splitlines()) for p in tmp_path.glob("a/cells/*/samples-0.jsonl"))

    deadline = time.monotonic() + 120
    while lines() < 8 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    killed_at = lines()
    assert 8 <= killed_at < 40, "the run must be killed in its middle"
    for results in ("a", "b"):
        assert main(["run", *arguments, f"results={tmp_path / results}", "--json"]) == 0
    capsys.readouterr()
    resumed, undisturbed = metrics_of(tmp_path / "a"), metrics_of(tmp_path / "b")
    assert len(resumed) == 4
    assert resumed == undisturbed
    assert all(m["status"] == "complete" for m in resumed.values())


def test_torn_and_damaged_lines_are_measured_again(tmp_path, capsys):
    arguments = ["dataset=tiny/needle", "length=256", "examples=4", "method=snapkv", f"results={tmp_path}"]
    before = run_json(capsys, *arguments)[1]
    path = sorted(tmp_path.glob("cells/*/samples-0.jsonl"))[0]
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 4
    damaged = lines[1].replace(b'"score": ', b'"score": 7')
    path.write_bytes(lines[0] + damaged + lines[2] + lines[3][: len(lines[3]) // 2])
    after = run_json(capsys, *arguments)[1]
    assert any("damaged" in note for note in after["notes"])
    scores = [[(c["score"], c["n"]) for c in r["cells"]] for r in (*before["rows"], *after["rows"])]
    assert scores[:2] == scores[2:]
    assert len(ResultStore(tmp_path).samples(path.parent.name)) == 4


def test_line_with_every_kind_of_text_comes_back_and_any_flip_is_seen():
    sample = {"id": "a", "prediction": 'x "crc": 5, \u2028\n\x00 é 漢', "score": None}
    line = line_of(sample).encode()
    assert line.count(b"\n") == 1
    assert parse_line(line.rstrip()) == sample
    for i in range(len(line) - 1):
        flipped = line[:i] + bytes([line[i] ^ 1]) + line[i + 1 : -1]
        assert parse_line(flipped) != sample or parse_line(flipped) is None


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
            *config.parse(config.compose_config(rewrite(["method=snapkv"]).runs[0])).chains,
        ),
    )
    report = experiment.measure(prepared, quiet=True)
    status = {r["method"]: {c["status"] for c in r["cells"]} for r in report["rows"]}
    assert status == {"full": {"measured"}, "liar": {"refused"}, "snapkv kv_ratio=0.25": {"measured"}}
    liar = next(r for r in report["rows"] if r["method"] == "liar")
    assert "keeps 256 tokens per head of 256, but the method declares exactly 32" in liar["cells"][0]["reason"]
    from kvbench.render import render

    text = render(report)
    assert "✗ refused" in text
    assert "declares exactly 32" in text.replace("\n", " ")


@dataclass(frozen=True, kw_only=True)
class Hoards(StreamingLLM):
    """Keeps its budget of the prompt, then one token more while decoding than it declares."""

    id: ClassVar[str] = "hoards"

    def hold(self, cache, layer):
        return super().hold(cache, layer) + 1


@pytest.mark.parametrize("scored", [False, True])
def test_a_method_that_holds_too_much_while_decoding_is_refused_and_others_tell_their_peak(scored, tmp_path):
    from kvbench.render import render

    if scored:
        (tmp_path / "wikitext2").mkdir()
        (tmp_path / "wikitext2" / "test.txt").write_text("The river was cold. We walked home. " * 80)
        dataset = ["dataset=wikitext2", "length=128", "prefix=96", "limit=2", f"data.root={tmp_path}"]
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
    full, hoards, stream = (r["cells"][0] for r in report["rows"])
    assert hoards["status"] == "refused"
    assert "layer 0 holds 41 tokens per head while decoding, declared are at most 40" in hoards["reason"]
    assert "✗ refused" in render(report)
    assert (full["status"], stream["status"], stream["decode_peak"]) == ("measured", "measured", 40)
    lines = prepared.store.samples(full["cell"]).values()
    assert {s["decode_peak"] - s["new_tokens"] for s in lines} == {prompt - 1}
    assert all(new in (None, s["new_tokens"]) for s in lines)
    assert full["decode_peak"] == max(s["decode_peak"] for s in lines)
    assert len(prepared.store.samples(hoards["cell"])) == 0


def test_full_disk_is_one_message_and_keeps_what_was_written(tmp_path, monkeypatch):
    prepared = prepare("dataset=tiny/needle", "length=256", "examples=4", "batch_rows=2", f"results={tmp_path}")
    written = []

    def append(self, sample):
        if len(written) >= 3:
            raise KvbenchError("the disk is full")
        written.append(sample["id"])
        original(self, sample)

    from kvbench import store

    original = store.Writer.append
    monkeypatch.setattr(store.Writer, "append", append)
    with pytest.raises(KvbenchError, match="disk is full"):
        experiment.measure(prepared, quiet=True)
    monkeypatch.undo()
    stored = sum(len(prepared.store.samples(c.id)) for g in prepared.groups for c in g.cells)
    assert stored == 3
    experiment.measure(prepared, quiet=True)
    assert all(len(prepared.store.samples(c.id)) == 4 for g in prepared.groups for c in g.cells)


def test_disk_full_error_of_the_system_becomes_the_message(tmp_path):
    import errno

    from kvbench.store import _disk

    assert "free some space" in str(_disk(OSError(errno.ENOSPC, "x"), tmp_path))
    assert "could not be written" in str(_disk(OSError(errno.EIO, "I/O error"), tmp_path))


def test_another_device_or_torch_is_refused_without_mix(tmp_path, capsys):
    arguments = ["dataset=tiny/needle", "length=256", "examples=3", f"results={tmp_path}"]
    assert main(["run", *arguments, "limit=1", "--json"]) == 0
    for path in tmp_path.glob("cells/*/cell.json"):
        record = json.loads(path.read_text())
        record["provenance"][0]["torch"] = "1.0"
        path.write_text(json.dumps(record))
    capsys.readouterr()
    assert main(["run", *arguments, "--json"]) == 2
    assert "mix=true" in capsys.readouterr().err
    assert main(["run", *arguments, "mix=true", "--json"]) == 0


def test_two_processes_on_one_cell_are_kept_apart(tmp_path):
    prepared = prepare("dataset=tiny/needle", "length=256", "examples=2", f"results={tmp_path}")
    cell = prepared.groups[0].cells[0]
    facts = {"device": "cpu", "torch": "2"}
    writer = prepared.store.open(cell, facts, 0, mix=False)
    with pytest.raises(KvbenchError, match="another process"):
        prepared.store.open(cell, facts, 0, mix=False)
    writer.close()
    prepared.store.open(cell, facts, 0, mix=False).close()


def test_shards_split_the_examples_and_the_sweep_prints_all(tmp_path, capsys):
    arguments = ["dataset=tiny/needle", "length=256", "examples=12", "method=snapkv"]
    parts = [
        {e.id for g in prepare(*arguments, f"results={tmp_path}", shard=i, shards=3).groups for e in g.examples}
        for i in range(3)
    ]
    assert sum(map(len, parts)) == len(set().union(*parts)) == 12
    status = main(["run", "-m", "shard=0,1", *arguments, f"results={tmp_path / 'm'}", "--json"])
    out = capsys.readouterr().out
    report = json.loads(out[out.index("{") :])
    assert status == 0
    assert {(c["n"], c["of"]) for r in report["rows"] for c in r["cells"]} == {(12, 12)}
    assert {p.name for p in (tmp_path / "m").glob("cells/*/samples-*.jsonl")} == {"samples-0.jsonl", "samples-1.jsonl"}
    main(["run", *arguments, f"results={tmp_path / 's'}", "--json"])
    capsys.readouterr()
    assert metrics_of(tmp_path / "m") == metrics_of(tmp_path / "s")


def test_plan_and_config_and_lists(tmp_path, capsys):
    arguments = [*SMALL, "method=snapkv,think", f"results={tmp_path}"]
    assert main(["run", *arguments, "--plan", "--json"]) == 0
    (plan,) = json.loads(capsys.readouterr().out)
    assert [g["prefills"] for g in plan["groups"]] == [6, 6]
    assert [g["prefills_saved"] for g in plan["groups"]] == [12, 12]
    assert main(["run", *arguments, "--plan"]) == 0
    plan_text = capsys.readouterr().out
    assert "12 saved by sharing" in " ".join(plan_text.split())
    assert max(map(len, plan_text.splitlines())) <= 100
    assert main(["run", *arguments, "--config"]) == 0
    assert "window: 32" in capsys.readouterr().out
    assert main(["list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {"full", "snapkv", "think"} <= {m["id"] for m in listed["methods"]}
    assert main(["list"]) == 0
    assert "snapkv" in capsys.readouterr().out


def test_list_runs_and_show_cell(tmp_path, capsys):
    run_json(capsys, "dataset=tiny/needle", "length=256", "examples=2", f"results={tmp_path}")
    assert main(["list", "runs", "--results", str(tmp_path), "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert len(runs) == 2
    assert main(["show", runs[0]["id"], "--results", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "answer" in out
    assert "reference" in out


def test_interrupt_is_one_message_and_status_1(tmp_path, capsys, monkeypatch):
    def interrupt(*a, **k):
        raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "measure", interrupt)
    assert main(["run", f"results={tmp_path}"]) == 1
    assert "run the same command to go on" in capsys.readouterr().err


def test_identity_changes_with_what_is_measured_and_only_then(tmp_path):
    def ids(*overrides):
        return [c.id for g in prepare(*SMALL, f"results={tmp_path}", *overrides).groups for c in g.cells]

    base = ids()
    assert ids("limit=2", "batch_rows=3", "threads=1", "mix=true") == base
    for change in ("ratio=0.5", "dtype=bfloat16", "per=query_head", "max_length=200", "kv_size=40"):
        assert ids(change) != base, change


def test_every_config_field_says_whether_it_is_identity():
    from dataclasses import fields

    for cls in (config.RunConfig, config.ModelConfig, config.DatasetConfig, config.ChainConfig):
        for f in fields(cls):
            assert f.metadata.get("role") in ("identity", "runtime"), f"{cls.__name__}.{f.name}"


def test_damaged_cell_record_names_the_file(tmp_path, capsys):
    arguments = ["dataset=tiny/needle", "length=256", "examples=2", f"results={tmp_path}"]
    run_json(capsys, *arguments)
    path = next(tmp_path.glob("cells/*/cell.json"))
    path.write_text("{")
    with pytest.raises(UsageError, match="move it away"):
        ResultStore(tmp_path).cell(path.parent.name)


def test_progress_prints_plain_lines_off_a_terminal(capsys, monkeypatch):
    from kvbench import progress

    monkeypatch.setattr(progress, "PLAIN_EVERY_S", 0.0)
    with progress.progress({"a": 2}) as tick:
        tick("a", 1)
        tick("a", 1)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == ["kvbench: 1 of 2 answers", "kvbench: 2 of 2 answers"]


def test_tiny_model_on_other_text_says_that_it_was_not_trained_on_it(tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"prompt": "Éa 漢 <x>\\n What?", "answers": ["a", "b"]}\n')
    arguments = ["dataset=file", f"path={tmp_path / 'p.jsonl'}", f"results={tmp_path}"]
    status, report = run_json(capsys, *arguments)
    assert status == 0
    assert any("trained on synthetic text only" in note for note in report["notes"])
    assert run_json(capsys, "dataset=tiny/needle", "length=256", "examples=1", f"results={tmp_path}")[1]["notes"] == []


@pytest.mark.parametrize("dataset", ["tiny/needle", "needle"])
def test_withheld_question_is_read_after_compression(dataset, tmp_path, capsys):
    (tmp_path / "essay.txt").write_text("The river was cold. We walked home. " * 80)
    size = [f"haystack={tmp_path}", "lengths=256", "repeats=1"] if dataset == "needle" else ["length=256", "examples=4"]
    arguments = [f"dataset={dataset}", *size, "method=snapkv", f"results={tmp_path}"]
    aware = run_json(capsys, *arguments)[1]
    agnostic = run_json(capsys, *arguments, "query_aware=false")[1]
    a, b = aware["rows"][1]["cells"][0], agnostic["rows"][1]["cells"][0]
    assert a["cell"] != b["cell"]
    assert b["prompt_tokens"] < a["prompt_tokens"]
    full = agnostic["rows"][0]["cells"][0]
    assert full["score"] == aware["rows"][0]["cells"][0]["score"]


@dataclass(frozen=True, kw_only=True)
class LiesOnce(Selector):
    """Keeps everything of one prompt only, until ``honest``."""

    id: ClassVar[str] = "liesonce"
    lies: ClassVar[list] = []

    def compress(self, cache, obs):
        return cache if obs.prompt in self.lies else super().compress(cache, obs)

    def scores(self, cache, obs, capacity):
        import torch

        return torch.arange(obs.n)[None].expand(cache.heads, -1)


def test_a_refusal_outlives_other_shards_and_ends_only_when_its_example_passes(tmp_path):
    import zlib

    import numpy as np

    chains = (ChainConfig(Chain((LiesOnce(kv_ratio=0.5),)), "liesonce"),)
    base = ["dataset=tiny/needle", "length=256", "examples=8", f"results={tmp_path}", "baseline=false"]
    shards = [prepare(*base, chains=chains, shard=i, shards=2) for i in range(2)]
    bad = shards[0].groups[0].examples[0]
    ids = shards[0].tokenizer.encode(bad.prompt)
    LiesOnce.lies[:] = [zlib.crc32(np.array(ids, dtype=np.int64).tobytes())]
    for shard in shards:
        experiment.measure(shard, quiet=True)
    whole = prepare(*base, chains=chains)
    (cell,) = experiment.report(whole)["rows"][0]["cells"]
    assert cell["status"] == "refused"
    assert bad.id in cell["reason"]
    LiesOnce.lies.clear()
    (cell,) = experiment.measure(whole, quiet=True)["rows"][0]["cells"]
    assert (cell["status"], cell["n"]) == ("measured", 8)


def test_samples_say_what_they_were_measured_with(tmp_path, capsys):
    arguments = ["dataset=tiny/needle", "length=256", "examples=2", f"results={tmp_path}", "method=full"]
    run_json(capsys, *arguments, "limit=1")
    for path in tmp_path.glob("cells/*/cell.json"):
        record = json.loads(path.read_text())
        record["provenance"][0]["commit"] = "other"
        path.write_text(json.dumps(record))
    run_json(capsys, *arguments)
    store = ResultStore(tmp_path)
    (cell,) = store.cells()
    assert sorted(s["provenance"] for s in store.samples(cell).values()) == [0, 1]
    assert len(store.cell(cell)["provenance"]) == 2


def test_equal_budgets_are_one_cell_however_they_are_written(tmp_path):
    cells = (
        prepare(*SMALL, "method=snapkv+think", "kv_ratio=1,1.0", "ratio=0,0.0", f"results={tmp_path}").groups[0].cells
    )
    assert [c.label.split()[0] for c in cells] == ["full", "snapkv+think"]


def test_too_long_an_answer_is_refused_before_the_model_loads(tmp_path, capsys, monkeypatch):
    from kvbench.model import load

    monkeypatch.setattr(load, "load_weights", lambda *a: pytest.fail("weights were loaded"))
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "answers": ["b"], "max_new_tokens": 5000}\n')
    assert main(["run", "dataset=file", f"path={tmp_path / 'p.jsonl'}", f"results={tmp_path}"]) == 2
    assert "max_new_tokens=5000" in capsys.readouterr().err


def test_few_examples_get_no_interval_and_settings_stand_in_the_legend(tmp_path, capsys):
    assert main(["run", *SMALL, "method=snapkv", "limit=3", f"results={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "Below 8 examples no interval is shown" in " ".join(out.split())
    assert "dataset tiny length=256" in out
    assert "[" not in out.partition("storage")[0].partition("n = 3")[0]


def test_show_of_nothing_says_so_and_writes_nothing(tmp_path, capsys):
    assert main(["show", *SMALL, f"results={tmp_path / 'absent'}"]) == 0
    assert "nothing of this is measured yet" in capsys.readouterr().out
    assert not (tmp_path / "absent").exists()


def test_a_needle_text_longer_than_the_context_is_refused(tmp_path, capsys):
    (tmp_path / "essay.txt").write_text("The river was cold. We walked home. " * 80)
    arguments = ["dataset=needle", f"haystack={tmp_path}", "lengths=4096", "repeats=1", f"results={tmp_path}"]
    assert main(["run", *arguments]) == 2
    assert "could cut the needle" in capsys.readouterr().err

"""Methods that compress nothing: their rows say so, in the place of a difference to the full cache."""

import json
from dataclasses import replace

import pytest
from support.runs import prepare, run_json

from kvbench.cli.main import main
from kvbench.papers.claims import claim_runner, claims
from kvbench.plan.estimate import keeps_everything
from kvbench.report import open_results
from kvbench.report.unchanged import is_unchanged
from kvbench.run import experiment
from kvbench.store.sample_reader import SampleReader
from kvbench.store.store import ResultStore

pytestmark = pytest.mark.e2e("runs whole tables")

RUN = ["dataset=tiny/needle", "length=256", "limit=2"]
REACHED_BY_NOTHING = [
    ["method=keydiff", "kv_size=4000", "decode_budget=4000"],
    ["method=keydiff", "kv_size=4000", "decode_budget=250"],  # it would choose again after 128 tokens
    ["method=h2o", "kv_size=4000"],
    ["method=snapkv,random", "kv_size=4000"],
    ["method=streamingllm", "kv_ratio=1"],
    ["method=pyramidkv", "kv_size=4000", "per=query_head"],
]
REACHED = [
    ["method=snapkv", "kv_size=64"],
    ["method=tova", "kv_size=256"],  # the prompt fits, not the answer behind it
    ["method=keydiff", "kv_size=4000", "decode_budget=250", "decode_every=1"],
    ["method=fp8,kivi"],  # all tokens, fewer bytes
    ["method=snapkv+think", "kv_size=4000", "ratio=0.4"],
    # one layer that is spared says nothing of the others
    ["method=keydiff", "kv_size=1024", "decode_budget=258", "decode_every=1", "frozen_layers=0"],
    ["method=refreekv"],
    ["method=twilight"],  # holds all tokens and attends some
    ["method=think", "ratio=0.1", "per=query_head"],  # more bytes than the full cache, and fewer than at its heads
]


@pytest.mark.parametrize("arguments", REACHED_BY_NOTHING)
def test_a_method_that_compresses_nothing_has_no_difference_to_show(arguments, tmp_path, capsys):
    assert main(["run", *RUN, *arguments, f"results={tmp_path}"]) == 0
    out, err = capsys.readouterr()
    assert "Δ +0.0" not in out and "nothing was" in out
    assert out.count("nothing was compressed: tokens, bytes and answers are those of the full cache") == 1
    # and before any prompt is read
    assert err.startswith("kvbench: ") and "nothing will be compressed of tiny/needle (at most 256 tokens)" in err
    _, report = run_json(capsys, *RUN, *arguments, f"results={tmp_path}")
    full, *rows = (row["cells"][0] for row in report["rows"])
    assert "nothing_compressed" not in full
    assert all(row["nothing_compressed"] and row["score"] == full["score"] for row in rows)
    assert main(["run", *RUN, *arguments, f"results={tmp_path}", "--format", "csv"]) == 0
    assert "True" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", REACHED)
def test_a_method_that_compresses_a_little_keeps_its_difference(arguments, tmp_path, capsys):
    assert main(["run", *RUN, *arguments, f"results={tmp_path}", "--json"]) == 0
    out, err = capsys.readouterr()
    assert "nothing will be compressed" not in err
    rows = json.loads(out)["rows"]
    assert not any("nothing_compressed" in cell for row in rows for cell in row["cells"])
    assert all("delta" in cell for row in rows[1:] for cell in row["cells"])


def test_one_other_answer_in_a_hundred_is_too_few(tmp_path):
    """From 99 % of prompts on a method compresses nothing."""
    arguments = "length=256", "limit=4", "method=h2o", "kv_size=4000"
    prepared = prepare("dataset=tiny/needle", *arguments, f"results={tmp_path}")
    experiment.measure(prepared, quiet=True)
    (group,) = prepared.groups
    full, h2o = group.cells
    stored = prepared.store.samples(h2o.id)
    (first, *_) = stored

    class Repeated(SampleReader):
        def read(self, cell_id):
            samples = super().read(cell_id)
            return {f"{i}/{k}": s for i in range(25) for k, s in samples.items()}

    repeated = Repeated(prepared.store)

    def unchanged(count, **changes):
        samples = repeated.read(h2o.id)
        for name in list(samples)[:count]:
            samples[name] = replace(samples[name], **changes)
        return is_unchanged(h2o, samples, repeated)

    assert unchanged(0) and unchanged(1, prediction="another") and not unchanged(2, prediction="another")
    assert not unchanged(2, kept=stored[first].n - 1.0)
    assert not unchanged(2, payload16=stored[first].payload16 - 1)
    assert not unchanged(2, decode_peak=stored[first].decode_peak - 1)
    assert not is_unchanged(full, repeated.read(full.id), repeated)


def test_what_never_reaches_its_budget_is_known_beforehand():
    def of(*arguments):
        (group,) = prepare("dataset=tiny/needle", "length=256", "limit=1", *arguments).groups
        return group.cells[-1].chain

    assert keeps_everything(of("method=snapkv", "kv_size=256"), 256, 8)
    assert not keeps_everything(of("method=snapkv", "kv_size=255"), 256, 8)
    assert keeps_everything(of("method=tova", "kv_size=264"), 256, 8)
    assert not keeps_everything(of("method=tova", "kv_size=263"), 256, 8)
    while_decoding = "method=keydiff", "kv_size=300", "decode_every=8"
    assert keeps_everything(of(*while_decoding, "decode_budget=265"), 256, 9)
    assert not keeps_everything(of(*while_decoding, "decode_budget=264"), 256, 9)
    assert keeps_everything(of(*while_decoding, "decode_budget=100"), 256, 8)  # an answer ends before it chooses
    assert keeps_everything(of(*while_decoding, "decode_ratio=1"), 256, 9)
    assert not keeps_everything(of(*while_decoding, "decode_ratio=0.99"), 256, 9)
    assert not keeps_everything(of("method=snapkv+kivi", "kv_size=300"), 256, 8)
    assert not keeps_everything(of("method=full"), 256, 8)
    assert not keeps_everything(of("method=refreekv"), 256, 8)  # the data decide what stays


IDLE, LESS = ["method=h2o", "kv_size=4000"], ["method=snapkv", "kv_size=64"]


@pytest.fixture
def measured(tmp_path, capsys):
    """A results folder with a method that compressed nothing, one that compressed, and the full cache."""
    for arguments in (IDLE, LESS):
        assert main(["run", *RUN, *arguments, f"results={tmp_path / 'results'}"]) == 0
    capsys.readouterr()
    return tmp_path / "results"


def test_stored_results_and_the_open_format_say_it(measured, tmp_path, capsys):
    assert main(["list", "runs", f"results={measured}", "--json"]) == 0
    listed = {r["label"].split()[0]: r for r in json.loads(capsys.readouterr().out)["runs"]}
    lines = {line["method"].split()[0]: line for line in open_results.list_lines(ResultStore(measured))}
    for cells in (listed, lines):
        assert cells["h2o"]["nothing_compressed"] is True and cells["h2o"]["score"] == cells["full"]["score"]
        assert "nothing_compressed" not in cells["snapkv"] and "nothing_compressed" not in cells["full"]
    assert main(["list", "runs", f"results={measured}", "method=h2o"]) == 0
    assert "nothing was" in capsys.readouterr().out
    page = tmp_path / "report.html"
    assert main(["report", f"results={measured}", f"output={page}"]) == 0
    assert page.read_text().count("nothing was compressed") == 2  # on its card and in its row
    # a run that does not ask for the full cache finds its answers in the store
    assert main(["run", *RUN, *IDLE, "baseline=false", f"results={measured}"]) == 0
    assert "nothing_compressed" in next(
        line for line in open_results.list_lines(ResultStore(measured)) if "h2o" in line["method"]
    )


def test_kvpresss_leaderboard_gets_no_scores_of_a_method_that_compressed_nothing(measured, tmp_path, capsys):
    where = [f"results={measured}", f"output={tmp_path / 'out'}"]
    assert main(["export", "kvpress", *where]) == 0
    out, err = capsys.readouterr()
    assert "snapkv" in out and "no_press" in out and "h2o" not in out
    assert err.startswith("kvbench: h2o kv_size=4000 on tiny/needle: left out, since nothing was compressed")
    assert len([*(tmp_path / "out").iterdir()]) == 2
    assert main(["export", "kvpress", "method=h2o", *where]) == 2
    assert "nothing was compressed" in capsys.readouterr().err


def test_no_claim_is_decided_by_a_method_that_compressed_nothing(tmp_path, monkeypatch):
    idle, less = "snapkv kv_ratio=1.0", "h2o budget=0.5"
    ledger = tuple(
        claims.Claim("vatp", name, "quote", "where", "tested", "no_worse", ((a, b),), datasets=("qasper", "hotpotqa"))
        for name, a, b in (("first", idle, less), ("second", less, idle), ("both", less, "h2o budget=0.25"))
    )
    monkeypatch.setattr(claims, "load", lambda paper: ledger)
    prepared = claim_runner.prepare(["vatp"], "tiny", ["limit=2", f"results={tmp_path}"])
    claim_runner.measure(prepared)
    verdicts = {v.claim.id: v for v in claim_runner.reach_verdicts(prepared, "tiny")["points"]}
    for name in ("first", "second"):
        assert verdicts[name].verdict == "not testable here" and verdicts[name].mean is None
        assert "nothing was compressed by snapkv kv_ratio=1" in verdicts[name].reason
    assert verdicts["both"].mean is not None and not verdicts["both"].reason


def test_distributions_that_differ_are_not_the_full_caches(tmp_path):
    """Long texts have no answer: where all tokens and bytes are held the divergences alone tell."""
    prepared = prepare("dataset=fidelity/tiny", "limit=1", "method=h2o", "kv_size=4000", f"results={tmp_path}")
    experiment.measure(prepared, quiet=True)
    (group,) = prepared.groups
    _, h2o = group.cells
    stored = prepared.store.samples(h2o.id)
    reader = SampleReader(prepared.store)
    assert is_unchanged(h2o, stored, reader)
    far = {
        kind: replace(text, kl=tuple(x + 0.1 for x in text.kl))
        for s in stored.values()
        for kind, text in s.fidelity.items()
    }
    changed = {name: replace(s, fidelity=far) for name, s in stored.items()}
    assert not is_unchanged(h2o, changed, reader)

"""Divergences of llama-perplexity and of REFRACT, read from what the programs write."""

import json

import pytest

from kvbench.cli.main import main

# the form of the log's end; the numbers are made up
LOG = """main: build = 5213
0.02.899.567 I kl_divergence: computing over 6 chunks, n_ctx=512, batch_size=2048, n_seq=4
./llama-perplexity -m model.gguf --kl-divergence -ctk q4_0 -ctv q4_0
chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence
   1       6.2473 ±    1.1462       0.00254 ±    0.00123       0.00048 ±    0.00005

====== Perplexity statistics ======
Mean PPL(Q)                   :   6.500000 ±   0.155093
Mean PPL(base)                :   6.400000 ±   0.155128
Cor(ln(PPL(Q)), ln(PPL(base))):  99.98%
Mean ln(PPL(Q)/PPL(base))     :   0.015504 ±   0.000476
Mean PPL(Q)/PPL(base)         :   1.015625 ±   0.000476
Mean PPL(Q)-PPL(base)         :   0.100000 ±   0.003046

====== KL divergence statistics ======
Mean    KLD:   0.040000 ±   0.002000
Maximum KLD:   2.500000
99.9%   KLD:   0.720000
99.0%   KLD:   0.310000
Median  KLD:   0.010000
 1.0%   KLD:  -0.000002
Minimum KLD:  -0.000100

====== Token probability statistics ======
Mean    Δp: -0.250 ± 0.013 %
Maximum Δp: 50.000%
RMS Δp    :  4.923 ± 0.032 %
Same top p: 90.500 ± 0.400 %
"""

REPORT = {
    "schema": "refract.report.v0.1",
    "model": "some-model",
    "reference": "ctk=f16,ctv=f16",
    "candidate": "ctk=q8_0,ctv=turbo4",
    "composite": {"composite": 91.0, "band": "EXCELLENT"},
    "axes": {"gtm": {}, "kld": {"chunks": 32, "ctx": 512, "mean_kld": 0.0125, "ppl": 7.5, "same_topp_pct": 95.5}},
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "q4.log").write_text(LOG, encoding="utf-8")
    (tmp_path / "report.json").write_text(json.dumps(REPORT))
    (tmp_path / "notes.txt").write_text("nothing of the kind")
    return tmp_path


def test_logs_and_reports_are_read(folder, capsys):
    assert main(["score", str(folder), "--json"]) == 0
    llama, refract = json.loads(capsys.readouterr().out)["distances"]
    assert (llama["label"], llama["kl_mean"], llama["error"]) == ("q4_0", 0.04, 0.002)
    assert llama["percentiles"]["99.9%"] == 0.72 and llama["percentiles"]["1.0%"] == -0.000002
    assert (llama["top1"], llama["ppl"], llama["ppl_ratio"]) == (90.5, 6.5, 1.015625)
    assert (refract["label"], refract["kl_mean"], refract["top1"]) == ("ctk=q8_0,ctv=turbo4", 0.0125, 95.5)
    assert (llama["chunks"], llama["context"]) == (6, 512)
    assert (refract["chunks"], refract["context"], refract["imported"]) == (32, 512, True)


def test_they_are_shown_and_stored_as_imported(folder, tmp_path, capsys):
    results = tmp_path / "results"
    assert main(["score", str(folder / "q4.log"), "--store", "model=mine", f"results={results}"]) == 0
    out = capsys.readouterr().out
    assert "0.0400 ± 0.0020" in out and "Imported: the numbers are the programs' own" in out
    assert main(["list", "runs", f"results={results}", "--json"]) == 0
    (cell,) = json.loads(capsys.readouterr().out)["runs"]
    assert cell["label"] == "llama-perplexity q4_0" and cell["imported"]
    assert main(["export", "jsonl", f"results={results}", f"output={tmp_path / 'out.jsonl'}"]) == 0
    line = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    assert line["fidelity"]["reference"]["kl_mean"] == 0.04


def test_a_log_that_ends_early_is_one_message(tmp_path, capsys):
    path = tmp_path / "cut.log"
    path.write_text(LOG.partition("Mean    KLD")[0], encoding="utf-8")
    assert main(["score", str(path)]) == 2
    assert "there is no line 'Mean KLD'" in capsys.readouterr().err


@pytest.mark.parametrize("axes", [{}, {"kld": {"mean_kld": float("nan")}}])
def test_a_report_without_divergences_is_one_message(axes, tmp_path, capsys):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(REPORT | {"axes": axes}))
    assert main(["score", str(path)]) == 2
    assert "is no whole report of REFRACT" in capsys.readouterr().err

"""Fidelity: its summaries, its windows, and runs and tables end to end."""

import csv
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import kvbench
from kvbench.base.errors import UsageError
from kvbench.cli.main import main
from kvbench.papers.claims import claims, evidence, ledger
from kvbench.run import wandb_logger
from kvbench.store.fidelity import TextFidelity, join_texts, log_ratio_of_means, summarise_texts
from kvbench.studies import format_table
from kvbench.tasks import fidelity as texts
from kvbench.tasks.base import LoadContext
from kvbench.tasks.metrics import stats


@pytest.fixture(autouse=True)
def few_tiny_texts(monkeypatch):
    """There are 12 texts of the tiny model: no more than that many windows are read, and all would be tokenised."""
    monkeypatch.setattr(texts, "TINY_DOCUMENTS", 12)


def text(kl, same="1", log_ratio=0.0):
    return TextFidelity(tuple(kl), (same * len(kl))[: len(kl)], log_ratio, 0.01 * len(kl), 2.0 * len(kl), 1e-9)


def test_summaries_pool_tokens_over_prompts():
    some = [text([0.1 * i, 0.3], "10", 0.02) for i in range(10)]
    s = summarise_texts(some)
    assert (s.n, s.n_tokens) == (10, 20) and s.kl_mean == pytest.approx((4.5 + 3) / 20) and s.top1 == 50
    assert s.ppl_ratio == pytest.approx(math.exp(0.01)) and s.perplexity == pytest.approx(math.exp(2))
    assert s.shift_rms == pytest.approx(10) and s.kl_p90 is None and s.kl_max == pytest.approx(0.9)
    assert s.ci == pytest.approx(stats.ratio_interval(np.array([(0.1 * i + 0.3, 2.0) for i in range(10)])))
    assert s.ci[0] < s.kl_mean < s.ci[1]
    assert s.top1_ci[0] < 50 < s.top1_ci[1]  # equal on every text: what so many cannot exclude
    assert not s.at_floor and summarise_texts([text([2e-9])]).at_floor and summarise_texts([]) is None
    # an interval is of prompts: longer texts of the same kind do not narrow it
    longer = summarise_texts([text([0.1 * i, 0.3] * 100, "10") for i in range(10)])
    assert longer.ci == pytest.approx(s.ci) and longer.kl_p99 is not None and longer.kl_p999 is None


def test_every_number_of_a_summary_by_hand():
    few = TextFidelity((0.0, 0.1, 0.8), "110", 0.3, 0.03, 1.5, 2e-3)
    many = TextFidelity(tuple([0.2] * 97), "1" * 97, 0.7, 0.07, 8.5, 1e-3)
    s = summarise_texts([few, many])
    assert (s.n, s.n_tokens) == (2, 100) and s.kl_mean == pytest.approx((0.9 + 19.4) / 100)
    assert (s.kl_median, s.kl_max) == (pytest.approx(0.2), pytest.approx(0.8))
    assert s.kl_p90 == pytest.approx(0.2) and s.kl_p99 is None  # 100 tokens are enough for the 90th of 100
    assert s.top1 == pytest.approx(99) and s.shift_rms == pytest.approx(100 * math.sqrt(0.1 / 100))
    assert s.perplexity == pytest.approx(math.exp(10 / 100)) and s.ppl_ratio == pytest.approx(math.exp(1 / 100))
    assert s.floor == pytest.approx((3 * 2e-3 + 97 * 1e-3) / 100)  # by tokens, as the mean divergence is
    spread = summarise_texts([TextFidelity(tuple(i / 1000 for i in range(1000)), "1" * 1000, 0, 0, 0, 1e-9)])
    assert spread.kl_p90 == pytest.approx(0.8991) and spread.kl_p99 == pytest.approx(0.98901)


def test_intervals_of_a_summary_are_of_what_stands_beside_them():
    some = [TextFidelity((0.1, 0.1), "11" if i % 3 else "10", 0.1 * i, 0, 0, 1e-9) for i in range(12)]
    s = summarise_texts(some)
    shares = [0.5 if i % 3 == 0 else 1.0 for i in range(12)]
    low, high = stats.mean_interval(shares)
    # the text with equal choices everywhere is no bound here: the interval is that of a pooled share
    assert s.top1_ci == pytest.approx((100 * low, 100 * high))
    logs = stats.mean_interval([0.05 * i for i in range(12)], None)
    assert s.ppl_ratio_ci == pytest.approx(tuple(np.exp(logs)))
    assert s.ppl_ratio_ci[0] < s.ppl_ratio < s.ppl_ratio_ci[1] and s.top1_ci[0] < s.top1 < s.top1_ci[1]


@pytest.mark.e2e("measures a run")
def test_csv_and_dashboards_have_the_numbers_of_json(tmp_path, capsys):
    words = ["run", "dataset=fidelity/tiny", "method=snapkv", "kv_ratio=0.5", "length=64", "forced=8", "limit=8"]
    words += [f"results={tmp_path}"]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["rows"][1]["cells"][0]["fidelity"]
    assert main([*words, "--format", "csv"]) == 0
    row = [*csv.DictReader(capsys.readouterr().out.splitlines())][1]
    for kind in ("reference", "greedy"):
        numbers = {name: float(row[f"{kind}_{name}"]) for name in ("kl_mean", "top1", "ppl_ratio", "floor", "n_tokens")}
        assert numbers == {name: told[kind][name] for name in numbers}
        assert [float(row[f"{kind}_kl_{end}"]) for end in ("low", "high")] == told[kind]["ci"]
    assert [float(row[f"reference_ppl_ratio_{end}"]) for end in ("low", "high")] == told["reference"]["ppl_ratio_ci"]
    flat = wandb_logger.flatten_names({"fidelity": told})
    assert flat["fidelity/reference/kl_mean"] == told["reference"]["kl_mean"]
    assert flat["fidelity/reference/ci_low"] == told["reference"]["ci"][0]


def test_windows_of_one_document_are_drawn_together():
    """Each prompt twice is no more evidence: the interval stays; apart it would be narrower by the root of two."""
    prompts = [replace(text([0.1 * i, 0.3], "10"), document=f"d{i}") for i in range(10)]
    once, twice = summarise_texts(prompts), summarise_texts([*prompts, *prompts])
    assert (twice.n, twice.n_tokens) == (20, 40) and twice.kl_mean == pytest.approx(once.kl_mean)
    assert twice.ci == pytest.approx(once.ci)
    apart = summarise_texts([*(replace(p, document="") for p in prompts * 2)])
    assert np.diff(apart.ci) < 0.8 * np.diff(once.ci)
    theirs = [replace(p, kl=(x, 0.2)) for p, x in zip(prompts, np.linspace(0.1, 2, 10), strict=True)]
    assert log_ratio_of_means([*prompts] * 2, theirs * 2)[1] == pytest.approx(log_ratio_of_means(prompts, theirs)[1])
    assert "document" not in text([0.1]).record() and TextFidelity.read(prompts[1].record()) == prompts[1]


def test_methods_are_compared_by_the_log_ratio_of_their_means_over_paired_prompts():
    theirs = [text([x, x]) for x in np.linspace(0.1, 2, 12)]
    ours = [text([2 * t.kl[0], 2 * t.kl[1]]) for t in theirs]
    ratio, interval = log_ratio_of_means(ours, theirs)
    assert ratio == pytest.approx(math.log(2)) and interval is None  # twice on every prompt
    ours[0] = text([1.0, 1.0])
    ratio, interval = log_ratio_of_means(ours, theirs)
    assert interval[0] < ratio < interval[1] and interval[0] > 0


@pytest.fixture(scope="module")
def tokenizer():
    return kvbench.load_model("tiny")[1]


def test_windows_are_the_beginnings_of_documents_or_llama_cpps(tmp_path, tokenizer):
    words = [tokenizer.decode([i]) for i in range(30, 60)]
    folder = tmp_path / "paul_graham"
    folder.mkdir()
    for name, size in (("a", 500), ("b", 20), ("c", 600)):
        (folder / f"{name}.txt").write_text(" ".join(words[i % 30] for i in range(size)))

    def load(*selection, **knobs):
        return texts.load(LoadContext("fidelity", selection, tokenizer, data=str(tmp_path)), forced=50, **knobs)

    (task,) = load("essays", windows="prefix", length=100)
    assert [e.id for e in task.examples] == ["fidelity-essays-100-a", "fidelity-essays-100-c"] and task.fidelity
    assert {len(e.scored.ids) for e in task.examples} == {150}
    assert task.examples[0].scored.ids[0] == tokenizer.bos_token_id
    (task,) = load("essays", windows="llamacpp", length=None)
    assert {len(e.scored.ids) for e in task.examples} == {512} and task.examples[0].scored.divisor == 255
    first = len(tokenizer.encode((folder / "a.txt").read_text()))
    assert 512 < first < 1024 and [e.scored.document for e in task.examples] == ["a", "c", "a"]
    # the same windows and counted predictions, the first half read at once; documents take turns
    (half,) = load("essays", windows="halves", length=None)
    assert [(e.id, e.scored.ids) for e in half.examples] == [(e.id, e.scored.ids) for e in task.examples]
    for one, other in zip(half.examples, task.examples, strict=True):
        assert (one.scored.prefix, other.scored.prefix) == (256, 1)
        # the first token that is fed is predicted by the prompt; from the middle on 255 count
        assert (one.max_new_tokens, other.max_new_tokens) == (256, 511)
        assert one.scored.scored_from == other.scored.scored_from == 256
    with pytest.raises(UsageError, match="less than two windows of 4096"):
        load("essays", windows="llamacpp", length=4096)
    with pytest.raises(UsageError, match="no text of 9050 tokens: lower length="):
        load("essays", windows="prefix", length=9000)
    # without a selection, those whose files are there
    some = load(windows="prefix", length=100)
    assert [t.id for t in some] == ["fidelity/tiny", "fidelity/essays"]
    with pytest.raises(UsageError, match=r"wikitext2/test\.txt"):
        load("wikitext2", windows="prefix", length=100)


@pytest.mark.e2e("measures runs")
def test_a_run_compares_answers_and_texts_stores_them_and_prints_the_same_again(tmp_path, capsys):
    words = ["run", "method=snapkv,think", "kv_size=48", "ratio=0.4", "dataset=tiny/listing,fidelity/tiny", "limit=8"]
    words += ["fidelity=true", "length=96", "forced=12", f"results={tmp_path}"]
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    for row in report["rows"]:
        for cell in row["cells"]:
            for summary in cell["fidelity"].values():
                assert summary["n"] in (7, 8) and summary["at_floor"] == (row["method"] == "full")
    line = json.loads(next((tmp_path / "cells").glob("*/samples-*.jsonl")).read_text().splitlines()[0])
    assert set(line["fidelity"]) <= {"reference", "greedy"}
    stored = {p: p.read_bytes() for p in tmp_path.rglob("samples-*.jsonl")}
    assert main(words) == 0
    out = capsys.readouterr().out
    assert {p: p.read_bytes() for p in tmp_path.rglob("samples-*.jsonl")} == stored
    assert "fidelity/tiny on the reference text" in " ".join(out.split()) and "KL: divergence" in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.e2e("measures runs")
def test_without_the_full_cache_among_the_rows_it_is_read_and_not_stored(tmp_path, capsys):
    words = [
        "run",
        "method=snapkv",
        "kv_size=48",
        "dataset=tiny/needle",
        "limit=2",
        "fidelity=true",
        f"results={tmp_path}",
    ]
    assert main([*words, "--json"]) == 0
    with_full = json.loads(capsys.readouterr().out)["rows"][1]["cells"][0]["fidelity"]
    assert main([*words[:-1], f"results={tmp_path / 'alone'}", "baseline=false", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    alone, beside = row["cells"][0]["fidelity"]["greedy"], with_full["greedy"]
    assert alone == beside and alone["kl_mean"] > 0
    assert len([*(tmp_path / "alone" / "cells").iterdir()]) == 1


@pytest.mark.e2e("measures runs")
def test_through_the_cache_every_token_is_read_as_stored_and_selection_is_refused(tmp_path, capsys):
    words = ["run", "dataset=fidelity/tiny", "fidelity=through_cache", "length=64", f"results={tmp_path}", "limit=2"]
    assert main([*words, "method=kivi", "bits=4", "residual=32", "--json"]) == 0
    full, kivi = (row["cells"][0]["fidelity"] for row in json.loads(capsys.readouterr().out)["rows"])
    assert set(kivi) == {"reference"} and kivi["reference"]["n_tokens"] == 2 * 31  # 64 - 1 - 32
    assert full["reference"]["kl_max"] == 0 < kivi["reference"]["kl_mean"]
    assert (
        main([*words, "method=snapkv"]) == 2 and "has no prompt that snapkv could compress" in capsys.readouterr().err
    )
    assert main([*words, "method=nvfp4"]) == 2
    assert "no whole prompt from which nvfp4 could set" in capsys.readouterr().err
    assert main(["run", "fidelity=through_cache", "dataset=tiny"]) == 2
    assert "take dataset=fidelity/wikitext2" in capsys.readouterr().err
    assert main(["run", "fidelity=maybe"]) == 2 and "kl_tokens='maybe' is not possible" in capsys.readouterr().err


def test_claims_are_told_by_divergence_and_likelihood_beside_points():
    def sample(**texts):
        return SimpleNamespace(score=None, fidelity={kind: text(kl) for kind, kl in texts.items()} or None)

    stored = {
        "near": {"a": sample(greedy=[0.1, 0.3], reference=[5.0]), "b": sample(reference=[0.5]), "c": sample()},
        "far": {"a": sample(greedy=[3.0]), "b": sample(reference=[0.4]), "c": sample()},
    }
    store = SimpleNamespace(samples=stored.get)
    near, far = SimpleNamespace(id="near"), SimpleNamespace(id="far")
    group = SimpleNamespace(examples=[SimpleNamespace(id=i) for i in "abc"], task=SimpleNamespace(metric="f1"))
    comparison = evidence.Comparison(group, ((near, far),))

    def differences(measure):
        return evidence.pair_differences(evidence.NumberReader(store), [comparison], measure).tolist()

    # each prompt counts alike, whatever its size
    assert differences(claims.DIVERGENCE) == [[pytest.approx(2.8 / 3.2)], [pytest.approx(-0.1 / 0.9)]]
    # nats lost on the reference, per token: only b has one behind both
    stored["near"]["b"] = SimpleNamespace(score=None, fidelity={"reference": replace(text([0.5, 0.1]), log_ratio=0.6)})
    stored["far"]["b"] = SimpleNamespace(score=None, fidelity={"reference": replace(text([0.4, 0.2]), log_ratio=-0.2)})
    assert differences(claims.LIKELIHOOD) == [[pytest.approx(-0.1 - 0.3)]]
    stored["near"]["b"].fidelity["reference"] = stored["far"]["b"].fidelity["reference"] = text([0.0])
    assert differences(claims.DIVERGENCE)[1] == [0]  # both at the floor

    found = {"verdict": "undecided", "side": "", "mean": 35.0, "ci": [-20.0, 90.0], "p_for": 0.4, "p_against": 1.0}
    found |= {"p_same": None, "needs": 1234, "elsewhere": None, "why_not": "", "n": {"a": 9}, "tasks": {"a": 35.0}}
    found |= {"settings": [35.0]}
    told = ledger.describe_evidence(
        {"test": "no_worse", "margin": 1.0, "measures": {"points": found, "divergence": found}}
    )
    assert told == (
        "points: undecided\n+35.0 [−20.0, 90.0], margin 1\nn 9 in 1 task, p 0.4\ntasks for 1, even 0, against 0\n"
        "about 1,234 pairs would decide\n"
        "divergence: undecided\n+35.0 % [−20.0, 90.0], margin 10 %\nn 9 in 1 task, p 0.4\n"
        "tasks for 1, even 0, against 0\n"
        "about 1,234 pairs would decide"
    )
    told = ledger.describe_evidence({"test": "better", "margin": 1.0, "measures": {"divergence": found}})
    assert told.startswith("+35.0 % [−20.0, 90.0]\n")


@pytest.mark.e2e("measures a table")
def test_the_table_of_formats_orders_them_by_what_their_bytes_keep(tmp_path, capsys, monkeypatch):
    rows = [{"label": f"KIVI, {bits} bits", "method": "kivi", "bits": bits, "residual": 32} for bits in (8, 4, 2)]
    monkeypatch.setitem(format_table.TABLES, "formats", {"blocks": {"KIVI": rows}})
    words = ["table", "formats", "dataset=fidelity/tiny,tiny/needle", "limit=2", f"results={tmp_path}"]
    words += ["length=128", "forced=12"]
    assert main([*words, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    rows = {row["label"]: row for row in content["rows"]}
    kl = {name: row["fidelity"]["reference"]["kl_mean"] for name, row in rows.items()}
    assert kl["full"] == 0 < kl["KIVI, 8 bits"] < kl["KIVI, 4 bits"] < kl["KIVI, 2 bits"]
    assert rows["KIVI, 2 bits"]["bytes_percent"] < rows["KIVI, 8 bits"]["bytes_percent"] < 100
    assert set(rows["full"]["scores"]) == {"tiny"} == set(rows["full"]["score_intervals"])
    assert all(p["log_ratio"] <= 0 for p in content["pairs"])
    assert main([*words, "--stored", "--format", "md"]) == 0
    out = capsys.readouterr().out
    assert "told apart" in out and "KIVI, 2 bits" in out
    assert "n = tiny 2 examples" in out
    assert main(["table", "formats", "method=h2o"]) == 2 and "table formats sets it" in capsys.readouterr().err
    assert main(["table", "ranking"]) == 2
    assert "use `kvbench suite retain-v1-mini method=...`" in capsys.readouterr().err


@pytest.mark.e2e("measures a table")
def test_formats_lose_more_when_the_prompt_is_read_through_them(tmp_path, capsys, monkeypatch):
    rows = [{"method": "q4_0"}, {"method": "int4", "rotate": "none"}]
    monkeypatch.setitem(format_table.TABLES, "through_cache", {"blocks": {"4 bits": rows}})
    words = ["table", "through_cache", "limit=9", "length=128", f"results={tmp_path}"]
    assert main([*words, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)["rows"]
    assert [row["label"] for row in content] == ["q4_0", "int4 rotate=none"]
    for row in content:
        assert row["exact"]["n_tokens"] == row["through_cache"]["n_tokens"] == 9 * 63
        assert row["exact"]["kl_mean"] < row["through_cache"]["kl_mean"]
        ratio = np.log(row["through_cache"]["kl_mean"] / row["exact"]["kl_mean"])
        assert row["log_ratio"] == pytest.approx(ratio, abs=1e-6) and row["ci"][0] < ratio < row["ci"][1]
    assert main([*words, "--stored"]) == 0
    out = capsys.readouterr().out
    assert "n = 9 windows, 567 tokens" in out and max(map(len, out.splitlines())) <= 100
    assert main(["table", "through_cache", "fidelity=true"]) == 2
    assert "table through_cache sets it" in capsys.readouterr().err


def test_texts_are_joined_position_by_position():
    first = TextFidelity(kl=(0.1, 0.3), same="10", log_ratio=0.5, shift=0.2, loss=2.0, floor=1e-9)
    second = TextFidelity(kl=(0.2,), same="1", log_ratio=-0.1, shift=0.1, loss=1.0, floor=4e-9)
    joined = join_texts([first, second])
    assert joined.kl == (0.1, 0.3, 0.2) and joined.same == "101"
    # sums add up; the floor is a mean, 2/3 of 1e-9 and 1/3 of 4e-9
    assert joined.log_ratio == pytest.approx(0.4) and joined.shift == pytest.approx(0.3) and joined.loss == 3.0
    assert joined.floor == pytest.approx(2e-9)

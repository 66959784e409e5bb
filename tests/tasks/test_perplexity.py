"""Perplexity under compression: against one dense forward pass, and end to end."""

import json
import math
from pathlib import Path

import pytest
import torch
from support import papers_data
from support.data import data_path
from support.families import FAMILIES, build, prompt
from transformers import AutoTokenizer

import kvbench
from kvbench.base.errors import UsageError
from kvbench.cli.main import main
from kvbench.engine.likelihood import teacher_force
from kvbench.tasks import perplexity
from kvbench.tasks.base import LoadContext


@pytest.mark.parametrize("family", FAMILIES)
def test_full_cache_likelihoods_equal_one_dense_pass(family):
    model, ids = build(family), prompt(35, 3)
    with torch.no_grad():
        logp = model(ids[None]).logits[0, 24:-1].log_softmax(-1)
    expected = -logp.gather(1, ids[25:, None])[:, 0]
    for chunk in (1, 7, 100):
        (cache,) = kvbench.prefill(model, ids[:25], ["full"])
        loss = teacher_force(model, [cache], ids[25:], chunk)[0].losses
        torch.testing.assert_close(loss, expected, atol=2e-4, rtol=1e-4)


def test_methods_together_equal_methods_alone_and_compression_costs_something():
    model, ids = build("llama"), prompt(120, 3)
    caches = kvbench.prefill(model, ids[:80], ["full", "snapkv+think"], kv_size=20, recent=4, **{"snapkv.window": 8})
    together = [f.losses for f in teacher_force(model, caches, ids[80:], 16)]
    for cache, loss in zip(caches, together, strict=True):
        torch.testing.assert_close(teacher_force(model, [cache], ids[80:], 16)[0].losses, loss, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(together[0], together[1], atol=1e-3)


def write_text(tmp_path):
    folder = tmp_path / "data" / "wikitext2"
    folder.mkdir(parents=True)
    (folder / "test.txt").write_text("the cold river shines slowly. " * 200)
    return f"data.root={tmp_path / 'data'}"


def run(capsys, *arguments):
    status = main(["run", *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out or "null")


def test_end_to_end_prints_perplexities_and_their_difference(tmp_path, capsys):
    root = write_text(tmp_path)
    arguments = ["dataset=wikitext2", "length=128", "prefix=96", root, "method=streamingllm", "kv_size=8"]
    status, report = run(capsys, *arguments, f"results={tmp_path / 'r'}")
    assert status == 0
    full, small = (r["cells"][0] for r in report["rows"])
    assert full["metric"] == "perplexity"
    assert full["score"] > 1
    assert small["delta"] == pytest.approx(small["score"] - full["score"], rel=1e-6)
    lines = [json.loads(x) for p in (tmp_path / "r").glob("cells/*/samples-0.jsonl") for x in p.open()]
    assert {x["new_tokens"] for x in lines} == {32}
    ours = [x["score"] for x in lines if x["kept"] == 96]
    assert full["score"] == pytest.approx(math.exp(sum(ours) / len(ours)))


@pytest.mark.e2e("whole runs")
def test_word_level_divides_by_words(tmp_path, capsys):
    root = write_text(tmp_path)
    base = ["dataset=wikitext2", "length=128", "prefix=96", root, "method=full", f"results={tmp_path / 'r'}"]
    token = run(capsys, *base)[1]["rows"][0]["cells"][0]["score"]
    word = run(capsys, *base, "unit=word")[1]["rows"][0]["cells"][0]["score"]
    assert word > token > 1


@pytest.mark.parametrize("fast", [True, False])
def test_words_are_those_of_the_text_that_end_in_the_scored_part(tmp_path, fast, monkeypatch):
    text = "extraordinary tales, of unspeakable rivers\n shine a  while; internationally " * 6
    (tmp_path / "text.txt").write_text(text)
    tokenizer = AutoTokenizer.from_pretrained(Path(kvbench.__file__).parent / "models/embedded/tiny")
    monkeypatch.setattr(type(tokenizer), "is_fast", fast)
    context = LoadContext("own", tokenizer=tokenizer, data=str(tmp_path))
    (task,) = perplexity.load(context, length=20, prefix=9, chunk=4, bos=True, unit="word", file="text.txt")
    ids = tokenizer.encode(text, add_special_tokens=False)
    letters = [len(tokenizer.decode(ids[:n])) for n in range(len(ids) + 1)]
    ends = [i for i in range(1, len(text)) if text[i].isspace() and not text[i - 1].isspace()]
    expected = [sum(letters[n + 8] < end <= letters[n + 19] for end in ends) for n in range(0, len(ids) - 18, 19)]
    actual = [e.meta["words"] for e in task.examples]
    assert actual == expected and len(set(actual)) > 1
    assert {e.scored.divisor for e in task.examples} == {sum(actual) / len(actual)}
    # counting the pieces of the scored text counts a word once more wherever a part begins or ends inside it
    assert sum(actual) < sum(len(tokenizer.decode(list(e.scored.ids[9:])).split()) for e in task.examples)


@pytest.mark.parametrize(
    ("knob", "message"),
    [
        ("prefix=128", "below length"),
        ("chunk=0", "chunk=0"),
        ("unit=byte", "token, word"),
        ("length=100000", "less than one"),
    ],
)
def test_bad_windows_are_refused(knob, message, tmp_path, capsys):
    root = write_text(tmp_path)
    arguments = {"length": "length=128", "prefix": "prefix=96", knob.split("=")[0]: knob}
    assert main(["run", "dataset=wikitext2", *arguments.values(), root, f"results={tmp_path / 'r'}"]) == 2
    assert message in capsys.readouterr().err


def test_missing_text_says_both_ways_to_get_it(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("KVBENCH_DATA", raising=False)
    assert main(["run", "dataset=ptb", f"results={tmp_path}"]) == 2
    message = capsys.readouterr().err
    assert "KVBENCH_DATA" in message
    assert "data fetch ptb" in message


def test_caches_of_different_prompts_are_refused():
    model = build("llama")
    caches = [kvbench.prefill(model, prompt(n), ["full"])[0] for n in (10, 11)]
    with pytest.raises(UsageError, match="equally many"):
        teacher_force(model, caches, prompt(5), 2)


@pytest.mark.e2e("whole runs")
def test_real_wikitext_runs(tmp_path, capsys):
    root = data_path("wikitext2", "test.txt").parent.parent
    status, report = run(
        capsys, "dataset=wikitext2", "length=512", "prefix=256", f"data.root={root}", "limit=2", f"results={tmp_path}"
    )
    assert status == 0
    assert report["rows"][0]["cells"][0]["n"] == 2


def test_streams_past_the_context_run_only_with_rolled_positions(tmp_path, capsys):
    folder = tmp_path / "data" / "wikitext2"
    folder.mkdir(parents=True)
    (folder / "test.txt").write_text("the cold river shines slowly. " * 200)
    model = papers_data.model(tmp_path / "model", context=512)
    stream = [f"model={model}", "dataset=wikitext2", "length=700", "prefix=256", "chunk=32"]
    stream += [f"data.root={tmp_path / 'data'}"]
    rolled = ["method=streamingllm", "mode=rolled", "kv_size=128"]
    status, report = run(capsys, *stream, *rolled, f"results={tmp_path / 'r'}")
    full, streaming = (r["cells"][0] for r in report["rows"])
    assert status == 1
    assert full["status"] == "refused"
    assert "exceeds the model's context of 512" in full["reason"]
    assert streaming["status"] == "measured"
    assert streaming["kept"] == 128
    assert run(capsys, *stream, *rolled, "baseline=false", f"results={tmp_path / 'r'}")[0] == 0


def test_rolled_h2o_streams_too(tmp_path, capsys):
    root = write_text(tmp_path)
    arguments = ["dataset=wikitext2", "length=256", "prefix=64", "chunk=8", root, "limit=1"]
    rolled = ["method=h2o", "variant=orig", "positions=rolled", "kv_size=32"]
    status, report = run(capsys, *arguments, *rolled, f"results={tmp_path / 'r'}")
    assert status == 0
    assert report["rows"][1]["cells"][0]["score"] > 1


def test_the_interval_of_a_perplexity_difference_resamples_pairs():
    import numpy as np

    from kvbench.report.summary import shown_delta

    rng = np.random.default_rng(3)
    peers_value = rng.normal(3.0, 0.4, 40)
    ours = peers_value + rng.normal(0.2, 0.02, 40)
    actual = shown_delta(list(zip(ours, peers_value, strict=True)), math.exp)
    draws = [rng.integers(40, size=40) for _ in range(4000)]
    slow = [math.exp(ours[d].mean()) - math.exp(peers_value[d].mean()) for d in draws]
    low, high = np.quantile(slow, [0.025, 0.975])
    assert actual.mean == pytest.approx(math.exp(ours.mean()) - math.exp(peers_value.mean()))
    assert actual.ci == pytest.approx([low, high], rel=0.05)

"""kvbench as a model of lm-evaluation-harness, against its own hf model. Run by `make test-peers`."""

import json
import subprocess
import sys
from statistics import fmean

import pytest
import torch
import yaml
from conftest import SMOL

import kvbench
from kvbench.base.errors import UsageError
from kvbench.engine.hf_cache import TransformersCache
from kvbench.engine.likelihood import teacher_force

pytest.importorskip("lm_eval", reason="lm-eval is not installed here: make test-peers")
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from kvbench.lm_eval import KvbenchLM

CITIES = ("Paris", "Rome", "Oslo", "Cairo", "Lima", "Delhi")
ANIMALS = ("horse", "eagle", "tiger", "whale", "camel", "snake")
KNOBS = {"kv_ratio": 0.5, "snapkv.window": 8}


def rows():
    """Six cities, each with its animal, and a question about one of them."""
    facts = [f"The animal of {c} is the {a}." for c, a in zip(CITIES, ANIMALS, strict=True)]
    for i, city in enumerate(CITIES):
        text = " ".join([*facts[i:], *facts[:i]])
        yield {"text": text, "question": f"Question: Which animal? The animal of {city} is the", "answer": ANIMALS[i]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Tasks for lm-eval: one that generates, one that chooses, one that has no context, one of whole texts."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    prompt = "{{text}}\n{{question}}"
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    choice = {"output_type": "multiple_choice", "doc_to_choice": list(ANIMALS), "doc_to_target": "answer"}
    measures = [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in ("acc", "acc_norm")]
    until = {"until": ["\n", "."], "max_gen_toks": 12}
    for task in (
        {
            "task": "animals_generate",
            "output_type": "generate_until",
            "doc_to_text": prompt,
            "doc_to_target": " {{answer}}",
            "generation_kwargs": until,
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        },
        {"task": "animals_choose", "doc_to_text": prompt, "metric_list": measures, **choice},
        {"task": "no_context", "doc_to_text": "", "metric_list": measures, **choice},
        {
            "task": "whole_text",
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
    ):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump({**common, **task, "metadata": {"version": 1}}))
    return folder


@pytest.fixture(scope="module")
def tasks(folder):
    return TaskManager(include_path=str(folder), include_defaults=False)


def evaluated(lm, tasks, *names):
    """lm-eval's report."""
    return simple_evaluate(model=lm, tasks=list(names), task_manager=tasks, bootstrap_iters=100, log_samples=True)


@pytest.fixture(scope="module")
def loaded(smol):
    return kvbench.load_model(SMOL, device="cpu")


def test_the_full_cache_has_every_digit_of_lm_evals_own_model(loaded, tasks):
    model, tokenizer = loaded
    names = "animals_generate", "animals_choose"
    theirs = evaluated(HFLM(pretrained=model, tokenizer=tokenizer), tasks, *names)
    ours = evaluated(KvbenchLM(pretrained=SMOL, device="cpu"), tasks, *names)
    scores = theirs["results"]["animals_generate"]["exact_match,none"], theirs["results"]["animals_choose"]["acc,none"]
    assert all(0 < score < 1 for score in scores)
    assert ours["results"] == theirs["results"] and ours["n-samples"] == theirs["n-samples"]
    for name in names:
        for a, b in zip(ours["samples"][name], theirs["samples"][name], strict=True):
            if name == "animals_generate":
                assert a["filtered_resps"] == b["filtered_resps"]
            else:
                for (x, greedy), (y, same) in zip(a["filtered_resps"], b["filtered_resps"], strict=True):
                    assert float(x) == pytest.approx(float(y), abs=1e-3) and greedy == same


def kept(model, ids, split):
    """What kvbench itself keeps of a prompt that is compressed up to ``split`` and read behind it."""
    (cache,) = kvbench.prefill(model, ids[:split], ["snapkv+think"], **KNOBS)
    return cache if split == len(ids) else kvbench.extend(model, cache, ids[split:])


@pytest.mark.parametrize(("separator", "pieces"), [("", None), ("Question:", None), ("", 16)])
def test_answers_and_likelihoods_are_those_of_kvbenchs_own_compressed_caches(separator, pieces, tasks):
    lm = KvbenchLM("tiny", "snapkv+think", separator=separator, shared_prefix=pieces, **KNOBS)
    report = evaluated(lm, tasks, "animals_generate", "animals_choose")
    shares = []
    for row, generated, chosen in zip(rows(), *report["samples"].values(), strict=True):
        context, question = row["text"] + "\n", row["question"]
        ids = lm.tok_encode(context + question)
        split = len(lm.tok_encode(context)) if separator else len(ids)
        (answer,) = kvbench.generate(lm.model, [kept(lm.model, ids, split)], 12, lm.eot_token_id)
        want = lm.tok_decode(answer).partition("\n")[0].partition(".")[0]
        assert generated["resps"] == [[want]]
        cache = kept(lm.model, ids, split)
        for animal, ((logp, _),) in zip(ANIMALS, chosen["resps"], strict=True):
            tokens = torch.tensor(lm.tok_encode(f"{context}{question} {animal}")[len(ids) :])
            (forced,) = teacher_force(lm.model, [cache], tokens, 1)
            assert float(logp) == pytest.approx(-float(forced.losses.sum()), abs=1e-4)
        (compressed,) = kvbench.prefill(lm.model, ids[:split], ["snapkv+think"], **KNOBS)
        (full,) = kvbench.prefill(lm.model, ids[:split], ["full"])
        shares.append(compressed.nbytes() / full.nbytes())
    for name in report["samples"]:
        held = report["config"]["kvbench"]["tasks"][name]
        assert held["prompts"] == report["n-samples"][name]["effective"] == len(CITIES)
        assert "acc_stderr,none" in report["results"][name] or "exact_match_stderr,none" in report["results"][name]
        assert (held["payload"] + held["overhead"]) / held["full_bytes"] == pytest.approx(fmean(shares), rel=0.02)
    assert report["config"]["kvbench"]["chain"] == lm.chain.identity() and json.dumps(report["config"]["kvbench"])


REFUSED = {
    "no_context": ({}, "no context stands before"),
    "whole_text": ({}, "has no prompt to be compressed"),
    "animals_generate": ({"separator": "Frage:"}, "marks no question after a context"),
    "animals_choose": ({"separator": "The animal of Paris is the horse. The animal of R"}, "marks no question"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_not_be_compressed_is_refused(name, tasks):
    options, message = REFUSED[name]
    with pytest.raises(UsageError, match=message):
        evaluated(KvbenchLM("tiny", "snapkv", kv_ratio=0.5, **options), tasks, name)


def test_wrong_arguments_are_sentences():
    for options, message in (
        ({"batch_size": 4}, "batch_size=4 is not possible"),
        ({"batch_size": "auto"}, "batch_size=auto is not possible"),
        ({"attn_implementation": "eager"}, "unknown option attn_implementation"),
        ({"method": "nothing"}, "unknown method nothing"),
    ):
        with pytest.raises(UsageError, match=message):
            KvbenchLM("tiny", **options)


def test_the_command_line_is_lm_evals_with_one_model_more(folder, tmp_path):
    args = "pretrained=tiny,method=snapkv+think,kv_ratio=0.5,separator=Question:"
    options = {"model": "kvbench", "model_args": args, "include_path": folder, "output_path": tmp_path}

    def run(task):
        words = [str(word) for name, value in {**options, "tasks": task}.items() for word in (f"--{name}", value)]
        return subprocess.run([sys.executable, "-m", "kvbench.lm_eval", *words], capture_output=True, text=True)

    done = run("animals_choose")
    assert done.returncode == 0, done.stderr
    assert "|animals_choose|" in done.stdout and "Stderr" in done.stdout
    assert "animals_choose: snapkv+think holds" in done.stderr
    (report,) = tmp_path.rglob("results_*.json")
    assert json.loads(report.read_text())["config"]["kvbench"]["tasks"]["animals_choose"]["prompts"] == len(CITIES)
    done = run("whole_text")
    assert done.returncode == 2 and "has no prompt to be compressed" in done.stderr and "Traceback" not in done.stderr


IDLE = {"method": "h2o", "kv_size": 4000}


def verdicts(lm, tasks, *names):
    """By task, whether nothing was compressed; and lm-eval's samples."""
    report = evaluated(lm, tasks, *names)
    held = report["config"]["kvbench"]["tasks"]
    return {name: held[name].get("nothing_compressed", False) for name in names}, report["samples"]


def forget(monkeypatch):
    """Have methods hold all tokens and bytes, and yet answer otherwise."""
    take = TransformersCache.take

    def forgetful(cache, *args):
        logits = take(cache, *args)
        if cache.chain.stages:
            for segment in (s for layer in cache.state.layers for s in layer.segments):
                segment.v.zero_()
        return logits

    monkeypatch.setattr(TransformersCache, "take", forgetful)


@pytest.mark.parametrize("separator", ["", "Question:"])
def test_a_method_that_compressed_nothing_is_told_by_its_answers_too(separator, tasks, monkeypatch, capsys):
    names = "animals_generate", "animals_choose"
    assert verdicts(KvbenchLM("tiny", **IDLE, separator=separator), tasks, *names)[0] == dict.fromkeys(names, True)
    assert capsys.readouterr().err.count("nothing was compressed") == 2
    forget(monkeypatch)
    assert verdicts(KvbenchLM("tiny", **IDLE, separator=separator), tasks, *names)[0] == dict.fromkeys(names, False)


@pytest.mark.parametrize("method", [{"method": "snapkv", "kv_ratio": 0.5}, {"method": "chai", "kv_ratio": None}])
def test_what_compresses_is_not_answered_by_the_full_cache_as_well(method, tasks, monkeypatch):
    chains = []
    make = TransformersCache.__init__
    monkeypatch.setattr(
        TransformersCache,
        "__init__",
        lambda cache, model, chain, *more: chains.append(chain) or make(cache, model, chain, *more),
    )
    lm = KvbenchLM("tiny", **{k: v for k, v in method.items() if v is not None})
    assert verdicts(lm, tasks, "animals_generate")[0] == {"animals_generate": False}
    assert all(chain.name == method["method"] for chain in chains)


def test_a_full_cache_that_answers_beside_a_method_draws_no_random_numbers_of_others(tasks, monkeypatch):
    def sampled(**options):
        lm = KvbenchLM("tiny", **options)
        report = simple_evaluate(
            model=lm, tasks=["animals_generate"], task_manager=tasks, log_samples=True, bootstrap_iters=2,
            gen_kwargs="do_sample=True,temperature=3.0", torch_random_seed=7,
        )  # fmt: skip
        return [s["resps"] for s in report["samples"]["animals_generate"]], report["config"]["kvbench"]["tasks"]

    (plain, _), (beside, held) = sampled(method="full"), sampled(**IDLE)
    assert len({str(answer) for answer in plain}) > 1 and beside == plain
    assert held["animals_generate"]["nothing_compressed"]
    forget(monkeypatch)
    (compared, _), _ = sampled(**IDLE), monkeypatch.setattr("kvbench.lm_eval.UNCHANGED", 2)  # no verdict is open
    assert compared == sampled(**IDLE)[0] != plain


def test_thoughts_are_taken_off_before_lm_evals_metrics_and_the_cut_ones_are_told(tasks, monkeypatch, capsys):
    decode = HFLM.tok_decode
    for thought, share in (("", 0), ("<think>the horse?</think>\n", 0), ("<think>the horse?", 1)):

        def think(self, tokens, skip_special_tokens=True, thought=thought):
            text = decode(self, tokens, skip_special_tokens)
            return thought + text if skip_special_tokens else text

        monkeypatch.setattr(HFLM, "tok_decode", think)
        lm = KvbenchLM("tiny", "full")
        report = evaluated(lm, tasks, "animals_generate")
        answers = [sample["resps"] for sample in report["samples"]["animals_generate"]]
        if not thought:
            plain = answers
        assert answers == ([[[""]]] * len(CITIES) if share else plain)
        assert report["config"]["kvbench"]["tasks"]["animals_generate"].get("cut_thoughts", 0) == share
    assert "animals_generate: 100.0% of the answers end inside their thought, and are empty" in capsys.readouterr().err

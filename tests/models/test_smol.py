"""A pretrained model: its tokenizer is the original's, and full and perplexity are what transformers alone gives."""

import json
import math
import os

import pytest
import regex
import torch
from conftest import SMOL
from support.data import data_path

import kvbench
from kvbench.cli.main import main
from kvbench.models.releases import named_cache
from kvbench.store.store import ResultStore

pytestmark = pytest.mark.e2e("a pretrained model answers")

TEXTS = [
    "In 2024, 12345 of 3.14 and 1,000,000 (7th) were 99%.",
    "a  b   c    d\n\n\n  e\t\tf \n g   ",
    "def f(x: int) -> int:\n    if x >= 10:\n        return x**2  # 64-bit\n\n\treturn {'a': [1, 2]}\n",
    "naïve café, Straße, Ærø, ½ Ⅳ ² ٣٤ 日本語 2024年12月",
    "👍🏽 ok 🙂🙂 é \u200d x",
    "Don't we'll I'LL they've it's",
    "<|im_start|>user\nhello<|im_end|>\n<|endoftext|>",
    "",
]
QUESTIONS = [
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Which is larger, 3.11 or 3.9? Answer with the number.",
    "def fibonacci(n):",
]


@pytest.fixture(scope="module")
def loaded(smol):
    return kvbench.load_model(SMOL, device="cpu")


def reference(content, text):
    """The ids of a text by a byte-pair encoding of our own: specials, then digits one by one, then GPT-2's words."""
    kept_tokens = {**{b: chr(b) for b in (*range(33, 127), *range(161, 173), *range(174, 256))}}
    letters = kept_tokens | {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in kept_tokens)}
    vocabulary = content["model"]["vocab"]
    ranks = {tuple(m.split() if isinstance(m, str) else m): i for i, m in enumerate(content["model"]["merges"])}
    special = [t["content"] for t in content["added_tokens"]]
    words = regex.compile(r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    ids = []
    for part in regex.split("(" + "|".join(map(regex.escape, special)) + ")", text):
        if part in special:
            ids.append(vocabulary[part])
            continue
        for piece in regex.split(r"(\p{N})", part):
            for word in words.findall(piece):
                pieces = [letters[b] for b in word.encode()]
                while len(pieces) > 1:
                    at = min(range(len(pieces) - 1), key=lambda i: ranks.get((pieces[i], pieces[i + 1]), math.inf))
                    if (pieces[at], pieces[at + 1]) not in ranks:
                        break
                    pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
                ids += [vocabulary[p] for p in pieces]
    return ids


def test_the_tokenizer_splits_as_the_originals_does(loaded, smol):
    _, tokenizer = loaded
    content = json.loads((smol / "tokenizer.json").read_text(encoding="utf-8"))
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == reference(content, text), text
        assert tokenizer.decode(ids) == text
        assert tokenizer(text)["input_ids"] == ids, "no token is put in front"
    assert tokenizer("2024")["input_ids"] == [34, 32, 34, 36]
    assert tokenizer.convert_ids_to_tokens(tokenizer(" 12 apples")["input_ids"]) == ["Ġ", "1", "2", "Ġapples"]
    specials = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert specials == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (
        1,
        2,
        2,
        0,
    )
    assert len(tokenizer) == 49152 and tokenizer.model_max_length == 8192


def test_a_long_real_text_is_split_the_same(loaded, smol):
    text = data_path("wikitext2", "test.txt").read_text(encoding="utf-8")[:30_000]
    _, tokenizer = loaded
    content = json.loads((smol / "tokenizer.json").read_text(encoding="utf-8"))
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == reference(content, text)


def test_the_chat_template_begins_with_the_default_system_message(loaded):
    _, tokenizer = loaded
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
    )
    text = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(ids) == text
    system = [9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182]
    assert ids[:20] == [1, *system, 2]
    own_value = tokenizer.apply_chat_template([{"role": "system", "content": "Be brief."}], tokenize=False)
    assert own_value == "<|im_start|>system\nBe brief.<|im_end|>\n"


def answers(loaded, prompts, new_tokens):
    """What full in one batch and transformers' own greedy generation say, as lists of ids."""
    model, tokenizer = loaded
    caches, peers_value = [], []
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        caches += kvbench.prefill(model, ids, ["full"])
        mask = torch.ones_like(ids)
        output = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
        peers_value.append(output[0, ids.shape[1] :].tolist())
    ours = kvbench.generate(model, caches, max_new_tokens=new_tokens, eos_token_id=tokenizer.eos_token_id)
    return ours, peers_value


def chat(loaded, text):
    return loaded[1].apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )


def test_full_answers_as_transformers_does(loaded):
    ours, peers_value = answers(loaded, [chat(loaded, q) for q in QUESTIONS], 9)
    assert ours == peers_value
    assert "Paris" in loaded[1].decode(ours[0]) and ours[0][-1] == 2


def test_full_answers_one_at_a_time_as_transformers_does_in_bf16(smol, loaded, tmp_path, capsys):
    """Together four of six real prompts came out otherwise: products over several rows round differently."""
    model, tokenizer = kvbench.load_model(str(smol), dtype="bfloat16")
    prompts = [chat(loaded, q) for q in QUESTIONS[:2]]
    rows = [{"prompt": p, "answers": ["Paris"], "max_new_tokens": 5} for p in prompts]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    arguments = ["dataset=file", f"path={tmp_path / 'q.jsonl'}", "dtype=bfloat16", "batch_rows=1", "method=full,snapkv"]
    assert main(["run", f"model={smol}", *arguments, "kv_ratio=0.5", f"results={tmp_path}", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert any("batch_rows=1 decodes full as model.generate does" in n for n in report["notes"])
    (cell,) = (r["cells"][0]["cell"] for r in report["rows"] if r["method"] == "full")
    predictions = [s.prediction for s in ResultStore(tmp_path).samples(cell).values()]
    for prompt, text in zip(prompts, predictions, strict=True):
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
        new = output[0, ids.shape[1] :].tolist()
        (cache,) = kvbench.prefill(model, ids, ["full"])
        (ours,) = kvbench.generate(model, [cache], max_new_tokens=5, eos_token_id=tokenizer.eos_token_id)
        assert ours == new
        assert text.strip() == tokenizer.decode(new, skip_special_tokens=True).strip()


@pytest.mark.timeout(900)
def test_full_answers_real_questions_as_transformers_does(loaded):
    """The two shortest, 6 tokens each; KVBENCH_QUESTIONS=32 asks as many as were compared once, for 64 tokens."""
    articles = json.loads(data_path("xquad.en.json").read_text(encoding="utf-8"))["data"]
    paragraphs = [a["paragraphs"][0] for a in articles[: int(os.environ.get("KVBENCH_QUESTIONS", "48"))]]
    if "KVBENCH_QUESTIONS" not in os.environ:
        paragraphs = sorted(paragraphs, key=lambda paragraph: len(paragraph["context"]))[:2]
    prompts = [chat(loaded, f"{p['context']}\n\n{p['qas'][0]['question']}") for p in paragraphs]
    ours, peers_value = answers(loaded, prompts, 64 if "KVBENCH_QUESTIONS" in os.environ else 6)
    assert ours == peers_value


def test_perplexity_is_a_plain_loops(loaded, tmp_path, capsys):
    text = data_path("wikitext2", "test.txt").read_text(encoding="utf-8")[:2000]
    (tmp_path / "wikitext2").mkdir()
    (tmp_path / "wikitext2" / "test.txt").write_text(text, encoding="utf-8")
    arguments = [f"model={SMOL}", "dataset=wikitext2", "method=full", "device=cpu", f"data.root={tmp_path}"]
    sizes = ["length=96", "prefix=64", "chunk=16", "limit=2"]
    assert main(["run", *arguments, *sizes, f"results={tmp_path}", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    model, tokenizer = loaded
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    losses = []
    for i in range(2):
        window = torch.tensor([[1, *ids[i * 95 : (i + 1) * 95]]])
        with torch.inference_mode():
            logits = model(window).logits[0, 63:-1].double()
        losses.append(torch.nn.functional.cross_entropy(logits, window[0, 64:]))
    assert row["cells"][0]["score"] == pytest.approx(math.exp(sum(losses) / 2), rel=1e-4)


@pytest.mark.parametrize("method", ["snapkv+think", "h2o"])
def test_transformers_own_generate_answers_from_a_cache_as_kvbench_does(loaded, method):
    model, tokenizer = loaded
    ids = tokenizer("The quick brown fox jumps over the lazy dog. " * 5 + QUESTIONS[0], return_tensors="pt").input_ids
    (want,) = kvbench.generate(model, kvbench.prefill(model, ids, [method], kv_ratio=0.5), 6)
    with kvbench.cache(model, method, kv_ratio=0.5) as cache:
        out = model.generate(ids, **named_cache(cache), max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert out[0, ids.shape[1] :].tolist() == want

"""The embedded tiny model: lossless tokenizer, structured beginning, resumable training, weights that answer."""

from __future__ import annotations

import json
import random
import warnings

import pytest
import torch
from tiny_model import card, corpus, initial, tokenizer, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvbench.engine.calibration import tiny_corpus
from kvbench.engine.calibration.tiny_corpus import Role
from kvbench.models import embedded
from kvbench.tasks import tiny

NASTY = (
    "",
    " ",
    "\n",
    "  two  spaces ",
    "\t\r\n\x00\x01\x7f",
    "The Magic Number of PARIS is 471!",
    "don't split_this-or 3.14e-5 (foo_bar == baz) => {x: [1, 2]}",
    "naïve façade Ærøskøbing ß ſ",
    "日本語テキスト 한국어 עברית العربية हिन्दी",
    "🎉👩‍👩‍👧‍👦 e\u0301 \ufeff \u200b \u2028 \u00a0 ▁ Ġ Ċ �",
    "<unk> <s> </s> <pad> <0x41>",
    "==> >= => =  => =",
)


@pytest.fixture(scope="module")
def reader():
    return AutoTokenizer.from_pretrained(embedded.path())


@pytest.mark.parametrize("text", NASTY)
def test_any_text_is_encoded_and_decoded_to_itself(text, reader):
    ids = reader(text)["input_ids"]
    assert ids[0] == tiny_corpus.BOS == reader.bos_token_id
    assert reader.decode(ids[1:]) == text
    assert reader.unk_token is None and None not in ids


def test_random_unicode_survives_the_tokenizer(reader):
    rng = random.Random(0)
    valid = [*range(0xD800), *range(0xE000, 0x110000)]
    for _ in range(200):
        text = "".join(map(chr, rng.choices(range(128), k=10) + rng.choices(valid, k=10)))
        assert reader.decode(reader(text, add_special_tokens=False)["input_ids"]) == text


def test_the_corpus_is_encoded_as_the_tokenizer_does(reader):
    rng = random.Random(1)
    texts = [tiny_corpus.draw_noise(rng) for _ in range(200)] + [text for text in NASTY if "<" not in text]
    texts += [tiny.make_example(task, 256, 0).prompt for task in tiny.TASKS]
    for text in texts:
        assert list(tiny_corpus.encode(text)) == reader(text, add_special_tokens=False)["input_ids"]


def test_saved_tokenizer_is_the_built_one(reader):
    assert reader.get_vocab() == tokenizer.build().get_vocab()
    assert reader.chat_template is None
    assert reader.eos_token_id == tiny_corpus.EOS and reader.pad_token_id == tokenizer.PAD


def test_folder_is_a_stock_llama_that_loads_without_a_warning(recwarn):
    settings = json.loads((embedded.path() / "config.json").read_text())
    assert settings["architectures"] == ["LlamaForCausalLM"] and settings["model_type"] == "llama"
    assert "auto_map" not in settings and settings["tie_word_embeddings"]
    assert settings["num_attention_heads"] > settings["num_key_value_heads"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = AutoModelForCausalLM.from_pretrained(embedded.path())
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer.vocabulary())
    assert sum(file.stat().st_size for file in embedded.path().iterdir()) < 8e6


def test_training_sequences_have_their_length_and_roles():
    rng = random.Random("train/test")
    mix = dict.fromkeys(corpus.NAMES, 1.0)
    for length in (64, 256):
        for difficulty in range(3):
            data = corpus.batch(rng, length, 16, mix, difficulty, gaps=True)
            assert data.ids.shape == data.positions.shape == (16, length)
            assert data.targets.shape == data.roles.shape == data.tasks.shape == (16 * length,)
            assert 0.05 < (data.roles >= Role.ANSWER).float().mean() < 0.5
            assert (data.positions.diff() >= 1).all()
            assert length < data.positions.max() < 2 * corpus.SPREAD


def test_noise_is_part_of_the_filler_only():
    rng = random.Random("train/test")
    spans = [span for _ in range(300) for span in corpus.sequence(rng, 256, {"needle": 1.0}, 0)]
    roles = [role for span in spans for role in span.roles]
    assert 0.05 < roles.count(Role.NOISE) / len(roles) < 0.3


def test_structured_beginning_is_reproducible_and_answers_nothing(reader):
    model = initial.build(initial.Shape(), seed=0).eval()
    again = initial.build(initial.Shape(), seed=0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert all(parameter.requires_grad for parameter in model.parameters())
    table = card.accuracies(model, reader, [128], limit=4, noisy=False)
    assert all(row == {128: 0.0} for row in table.values())


def test_structured_beginning_looks_back_one_to_four_tokens(reader):
    model = initial.build(initial.Shape(), seed=0).eval()
    model.set_attn_implementation("eager")
    ids = torch.tensor([reader(tiny.make_example("needle", 64, 0).prompt)["input_ids"]])
    attention = model(ids, output_attentions=True).attentions[0][0]
    for head in range(attention.shape[0]):
        assert attention[head].diagonal(-(1 + head % 4))[8:].mean() > 0.5


def test_interrupted_training_goes_on_where_it_was(tmp_path):
    shape = initial.Shape(layers=1, heads=2, kv_heads=1)
    complete, halves = tmp_path / "whole.pt", tmp_path / "halves.pt"
    # So many minutes that the time, which drives the schedules, hardly differs between the two runs.
    recipe = train.Recipe(shape=shape, tokens_per_step=128, minutes=1e9)
    one, _ = train.train(recipe, complete, log=lambda line: None, max_steps=4)
    _, halfway = train.train(recipe, halves, log=lambda line: None, max_steps=2)
    two, progress = train.train(recipe, halves, log=lambda line: None, max_steps=4)
    assert (halfway.steps, progress.steps) == (2, 4)
    assert torch.load(complete)["progress"]["steps"] == torch.load(halves)["progress"]["steps"] == 4
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    with pytest.raises(ValueError, match="choose another file"):
        train.train(train.Recipe(shape=shape, seed=1), halves, log=lambda line: None)


def test_export_keeps_the_weights_and_the_record(tmp_path, reader):
    shape = initial.Shape(layers=1, heads=2, kv_heads=1)
    model = initial.build(shape, seed=0).half().float()
    card.export(model, train.Recipe(shape=shape), train.Progress(seconds=60.0, steps=3, tokens=9), 1, tmp_path)
    loaded, _ = card.load(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    text = card.write(tmp_path, lengths=[64, 96], limit=2)
    assert (tmp_path / "README.md").read_text() == text
    assert "| needle | 0 | 0 |" in text and card.COMMAND in text and "structured" in text


def test_noisy_needles_have_their_length(reader):
    for index in range(8):
        example = card.noisy_needle(256, index)
        assert len(reader(example.prompt)["input_ids"]) == 256
        assert example.prompt.count(tiny.draw_needle(index)[0]) == 1


def test_committed_weights_answer():
    model, reader = card.load(embedded.path())
    examples = [tiny.make_example("needle", 512, index) for index in range(8)]
    assert card.exact_match(model, reader, examples) == 1.0

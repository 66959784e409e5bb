"""Gemma 3 270M: layers of two kinds and the tokenizer are the original's, and full answers as transformers does."""

import json
import re
from itertools import pairwise

import pytest
import torch
from conftest import GEMMA
from models.test_smol import TEXTS
from support.data import data_path

import kvbench
from kvbench.models import traits

pytestmark = pytest.mark.e2e("a pretrained model answers")


@pytest.fixture(scope="module")
def loaded(gemma):
    return kvbench.load_model(GEMMA, device="cpu")


def reference(content, text):
    """The ids of a text by SentencePiece's rule: of all pairs of neighbours, the one whose token comes first merges."""
    vocabulary = content["model"]["vocab"]
    added = sorted((token["content"] for token in content["added_tokens"]), key=len, reverse=True)
    ids = []
    for part in re.split("(" + "|".join(map(re.escape, added)) + ")", text):
        if part in added:
            ids.append(vocabulary[part])
            continue
        pieces = list(part.replace(" ", "▁"))
        while len(pieces) > 1:
            pairs = [vocabulary.get(left + right, len(vocabulary)) for left, right in pairwise(pieces)]
            at = min(range(len(pairs)), key=pairs.__getitem__)
            if pairs[at] == len(vocabulary):
                break
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
        for piece in pieces:
            # a character without a token becomes the tokens of its bytes
            ids += [vocabulary[piece]] if piece in vocabulary else [vocabulary[f"<0x{b:02X}>"] for b in piece.encode()]
    return ids


def test_the_tokenizer_merges_as_sentencepiece_does(loaded, gemma):
    _, tokenizer = loaded
    content = json.loads((gemma / "tokenizer.json").read_text(encoding="utf-8"))
    prose = data_path("wikitext2", "test.txt").read_text(encoding="utf-8")[:20_000].split("\n")
    for text in [*TEXTS, *prose, "<start_of_turn>user\nhi<end_of_turn>"]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == reference(content, text), text
        assert tokenizer.decode(ids) == text
        assert tokenizer(text)["input_ids"] == [2, *ids], "<bos> in front"
    assert len(tokenizer) == 262144 and tokenizer.chat_template is None


def test_three_layers_attend_to_everything(loaded):
    model, _ = loaded
    shape = traits.of_config(model.config).shape
    assert (shape.layers, shape.local_layers, shape.window, shape.kv_heads, shape.head_dim) == (3, 15, 512, 1, 256)
    kinds = [layer.self_attn.sliding_window for layer in model.model.layers]
    assert [i for i, window in enumerate(kinds, start=1) if window is None] == [6, 12, 18]


def test_full_answers_beyond_the_window_as_transformers_does(loaded):
    model, tokenizer = loaded
    text = data_path("wikitext2", "test.txt").read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :640]
    (ours,) = kvbench.generate(model, kvbench.prefill(model, ids, ["full"]), max_new_tokens=8)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    assert ours == output[0, 640:].tolist()

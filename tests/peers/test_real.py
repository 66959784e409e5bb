"""The same tokens as kvpress on a pretrained model and real text. Run by `make test-peers`."""

import pytest
import torch
from conftest import SMOL
from peers.test_kvpress import kvpress, ours, theirs
from support.data import data_path

import kvbench
from kvbench.methods.core.kvpress_package import find_presses

N = 1024
SNAPKV = {"window": 64, "kernel": 5, "pooling": "avg"}


@pytest.fixture(scope="module")
def loaded(smol):
    model, tokenizer = kvbench.load_model(SMOL, device="cpu")
    text = data_path("wikitext2", "test.txt").read_text(encoding="utf-8")[: 8 * N]
    model.set_attn_implementation("eager")
    return model, torch.tensor(tokenizer(text)["input_ids"][:N])


@pytest.mark.parametrize(
    ("entry", "press"),
    [
        ({"method": "snapkv", **SNAPKV}, kvpress.SnapKVPress(0.75, window_size=64, kernel_size=5)),
        ({"method": "streamingllm", "sinks": 4}, kvpress.StreamingLLMPress(0.75, n_sink=4)),
        ({"method": "tova"}, kvpress.TOVAPress(0.75)),
        ({"method": "keydiff"}, kvpress.KeyDiffPress(0.75)),
    ],
    ids=lambda x: x["method"] if isinstance(x, dict) else "",
)
def test_a_quarter_of_a_real_text(loaded, entry, press):
    model, ids = loaded
    assert ours(model, ids, {**entry, "kv_size": N // 4}) == theirs(model, ids, press)


def test_keynorm_but_for_equal_tokens_of_layer_0(loaded):
    """Keys of one token have equal norms in layer 0, up to rounding: which of them stays is nobody's choice."""
    model, ids = loaded
    our_tokens, peer_tokens = (
        ours(model, ids, {"method": "keynorm", "kv_size": N // 4}),
        theirs(model, ids, kvpress.KnormPress(0.75)),
    )
    assert our_tokens[1:] == peer_tokens[1:]
    for a, b in zip(our_tokens[0], peer_tokens[0], strict=True):
        assert sorted(ids[a].tolist()) == sorted(ids[b].tolist())


def test_chunkkv_at_kvpresss_settings(loaded):
    model, ids = loaded
    press = kvpress.ChunkKVPress(kvpress.SnapKVPress(0.75, window_size=64, kernel_size=5), chunk_length=20)
    entry = {"method": "chunkkv", "kv_ratio": 0.25, "chunk": 20, "variant": "code", **SNAPKV}
    model.set_attn_implementation("sdpa")
    peer_tokens = theirs(model, ids, press)
    model.set_attn_implementation("eager")
    assert ours(model, ids, entry) == peer_tokens


def test_pyramidkv_at_each_layers_size(loaded):
    model, ids = loaded
    peer_tokens = theirs(model, ids, kvpress.PyramidKVPress(0.75, window_size=64, kernel_size=5))
    for i in (0, 10, 20, 29):
        assert ours(model, ids, {"method": "snapkv", "kv_size": len(peer_tokens[i][0]), **SNAPKV})[i] == peer_tokens[i]


SCORERS = ("snapkv", "pyramidkv", "keydiff", "tova", "streamingllm", "cap", "expectedattention", "noncausalattn")
"""Without Knorm and CUR, whose scores of equal tokens tie in layer 0."""


@pytest.fixture(scope="module")
def pressed(loaded):
    """What each press keeps as a method, all from one prefill."""
    model, ids = loaded
    caches = kvbench.prefill(model, ids, [f"kvpress:{name}" for name in SCORERS], compression_ratio=0.75)
    return dict(zip(SCORERS, caches, strict=True))


@pytest.mark.parametrize("name", SCORERS)
def test_a_press_as_a_method_keeps_its_own_tokens(loaded, pressed, name):
    model, ids = loaded
    kept = [[p.tolist() for p in layer.kept_positions()] for layer in pressed[name].layers]
    assert kept == theirs(model, ids, find_presses()[name](compression_ratio=0.75))

"""The same tokens as kvpress, given the same knobs. Run by `make test-peers`, in an environment of its own.

kvpress pins older transformers than kvbench's own environment has. Intended differences, each with its reason, stand in
docs/differences.md.
"""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from support.families import build
from support.kvpress_reference import N, prompt, theirs

import kvbench
from kvbench.kv.observation import Needs
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.contract import top_indices
from kvbench.methods.core.stage import Stage
from kvbench.models.releases import named_cache

kvpress = pytest.importorskip("kvpress", reason="kvpress is not installed here: make test-peers")
from transformers import DynamicCache  # noqa: E402

FAMILIES = ("llama", "mistral", "qwen2")


def ours(model, ids, entry):
    (cache,) = kvbench.prefill(model, ids, [entry])
    return [[p.tolist() for p in layer.kept_positions()] for layer in cache.layers]


@pytest.fixture(params=FAMILIES)
def model(request):
    model = build(request.param)
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    yield model
    model.set_attn_implementation(before)


@pytest.mark.parametrize("removed", [0.3, 0.5, 0.75])
@pytest.mark.parametrize("seed", [1, 2])
def test_snapkv(model, removed, seed):
    press = kvpress.SnapKVPress(removed, window_size=16, kernel_size=5)
    entry = {"method": "snapkv", "kv_size": int(N * (1 - removed)), "window": 16, "kernel": 5, "pooling": "avg"}
    assert ours(model, prompt(N, seed), entry) == theirs(model, prompt(N, seed), press)


@pytest.mark.parametrize("removed", [0.3, 0.75])
def test_streamingllm(model, removed):
    entry = {"method": "streamingllm", "kv_size": int(N * (1 - removed)), "sinks": 4}
    assert ours(model, prompt(N), entry) == theirs(model, prompt(N), kvpress.StreamingLLMPress(removed, n_sink=4))


@pytest.mark.parametrize("removed", [0.3, 0.75])
def test_keynorm(model, removed):
    entry = {"method": "keynorm", "kv_size": int(N * (1 - removed))}
    assert ours(model, prompt(N), entry) == theirs(model, prompt(N), kvpress.KnormPress(removed))


@pytest.mark.parametrize("removed", [0.3, 0.75])
def test_tova(model, removed):
    entry = {"method": "tova", "kv_size": int(N * (1 - removed))}
    assert ours(model, prompt(N), entry) == theirs(model, prompt(N), kvpress.TOVAPress(removed))


@pytest.mark.parametrize("removed", [0.3, 0.75])
def test_keydiff(model, removed):
    entry = {"method": "keydiff", "kv_size": int(N * (1 - removed))}
    assert ours(model, prompt(N), entry) == theirs(model, prompt(N), kvpress.KeyDiffPress(removed))


@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("removed", [0.3, 0.75])
def test_keydiff_in_blocks(model, removed, block):
    entry = {"method": "keydiff", "kv_size": int(N * (1 - removed)), "variant": "block", "block": block}
    press = kvpress.BlockPress(kvpress.KeyDiffPress(removed), block_size=block)
    model.set_attn_implementation("sdpa")
    assert ours(model, prompt(N), entry) == theirs(model, prompt(N), press)


@pytest.mark.parametrize("removed", [0.3, 0.5, 0.75])
@pytest.mark.parametrize("chunk", [20, 13])  # 13: the last chunk has 3 tokens
def test_chunkkv_with_kvpresss_count_of_chunks(model, removed, chunk):
    press = kvpress.ChunkKVPress(kvpress.SnapKVPress(removed, window_size=16, kernel_size=5), chunk_length=chunk)
    knobs = {"window": 16, "kernel": 5, "pooling": "avg", "chunk": chunk, "variant": "code"}
    model.set_attn_implementation("sdpa")
    for budget in ({"kv_size": int(N * (1 - removed))}, {"kv_ratio": 1 - removed}):
        entry = {"method": "chunkkv", **budget, **knobs}
        assert ours(model, prompt(N), entry) == theirs(model, prompt(N), press)


def test_pyramidkv_keeps_snapkvs_tokens_at_each_layers_size(model):
    press = kvpress.PyramidKVPress(0.4, window_size=8, kernel_size=5)
    peer_tokens = theirs(model, prompt(N), press)
    sizes = [len(layer[0]) for layer in peer_tokens]
    assert sizes[0] > sizes[-1]
    knobs = {"window": 8, "kernel": 5, "pooling": "avg"}
    for i, size in enumerate(sizes):
        assert ours(model, prompt(N), {"method": "snapkv", "kv_size": size, **knobs})[i] == peer_tokens[i]
    our_tokens = [len(layer[0]) for layer in ours(model, prompt(N), {"method": "pyramidkv", "kv_size": 60, **knobs})]
    assert our_tokens[0] > our_tokens[1] > our_tokens[2]


@pytest.mark.parametrize("removed", [0.3, 0.5, 0.75])
@pytest.mark.parametrize("floor", [0.2, 0.5])
def test_adakv_with_its_safe_floor(model, removed, floor):
    """kvpress masks what AdaKV drops instead of dropping it, and says so on the attention module."""
    model.set_attn_implementation("sdpa")
    press = kvpress.AdaKVPress(kvpress.SnapKVPress(removed, window_size=16, kernel_size=5), alpha_safeguard=floor)
    with torch.no_grad(), press(model):
        model(prompt(N)[None], **named_cache(DynamicCache()))
    kept_tokens = []
    for layer in model.model.layers:
        _, heads, tokens = layer.self_attn.masked_key_indices
        dropped = set(zip(heads.tolist(), tokens.tolist(), strict=True))
        kv_heads = model.config.num_key_value_heads
        kept_tokens.append([[t for t in range(N) if (h, t) not in dropped] for h in range(kv_heads)])
        layer.self_attn.masked_key_indices = None
    knobs = {"window": 16, "kernel": 5, "pooling": "avg", "floor": floor, "floor_rule": "safe"}
    assert ours(model, prompt(N), {"method": "adakv", "kv_size": int(N * (1 - removed)), **knobs}) == kept_tokens


class Letters:
    """A tokenizer of letters, for models that have none."""

    def __init__(self, chat_template):
        self.chat_template = chat_template

    def encode(self, text, add_special_tokens, return_tensors=None):
        ids = [3 + ord(letter) % 120 for letter in text]
        return ids if return_tensors is None else torch.tensor([ids])

    def apply_chat_template(self, messages, add_generation_prompt, tokenize, enable_thinking):
        return f"{messages[0]['content']}</u><a>"  # nothing before the text, as the prompts here have no header


@pytest.mark.parametrize("removed", [0.3, 0.5, 0.75])
@pytest.mark.parametrize(("chunk", "instruction", "layerwise"), [(2048, "plain", 0), (50, "plain", 1), (50, "chat", 0)])
def test_kvzip(model, monkeypatch, removed, chunk, instruction, layerwise):
    """kvpress masks what KVzip drops. It has its tokenizer from the model's path."""
    model.set_attn_implementation("sdpa")
    letters = Letters("there is one" if instruction == "chat" else None)
    monkeypatch.setattr("kvpress.presses.kvzip_press.AutoTokenizer.from_pretrained", lambda path: letters)
    press = kvpress.KVzipPress(removed, layerwise=bool(layerwise), chunk_size=chunk)
    cache, kept_tokens = DynamicCache(), []
    with torch.no_grad(), press(model):
        model(prompt(N)[None], **named_cache(cache))
    for layer in model.model.layers:
        kept = torch.ones(model.config.num_key_value_heads, N, dtype=torch.bool)
        kept[layer.self_attn.masked_key_indices[1:]] = False
        kept_tokens.append([head.nonzero()[:, 0].tolist() for head in kept])
        layer.self_attn.masked_key_indices = None
    # kvpress counts pairs as floats: a whole number of them that is removed is one that is kept
    knobs = {"chunk": chunk, "instruction": instruction, "level": "layer" if layerwise else "pair"}
    entry = {"method": "kvzip", "kv_ratio": 1 - removed, **knobs, **({} if layerwise else {"count": "code"})}
    (ours_cache,) = kvbench.prefill(model, prompt(N), [entry], tokenizer=letters)
    assert [[p.tolist() for p in layer.kept_positions()] for layer in ours_cache.layers] == kept_tokens


@dataclass(frozen=True, kw_only=True)
class Probe(Stage):
    """Sees the column sums that H2O sees."""

    id: ClassVar[str] = "probe"
    role: ClassVar[str] = "selector"
    seen: ClassVar[list] = []

    def needs(self, n):
        return Needs(colsums=True)

    def compress(self, cache, obs):
        self.seen.append(obs.colsums)
        return cache


def test_observed_attention_is_our_column_sums_per_query_that_can_see_the_token(model):
    peer_tokens = theirs(model, prompt(N), kvpress.ObservedAttentionPress(0.5))
    Probe.seen.clear()
    kvbench.prefill(model, prompt(N), [Chain((Probe(),))])
    for sums, layer in zip(Probe.seen, peer_tokens, strict=True):
        mean = (sums / torch.arange(N, 0, -1)).view(len(layer), -1, N).mean(1)
        assert top_indices(mean, N // 2).tolist() == layer

"""``kvpress:NAME`` keeps what kvpress keeps: the same tokens per layer and head, press by press.

kvpress's own hooks run where its pin of transformers holds, so these tests run with `make test-peers`.
"""

from functools import cache
from pathlib import Path

import pytest
import torch
from support.families import build
from support.kvpress_reference import N, prompt, theirs

import kvbench
from kvbench.audit.prompt_audit import audit
from kvbench.base.errors import UsageError
from kvbench.cli.main import main
from kvbench.methods.core.kvpress_package import explain_refusal, find_presses, wraps_another
from kvbench.methods.core.resolve import chain_of
from kvbench.models.interface import cache_shape
from kvbench.models.releases import named_cache
from kvbench.store.store import ResultStore

kvpress = pytest.importorskip("kvpress", reason="kvpress is not installed here: make test-peers")
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM  # noqa: E402

SCORERS = {
    "snapkv": {"window_size": 8, "kernel_size": 5},  # fewer than every budget: tokens of the window tie
    "pyramidkv": {"window_size": 8, "kernel_size": 5},
    "knorm": {},
    "keydiff": {},
    "tova": {},
    "streamingllm": {"n_sink": 3},
    "lagkv": {"lag_size": 16},
    "cur": {},
    "cap": {},
    "expectedattention": {"epsilon": 0.01},
    "observedattention": {},
    "noncausalattn": {"chunk_size": 32},
    "random": {"seed": 3},
}
INSIDE = {"snapkv": SCORERS["snapkv"], "expectedattention": {"use_vnorm": False}}
SIZES = {"chunk": {"chunk_length": 32}, "chunkkv": {"chunk_length": 13}, "block": {"block_size": 32}}
REMOVED = (0.25, 0.5, 0.75, 0.875, 0.9)


@cache
def scaled_llama():
    """A random Llama 3.1: rotations with its scaled frequencies."""
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32, "rope_theta": 10_000.0,
    }  # fmt: skip
    torch.manual_seed(5)
    shape = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=128, intermediate_size=96, head_dim=16, rope_parameters=scaling, **shape)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2:
                p.normal_(std=0.35 if "q_proj" in name or "k_proj" in name else 0.15)
    return model


@pytest.fixture(params=["qwen3", "llama3.1"])
def model(request):
    model = build("qwen3") if request.param == "qwen3" else scaled_llama()
    model.set_attn_implementation("sdpa")
    yield model
    for layer in model.model.layers:
        layer.self_attn.__dict__.pop("masked_key_indices", None)


def ours(model, entry):
    (cache,) = kvbench.prefill(model, prompt(N), [entry])
    audit(cache, cache_shape(model))
    return [[p.tolist() for p in layer.kept_positions()] for layer in cache.layers]


def unmasked(model, ids, press):
    """Positions that a press does not mask, per layer and kv head."""
    with torch.no_grad(), press(model):
        model(ids[None], **named_cache(DynamicCache()))
    found = []
    for layer in model.model.layers:
        kept = torch.ones(model.config.num_key_value_heads, N, dtype=torch.bool)
        kept[layer.self_attn.masked_key_indices[1:]] = False
        found.append([head.nonzero()[:, 0].tolist() for head in kept])
        layer.self_attn.masked_key_indices = None
    return found


@pytest.mark.parametrize("removed", REMOVED)
@pytest.mark.parametrize("name", SCORERS)
def test_a_press_that_scores_keeps_the_same_tokens(model, name, removed):
    if name == "lagkv" and removed > 0.8:
        pytest.skip("its scores are ranks within parts of the prompt, which tie at these budgets")
    if name == "observedattention":
        model.set_attn_implementation("eager")
    theirs_kept = theirs(model, prompt(N), find_presses()[name](compression_ratio=removed, **SCORERS[name]))
    entry = {"method": f"kvpress:{name}", "compression_ratio": removed, **SCORERS[name]}
    assert ours(model, entry) == theirs_kept
    by_size = {"method": f"kvpress:{name}", "kv_size": max(2, int(N * (1 - removed))), **SCORERS[name]}
    if name != "pyramidkv":  # its sizes by layer follow from a share, not from a number of tokens
        assert ours(model, by_size) == theirs_kept


@pytest.mark.parametrize("inner", INSIDE)
@pytest.mark.parametrize("outer", ["adakv", "criticalkv", "criticaladakv"])
def test_a_wrapper_keeps_the_same_tokens(model, outer, inner):
    press = find_presses()[outer](press=find_presses()[inner](compression_ratio=0.6, **INSIDE[inner]))
    kept = (theirs if outer == "criticalkv" else unmasked)(model, prompt(N), press)
    assert ours(model, {"method": f"kvpress:{outer}:{inner}", "compression_ratio": 0.6, **INSIDE[inner]}) == kept


@pytest.mark.parametrize("removed", REMOVED)
@pytest.mark.parametrize("outer", SIZES)
def test_a_press_that_chooses_blocks_keeps_the_same_tokens(model, outer, removed):
    press = find_presses()[outer](press=kvpress.KnormPress(removed), **SIZES[outer])
    entry = {"method": f"kvpress:{outer}:knorm", "compression_ratio": removed, **SIZES[outer]}
    assert ours(model, entry) == theirs(model, prompt(N), press)


def test_each_layer_has_its_own_share(model):
    kept = ours(model, {"method": "kvpress:perlayercompression:knorm", "compression_ratios": [0.1, 0.5, 0.75]})
    assert [len(layer[0]) for layer in kept] == [int(N * 0.9), N // 2, N // 4]
    for layer, removed in enumerate((0.1, 0.5, 0.75)):
        assert kept[layer] == theirs(model, prompt(N), kvpress.KnormPress(removed))[layer]
    with pytest.raises(UsageError, match="a list of 3 shares removed"):
        ours(model, {"method": "kvpress:perlayercompression:knorm", "compression_ratios": [0.1]})


def test_snapkv_of_kvpress_and_ours_keep_the_same_tokens(model):
    press = {"method": "kvpress:snapkv", "kv_ratio": 0.4, "window_size": 8, "kernel_size": 3}
    own = {"method": "snapkv", "kv_ratio": 0.4, "window": 8, "kernel": 3, "pooling": "avg"}
    assert ours(model, press) == ours(model, own)


@pytest.mark.parametrize("name", find_presses())
def test_every_press_runs_or_says_why_not(model, name):
    reason = explain_refusal(name, find_presses()[name])
    if reason:
        with pytest.raises(UsageError, match=r"does not run here: \w+"):
            chain_of(f"kvpress:{name}")
        return
    inner = ":knorm" if wraps_another(find_presses()[name]) else ""
    entry = {"method": f"kvpress:{name}{inner}", **SCORERS.get(name, {})}
    if name == "perlayercompression":
        entry["compression_ratios"] = [0.5] * 3
    assert all(0 < len(head) < N for layer in ours(model, entry) for head in layer)


def test_the_page_of_presses_is_that_of_the_installed_kvpress(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    import kvpress_page

    assert kvpress_page.page() == kvpress_page.PAGE.read_text("utf-8")


@pytest.mark.parametrize(
    ("removed", "sizes"),
    [(0.25, [936, 812, 688, 564]), (0.5, [936, 645, 355, 64]), (0.75, [250] * 4), (0.875, [125] * 4), (0.9, [100] * 4)],
)
def test_pyramidkv_has_its_own_sizes(removed, sizes):
    """C7, at 1,000 tokens and four layers."""
    (stage,) = chain_of({"method": "kvpress:pyramidkv", "compression_ratio": removed}).stages
    assert [stage.budget(1000, layer, 4) for layer in range(4)] == sizes


@pytest.mark.parametrize(
    ("method", "removed", "tokens"),
    [
        *(("chunkkv", r, n) for r, n in ((0.25, 740), (0.5, 500), (0.75, 240), (0.875, 120), (0.8, 180), (0.9, 80))),
        *(("chunk", r, n) for r, n in ((0.875, 123), (0.9, 96))),
    ],
)
def test_blocks_of_tokens_have_their_own_sizes(method, removed, tokens):
    """C7, at 1,000 tokens: ChunkKV with its 20 tokens, Chunk with 300."""
    length = {"chunk_length": 300} if method == "chunk" else {}
    (stage,) = chain_of({"method": f"kvpress:{method}:snapkv", "compression_ratio": removed, **length}).stages
    expected = stage.expected(1000, 0, 4, 2)
    assert expected.low == expected.high == (tokens, tokens)


def test_adakv_keeps_half_of_all_pairs(model):
    """C8: what kvpress masks in caches of full length is not stored here."""
    (cache,) = kvbench.prefill(model, prompt(N), ["kvpress:adakv:knorm"], kv_ratio=0.5)
    for layer in cache.layers:
        assert sum(len(positions) for positions in layer.kept_positions()) == layer.heads * N // 2


def test_a_run_of_kvpresss_snapkv_is_a_run_of_ours(tmp_path):
    """The same answers, scores and bytes, example by example."""
    settings = ["snapkv.window=16", "window_size=16", "kernel=5", "kernel_size=5", "pooling=avg", "kv_ratio=0.2,0.5"]
    line = ["method=snapkv,kvpress:snapkv", *settings, "dataset=tiny/needle,tiny/hop", "length=256", "limit=4"]
    assert main(["run", *line, f"results={tmp_path}", "baseline=false"]) == 0
    store = ResultStore(tmp_path)
    answers = {}
    for name in store.cells():
        record = store.cell(name)
        (stage,) = record.identity["chain"]["stages"]
        samples = [(s.id, s.prediction, s.score, s.payload, s.overhead) for s in store.samples(name).values()]
        answers[stage["id"], stage["knobs"]["kv_ratio"], record.column] = samples
    ours_alone = {key[1:]: samples for key, samples in answers.items() if key[0] == "snapkv"}
    assert ours_alone == {key[1:]: samples for key, samples in answers.items() if key[0] == "kvpress:snapkv"}
    assert len(ours_alone) == 4 and all(len(samples) == 4 for samples in ours_alone.values())

"""Accounted bytes: layers of any shape hold what the formula says and what prompts of a model do; the command."""

import json

import pytest
import torch
from support.families import build, prompt
from support.grids import grid
from transformers import AutoConfig

import kvbench
from kvbench.audit import accounting
from kvbench.audit.prompt_audit import audit
from kvbench.base.conf import entries
from kvbench.bench import layers, memory_table
from kvbench.cli.main import main
from kvbench.kv.model_shape import Shape, from_config, from_entry
from kvbench.methods.core.resolve import chain_of
from kvbench.models import traits
from kvbench.models.releases import HOLDS_STATES

SHAPE = Shape(layers=4, query_heads=4, kv_heads=2, head_dim=32)
METHODS = memory_table.list_default_methods()


@grid("per", ["kv_head", "query_head"])
@grid("n", [7, 300])
@grid("method", METHODS)
def test_layers_of_every_method_hold_what_the_formula_says(method, n, per):
    chain = chain_of(method, {"per": per})
    measured = layers.measure_bytes(chain, SHAPE, n, torch.float16)
    assert measured.agrees and measured.off == 0
    declared = accounting.bytes_declared(chain, SHAPE, n, 2)
    if declared is None:
        # where heads are grouped, the prompt decides in which groups one leads
        assert chain.name == "refreekv" or (chain.name, per) == ("chai", "kv_head")
    else:
        # heads that hold equally many by chance need no lengths
        built = layers.compress_layers(chain, SHAPE, n, torch.float16) if chain.replayer else []
        equal = sum(4 * layer.heads for _, layer, _ in built if layer.segments[0].lengths is None)
        assert (declared.tokens, declared.payload, declared.overhead - equal) == (
            measured.tokens,
            measured.held.payload,
            measured.held.overhead,
        )


@pytest.mark.parametrize(
    "method", ["full", "snapkv+think", "adakv+think", "cake", "refreekv", "snapkv+kivi", "uncomp-stage+h2o"]
)
def test_random_layers_hold_as_much_as_a_prompt_of_a_model(method):
    model = build("llama")
    (cache,) = kvbench.prefill(model, prompt(200), [method])
    shape = from_config(model.config)
    measured = audit(cache, shape.cache_shape(itemsize=4))
    held_bytes = sum((accounting.bytes_held(layer) for layer in cache.layers), accounting.HeldBytes())
    assert (held_bytes.payload, held_bytes.overhead, held_bytes.total) == (
        measured.payload,
        measured.overhead,
        cache.nbytes(),
    )
    if method != "refreekv":
        random = layers.measure_bytes(chain_of(method), shape, 200, torch.float32).held
        assert random.parts() == held_bytes.parts()


def test_a_layer_that_reads_no_more_than_its_budget_is_not_taken_for_one_that_chooses():
    model = build("llama")
    entry = {"method": "uncomp-stage+snapkv", "least": 0.25, "kv_ratio": 0.25}
    (cache,) = kvbench.prefill(model, prompt(200), [entry])
    measured = layers.measure_bytes(cache.chain, from_config(model.config), 200, torch.float32)
    declared = accounting.bytes_declared(cache.chain, from_config(model.config), 200, 4)
    # the last layer stores positions once for all heads
    assert [layer.segments[0].positions.shape[0] for layer in cache.layers] == [2, 2, 1]
    assert measured.agrees and measured.held.total == declared.total == cache.nbytes()


def test_the_last_queries_that_a_decode_budget_needs_are_counted():
    chain = chain_of("snapkv", {"kv_size": 64, "decode_budget": 64})
    plain = layers.measure_bytes(chain_of("snapkv", {"kv_size": 64}), SHAPE, 300, torch.float16)
    measured = layers.measure_bytes(chain, SHAPE, 300, torch.float16)
    assert measured.agrees and measured.off == 0
    assert measured.held.state == 4 * 4 * 32 * 32 * 2  # layers, query heads, queries, channels, bytes
    assert measured.held.total - measured.held.state == plain.held.total


def test_parts_are_told_apart():
    chain = chain_of("snapkv+think+kivi", {"kv_size": 228, "residual": 32, "recent": 32})
    stored = layers.measure_bytes(chain, SHAPE, 300, torch.float16).held
    keys, values, kept_tokens = 192, 196, 32 - int(0.4 * 32)
    heads = SHAPE.layers * SHAPE.kv_heads
    assert stored.exact == heads * 2 * 32 * (228 - keys + 228 - values)
    assert stored.codes == heads * (keys * kept_tokens // 4 + values * 32 // 4)
    assert stored.scales == heads * (keys // 32 * kept_tokens * 4 + values * 4)
    assert (stored.positions, stored.ids, stored.state) == (heads * 4 * 228, heads * 2 * kept_tokens, 0)
    state = layers.measure_bytes(
        chain_of("h2o", {"variant": "orig", "kv_size": 50}), SHAPE, 300, torch.float16
    ).held.state
    assert state == heads * 4 * 50


def test_a_chain_that_holds_more_than_it_declares_fails_the_command(monkeypatch, capsys):
    from kvbench.methods.think import Think

    monkeypatch.setattr(Think, "id_bytes", lambda self, head_dim: 1)
    assert main(["bench", "memory", "method=snapkv,snapkv+think", "n=200", "kv_size=64"]) == 1
    shown = capsys.readouterr().out
    ids = 2 * (32 - int(0.4 * 32))
    assert f"+{6 * 4 * (ids - 1)} B" in shown and shown.count("✓") == 2  # a row and the legend


@pytest.mark.parametrize("name", [m for m in entries("model") if m not in ("hf", "tiny")])
def test_every_model_states_a_shape(name):
    shape = from_entry(entries("model")[name]["shape"])
    per_token = {
        "llama2": 512, "vicuna": 512, "llama3-8b": 128, "llama3-70b": 320, "mistral": 128, "qwen2.5-7b": 56,
        "qwen2.5-32b": 256, "qwen2.5-72b": 320, "opt-6.7b": 512, "opt-30b": 1344, "pythia-70m": 12, "pythia-160m": 36,
        "pythia-410m": 96, "llama2-13b": 800, "llama3.2-1b": 32, "qwen2.5-0.5b": 12, "qwen2.5-1.5b": 28,
        "smollm2-135m": 22.5, "smollm2-360m": 40, "smollm2-1.7b": 192, "tinyllama-1.1b": 22,
        "qwen3-0.6b": 112, "qwen3-4b": 144, "qwen3-8b": 144, "llama3.1-8b": 128, "llama3.2-3b": 112, "phi4": 200,
        "mistral-nemo": 160, "smollm3-3b": 72, "mixtral-8x7b": 128, "qwen3-30b-a3b": 96,
        "qwen3-next-80b": 24, "qwen3.5-9b": 32, "qwen3.5-35b": 20, "gpt-oss-20b": 48, "gpt-oss-120b": 72,
        "granite-4.0-h-small": 16, "falcon-h1-7b": 44, "nemotron-3-super": 8, "jamba": 16, "minimax-m2": 248,
        "deepseek-v3": 68.625, "kimi-linear-48b": 7.875, "gemma-3n-e4b": 40, "gemma-4-26b": 220, "llama-4-scout": 192,
        "gemma-2-2b": 104, "gemma-2-9b": 336, "gemma-3-1b": 26, "gemma-3-270m": 18, "gemma3-270m": 18, "phi3-mini": 384,
    }  # fmt: skip
    want = per_token[max((k for k in per_token if name.startswith(k)), key=len)]
    assert shape.full_bytes(1, 2) - shape.state_bytes(2) == want * 1024


MAMBA2 = {"mamba_n_groups": 1, "mamba_d_conv": 4, "pad_token_id": 0}
GRANITE = ["mamba"] * 36 + ["attention"] * 4
SUPER = ["mamba"] * 40 + ["moe"] * 40 + ["attention"] * 8
RELEASED = {
    "qwen3.5-9b": ("qwen3_5_text", {}),
    "granite-4.0-h-small": (
        "granitemoehybrid",
        {
            **{**MAMBA2, "num_hidden_layers": 40, "layer_types": GRANITE, "hidden_size": 4096, "num_local_experts": 0},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "mamba_n_heads": 128, "mamba_d_head": 64},
            **{"mamba_d_state": 128, "mamba_expand": 2},
        },
    ),
    "falcon-h1-7b-instruct": (
        "falcon_h1",
        {
            **{**MAMBA2, "num_hidden_layers": 44, "hidden_size": 3072, "num_attention_heads": 12, "head_dim": 128},
            **{"num_key_value_heads": 2, "mamba_n_heads": 24, "mamba_d_head": 128, "mamba_d_state": 256},
            **{"mamba_d_ssm": 3072},
        },
    ),
    "nemotron-3-super-120b-a12b": (
        "nemotron_h",
        {
            **{"num_hidden_layers": 88, "layers_block_type": SUPER, "hidden_size": 4096, "num_attention_heads": 32},
            **{"num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8},
            **{"ssm_state_size": 128, "conv_kernel": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
        },
    ),
    "jamba-v0.1": (
        "jamba",
        {"num_hidden_layers": 32, "attn_layer_period": 8, "attn_layer_offset": 4, "num_experts": 2, "pad_token_id": 0},
    ),
}
"""Families and sizes of released models. Experts, which hold nothing of the text, are few here."""


@pytest.mark.e2e("models of their real sizes, without weights")
@pytest.mark.skipif(not HOLDS_STATES, reason="this release of transformers holds states in another way")
@pytest.mark.parametrize("name", RELEASED)
def test_the_states_of_released_models_are_those_that_transformers_holds(name):
    family, sizes = RELEASED[name]
    shape = traits.of_config(AutoConfig.for_model(family, **sizes)).shape
    assert shape == from_entry(entries("model")[name]["shape"])


def test_the_command_prints_every_size_within_the_page(capsys):
    assert main(["bench", "memory", "n=64,300"]) == 0
    shown = capsys.readouterr().out
    assert all(len(line) <= 100 for line in shown.splitlines())
    assert "prompt of 64 tokens" in shown and "prompt of 300 tokens" in shown
    assert "6 layers, 8 query and 4 kv heads of dimension 32; float32" in shown
    assert shown.count("✓") == 2 * (len(METHODS) + 1)


def test_json_has_the_numbers_and_formulas_alone_build_nothing(capsys, monkeypatch):
    line = ["bench", "memory", "model=llama3-8b-instruct", "method=snapkv+think", "kv_size=128", "n=4096", "--json"]
    assert main(line) == 0
    (built,) = json.loads(capsys.readouterr().out)["rows"]
    monkeypatch.setattr(memory_table, "measure_bytes", None)
    assert main([*line, "--formula"]) == 0
    (formula,) = json.loads(capsys.readouterr().out)["rows"]
    assert built["measured"] and built["agrees"] and built["layers_built"] == 1 and not formula["measured"]
    for key in ("tokens", "payload", "overhead", "total", "percent_of_full", "full_bytes"):
        assert built[key] == formula[key]
    assert built["payload"] == 32 * 8 * 2 * (96 * 77 + 32 * 128 + 128 * 128)
    assert built["full_bytes"] == 4096 * 128 * 1024
    assert sum(built["parts"].values()) == built["total"]


def test_what_does_not_fit_is_formula_only(monkeypatch, capsys):
    monkeypatch.setattr(memory_table, "measure_room", lambda: 1000)
    assert main(["bench", "memory", "method=snapkv,adakv,refreekv", "n=300"]) == 0
    shown = capsys.readouterr().out
    assert "snapkv, adakv: a layer would need" in shown and "only a prompt decides what is kept" in shown
    assert "✓" not in shown and "≈ formula" in shown


def test_sizes_are_matched_at_each_prompt_length(capsys):
    assert main(["bench", "memory", "method=snapkv,think", "n=128,512", "match=bytes", "--json", "--formula"]) == 0
    result = json.loads(capsys.readouterr().out)
    for n, size in ((128, 110), (512, 416)):
        row = next(m for m in result["matched"] if m["n"] == n)
        assert abs(row["kv_size"] - size) < 12 and abs(row["bytes"][0] / row["bytes"][1] - 1) < 0.01


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("n=0", "n=0 is not possible"),
        ("n=abc", "prompt sizes in tokens"),
        ("dataset=tiny", "unknown key dataset of bench memory"),
        ("limit=3", "unknown key limit of bench memory"),
        ("paper=thonk", "Did you mean think"),
        ("paper=think n=3", "the numbers of papers have no options"),
        ("method=snapkw", "Did you mean snapkv"),
        ("model=owner/absent", "download=true"),
        ("model.shape={layers:3}", "a mapping with layers, query_heads"),
        ("dtype=fp8", "model.dtype"),
    ],
)
def test_impossible_requests_say_what_to_do(line, message, capsys):
    assert main(["bench", "memory", *line.split()]) == 2
    assert message in capsys.readouterr().err

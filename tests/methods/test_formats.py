"""Storage formats as stages: what every step attends, what it holds to the byte, what they stand beside."""

import math
from itertools import product

import pytest
import torch
from support import method_reference as ref
from support.families import build, prompt

import kvbench
from kvbench.audit.accounting import bytes_after_decoding, bytes_declared
from kvbench.audit.prompt_audit import audit
from kvbench.base.errors import UsageError
from kvbench.bench.layers import measure_bytes
from kvbench.engine.decode_layer import RowLayer
from kvbench.kv.codecs import NAMED
from kvbench.kv.model_shape import CacheShape, from_config
from kvbench.kv.segment import storage_bytes
from kvbench.methods.core.resolve import chain_of
from kvbench.models.interface import cache_shape
from kvbench.storage.format import Room, StoredRow

D, SCALE = 32, 1 / math.sqrt(32)
SNAPKV = {"kv_size": 24, "window": 6}
CHAINS = {
    "fp8": {},
    "fp8 tensor": {"scale": "tensor"},
    "fp8 head": {"scale": "head", "type": "e5m2", "headroom": "vllm"},
    "fp8 token": {"scale": "token_head", "residual": 8},
    "int8": {"decode": "exact"},
    "int8 asymmetric": {"symmetric": False, "only": "values"},
    "int4": {},
    "int4 rotated": {"symmetric": True, "rotate": "haar", "residual": 5},
    "q8_0": {"values": "q4_0"},
    "q8_0_h": {},
    "q4_0_h": {"only": "keys"},
    "turboquant": {},
    "turboquant 3 bits": {"codes": "3bit_nc", "decode": "exact"},
    "turboquant k8v4": {"codes": "k8v4"},
    "turboquant mse": {"variant": "mse", "codes": "k3v4_nc"},
    "turboquant prod": {"variant": "prod"},
    "nvfp4": {},
    "nvfp4 exact": {"four_over_six": True, "rotate": "hadamard", "decode": "exact"},
    "mxfp4": {},
    "mxfp4 sglang": {"variant": "sglang", "residual": 4},
    "snapkv+fp8": SNAPKV,
    "snapkv+turboquant": SNAPKV,
    "adakv+nvfp4": SNAPKV,
    "adakv+fp8 tensor": {**SNAPKV, "scale": "tensor"},
    "adakv+q4_0": {**SNAPKV, "decode": "exact"},
    "think+int4": {"ratio": 0.4, "recent": 6, "observed": 8},
    "think+q4_0": {"ratio": 0.4, "recent": 0, "observed": 8},
    "thinkv+nvfp4": {"thinkv.ratio": 0.3, "value_ratio": 0.5, "recent": 5, "observed": 8},
    "snapkv+think+turboquant": {**SNAPKV, "ratio": 0.4, "recent": 6, "observed": 8},
}


class Head:
    """All tokens of one stored head, and what attention reads in their place."""

    def __init__(self, chain, layer, h, k, v, group):
        positions = layer.kept_positions()[h].long()
        (s,), self.coder = layer.segments, chain.coder
        self.halves = []
        for half, x, residual, channels, codes in (
            ("k", k, chain.coder.keys, s.key_channels, s.codes.k),
            ("v", v, chain.coder.values, s.value_channels, s.codes.v),
        ):
            frozen = None if codes.frozen is None else codes.frozen[h : h + 1]
            kept = x[h // group, positions]
            channels = torch.arange(D) if channels is None else channels[h].long()
            self.halves.append(
                [kept, residual, channels, chain.quantiser.codec(half), frozen, residual.packed(len(kept))]
            )

    def add(self, k, v):
        for half, new in zip(self.halves, (k, v), strict=True):
            half[0] = torch.cat([half[0], new])

    def packed(self, half, now):
        """How many tokens are stored: those in excess of the residual, or of the prompt alone."""
        kept, residual, *_, prompt = half
        return (residual.packed(len(kept)) if now else prompt) if self.coder.grows else prompt

    def read(self, half):
        """Return every token as it is read: zeros in channels that are not stored."""
        kept, _, channels, codec, frozen, _ = half
        packed = self.packed(half, now=True)
        read = kept.clone()
        read[:packed] = 0
        if packed:
            coded = codec.pack(kept[None, :packed, channels], frozen).dequantise(torch.float32)[0]
            read[:packed, channels] = coded
        return read

    def attend(self, queries):
        k, v = map(self.read, self.halves)
        return (queries @ k.T * SCALE).softmax(dim=-1) @ v


@pytest.mark.parametrize("name", CHAINS)
def test_every_step_attends_what_is_stored_and_holds_the_bytes_of_the_formula(name):
    chains, lengths, steps = {}, (19, 41), 6
    for per in ("kv_head", "query_head"):
        chains[per] = chain_of({"method": name.split()[0], **CHAINS[name], "per": per})
    g = torch.Generator().manual_seed(len(name))
    for per, chain in chains.items():
        rows, heads = [], []
        for seed, n in enumerate(lengths):
            q, k, v = (torch.randn(h, n, D, generator=g) for h in (4, 2, 2))
            dense, obs = ref.make_layer(q, k, v, per=per, scale=SCALE, prompt=seed)
            layer = chain.compress(dense, obs)
            stored = layer.heads
            rows.append(layer)
            heads.append([Head(chain, layer, h, k, v, stored // 2) for h in range(stored)])
        decoding = RowLayer([StoredRow(cache=c, coder=chain.coder) for c in rows], Room(tokens=steps))
        for step in range(steps):
            q, k, v = (torch.randn(2, h, 1, D, generator=g) for h in (4, 2, 2))
            decoding.add(k, v)
            out = decoding.attend(q, SCALE, None)
            for b, group in enumerate(heads):
                for h, head in enumerate(group):
                    head.add(k[b, h * 2 // len(group)], v[b, h * 2 // len(group)])
                    queries = slice(h * 4 // len(group), (h + 1) * 4 // len(group))
                    torch.testing.assert_close(out[b, queries], head.attend(q[b, queries]), rtol=2e-4, atol=2e-5)
            limits = [
                bytes_after_decoding(chain, c, 0, step + 1, CacheShape(kv_heads=2, head_dim=D, itemsize=4))
                for c in rows
            ]
            assert decoding.payload() == [low for low, high in limits if low == high]


@pytest.mark.parametrize("method", ["fp8", "nvfp4", "q4_0_h", "turboquant", "int4"])
@pytest.mark.parametrize("selector", ["tova", "h2o"])
def test_a_budget_that_never_fills_decodes_as_the_format_alone(selector, method):
    """Slots that evict hold the same codes, under the same scales, as rows that grow."""
    model, ids = build("llama"), prompt(40)
    more = {"group": 4} if method in ("q4_0_h", "nvfp4") else {"scale": "tensor"} if method == "fp8" else {}
    evicting = {"method": f"{selector}+{method}", **more, **({"h2o.variant": "orig"} if selector == "h2o" else {})}
    alone, beside = kvbench.prefill(model, ids, [{"method": method, **more}, {**evicting, "kv_size": 1000}])
    for chunk in prompt(4, 9).split(1):
        alone, beside = (kvbench.extend(model, c, chunk) for c in (alone, beside))
        torch.testing.assert_close(beside.logits, alone.logits, atol=1e-4, rtol=1e-4)
    (small,) = kvbench.prefill(model, ids, [{**evicting, "kv_size": 16}])
    assert audit(small, cache_shape(model)).kept == 16
    assert len(kvbench.generate(model, [small], 6)[0]) == 6


@pytest.mark.parametrize("scale", ["tensor", "head"])
def test_ragged_heads_share_the_scale_of_the_tensor(scale):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(h, 40, D, generator=g) for h in (4, 2, 2))
    k[1] *= 5
    dense, obs = ref.make_layer(q, k, v, scale=SCALE)
    chain = chain_of({"method": "adakv+fp8", **SNAPKV, "scale": scale})
    layer = chain.compress(dense, obs)
    (s,) = layer.segments
    assert s.lengths is not None
    absmax = torch.stack([k[h, p.long()].abs().max() for h, p in enumerate(layer.kept_positions())])
    expected = absmax / 448 if scale == "head" else absmax.max().expand(2) / 448
    torch.testing.assert_close(s.codes.k.frozen.flatten(), expected)


@pytest.mark.parametrize(("decode", "extra"), product(("coded", "exact"), ({}, {"residual": 4})))
def test_turns_go_on_where_the_last_ended(decode, extra):
    model = build("llama")
    entry = {"method": "fp8", "scale": "head", "decode": decode, **extra}
    whole, parts = (kvbench.prefill(model, prompt(30), [entry])[0] for _ in range(2))
    whole = kvbench.extend(model, whole, prompt(6, 5))
    for chunk in prompt(6, 5).split([1, 2, 3]):
        parts = kvbench.extend(model, parts, chunk)
    torch.testing.assert_close(whole.logits, parts.logits, atol=1e-4, rtol=1e-4)
    assert whole.nbytes() == parts.nbytes()


def test_layers_that_stay_exact_are_exact_and_counted():
    model, ids = build("llama"), prompt(30)
    entry = {"method": "turboquant", "exact_layers": [0, 2]}
    cache, everywhere, full = kvbench.prefill(model, ids, [entry, "turboquant", "full"])
    audit(cache, cache_shape(model))
    payloads = [
        [storage_bytes(t for s in layer.segments for t in s.payload()) for layer in c.layers] for c in (cache, full)
    ]
    assert [a == b for a, b in zip(*payloads, strict=True)] == [True, False, True]
    chain, shape = cache.chain, from_config(model.config)
    assert bytes_declared(chain, shape, 30, 4).payload == sum(payloads[0])
    assert measure_bytes(chain, shape, 30, torch.float32).agrees
    exact, *others = (kvbench.extend(model, c, prompt(1, 4)).logits for c in (full, cache, everywhere))
    errors = [(x - exact).abs().max().item() for x in others]
    assert 0 < errors[0] < errors[1]
    for i in range(3):  # every step, too
        layer = kvbench.extend(model, cache, prompt(3, 4)).layers[i]
        assert (layer.segments[0].k.shape[1] == 33) == (i != 1)
    with pytest.raises(UsageError, match="is not possible: the model has layers 0 to 2"):
        kvbench.prefill(model, ids, [{**entry, "exact_layers": [3]}])


def test_a_prompt_read_through_the_cache_sees_codes():
    model = build("llama")
    exact, through, full = kvbench.prefill(
        model, prompt(30), [{"method": "fp8"}, {"method": "fp8", "code_prefill": True}, "full"]
    )
    assert torch.equal(exact.logits, full.logits)
    assert 0 < (through.logits - full.logits).abs().max() < 1


def test_llama_cpps_names_say_the_rotation():
    assert chain_of("q4_0_h").quantiser.codecs()[0] == NAMED["q4_0_h"]
    keys, values = chain_of("q8_0_h").quantiser.codecs()
    assert (keys.block, values.block) == (2**30, 64)  # values are rotated by 64 channels


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"method": "int8", "symmetric": False, "round": "trunc"}, "round='trunc' is not possible: nearest where"),
        ({"method": "turboquant", "codes": "k8v4", "variant": "prod"}, "engine where codes=k8v4"),
        ({"method": "turboquant", "codes": "k8v4", "rotate": "haar"}, "null where codes=k8v4"),
        ({"method": "fp8", "headroom": "vllm"}, "none where scale=one"),
        ({"method": "int4", "only": "keys", "values": "q8_0"}, "null where only=keys"),
        ({"method": "fp8", "values": "q9"}, "values='q9' is not possible"),
        ({"method": "q4_0", "group": 5}, "an even whole number of channels"),
        ({"method": "tova+fp8", "decode": "exact"}, "keeps some tokens exact beside quantised ones"),
        ({"method": "tova+int4", "residual": 8}, "keeps some tokens exact beside quantised ones"),
        ({"method": "fp8+kivi"}, "a combination has at most one quantiser"),
        ({"method": "fp8", "exact_layers": [1], "code_prefill": True}, "false beside exact_layers"),
        ({"method": "palu+fp8"}, "fp8 quantises keys and values as attention reads them"),
    ],
)
def test_what_cannot_be_is_refused(entry, reason):
    with pytest.raises(UsageError, match=reason):
        chain_of(entry)


@pytest.mark.parametrize("method", ["q8_0", "q4_0_h", "mxfp4"])
def test_heads_of_80_channels_hold_no_whole_blocks_of_32(method):
    chain = chain_of(method)
    dense, obs = ref.make_layer(torch.zeros(2, 3, 80), torch.zeros(2, 3, 80))
    with pytest.raises(UsageError, match="does not fit heads of 80 channels: it takes channels in whole blocks of 32"):
        chain.compress(dense, obs)
    with pytest.raises(UsageError, match="does not fit heads of 16 channels"):
        kvbench.prefill(build("llama"), prompt(8), [method])

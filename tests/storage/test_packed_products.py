"""Products with packed keys and values equal those with the same numbers unpacked, in double precision.

All of it by plain PyTorch, and by the C functions of kvbench-kernels where they are installed.
"""

import os

import pytest
import torch
from support.families import build, prompt

import kvbench
from kvbench.engine import step
from kvbench.kv.codecs import NAMED
from kvbench.kv.codecs.blocks import Blocks
from kvbench.kv.packed import BITS, quantise_channels, quantise_tokens, quantise_zero_point
from kvbench.models.interface import attached
from kvbench.storage.attend import as_they_are, compute_packed_logits, weigh_packed
from kvbench.storage.kernels import SWITCH, on_cpu


@pytest.fixture(params=["off", "on"])
def switched(request, monkeypatch):
    monkeypatch.setenv(SWITCH, request.param)
    if request.param == "on" and not on_cpu.installed():
        pytest.skip("kvbench-kernels is not installed (pip install ./kernels, with a C compiler)")


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(found, want, at=1e-5):
    """Equal to ``at`` of the largest number."""
    assert found.shape == want.shape and found.dtype == torch.float32
    assert (found - want).abs().max() <= at * max(want.abs().max().item(), 1.0)


def packings(u, h, n, c, bits):
    x = random(u, h, n, c, seed=bits) * random(c, seed=9).exp() + 0.5
    yield quantise_tokens(x, bits, 32)
    yield quantise_tokens(x, bits, 5)
    yield quantise_tokens(x, bits, 1, constant_scale=1.0)
    yield quantise_zero_point(x, bits)
    for group in (g for g in (1, 5, 32) if n % g == 0):
        yield quantise_channels(x, bits, group)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(
    ("u", "h", "group", "t", "n", "c"),
    [
        (1, 1, 1, 1, 1, 1),
        (2, 2, 4, 1, 96, 128),
        (1, 3, 3, 1, 64, 64),
        (1, 2, 5, 1, 33, 96),
        (3, 2, 2, 1, 65, 77),
        (1, 3, 1, 3, 160, 20),
        (2, 1, 8, 2, 35, 17),
    ],
)
@pytest.mark.usefixtures("switched")
def test_products_are_those_with_the_numbers(bits, u, h, group, t, n, c):
    query, probs = random(u, h * group, t, c, seed=4), random(u, h * group, t, n, seed=5).softmax(dim=-1)
    for packed in packings(u, h, n, c, bits):
        numbers = packed.dequantise(torch.float32).double().repeat_interleave(group, dim=1)
        close(compute_packed_logits(query, packed, c**-0.5, None, as_they_are), c**-0.5 * (query.double() @ numbers.mT))
        close(weigh_packed(probs, packed), probs.double() @ numbers)


@pytest.mark.parametrize("span", [0, 1e-6, 1e-3, 6e4])
@pytest.mark.usefixtures("switched")
def test_scales_of_every_size(span):
    # scales below 6e-5 are subnormal in fp16; a span of 0 has the scale 0
    x = 0.5 + span * (random(1, 2, 64, 64, seed=7).sigmoid() - 0.5)
    query, probs = random(1, 6, 1, 64, seed=4), random(1, 6, 1, 64, seed=5).softmax(dim=-1)
    for packed in (quantise_channels(x, 4, 32), quantise_tokens(x, 4, 32)):
        numbers = packed.dequantise(torch.float32).double().repeat_interleave(3, dim=1)
        close(compute_packed_logits(query, packed, 1.0, None, as_they_are), query.double() @ numbers.mT)
        close(weigh_packed(probs, packed), probs.double() @ numbers)


@pytest.mark.usefixtures("switched")
def test_thin_keys_and_stand_ins():
    channels = torch.stack([random(2, 24, seed=s).argsort(dim=-1)[:, :9].sort(dim=-1).values for s in (1, 2)])
    query, packed = random(2, 4, 1, 24), quantise_channels(random(2, 2, 64, 9, seed=3), 2, 32)
    numbers, index = packed.dequantise(torch.float32), channels.repeat_interleave(2, dim=1)[:, :, None]
    for estimate in (as_they_are, torch.round):
        keys = estimate(numbers).double().repeat_interleave(2, dim=1)
        actual = compute_packed_logits(query, packed, 0.2, channels, estimate)
        close(actual, 0.2 * (query.gather(3, index).double() @ keys.mT))


@pytest.mark.parametrize("layout", ["a view of a growing buffer", "transposed"])
@pytest.mark.usefixtures("switched")
def test_layouts_of_memory(layout):
    query = random(2, 4, 1, 40)
    for packed in packings(2, 2, 160, 40, 4):
        if layout == "transposed":
            read = packed.map(lambda t: t.transpose(0, -1).contiguous().transpose(0, -1))
        else:
            read = packed.tokens(0, 60 if packed.axis == "token" else 160 // packed.group // 2 * packed.group)
        numbers = read.dequantise(torch.float32).double().repeat_interleave(2, dim=1)
        close(compute_packed_logits(query, read, 0.2, None, as_they_are), 0.2 * (query.double() @ numbers.mT))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("switched")
def test_logits_of_half_precision_are_not_rounded(dtype):
    query, packed = random(1, 8, 1, 64).to(dtype), quantise_channels(random(1, 2, 64, 64, seed=3), 4, 32)
    keys = packed.dequantise(dtype).float().repeat_interleave(4, dim=1)
    close(compute_packed_logits(query, packed, 0.125, None, as_they_are), 0.125 * (query.float() @ keys.mT))


@pytest.mark.skipif(not on_cpu.installed(), reason="kvbench-kernels is not installed")
def test_the_c_functions_serve_plain_fp32_and_leave_the_rest(switched, monkeypatch):
    query, packed = random(2, 3, 64), quantise_tokens(random(2, 40, 64), 4, 32)
    served = on_cpu.logits(query, packed)
    assert (served is None) == (os.environ[SWITCH] == "off")
    assert on_cpu.logits(query.bfloat16(), packed) is None
    assert on_cpu.logits(random(2, 65, 64), packed) is None  # many queries: a prompt
    assert on_cpu.logits(random(2, 3, 1024), quantise_tokens(random(2, 8, 1024), 4, 32)) is None  # a head too wide


@pytest.mark.skipif(not on_cpu.installed(), reason="kvbench-kernels is not installed")
def test_heads_over_threads_have_the_same_bits(monkeypatch):
    monkeypatch.setenv(SWITCH, "on")
    query, packed = random(5, 3, 64), quantise_channels(random(5, 96, 64), 4, 32)
    probs = random(5, 3, 96).softmax(dim=-1)
    alone = on_cpu.logits(query, packed), on_cpu.weigh(probs, packed)
    monkeypatch.setattr(on_cpu, "BYTES_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for found, want in zip((on_cpu.logits(query, packed), on_cpu.weigh(probs, packed)), alone, strict=True):
        assert torch.equal(found, want)


@pytest.mark.skipif(not on_cpu.installed(), reason="kvbench-kernels is not installed")
@pytest.mark.parametrize(
    "method",
    [
        {"method": "kivi", "bits": 4, "group": 16, "residual": 16},
        {"method": "kivi", "bits": 2, "group": 8, "residual": 24},
        {"method": "flexgen", "bits": 4, "group": 16},
        {"method": "qhitter", "kv_ratio": 0.5},
        {"method": "int8"},
        {"method": "fp8"},
        {"method": "q4_0", "group": 16},
        {"method": "q4_0_h", "group": 16},
        {"method": "turboquant"},
        {"method": "int4"},
        {"method": "think+kivi", "bits": 4, "group": 16, "residual": 16, "ratio": 0.4},
        {"method": "thinkv+int8", "thinkv.ratio": 0.3, "value_ratio": 0.5},
    ],
    ids=lambda entry: entry["method"],
)
def test_attention_of_rows_of_several_lengths_is_that_of_pytorch(method, monkeypatch):
    model, served, text = build("llama", num_hidden_layers=2), [], prompt(18, 4)
    own = on_cpu.attend
    monkeypatch.setattr(on_cpu, "attend", lambda *given: served.append(own(*given)) or served[-1])
    logits = {}
    for setting in ("off", "on"):
        monkeypatch.setenv(SWITCH, setting)
        caches = [c for n in (70, 33, 8) for c in kvbench.prefill(model, prompt(n), [method])]
        positions = torch.tensor([[cache.seen] for cache in caches])
        logits[setting] = []
        with torch.no_grad(), attached(model):
            layers = step.build(model, caches, len(text))
            for i, token in enumerate(text):
                tokens = token.expand(len(caches), 1)
                logits[setting].append(step.step(model, layers, tokens, positions + i))
    on, off = torch.stack(logits["on"]), torch.stack(logits["off"])
    torch.testing.assert_close(on[:1], off[:1], atol=1e-4, rtol=1e-4)
    # later tokens are coded anew: where the last bit of a number decides its code, logits differ more
    assert (on - off).abs().median() < 1e-4
    assert any(out is not None for out in served) == (method["method"] != "qhitter")


@pytest.mark.skipif(not on_cpu.installed(), reason="kvbench-kernels is not installed")
@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("channels", [32, 64, 90])
def test_every_codecs_products_in_c_are_those_with_its_numbers(name, channels, monkeypatch):
    monkeypatch.setenv(SWITCH, "on")
    x = random(2, 3, 45, channels, seed=3) * random(channels, seed=9).exp() + 0.1
    whole = NAMED[name].pack(x)
    assert whole.levels() is not None
    # a view, as of a buffer with room for more tokens
    for packed in (whole, whole.tokens(0, 37)):
        # the numbers that attention multiplies, in the basis of the codec
        numbers = packed.rotated(torch.float32).double().flatten(0, 1)
        query = random(6, 2, numbers.shape[2], seed=4)
        close(on_cpu.logits(query, packed), query.double() @ numbers.mT)
        probs = random(6, 2, numbers.shape[1], seed=5).softmax(dim=-1)
        close(on_cpu.weigh(probs, packed), probs.double() @ numbers)


def test_a_codec_that_decodes_in_another_way_than_its_parent_is_left_to_pytorch():
    class Doubled(Blocks):
        def decode(self, tensors, channels, frozen):
            return 2 * super().decode(tensors, channels, frozen)

    x = random(1, 2, 5, 32)
    assert Blocks().pack(x).levels() is not None
    assert Doubled().pack(x).levels() is None

"""Twilight: the smallest set of tokens with mass p by a 4-bit estimate, attended exactly; nothing is saved."""

import math
from itertools import product

import pytest
import torch
from support import method_reference as ref
from support.families import build, prompt

import kvbench
from kvbench.audit.prompt_audit import audit
from kvbench.base.errors import UsageError
from kvbench.engine.decode import generate_rows
from kvbench.engine.stopping import Ending
from kvbench.kv.segment import Segment
from kvbench.methods.core.resolve import chain_of
from kvbench.methods.twilight import Twilight
from kvbench.models.interface import cache_shape
from kvbench.storage.attend import attend
from kvbench.storage.row_segments import stack_rows


def masked(weights, p):
    return Twilight(p=p).mask(torch.tensor(weights)[None, None, None])[0, 0, 0].tolist()


# spec 5, Twilight: [.5, .3, .15, .05], and p=1
@pytest.mark.parametrize(
    ("weights", "p", "kept"),
    [
        ([0.5, 0.3, 0.15, 0.05], 0.85, [1, 1, 1, 0]),
        ([0.5, 0.3, 0.15, 0.05], 0.79, [1, 1, 0, 0]),
        ([0.05, 0.3, 0.15, 0.5], 0.79, [0, 1, 0, 1]),
        ([0.5, 0.3, 0.2, 0.0], 1.0, [1, 1, 1, 0]),
        ([0.4, 0.2, 0.2, 0.2], 0.5, [1, 1, 1, 1]),
        ([0.4, 0.3, 0.3, 0.0], 0.3, [1, 0, 0, 0]),
        ([0.5, 0.25, 0.25, 0.0], 0.5, [1, 0, 0, 0]),  # a sum that reaches p is enough
        ([0.0, 1.0, 0.0, 0.0], 0.99, [0, 1, 0, 0]),
    ],
)
def test_sets_by_hand(weights, p, kept):
    assert masked(weights, p) == [bool(x) for x in kept]


def test_four_bits_per_token_by_hand():
    stage = Twilight()
    levels = torch.arange(16.0) / 4 - 1
    torch.testing.assert_close(stage.estimate(levels[None]), levels[None])
    assert stage.estimate(torch.full((2, 8), 3.0)).tolist() == [[3.0] * 8] * 2
    x = torch.randn(3, 5, 32)
    step = (x.amax(-1) - x.amin(-1)) / 15
    assert ((stage.estimate(x) - x).abs().amax(-1) <= step / 2 + 1e-6).all()
    assert len(stage.estimate(x)[0, 0].unique()) <= 16


def slow(query, keys, values, p, scale):
    """One query head's output and set: loops over the explicit quantised keys."""
    estimates = []
    for key in keys:
        low, step = min(key), (max(key) - min(key)) / 15
        estimates.append([low + round((x - low) / step) * step if step else low for x in key])

    def softmax(xs):
        exps = [math.exp(x - max(xs)) for x in xs]
        return [e / sum(exps) for e in exps]

    def dots(ks):
        return [scale * sum(a * b for a, b in zip(query, k, strict=True)) for k in ks]

    weights = softmax(dots(estimates))
    order = sorted(range(len(keys)), key=lambda j: -weights[j])
    mass, chosen = 0.0, []
    for j in order:
        if mass >= p and weights[j] < weights[chosen[-1]]:
            break
        chosen.append(j)
        mass += weights[j]
    exact = softmax([dots(keys)[j] for j in chosen])
    return [sum(w * values[j][c] for w, j in zip(exact, chosen, strict=True)) for c in range(len(values[0]))], chosen


@pytest.mark.parametrize("p", [0.5, 0.85, 0.95])
@pytest.mark.parametrize(("hq", "hk"), [(3, 3), (4, 2), (4, 1)])
def test_attention_is_that_of_a_slow_loop(hq, hk, p):
    d, stored, t = 8, 20, 6
    draw = torch.Generator().manual_seed(hq + hk)
    q = torch.randn(2, hq, 1, d, generator=draw)
    k, v = (torch.randn(2, hk, stored + t, d, generator=draw) for _ in "kv")
    lengths = [20, 13]
    rows = [
        Segment(k[b, :, :m].clone(), v[b, :, :m].clone(), torch.arange(m, dtype=torch.int32)[None])
        for b, m in enumerate(lengths)
    ]
    out, attended = attend(q, [stack_rows(rows)], (k[:, :, stored:], v[:, :, stored:]), 0.9, masker=Twilight(p=p))
    counts = [[], []]
    for b, h in product(range(2), range(hq)):
        at = [*range(lengths[b]), *range(stored, stored + t)]
        keys, values = k[b, h // (hq // hk), at].tolist(), v[b, h // (hq // hk), at].tolist()
        wanted, chosen = slow(q[b, h, 0].tolist(), keys, values, p, 0.9)
        torch.testing.assert_close(out[b, h, 0], torch.tensor(wanted), atol=1e-5, rtol=1e-4)
        counts[b].append(len(chosen))
    assert attended.tolist() == pytest.approx([sum(c) / len(c) for c in counts])
    assert min(min(c) for c in counts) < stored


def test_new_tokens_see_only_what_came_before():
    q, k, v = (torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    together = attend(q, [], (k, v), 0.5, masker=Twilight(p=0.6))[0]
    for t in range(3):
        tail = (k[:, :, : t + 1], v[:, :, : t + 1])
        alone = attend(q[:, :, t : t + 1], [], tail, 0.5, masker=Twilight(p=0.6))[0]
        torch.testing.assert_close(together[:, :, t : t + 1], alone)


def test_it_saves_no_bytes_and_reports_what_it_attends():
    model = build("llama")
    full, caches, loose = kvbench.prefill(
        model, prompt(60), ["full", {"method": "twilight", "p": 0.5}, {"method": "twilight", "p": 1}]
    )
    assert audit(caches, cache_shape(model)).payload == audit(full, cache_shape(model)).payload
    attended = [a.attended for a in generate_rows(model, [full, caches, loose], [Ending(8)] * 3)]
    assert attended[0] is None
    assert 1 <= attended[1] < 20 and attended[2] == pytest.approx(sum(range(61, 68)) / 7)


@pytest.mark.parametrize("exempt", [[0, 1, 2], []])
def test_exempt_layers_attend_everything(exempt):
    model = build("llama")
    full, caches = kvbench.prefill(
        model, prompt(60), ["full", {"method": "twilight", "p": 0.1, "exempt_layers": exempt}]
    )
    complete, masked = generate_rows(model, [full, caches], [Ending(12)] * 2)
    assert (complete.tokens == masked.tokens) == bool(exempt) == (masked.attended is None) and complete.attended is None


def test_rows_in_a_batch_count_and_answer_as_alone():
    model = build("llama")
    entries = [{"method": "twilight", "p": 0.5}, "full", {"method": "twilight", "p": 0.9}]
    caches = [c for n in (40, 25) for c in kvbench.prefill(model, prompt(n, n), entries)]
    endings = [Ending(limit) for limit in (9, 4, 6, 3, 9, 5)]
    together = generate_rows(model, caches, endings)
    for answer, cache, ending in zip(together, caches, endings, strict=True):
        (alone,) = generate_rows(model, [cache], [ending])
        assert alone.tokens == answer.tokens
        assert (alone.attended is None) == (answer.attended is None) == (not cache.chain.masks)
        assert answer.attended is None or answer.attended == pytest.approx(alone.attended)


@pytest.mark.parametrize("base", ["snapkv", "snapkv+think"])
def test_it_wraps_caches_that_only_grow(base):
    model = build("llama")
    knobs = {"kv_size": 30, "snapkv.window": 8}
    (plain,) = kvbench.prefill(model, prompt(60), [{"method": base, **knobs}])
    (caches,) = kvbench.prefill(model, prompt(60), [{"method": f"twilight+{base}", **knobs}])
    assert [ref.kept(c) for c in plain.layers] == [ref.kept(c) for c in caches.layers]
    assert generate_rows(model, [plain, caches], [Ending(5)] * 2)[1].attended < 34
    with pytest.raises(UsageError, match="masks caches that only grow"):
        chain_of({"method": "h2o+twilight", "variant": "orig"})


@pytest.mark.parametrize(
    ("knob", "value"),
    [("p", 0), ("p", 1.1), ("p", "most"), ("bits", 0), ("bits", 2.5), ("exempt_layers", [-1]), ("exempt_layers", 2)],
)
def test_impossible_knobs_are_refused(knob, value):
    with pytest.raises(UsageError, match=rf"method\.twilight\.{knob}"):
        chain_of({"method": "twilight", knob: value})


def test_with_a_sink_p_is_a_share_of_what_goes_to_tokens():
    # half of the attention goes to a sink: 0.8 of the rest is 0.4, which the largest two hold
    weights = torch.tensor([[[[0.10, 0.30, 0.06, 0.04]]]])
    mask = Twilight(p=0.8).mask(weights)
    assert mask.flatten().tolist() == [True, True, False, False]

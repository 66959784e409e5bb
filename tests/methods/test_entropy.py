"""Truncated matrix entropy against slow computations of its own, and the groups that it makes."""

import gc
import math
import weakref

import numpy as np
import pytest
import torch
from support.families import WHOLE, build, prompt
from transformers import AttentionInterface

from kvbench.engine.prefill import make_observer
from kvbench.methods.core import entropy
from kvbench.methods.core.recipe import CalibrationRun

pytestmark = pytest.mark.e2e("runs whole command lines")


def slow_spectrum(rows):
    """Eigenvalues of Sigma of one head's rows [n][D], by loops over equation 1."""
    n, d = len(rows), len(rows[0])
    mean = [sum(r[i] for r in rows) / n for i in range(d)]
    sigma = np.zeros((d, d))
    for r in rows:
        x = [a - b for a, b in zip(r, mean, strict=True)]
        length = math.sqrt(sum(a * a for a in x))
        for i in range(d):
            for j in range(d):
                sigma[i, j] += x[i] * x[j] / length**2 / n
    return sorted(np.linalg.eigvalsh(sigma), reverse=True)


def slow_entropy(eigenvalues, top):
    return -sum(s * math.log(s) for s in eigenvalues[:top] if s > 0)


# spec 5, UNComp: s = 1/D -> H_D = ln D, erank_k = D^(k/D); 128, 32 -> 3.364
@pytest.mark.parametrize(("d", "k"), [(128, 32), (64, 32), (32, 32), (16, 5)])
def test_flat_spectra_follow_the_law(d, k):
    flat = torch.full((d,), 1 / d, dtype=torch.float64)
    assert float(entropy.compute_truncated_entropy(flat)) == pytest.approx(math.log(d))
    actual = float(entropy.compute_truncated_entropy(flat, k).exp())
    assert actual == pytest.approx(d ** (k / d))
    if (d, k) == (128, 32):
        assert round(actual, 3) == 3.364


def test_rows_along_all_axes_have_a_flat_spectrum():
    d = 8
    rows = torch.cat([torch.eye(d), -torch.eye(d)])[None]
    torch.testing.assert_close(entropy.measure_spectrum(rows), torch.full((1, d), 1 / d, dtype=torch.float64))


# spec 5, UNComp: rank-1 -> 1
def test_rank_one_has_an_effective_rank_of_one():
    rows = torch.linspace(-1, 2, 24)[:, None] * torch.tensor([3.0, 4.0, 0.0, 1.0])
    eigenvalues = entropy.measure_spectrum(rows[None])
    torch.testing.assert_close(eigenvalues[0].float(), torch.tensor([1.0, 0, 0, 0]), atol=1e-5, rtol=0)
    assert float(entropy.compute_truncated_entropy(eigenvalues).exp()) == pytest.approx(1, abs=1e-4)


def test_rows_at_the_mean_count_as_zero():
    assert entropy.measure_spectrum(torch.ones(2, 5, 3)).tolist() == [[0.0] * 3] * 2


def test_spectrum_equals_loops_and_has_trace_one():
    rows = torch.randn(3, 12, 5)
    actual = entropy.measure_spectrum(rows)
    torch.testing.assert_close(actual.sum(dim=1), torch.ones(3, dtype=torch.float64))
    for h in range(3):
        np.testing.assert_allclose(actual[h], slow_spectrum(rows[h].double().tolist()), atol=1e-6)


def captured(model, ids):
    """(q, k, v) of every layer after RoPE as an attention function of the test's own sees them."""
    seen = []

    def spy(module, query, key, value, mask, scaling, **_):
        seen.append((query[0].double(), key[0].double(), value[0].double()))
        group = query.shape[1] // key.shape[1]
        k, v = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = query @ k.transpose(2, 3) * scaling
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(1, 2), None

    AttentionInterface.register("spy", spy)
    before = model.config._attn_implementation
    model.set_attn_implementation("spy")
    try:
        with torch.no_grad():
            model(ids[None], use_cache=False)
    finally:
        model.set_attn_implementation(before)
    return seen


def measure(model, windows, top, tick=lambda: None):
    recipe = entropy.make_entropy_recipe(top, samples=3, tokens=20)
    return entropy.measure_entropy(CalibrationRun(model, windows, recipe, tick, make_observer(model)))


@pytest.mark.parametrize("family", WHOLE)
def test_measure_equals_a_slow_computation_over_captured_queries(family):
    model, top = build(family), 6
    windows = [prompt(24, seed) for seed in range(3)]
    ticks = []
    actual = measure(model, iter(windows), top, lambda: ticks.append(1))
    assert len(ticks) == 3
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    h_mean, counts, ranks = (np.zeros((layers, heads)) for _ in range(3))
    erank, erank_k = np.zeros((3, layers)), np.zeros((3, layers))
    for window in windows:
        for i, qkv in enumerate(captured(model, window)):
            spectra = [[slow_spectrum(head.tolist()) for head in x] for x in qkv]
            h = [slow_entropy(s, top) for s in spectra[0]]
            h_mean[i] += np.array(h) / 3
            best_first = sorted(range(heads), key=lambda a: (-h[a], a))
            for place, head in enumerate(best_first):
                ranks[i, head] += heads - 1 - place
                counts[i, head] += place < heads // 2
            for x in range(3):
                erank[x, i] += np.mean([math.exp(slow_entropy(s, None)) for s in spectra[x]]) / 3
                erank_k[x, i] += np.mean([math.exp(slow_entropy(s, top)) for s in spectra[x]]) / 3
    np.testing.assert_allclose(actual["entropy"], h_mean, atol=1e-4)
    assert actual["counts"].tolist() == counts.tolist()
    assert actual["ranks"].tolist() == ranks.tolist()
    np.testing.assert_allclose(actual["erank"], erank, rtol=1e-4)
    np.testing.assert_allclose(actual["erank_k"], erank_k, rtol=1e-4)
    assert actual["spectra"].shape[:2] == (layers, heads)
    np.testing.assert_allclose(actual["spectra"].sum(-1), 1, rtol=1e-4)


def test_measure_holds_one_window_at_a_time():
    alive = []

    def windows():
        for seed in range(6):
            window = prompt(20, seed)
            alive.append(weakref.ref(window))
            yield window
            del window
            gc.collect()
            assert sum(w() is not None for w in alive) <= 1

    small = measure(build("llama"), windows(), 8)
    more = measure(build("llama"), iter([prompt(20)]), 8)
    assert {k: t.shape for k, t in small.items()} == {k: t.shape for k, t in more.items()}


def test_group_sizes_are_those_of_released_code():
    assert [entropy.count_group_heads(32, m) for m in (2, 3, 4, 5, 8)] == [
        [16, 16],
        [11, 10, 11],
        [8] * 4,
        [7, 6, 6, 6, 7],
        [4] * 8,
    ]
    for heads in range(1, 41):
        for m in range(1, heads + 1):
            sizes = entropy.count_group_heads(heads, m)
            assert sum(sizes) == heads and max(sizes) - min(sizes) <= 1 and len(sizes) == m


def test_heads_go_to_groups_by_their_scores_ties_to_the_lower_head():
    assert entropy.assign_groups(torch.tensor([1.0, 5, 3, 5]), 2) == [1, 0, 1, 0]
    assert entropy.assign_groups(torch.tensor([2.0, 2, 2, 2]), 2) == [0, 0, 1, 1]
    assert entropy.assign_groups(torch.tensor([9.0, 1, 5, 7, 3, 0]), 3) == [0, 2, 1, 0, 1, 2]


# spec 5, UNComp: drops at 2, 15, 26, 31 -> the groups of appendix A.3 (a list made for this, not the released one)
def test_layers_are_cut_where_the_effective_rank_drops():
    eranks = [20.0 + 0.3 * i for i in range(32)]
    for start, fall in ((2, 1.5), (15, 4.0), (26, 1.4), (31, 9.0)):
        eranks[start:] = [e - fall for e in eranks[start:]]
    eranks[8:] = [e - 0.3 - 0.9 for e in eranks[8:]]  # a fall that is not above epsilon
    assert entropy.find_erank_drops(eranks) == [2, 15, 26, 31]
    groups = [(g[0], g[-1]) for g in entropy.group_layers(eranks)]
    assert groups == [(0, 1), (2, 14), (15, 25), (26, 30), (31, 31)]
    assert entropy.group_layers([3.0, 3.0]) == [range(0, 2)]

"""Streaming statistics against slow ones that hold everything, and models that are as before afterwards."""

import copy

import pytest
import torch
from support.families import LINEAR, build, prompt

from kvbench.models.factors import Factors, Spectrum, join_factors
from kvbench.models.interface import attention_modules
from kvbench.models.lowrank import ProjectionShape, key_value_weights, projection_modules, swap_projections
from kvbench.models.lowrank_statistics import mean_loss, mean_sizes, measure_moments, moments_bytes

WINDOWS = [prompt(30, i) for i in range(4)]


def state(model):
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    grads = [(p.requires_grad, p.grad is None) for p in model.parameters()]
    return hooks, grads, [m.training for m in model.modules()], [type(m) for m in model.modules()]


def inputs(model, layer):
    """All inputs [tokens, d] of a layer's projections, from the model's own hidden states."""
    model, collected = copy.deepcopy(model), []  # reading hidden states leaves hooks behind
    for window in WINDOWS:
        with torch.no_grad():
            hidden = model(window[None], output_hidden_states=True).hidden_states[layer][0]
            kind = model.config.model_type
            if kind == "gpt_neox":
                norm = model.gpt_neox.layers[layer].input_layernorm
            elif kind == "opt":
                norm = model.model.decoder.layers[layer].self_attn_layer_norm
            else:
                norm = model.model.layers[layer].input_layernorm
            collected.append(norm(hidden))
    return torch.cat(collected).double()


@pytest.mark.parametrize("family", LINEAR)
def test_moments_and_sizes_are_those_of_all_inputs_held_at_once(family):
    model, before = build(family), state(build(family))
    statistics, none = measure_moments(model, iter(WINDOWS), fisher=False)
    sizes = mean_sizes(model, iter(WINDOWS))
    assert none is None and state(model) == before
    for i in range(3):
        x = inputs(model, i)
        torch.testing.assert_close(statistics[i].double(), x.T @ x / len(x), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(sizes[i].double(), x.abs().mean(dim=0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", LINEAR)
def test_fisher_information_is_that_of_one_backward_pass_per_window(family):
    model, before = build(family), state(build(family))
    _, statistics = measure_moments(model, iter(WINDOWS), fisher=True)
    assert state(model) == before
    slow, heads = copy.deepcopy(model), statistics.shape[2]
    squares = {}
    for window in WINDOWS:
        slow.zero_grad()
        slow(window[None], labels=window[None]).loss.backward()
        for i, attention in enumerate(attention_modules(slow)):
            if family == "gpt_neox":
                grad = attention.query_key_value.weight.grad.view(heads, 3, 16, 64)
                pair = [grad[:, 1], grad[:, 2]]
            else:
                pair = [p.weight.grad.view(heads, 16, 64) for p in (attention.k_proj, attention.v_proj)]
            for which, grad in enumerate(pair):
                squares[i, which] = squares.get((i, which), 0) + grad.double() ** 2 / 4
    for (i, which), square in squares.items():
        want = square.sqrt().mean(dim=(1, 2)).float()
        torch.testing.assert_close(statistics[i, which], want, atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("fisher", [True, False])
def test_the_bytes_announced_are_those_of_the_statistics(family, fisher):
    held_bytes, kept_tokens = moments_bytes(build(family), fisher)
    mean, _ = measure_moments(build(family), iter(WINDOWS[:1]), fisher)
    assert kept_tokens == mean.nbytes == 3 * 64 * 64 * 4
    # keys and values of 2 heads of 16 dimensions, or the fused queries, keys and values of 4; squares and gradients
    weights = 3 * (2 * 32 * 64 if family == "llama" else 192 * 64)
    assert held_bytes == 3 * 64 * 64 * 8 + (weights * (4 + 4) if fisher else 0)


def test_windows_are_read_one_at_a_time():
    read = []

    def windows():
        for i, window in enumerate(WINDOWS):
            read.append(("given", i))
            yield window
            read.append(("done", i))

    measure_moments(build("llama"), windows(), fisher=True)
    assert read == [x for i in range(4) for x in (("given", i), ("done", i))]


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_everything_is_as_before_if_a_window_fails(family):
    model, before = build(family), state(build(family))

    def broken():
        yield WINDOWS[0]
        raise ArithmeticError

    for fisher in (True, False):
        with pytest.raises(ArithmeticError):
            measure_moments(model, broken(), fisher)
        assert state(model) == before


@pytest.mark.parametrize("family", LINEAR)
def test_shape_and_weights_are_those_of_the_model(family):
    model = build(family)
    shape = ProjectionShape.of(model)
    heads = 2 if family in ("llama", "mistral", "qwen2") else 4
    assert shape == ProjectionShape(3, heads, 16, 64)
    (k, k_bias), (v, v_bias) = key_value_weights(attention_modules(model)[1], heads)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    seen = [m(x) for m in projection_modules(attention_modules(model)[1])]
    if family == "gpt_neox":
        parts = seen[0].view(5, heads, 48)
        seen = [parts[..., 16:32].reshape(5, -1), parts[..., 32:].reshape(5, -1)]
    for weight, bias, want in ((k, k_bias, seen[0]), (v, v_bias, seen[1])):
        torch.testing.assert_close(torch.nn.functional.linear(x, weight, bias), want)


def test_a_loss_is_that_of_a_model_with_the_product_as_its_weight():
    model, slow = build("qwen2"), copy.deepcopy(build("qwen2"))
    exact = [
        tuple(Factors(w.detach(), (None,), (len(w),)) for w, _ in key_value_weights(a, 2))
        for a in attention_modules(model)
    ]
    cut = Spectrum.of(attention_modules(model)[1].v_proj.weight, torch.ones(64)).cut(8)
    layers = [(k, join_factors([cut]) if i == 1 else v) for i, (k, v) in enumerate(exact)]
    with torch.no_grad():
        slow.model.layers[1].self_attn.v_proj.weight.copy_(cut[1] @ cut[0])
        want = sum(float(slow(w[None], labels=w[None]).loss) for w in WINDOWS) / 4
    assert mean_loss(model, WINDOWS, layers) == pytest.approx(want, rel=1e-5)
    assert abs(mean_loss(model, WINDOWS, exact) - want) > 1e-3
    with pytest.raises(ArithmeticError), swap_projections(model, layers):
        raise ArithmeticError
    assert all(isinstance(m, torch.nn.Linear) for a in attention_modules(model) for m in projection_modules(a))

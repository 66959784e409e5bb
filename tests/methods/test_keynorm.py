"""KeyNorm: short keys stay, whatever the rotation."""

import pytest
import torch
from support import method_reference as ref
from support.families import build

import kvbench
from kvbench.base.errors import UsageError
from kvbench.methods.core.resolve import chain_of
from kvbench.methods.keynorm import KeyNorm


def test_the_shortest_keys_stay_with_ties_to_the_lower_index():
    k = torch.zeros(2, 6, 4)
    k[0, :, 0] = torch.tensor([5.0, 1, -4, 2, 3, 9])
    k[1, :, 1] = torch.tensor([1.0, 1, -1, 1, 1, 0])
    layer = ref.make_layer(torch.zeros(4, 6, 4), k)
    assert ref.kept(KeyNorm(kv_size=3).compress(*layer)) == [[1, 3, 4], [0, 1, 5]]
    assert ref.kept(KeyNorm(kv_size=3, protect_recent=1).compress(*layer)) == [[1, 3, 5], [0, 1, 5]]
    assert ref.kept(KeyNorm(kv_size=3, protect_recent=2).compress(*layer)) == [[1, 4, 5], [0, 4, 5]]


def test_rotating_the_keys_does_not_change_the_choice():
    k = ref.grid(2, 40, 8, seed=3)
    angle = torch.arange(40.0)[:, None] / 10000 ** (torch.arange(4) / 4)
    cos, sin = angle.cos(), angle.sin()
    turned = torch.cat([k[..., :4] * cos - k[..., 4:] * sin, k[..., 4:] * cos + k[..., :4] * sin], dim=-1)
    plain, rotated = (KeyNorm(kv_size=13).compress(*ref.make_layer(torch.zeros(4, 40, 8), x)) for x in (k, turned))
    assert ref.kept(plain) == ref.kept(rotated)
    assert not torch.allclose(plain.segments[0].k, rotated.segments[0].k)


# spec 5, KeyNorm: with RoPE and without
def test_the_choice_equals_that_of_the_keys_before_rope():
    model = build("llama")
    ids = 3 + torch.randperm(125, generator=torch.Generator().manual_seed(0))[:50]  # distinct: equal tokens would tie
    before_rope = []
    hooks = [
        layer.self_attn.k_proj.register_forward_hook(lambda _, __, out: before_rope.append(out[0]))
        for layer in model.model.layers
    ]
    try:
        (cache,) = kvbench.prefill(model, ids, ["keynorm"], kv_size=17)
    finally:
        for hook in hooks:
            hook.remove()
    for layer, keys in zip(cache.layers, before_rope, strict=True):
        split = keys.view(50, 2, 16).transpose(0, 1)
        assert ref.kept(layer) == ref.keynorm(split, 2, 17, 0)


@pytest.mark.parametrize("value", [-1, 0.5])
def test_impossible_knobs_are_refused(value):
    with pytest.raises(UsageError, match=r"method\.keynorm\.protect_recent"):
        chain_of({"method": "keynorm", "protect_recent": value})

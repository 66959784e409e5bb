"""Random selection: reproducible, different wherever it should be, and without favourites."""

import pytest
import torch
from support import method_reference as ref

from kvbench.base.errors import UsageError
from kvbench.methods.core.resolve import chain_of
from kvbench.methods.random import Random

N = 40


def kept(stage, per="kv_head", device="cpu", **obs):
    q, k = ref.grid(4, N, 8).to(device), ref.grid(2, N, 8).to(device)
    return ref.kept(stage.compress(*ref.make_layer(q, k, per=per, **obs)))


def test_the_draw_is_the_same_in_every_run_and_leaves_the_global_generator_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = kept(Random(kv_size=10))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert kept(Random(kv_size=10)) == first


def test_the_draw_is_pinned_because_stored_results_depend_on_it():
    """A change here is a new method: bump the stage's revision."""
    assert Random.revision == 1
    assert kept(Random(kv_size=5)) == [[12, 20, 27, 32, 35], [20, 25, 28, 29, 31]]


def test_prompts_layers_seeds_and_heads_draw_differently():
    base = kept(Random(kv_size=10))
    others = [
        kept(Random(kv_size=10), prompt=8),
        kept(Random(kv_size=10), layer=1),
        kept(Random(kv_size=10, seed=1)),
        base[::-1],
    ]
    assert all(other != base for other in others)
    assert base[0] != base[1]


def test_a_larger_budget_keeps_what_a_smaller_one_kept():
    small, large = kept(Random(kv_size=8)), kept(Random(kv_size=20))
    assert all(set(s) < set(x) for s, x in zip(small, large, strict=True))


def test_every_position_is_kept_equally_often():
    """2,000 draws at 25 %: the share of each position lies within 4.5 standard errors of 0.25, ends included."""
    counts = torch.zeros(N)
    for prompt in range(1000):
        for head in kept(Random(kv_ratio=0.25), prompt=prompt):
            counts[head] += 1
    assert ((counts / 2000 - 0.25).abs() < 4.5 * (0.25 * 0.75 / 2000) ** 0.5).all()


def test_budgets_of_one_token_are_possible():
    assert all(len(head) == 1 for head in kept(Random(kv_size=1)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_devices_draw_alike():
    assert kept(Random(kv_size=10), device="cuda") == kept(Random(kv_size=10))


@pytest.mark.parametrize("value", [-1, 0.5, "x"])
def test_impossible_seeds_are_refused(value):
    with pytest.raises(UsageError, match=r"method\.random\.seed"):
        chain_of({"method": "random", "seed": value})

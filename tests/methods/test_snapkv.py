"""SnapKV: the window stays, and neighbours of what it attends to stay with it."""

import pytest
import torch
from support import method_reference as ref

from kvbench.base.errors import UsageError
from kvbench.methods.core.resolve import chain_of
from kvbench.methods.snapkv import SnapKV

N, W = 30, 4


def attends_only(p):
    """Return a layer whose last W queries put all their attention on token p."""
    q, k = torch.zeros(2, N, 8), torch.zeros(2, N, 8)
    q[:, -W:, 0] = 20
    k[:, p, 0] = 20
    return ref.make_layer(q, k)


# spec 5, SnapKV: one-hot
@pytest.mark.parametrize("pooling", ["max", "avg"])
@pytest.mark.parametrize("p", [3, 11, 22])
def test_one_attended_token_keeps_its_pooling_neighbourhood(p, pooling):
    cache = SnapKV(kv_size=W + 7, window=W, kernel=7, pooling=pooling).compress(*attends_only(p))
    assert ref.kept(cache) == [[*range(p - 3, p + 4), *range(N - W, N)]] * 2


@pytest.mark.parametrize("pooling", ["max", "avg"])
def test_a_neighbourhood_cut_by_the_start_is_filled_with_the_first_tokens(pooling):
    cache = SnapKV(kv_size=W + 7, window=W, kernel=7, pooling=pooling).compress(*attends_only(1))
    assert ref.kept(cache) == [[*range(7), *range(N - W, N)]] * 2


def test_attention_to_the_window_itself_does_not_pull_its_neighbours_in():
    q, k = torch.zeros(1, N, 8), torch.zeros(1, N, 8)
    q[:, -W:, 0] = 20
    k[:, N - W, 0] = 20
    q[:, -W:, 1] = k[:, 5, 1] = 16
    (kept_positions,) = ref.kept(SnapKV(kv_size=W + 3, window=W, kernel=3).compress(*ref.make_layer(q, k)))
    assert kept_positions == [4, 5, 6, *range(N - W, N)]


# spec 5, SnapKV: the last w always stay
@pytest.mark.parametrize("size", [9, 16, 29])
@pytest.mark.parametrize("seed", range(3))
def test_the_window_always_stays(size, seed):
    layer = ref.make_layer(ref.grid(4, N, 8, seed=seed), ref.grid(2, N, 8, seed=seed + 9))
    for head in ref.kept(SnapKV(kv_size=size, window=8).compress(*layer)):
        assert head[-8:] == list(range(N - 8, N)) and len(head) == size


@pytest.mark.parametrize(("knob", "value"), [("kernel", 4), ("kernel", 0), ("pooling", "mean"), ("window", 0)])
def test_impossible_knobs_are_refused(knob, value):
    with pytest.raises(UsageError, match=rf"method\.snapkv\.{knob}"):
        chain_of({"method": "snapkv", knob: value})

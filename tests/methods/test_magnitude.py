"""l1 and l2: key channels by magnitude over the retained tokens."""

import pytest
import torch
from support import method_reference as ref

from kvbench.methods.core.resolve import chain_of
from kvbench.methods.magnitude import L1, L2

N = 6
# Channel sums of |k|: 6, 5, 4, 3; of squares: 6, 25, 4, 5.
KEYS = torch.tensor([[[1.0, 5, 0, -2], [1, 0, 0, 1], [-1, 0, 4, 0], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]])


def channels(stage, keys=KEYS):
    cache = stage.compress(*ref.make_layer(torch.ones(1, N, 4), keys))
    return cache.segments[0].key_channels.tolist()


@pytest.mark.parametrize(("stage", "wanted"), [(L1, [0, 1, 2]), (L2, [0, 1, 2])])
def test_the_smallest_channel_goes_first(stage, wanted):
    assert channels(stage(ratio=0.25, recent=1)) == [wanted]


def test_one_large_entry_counts_more_for_l2_than_for_l1():
    keys = torch.zeros(1, N, 4)
    keys[0, :, 0], keys[0, 0, 1] = 1.0, -5.0
    assert channels(L1(ratio=0.75, recent=1), keys) == [[0]]
    assert channels(L2(ratio=0.75, recent=1), keys) == [[1]]


def test_recent_tokens_are_scored_but_stay_whole():
    keys = torch.zeros(1, N, 4)
    keys[0, -1, 3] = 9.0
    cache = L2(ratio=0.75, recent=2).compress(*ref.make_layer(torch.ones(1, N, 4), keys))
    thin, recent = cache.segments
    assert thin.key_channels.tolist() == [[3]] and recent.key_channels is None
    assert torch.equal(recent.k, keys[:, -2:]) and thin.v.shape == (1, N - 2, 4)


def test_only_retained_tokens_are_scored():
    keys = torch.full((1, 12, 4), 0.5)
    keys[0, 6, 3] = 100.0
    layer = ref.make_layer(torch.zeros(1, 12, 4), keys)
    knobs = {"ratio": 0.75, "recent": 1}
    complete = chain_of({"method": "l2", **knobs}).compress(*layer)
    evicted = chain_of({"method": "streamingllm+l2", "kv_size": 6, **knobs}).compress(*layer)
    assert complete.segments[0].key_channels.tolist() == [[3]]
    assert evicted.segments[0].key_channels.tolist() == [[0]]


@pytest.mark.parametrize("stage", [L1, L2])
def test_queries_do_not_matter(stage):
    keys = ref.grid(2, 20, 8, seed=1)
    stored = [stage(recent=4).compress(*ref.make_layer(q, keys)) for q in (ref.grid(4, 20, 8), torch.zeros(4, 20, 8))]
    assert torch.equal(stored[0].segments[0].key_channels, stored[1].segments[0].key_channels)
    assert stage().needs(20).last_q == 0


@pytest.mark.parametrize("stage", [L1, L2])
@pytest.mark.parametrize(("ratio", "kept"), [(0.3, 89), (0.4, 76), (0.5, 64), (0.6, 51), (0.7, 38)])
def test_the_papers_floor_is_the_default(stage, ratio, kept):
    assert stage(ratio=ratio).kept_keys(128) == kept

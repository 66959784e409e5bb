"""ThinK: channel scores, what pruning loses, and that thin keys give the logits of masked queries."""

import pytest
import torch
from support import method_reference as ref

from kvbench.base.errors import UsageError
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.resolve import chain_of
from kvbench.methods.think import Think
from kvbench.storage.attend import attend
from kvbench.storage.row_segments import stack_rows

N, D = 24, 8


def layer(per="kv_head", hk=2):
    return ref.make_layer(ref.grid(4, N, D, seed=5), ref.grid(hk, N, D, seed=6), per=per)


def outer_norms(q, k):
    """Return the Frobenius norm of q_j k_j^T for every channel j: q [m, D], k [L, D] -> [D]."""
    return torch.stack([torch.outer(q[:, j], k[:, j]).norm() for j in range(q.shape[1])])


# spec 5, ThinK: Score = ||q_j k_j^T||_F (outer product)
@pytest.mark.parametrize(("per", "hk"), [("kv_head", 4), ("kv_head", 2), ("query_head", 2)])
def test_score_is_the_frobenius_norm_of_the_channels_outer_product(per, hk):
    cache, obs = layer(per, hk)
    heads, group = cache.heads, 4 // cache.heads
    keys = cache.segments[0].k.repeat_interleave(heads // hk, dim=0)
    scores = Think(observed=6).channel_scores(keys, cache, obs)
    for h in range(heads):
        q = obs.last_q[h * group : (h + 1) * group, -6:].reshape(-1, D)
        torch.testing.assert_close(scores[h], outer_norms(q, keys[h]))


# spec 5, ThinK: ||QK^T - QSK^T||_F <= sum of the pruned channels' Score
@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.8])
def test_the_logits_lost_are_bounded_by_the_scores_of_the_pruned_channels(ratio):
    cache, obs = layer(hk=4)
    stage = Think(ratio=ratio, recent=0, observed=6)
    channels = stage.compress(cache, obs).segments[0].key_channels.long()
    scores = stage.channel_scores(cache.segments[0].k, cache, obs)
    for h in range(4):
        q, k = obs.last_q[h, -6:], cache.segments[0].k[h]
        mask = torch.zeros(D).index_fill(0, channels[h], 1.0)
        lost = (q @ k.T - (q * mask) @ k.T).norm()
        assert 0 < lost <= (scores[h] * (1 - mask)).sum() * (1 + 1e-6)


# spec 5, ThinK: lambda=0 = base
@pytest.mark.parametrize("base", [None, "snapkv", "adakv"])
def test_ratio_zero_is_the_base_method(base):
    cache, obs = layer()
    alone = chain_of(base, {"kv_size": 9, "window": 4}) if base else Chain()
    entry = {"method": f"{base}+think" if base else "think", "ratio": 0.0}
    chain = chain_of({**entry, "kv_size": 9, "window": 4} if base else entry)
    (got,), (want,) = chain.compress(cache, obs).segments, alone.compress(cache, obs).segments
    assert got.key_channels is None
    assert torch.equal(got.k, want.k) and torch.equal(got.v, want.v) and torch.equal(got.positions, want.positions)


# spec 5, ThinK: split-logit = masked-q dense logit
@pytest.mark.parametrize("per", ["kv_head", "query_head"])
@pytest.mark.parametrize("base", ["", "snapkv+"])
def test_split_logits_equal_dense_attention_with_masked_queries(per, base):
    dense, obs = layer(per)
    entry = {"method": f"{base}think", "per": per, "ratio": 0.5, "recent": 5}
    cache = chain_of({**entry, "kv_size": 14, "window": 4} if base else entry).compress(dense, obs)
    thin, recent = cache.segments
    query, tail = ref.grid(1, 4, 2, D, seed=7), ref.grid(2, 1, 2, 2, D, seed=8)
    got = attend(query, [stack_rows([thin]), stack_rows([recent])], (tail[0], tail[1]), scale=0.5)[0]

    whole_k, whole_v = (t.repeat_interleave(2, dim=0) for t in (dense.segments[0].k, dense.segments[0].v))
    for h in range(4):
        stored = h // (4 // cache.heads)
        mask = torch.zeros(D).index_fill(0, thin.key_channels[stored].long(), 1.0)
        held_tokens = [s.positions[stored if s.positions.shape[0] > 1 else 0].long() for s in (thin, recent)]
        q, new_k, new_v = query[0, h], tail[0, 0, h // 2], tail[1, 0, h // 2]
        new = (q @ new_k.T).masked_fill(torch.tensor([[False, True], [False, False]]), -torch.inf)
        logits = torch.cat([(q * mask) @ whole_k[h, held_tokens[0]].T, q @ whole_k[h, held_tokens[1]].T, new], dim=1)
        values = torch.cat([whole_v[h, torch.cat(held_tokens)], new_v])
        torch.testing.assert_close(got[0, h], (0.5 * logits).softmax(dim=1) @ values, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("ratio", "code", "paper"),
    [(0.3, 90, 89), (0.4, 77, 76), (0.5, 64, 64), (0.6, 52, 51), (0.999, 1, 1), (0, 128, 128)],
)
def test_kept_channels_of_128_in_both_roundings(ratio, code, paper):
    assert Think(ratio=ratio).kept_keys(128) == code
    assert Think(ratio=ratio, rounding="paper").kept_keys(128) == paper


@pytest.mark.parametrize("recent", [N, N + 1, 1000])
def test_nothing_is_pruned_if_all_tokens_are_recent(recent):
    cache, obs = layer()
    assert Think(recent=recent).compress(cache, obs) is cache


def test_only_the_last_queries_score():
    stage, q, k = Think(observed=6, recent=4), ref.grid(4, N, D, seed=5), ref.grid(2, N, D, seed=6)

    def channels(queries):
        return stage.compress(*ref.make_layer(queries, k)).segments[0].key_channels.tolist()

    earlier, later = q.clone(), q.clone()
    earlier[:, :-6, 0] = 100
    later[:, -6, :] = torch.tensor([0.0] * 4 + [100.0] * 4)
    assert channels(earlier) == channels(q) != channels(later)


@pytest.mark.parametrize(("knob", "value"), [("ratio", 1), ("ratio", -0.1), ("recent", -1), ("observed", 0)])
def test_impossible_knobs_are_refused(knob, value):
    with pytest.raises(UsageError, match=rf"method\.think\.{knob}"):
        chain_of({"method": "think", knob: value})

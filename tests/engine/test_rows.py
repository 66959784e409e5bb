"""A decode batch attends every row and head as if it were alone: ragged heads, thin keys and masks together."""

import math
import weakref

import pytest
import torch
from support.families import build, generated, prompt

import kvbench
from kvbench.engine import step as stepping
from kvbench.engine.decode_layer import RowLayer
from kvbench.engine.stopping import Ending
from kvbench.kv.segment import LayerCache, Segment
from kvbench.methods.twilight import Twilight
from kvbench.storage.format import Room, StoredRow

D, HQ, HK = 8, 4, 2


def ragged(lengths, thin=None, seed=0):
    """A layer whose head h holds ``lengths[h]`` tokens, and the same as a list of dense (k, v) of each head."""
    g = torch.Generator().manual_seed(seed)
    n = sum(lengths)
    k, v = torch.randn(1, n, D, generator=g), torch.randn(1, n, D, generator=g)
    dense = list(zip(k[0].split(lengths), v[0].split(lengths), strict=True))
    channels = None
    if thin is not None:
        channels = torch.stack([torch.randperm(D, generator=g)[:thin].sort().values for _ in lengths])
        k = torch.cat([x[:, c] for (x, _), c in zip(dense, channels, strict=True)])[None]
        zeroed = [torch.zeros(D).index_fill(0, c, 1.0) for c in channels]
        dense = [(x * z, y) for (x, y), z in zip(dense, zeroed, strict=True)]
        channels = channels.to(torch.int16)
    positions = torch.cat([torch.arange(m) for m in lengths])[None].int()
    s = Segment(k, v, positions, torch.tensor(lengths, dtype=torch.int32), channels)
    return LayerCache((s,), seen=max(lengths), heads=len(lengths), query_heads=HQ), dense


def slow(dense, query, tail_k, tail_v, p=None):
    """[Hq, D], one query head at a time; with ``p`` over the smallest set of that mass."""
    out = []
    for h in range(HQ):
        k, v = dense[h // (HQ // len(dense))]
        shared = h // (HQ // HK)
        keys, values = torch.cat([k, tail_k[shared]]), torch.cat([v, tail_v[shared]])
        logits = [float(query[h] @ key) / math.sqrt(D) for key in keys]
        if p is not None:
            weights = torch.tensor(logits).softmax(0).tolist()
            order, mass, chosen = sorted(range(len(weights)), key=lambda j: -weights[j]), 0.0, set()
            for j in order:
                chosen.add(j)
                mass += weights[j]
                if mass >= p:
                    break
            logits = [x if j in chosen else -math.inf for j, x in enumerate(logits)]
        out.append(torch.tensor(logits).softmax(0) @ values)
    return torch.stack(out)


class Exact(Twilight):
    def estimate(self, keys):
        return keys


@pytest.mark.parametrize("p", [None, 0.8])
@pytest.mark.parametrize("thin", [None, 5])
@pytest.mark.parametrize("stored", [HK, HQ])
def test_ragged_rows_attend_as_each_head_alone(stored, thin, p):
    shapes = [[3, 40], [17, 17], [1, 9], [38, 5]] if stored == HK else [[3, 40, 1, 2], [6, 6, 7, 30], [9, 9, 9, 9]]
    built = [ragged(lengths, thin, seed=i) for i, lengths in enumerate(shapes)]
    masker = None if p is None else Exact(p=p)
    batch = RowLayer([StoredRow(cache=c, masker=masker) for c, _ in built], Room(tokens=4))
    g = torch.Generator().manual_seed(9)
    tail = []
    for step in range(3):
        k, v = torch.randn(len(built), HK, 1, D, generator=g), torch.randn(len(built), HK, 1, D, generator=g)
        q = torch.randn(len(built), HQ, 1, D, generator=g)
        tail.append((k, v))
        batch.add(k, v)
        out = batch.attend(q, 1 / math.sqrt(D), None)
        for row, (_, dense) in enumerate(built):
            tail_k, tail_v = (torch.cat([t[i][row] for t in tail], dim=1) for i in (0, 1))
            wanted = slow(dense, q[row, :, 0], tail_k, tail_v, p)
            torch.testing.assert_close(out[row, :, 0], wanted, atol=1e-5, rtol=1e-5)
        if step == 1:
            batch.keep(torch.tensor([0, 2]))
            built, tail = [built[0], built[2]], [(k[[0, 2]], v[[0, 2]]) for k, v in tail]


def test_the_attended_share_of_a_ragged_row_is_the_mean_over_its_heads():
    cache, _ = ragged([4, 20])
    batch = RowLayer([StoredRow(cache=cache, masker=Exact(p=1.0))], Room(tokens=1))
    batch.add(torch.zeros(1, HK, 1, D), torch.zeros(1, HK, 1, D))
    batch.attend(torch.zeros(1, HQ, 1, D), 1.0, None)
    assert batch.attended is not None and batch.attended.tolist() == [13.0]


def test_packed_rows_that_are_left_alone_go_on_attending_what_they_packed():
    model, ids = build("llama"), prompt(40, 3)
    full, packed = kvbench.prefill(model, ids, ["full", {"method": "kivi", "group": 4, "residual": 8}])
    endings = [Ending(2), Ending(8)]
    # the exact row leaves after its second token; its dense tail must not become all that the other one reads
    together = generated(model, [full, packed], endings)
    assert together[1] == generated(model, [packed], endings[1:])[0]


@pytest.mark.parametrize("methods", [["full", "full"], ["h2o", "h2o"], ["kivi", "snapkv", "full"]])
def test_a_batch_that_is_given_its_caches_frees_them_layer_by_layer(monkeypatch, methods):
    model = build("llama")
    caches = [kvbench.prefill(model, prompt(80, i), [m])[0] for i, m in enumerate(methods)]
    cache = [kvbench.prefill(model, prompt(80, i), [m])[0] for i, m in enumerate(methods)]
    seen = [[weakref.ref(t.untyped_storage()) for c in caches for t in c.layers[i].tensors()] for i in range(2)]
    alive = []

    class Watched(RowLayer):
        def __init__(self, *arguments):
            alive.append(sum(ref() is not None for ref in seen[0]))
            super().__init__(*arguments)

    monkeypatch.setattr(stepping, "RowLayer", Watched)
    batch = stepping.build(model, stepping.give_up_caches(caches), 8)
    assert not caches and alive[0] == len(seen[0]) > 2 * alive[1]
    for ours, peers_value in zip(batch.with_keys, stepping.build(model, cache, 8).with_keys, strict=True):
        assert ours.payload() == peers_value.payload()
    assert cache and all(c.layers for c in cache)

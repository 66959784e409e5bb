"""A storage format that the package does not know: one class and one entry of the registry, and rows decode in it."""

import pytest
import torch
from support import worked

from kvbench.engine.decode_layer import RowLayer, count_allocated
from kvbench.kv.segment import LayerCache, Segment
from kvbench.storage import registry
from kvbench.storage.format import Room, StoredRow

D, HQ, HK = 8, 4, 2
HALF = "half"  # what the method asks for
example = {}
exec(worked.block("kvbench/storage/half_rows.py"), example)
HalfRows = example["HalfRows"]


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def cache(lengths, seed):
    ragged = len(set(lengths)) > 1
    shape = (1, sum(lengths), D) if ragged else (HK, lengths[0], D)
    positions = torch.cat([torch.arange(n) for n in (lengths if ragged else lengths[:1])])[None].int()
    counts = torch.tensor(lengths, dtype=torch.int32) if ragged else None
    segment = Segment(random(*shape, seed=seed), random(*shape, seed=seed + 1), positions, counts)
    return LayerCache((segment,), seen=max(lengths), heads=HK, query_heads=HQ)


@pytest.mark.parametrize("shapes", [[(5, 5), (6, 6), (40, 40)], [(5, 9), (30, 2), (7, 7)]])
def test_rows_of_a_new_format_decode_beside_exact_ones(monkeypatch, shapes):
    monkeypatch.setattr(registry, "FORMATS", (HalfRows, *registry.FORMATS))
    caches = [cache(lengths, 10 * i) for i, lengths in enumerate(shapes)]
    exact = RowLayer([StoredRow(cache=c) for c in caches], Room(tokens=4))
    # the second row is exact in both
    mixed = RowLayer([StoredRow(cache=c, coder=None if i == 1 else HALF) for i, c in enumerate(caches)], Room(tokens=4))
    rows = [0, 1, 2]
    for step in range(4):
        k, v, q = (random(3, h, 1, D, seed=100 * step + h)[rows] for h in (HK, HK, HQ))
        for layer in (exact, mixed):
            layer.add(k, v)
        want, actual = (layer.attend(q, 0.4, None) for layer in (exact, mixed))
        torch.testing.assert_close(actual, want, atol=5e-3, rtol=5e-3)
        assert torch.equal(actual[rows.index(1)], want[rows.index(1)]) and not torch.equal(actual, want)
        assert mixed.held().tolist() == exact.held().tolist()
        sizes = zip(rows, mixed.payload(), exact.payload(), strict=True)
        assert all(ours == (peers_value if row == 1 else peers_value // 2) for row, ours, peers_value in sizes)
        assert count_allocated([mixed]) > 0
        if step == 1:
            for layer in (exact, mixed):
                layer.keep(torch.tensor([1, 2]))
            rows = [1, 2]


@pytest.mark.parametrize("lengths", [(6, 6), (5, 9)])
def test_what_continues_is_what_the_format_holds(monkeypatch, lengths):
    monkeypatch.setattr(registry, "FORMATS", (HalfRows, *registry.FORMATS))
    segments = cache(lengths, 3)
    layer = RowLayer([StoredRow(cache=segments, coder=HALF)], Room(tokens=2))
    k, v = random(1, HK, 2, D, seed=1), random(1, HK, 2, D, seed=2)
    layer.add(k, v)
    (segment,) = layer.continue_cache(segments).segments
    assert segment.k.dtype == torch.float16 and segment.counts == [n + 2 for n in lengths]
    for head in range(HK):
        assert torch.equal(segment.head(head).k[0, -2:], k[0, head].half())

"""A storage format that the package does not know: one class and one entry of the registry, and rows decode in it."""

import pytest
import torch

from kvbench.cache.segment import LayerCache, Segment
from kvbench.engine.decode_layer import RowLayer, allocated
from kvbench.storage import registry
from kvbench.storage.attend import logits, masked_softmax, weigh
from kvbench.storage.format import Format, Room, StoredRow

D, HQ, HK = 8, 4, 2
HALF = object()  # stands for the method that asks for the format


class HalfRows(Format):
    """All tokens in half precision, read as single."""

    moves = "it grows"

    def __init__(self, rows, room):
        self.kv = [[x.half() for x in (r.cache.segments[0].k, r.cache.segments[0].v)] for r in rows]

    @classmethod
    def takes(cls, row):
        return row.coder is HALF

    def add(self, k, v, positions):
        self.kv = [
            [torch.cat([old, new.half()], dim=1) for old, new in zip(held, more, strict=True)]
            for held, more in zip(self.kv, zip(k, v, strict=True), strict=True)
        ]

    def attend(self, query, scale, window):
        found = []
        for q, (k, v) in zip(query.split(1), self.kv, strict=True):
            numbers = (k.float()[None], v.float()[None])

            def of(estimate, q=q, k=numbers[0]):
                return logits(q, estimate(k), scale)

            found.append(masked_softmax(of, lambda probs, v=numbers[1]: weigh(probs, v), q.dtype, None)[0])
        return torch.cat(found)

    def keep(self, at):
        self.kv = [self.kv[i] for i in at.tolist()]

    def tokens(self):
        return torch.tensor([k.shape[1] for k, _ in self.kv])

    def payload(self):
        return [k.nbytes + v.nbytes for k, v in self.kv]

    def segments(self, u, cache):
        k, v = self.kv[u]
        return (Segment(k, v, torch.arange(k.shape[1], dtype=torch.int32)[None]),)


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
        want, found = (layer.attend(q, 0.4, None) for layer in (exact, mixed))
        torch.testing.assert_close(found, want, atol=5e-3, rtol=5e-3)
        assert torch.equal(found[rows.index(1)], want[rows.index(1)]) and not torch.equal(found, want)
        assert mixed.held().tolist() == exact.held().tolist()
        sizes = zip(rows, mixed.payload(), exact.payload(), strict=True)
        assert all(mine == (theirs if row == 1 else theirs // 2) for row, mine, theirs in sizes)
        assert allocated([mixed]) > 0
        if step == 1:
            for layer in (exact, mixed):
                layer.keep(torch.tensor([1, 2]))
            rows = [1, 2]


@pytest.mark.parametrize("lengths", [(6, 6), (5, 9)])
def test_what_continues_is_what_the_format_holds(monkeypatch, lengths):
    monkeypatch.setattr(registry, "FORMATS", (HalfRows, *registry.FORMATS))
    held = cache(lengths, 3)
    layer = RowLayer([StoredRow(cache=held, coder=HALF)], Room(tokens=2))
    k, v = random(1, HK, 2, D, seed=1), random(1, HK, 2, D, seed=2)
    layer.add(k, v)
    (segment,) = layer.continued(held).segments
    assert segment.k.dtype == torch.float16 and segment.counts == [n + 2 for n in lengths]
    for head in range(HK):
        assert torch.equal(segment.head(head).k[0, -2:], k[0, head].half())

"""Attention part by part equals one softmax over all tokens."""

import torch
from support.grids import grid

from kvbench.kv.exact_attention import can_fuse
from kvbench.kv.scale import LogitScale
from kvbench.storage import attend, split
from kvbench.storage.roles import Masker
from kvbench.storage.row_segments import RowSegment

D, SCALE = 16, 0.3


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def segment(u, h, length, lengths=None, key_channels=None, value_channels=None, seed=1):
    valid = None if lengths is None else (torch.arange(length) < torch.tensor(lengths)[:, None])[:, None]
    orders = torch.stack([random(h, D, seed=s).argsort(dim=-1) for s in range(u)])
    chosen = [None if c is None else orders[..., :c].sort().values for c in (key_channels, value_channels)]
    k, v = random(u, h, length, key_channels or D, seed=seed), random(u, h, length, value_channels or D, seed=seed + 1)
    return RowSegment(k, v, valid, *chosen)


SEGMENTS = {
    "one": lambda u: [segment(u, 2, 40)],
    "of every query head": lambda u: [segment(u, 6, 40)],
    "padded": lambda u: [segment(u, 2, 40, [40, 33, 0][:u])],
    "thin": lambda u: [segment(u, 2, 30, key_channels=9), segment(u, 2, 7, seed=5)],
    "thin both, padded": lambda u: [
        segment(u, 2, 30, [30, 0, 25][:u], 9, 5),
        segment(u, 2, 7, [7, 7, 0][:u], seed=5),
    ],
    "none": lambda u: [segment(u, 2, 0)],
}


def in_parts(query, segments, tail):
    return split.merge_outputs(
        split.attend_segments(query, segments, SCALE), split.attend_causally(query, *tail, SCALE)
    )


@grid("name", SEGMENTS)
@grid("new", (1, 3))
@grid("u", (1, 3))
def test_parts_merge_to_one_softmax(name, new, u):
    query, segments = random(u, 6, new, D, seed=8), SEGMENTS[name](u)
    tail = random(u, 2, 5, D, seed=9), random(u, 2, 5, D, seed=10)
    want, _ = attend.attend(query, segments, tail, SCALE)
    torch.testing.assert_close(in_parts(query, segments, tail), want, atol=2e-6, rtol=1e-5)


def test_a_row_does_not_depend_on_its_place_in_a_batch():
    query, (s,) = random(3, 6, 1, D, seed=8), SEGMENTS["one"](3)
    tail = random(3, 2, 5, D, seed=9), random(3, 2, 5, D, seed=10)
    together = in_parts(query, [s], tail)
    for u in range(3):
        alone = in_parts(query[u : u + 1], [s.rows(torch.tensor([u]))], (tail[0][u : u + 1], tail[1][u : u + 1]))
        assert torch.equal(alone[0], together[u])


def test_what_is_attended_otherwise():
    query = random(1, 2, 1, D)
    assert can_fuse(query, SCALE)
    assert not can_fuse(query.bfloat16(), SCALE)
    assert not can_fuse(query, LogitScale.of(SCALE, 30.0))


class _ShowsAll(Masker):
    """A masker that would have a token attend to every slot, those that hold no token too."""

    def mask(self, weights):
        return torch.ones_like(weights, dtype=torch.bool)


def test_a_masker_shows_no_token_that_is_hidden_and_none_is_counted():
    hidden = torch.tensor([0.0, -torch.inf, 0.0, -torch.inf]).expand(2, 3, 1, 4)
    outputs, attended = attend.attend_by_logits(lambda estimate: hidden, lambda w: w, torch.float32, _ShowsAll(), SCALE)
    assert attended.tolist() == [2.0, 2.0]
    torch.testing.assert_close(outputs, torch.tensor([0.5, 0.0, 0.5, 0.0]).expand(2, 3, 1, 4))

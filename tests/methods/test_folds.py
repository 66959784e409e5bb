"""What a method remembers while it decodes, by hand, over two new queries at once."""

from types import SimpleNamespace

import pytest
import torch

from kvbench.methods.cake import Cake
from kvbench.methods.core.statistics import fold_ring, group_mean, group_rows, recent_slots
from kvbench.methods.h2o import H2O
from kvbench.methods.qhitter import QHitter
from kvbench.methods.scissorhands import Scissorhands
from kvbench.methods.tova import TOVA

# [B = 1, Hq = 4, T = 2, S = 3]: two stored heads of two query heads each
PROBS = torch.tensor(
    [
        [
            [[0.5, 0.5, 0.0], [0.2, 0.2, 0.6]],
            [[0.1, 0.9, 0.0], [0.4, 0.2, 0.4]],
            [[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]],
            [[0.6, 0.4, 0.0], [0.2, 0.1, 0.7]],
        ]
    ]
)
MEAN = [[[0.3, 0.7, 0.0], [0.3, 0.2, 0.5]], [[0.8, 0.2, 0.0], [0.1, 0.3, 0.6]]]


def slots(**state):
    positions = torch.tensor([[[3, 9, 10], [4, 8, 10]]], dtype=torch.int32)
    counts = {"recent": torch.tensor([[[2]]])}
    now = torch.tensor([[[10]]])
    return SimpleNamespace(positions=positions, valid=positions >= 0, state=state, now=now, n=now, counts=counts)


@pytest.mark.parametrize("method", [H2O(variant="orig"), QHitter(), Scissorhands(variant="code")], ids=lambda m: m.id)
def test_attention_adds_up_over_the_new_queries_and_is_averaged_over_a_group(method):
    mass = torch.tensor([[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]])
    folded = method.fold(slots(mass=mass), PROBS)["mass"]
    expected = torch.tensor([[[1.6, 2.9, 3.5], [4.9, 5.5, 6.6]]])
    torch.testing.assert_close(folded, expected)


def test_the_newest_row_is_that_of_the_last_query():
    newest = torch.tensor([[MEAN[0][1], MEAN[1][1]]])
    torch.testing.assert_close(Cake().fold(slots(), PROBS)["row"], newest)
    by_head = TOVA(per_head=True).fold(slots(), PROBS)["row"]
    torch.testing.assert_close(by_head, newest)
    of_layer = TOVA(per_head=False).fold(slots(), PROBS)["row"]
    torch.testing.assert_close(of_layer, newest.mean(dim=1, keepdim=True).repeat(1, 2, 1))


def test_a_ring_keeps_the_rows_of_the_last_queries_each_in_its_place():
    ring = torch.full((1, 2, 3, 4), 9.0)
    folded = fold_ring(slots(ring=ring), PROBS, 4)["ring"]
    # positions 9 and 10 are in columns 1 and 2 of four
    for head in range(2):
        for column, row in ((1, MEAN[head][0]), (2, MEAN[head][1])):
            assert folded[0, head, :, column].tolist() == pytest.approx(row)
        assert folded[0, head, :, [0, 3]].eq(9).all()
    (alone,) = fold_ring(slots(ring=torch.zeros(1, 2, 3, 1)), PROBS, 1)["ring"]
    assert alone[..., 0].flatten().tolist() == pytest.approx([*MEAN[0][1], *MEAN[1][1]])  # the newest row


def test_groups_are_averaged_and_recent_tokens_are_the_last_so_many():
    torch.testing.assert_close(group_rows(PROBS, 2)[0], torch.tensor(MEAN))
    assert torch.equal(group_rows(PROBS, 4), PROBS)
    torch.testing.assert_close(group_mean(PROBS[0, :, 0], 2), torch.tensor([MEAN[0][0], MEAN[1][0]]))
    # two tokens: positions 9 and 10
    assert recent_slots(slots(), "recent").tolist() == [[[False, True, True], [False, False, True]]]


@pytest.mark.parametrize(("size", "heavy", "recent"), [(12, 6, 6), (13, 6, 7)])
def test_half_of_h2os_budget_are_heavy_hitters_and_an_odd_token_is_recent(size, heavy, recent):
    assert H2O(variant="orig", kv_size=size).parts(100) == (heavy, recent)

"""Caps and sinks: the softmax of a model that caps logits or whose attention goes to sinks, against slow references."""

import copy
import math

import pytest
import torch

from kvbench.kv.exact_attention import attend_rows, attend_with_lse, causal_softmax, column_sums
from kvbench.kv.scale import LogitScale, cap_of, is_plain, sinks_of, softmax

SINKS = torch.tensor([0.5, -2.0, 3.0, 0.0])[:, None, None]


def test_a_sink_takes_its_share_by_hand():
    # one query, two tokens of logits ln 2 and ln 3, a sink of ln 5: 2 / 10 and 3 / 10
    sinks = torch.tensor([[[math.log(5.0)]]])
    logits = torch.tensor([[[math.log(2.0), math.log(3.0)]]])
    assert softmax(logits, sinks).flatten().tolist() == pytest.approx([0.2, 0.3])
    # a token that is hidden has no weight, and without any token the sink takes all
    hidden = torch.tensor([[[math.log(2.0), -math.inf]]])
    assert softmax(hidden, sinks).flatten().tolist() == pytest.approx([2 / 7, 0.0])
    assert softmax(torch.full((1, 1, 2), -math.inf), sinks).flatten().tolist() == [0.0, 0.0]


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 5])
def test_rows_outputs_and_column_sums_with_sinks_are_those_of_a_loop(cap, window):
    torch.manual_seed(0)
    query, keys, values = torch.randn(4, 6, 8) * 3, torch.randn(2, 20, 8), torch.randn(2, 20, 8)
    scale = LogitScale.of(0.4, cap, SINKS)
    expected = torch.zeros(4, 6, 20)
    for head in range(4):
        for i in range(6):
            logits = 0.4 * keys[head // 2] @ query[head, i]
            if cap is not None:
                logits = cap * torch.tanh(logits / cap)
            seen = torch.arange(20) <= 14 + i
            if window is not None:
                seen &= torch.arange(20) > 14 + i - window
            masses = logits.exp() * seen
            expected[head, i] = masses / (masses.sum() + SINKS[head].exp())
    rows = causal_softmax(query, keys, scale, window)
    torch.testing.assert_close(rows, expected, atol=1e-6, rtol=1e-5)
    assert (rows.sum(dim=-1) < 1).all()
    outputs = torch.stack([expected[head] @ values[head // 2] for head in range(4)])
    torch.testing.assert_close(attend_rows(query, keys, values, scale, window), outputs, atol=1e-5, rtol=1e-4)
    if window is None:
        torch.testing.assert_close(column_sums(query, keys, scale), expected.sum(dim=1), atol=1e-5, rtol=1e-5)
        # in blocks of two queries
        in_blocks = column_sums(query, keys, scale, block_bytes=4 * 2 * 2 * 20 * 2)
        torch.testing.assert_close(in_blocks, expected.sum(dim=1), atol=1e-5, rtol=1e-5)


def test_a_large_sink_overflows_nothing():
    query, keys = torch.randn(4, 3, 8), torch.randn(2, 3, 8)
    scale = LogitScale.of(1.0, sinks=torch.full((4, 1, 1), 500.0))
    assert (causal_softmax(query, keys, scale) == 0).all() and (column_sums(query, keys, scale) == 0).all()


def test_fused_functions_take_plain_factors_alone():
    plain, with_sinks = LogitScale.of(0.5), LogitScale.of(0.5, sinks=SINKS)
    assert is_plain(plain) and type(plain) is float and sinks_of(plain) is None and cap_of(with_sinks) is None
    assert not is_plain(with_sinks) and with_sinks == 0.5 and sinks_of(copy.deepcopy(with_sinks)) is not None
    q, k = torch.randn(4, 3, 8), torch.randn(2, 3, 8)
    assert attend_with_lse(q, k, k, with_sinks) is None

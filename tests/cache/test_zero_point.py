"""Rounding per token with an integer zero point: by hand, and against a loop over single vectors."""

import method_reference as ref
import pytest
import torch

from kvbench.cache.zero_point import round_tokens


def test_a_range_that_leaves_out_zero_is_lost_by_the_clamp_of_the_zero_point():
    torch.testing.assert_close(round_tokens(torch.tensor([1.0, 1.5, 2.0]), 4), torch.ones(3))


def test_zeros_are_exact_and_constants_lost():
    assert round_tokens(torch.zeros(2, 3, 8), 2).tolist() == [[[0.0] * 8] * 3] * 2
    for c in (3.0, -3.0):
        error = (round_tokens(torch.full((16,), c), 4) - c).norm()
        assert float(error) == pytest.approx(3 * 16**0.5, rel=1e-4)


def test_values_on_the_grid_are_exact():
    x = torch.arange(-5.0, 11.0)
    torch.testing.assert_close(round_tokens(x, 4), x)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_it_equals_a_loop_over_tokens_and_heads(bits):
    x = torch.randn(3, 7, 16, generator=torch.Generator().manual_seed(bits))
    torch.testing.assert_close(round_tokens(x, bits), ref.rounded(x, bits))
    assert round_tokens(x.bfloat16(), bits).dtype == torch.float32
    step = (x.amax(-1) - x.amin(-1)) / (2**bits - 1)
    assert ((round_tokens(x, bits) - x).abs().amax(-1) <= step + 1e-5).all()

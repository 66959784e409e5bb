"""What methods observe: column sums, window rows and pooling, against values worked out by hand."""

import pytest
import torch
from support import method_reference as ref

from kvbench.kv.exact_attention import attend_with_lse, causal_softmax, column_sums
from kvbench.kv.observation import Observation
from kvbench.kv.segment import per_head
from kvbench.methods.core.statistics import pool, window_rows

N, SCALE = 50, 0.5


@pytest.fixture(params=[(4, 4), (4, 2), (4, 1)], ids=["mha", "gqa", "mqa"])
def qk(request):
    hq, hk = request.param
    return ref.grid(hq, N, 8, seed=3), ref.grid(hk, N, 8, seed=4)


# spec 5, Obs: the column sums of a head add up to n
def test_column_sums_add_up_to_the_number_of_queries(qk):
    torch.testing.assert_close(column_sums(*qk, SCALE).sum(dim=1), torch.full((4,), float(N)))


# spec 5, Obs: blockwise = dense to 1e-5
@pytest.mark.parametrize("rows", [1, 7, 49, 50, 1000])
def test_blockwise_column_sums_equal_the_dense_ones(qk, rows):
    dense = causal_softmax(*qk, SCALE).sum(dim=1)
    blockwise = column_sums(*qk, SCALE, block_bytes=4 * 4 * N * rows)
    torch.testing.assert_close(blockwise, dense, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rows", [7, 1000])
def test_column_sums_by_what_attention_has_summed_up_equal_the_dense_ones(qk, rows):
    values = ref.grid(len(qk[1]), N, 8, seed=5)
    out, lse = attend_with_lse(*qk, values, SCALE)
    weights = causal_softmax(*qk, SCALE)
    torch.testing.assert_close(out, weights @ per_head(values, 4), atol=1e-5, rtol=0)
    sums = column_sums(*qk, SCALE, block_bytes=4 * 4 * N * rows, lse=lse)
    torch.testing.assert_close(sums, weights.sum(dim=1), atol=1e-5, rtol=0)


def test_large_logits_leave_column_sums_exact(qk):
    q, k = qk[0] * 40, qk[1]
    _, lse = attend_with_lse(q, k, k, SCALE)
    assert lse.abs().max() > 80
    torch.testing.assert_close(
        column_sums(q, k, SCALE, lse=lse), causal_softmax(q, k, SCALE).sum(dim=1), atol=1e-4, rtol=0
    )


def test_half_precision_is_not_summed_up_by_attention(qk):
    assert attend_with_lse(*(t.bfloat16() for t in qk), qk[1].bfloat16(), SCALE) is None


def test_causal_softmax_equals_the_explicit_attention_matrix(qk):
    explicit = torch.tensor(ref.attention(*qk, SCALE))
    torch.testing.assert_close(causal_softmax(*qk, SCALE), explicit, atol=1e-6, rtol=0)


# spec 5, Obs: uniform causal attention
def test_column_sums_of_uniform_attention_are_harmonic():
    sums = column_sums(torch.zeros(2, N, 8), ref.grid(1, N, 8), SCALE, block_bytes=4 * 2 * N * 8)
    by_hand = [sum(1 / (i + 1) for i in range(j, N)) for j in range(N)]
    torch.testing.assert_close(sums, torch.tensor([by_hand] * 2), atol=1e-5, rtol=0)


# spec 5, Obs: the sums of w rows add up to w
@pytest.mark.parametrize("window", [1, 8, N, 400])
def test_window_rows_are_the_last_rows_of_the_attention_matrix(qk, window):
    cache, obs = ref.make_layer(*qk, scale=SCALE)
    rows = window_rows(cache, obs, window)
    assert rows.shape == (4, min(window, N), N)
    torch.testing.assert_close(rows.sum(dim=(1, 2)), torch.full((4,), float(min(window, N))))
    torch.testing.assert_close(rows, causal_softmax(*qk, SCALE)[:, -window:])


def test_a_window_of_all_queries_sums_to_the_column_sums(qk):
    cache, obs = ref.make_layer(*qk, scale=SCALE)
    torch.testing.assert_close(window_rows(cache, obs, N).sum(dim=1), obs.colsums)


def test_statistics_of_bf16_tensors_are_computed_in_fp32(qk):
    q, k = (t.bfloat16() for t in qk)
    cache, obs = ref.make_layer(q, k, scale=SCALE)
    assert obs.colsums.dtype == window_rows(cache, obs, 8).dtype == torch.float32
    assert torch.equal(obs.colsums, column_sums(q.float(), k.float(), SCALE))


def test_reading_undeclared_queries_is_an_error():
    with pytest.raises(ValueError, match="without declaring"):
        Observation(layer=0, n_layers=1, n=N, scale=SCALE, last_q=torch.zeros(4, 8, 8)).queries(9)


def test_max_pool_pads_with_minus_infinity_so_that_negative_scores_survive():
    assert pool(torch.tensor([[-3.0, -1.0, -4.0, -5.0]]), 3, "max").tolist() == [[-1, -1, -1, -4]]


def test_avg_pool_counts_its_zero_padding():
    assert pool(torch.tensor([[3.0, 3.0, 3.0, 6.0]]), 3, "avg").tolist() == [[2, 3, 4, 3]]


@pytest.mark.parametrize("kind", ["max", "avg"])
def test_kernel_one_pools_nothing(kind):
    scores = ref.grid(2, 9)
    assert torch.equal(pool(scores, 1, kind), scores)

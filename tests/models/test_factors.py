"""Low-rank factors and ranks against plain linear algebra and exhaustive search (spec 5, Palu and ASVD)."""

import itertools

import pytest
import torch

from kvbench.models.factors import (
    Spectrum,
    damping_needed,
    divided_ranks,
    group_size,
    join_factors,
    nearest_rank,
    searched_ranks,
    whitening_factor,
)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def correlated(d, n=400, seed=3):
    """Inputs [n, d] whose directions differ in size by three orders of magnitude."""
    return noise(n, d, seed=seed) @ (
        torch.logspace(0, -3, d, dtype=torch.float64)[:, None] * noise(d, d, seed=seed + 1)
    )


def product(part):
    down, up = part
    return down if up is None else up @ down


@pytest.mark.parametrize(("m", "d"), [(6, 9), (9, 6), (5, 5)])
@pytest.mark.parametrize("diagonal", [True, False])
def test_full_rank_is_exact_whatever_the_scale(m, d, diagonal):
    w, x = noise(m, d), correlated(d)
    side = x.abs().mean(dim=0) if diagonal else whitening_factor(x.T @ x, 0.0)
    spectrum = Spectrum.of(w, side)
    torch.testing.assert_close((spectrum.u * spectrum.s) @ spectrum.back, w, atol=1e-8, rtol=1e-8)
    torch.testing.assert_close(product(spectrum.cut(min(m, d))), w, atol=1e-8, rtol=1e-8)


def test_a_unit_scale_is_the_plain_singular_value_decomposition():
    w = noise(7, 12)
    u, s, vt = torch.linalg.svd(w, full_matrices=False)
    for rank in range(1, 7):
        actual = product(Spectrum.of(w, torch.ones(12)).cut(rank))
        torch.testing.assert_close(actual, (u[:, :rank] * s[:rank]) @ vt[:rank])


def test_both_factors_carry_the_root_of_the_singular_values():
    w = noise(7, 12)
    down, up = Spectrum.of(w, torch.ones(12)).cut(3)
    s = torch.linalg.svdvals(w)[:3]
    torch.testing.assert_close(up.T @ up, torch.diag(s))
    torch.testing.assert_close(down @ down.T, torch.diag(s))


def test_whitening_is_best_over_the_inputs_and_beats_the_plain_decomposition():
    w, x = noise(8, 16), correlated(16)
    whitened, plain = Spectrum.of(w, whitening_factor(x.T @ x, 0.0)), Spectrum.of(w, torch.ones(16))
    for rank in range(1, 8):
        errors = [float((x @ (w - product(s.cut(rank))).T).norm()) for s in (whitened, plain)]
        # the outputs' own decomposition says what rank r can leave at best (Eckart and Young)
        best = float(torch.linalg.svdvals(x @ w.T)[rank:].norm())
        assert errors[0] == pytest.approx(best, rel=1e-6)
        assert errors[0] < 0.9 * errors[1]


def test_damping_is_nothing_where_moments_have_a_root_and_little_where_they_do_not():
    x = noise(40, 6)
    assert damping_needed(x.T @ x) == 0
    flat = x[:4].T @ x[:4]  # rank 4 of 6
    flat = flat - 1e-12 * torch.eye(6)
    added = damping_needed(flat)
    assert 0 < added <= 1e-6 * float(flat.diagonal().mean())
    root = whitening_factor(flat, added)
    torch.testing.assert_close(root @ root.T, flat, atol=1e-5, rtol=1e-5)
    assert torch.equal(root, root.tril())


# spec 5: rounding 0.5/0.7/0.8 of 512 -> 256/352/416, kept as much as removed
@pytest.mark.parametrize(("fraction", "rank"), [(0.5, 256), (0.7, 352), (0.8, 416)])
@pytest.mark.parametrize("multiple", [32, None])
def test_ranks_are_rounded_to_the_nearest_multiple(fraction, rank, multiple):
    assert nearest_rank(512, fraction, multiple) == 512 - rank
    assert nearest_rank(512, 1 - fraction, multiple) == rank


def test_no_rank_is_zero_or_more_than_full():
    assert nearest_rank(512, 0.999, 32) == 32
    assert nearest_rank(40, 0.0, 32) == 40
    assert nearest_rank(24, 0.5, 32) == 24
    assert nearest_rank(8, 0.5, None) == 4


def test_divided_ranks_are_in_proportion_and_keep_the_share():
    assert divided_ranks([1, 2, 3, 2], 512, 0.5, 32) == [128, 256, 384, 256]
    assert divided_ranks([1, 1, 6], 512, 0.5, 32) == [128, 128, 512]
    assert divided_ranks([0, 0, 1, 1], 64, 0.5, 8) == [8, 8, 56, 56]
    assert divided_ranks([5, 1], 40, 0.0, 32) == [40, 40]
    for seed in range(20):
        weights = noise(9, seed=seed).abs().tolist()
        ranks = divided_ranks(weights, 128, 0.6, 8)
        assert all(r % 8 == 0 and 8 <= r <= 128 for r in ranks)
        assert sum(ranks) == 8 * round(0.4 * 128 * 9 / 8)
        order = sorted(range(9), key=lambda i: weights[i])
        assert [ranks[i] for i in order] == sorted(ranks)


def test_the_search_finds_the_lowest_threshold_that_meets_the_target():
    ranks, full = [4, 8, 12], 16
    for seed in range(30):
        loss = noise(5, 3, seed=seed).sort(dim=1, descending=True).values.tolist()
        for target in (20, 32, 44, 60, 76):
            best = None
            for limit in sorted(itertools.chain(*loss)):
                chosen = []
                for row in loss:
                    enough = [r for r, x in zip(ranks, row, strict=True) if x <= limit]
                    chosen.append(enough[0] if enough else full)
                if sum(chosen) <= target:
                    best = chosen
                    break
            assert searched_ranks(loss, ranks, full, target) == best


def test_groups_divide_the_heads():
    assert [group_size(h, 4) for h in (1, 2, 3, 4, 6, 7, 8, 40, 56)] == [1, 2, 3, 4, 3, 1, 4, 4, 4]


def test_joined_factors_stack_the_latents_of_all_groups():
    parts = [Spectrum.of(noise(6, 10, seed=i), torch.ones(10)).cut(r) for i, r in enumerate((2, 6, 3))]
    factors = join_factors(parts)
    assert factors.down.shape == (11, 10) and factors.ranks == (2, 6, 3) and factors.ups[1] is None

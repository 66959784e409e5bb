"""The stage's benchmark: its limits by hand, its schedule, and its verdict."""

import sys

import pytest

from kvbench.bench import stage


@pytest.mark.parametrize(("least", "kept", "gain"), [(512, 0.6309, 1.585), (1536, 0.7363, 1.358)])
def test_the_papers_schedule_is_bound_by_the_hidden_states_kept(least, kept, gain):
    found = stage.limits(stage.stage(4096, least).sizes(4096, 32), 4096, 384, 1056, 1.0)
    assert (round(found.kept, 4), round(found.tokens, 3)) == (kept, gain)
    # dropping a token saves its projections and, of attention, more than its share
    assert found.tokens < found.products < found.attention


def test_the_limit_of_all_products_counted_by_hand():
    # hidden 2, MLP 3: 8 multiply-adds of q, k, v, o of 4 each and 3 * 6 of the MLP; attention 2 * 2 * m * m
    found = stage.limits([10, 5], 10, 2, 3, 1.0)
    per_token = 2 * (4 * 4 + 3 * 6)
    assert found.products == pytest.approx(
        2 * (10 * per_token + 400) / (10 * per_token + 400 + 5 * per_token + 100), rel=1e-12
    )
    assert found.attention == pytest.approx(2 * 100 / (100 + 25))


def test_the_papers_model_is_close_to_its_limit():
    """By the shapes of LLaMA-2-7B's matrices: 77.34 s over 48.78 s is 98 % of what arithmetic allows."""
    sizes = stage.stage(4096, 512).sizes(4096, 32)
    matrices = [(4096, 4096)] * 4 + [(4096, 11008)] * 3

    def work(tokens):
        linear = sum(tokens * rows * columns for rows, columns in matrices)
        seen = sum(range(1, tokens + 1))  # keys that a causal query sees, all of them together
        return linear + 2 * seen * 4096

    limit = 32 * work(4096) / sum(work(m) for m in sizes)
    found = stage.limits(sizes, 4096, 4096, 11008, 1.0)
    assert found.products == pytest.approx(limit, rel=1e-4) and round(limit, 2) == 1.62
    assert 0.97 < 77.34 / 48.78 / found.products < 0.98
    assert found.tokens == pytest.approx(77.34 / 48.78, abs=0.001)


def test_shorter_prompts_scale_the_schedule():
    assert stage.stage(1024, 512).sizes(1024, 32)[-1] == 128
    assert sum(stage.stage(1024, 512).sizes(1024, 32)) / (32 * 1024) == pytest.approx(0.6309, abs=1e-4)


@pytest.mark.parametrize(("seconds", "status"), [(0.5, 0), (2.0, 1)])
def test_a_schedule_that_is_slower_fails_the_benchmark(seconds, status, monkeypatch, capsys):
    small = ["--tokens", "64", "--hidden", "16", "--head-dim", "8", "--least-size", "512", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["stage", *small])
    measured = stage.times

    def fixed(model, ids, chains, repeats):
        assert set(measured(model, ids, chains, repeats)) == set(chains)
        return {name: (2.0, 1.0) if name == stage.FULL else (2.0, seconds) for name in chains}

    monkeypatch.setattr(stage, "times", fixed)
    assert stage.main() == status
    out = capsys.readouterr().out
    assert ("MISSED" in out) == bool(status) and f"{1 / seconds:.2f}x" in out and "63.09 %" in out.splitlines()[5]
    assert "63.09 % kept, 1.58x" in out.splitlines()[1] and "1.59x (linear), 1.62x (all)" in out.splitlines()[2]

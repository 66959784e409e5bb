"""Sliding windows, plain attention, and seeded sampling, against transformers and slow references."""

import pytest
import torch
from support.families import build, generated, prompt
from transformers import MistralConfig, MistralForCausalLM

import kvbench
from kvbench.base.errors import UsageError
from kvbench.engine.prefill import prefill_chains
from kvbench.engine.stopping import Ending, draw_token
from kvbench.kv.exact_attention import attend_rows
from kvbench.methods.core.chain import Chain


def windowed(window):
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=window,
    )  # fmt: skip
    model = MistralForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.normal_(std=0.3)
    return model.eval()


def reference(model, ids, new):
    out = model.generate(ids[None], max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize("n", [10, 24, 31, 32, 33, 80])
def test_full_cache_honours_the_sliding_window_as_generate_does(n):
    model, ids = windowed(32), prompt(n, n)
    (cache,) = kvbench.prefill(model, ids, ["full"])
    assert kvbench.generate(model, [cache], 20) == [reference(model, ids, 20)]


def test_rows_of_different_length_under_a_window_equal_rows_alone():
    model = windowed(32)
    caches = [kvbench.prefill(model, prompt(n, n), ["full"])[0] for n in (12, 30, 60)]
    assert kvbench.generate(model, caches, 15) == [reference(model, prompt(n, n), 15) for n in (12, 30, 60)]


def test_compression_beyond_the_window_is_refused_and_inside_it_runs():
    model = windowed(32)
    with pytest.raises(UsageError, match="only method=full runs, not snapkv"):
        kvbench.prefill(model, prompt(40), ["full", "snapkv"], kv_ratio=0.5, window=4)
    kvbench.prefill(model, prompt(30), ["snapkv"], kv_ratio=0.5, window=4)


def test_plain_attention_gives_the_same_answers():
    for family in ("llama", "opt"):
        model, ids = build(family), prompt(70, 4)
        plain, fused = (prefill_chains(model, ids, [Chain()], plain=p)[0] for p in (True, False))
        torch.testing.assert_close(plain.logits, fused.logits, atol=1e-4, rtol=1e-4)
        assert kvbench.generate(model, [plain], 10) == kvbench.generate(model, [fused], 10)


def test_attend_rows_in_many_blocks_equals_a_dense_softmax(monkeypatch):
    from kvbench.kv import exact_attention

    torch.manual_seed(0)
    q, k, v = torch.randn(4, 50, 8), torch.randn(2, 50, 8), torch.randn(2, 50, 8)
    for window in (None, 7):
        i, j = torch.arange(50)[:, None], torch.arange(50)[None]
        hidden = (j > i) | (torch.zeros_like(i == j) if window is None else j <= i - window)
        scores = (q @ k.repeat_interleave(2, 0).transpose(1, 2) * 0.3).masked_fill(hidden, -torch.inf)
        dense = scores.softmax(-1) @ v.repeat_interleave(2, 0)
        blocks = list(exact_attention.yield_row_blocks(q, k, 0.3, window, block_bytes=4 * 4 * 50 * 6))
        assert len(blocks) > (5 if window is None else 1)
        torch.testing.assert_close(attend_rows(q, k, v, 0.3, window), dense)


def test_a_window_costs_its_band_and_not_the_square_of_the_prompt():
    from kvbench.kv.exact_attention import yield_row_blocks

    def count_logits(tokens: int) -> int:
        q, k = torch.randn(2, tokens, 4), torch.randn(1, tokens, 4)
        return sum(rows.numel() for _, _, rows in yield_row_blocks(q, k, 0.5, window=64))

    # 2 heads, bands of at most 32 + 63 keys, where all pairs would be 2 * 2048 * 2048
    assert count_logits(2048) <= 2 * 2048 * (32 + 63)
    # queries in the middle of a text attend the same keys as in one piece
    q, k, v = torch.randn(2, 300, 4), torch.randn(1, 300, 4), torch.randn(1, 300, 4)
    whole = attend_rows(q, k, v, 0.5, 64)
    torch.testing.assert_close(attend_rows(q[:, 190:], k, v, 0.5, 64), whole[:, 190:])


def test_samples_follow_the_distribution_and_top_p_cuts_its_tail():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    generator = torch.Generator().manual_seed(1)
    drawn = torch.tensor([draw_token(logits, 1.0, 1.0, generator) for _ in range(4000)])
    shares = torch.bincount(drawn, minlength=4) / 4000
    torch.testing.assert_close(shares, logits.exp(), atol=0.03, rtol=0)
    cut = {draw_token(logits, 1.0, 0.75, generator) for _ in range(500)}
    assert cut == {0, 1}
    assert {draw_token(logits, 1e-4, 1.0, generator) for _ in range(50)} == {0}
    certain = torch.tensor([-torch.inf, 0.0, -torch.inf])
    assert {draw_token(certain, 1.0, 1.0, generator) for _ in range(50)} == {1}


def test_a_sampled_row_does_not_depend_on_its_batch():
    model = build("llama")
    caches = [kvbench.prefill(model, prompt(30, s), ["full"])[0] for s in range(3)]
    endings = [Ending(10, temperature=0.9, top_p=0.95, seed=s) for s in (5, 6, 5)]
    together = generated(model, caches, endings)
    assert together == [generated(model, [c], [e])[0] for c, e in zip(caches, endings, strict=True)]
    assert together[0] != generated(model, caches[:1], [Ending(10, temperature=0.9, top_p=0.95, seed=7)])[0]

"""Prompts that begin alike: what is read in pieces, and not again, is what is read whole."""

from dataclasses import replace

import pytest
import torch
from support import method_reference as ref
from support.calibrations import ready
from support.families import LOCALS, PLAIN, WHOLE, WITH_STATES, build, prompt
from support.law_matrix import CHAINS, PER, SMALL, configured, supported
from support.own_model import kept_by

from kvbench.base.errors import UsageError
from kvbench.engine import shared_prefix
from kvbench.engine.prefill import prefill_chains
from kvbench.engine.prompt_pass import observe_prompt
from kvbench.engine.shared_prefix import SharedPrefix
from kvbench.kv.observation import Needs
from kvbench.methods.core.resolve import chain_of

SIZE = 16
FAMILIES = tuple(f for f in WHOLE if f not in LOCALS)
# layers with states and latents have tests of their own
OTHERS = tuple(f for f in PLAIN if f not in (*WHOLE, *LOCALS, *WITH_STATES))
ALL = Needs(last_q=40, first_q=5, colsums=True, hidden=True, colsums_bits=frozenset({2, 8}))
FIELDS = ("last_q", "first_q", "colsums", "hidden")


def layers_of(model, ids, needs, plain, starts=()):
    """Return (observation, keys, values) of every layer of a prompt, and the logits that follow it."""
    layers = []
    logits, _ = observe_prompt(model, ids, needs, lambda o, k, v: layers.append((o, k, v)), plain, starts=starts)
    return layers, logits[len(ids)]


def equal_bits(a, b):
    """Tell if two caches of one chain hold the same bits."""
    pairs = [p for x, y in zip(a.layers, b.layers, strict=True) for p in zip(x.tensors(), y.tensors(), strict=True)]
    return torch.equal(a.logits, b.logits) and all(torch.equal(x, y) for x, y in pairs)


def watched(monkeypatch):
    """A list to which the end of each piece is written that is read from now on."""
    ends, plain = [], shared_prefix.observe_prompt
    monkeypatch.setattr(
        shared_prefix, "observe_prompt", lambda m, ids, *a, **k: ends.append(len(ids)) or plain(m, ids, *a, **k)
    )
    return ends


def alike(first, n, seed):
    """Return a prompt of n tokens that begins with ``first``."""
    return torch.cat([first, prompt(max(0, n - len(first)), seed)])[:n]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "plain"), [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("last_q", [8, 40, 70])
def test_a_prompt_in_pieces_is_observed_as_one_read_whole(family, dtype, plain, last_q):
    model, ids, needs = build(family, dtype), prompt(70, 3), replace(ALL, last_q=last_q)
    starts, _ = SharedPrefix(model, SIZE).read(model, ids, needs, 69, plain)
    assert starts[0].keys.shape[1] == 64
    pieces, logits = layers_of(model, ids, needs, plain, starts)
    whole, of_whole = layers_of(model, ids, needs, plain)
    close = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.25, "rtol": 0.1}
    torch.testing.assert_close(logits, of_whole, **close)
    for (a, *kv), (b, *of_b) in zip(pieces, whole, strict=True):
        assert (a.n, a.layer, a.scale, a.prompt) == (b.n, b.layer, b.scale, b.prompt)
        for x, y in zip(kv, of_b, strict=True):
            torch.testing.assert_close(x, y, **close)
        for name in FIELDS:
            torch.testing.assert_close(getattr(a, name), getattr(b, name), **close)
        for bits in (2, 8):  # a key that rounds otherwise may fall on the next code
            torch.testing.assert_close(a.colsums_q[bits], b.colsums_q[bits], atol=0.5, rtol=0.1)
        assert a.colsums.sum(1).tolist() == pytest.approx([70.0] * 4, rel=1e-4)


@pytest.mark.parametrize("per", PER)
def test_every_chain_keeps_what_it_keeps_of_a_prompt_read_whole(per):
    model = build("llama", num_hidden_layers=2)
    chains = [ready(model, configured(c, SMALL), per) for c in CHAINS if supported(c, "llama")]
    prefix, first, others = SharedPrefix(model, SIZE), prompt(40, 1), []
    for n, seed in ((70, 2), (75, 3), (43, 4)):
        ids = alike(first, n, seed)
        shared, whole = prefill_chains(model, ids, chains, prefix=prefix), prefill_chains(model, ids, chains)
        # whatever was read before: nothing was before the first
        fresh = prefill_chains(model, ids, chains, prefix=SharedPrefix(model, SIZE)) if n != 70 else shared
        for chain, a, b, c in zip(chains, shared, whole, fresh, strict=True):
            assert equal_bits(a, c), chain.name
            torch.testing.assert_close(a.logits, b.logits, atol=1e-4, rtol=1e-4)
            assert not a.mismatch
            same = [ref.kept(x) for x in a.layers] == [ref.kept(x) for x in b.layers]
            assert not same or a.nbytes() == b.nbytes()
            others += [] if same else [(chain.name, n)]
    assert len(others) <= 2, others  # of hundreds, where rounding decides between two tokens on some processor


def test_whatever_the_common_length_what_is_read_is_what_is_read_whole():
    """Two prompts differ in one token: the first of a piece, its last one, or any between."""
    model, first, full = build("llama", num_hidden_layers=1), prompt(34, 1), [chain_of("full")]
    (of_first,) = prefill_chains(model, first, full)
    for common in range(34):
        other = first.clone()
        other[common] = first[common] % 100 + 1
        prefix = SharedPrefix(model, SIZE)
        prefill_chains(model, first, full, prefix=prefix)
        (shared,), (whole,) = (prefill_chains(model, other, full, prefix=p) for p in (prefix, None))
        torch.testing.assert_close(shared.logits, whole.logits, atol=1e-4, rtol=1e-4)
        ((a,),), ((b,),), ((c,),) = ([layer.segments for layer in x.layers] for x in (shared, whole, of_first))
        torch.testing.assert_close((a.k, a.v), (b.k, b.v), atol=1e-4, rtol=1e-4, msg=f"{common} tokens are alike")
        assert not torch.allclose(b.k[:, common], c.k[:, common], atol=1e-2), "another token has another key"


def test_pieces_that_are_known_are_not_read_again(monkeypatch):
    model, read = build("llama"), watched(monkeypatch)
    prefix, first = SharedPrefix(model, SIZE), prompt(40, 1)
    full, h2o, long = (chain_of({"method": m}) for m in ("full", "h2o", "expectedattention"))

    def pieces(n, seed, *chains, lengths=None):
        read.clear()
        prefill_chains(model, alike(first, n, seed), [full, *chains], lengths=lengths, prefix=prefix)
        return [*read]

    assert pieces(70, 2) == [16, 32, 48, 64]
    assert pieces(70, 2) == []
    assert pieces(70, 3) == [48, 64]  # 40 tokens are alike, two whole pieces
    assert pieces(33, 3) == []
    assert pieces(32, 3) == []  # the last token is always read: it has the logits
    assert pieces(49, 3) == [32, 48]
    assert pieces(49, 3, h2o) == [16, 32, 48]  # column sums are wanted for the first time
    assert pieces(49, 3) == []
    assert pieces(100, 4, long) == [16, 32, 48, 64, 80, 96]
    assert pieces(120, 4, long) == [112]  # as many queries as there are tokens: those of pieces are kept whole
    assert pieces(120, 4, lengths=[50]) == [48]  # back to the second: the third's column sums are dropped
    assert len(prefix.ids) == 48  # of the shorter one alone
    prefix.forget()
    assert pieces(20, 4) == [16]


def test_column_sums_of_few_pieces_are_kept_and_of_those_where_prompts_part(monkeypatch):
    model, read = build("llama"), watched(monkeypatch)
    prefix, h2o = SharedPrefix(model, SIZE), chain_of({"method": "h2o", "kv_size": 24, "window": 8})

    def pieces(alike_ones, seed):
        """Read 17 pieces and more, of which so many are the first prompt's."""
        read.clear()
        ids = alike(prompt(300, 1)[: alike_ones * SIZE], 280, seed)
        shared, whole = (prefill_chains(model, ids, [h2o], prefix=p)[0] for p in (prefix, None))
        torch.testing.assert_close(shared.logits, whole.logits, atol=1e-4, rtol=1e-4)
        assert [ref.kept(x) for x in shared.layers] == [ref.kept(x) for x in whole.layers]
        return [end // SIZE for end in read]

    assert pieces(17, 1) == [*range(1, 18)]
    assert [i for i, end in enumerate(prefix.ends, 1) if end.colsums] == [1, 2, 4, 8, 16, 17]
    assert pieces(11, 2) == [*range(9, 18)]  # back to the eighth
    assert pieces(11, 3) == [*range(12, 18)]  # which is kept from now on
    assert pieces(11, 4) == [*range(12, 18)]
    assert pieces(4, 5) == [*range(5, 18)]


def test_a_context_and_its_question_are_read_in_one_pass_behind_pieces():
    model, ids = build("llama"), prompt(90, 5)
    chains = [chain_of({"method": m, "kv_size": 24, "window": 8}) for m in ("h2o", "snapkv")] * 2
    lengths = [90, 90, 77, 77]
    prefix = SharedPrefix(model, SIZE)
    pieces = prefill_chains(model, ids, chains, lengths=lengths, prefix=prefix)
    assert len(prefix.ids) == 64  # before the end of the shorter one
    for a, b in zip(pieces, prefill_chains(model, ids, chains, lengths=lengths), strict=True):
        torch.testing.assert_close(a.logits, b.logits, atol=1e-4, rtol=1e-4)
        assert [ref.kept(x) for x in a.layers] == [ref.kept(x) for x in b.layers] and a.seen == b.seen


def test_what_is_kept_of_a_shorter_prompt_is_no_larger():
    model, prefix, full = build("llama"), SharedPrefix(build("llama"), SIZE), [chain_of({"method": "full"})]
    prefill_chains(model, prompt(500, 1), full, prefix=prefix)
    prefill_chains(model, prompt(40, 1), full, prefix=prefix)
    assert len(prefix.ids) == 32
    for layer in prefix.layers:
        assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes == 2 * 32 * 16 * 4


def test_more_first_queries_than_a_piece_has_are_those_of_the_prompt_read_whole():
    prefix = SharedPrefix(build("llama"), SIZE)
    starts, _ = prefix.read(build("llama"), prompt(90, 1), Needs(first_q=SIZE), 89)
    assert starts[0].first_q.shape[1] == SIZE
    assert prefix.read(build("llama"), prompt(90, 1), Needs(first_q=SIZE + 1), 89) is None


def test_a_prefix_belongs_to_its_model():
    with pytest.raises(UsageError, match="by another model object"):
        prefill_chains(build("qwen2"), prompt(40, 1), [chain_of("full")], prefix=SharedPrefix(build("llama"), SIZE))


def test_reading_takes_the_time_of_the_whole_prompt_whoever_read_its_beginning():
    model, prefix = build("llama"), SharedPrefix(build("llama"), SIZE)
    chain = chain_of({"method": "h2o"})
    first, again = (prefill_chains(model, prompt(500, 1), [chain], prefix=prefix)[0] for _ in range(2))
    _, end = prefix.read(model, prompt(500, 1), chain.needs(500), 499)
    assert again.prefill_s > end.forward_s > 0 and again.compress_s > sum(end.colsums_s.values()) > 0
    assert first.prefill_s > end.forward_s


def test_a_piece_that_fails_leaves_nothing_half_read(monkeypatch):
    model, ids = build("llama"), prompt(70, 1)
    prefix, chain = SharedPrefix(model, SIZE), chain_of({"method": "keynorm", "kv_size": 24})
    prefill_chains(model, ids[:40], [chain], prefix=prefix)
    linear, calls = torch.nn.functional.linear, []

    def failing(*args):
        calls.append(1)
        if len(calls) == 9:
            raise RuntimeError("out of memory")
        return linear(*args)

    monkeypatch.setattr(torch.nn.functional, "linear", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        prefill_chains(model, ids, [chain], prefix=prefix)
    assert len(prefix.ids) == 0
    (after,), (fresh,) = (prefill_chains(model, ids, [chain], prefix=p) for p in (prefix, SharedPrefix(model, SIZE)))
    assert equal_bits(after, fresh)


@pytest.mark.parametrize(("family", "reason"), [("gemma2", "to a window"), ("gemma3_text", "to a window")])
def test_models_whose_tokens_cannot_be_read_in_pieces_are_refused(family, reason):
    with pytest.raises(UsageError, match=f"shared_prefix=64 is not possible for this model.*{reason}"):
        SharedPrefix(build(family), 64)


@pytest.mark.parametrize("size", [15, 0, -1, 2.5, True])
def test_sizes_that_are_too_small_are_refused(size):
    with pytest.raises(UsageError, match=r"shared_prefix=.*16 or more"):
        SharedPrefix(build("llama"), size)


def test_a_window_of_attention_is_kept_over_pieces():
    """Mistral's sliding window, which the text outgrows: only full runs there."""
    model, ids = build("mistral"), prompt(70, 1)
    window, model.config.sliding_window = model.config.sliding_window, 24
    try:
        (a,), (b,) = (
            prefill_chains(model, ids, [chain_of({"method": "full"})], prefix=p)
            for p in (SharedPrefix(model, SIZE), None)
        )
    finally:
        model.config.sliding_window = window
    torch.testing.assert_close(a.logits, b.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", OTHERS)
def test_every_other_familys_prompt_in_pieces_is_the_prompt_at_once(family):
    model = build(family)
    prefix, chains = (
        SharedPrefix(model, SIZE),
        [chain_of("full"), chain_of({"method": "snapkv", "kv_size": 20, "window": 8})],
    )
    for ids in (prompt(70), alike(prompt(70)[:40], 70, 7)):
        pieces = prefill_chains(model, ids, chains, prefix=prefix)
        whole = prefill_chains(model, ids, chains)
        for ours, theirs in zip(pieces, whole, strict=True):
            torch.testing.assert_close(ours.logits, theirs.logits, atol=2e-4, rtol=1e-4)
            assert kept_by(ours) == kept_by(theirs)

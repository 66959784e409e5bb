"""What is held while decoding, the most tokens and the bytes behind them: against what chains declare."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from support.calibrations import ready
from support.families import build, heads_of, prompt

import kvbench
from kvbench.audit.decode_audit import Stored, check_bytes, check_peak
from kvbench.base.errors import Refused
from kvbench.engine.decode import extend_cache, extend_caches, generate_rows
from kvbench.engine.decode_layer import RowLayer, count_allocated
from kvbench.engine.likelihood import teacher_force
from kvbench.engine.patches import adapted
from kvbench.engine.step import build as build_batch
from kvbench.engine.step import step
from kvbench.engine.stopping import Ending
from kvbench.kv.segment import storage_bytes
from kvbench.methods.cake import Cake
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.evicting import EvictingSelector
from kvbench.methods.streamingllm import StreamingLLM
from kvbench.models.interface import attached, cache_shape
from kvbench.storage import evicting_store, exact_rows, packed_rows

pytestmark = pytest.mark.e2e("every chain decodes")

RAGGED = {"method": "refreekv", "mode": "eq1", "reduce": "per_head", "T": 0.2}
METHODS = [
    "full",
    {"method": "snapkv+think", "kv_size": 10, "window": 4, "recent": 4},
    {"method": "h2o", "variant": "orig", "kv_size": 12},
    {"method": "h2o", "variant": "orig", "kv_size": 36, "frozen_layers": [1]},
    {"method": "tova", "kv_ratio": 0.5},
    {"method": "vatp+scissorhands", "kv_size": 20, "recent": 4},
    {"method": "cake", "kv_size": 20, "window": 4, "decode_evict": True},
    {"method": "cake", "kv_size": 29, "window": 4, "decode_evict": True},
    RAGGED,
    "twilight",
]
FED = [11, 3, 11, 11, 7, 11, 11, 11, 5, 0]


def caches(model, n=33, seed=1):
    return kvbench.prefill(model, prompt(n, seed), METHODS)


def check(cache, held, fed):
    assert check_peak(cache, held, fed) == max(held)


@pytest.mark.parametrize("per", ["kv_head", "query_head"])
def test_peaks_are_those_of_each_row_to_its_own_end(per):
    model = build("llama")
    rows = kvbench.prefill(model, prompt(33, 1), METHODS, per=per)
    answers = generate_rows(model, rows, [Ending(fed + 1) for fed in FED])
    assert [len(a.tokens) - 1 for a in answers] == FED
    cake = [layer.tokens for layer in rows[6].layers]
    assert len(set(cake)) > 1 and sum(cake) == 60
    ragged = [max(map(len, layer.kept_positions())) + 5 for layer in rows[8].layers]
    wanted = [[44] * 3, [13] * 3, [12] * 3, [36, 44, 36], [16] * 3, [20] * 3, cake, [33] * 3, ragged, [33] * 3]
    assert [a.held for a in answers] == wanted
    for row, answer, fed in zip(rows, answers, FED, strict=True):
        check(row, answer.held, fed)
        (alone,) = generate_rows(model, [row], [Ending(fed + 1)])
        assert alone.held == answer.held


def test_peaks_after_a_withheld_question_and_over_a_text_that_is_scored():
    model = build("llama")
    for row in caches(model):
        longer = extend_cache(model, row, prompt(6, 9))
        (answer,) = generate_rows(model, [longer], [Ending(8)])
        check(longer, answer.held, 7)
        (forced,) = teacher_force(model, [row], prompt(20, 2), 3)
        check(row, forced.held, 19)
        if row.chain.name == "full":
            assert (answer.held, forced.held) == ([46] * 3, [52] * 3)
        if row.chain.name == "vatp+scissorhands":
            assert answer.held == forced.held == [20] * 3


@dataclass(frozen=True, kw_only=True)
class Hoards(StreamingLLM):
    """Declares a budget and holds one token more."""

    id: ClassVar[str] = "hoards"

    def layer_budget(self, cache, layer):
        return super().layer_budget(cache, layer) + (layer == 1)


@dataclass(frozen=True, kw_only=True)
class HoardsShare(Cake):
    id: ClassVar[str] = "hoardsshare"

    def layer_budget(self, cache, layer):
        return super().layer_budget(cache, layer) + (layer == 1)


@pytest.mark.parametrize(
    ("stage", "reason"),
    [
        (Hoards(mode="mask", kv_size=12), "hoards: layer 1 holds 13 tokens per head while decoding, .* at most 12"),
        (Hoards(mode="mask", kv_ratio=0.4), "hoards: layer 1 holds 14 tokens .* at most 13"),
        (HoardsShare(kv_size=12, window=4, decode_evict=True), "holds 37 tokens .* over all layers .* at most 36"),
    ],
)
def test_a_selector_that_holds_more_than_it_declares_is_refused(stage, reason):
    model = build("llama")
    (cache,) = kvbench.prefill(model, prompt(33, 1), [Chain((stage,))])
    (answer,) = generate_rows(model, [cache], [Ending(9)])
    with pytest.raises(Refused, match=reason):
        check_peak(cache, answer.held, 8)
    (short,) = generate_rows(model, [cache], [Ending(1)])
    check(cache, short.held, 0)


def test_a_growing_cache_with_more_than_its_new_tokens_is_refused():
    (cache,) = kvbench.prefill(build("llama"), prompt(33, 1), [{"method": "snapkv", "kv_size": 10, "window": 4}])
    check(cache, [15, 15, 15], 5)
    with pytest.raises(Refused, match="layer 2 holds 16 tokens per head while decoding, declared are at most 15"):
        check_peak(cache, [15, 15, 16], 5)


def test_slots_that_are_not_given_back_are_refused(monkeypatch):
    model = build("llama")
    (cache,) = kvbench.prefill(model, prompt(33, 1), [{"method": "h2o", "variant": "orig", "kv_size": 12}])
    shares = EvictingSelector.head_budgets
    monkeypatch.setattr(EvictingSelector, "head_budgets", lambda *given: [x + 2 for x in shares(*given)])
    (answer,) = generate_rows(model, [cache], [Ending(9)])
    with pytest.raises(Refused, match="layer 0 holds 14 tokens per head"):
        check_peak(cache, answer.held, 8)


STORED = [
    *METHODS,
    "think",
    {"method": "thinkv+kivi", "group": 4, "residual": 8, "recent": 3},
    {"method": "adakv+kivi", "kv_size": 20, "window": 4, "group": 4, "residual": 8},
    {"method": "snapkv+think+flexgen", "kv_size": 20, "window": 4, "recent": 4},
    {"method": "adakv+thinkv", "kv_size": 20, "window": 4, "recent": 4},
    {"method": "h2o+think", "variant": "orig", "kv_size": 20, "recent": 4},
    {"method": "tova+flexgen", "kv_size": 12},
    {"method": "qhitter", "kv_size": 12, "bits": 3},
    {"method": "uncomp-group+thinkv", "kv_size": 14, "uncomp-group.window": 4, "recent": 4},
    {"method": "uncomp-stage+snapkv", "kv_size": 12, "snapkv.window": 4},
]


def stored_by(model, rows, endings):
    return [a.stored for a in generate_rows(model, rows, endings)]


def check_stored(model, rows, stored):
    for row, held_tokens in zip(rows, stored, strict=True):
        if held_tokens is not None:
            check_bytes(row, held_tokens, cache_shape(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("per", ["kv_head", "query_head"])
def test_bytes_behind_a_rows_tokens_are_those_declared(per, dtype):
    model = build("llama", dtype, num_hidden_layers=2)
    rows = kvbench.prefill(model, prompt(33, 1), [ready(model, e, per) for e in STORED])
    stored = stored_by(model, rows, [Ending(1 + i % 13) for i in range(len(rows))])
    read = {i for i, s in enumerate(stored) if s is not None}
    assert read == {i for i in range(len(rows)) if i % 13}, "rows that read nothing more were never in a batch"
    assert len({s.fed for s in stored if s is not None}) > 3
    check_stored(model, rows, stored)
    scored = [f.stored for f in teacher_force(model, rows, prompt(20, 2), 3)]
    assert {s.fed for s in scored} == {19}
    check_stored(model, rows, scored)
    longer = extend_caches(model, rows, prompt(6, 9))
    check_stored(model, longer, stored_by(model, longer, [Ending(9)] * len(rows)))


@pytest.mark.parametrize("entry", ["palu", "asvd", "chai"])
def test_bytes_of_methods_that_change_the_model_are_those_declared(entry):
    model = build("llama" if entry != "chai" else "gpt_neox")
    rows = [kvbench.prefill(model, prompt(n, n), [ready(model, entry)])[0] for n in (33, 20)]
    stored = stored_by(model, rows, [Ending(9), Ending(4)])
    assert None not in stored
    check_stored(model, rows, stored)


@pytest.mark.parametrize("method", ["full", "snapkv+think", "thinkv+kivi", "h2o+think", "h2o", "qhitter"])
def test_storage_that_costs_more_than_declared_is_refused(method, monkeypatch):
    model = build("llama")
    entry = next(e for e in STORED if (e if isinstance(e, str) else e["method"]) == method)
    (cache,) = kvbench.prefill(model, prompt(33, 1), [entry])
    real = RowLayer.__init__

    def wider(self, *args, **more):
        real(self, *args, **more)
        for _, rows in self.formats:
            if isinstance(rows, exact_rows.ExactRows):
                for s in (s for group in rows.groups for s in group.segments):
                    object.__setattr__(s, "v", s.v.double())
            elif isinstance(rows, packed_rows.PackedRows):
                rows.k.ring = rows.k.ring.double()
            elif isinstance(rows.store, evicting_store.Thin):
                rows.store.v.kept = rows.store.v.kept.double()
            elif isinstance(rows.store.k, torch.Tensor):
                rows.store.k = rows.store.k.double()
            else:
                rows.store.k = rows.store.k.map(lambda t: torch.cat([t, t], dim=-1))

    monkeypatch.setattr(RowLayer, "__init__", wider)
    batch = build_batch(model, [cache], 5)
    stored = Stored(0, [layer.payload()[0] for layer in batch.with_keys])
    with pytest.raises(Refused, match=r"layer 0 holds \d+ payload bytes after 0 new tokens, the formula says \d+"):
        check_bytes(cache, stored, cache_shape(model))


def test_what_a_batch_allocates_is_its_padding_its_tail_and_little_else():
    """Two full rows of 20 and 24 tokens, room for 11 more: both padded to 24, and a tail that grows from 9 to 11."""
    model = build("llama")
    rows = [kvbench.prefill(model, prompt(n, n), ["full"])[0] for n in (20, 24)]
    kv_heads, head_dim = heads_of(model)
    token = 2 * kv_heads * head_dim * model.dtype.itemsize
    layers = len(rows[0].layers)
    batch = build_batch(model, rows, 11)
    assert 0 <= count_allocated(batch.with_keys) - layers * 2 * 24 * token < layers * 2 * 24 * kv_heads * 16
    before = count_allocated(batch.with_keys)
    # the functions in C read 128 bytes of addresses a head: of its stored and new tokens, and of its queries
    little = 64 + 2 * kv_heads * 128
    feed(model, batch, rows)
    assert 0 <= count_allocated(batch.with_keys) - before - layers * 2 * 9 * token < layers * little
    for i in range(10):
        feed(model, batch, rows, 1 + i)
    assert 0 <= count_allocated(batch.with_keys) - before - layers * 2 * 11 * token < layers * little


@pytest.mark.parametrize("method", [*METHODS, {"method": "qhitter", "kv_size": 12}, "kivi", "palu"], ids=str)
def test_a_batch_allocates_what_it_stores_and_never_the_models_weights(method):
    model = build("llama")
    rows = [kvbench.prefill(model, prompt(n, n), [ready(model, method)])[0] for n in (28, 33)]
    with torch.no_grad(), adapted(model, rows[0].chain):
        batch = build_batch(model, rows, 5)
        feed(model, batch, rows)
        payload = sum(sum(layer.payload()) for layer in batch.with_keys)
    assert payload <= count_allocated(batch.with_keys) < 4 * payload


def feed(model, batch, rows, fed=0):
    with torch.no_grad(), attached(model):
        step(model, batch, torch.ones(len(rows), 1, dtype=torch.int64), torch.tensor([[r.seen + fed] for r in rows]))


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_caches_that_read_more_together_are_as_each_alone(family):
    model, more = build(family), prompt(6, 9)
    rows = kvbench.prefill(
        model, prompt(33, 1), [*METHODS, "kivi", {"method": "q4_0", "group": 16}, {"method": "uncomp-stage"}]
    )
    together = extend_caches(model, rows, more)
    assert extend_caches(model, [], more) == []
    for row, cache in zip(rows, together, strict=True):
        alone = extend_cache(model, row, more)
        assert torch.allclose(cache.logits, alone.logits, atol=1e-4), row.chain.name
        assert cache.nbytes() == alone.nbytes() and cache.seen == alone.seen
        for mine, its in zip(cache.layers, alone.layers, strict=True):
            assert [p.tolist() for p in mine.kept_positions()] == [p.tolist() for p in its.kept_positions()]
            # no row keeps the storage of others alive
            held = sum(t.nbytes for t in mine.tensors())
            assert storage_bytes(mine.tensors()) <= storage_bytes(its.tensors()) <= held

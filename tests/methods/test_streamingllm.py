"""StreamingLLM: sinks and recent tokens, stored once for all heads."""

import pytest
import torch
from support import method_reference as ref
from support.families import build, prompt

import kvbench
from kvbench.base.errors import UsageError
from kvbench.methods.core.resolve import chain_of
from kvbench.methods.streamingllm import StreamingLLM
from kvbench.storage.roles import Slots


def compress(n, per="kv_head", method="streamingllm", **knobs):
    dense, obs = ref.make_layer(ref.grid(4, n, 8, seed=1), ref.grid(2, n, 8, seed=2), per=per)
    return chain_of({"method": method, "per": per, **knobs}).compress(dense, obs)


# spec 5, StreamingLLM: n=20, C=8, S=4
@pytest.mark.parametrize(
    ("sinks", "wanted"),
    [
        (4, [0, 1, 2, 3, 16, 17, 18, 19]),
        (0, list(range(12, 20))),
        (1, [0, *range(13, 20)]),
        (7, [*range(7), 19]),
    ],
)
@pytest.mark.parametrize("per", ["kv_head", "query_head"])
def test_first_sinks_and_last_tokens_stay(sinks, wanted, per):
    cache = compress(20, per, kv_size=8, sinks=sinks)
    assert ref.kept(cache) == [wanted] * (2 if per == "kv_head" else 4)


@pytest.mark.parametrize("per", ["kv_head", "query_head"])
def test_positions_are_stored_once_for_all_heads(per):
    cache = compress(20, per, kv_size=8)
    assert cache.segments[0].positions.shape == (1, 8)
    cut = compress(20, per, method="streamingllm+l2", kv_size=8, recent=3, ratio=0.5)
    assert [s.positions.shape for s in cut.segments] == [(1, 5), (1, 3)]


def test_a_size_without_room_beside_the_sinks_is_refused():
    with pytest.raises(UsageError, match="above 4"):
        chain_of({"method": "streamingllm", "kv_size": 4})
    assert ref.kept(compress(20, kv_size=5))[0] == [0, 1, 2, 3, 19]


def test_a_small_fraction_halves_itself_between_sinks_and_recents():
    assert ref.kept(compress(20, kv_ratio=0.2))[0] == [0, 1, 18, 19]
    assert ref.kept(compress(20, kv_ratio=0.01))[0] == [0, 19]


@pytest.mark.parametrize(("knob", "value"), [("mode", "dynamic"), ("sinks", -1), ("sinks", 1.5)])
def test_impossible_knobs_are_refused(knob, value):
    with pytest.raises(UsageError, match=rf"method\.streamingllm\.{knob}"):
        chain_of({"method": "streamingllm", knob: value})


def test_while_decoding_the_oldest_token_behind_the_sinks_goes_first():
    stage = StreamingLLM(kv_size=8, sinks=4, mode="mask")
    at = torch.zeros(1, 1, 1)
    slots = Slots(torch.arange(8)[None, None], torch.ones(1, 1, 8, dtype=torch.bool), {}, at, at, {"first": at + 4})
    assert stage.keep_scores(slots).tolist() == [[[torch.inf] * 4 + [4.0, 5.0, 6.0, 7.0]]]


def test_decoding_adds_to_the_cache_at_true_positions():
    model, ids = build("llama"), prompt(30)
    (cache,) = kvbench.prefill(model, ids, ["streamingllm"], kv_size=8)
    longer = kvbench.extend(model, cache, prompt(3, 1))
    for layer in longer.layers:
        assert ref.kept(layer) == [[0, 1, 2, 3, 26, 27, 28, 29, 30, 31, 32]] * 2

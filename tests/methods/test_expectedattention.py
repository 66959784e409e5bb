"""ExpectedAttention: a normal model of the queries to come, turned to their positions."""

import pytest
import torch
from support import method_reference as ref
from support.families import build, prompt

import kvbench
from kvbench.base.errors import UsageError
from kvbench.kv.model_shape import compressed_layers
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.resolve import chain_of
from kvbench.methods.expectedattention import ExpectedAttention
from kvbench.storage.roles import Rotary

N, SIZE = 22, 9


@pytest.mark.parametrize("covariance", [True, False])
@pytest.mark.parametrize("vnorm", [True, False])
@pytest.mark.parametrize(("hq", "hk", "per"), [(3, 3, "kv_head"), (4, 2, "kv_head"), (4, 2, "query_head")])
@pytest.mark.parametrize("seed", [1, 5])
def test_it_keeps_the_tokens_of_its_reference(covariance, vnorm, hq, hk, per, seed):
    q, k, v = (ref.grid(h, N, 8, seed=seed + i) / 2 for i, h in enumerate((hq, hk, hk)))
    dense, obs = ref.make_layer(q, k, v, per=per)
    knobs = {"sinks": 3, "future": 6, "covariance": covariance, "vnorm": vnorm}
    cache = chain_of({"method": "expectedattention", "kv_size": SIZE, "per": per, **knobs}).compress(dense, obs)
    assert ref.kept(cache) == ref.expectedattention(q, k, v, dense.heads, SIZE, **knobs)


def test_equal_keys_and_values_keep_the_first_tokens():
    dense, obs = ref.make_layer(torch.zeros(2, N, 8), torch.ones(1, N, 8), torch.ones(1, N, 8))
    assert ref.kept(ExpectedAttention(kv_size=7).compress(dense, obs)) == [[*range(7)]]


def test_long_values_count_more_only_if_asked():
    v = torch.ones(1, N, 8)
    v[0, 15] = 5
    dense, obs = ref.make_layer(torch.zeros(2, N, 8), torch.ones(1, N, 8), v)
    assert ref.kept(ExpectedAttention(kv_size=5).compress(dense, obs)) == [[0, 1, 2, 3, 15]]
    assert ref.kept(ExpectedAttention(kv_size=5, vnorm=False).compress(dense, obs)) == [[0, 1, 2, 3, 4]]


def test_a_large_constant_drowns_the_scores_and_the_norms_alone_decide():
    q, k, v = ref.grid(2, N, 8, seed=2), ref.grid(1, N, 8, seed=1), torch.ones(1, N, 8)
    (plain,) = ref.kept(ExpectedAttention(kv_size=5).compress(*ref.make_layer(q, k, v)))
    longest = 20 if plain[-1] != 20 else 19
    v[0, longest] = 1.001
    kept_by = {
        e: ref.kept(ExpectedAttention(kv_size=5, epsilon=e).compress(*ref.make_layer(q, k, v))) for e in (0.0, 1e4)
    }
    assert kept_by == {0.0: [plain], 1e4: [[0, 1, 2, 3, longest]]}


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox"])
def test_queries_turned_back_are_those_of_the_projection(family):
    """Check layer 0 of a model: its query projection of the embedded prompt, without any rotation."""
    model, ids, observed, projected = build(family), prompt(20, 3), [], []

    class Watching(ExpectedAttention):
        def scores(self, cache, obs, capacity):
            observed.append(obs)
            return super().scores(cache, obs, capacity)

    inner = model.gpt_neox.layers[0].attention if family == "gpt_neox" else model.model.layers[0].self_attn
    layer = inner.query_key_value if family == "gpt_neox" else inner.q_proj
    hook = layer.register_forward_hook(lambda m, a, out: projected.append(out[0]))
    try:
        kvbench.prefill(model, ids, [Chain((Watching(kv_size=8),))])
    finally:
        hook.remove()
    queries = observed[0].queries(20)
    plain = projected[0].view(20, 4, -1)[..., : queries.shape[2]].transpose(0, 1)
    back = Rotary(observed[0].inv_freq).turn(queries, torch.arange(20), 0)
    torch.testing.assert_close(back, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("family", "place"), [("gemma3_text", 1), ("cohere2", 1), ("smollm3", 1), ("smollm3", 0)])
def test_each_layer_turns_queries_by_its_own_rotation(family, place):
    """Gemma 3 rotates layers that attend everything by another base; Cohere 2 and a layer of SmolLM3 rotate none."""
    model, ids, projected = build(family), prompt(20, 3), []
    attention = model.model.layers[place].self_attn
    last = getattr(attention, "q_norm", attention.q_proj)
    hook = last.register_forward_hook(lambda m, a, out: projected.append(out))
    observed = {}

    class Watching(ExpectedAttention):
        def scores(self, cache, obs, capacity):
            observed[obs.layer] = obs
            return super().scores(cache, obs, capacity)

    try:
        kvbench.prefill(model, ids, [Chain((Watching(kv_size=8),))])
    finally:
        hook.remove()
    obs = observed[compressed_layers(model.config).index(place)]
    queries = obs.queries(20)
    plain = projected[-1].reshape(-1)
    back = Rotary(obs.inv_freq).turn(queries, torch.arange(20), 0)
    # q_norm gives heads before tokens, q_proj tokens before heads
    ordered = back if hasattr(attention, "q_norm") else back.transpose(0, 1)
    torch.testing.assert_close(ordered.reshape(-1), plain, atol=1e-4, rtol=1e-4)
    assert bool(obs.inv_freq.any()) == (family == "gemma3_text" or place == 0)


def test_learned_positions_are_refused():
    with pytest.raises(UsageError, match="expectedattention does not support the model family 'opt'"):
        kvbench.prefill(build("opt"), prompt(30), ["expectedattention"])


@pytest.mark.parametrize(
    ("knob", "value"), [("sinks", -1), ("future", 0), ("covariance", 1), ("vnorm", "no"), ("epsilon", -0.1)]
)
def test_impossible_knobs_are_refused(knob, value):
    with pytest.raises(UsageError, match=rf"method\.expectedattention\.{knob}"):
        chain_of({"method": "expectedattention", knob: value})

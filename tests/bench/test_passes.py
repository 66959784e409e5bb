"""One timed pass: the tokens of runs, times that add up, sampled generations, random weights of known sizes."""

from types import SimpleNamespace

import pytest
import torch
from support.elsewhere import DEVICE, pretended
from support.families import generated
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvbench.base.errors import UsageError
from kvbench.bench import architecture, generation_pass, peers, roofline
from kvbench.bench.sampling import Sampled, can_be_lengthened, lengthen, place_stretches, summarise_stretches
from kvbench.bench.workload import Workload, draw_prompts, parse_workload
from kvbench.engine.prefill import prefill_chains
from kvbench.engine.step import build, step
from kvbench.engine.stopping import Ending
from kvbench.kv.model_shape import from_config, from_entry
from kvbench.models.interface import attached
from kvbench.plan import config

pytestmark = pytest.mark.e2e("runs benchmarks")

CPU = torch.device("cpu")
LAYERS = 3
SIZES = {  # parameters as their makers publish them
    "llama2-7b": 6738415616,
    "llama2-7b-chat": 6738415616,
    "llama2-13b-chat": 13015864320,
    "llama3-8b-instruct": 8030261248,
    "mistral-7b-instruct-v0.2": 7241732096,
    "qwen2.5-7b-instruct": 7615616512,
    "opt-6.7b": 6658473984,
    "qwen3-0.6b": 596049920,
    "qwen3-4b": 4022468096,
    "qwen3-8b": 8190735360,
    "llama3.1-8b-instruct": 8030261248,
    "llama3.2-3b-instruct": 3212749824,
    "mistral-nemo-instruct": 12247782400,
    "gemma-2-2b-it": 2614341888,
    "gemma-2-9b-it": 9241705984,
    "gemma-3-1b-it": 999885952,
    "gemma-3-270m-it": 268098176,
    "phi3-mini-4k-instruct": 3821079552,
}


def parsed(*arguments):
    return config.read(["weights=random", *arguments])


@pytest.fixture(scope="module")
def model():
    return architecture.build_model(parsed("model=tiny").model, CPU, LAYERS)


def chains(*methods, **knobs):
    written = [f"{k}={v}" for k, v in knobs.items()]
    return [c.chain for c in parsed("model=tiny", f"method={','.join(methods)}", *written).chains]


@pytest.mark.parametrize(("name", "parameters"), SIZES.items())
def test_random_weights_have_the_published_number_of_parameters(name, parameters):
    built = architecture.build_model(parsed(f"model={name}").model, torch.device("meta"))
    assert sum(p.numel() for p in built.parameters()) == parameters
    assert from_config(built.config) == from_entry(parsed(f"model={name}").model.shape)
    assert (
        architecture.build_model(parsed(f"model={name}").model, torch.device("meta"), 2).config.num_hidden_layers == 2
    )


def test_weights_that_a_step_reads_leave_out_an_embedding_that_is_not_the_output(model):
    tied = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    assert architecture.weight_bytes(model) == tied == architecture.count_step_weight_bytes(model, 3)
    untied = architecture.build_model(parsed("model=tiny").model, CPU, LAYERS)
    untied.lm_head.weight = torch.nn.Parameter(untied.lm_head.weight.clone())
    table = untied.lm_head.weight
    own_value = tied + table.nbytes - (table.shape[0] - 3) * table.shape[1] * 4
    assert architecture.count_step_weight_bytes(untied, 3) == own_value


def test_a_checkpoint_keeps_its_layers():
    with pytest.raises(UsageError, match="layers=2 needs weights=random"):
        architecture.build_model(config.read(["model=tiny"]).model, CPU, 2)


@pytest.mark.parametrize("method", ["full", "snapkv+think", "kivi", "h2o", "snapkv+kivi", "adakv", "uncomp-stage"])
def test_a_pass_gives_the_tokens_of_runs_and_times_that_add_up(model, method):
    (chain,) = chains(method)
    ids = draw_prompts(Workload(150, 12, 3), 721, 0)
    measured = generation_pass.run(model, chain, ids, 12)
    caches = [prefill_chains(model, row, [chain])[0] for row in ids]
    assert measured.tokens.tolist() == generated(model, caches, [Ending(12)] * 3)
    assert measured.cache_bytes == sum(c.nbytes() for c in caches)
    assert len(measured.steps) == 11 and not measured.integrated
    assert measured.total == pytest.approx(measured.ttft + 11 * measured.tpot, rel=0.05)
    assert measured.prefill + measured.compress + measured.build <= measured.ttft
    assert 0 < measured.attention < measured.total


@pytest.mark.parametrize("sample", [None, 4])
def test_a_pass_by_a_graph_gives_the_same_tokens(model, sample):
    (chain,) = chains("snapkv", kv_size=64)
    ids = draw_prompts(Workload(100, 22, 2), 721, 0)
    plain, graph = (generation_pass.run(model, chain, ids, 22, sample, graph=by) for by in (False, True))
    assert graph.cache_bytes == plain.cache_bytes and graph.read_bytes == plain.read_bytes
    assert len(graph.steps) == len(plain.steps) and graph.integrated == plain.integrated
    assert graph.attention is None and graph.build > plain.build
    assert sample is not None or graph.tokens.tolist() == plain.tokens.tolist()


def test_bytes_that_a_step_reads_are_those_of_the_mean_length(model):
    ids = draw_prompts(Workload(100, 21, 2), 721, 0)
    measured = generation_pass.run(model, chains("full")[0], ids, 21)
    token = LAYERS * 2 * 4 * 32 * 4  # layers, keys and values, kv heads, dimension, fp32
    assert measured.read_bytes == 2 * token * (100 + 120) / 2


def test_stretches_lie_evenly_and_short_answers_run_whole():
    assert place_stretches(256, 64) is None
    assert place_stretches(257, 64) == [0, 64, 129, 193]
    assert place_stretches(1000, 64) == [0, 312, 624, 936]


def test_times_between_stretches_are_interpolated():
    # a step takes 1 + t / 100 s: the mean of steps 0..9 is 1.045, and lines are exact
    steps, starts, width = 400, [0, 130, 260, 390], 10
    spans = [1 + t / 100 for s in starts for t in range(s, s + width)]
    actual = summarise_stretches(steps, starts, spans)
    assert actual.times == pytest.approx((1.045, 2.345, 3.645, 4.945))
    assert actual.seconds == pytest.approx(sum(1 + t / 100 for t in range(steps)))
    bent = Sampled(4, 1, (0, 1, 2, 3), (1.0, 5.0, 2.0, 4.0))
    assert bent.seconds == pytest.approx(12.0)


@pytest.mark.parametrize("method", ["full", "snapkv+think", "kivi", "snapkv+kivi", "adakv+kivi"])
def test_a_skipped_cache_holds_as_much_as_one_that_was_decoded(model, method):
    (chain,) = chains(method)
    ids = draw_prompts(Workload(160, 100, 2), 721, 0)
    caches = [prefill_chains(model, row, [chain])[0] for row in ids]
    assert can_be_lengthened(caches)
    walked, skipped = build(model, caches, 100), build(model, caches, 100)
    token = torch.zeros(2, 1, dtype=torch.int64)
    lengthen(model, skipped, 90)
    with torch.no_grad(), attached(model):
        for t in range(91):
            step(model, walked, token, torch.full_like(token, 160 + t))
        step(model, skipped, token, torch.full_like(token, 250))
    assert [layer.payload() for layer in skipped.with_keys] == [layer.payload() for layer in walked.with_keys]
    assert [layer.used for layer in skipped.with_keys] == [layer.used for layer in walked.with_keys]


def test_packed_rows_are_skipped_at_once(model, monkeypatch):
    """Packing 90 tokens one by one in every layer takes as long as the steps that are left out."""
    (chain,) = chains("kivi")
    caches = [prefill_chains(model, row, [chain])[0] for row in draw_prompts(Workload(160, 400, 2), 721, 0)]
    batch = build(model, caches, 400)
    stores = [s for layer in batch.with_keys for _, rows in layer.formats for s in (rows.k, rows.v)]
    before = [s.codes.codes.clone() for s in stores]
    with monkeypatch.context() as patch:
        for store in stores:
            patch.setattr(store, "pack", None)
        lengthen(model, batch, 300)
    for store, old in zip(stores, before, strict=True):
        assert store.total == [460, 460] and store.packed == [store.residual.packed(460)] * 2
        # what the prompt left is still there, and what comes behind it is not all alike
        first, step = store.residual.packed(160) // store.step, store.residual.packed(460) // store.step
        assert torch.equal(store.codes.codes[:, :, :first], old[:, :, :first])
        assert store.codes.codes[:, :, first:step].unique().numel() > 100 and store.ring.std() > 0.9
    with torch.no_grad(), attached(model):
        measured = step_of(model, batch, 460)
    assert measured.isfinite().all()


def step_of(model, batch, position):
    token = torch.zeros(2, 1, dtype=torch.int64)
    return step(model, batch, token, torch.full_like(token, position))


def test_a_cache_that_evicts_is_sampled_only_at_its_budget(model):
    ids = draw_prompts(Workload(160, 8, 1), 721, 0)
    caches = prefill_chains(model, ids[0], chains("scissorhands", "tova", kv_size=64))
    assert can_be_lengthened(caches)
    # the prompt does not fill the budget: the cache still grows
    assert not can_be_lengthened(prefill_chains(model, ids[0], chains("tova", kv_size=400)))
    # a share of all tokens grows with the text, whatever the prompt has left
    assert not can_be_lengthened(prefill_chains(model, ids[0], chains("random", kv_size=100, decode_ratio=0.5)))


@pytest.mark.parametrize("method", ["full", "kivi", "tova"])
def test_a_sampled_pass_is_marked_and_ends_where_a_full_one_does(model, method):
    (chain,) = chains(method)
    measured = generation_pass.run(model, chain, draw_prompts(Workload(64, 100, 2), 721, 0), 100, sample=8)
    assert measured.integrated and len(measured.steps) == 32
    assert measured.sampled.starts == (0, 30, 61, 91) and measured.tpot == measured.sampled.seconds / 99
    assert measured.total == pytest.approx(measured.ttft + 99 * measured.tpot)


KEYS_AND_VALUES = 2 * LAYERS * 2 * 4 * 32  # numbers of one token in two rows


@pytest.mark.parametrize("name", peers.PEERS)
def test_a_peer_generates_what_was_asked_or_says_why_it_cannot(model, name):
    peer = peers.find_peer(name)
    if why := peer.reason_against():
        assert why.startswith(("needs ", "declared, not driven"))
        return
    ids, weights = draw_prompts(Workload(80, 9, 2), 721, 0), architecture.weight_bytes(model)
    # another process may come in between
    tries = [peers.run(model, peer, ids, 9) for _ in range(3)]
    actual = min(tries, key=lambda p: p.total - p.ttft - p.decode)
    assert actual.tokens.shape == (2, 9) and len(actual.steps) == 8 and 0 < actual.attention < actual.total
    assert actual.total == pytest.approx(actual.ttft + actual.decode, rel=0.05)
    # the last of 89 tokens is not fed; FP8 has a scale for all keys and one for all values of a layer
    stored = {"dynamic": 80 * 4, "static": 88 * 4, "offload": 80 * 4, "kvpress": 40 * 4, "fp8": 80}
    if name in stored:
        assert actual.cache_bytes == stored[name] * KEYS_AND_VALUES + (2 * LAYERS * 4 if name == "fp8" else 0)
    assert architecture.weight_bytes(model) == weights and not any(p.is_meta for p in model.parameters())
    # whatever it did to the model and to transformers is undone
    assert len(generation_pass.run(model, chains("full")[0], ids, 3).steps) == 2


def test_a_peer_that_is_not_known():
    with pytest.raises(UsageError, match="unknown peer vllm"):
        peers.find_peer("vllm")
    assert peers.Peer("x", ("no.such", "torch")).reason_against() == "needs no-such, which is not installed"


def test_a_caches_bytes_are_those_of_all_it_is_made_of():
    class Wrapped(torch.Tensor):
        """As quantisers' tensors: as large as what it stands for, and made of others."""

        def __tensor_flatten__(self):
            return ["codes", "scale"], None

    packed = torch.zeros(100).as_subclass(Wrapped)
    packed.codes, packed.scale = torch.zeros(50, dtype=torch.uint8), torch.zeros(4)
    residual = torch.zeros(6, dtype=torch.float16)
    of_pair, of_mapping = (torch.zeros(3), torch.zeros(1)), (torch.zeros(7), {"scale": torch.zeros(2), "bits": 4})
    layers = [
        SimpleNamespace(keys=residual, values=residual[:3], _quantized_keys=packed, _quantized_values=None),
        SimpleNamespace(keys=None, _quantized_keys=of_pair, _quantized_values=of_mapping),
    ]
    assert peers.cache_bytes(SimpleNamespace(layers=layers)) == 12 + 50 + 16 + (3 + 1 + 7 + 2) * 4


def test_attention_is_timed_whatever_wraps_it(model):
    plain, seen = ALL_ATTENTION_FUNCTIONS["sdpa"], []

    def wrapper(*args, **kwargs):
        seen.append(1)
        return plain(*args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["sdpa"] = wrapper
    try:
        measured = peers.run(model, peers.find_peer("dynamic"), draw_prompts(Workload(20, 2, 1), 721, 0), 2)
        assert measured.attention > 0 and len(seen) == 2 * LAYERS and ALL_ATTENTION_FUNCTIONS["sdpa"] is wrapper
    finally:
        del ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is plain


def test_the_bound_is_bytes_over_bandwidth(model):
    measured = roofline.compute_roofline(model, 4, 1e6, 1e9, 0.01)
    written = 4 * 2 * LAYERS * 4 * 32 * 4
    assert measured["moved"] == architecture.weight_bytes(model) + 1e6 + written
    assert measured["fraction"] == pytest.approx(measured["moved"] / 1e9 / 0.01)
    assert 1e8 < roofline.measure_bandwidth(CPU, 2**24) < 1e13


def test_a_copy_is_made_in_memory_that_others_have_given_back(monkeypatch):
    cached = [70 * 2**20]
    monkeypatch.setattr(roofline, "release", cached.clear)
    monkeypatch.setattr(roofline, "synchronise", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**24 if not cached else 3, 2**30))
    with pretended():
        assert 1e7 < roofline.measure_bandwidth(DEVICE) < 1e13


@pytest.mark.parametrize(("text", "expected"), [("160+338x300", (160, 338, 300)), ("512+32", (512, 32, 1))])
def test_workloads_as_written(text, expected):
    actual = parse_workload(text)
    assert (actual.prompt, actual.new, actual.batch) == expected and parse_workload(actual.name) == actual


@pytest.mark.parametrize("text", ["512", "0+4", "8+1", "8+4x0", "8+4xmany", "8-4", "8+4x2x3"])
def test_workloads_that_are_not_possible(text):
    with pytest.raises(UsageError, match=r"prompt\+new"):
        parse_workload(text)


def test_rows_have_prompts_of_their_own_and_methods_the_same_ones():
    ids = draw_prompts(parse_workload("50+2x4"), 721, 3)
    assert torch.equal(ids, draw_prompts(parse_workload("50+2x4"), 721, 3))
    assert len({tuple(r) for r in ids.tolist()}) == 4
    assert parse_workload("50+2xmax").batch is None

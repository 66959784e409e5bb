"""A cache inside transformers' own generate: the tokens, bytes and positions of kvbench's, and nothing else served."""

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from threading import Thread

import pytest
import torch
from support.calibrated import bound
from support.families import build, prompt
from transformers import GenerationConfig, TextGenerationPipeline, TextIteratorStreamer

import kvbench
from kvbench.base.errors import KvbenchError, Refused, UsageError
from kvbench.engine import hf_cache
from kvbench.engine.likelihood import compute_forced_logits, teacher_force
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.resolve import chain_of
from kvbench.methods.keynorm import KeyNorm
from kvbench.models.releases import CACHE_NAME, named_cache

HALF = {"kv_ratio": 0.5}
METHODS = {
    "full": {},
    "snapkv": HALF,
    "snapkv+think": HALF,
    "h2o": HALF,
    "streamingllm": HALF,
    "adakv": HALF,
    "tova": HALF,
    "kivi": {},
    "twilight": {},
    "h2o+kivi": HALF,
}
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def is_untouched(model):
    """Whether the model has its own methods and its own attention."""
    return not {"generate", *hf_cache.HOOKED} & vars(model).keys() and model.config._attn_implementation == "sdpa"


def answer(model, ids, cache, new, **options):
    """The new tokens of plain generate [new]."""
    options |= {"attention_mask": torch.ones(1, len(ids)), **GREEDY}  # texts of random tokens hold the padding's
    out = model.generate(ids[None], **named_cache(cache), max_new_tokens=new, **options)
    assert torch.equal(out[0, : len(ids)], ids)
    return out[0, len(ids) :].tolist()


@pytest.fixture(scope="module")
def own_answers():
    """The tiny model, two prompts, and kvbench's own answers to both by method, read and decoded together."""
    model, _ = kvbench.load_model("tiny")
    prompts = [prompt(120 + 50 * i, i) for i in range(2)]  # the first packs its 128th token while it decodes
    chains = [{"method": method, **knobs} for method, knobs in METHODS.items()]
    caches = [cache for ids in prompts for cache in kvbench.prefill(model, ids, chains)]
    answers = kvbench.generate(model, caches, 11)
    return (
        model,
        prompts,
        dict(zip(METHODS, zip(answers[: len(chains)], answers[len(chains) :], strict=True), strict=True)),
    )


@pytest.mark.e2e("ten methods answer with 11 tokens")
@pytest.mark.parametrize("method", METHODS)
def test_answers_are_those_of_kvbenchs_own_generate(method, own_answers):
    model, prompts, answers = own_answers
    for ids, want in zip(prompts, answers[method], strict=True):
        with kvbench.cache(model, method, **METHODS[method]) as cache:
            assert answer(model, ids, cache, 11) == want


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "opt"])
@pytest.mark.parametrize("method", ["full", "snapkv+think", "h2o", "kivi"])
def test_a_second_turn_goes_on_where_the_first_ended(method, family):
    model, ids, question = build(family), prompt(80), prompt(9, 3)
    knobs = METHODS[method]
    (read,) = kvbench.prefill(model, ids, [method], **knobs)
    (first,) = kvbench.generate(model, [read], 12)
    # the last token of an answer is fed with the turn that follows it
    fed = kvbench.extend(model, read, first[:-1])
    asked = kvbench.extend(model, fed, torch.tensor([first[-1], *question.tolist()]))
    (second,) = kvbench.generate(model, [asked], 6)
    with kvbench.cache(model, method, **knobs) as cache:
        assert cache.get_seq_length() == cache.nbytes() == 0 and cache.kept_positions() == []
        assert answer(model, ids, cache, 12) == first
        assert cache.nbytes() == fed.nbytes() and cache.get_seq_length() == len(ids) + 11
        assert cache.measured.payload == sum(t.nbytes for x in read.layers for s in x.segments for t in s.payload())
        text = torch.cat([ids, torch.tensor(first), question])
        assert answer(model, text, cache, 6) == second
        assert cache.ids.tolist() == [*text.tolist(), *second[:-1]]
        want = kvbench.extend(model, asked, second[:-1])
        for ours, layer in zip(cache.kept_positions(), want.layers, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, layer.kept_positions(), strict=True))
        assert answer(model, torch.cat([cache.ids, torch.tensor(second[-1:])]), cache, 1)  # no new text
        cache.reset()
        assert answer(model, prompt(70, 5), cache, 3)


@pytest.mark.parametrize("method", ["snapkv+think", "h2o+kivi"])
def test_an_answer_longer_than_the_room_goes_on_in_a_larger_batch(method, monkeypatch):
    monkeypatch.setattr(hf_cache, "ROOM", 4)
    model, ids = build("llama"), prompt(80)
    (read,) = kvbench.prefill(model, ids, [method], kv_ratio=0.5)
    (want,) = kvbench.generate(model, [read], 20)
    with kvbench.cache(model, method, kv_ratio=0.5) as cache:
        out = model.generate(ids[None], **named_cache(cache), max_length=100, **GREEDY)
    assert out[0, 80:].tolist() == want


@pytest.mark.e2e("factorises a model")
def test_a_model_that_the_method_changes_is_its_own_again_after_each_turn():
    model, ids = build("llama"), prompt(60)
    chain = bound(model, chain_of({"method": "asvd", "multiple": 4, "probes": 2, "ratio": 0.4}))
    plain = model(ids[None]).logits
    (read,) = kvbench.prefill(model, ids, [chain])
    (want,) = kvbench.generate(model, [read], 10)
    with kvbench.cache(model, chain) as cache:
        assert answer(model, ids, cache, 6) == want[:6]
        assert torch.equal(model(ids[None]).logits, plain)
        assert answer(model, torch.tensor([*ids, *want[:6]]), cache, 4) == want[6:]


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "opt", "qwen3"])
def test_the_full_cache_changes_nothing_in_what_generate_does(family):
    model, ids = build(family), prompt(30)[None]
    options = {"max_new_tokens": 20, "repetition_penalty": 1.3, "return_dict_in_generate": True, "output_scores": True}
    for sampling in ({}, {"do_sample": True, "temperature": 0.8, "top_k": 5}):
        torch.manual_seed(0)
        want = model.generate(ids, **{**GREEDY, **options, **sampling})
        torch.manual_seed(0)
        with kvbench.cache(model, "full") as cache:
            got = model.generate(ids, **named_cache(cache), **{**GREEDY, **options, **sampling})
        assert torch.equal(got.sequences, want.sequences) and got[CACHE_NAME] is cache
        torch.testing.assert_close(torch.stack(got.scores), torch.stack(want.scores), atol=1e-4, rtol=1e-4)


def test_a_pipeline_and_a_streamer_take_it_and_nothing_warns():
    model, tokenizer = kvbench.load_model("tiny")
    text = "the magic number of paris is 471. what is the magic number of paris? "
    ids = tokenizer(text, return_tensors="pt").input_ids
    (want,) = kvbench.generate(model, kvbench.prefill(model, ids, ["streamingllm"], kv_size=12), 8)
    options = {"max_new_tokens": 8, **GREEDY}
    pipe = TextGenerationPipeline(model=model, tokenizer=tokenizer)
    with kvbench.cache(model, "streamingllm", kv_size=12) as cache:
        (out,) = pipe(text, **named_cache(cache), return_tensors=True, **options)
        assert list(out["generated_token_ids"]) == [*ids[0].tolist(), *want]
        with pytest.raises(UsageError, match="differ from them at token"):
            pipe("another " + text, **named_cache(cache), **options)
        cache.reset()
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
        asked = {"inputs": ids, **named_cache(cache), "streamer": streamer, **options}
        thread = Thread(target=model.generate, kwargs=asked)
        thread.start()
        assert "".join(streamer) == tokenizer.decode(want)
        thread.join()


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", sorted({CACHE_NAME, "past_key_values"}))
@pytest.mark.parametrize("method", ["snapkv", "h2o", "kivi"])
def test_a_cache_made_inside_the_call_answers_and_leaves_nothing_behind(method, name):
    model, ids = build("llama"), prompt(80)
    (read,) = kvbench.prefill(model, ids, [method], **METHODS[method])
    (want,) = kvbench.generate(model, [read], 6)
    own = model.generate(ids[None], max_new_tokens=6, return_dict_in_generate=True, **GREEDY)
    # generate is looked up before its arguments are made
    out = model.generate(
        ids[None], **{name: kvbench.cache(model, method, **METHODS[method])}, max_new_tokens=6, **GREEDY
    )
    assert out[0, 80:].tolist() == want and is_untouched(model)
    with pytest.raises(UsageError, match="num_beams and num_return_sequences"):
        model.generate(ids[None], **{name: kvbench.cache(model, method)}, max_new_tokens=6, num_beams=2, **GREEDY)
    assert is_untouched(model)
    # the output refers to the cache, which stays open with it
    got = model.generate(
        ids[None], **{name: kvbench.cache(model, "full")}, max_new_tokens=6, return_dict_in_generate=True, **GREEDY
    )
    assert got.keys() == own.keys() and torch.equal(got.sequences, own.sequences)
    assert got[CACHE_NAME].get_seq_length() == 85
    del got
    assert is_untouched(model)


@pytest.mark.parametrize("method", ["full", "snapkv", "h2o"])
def test_a_loop_of_ones_own_feeds_the_model_token_by_token(method):
    (read,) = kvbench.prefill(LLAMA, IDS, [method], **METHODS[method])
    (want,) = kvbench.generate(LLAMA, [read], 5)
    with kvbench.cache(LLAMA, method, **METHODS[method]) as cache:
        answered, ids = [], IDS[None]
        for _ in want:
            ids = LLAMA(ids, **named_cache(cache)).logits[:, -1:].argmax(dim=-1)
            answered.append(int(ids))
        assert answered == want and cache.get_seq_length() == len(IDS) + 4


def test_two_threads_answer_from_two_caches_of_one_model():
    prompts = [prompt(60, seed) for seed in (3, 4)]
    want = [kvbench.generate(LLAMA, kvbench.prefill(LLAMA, ids, ["h2o"], kv_ratio=0.5), 12)[0] for ids in prompts]

    def answer_alone(ids):
        return answer(LLAMA, ids, kvbench.cache(LLAMA, "h2o", kv_ratio=0.5), 12)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(answer_alone, prompts)) == want
    assert is_untouched(LLAMA)


def test_a_closed_cache_says_so_whatever_it_is_asked():
    with kvbench.cache(LLAMA, "snapkv", kv_ratio=0.5) as cache:
        answer(LLAMA, IDS, cache, 2)
    uses = [
        cache.nbytes,
        cache.kept_positions,
        cache.get_seq_length,
        lambda: cache.state,
        lambda: cache.measured,
        lambda: cache.read(IDS),
        lambda: answer(LLAMA, IDS, cache, 2),
        lambda: LLAMA(IDS[None], **named_cache(cache)),
    ]
    for use in uses:
        with pytest.raises(UsageError, match="this cache is closed"):
            use()
    # also while the model serves another one
    with kvbench.cache(LLAMA, "full"), pytest.raises(UsageError, match="this cache is closed"):
        answer(LLAMA, IDS, cache, 2)
    assert "closed" in repr(cache)


LLAMA, IDS = build("llama"), prompt(40)
NOT_SERVED = {
    "one unpadded prompt at a time": {"inputs": torch.stack([IDS, IDS])},
    "here are 3 rows": {"num_beams": 3},
    "here are 2 rows": {"num_return_sequences": 2, "do_sample": True},
    "assisted decoding": {"assistant_model": build("qwen2")},
    "take tokens back": {"prompt_lookup_num_tokens": 3},
    "prefill_chunk_size is not served": {"prefill_chunk_size": 16},
    "use_cache=False is not served": {"use_cache": False},
    "give no position_ids": {"position_ids": torch.arange(40)[None] * 2},
    "without padding": {"attention_mask": torch.tensor([[0] + [1] * 39])},
    "input_ids come in": {"inputs": None, "inputs_embeds": torch.zeros(1, 5, 64)},
    "no embeddings or attentions": {"output_hidden_states": True, "return_dict_in_generate": True},
}


@pytest.mark.parametrize("message", NOT_SERVED)
def test_what_is_not_served_is_refused_with_the_reason(message):
    options = {"inputs": IDS[None], **GREEDY, "max_new_tokens": 4, **NOT_SERVED[message]}
    with kvbench.cache(LLAMA, "snapkv", kv_ratio=0.5) as cache, pytest.raises(UsageError, match=message):
        LLAMA.generate(**named_cache(cache), **options)
    assert is_untouched(LLAMA)


def test_under_autocast_nothing_is_read():
    with kvbench.cache(LLAMA, "snapkv", kv_ratio=0.5) as cache, torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(UsageError, match=r"torch\.autocast"):
            LLAMA.generate(IDS[None], **GREEDY, **named_cache(cache), max_new_tokens=4)
        with pytest.raises(UsageError, match=r"torch\.autocast"):
            cache.read(IDS)


def test_a_cache_is_one_models_and_one_prompts():
    cache, other = kvbench.cache(LLAMA, "snapkv", kv_ratio=0.5), kvbench.cache(LLAMA, "full")
    first = answer(LLAMA, IDS, cache, 4)
    for ids in (prompt(60, 9), IDS[:20], IDS, torch.tensor([*IDS, *first[:3]])):
        with pytest.raises(UsageError, match="has read 43 tokens"):
            answer(LLAMA, ids, cache, 4)
    for model in (build("qwen2"), copy.deepcopy(LLAMA)):
        with pytest.raises(UsageError, match="another model"):
            answer(model, IDS, kvbench.cache(LLAMA, "full"), 4)
    cache.close()
    cache.close()
    assert answer(LLAMA, IDS, other, 4)
    with pytest.raises(UsageError, match="is closed"):
        answer(LLAMA, IDS, cache, 4)
    other.close()
    assert is_untouched(LLAMA)


def test_calls_without_such_a_cache_are_passed_on_and_what_stood_in_the_models_way_comes_back():
    model, calls = copy.deepcopy(LLAMA), []
    want = model.generate(IDS[None], max_new_tokens=4, **GREEDY)
    for name in ("generate", "forward"):
        own = getattr(model, name)
        vars(model)[name] = wraps(own)(lambda *a, own=own, name=name, **kw: calls.append(name) or own(*a, **kw))
    before = dict(vars(model))
    with kvbench.cache(model, "full") as cache:
        assert torch.equal(model.generate(IDS[None], max_new_tokens=4, **GREEDY), want)
        config = GenerationConfig(max_new_tokens=4, **GREEDY)
        assert torch.equal(model.generate(IDS[None], config, **named_cache(cache)), want)
    assert calls.count("generate") == 2 and calls.count("forward") == 8
    assert vars(model) == before


@pytest.mark.parametrize("at", [1, 3])
def test_a_turn_that_breaks_off_leaves_what_was_read_before(at, monkeypatch):
    steps = []
    with kvbench.cache(LLAMA, "h2o", kv_ratio=0.5) as cache:
        first = answer(LLAMA, IDS, cache, 4)
        held, ids = cache.state, torch.tensor([*IDS, *first, 5, 6, 7])
        feed = hf_cache.step
        monkeypatch.setattr(hf_cache, "step", lambda *a: steps.append(0) or (1 / (at - len(steps)) and feed(*a)))
        with pytest.raises(ZeroDivisionError):
            answer(LLAMA, ids, cache, 6)
        assert (
            cache.get_seq_length() == len(ids)
            and cache.state is not held
            and LLAMA.config._attn_implementation == "sdpa"
        )
        monkeypatch.undo()
        again = answer(LLAMA, torch.tensor([*ids, 8]), cache, 4)
    assert again


class KeepsAll(KeyNorm):
    id = "keeps-all"

    def compress(self, cache, obs):
        return cache


def test_what_the_audit_refuses_is_not_answered_from():
    with (
        kvbench.cache(LLAMA, Chain((KeepsAll(kv_size=8),))) as cache,
        pytest.raises(Refused, match="declares exactly 8"),
    ):
        answer(LLAMA, IDS, cache, 4)


def test_each_token_of_an_answer_is_audited(monkeypatch):
    stored = hf_cache.Stored
    monkeypatch.setattr(hf_cache, "Stored", lambda fed, payload: stored(fed + (fed == 3), payload))
    with kvbench.cache(LLAMA, "snapkv", kv_ratio=0.5) as cache, pytest.raises(Refused, match="after 4 new tokens"):
        answer(LLAMA, IDS, cache, 6)


def test_logits_that_are_not_finite_end_the_answer(monkeypatch):
    monkeypatch.setattr(hf_cache, "step", lambda *a: torch.full((1, 1, 128), torch.nan))
    with kvbench.cache(LLAMA, "snapkv", kv_ratio=0.5) as cache, pytest.raises(KvbenchError, match="are not finite"):
        answer(LLAMA, IDS, cache, 4)


@pytest.mark.parametrize("method", ["full", "h2o", "kivi"])
def test_forced_logits_are_those_that_predict_each_token(method):
    (cache,) = kvbench.prefill(LLAMA, IDS, [method], **METHODS[method])
    tokens = prompt(20, 8)
    (forced,) = teacher_force(LLAMA, [cache], tokens, 1)
    losses = -compute_forced_logits(LLAMA, cache, tokens).log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(losses, forced.losses, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", ["snapkv+think", "h2o"])
def test_a_question_can_be_withheld_from_the_compression(method):
    (context,) = kvbench.prefill(LLAMA, IDS, [method], **METHODS[method])
    question = prompt(12, 4)
    (want,) = kvbench.generate(LLAMA, [kvbench.extend(LLAMA, context, question)], 6)
    with kvbench.cache(LLAMA, method, **METHODS[method]) as cache:
        cache.read(IDS)
        assert answer(LLAMA, torch.cat([IDS, question]), cache, 6) == want
        with pytest.raises(UsageError, match="differ from them at token"):
            cache.read(question)
    with pytest.raises(UsageError, match="is closed"):
        cache.read(IDS)


def test_an_answer_ends_where_the_models_positions_do():
    model, ids = build("opt"), prompt(500)
    with kvbench.cache(model, "full") as cache:
        assert len(answer(model, ids, cache, 12)) == 12
        with pytest.raises(UsageError, match="512 learned positions"):
            answer(model, torch.cat([cache.ids, prompt(1)]), cache, 2)

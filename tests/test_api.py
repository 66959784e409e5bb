"""The Python interface on five families: identity with generate, batches, reuse, extension, errors."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import pytest
import torch
from support.families import FAMILIES, PLAIN, build, hooks, prompt
from transformers import PreTrainedTokenizerBase

import kvbench
from kvbench.base.errors import UsageError
from kvbench.methods.core.resolve import chain_of


def reference(model, ids, new):
    out = model.generate(ids[None], max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, ids.shape[0] :].tolist()


@cache
def answered(family):
    """Return (prompts, their full caches, the third's where its end is a question, all answers of one batch).

    The last two answers are those of the third prompt with its end as a question, in one part and in two.
    """
    model = build(family)
    texts = [prompt(n, seed) for n, seed in ((1, 0), (7, 1), (50, 2), (130, 3))]
    whole = [kvbench.prefill(model, ids, ["full"])[0] for ids in texts]
    (context,) = kvbench.prefill(model, texts[2][:35], ["full"])
    bytes_before = context.nbytes()
    requested = kvbench.extend(model, context, texts[2][35:])
    twice = kvbench.extend(model, kvbench.extend(model, context, texts[2][35:40]), texts[2][40:])
    assert context.nbytes() == bytes_before and context.seen == 35
    answers = kvbench.generate(model, [*whole, requested, twice], 6)
    assert kvbench.generate(model, [whole[2]], 6) == [answers[2]]
    return texts, whole, requested, answers


def best_tokens(model, ids, answer):
    """Return the token that the bare model ranks first in each place of an answer, of one pass over the whole text."""
    with torch.no_grad():
        logits = model(torch.cat([ids, torch.tensor(answer[:-1])])[None], use_cache=False).logits
    return logits[0, len(ids) - 1 :].argmax(-1).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_full_equals_generate(family):
    model = build(family)
    texts, _, _, answers = answered(family)
    assert answers[2] == reference(model, texts[2], 6)
    # an answer each of whose tokens is ranked first after those before it is what generate returns, without its steps
    for ids, answer in zip(texts, answers, strict=False):
        assert answer == best_tokens(model, ids, answer)


@pytest.mark.parametrize("family", PLAIN)
def test_rows_of_one_batch_equal_rows_alone_and_caches_are_reusable(family):
    model = build(family)
    snapkv, both = ({"method": m, "kv_size": 20, "snapkv.window": 8} for m in ("snapkv", "snapkv+think"))
    caches = []
    for n, seed, methods in ((90, 1, ["full", both]), (61, 2, ["think", snapkv]), (40, 3, ["full", both])):
        caches += kvbench.prefill(model, prompt(n, seed), methods, recent=8)
    together = kvbench.generate(model, caches, 4)
    alone = [kvbench.generate(model, [c], 4)[0] for c in caches]
    assert together == alone
    assert kvbench.generate(model, caches, 2) == [answer[:2] for answer in together]


@pytest.mark.parametrize("family", FAMILIES)
def test_extend_reads_a_question_as_the_full_prompt_does(family):
    _, whole, requested, answers = answered(family)
    assert requested.seen == 50
    torch.testing.assert_close(requested.logits, whole[2].logits, atol=1e-4, rtol=1e-4)
    assert answers[4:] == [answers[2]] * 2  # which test_full_equals_generate compares with generate


def test_extend_on_a_compressed_cache_keeps_the_appended_text_whole():
    model, ids = build("llama"), prompt(60, 5)
    (small,) = kvbench.prefill(model, ids, ["snapkv+think"], kv_size=16, recent=4, **{"snapkv.window": 8})
    requested = kvbench.extend(model, small, prompt(9, 6))
    for layer in requested.layers:
        for positions in layer.kept_positions():
            assert positions[-9:].tolist() == list(range(60, 69)) and len(positions) == 16 + 9


def test_eos_ends_an_answer_and_is_part_of_it():
    model, ids = build("llama"), prompt(30, 1)
    (cache,) = kvbench.prefill(model, ids, ["full"])
    (free,) = kvbench.generate(model, [cache], 12)
    stop = free[5]
    (stopped,) = kvbench.generate(model, [cache], 12, eos_token_id=stop)
    assert stopped == free[: free.index(stop) + 1]
    assert kvbench.generate(model, [cache], 12, eos_token_id=[stop, 9999]) == [stopped]


def test_models_settings_come_back_even_after_an_error():
    model = build("llama")
    model.train()
    try:
        before, there = model.config._attn_implementation, hooks(model)
        with pytest.raises(UsageError):
            kvbench.prefill(model, [[1, 2], [3, 4]], ["full"])
        kvbench.prefill(model, prompt(10), ["full"])
        assert model.config._attn_implementation == before and model.training
        assert hooks(model) == there
    finally:
        model.eval()


@pytest.mark.parametrize(
    ("methods", "knobs", "part"),
    [
        (["snapkw"], {}, "Did you mean snapkv"),
        (["snapkv"], {"kv_sizes": 4}, "kv_size"),
        (["snapkv"], {"kv_size": 0}, "above 32"),
        (["snapkv"], {"kv_ratio": 1.2}, "at most 1"),
        (["snapkv"], {"kv_ratio": 0.5, "kv_size": 64}, "two ways"),
        (["think"], {"ratio": 1.2}, "below 1"),
        (["full"], {"ratio": 0.4}, "ratio"),
        (["full+snapkv"], {}, "alone"),
        (["snapkv+snapkv"], {}, "twice"),
        (["snapkv+"], {}, "empty part"),
        ("snapkv", {}, "list"),
        (["snapkv"], {"per": "head"}, "query_head"),
    ],
)
def test_bad_requests_name_the_key_and_what_is_allowed(methods, knobs, part):
    with pytest.raises(UsageError, match=part):
        kvbench.prefill(build("llama"), prompt(20), methods, **knobs)


def test_a_library_that_wraps_registered_attention_functions_does_not_reach_ours():
    """Importing kvpress behind kvbench does that, and its wrapper reads shapes of the keys."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def wrapped(module, query, key, *args, **kwargs):
        raise AttributeError(key.shape)

    ALL_ATTENTION_FUNCTIONS["kvbench"] = wrapped
    assert len(kvbench.prefill(build("llama"), prompt(20), ["full"])) == 1


def test_padding_and_foreign_calls_are_refused():
    model = build("llama")
    with pytest.raises(UsageError, match="one unpadded prompt"):
        kvbench.prefill(model, torch.stack([prompt(5), prompt(5)]), ["full"])
    from kvbench.models.interface import attached

    with attached(model), pytest.raises(UsageError, match="padding"):
        model(prompt(5)[None], attention_mask=torch.tensor([[0, 1, 1, 1, 1]]))


@pytest.mark.filterwarnings("ignore:prompt and new tokens are 600")
def test_caches_of_another_model_and_texts_past_learned_positions_are_refused():
    llama, opt = build("llama"), build("opt")
    (cache,) = kvbench.prefill(llama, prompt(20), ["full"])
    for use in (lambda: kvbench.generate(opt, [cache], 2), lambda: kvbench.extend(opt, cache, [5])):
        with pytest.raises(UsageError, match="another model"):
            use()
    (long,) = kvbench.prefill(opt, prompt(500), ["full"])
    for use in (
        lambda: kvbench.prefill(opt, prompt(600), ["full"]),
        lambda: kvbench.generate(opt, [long], 20),
        lambda: kvbench.extend(opt, long, prompt(20)),
    ):
        with pytest.raises(UsageError, match="512 learned positions"):
            use()


def test_modules_keep_their_own_training_flags():
    model = build("llama")
    model.train()
    model.model.layers[0].eval()
    try:
        kvbench.prefill(model, prompt(10), ["full"])
        assert model.training
        assert not model.model.layers[0].training
        assert model.model.layers[1].training
    finally:
        model.eval()


def test_an_empty_budget_in_an_entry_leaves_the_default_standing():
    (cache,) = kvbench.prefill(build("llama"), prompt(80), [{"method": "random", "kv_size": None}], kv_ratio=0.5)
    assert cache.layers[0].tokens == 40


@pytest.mark.parametrize("ids", [[1.5, 2.5], [True, False]])
def test_ids_that_are_no_numbers_of_tokens_are_refused(ids):
    with pytest.raises(UsageError, match="whole numbers"):
        kvbench.prefill(build("llama"), ids, ["full"])


@pytest.mark.parametrize("layers", [3, [99], [True], "0"])
def test_impossible_frozen_layers_are_refused(layers):
    with pytest.raises(UsageError, match="frozen_layers"):
        kvbench.prefill(build("llama"), prompt(50), ["snapkv"], frozen_layers=layers, kv_size=40)


def test_half_precision_logits_scale_before_they_multiply():
    from kvbench.storage.attend import compute_logits

    q, k = torch.full((1, 2, 1, 64), 60.0).half(), torch.full((1, 2, 3, 64), 60.0).half()
    assert torch.isfinite(compute_logits(q, k, 0.125)).all()


def test_column_sums_are_charged_to_the_methods_that_need_them():
    model, ids = build("llama"), prompt(400)
    full, h2o = kvbench.prefill(model, ids, ["full", "h2o"])
    assert full.prefill_s == h2o.prefill_s
    assert h2o.compress_s > 3 * full.compress_s


def test_chains_that_begin_alike_choose_their_tokens_once_and_store_them_as_each_alone(monkeypatch):
    from kvbench.methods.snapkv import SnapKV

    requests = []
    choose = SnapKV.choose
    monkeypatch.setattr(SnapKV, "choose", lambda *a: requests.append(a[2].layer) or choose(*a))
    model, ids = build("llama"), prompt(90)
    knobs = {"kv_size": 40, "snapkv.window": 8, "recent": 8, "group": 16, "residual": 16}
    methods = ["snapkv", "snapkv+think", "snapkv+kivi"]
    together = kvbench.prefill(model, ids, methods, **knobs)
    assert requests == list(range(len(together[0].layers)))
    other = kvbench.prefill(model, ids, ["snapkv", {"method": "snapkv", "window": 9}], kv_size=40)
    assert len(requests) == 3 * len(other[0].layers)  # another knob is another choice
    for method, shared in zip(methods, together, strict=True):
        (alone,) = kvbench.prefill(model, ids, [method], **{k: v for k, v in knobs.items() if _knows(method, k)})
        for a, b in zip(alone.layers, shared.layers, strict=True):
            for x, y in zip(a.tensors(), b.tensors(), strict=True):
                assert torch.equal(x, y)
    before = [[t.clone() for layer in c.layers for t in layer.tensors()] for c in together]
    kvbench.generate(model, together, 16)
    after = [[t for layer in c.layers for t in layer.tensors()] for c in together]
    assert all(torch.equal(x, y) for xs, ys in zip(before, after, strict=True) for x, y in zip(xs, ys, strict=True))


def _knows(method, knob):
    return {"recent": "think", "group": "kivi", "residual": "kivi"}.get(knob, "snapkv") in method


def autocast(function, *args):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return function(*args)


LLAMA = build("llama")
GROUPS = {"method": "uncomp-group"}
(CACHE,) = kvbench.prefill(LLAMA, prompt(20), ["full"])
NOT_POSSIBLE = {
    "give tokenizer(text).input_ids": lambda: kvbench.prefill(LLAMA, {"input_ids": [1]}, ["full"]),
    "without a token": lambda: kvbench.extend(LLAMA, CACHE, []),
    "give a causal language model": lambda: kvbench.prefill(None, prompt(20), ["full"]),
    "model is LlamaModel": lambda: kvbench.prefill(LLAMA.model, prompt(20), ["full"]),
    "methods=None": lambda: kvbench.prefill(LLAMA, prompt(20), None),
    "the entry 5 names no method": lambda: kvbench.prefill(LLAMA, prompt(20), [5]),
    "unknown option 5": lambda: kvbench.prefill(LLAMA, prompt(20), [{"method": "snapkv", 5: 6}]),
    "preset=5 is not possible": lambda: kvbench.prefill(LLAMA, prompt(20), ["snapkv"], preset=5),
    "caches=<PromptCache full: 20 of 20 tokens": lambda: kvbench.generate(LLAMA, CACHE, 4),
    "caches=[None] is not possible": lambda: kvbench.generate(LLAMA, [None], 4),
    "eos_token_id='</s>' is not possible": lambda: kvbench.generate(LLAMA, [CACHE], 4, eos_token_id="</s>"),
    "eos_token_id=2.5 is not possible": lambda: kvbench.generate(LLAMA, [CACHE], 4, eos_token_id=2.5),
    "max_new_tokens=True": lambda: kvbench.generate(LLAMA, [CACHE], True),
    "max_new_tokens=1000000000000": lambda: kvbench.generate(LLAMA, [CACHE], 10**30),
    "torch.autocast('cpu') is not possible": lambda: autocast(kvbench.prefill, LLAMA, prompt(20), ["h2o"]),
    "Leave it, or load the model with dtype": lambda: autocast(kvbench.generate, LLAMA, [CACHE], 4),
    "the model's own dtype": lambda: autocast(kvbench.compare, LLAMA, None, ["a"]),
    "folder=3 is not possible: a folder": lambda: kvbench.results(3),
    "folder='' is not possible": lambda: kvbench.results(""),
    "method=None is not possible: a name, or names with commas": lambda: kvbench.results(".", method=None),
    "status=['partial'] is not possible": lambda: kvbench.results(".", status=["partial"]),
    "results='' is not possible": lambda: kvbench.compare(LLAMA, None, ["a"], results=""),
    "tokenizer is int": lambda: kvbench.prefill(LLAMA, prompt(20), ["kvzip"], tokenizer=5),
    "cache=[<PromptCache": lambda: kvbench.extend(LLAMA, [CACHE], [5]),
    "unknown option foo of the model": lambda: kvbench.load_model("tiny", foo=1),
    "model=None is not possible": lambda: kvbench.load_model(None),
    "there is no such folder": lambda: kvbench.load_model("a" * 5000),
    "unknown device None": lambda: kvbench.load_model("tiny", device=None),
    "model.stop='abc' is not possible": lambda: kvbench.load_model("tiny", stop="abc"),
    "model.revision=5 is not possible: a text": lambda: kvbench.load_model("tiny", revision=5),
    "tokenizer is str": lambda: kvbench.calibrate(LLAMA, "tiny", "uncomp-group"),
    "samples= is not possible: a Chain has": lambda: kvbench.calibrate(LLAMA, None, chain_of(GROUPS), samples=3),
    "kv_size= is not possible: a Chain has": lambda: kvbench.prefill(LLAMA, [1, 2], [chain_of(GROUPS)], kv_size=3),
    "folder=None": lambda: kvbench.calibrate(LLAMA, PreTrainedTokenizerBase, "uncomp-group", folder=None),
}


@pytest.mark.parametrize("message", NOT_POSSIBLE)
def test_every_wrong_call_is_a_sentence(message):
    with pytest.raises(UsageError) as raised:
        NOT_POSSIBLE[message]()
    assert message in str(raised.value)


def test_numbers_of_numpy_and_devices_and_dtypes_of_torch_are_what_they_say():
    ids = prompt(60)
    methods = [{"method": "snapkv", "kv_size": np.int64(40)}]
    (plain,) = kvbench.prefill(LLAMA, ids, ["snapkv"], kv_size=40)
    (numpy,) = kvbench.prefill(LLAMA, ids.numpy(), methods, **{"snapkv.frozen_layers": np.array([], dtype=int)})
    assert numpy.chain == plain.chain and repr(plain).startswith(
        "<PromptCache snapkv kv_size=40: 40 of 60 tokens, 30.9 KiB"
    )
    (ragged,) = kvbench.prefill(LLAMA, ids, ["adakv"], kv_size=40, window=8)
    counts = [len(head) for layer in ragged.layers for head in layer.kept_positions()]
    assert f": {min(counts)} to {max(counts)}, 40 in the mean, of 60 tokens" in repr(ragged)
    assert kvbench.generate(LLAMA, [numpy], np.int32(3)) == kvbench.generate(LLAMA, [plain], 3)
    model, _ = kvbench.load_model("tiny", device=torch.device("cpu"), dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16


def test_threads_take_turns():
    def answer(seed):
        return kvbench.generate(LLAMA, kvbench.prefill(LLAMA, prompt(30, seed), ["full"]), 6)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(answer, range(8))) == [answer(seed) for seed in range(8)]


def test_a_cache_can_be_copied_but_not_pickled():
    assert kvbench.generate(LLAMA, [copy.deepcopy(CACHE)], 3) == kvbench.generate(LLAMA, [copy.copy(CACHE)], 3)
    with pytest.raises(TypeError, match="Keep the prompt's ids and the method"):
        pickle.dumps(CACHE)
    with kvbench.cache(LLAMA, "full") as empty:
        for refused in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="can be neither pickled nor copied: its method is code"):
                refused(empty)


def test_texts_beyond_the_context_are_answered_with_a_warning():
    with pytest.warns(UserWarning, match="prompt and new tokens are 2049, more than the 2048"):
        (cache,) = kvbench.prefill(LLAMA, prompt(2049), ["full"])
    with pytest.warns(UserWarning, match="prompt and new tokens are 2052, more than the 2048"):
        kvbench.extend(LLAMA, cache, [5, 6, 7])
    with kvbench.cache(LLAMA, "full") as empty, pytest.warns(UserWarning, match="are 2049, more than the 2048") as said:
        empty.read(prompt(2049))
    assert __file__ in [warning.filename for warning in said]


def test_an_unbounded_text_with_rolled_positions_stays_within_the_context(recwarn):
    roll = {"method": "streamingllm", "mode": "rolled", "kv_size": 64}
    (cache,) = kvbench.prefill(LLAMA, prompt(2040), [roll])
    kvbench.generate(LLAMA, [kvbench.extend(LLAMA, cache, prompt(10))], 4)
    assert not [warning for warning in recwarn if "the model was made for" in str(warning.message)]


ROWS = [{"prompt": "a b", "answers": ["c"]}]
NOT_COMPARED = {
    "methods=None is not possible": ((None, ROWS, None), {}),
    "the entry {'kv_size': 64} of methods": ((None, ROWS, [{"kv_size": 64}]), {}),
    "unknown option kvsize": ((None, ROWS, [{"method": "h2o", "kvsize": 64}]), {}),
    "row 1 of data holds half a surrogate pair": ((None, [*ROWS, {"prompt": "\ud800", "answers": ["c"]}]), {}),
    "device='cuda' is not possible: the model is loaded": ((None, ROWS), {"device": "cuda"}),
    "results=None is not possible": ((None, ROWS), {"results": None}),
    "data is dict": ((None, ROWS[0]), {}),
    "data is int": ((None, 5), {}),
    "data is str: give the name of a dataset, a list of rows": ((None, ""), {}),
    "data is a set, which has no order: give a list of rows": ((None, {"a", "b"}), {}),
    "metric=<built-in function len> is not possible": ((None, ROWS), {"metric": len}),
    "max_new_tokens='x'": ((None, ["a"]), {"max_new_tokens": "x"}),
    "a row of data is not possible": ((None, [{**ROWS[0], "more": object()}]), {}),
    "tokenizer is str": (("tiny", ROWS), {}),
}


@pytest.mark.parametrize("message", NOT_COMPARED)
def test_a_comparison_that_is_not_possible_is_a_sentence(message, tmp_path):
    (tokenizer, data, *methods), settings = NOT_COMPARED[message]
    with pytest.raises(UsageError) as raised:
        kvbench.compare(
            LLAMA,
            tokenizer or PreTrainedTokenizerBase,
            data,
            *methods,
            **{"results": tmp_path, "progress": False} | settings,
        )
    assert message in str(raised.value)

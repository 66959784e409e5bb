"""Golden tests: what good command lines ask for, and that conf/ takes every result."""

from pathlib import Path

import pytest

from kvbench.base.errors import UsageError
from kvbench.plan import config, words
from kvbench.plan.words import split_list, value_of

TINY = {"model": "tiny"}
GOLDEN = {  # groups, methods, tasks, knobs and values of each run
    "": [(TINY, "", "", {})],
    "limit=3": [(TINY, "", "", {"limit": 3})],
    "method=full": [(TINY, "full", "", {})],
    "method=snapkv+think ratio=0.4": [(TINY, "snapkv+think", "", {"ratio": 0.4})],
    "method=h2o+quant,h2o bits=3": [(TINY, "h2o+quant,h2o", "", {"bits": 3})],
    "method=think+snapkv": [(TINY, "think+snapkv", "", {})],
    "method=snapkv kv_size=64 method.snapkv.kv_ratio=null": [
        (TINY, "snapkv", "", {"kv_size": 64, "method.snapkv.kv_ratio": None}),
    ],
    "method=full,snapkv,snapkv+think kv_size=64,128 dataset=tiny/needle,tiny/code": [
        (TINY, "full,snapkv,snapkv+think", "tiny/needle,tiny/code", {"kv_size": [64, 128]}),
    ],
    "method=snapkv,streamingllm kv_ratio=0.5,0.25": [
        (TINY, "snapkv,streamingllm", "", {"kv_ratio": [0.5, 0.25]}),
    ],
    "method=snapkv frozen_layers=0": [(TINY, "snapkv", "", {"frozen_layers": [0]})],
    "method=snapkv frozen_layers=0,1": [(TINY, "snapkv", "", {"frozen_layers": [0, 1]})],
    "method=snapkv frozen_layers=[0,1]": [(TINY, "snapkv", "", {"frozen_layers": [0, 1]})],
    "method=snapkv frozen_layers=[],[0,1]": [(TINY, "snapkv", "", {"frozen_layers": [[], [0, 1]]})],
    "method=snapkv snapkv.window=16": [(TINY, "snapkv", "", {"method.snapkv.window": 16})],
    "per=kv_head,query_head": [(TINY, "", "", {"per": ["kv_head", "query_head"]})],
    "model=tiny dtype=bfloat16": [(TINY, "", "", {"model.dtype": "bfloat16"})],
    "model=../my/checkpoint": [({"model": "hf"}, "", "", {"model.path": "../my/checkpoint"})],
    "model=meta-llama/Llama-2-7b-hf download=true": [
        ({"model": "hf"}, "", "", {"model.path": "meta-llama/Llama-2-7b-hf", "model.download": True}),
    ],
    "model=hf model.path=x": [({"model": "hf"}, "", "", {"model.path": "x"})],
    "model=tiny,./other limit=2": [
        (TINY, "", "", {"limit": 2}),
        ({"model": "hf"}, "", "", {"model.path": "./other", "limit": 2}),
    ],
    "dataset=tiny length=512,1024": [(TINY, "", "tiny", {"dataset.tiny.length": [512, 1024]})],
    "dataset=needle haystack=/data/essays depths=0,50,100": [
        (TINY, "", "needle", {"dataset.needle.haystack": "/data/essays", "dataset.needle.depths": [0, 50, 100]}),
    ],
    "results=runs/a baseline=false": [(TINY, "", "", {"results": "runs/a", "baseline": False})],
    "shard=0": [(TINY, "", "", {"shard": 0})],
    "logger=wandb logger.mode=offline logger.group=think/2": [
        ({**TINY, "logger": "wandb"}, "", "", {"logger.mode": "offline", "logger.group": "think/2"}),
    ],
    "preset=think method=snapkv,think kv_size=64 window=16 per=kv_head": [
        (
            {**TINY, "prompt": "think"},
            "snapkv,think",
            "",
            {"kv_size": 64, "window": 16, "per": "kv_head"},
        ),
    ],
    "preset=vatp method=h2o+vatp model=vicuna-7b-v1.5-16k,tiny": [
        ({"model": "vicuna-7b-v1.5-16k", "prompt": "vatp"}, "h2o+vatp", "", {}),
        ({"model": "tiny", "prompt": "plain"}, "h2o+vatp", "", {}),
    ],
    "preset=vatp method=h2o kv_ratio=0.2 prompt=chat": [
        ({**TINY, "prompt": "chat"}, "h2o", "", {"kv_ratio": 0.2}),
    ],
    "method=snapkv,snapkv+think kv_size=64 match=true preset=think": [
        (
            {**TINY, "prompt": "think"},
            "snapkv,snapkv+think",
            "",
            {"kv_size": 64, "match": "nominal"},
        ),
    ],
}


@pytest.mark.parametrize("line", GOLDEN)
def test_golden(line):
    requests = words.read(line.split())
    for request, (groups, methods, tasks, values) in zip(requests, GOLDEN[line], strict=True):
        assert request.groups == groups and {**request.knobs, **request.values} == values
        assert (request.methods, request.tasks) == tuple(tuple(filter(None, x.split(","))) for x in (methods, tasks))
        composed = config.compose(request)
        for key, value in request.values.items():
            place = composed
            for part in key.split("."):
                place = place[part]
            assert place == value
        assert words.read(request.words) == (request,)


def entry(line, stage):
    (request,) = words.read(line.split())
    return config.compose_with_knobs(request)["method"][stage]


def test_knobs_are_those_typed_over_the_presets_over_the_plain_ones():
    plain = entry("method=snapkv", "snapkv")
    assert entry("method=snapkv kv_size=64", "snapkv") == {**plain, "kv_size": 64, "kv_ratio": None}
    h2o = entry("method=h2o", "h2o")
    vatp = {**h2o, "variant": "orig", "code_mask": True}
    halves = {"kv_ratio": None, "heavy_ratio": 0.25, "recent_ratio": 0.25}
    assert entry("preset=vatp method=h2o+vatp", "h2o") == {**vatp, **halves}
    assert entry("preset=vatp method=h2o kv_ratio=0.2", "h2o") == {**vatp, "kv_ratio": 0.2}
    assert entry("preset=vatp method=h2o+vatp model=vicuna-7b-v1.5-16k", "vatp")["sinks"] == 40
    assert entry("preset=vatp method=h2o+vatp", "vatp")["sinks"] == 20
    cake = (
        "preset=refreekv method=cake model=mistral-7b-instruct-v0.3 cake.gamma=1 window=8 kernel=1 decode_evict=false"
    )
    typed = {"gamma": 1, "window": 8, "kernel": 1, "decode_evict": False}
    by_size = {"tau1": {128: 1.0, 1024: 0.8}, "tau2": {128: 0.8, 1024: 0.5}}
    assert entry(cake, "cake") == {**entry("method=cake", "cake"), **typed, **by_size}


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"method": ["snapkv", "h2o"], "kv_size": [64, 128]}, "method=snapkv,h2o kv_size=64,128"),
        ({"method": "snapkv", "kv_size": [64]}, "method=snapkv kv_size=64"),
        ({"method": "snapkv", "limit": None, "baseline": False}, "method=snapkv limit=null baseline=false"),
        ({"method": "snapkv", "frozen_layers": [0, 1]}, "method=snapkv frozen_layers=0,1"),
        ({"method": "snapkv", "frozen_layers": [[0, 1], [2]]}, "method=snapkv frozen_layers=[0,1],[2]"),
        ({"method": "snapkv", "kv_ratio": "0.5,0.25"}, "method=snapkv kv_ratio=0.5,0.25"),
        ({"dataset": "file", "path": Path("a/b.jsonl")}, "dataset=file path=a/b.jsonl"),
    ],
)
def test_python_values_ask_for_the_run_that_texts_do(settings, line):
    (typed,) = words.read(line.split())
    asked = words.request(settings)
    assert (asked.methods, asked.tasks, asked.knobs, asked.values) == (
        typed.methods,
        typed.tasks,
        typed.knobs,
        typed.values,
    )
    assert [type(v) for v in asked.values.values()] == [type(v) for v in typed.values.values()]


def test_a_request_is_of_one_model():
    with pytest.raises(UsageError, match="model=a,b names several models"):
        words.request({"model": "a,b"})
    with pytest.raises(UsageError, match="model=tiny,llama2-7b names several models"):
        config.read(["method=full", "model=tiny,llama2-7b"])


def test_multirun_sweeps_shards_only():
    line = "shard=0,1,2 method=snapkv kv_size=64,128 hydra/launcher=submitit_local +hydra.launcher.x=1"
    sweep = ("shard=0,1,2", "shards=3", "hydra/launcher=submitit_local", "++hydra.launcher.x=1")
    (request,) = words.read(line.split(), multirun=True)
    assert request.sweep == sweep and request.words == ("method=snapkv", "kv_size=64,128")
    assert words.read(line.replace("shard=0,1,2", "shards=3").split(), multirun=True) == (request,)
    assert words.read(line.replace("+hydra.", "hydra.").split(), multirun=True) == (request,)


@pytest.mark.parametrize(
    "value", ["plain", "with space", "it's", "back\\slash", "trailing\\", "a=b", "a:b", "ümlaut", ""]
)
def test_texts_arrive_as_typed(value):
    assert config.read([f"results={value}"]).results == value if value else not value_of(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("64", 64),
        ("-3", -3),
        ("1_000", 1000),
        ("0.5", 0.5),
        (".5", 0.5),
        ("1e-3", 0.001),
        ("inf", float("inf")),
        ("null", None),
        ("True", True),
        ("false", False),
        ("[0,1]", [0, 1]),
        ("[]", []),
        ("[a, [1.5, null]]", ["a", [1.5, None]]),
        ("{128: 1.0, 1024: 0.8}", {128: 1.0, 1024: 0.8}),
        ("'12'", "12"),
        ('"a, b"', "a, b"),
        ("{{ messages }}", "{{ messages }}"),
        ("4k", "4k"),
        ("1.2.3", "1.2.3"),
    ],
)
def test_words_say_numbers_switches_lists_and_mappings(text, value):
    assert value_of(text) == value and type(value_of(text)) is type(value)


def test_split_list_minds_brackets_and_quotes():
    assert split_list("a,b+c") == ["a", "b+c"]
    assert split_list("[0,1],[2]") == ["[0,1]", "[2]"]
    assert split_list("'a,b',c") == ["'a,b'", "c"]


def test_same_knob_in_two_stages_of_one_chain_lists_the_full_keys():
    with pytest.raises(UsageError, match=r"method\.keynorm\.kv_size|twice|at most one"):
        config.read(["method=snapkv+keynorm", "kv_size=64"])


def test_grid_expands_to_one_chain_per_value_and_drops_axes_a_chain_does_not_own():
    run = words.read(["method=full,snapkv,snapkv+think", "kv_size=64,128", "ratio=0.3,0.5"])[0]
    labels = [c.label for c in config.parse(run).chains]
    assert labels == [
        "full",
        "snapkv kv_size=64",
        "snapkv kv_size=128",
        *(f"snapkv+think kv_size={s} ratio={r}" for s in (64, 128) for r in (0.3, 0.5)),
    ]


def labels(line):
    (overrides,) = words.read(line.split())
    return [c.label for c in config.parse(overrides).chains]


def test_an_alias_is_labelled_as_it_was_written_and_keeps_its_knob_in_a_grid_of_others():
    assert labels("method=h2o+quant") == ["h2o+quant kv_ratio=0.25"]
    assert labels("method=quant+h2o bits=3 per=query_head") == ["h2o+quant kv_ratio=0.25 bits=3 per=query_head"]
    assert labels("method=qhitter,h2o+quant lam=1") == ["qhitter kv_ratio=0.25 lam=1"]
    assert labels("method=h2o+quant,qhitter lam=1") == ["h2o+quant kv_ratio=0.25"]
    assert labels("method=h2o+quant,qhitter kv_size=64 lam=0.2,0.5") == [
        "h2o+quant kv_size=64",
        "qhitter kv_size=64 lam=0.2",
        "qhitter kv_size=64 lam=0.5",
    ]
    with pytest.raises(UsageError, match=r"lam=0\.5 is not possible: h2o\+quant is qhitter with lam=1"):
        config.read(["method=h2o+quant,h2o", "lam=0.5"])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("fidelity=true", "kl=true"),
        ("fidelity=false", "kl=false"),
        ("fidelity=300", "kl=true kl_tokens=300"),
        ("fidelity=300", "kl_tokens=300"),
        ("fidelity=through_cache", "kl_mode=through_cache"),
    ],
)
def test_the_old_key_fidelity_asks_for_the_same(old, new):
    (before,), (now,) = words.read(old.split()), words.read(new.split())
    assert before.values == now.values and config.parse(before) == config.parse(now)
    with pytest.raises(UsageError, match="old name of kl="):
        words.read([*old.split(), *new.split()])


def test_texts_of_the_comparison_are_as_long_as_before():
    from kvbench.store.fidelity import IDENTITY, fidelity_identity

    # ids of stored results hash these
    assert fidelity_identity(None) == {"tokens": 256, "revision": 1} == IDENTITY
    assert fidelity_identity(300) == {"tokens": 300, "revision": 1}

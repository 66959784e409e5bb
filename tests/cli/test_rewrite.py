"""Golden tests: what rewrite makes of good command lines, and that Hydra takes every result."""

import pytest

from kvbench.errors import UsageError
from kvbench.run import config
from kvbench.run.words import Command, quote, rewrite, split_list

SIZE = ("method.snapkv.kv_size=64", "method.snapkv.kv_ratio=null")
VATP = (
    "method=[h2o,vatp]",
    "chains=[h2o+vatp]",
    "preset.name=vatp",
    "prompt=vatp",
    "method.h2o.variant=orig",
    "method.h2o.kv_ratio=null",
    "method.h2o.heavy_ratio=0.25",
    "method.h2o.recent_ratio=0.25",
    "method.h2o.code_mask=true",
    "method.vatp.norm=l1",
)
GOLDEN = {
    "": [()],
    "limit=3": [("limit=3",)],
    "method=full": [("method=[full]", "chains=[full]")],
    "method=snapkv+think ratio=0.4": [
        ("method=[snapkv,think]", "chains=[snapkv+think]", "method.think.ratio=0.4"),
    ],
    "method=h2o+quant,h2o bits=3": [
        ("method=[qhitter,h2o]", "chains=[h2o+quant,h2o]", "method.qhitter.bits=3"),
    ],
    "method=think+snapkv": [("method=[think,snapkv]", "chains=[think+snapkv]")],
    "method=snapkv kv_size=64": [("method=[snapkv]", "chains=[snapkv]", *SIZE)],
    "method=snapkv kv_size=64 method.snapkv.kv_ratio=null": [
        ("method=[snapkv]", "chains=[snapkv]", "method.snapkv.kv_size=64", "method.snapkv.kv_ratio=null"),
    ],
    "method=full,snapkv,snapkv+think kv_size=64,128 dataset=tiny/needle,tiny/code": [
        (
            "method=[full,snapkv,think]",
            "chains=[full,snapkv,snapkv+think]",
            "dataset=[tiny]",
            "tasks=[tiny/needle,tiny/code]",
            "method.snapkv.kv_size=[64,128]",
            "method.snapkv.kv_ratio=null",
        ),
    ],
    "method=snapkv,streamingllm kv_ratio=0.5,0.25": [
        (
            "method=[snapkv,streamingllm]",
            "chains=[snapkv,streamingllm]",
            "method.snapkv.kv_ratio=[0.5,0.25]",
            "method.streamingllm.kv_ratio=[0.5,0.25]",
        ),
    ],
    "method=snapkv frozen_layers=0,1": [
        ("method=[snapkv]", "chains=[snapkv]", "method.snapkv.frozen_layers=[0,1]"),
    ],
    "method=snapkv frozen_layers=[0,1]": [
        ("method=[snapkv]", "chains=[snapkv]", "method.snapkv.frozen_layers=[0,1]"),
    ],
    "method=snapkv frozen_layers=[],[0,1]": [
        ("method=[snapkv]", "chains=[snapkv]", "method.snapkv.frozen_layers=[[],[0,1]]"),
    ],
    "method=snapkv snapkv.window=16": [("method=[snapkv]", "chains=[snapkv]", "method.snapkv.window=16")],
    "per=kv_head,query_head": [("per=[kv_head,query_head]",)],
    "model=tiny dtype=bfloat16": [("model=tiny", "model.dtype=bfloat16")],
    "model=../my/checkpoint": [("model=hf", "model.path=../my/checkpoint")],
    "model=meta-llama/Llama-2-7b-hf download=true": [
        ("model=hf", "model.path=meta-llama/Llama-2-7b-hf", "model.download=true"),
    ],
    "model=hf model.path=x": [("model=hf", "model.path=x")],
    "model=tiny,./other limit=2": [
        ("model=tiny", "limit=2"),
        ("model=hf", "model.path=./other", "limit=2"),
    ],
    "dataset=tiny length=512,1024": [("dataset=[tiny]", "tasks=[tiny]", "dataset.tiny.length=[512,1024]")],
    "dataset=needle haystack=/data/essays depths=0,50,100": [
        (
            "dataset=[needle]",
            "tasks=[needle]",
            "dataset.needle.haystack=/data/essays",
            "dataset.needle.depths=[0,50,100]",
        ),
    ],
    "results=runs/a baseline=false": [("results=runs/a", "baseline=false")],
    "shard=0": [("shard=0",)],
    "logger=wandb logger.mode=offline logger.group=think/2": [
        ("logger=wandb", "logger.mode=offline", "logger.group=think/2"),
    ],
    "preset=think method=snapkv,think kv_size=64 window=16 per=kv_head": [
        (
            "method=[snapkv,think]",
            "chains=[snapkv,think]",
            *SIZE,
            "method.snapkv.window=16",
            "per=kv_head",
            "preset.name=think",
            "prompt=think",
            "method.snapkv.kernel=7",
            "method.snapkv.pooling=max",
            "method.think.ratio=0.4",
            "method.think.recent=32",
            "method.think.observed=32",
            "method.think.rounding=code",
        ),
    ],
    "preset=vatp method=h2o+vatp model=vicuna-7b-v1.5-16k,tiny": [
        ("model=vicuna-7b-v1.5-16k", *VATP, "method.vatp.sinks=40"),
        ("model=tiny", *(o.replace("prompt=vatp", "prompt=plain") for o in VATP), "method.vatp.sinks=20"),
    ],
    "preset=vatp method=h2o kv_ratio=0.2 prompt=chat": [
        (
            "prompt=chat",
            "method=[h2o]",
            "chains=[h2o]",
            "method.h2o.kv_ratio=0.2",
            "preset.name=vatp",
            "method.h2o.variant=orig",
            "method.h2o.code_mask=true",
        ),
    ],
    "preset=refreekv method=cake model=mistral-7b-instruct-v0.3 cake.gamma=1 window=8 kernel=1 decode_evict=false": [
        (
            "model=mistral-7b-instruct-v0.3",
            "method=[cake]",
            "chains=[cake]",
            "method.cake.gamma=1",
            "method.cake.window=8",
            "method.cake.kernel=1",
            "method.cake.decode_evict=false",
            "preset.name=refreekv",
            "prompt=refreekv",
            "per=query_head",
            "method.cake.tau1={128:1.0,1024:0.8}",
            "method.cake.tau2={128:0.8,1024:0.5}",
        ),
    ],
    "preset=refreekv method=twilight": [
        (
            "method=[twilight]",
            "chains=[twilight]",
            "preset.name=refreekv",
            "prompt=plain",
            "per=query_head",
            "method.twilight.p=0.85",
            "method.twilight.bits=4",
            "method.twilight.exempt_layers=[0,1]",
        ),
    ],
}


@pytest.mark.parametrize("line", GOLDEN)
def test_golden(line):
    command = rewrite(line.split())
    assert command == Command(tuple(tuple(r) for r in GOLDEN[line]))
    for overrides in command.runs:
        config.compose_config(overrides)


def test_multirun_sweeps_shards_only():
    line = "shard=0,1,2 method=snapkv kv_size=64,128 hydra/launcher=submitit_local +hydra.launcher.x=1"
    overrides = (
        "method=[snapkv]",
        "chains=[snapkv]",
        "method.snapkv.kv_size=[64,128]",
        "method.snapkv.kv_ratio=null",
    )
    sweep = ("shard=0,1,2", "shards=3", "hydra/launcher=submitit_local", "++hydra.launcher.x=1")
    assert rewrite(line.split(), multirun=True) == Command((overrides,), sweep)
    assert rewrite(line.replace("shard=0,1,2", "shards=3").split(), multirun=True) == Command((overrides,), sweep)
    assert rewrite(line.replace("+hydra.", "hydra.").split(), multirun=True) == Command((overrides,), sweep)


@pytest.mark.parametrize(
    "value", ["plain", "with space", "it's", "back\\slash", "trailing\\", "a=b", "x,y", "${home}", ""]
)
def test_quoted_values_arrive_as_typed(value):
    cfg = config.compose_config([f"results={quote(value)}"])
    raw = cfg._get_node("results")._value()
    assert raw.replace("\\${", "${") == value or raw == value


def test_split_list_minds_brackets_and_quotes():
    assert split_list("a,b+c") == ["a", "b+c"]
    assert split_list("[0,1],[2]") == ["[0,1]", "[2]"]
    assert split_list("'a,b',c") == ["'a,b'", "c"]


def test_same_knob_in_two_stages_of_one_chain_lists_the_full_keys():
    with pytest.raises(UsageError, match=r"method\.keynorm\.kv_size|twice|at most one"):
        config.parse(config.compose_config(rewrite(["method=snapkv+keynorm", "kv_size=64"]).runs[0]))


def test_grid_expands_to_one_chain_per_value_and_drops_axes_a_chain_does_not_own():
    run = rewrite(["method=full,snapkv,snapkv+think", "kv_size=64,128", "ratio=0.3,0.5"]).runs[0]
    labels = [c.label for c in config.parse(config.compose_config(run)).chains]
    assert labels == [
        "full",
        "snapkv kv_size=64",
        "snapkv kv_size=128",
        *(f"snapkv+think kv_size={s} ratio={r}" for s in (64, 128) for r in (0.3, 0.5)),
    ]


def labels(line):
    (overrides,) = rewrite(line.split()).runs
    return [c.label for c in config.parse(config.compose_config(overrides)).chains]


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
        rewrite(["method=h2o+quant,h2o", "lam=0.5"])

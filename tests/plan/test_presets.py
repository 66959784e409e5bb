"""Presets: every value has a source and fits its method, what is typed wins, and runs and caches follow them."""

import json
import re

import pytest
from support.families import build, prompt

import kvbench
from kvbench.base.conf import conf_dir, entries
from kvbench.base.errors import UsageError
from kvbench.cli.main import main
from kvbench.cli.verbs import VERBS
from kvbench.methods.core import registry
from kvbench.plan import config, presets, words
from kvbench.plan.equal_memory import KINDS

pytestmark = pytest.mark.e2e("composes every preset for every model")

PAPERS = ("kvpress", "qhitter", "refreekv", "think", "uncomp", "vatp")
CHAINS = {
    "kvpress": (
        "snapkv",
        "adakv",
        "streamingllm",
        "keynorm",
        "random",
        "expectedattention",
        "keydiff",
        "chunkkv",
        "kvzip",
    ),
    "qhitter": ("full", "h2o", "qhitter", "streamingllm"),
    "refreekv": ("refreekv", "h2o", "snapkv", "pyramidkv", "streamingllm", "cake", "twilight"),
    "think": ("h2o", "snapkv", "h2o+think", "snapkv+think", "think", "snapkv+thinkv", "h2o+l1", "snapkv+l2"),
    "uncomp": ("uncomp-group", "h2o", "snapkv", "pyramidkv", "uncomp-stage", "chai"),
    "vatp": ("h2o", "h2o+vatp", "scissorhands", "scissorhands+vatp", "streamingllm"),
}


LEADERBOARD = [0.75, 0.5, 0.25, 0.125]
"""The budgets of kvpress's leaderboard, of which a preset runs all."""


def parsed(line):
    (overrides,) = words.read(line.split())
    return config.parse(overrides)


def knobs(line, stage):
    """The settled knobs of the stages ``stage`` of a run, one dict per chain that has one."""
    return [s.knobs() for c in parsed(line).chains for s in c.chain.stages if s.id == stage]


def test_the_presets_are_those_of_the_five_papers_and_of_kvpresss_leaderboard():
    assert presets.available() == PAPERS == tuple(CHAINS)


@pytest.mark.parametrize("name", PAPERS)
def test_every_value_stands_on_a_line_with_its_source(name):
    text = (conf_dir() / "preset" / f"{name}.yaml").read_text(encoding="utf-8")
    body = [line for line in text.splitlines() if line and not line.startswith("#")]
    valued = [line for line in body if not re.fullmatch(r"\s*[\w.-]+:", line)]
    assert len(valued) == len(presets.settings(name)) > 0
    for line in valued:
        assert re.fullmatch(r" *[\w]+: \S.*? +# \S.{5,}", line), line
    assert all(len(s.source) > 5 for s in presets.settings(name))
    assert text.startswith("# ") and presets.about(name)


@pytest.mark.parametrize("name", PAPERS)
def test_every_key_is_a_knob_a_prompt_policy_or_heads(name):
    for s in presets.settings(name):
        assert s.model == "" or s.model in entries("model"), s
        if s.key == "prompt":
            assert s.value in entries("prompt")
        elif s.key == "per":
            assert s.value in ("kv_head", "query_head")
        elif s.key == "match":
            assert s.value in KINDS
        else:
            group, method, knob = s.key.split(".")
            assert group == "method" and knob in registry.knob_names(method), s


@pytest.mark.parametrize("name", PAPERS)
def test_no_key_is_written_twice_for_one_model(name):
    keys = [(s.model, s.key) for s in presets.settings(name)]
    assert len(keys) == len(set(keys))


def composed():
    """Each preset with the models that it has values for and the default one, and each other model with one preset."""
    pairs = []
    for i, model in enumerate(m for m in entries("model") if m != "hf"):
        for j, name in enumerate(PAPERS):
            own = {s.model for s in presets.settings(name)} | {"tiny"}
            if model in own or i % len(PAPERS) == j:
                pairs.append((name, model))
    return pairs


@pytest.mark.parametrize(("name", "model"), composed())
def test_every_preset_composes_with_the_papers_methods_and_so_does_every_model(name, model):
    run = parsed(f"preset={name} model={model} method={','.join(CHAINS[name])}")
    wanted = presets.values(name, model)
    ratios = len(LEADERBOARD) if name == "kvpress" else 1
    assert run.preset == name and len(run.chains) == len(CHAINS[name]) * ratios
    assert run.prompt.name == wanted["prompt"]
    for chain in run.chains:
        assert chain.chain.per == wanted.get("per", "kv_head")
        for stage in chain.chain.stages:
            for knob, value in stage.knobs().items():
                requested = wanted.get(f"method.{stage.id}.{knob}")
                if knob == "kv_ratio" and requested == LEADERBOARD:
                    assert value in LEADERBOARD
                elif requested is not None and not isinstance(requested, dict):
                    assert value == (tuple(requested) if isinstance(requested, list) else requested), (stage.id, knob)


def test_a_preset_replaces_defaults_and_what_is_typed_replaces_it():
    assert knobs("method=snapkv", "snapkv")[0]["window"] == 32
    assert knobs("preset=refreekv method=snapkv", "snapkv")[0]["window"] == 8
    assert knobs("preset=refreekv method=snapkv window=5", "snapkv")[0]["window"] == 5
    assert knobs("preset=refreekv method=snapkv method.snapkv.window=5", "snapkv")[0]["window"] == 5
    assert [k["window"] for k in knobs("preset=refreekv method=snapkv window=5,9", "snapkv")] == [5, 9]
    run = parsed("preset=refreekv method=snapkv snapkv.window=5 per=kv_head prompt=think max_length=99")
    assert (run.prompt.name, run.prompt.max_length) == ("think", 99)
    assert [c.chain.per for c in run.chains] == ["kv_head"]


def test_a_typed_budget_replaces_the_presets():
    (half,) = parsed("preset=vatp method=h2o").chains
    assert half.chain.stages[0].parts(1003) == (250, 250)
    (typed,) = parsed("preset=vatp method=h2o kv_size=100").chains
    assert typed.chain.stages[0].parts(1003) == (50, 50)
    assert typed.chain.stages[0].variant == "orig"
    (scissors,) = knobs("preset=vatp method=scissorhands kv_ratio=0.1", "scissorhands")
    assert (scissors["kv_ratio"], scissors["half_ratio"], scissors["window"]) == (0.1, None, 400)
    both = "preset=vatp method=streamingllm,h2o streamingllm.kv_size=64"
    (streaming,), (other,) = knobs(both, "streamingllm"), knobs(both, "h2o")
    assert (streaming["kv_size"], streaming["kv_ratio"], other["heavy_ratio"]) == (64, None, 0.25)


def test_qhitters_scripts_keep_a_fifth_and_alias_values():
    (both,) = words.read(["preset=qhitter", "method=qhitter,h2o+quant,h2o"])
    hitter, quantised, exact = (c.chain.stages[0] for c in config.parse(both).chains)
    assert hitter.parts(1000) == quantised.parts(1000) == (70, 79, 50) and exact.parts(1000) == (150, 50)
    assert (hitter.lam, quantised.lam) == (0.5, 1)
    assert hitter.v_alias and quantised.v_alias and hitter.prefill_key == quantised.prefill_key != ""
    (typed,) = parsed("preset=qhitter method=h2o+quant kv_size=100 bits=3").chains
    assert typed.chain.stages[0].parts(1000) == (35, 40, 25) and typed.chain.stages[0].bits == 3


def test_the_preset_is_no_part_of_the_identity():
    typed = "method=h2o variant=win window=32 per=query_head kv_size=64"
    with_preset = parsed("preset=think method=h2o kv_size=64").chains[0].chain
    assert with_preset.identity() == parsed(typed).chains[0].chain.identity()


def test_vatp_keeps_as_many_first_tokens_as_the_model_has_in_the_paper():
    for model, sinks in (("llama2-7b-chat", 20), ("vicuna-7b-v1.5-16k", 40), ("llama3-8b-instruct", 20), ("./x", 20)):
        line = f"preset=vatp model={model} method=h2o+vatp,streamingllm"
        assert knobs(line, "vatp")[0]["sinks"] == knobs(line, "streamingllm")[0]["sinks"] == sinks
    assert knobs("preset=vatp model=vicuna-7b-v1.5-16k method=h2o+vatp sinks=7", "vatp")[0]["sinks"] == 7


def test_each_models_own_values_hold_in_a_run_of_several():
    runs = words.read(["preset=refreekv", "method=twilight", "model=llama3-8b-instruct,mistral-7b-instruct-v0.3"])
    actual = [config.parse(r).chains[0].chain.stages[0].p for r in runs]
    assert actual == [0.95, 0.85]


@pytest.mark.parametrize(
    ("budget", "taus"),
    [
        ("kv_size=128", [(1.0, 0.8)]),
        ("kv_size=362", [(1.0, 0.8)]),
        ("kv_size=363", [(0.8, 0.5)]),
        ("kv_size=64,4096", [(1.0, 0.8), (0.8, 0.5)]),
        ("kv_ratio=0.2", [(0.8, 0.5)]),
        ("kv_size=128 tau1=3", [(3, 0.8)]),
    ],
)
def test_cakes_temperatures_are_those_of_the_nearest_budget(budget, taus):
    line = f"preset=refreekv method=cake model=mistral-7b-instruct-v0.3 {budget}"
    assert [(k["tau1"], k["tau2"]) for k in knobs(line, "cake")] == taus
    assert [c.label for c in parsed(f"{line} per=kv_head").chains if "{" in c.label] == []
    assert {k["tau2"] for k in knobs(f"preset=refreekv method=cake {budget}", "cake")} == {1.0}


def test_caches_of_the_python_interface_follow_a_preset():
    model, ids = build("llama"), prompt(90, 1)
    (preset, typed, wide) = kvbench.prefill(
        model, ids, ["h2o", {"method": "h2o", "window": 3}, {"method": "h2o", "per": "kv_head"}], preset="refreekv",
        kv_size=20,
    )  # fmt: skip
    knobs = [c.chain.stages[0].knobs() for c in (preset, typed, wide)]
    assert [(k["variant"], k["window"]) for k in knobs] == [("win", 8), ("win", 3), ("win", 8)]
    assert [c.chain.per for c in (preset, typed, wide)] == ["query_head", "query_head", "kv_head"]
    (same,) = kvbench.prefill(model, ids, ["h2o"], kv_size=20, variant="win", window=8, per="query_head")
    assert [p.tolist() for p in preset.layers[0].kept_positions()] == [
        p.tolist() for p in same.layers[0].kept_positions()
    ]


def test_the_python_interface_finds_a_models_own_values_by_its_hub_id(monkeypatch):
    model, ids = build("llama"), prompt(90, 1)
    entry = {"method": "h2o+vatp"}
    (plain,) = kvbench.prefill(model, ids, [entry], preset="vatp")
    monkeypatch.setattr(model.config, "_name_or_path", "lmsys/vicuna-7b-v1.5-16k")
    (vicuna,) = kvbench.prefill(model, ids, [entry], preset="vatp")
    (typed,) = kvbench.prefill(model, ids, [entry], preset="vatp", sinks=1, kv_size=30)
    assert [c.chain.stages[1].sinks for c in (plain, vicuna, typed)] == [20, 40, 1]
    assert [c.chain.stages[0].parts(90) for c in (vicuna, typed)] == [(22, 22), (15, 15)]


def test_errors_of_the_python_interface_name_the_preset_where_it_is_to_blame():
    model, ids = build("llama"), prompt(30, 1)
    with pytest.raises(UsageError, match=r"heavy_ratio=0\.25 is not possible.*preset=vatp sets it"):
        kvbench.prefill(model, ids, ["h2o"], preset="vatp", variant="all")
    with pytest.raises(UsageError, match=r"unknown preset vapt\. Did you mean vatp"):
        kvbench.prefill(model, ids, ["h2o"], preset="vapt")
    with pytest.raises(UsageError) as error:
        kvbench.prefill(model, ids, ["snapkw"], preset="vatp")
    assert "preset" not in str(error.value)


def test_plan_run_and_show_take_a_preset(tmp_path, capsys):
    line = ["preset=think", "method=snapkv+think,tova", "kv_size=128", "limit=1", "dataset=tiny/needle", "length=256"]
    line.append(f"results={tmp_path}")
    assert main(["run", *line, "--plan"]) == 0
    out = capsys.readouterr().out
    assert "preset think" in out and "snapkv+think kv_size=128 ratio=0.4 per=query_head" in out
    assert main(["show", *line]) == 0
    assert "nothing measured yet for " in capsys.readouterr().out
    assert main(["run", *line]) == 0
    assert "preset think (sets nothing of tova); dataset" in capsys.readouterr().out
    assert main(["show", *line, "--format", "md"]) == 0
    shown = capsys.readouterr().out
    assert "| snapkv+think kv_size=128 ratio=0.4 per=query_head |" in shown and "preset think" in shown


def test_list_shows_what_each_preset_sets_and_why(capsys):
    assert main(["list", "presets"]) == 0
    out = capsys.readouterr().out
    for name in PAPERS:
        assert re.search(rf"^  {name} ", out, re.MULTILINE)
        for s in presets.settings(name):
            assert f"{s.key.removeprefix('method.')}=" in out
    assert "vatp.sinks=40" in out and "(vicuna-7b-v1.5-16k only)" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 100
    assert main(["list", "presets", "--json"]) == 0
    listed = {p["id"]: p for p in json.loads(capsys.readouterr().out)["presets"]}
    assert {"key": "prompt", "value": "vatp", "source": presets.settings("vatp")[0].source, "model": ""} in listed[
        "vatp"
    ]["settings"]
    assert main(["list"]) == 0
    assert "snapkv.kernel=7" not in capsys.readouterr().out


def test_the_help_of_run_has_an_example_with_a_preset_that_composes():
    (example,) = re.findall(r"kvbench run (preset=[^#]*)", VERBS["run"]["help"])
    assert parsed(example).preset == "think"
    assert all(name in VERBS["run"]["help"] for name in PAPERS)


def test_kvpresss_budgets_are_what_its_rounding_keeps():
    """C6: a share removed of .25, .5, .75, .875 keeps int(n * (1 - r)) of n tokens."""
    chains = [c.chain for c in parsed("preset=kvpress method=snapkv").chains]
    for removed, chain in zip((0.25, 0.5, 0.75, 0.875), chains, strict=True):
        assert all(chain.nominal(n) == int(n * (1 - removed)) for n in (520, 1000, 3937, 4096))
    (typed,) = parsed("preset=kvpress method=snapkv kv_size=64 window=32").chains
    assert typed.chain.stages[0].kv_size == 64 and typed.chain.stages[0].pooling == "avg"

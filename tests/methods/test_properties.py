"""What must hold for every registered method and for chains of them: the matrix finds new methods by itself.

A new selector, pruner, modifier or quantiser is also tested in one composition. If ``neutral`` fails for it, say in
NEUTRAL which value of which knob switches it off.
"""

import inspect
import re
from dataclasses import MISSING, dataclass, fields
from functools import cache
from inspect import signature
from itertools import count
from typing import ClassVar

import method_reference as ref
import pytest
import torch
import yaml
from calibrations import bound, ready
from families import FAMILIES, WHOLE, build, heads_of, hooks, prompt
from grids import grid
from passthrough import quantisers_pass_through

import kvbench
from kvbench.audit.prompt_audit import audit
from kvbench.conf import conf_dir
from kvbench.methods import registry
from kvbench.methods.base import Selector
from kvbench.methods.chain import Chain
from kvbench.methods.formats import StorageFormat
from kvbench.methods.knobs import is_knob
from kvbench.methods.replaying import ReplayingSelector
from kvbench.methods.resolve import chain_of

METHODS = tuple(m for m in registry.available() if m != "full")
STAGES = {m: registry.make_stage(m, registry.defaults(m)) for m in METHODS}
PARTNERS = {
    "hidden": "{}+snapkv",
    "selector": "{}+think",
    "modifier": "h2o+{}",
    "prune": "snapkv+{}",
    "quantise": "snapkv+{}",
    "mask": "snapkv+{}",
    "lowrank": "snapkv+{}",
}


def chained(method):
    """Tell whether the method is also tested beside another: not if it packs all tokens or stands alone."""
    # formats of single tokens share all code but their codecs: one stands for them
    same_code = isinstance(STAGES[method], StorageFormat) and method != "turboquant"
    return not getattr(STAGES[method], "packs", False) and STAGES[method].role != "share" and not same_code


CHAINS = tuple(
    dict.fromkeys(
        [
            *(m for m in METHODS if STAGES[m].role != "modifier"),
            *(PARTNERS[STAGES[m].role].format(m) for m in METHODS if chained(m)),
            "streamingllm+l2",
            "keynorm+l1",
            "think+kivi",
            "thinkv+kivi",
            "snapkv+think+kivi",
            "adakv+think+flexgen",
            "adakv+kivi",
            "refreekv+kivi",
            "twilight+flexgen",
            "tova+flexgen",
            "twilight+palu",
            "refreekv+palu",
            "h2o+vatp+asvd",
            "uncomp-stage+h2o+think+kivi",
            "uncomp-stage+uncomp-group",
            "uncomp-stage+palu",
            "uncomp-stage+snapkv+asvd",
            "uncomp-stage+twilight+palu",
        ]
    )
)
PER = ("kv_head", "query_head")

SMALL = {"kv_size": 24, "window": 8, "recent": 6, "observed": 8, "ratio": 0.4, "T": 0.6, "group": 4, "residual": 8}
SMALL = {**SMALL, "multiple": 4, "probes": 1, "share": 0.5}
NEUTRAL = {
    "kv_size": 10_000,
    "ratio": 0.0,
    "value_ratio": 0.0,
    "T": 0.0,
    "p": 1.0,
    "least": 1.0,
    "share": 1.0,
    "group": 4,
}
PROMPTS = ((70, 1), (47, 2))


def prompts_of(family):
    """The prompts of a family as (tokens, seed): both on Llama, one elsewhere."""
    return PROMPTS if family == "llama" else PROMPTS[FAMILIES.index(family) % 2 :][:1]


NEW = 6


def configured(chain, values, **more):
    """An entry of ``chain`` with every knob of ``values`` that one of its stages owns, by its full key."""
    own_knobs = {f"{m}.{k}": v for m in chain.split("+") for k, v in values.items() if k in registry.knob_names(m)}
    return {"method": chain, **own_knobs, **more}


def neutral(chain):
    """An entry of ``chain`` under which it must change nothing, where quantisers pass through."""
    for m in chain.split("+"):
        assert STAGES[m].role in ("modifier", "quantise") or set(NEUTRAL) & set(registry.knob_names(m)), (
            f"{m} in NEUTRAL?"
        )
    return configured(chain, NEUTRAL)


def uniform(chain):
    """Tell whether the chain promises the same number of tokens in every layer and head."""
    s = chain.selector
    return (
        not chain.hidden
        and isinstance(s, Selector)
        and (type(s).expected, type(s).budget) == (Selector.expected, Selector.budget)
    )


REFUSES = {
    "opt": ("rotates",),
    "qwen3": ("lowrank",),
    "qwen3_moe": ("lowrank",),
    "phi3": ("lowrank",),
    "smollm3": ("lowrank", "rotates"),
    "gemma2": ("lowrank", "hidden", "rotates", "replays"),
    "gemma3_text": ("lowrank", "hidden", "rotates", "replays"),
}
"""Roles of stages that a family refuses, ``rotates`` and ``replays`` (reasons: tests/model/test_capabilities.py)."""


def supported(chain, family):
    stages = [STAGES[m] for m in chain.split("+")]
    refuses = REFUSES.get(family, ())
    return not any(
        s.role in refuses
        or (s.rotates and "rotates" in refuses)
        or (isinstance(s, ReplayingSelector) and "replays" in refuses)
        for s in stages
    )


def prefill(model, ids, entries, per="kv_head"):
    """Run ``kvbench.prefill`` with random calibrations bound to the methods that need one."""
    return kvbench.prefill(model, ids, [ready(model, e, per) for e in entries])


def channels_of(segment):
    return segment.key_channels, segment.value_channels


def held(cache):
    """Everything that a chain chose: positions and channels of every layer and head."""
    return [
        (ref.kept(layer), [None if c is None else c.tolist() for s in layer.segments for c in channels_of(s)])
        for layer in cache.layers
    ]


@cache
def full(family, n, seed):
    (cache,) = prefill(build(family), prompt(n, seed), ["full"])
    return cache, kvbench.generate(build(family), [cache], NEW)[0]


@cache
def full_logits(family, n, seed):
    """Return the full cache's logits after two more tokens."""
    return kvbench.extend(build(family), full(family, n, seed)[0], prompt(2, 8)).logits


@cache
def together(family, per):
    """Run all chains on all prompts: one prefill per prompt, one batch for all answers -> {(chain, prompt): ...}."""
    model, caches = build(family), {}
    chains = [c for c in CHAINS if supported(c, family)]
    for p in prompts_of(family):
        small = prefill(model, prompt(*p), [configured(c, SMALL) for c in chains], per=per)
        caches.update({(c, p): m for c, m in zip(chains, small, strict=True)})
    answers = kvbench.generate(model, list(caches.values()), NEW)
    return {key: (cache, answer) for (key, cache), answer in zip(caches.items(), answers, strict=True)}


def kinds(family, chain):
    """The kinds of ``per`` under which a chain meets a family: both on Llama, one elsewhere."""
    i, j = FAMILIES.index(family), CHAINS.index(chain)
    # a chain meets both kinds, and so does each family of WHOLE
    return PER if family == "llama" else (PER[(i + j if family in WHOLE else i) % 2],)


def meets(law, chain, family):
    """Tell whether a law of the matrix is tried on a chain and a family: later families have each third chain.

    Which third moves on with the law, and all of them have the first law, so that every pair meets.
    """
    rotating = family in WHOLE or law == 0 or (law + CHAINS.index(chain) + FAMILIES.index(family)) % 3 == 0
    return supported(chain, family) and rotating


LAWS = count()
BEYOND = pytest.mark.e2e("the matrix beyond Llama")


def matrix(test):
    """Run a test of (family, chain, per) once a chain on Llama, and once on all other families."""
    beyond = pytest.param(False, id="beyond", marks=BEYOND)

    law = next(LAWS)

    @pytest.mark.parametrize("chain", CHAINS)
    @pytest.mark.parametrize("llama", [pytest.param(True, id="llama"), beyond])
    def each(chain, llama, **fixtures):
        families = [f for f in FAMILIES if (f == "llama") == llama and meets(law, chain, f)]
        cases = [(f, per) for f in families for per in kinds(f, chain)]
        grid(("family", "per"), cases)(test)(chain=chain, **fixtures)

    fixtures = [p for p in signature(test).parameters.values() if p.name not in ("family", "per", "chain")]
    each.__signature__ = signature(each).replace(parameters=[*list(signature(each).parameters.values())[:2], *fixtures])
    each.__name__ = test.__name__
    return each


per_heads = pytest.mark.parametrize("per", PER)


# spec 5, all evictors: budget >= n + new tokens gives the logits of the full cache
@matrix
def test_neutral_settings_answer_as_the_full_cache(family, chain, per):
    model = build(family)
    for n, seed in prompts_of(family):
        with quantisers_pass_through():
            (cache,) = prefill(model, prompt(n, seed), [neutral(chain)], per=per)
            assert kvbench.generate(model, [cache], NEW) == [full(family, n, seed)[1]]
            logits = kvbench.extend(model, cache, prompt(2, 8)).logits
        torch.testing.assert_close(logits, full_logits(family, n, seed), atol=1e-4, rtol=1e-4)


@matrix
def test_tokens_kept_are_those_declared_and_the_audit_passes(family, chain, per):
    model = build(family)
    for p in prompts_of(family):
        built, _ = together(family, per)[chain, p]
        measured = audit(built, *heads_of(model), model.dtype)
        heads = built.chain.heads(heads_of(model)[0], model.config.num_attention_heads)
        for i, layer in enumerate(built.layers):
            declared = built.chain.expected(p[0], i, len(built.layers), heads)
            counts = [len(positions) for positions in ref.kept(layer)]
            assert all(a <= c <= b for a, c, b in zip(declared.low, counts, declared.high, strict=True))
            if uniform(built.chain):
                assert counts == [SMALL["kv_size"]] * heads
            for positions in ref.kept(layer):
                assert positions == sorted(set(positions)) and positions[0] >= 0 and positions[-1] < p[0]
        assert measured.payload + measured.overhead == built.nbytes()
        if per == "kv_head" and STAGES[chain.split("+")[0]].role in ("hidden", "selector", "prune"):
            assert measured.payload < measured.full_bytes


@matrix
def test_company_in_prefill_and_batch_changes_nothing(family, chain, per):
    model = build(family)
    for p in prompts_of(family):
        shared, answer = together(family, per)[chain, p]
        (arguments,) = prefill(model, prompt(*p), [configured(chain, SMALL)], per=per)
        assert held(arguments) == held(shared)
        assert kvbench.generate(model, [arguments], NEW) == [answer]


# spec 5, all evictors: the first token is that of the full cache (G2)
@matrix
def test_the_first_token_is_that_of_the_full_cache_if_the_prefill_is_exact(family, chain, per):
    for p in prompts_of(family):
        built, answer = together(family, per)[chain, p]
        full_cache, whole_answer = full(family, *p)
        if built.chain.prefill_key == "":
            assert torch.equal(built.logits, full_cache.logits)
            assert answer[0] == whole_answer[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_small_budgets_do_change_answers(family):
    """Otherwise a model that ignores its cache would pass all of the above."""
    lossy = ("random", "streamingllm", "keynorm", "l2")
    for p in prompts_of(family):
        changed = [c for c in lossy if together(family, "kv_head")[c, p][1] != full(family, *p)[1]]
        assert len(changed) >= 3


# spec 5, all evictors: expanded = native when g=1
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("family", ["gpt_neox", "opt"])
def test_expanded_equals_native_without_grouped_heads(family, chain):
    if not supported(chain, family):
        pytest.skip("family not supported")
    for p in prompts_of(family):
        (native, a), (expanded, b) = (together(family, per)[chain, p] for per in PER)
        assert held(native) == held(expanded) and a == b
        assert native.nbytes() == expanded.nbytes()


@pytest.mark.parametrize("chain", [c for c in CHAINS if "frozen_layers" in registry.knob_names(c.split("+")[0])])
@per_heads
def test_frozen_layers_keep_every_token(chain, per):
    model, (n, seed) = build("llama"), PROMPTS[0]
    entry = configured(chain, {**SMALL, "frozen_layers": [0, 2]})
    (cache,) = prefill(model, prompt(n, seed), [entry], per=per)
    audit(cache, *heads_of(model), model.dtype)
    for i, layer in enumerate(cache.layers):
        for positions in ref.kept(layer):
            assert (positions == list(range(n))) == (i in (0, 2))


@pytest.mark.parametrize("chain", [c for c in CHAINS if not any(STAGES[m].adapts for m in c.split("+"))])
@per_heads
def test_bf16_statistics_are_deterministic_and_those_of_fp32(chain, per):
    q, k, v = (ref.grid(h, 60, 16, seed=h).bfloat16() for h in (4, 2, 2))
    calibrated = bound(chain_of(configured(chain, SMALL, per=per)), 2, 4)
    choices = []
    for convert in (torch.Tensor.bfloat16, torch.Tensor.bfloat16, torch.Tensor.float):
        dense, obs = ref.make_layer(convert(q), convert(k), convert(v), per=per, scale=0.3)
        compressed = calibrated.compress(dense, obs)
        choices.append((ref.kept(compressed), [c for s in compressed.segments for c in channels_of(s)]))
    for positions, channels in choices[1:]:
        assert positions == choices[0][0]
        for a, b in zip(channels, choices[0][1], strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("chain", ["full", *CHAINS])
@per_heads
def test_bytes_at_16_bits_are_those_that_a_bf16_run_holds(chain, per):
    """The tokens of the fp32 run in tensors of the dtypes of the bf16 run."""
    entry = configured(chain, SMALL)
    models = [build("llama", dtype) for dtype in (torch.float32, torch.bfloat16)]
    caches = [prefill(m, prompt(70), [entry], per=per)[0] for m in models]
    single, half = (audit(c, *heads_of(m), m.dtype) for c, m in zip(caches, models, strict=True))
    assert (half.payload16, half.overhead16, half.full16) == (half.payload, half.overhead, half.full_bytes)
    for which, held_bytes in (("payload", single.payload16), ("overhead", single.overhead16)):
        pairs = [
            (a, b)
            for one, other in zip(*(c.layers for c in caches), strict=True)
            for s, t in zip(one.segments, other.segments, strict=True)
            for a, b in zip(getattr(s, which)(), getattr(t, which)(), strict=True)
        ]
        copies = sum(2 * one.query_heads for one in caches[0].layers if one.copy_from is not None)
        assert held_bytes == sum(a.numel() * b.element_size() for a, b in pairs) + (which == "overhead") * copies


@pytest.fixture
def lossless():
    with quantisers_pass_through():
        yield


@matrix
def test_bf16_neutral_settings_stay_near_the_full_cache_when_teacher_forced(family, chain, per, lossless):
    model = build(family, torch.bfloat16)
    cache, full_cache = prefill(model, prompt(50, 3), [neutral(chain), "full"], per=per)
    for chunk in prompt(6, 4).split([1, 1, 4]):
        cache, full_cache = kvbench.extend(model, cache, chunk), kvbench.extend(model, full_cache, chunk)
        torch.testing.assert_close(cache.logits, full_cache.logits, atol=6e-2, rtol=3e-2)


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("setting", ["eager", "sdpa"])
def test_hooks_are_gone_and_the_attention_setting_is_back(chain, setting):
    model, before = build("llama"), build("llama").config._attn_implementation
    there = hooks(model)
    model.set_attn_implementation(setting)
    try:
        (cache,) = prefill(model, prompt(40), [configured(chain, SMALL)])
        kvbench.generate(model, [cache], 2)
        assert model.config._attn_implementation == setting
        assert hooks(model) == there
    finally:
        model.set_attn_implementation(before)


@dataclass(frozen=True, kw_only=True)
class Fails(Selector):
    id: ClassVar[str] = "fails"

    def compress(self, cache, obs):
        raise ArithmeticError("in the middle of a prefill")


@pytest.mark.parametrize("family", FAMILIES)
def test_hooks_go_even_if_a_method_fails_in_the_middle(family):
    model = build(family)
    before = model.config._attn_implementation, hooks(model)
    with pytest.raises(ArithmeticError):
        prefill(model, prompt(40), [Chain((Fails(kv_size=8),))])
    assert (model.config._attn_implementation, hooks(model)) == before


EXPLAINED = [m for m in METHODS if registry.path_of(m).suffix == ".yaml"]


@pytest.mark.parametrize("method", EXPLAINED)
def test_yaml_and_dataclass_have_the_same_knobs_and_defaults(method):
    inputs = registry.defaults(method)
    assert inputs["_target_"] == f"{type(STAGES[method]).__module__}.{type(STAGES[method]).__name__}"
    assert type(STAGES[method]).id == method
    knobs = [f for f in fields(STAGES[method]) if is_knob(f)]
    for f in knobs:
        default = f.default if f.default is not MISSING else f.default_factory()
        if f.name == "kv_ratio":  # None in the dataclass, so that kv_size can be given alone; it then means 0.25
            assert default is None and inputs[f.name] == 0.25
            assert type(STAGES[method])().capacity(1000).tokens == 250
        else:
            assert inputs[f.name] == (list(default) if isinstance(default, tuple) else default), f.name
    assert set(registry.knob_names(method)) == {f.name for f in knobs}


def test_no_knob_has_the_name_of_a_key_of_run():
    keys = {*yaml.safe_load((conf_dir() / "config.yaml").read_text(encoding="utf-8")), "method", "model", "dataset"}
    owned = {f"{m}.{knob}" for m in METHODS for knob in set(registry.knob_names(m)) & keys}
    assert owned == set(), "method.NAME.KNOB alone would reach them"


@pytest.mark.parametrize("method", EXPLAINED)
def test_yaml_explains_every_knob_on_its_line(method):
    text = (conf_dir() / "method" / f"{method}.yaml").read_text(encoding="utf-8")
    assert text.startswith("# ") and set(yaml.safe_load(text)) == {method}
    for knob in registry.knob_names(method):
        assert re.search(rf"^  {knob}: \S.*\s# \S", text, re.MULTILINE), knob


@pytest.mark.parametrize("method", METHODS)
def test_every_method_documents_its_knobs_and_its_source(method):
    cls = type(STAGES[method])
    assert not cls.__doc__.startswith(f"{cls.__name__}("), "the docstring is the one that dataclass makes up"
    text = f"{inspect.getmodule(cls).__doc__}\n{cls.__doc__}"
    assert re.search(r"arXiv \d{4}\.\d{5}|https://", text)
    documented = "\n".join(c.__doc__ or "" for c in cls.__mro__)
    for knob in () if method in EXPLAINED else registry.knob_names(method):
        assert re.search(rf"\b{knob}: ", documented), knob

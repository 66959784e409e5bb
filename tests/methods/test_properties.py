"""The laws of every registered method and of chains of them, on the matrix of ``tests/support/law_matrix.py``."""

import inspect
import re
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import ClassVar

import pytest
import torch
import yaml
from support import method_reference as ref
from support.calibrations import bound
from support.families import FAMILIES, WITH_LATENTS, WITH_SHARING, WITH_STATES, build, heads_of, hooks, prompt
from support.law_matrix import (
    CHAINS,
    COMPANY_LAW,
    FORCED_LAW,
    METHODS,
    NEUTRAL_LAW,
    PER,
    PROMPTS,
    SMALL,
    SMALL_LAWS,
    STAGES,
    UNGROUPED,
    channels_of,
    company,
    configured,
    forced_of,
    full,
    full_forced,
    full_logits,
    held,
    matrix,
    neutral_of,
    new_of,
    prefill,
    prompts_of,
    supported,
    together,
    uniform,
)

import kvbench
from kvbench.audit.prompt_audit import audit
from kvbench.base.conf import conf_dir
from kvbench.methods.core import registry
from kvbench.methods.core.base import Selector
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.knobs import is_knob
from kvbench.methods.core.resolve import chain_of
from kvbench.models.interface import cache_shape

per_heads = pytest.mark.parametrize("per", PER)


# spec 5, all evictors: budget >= n + new tokens gives the logits of the full cache
@matrix(NEUTRAL_LAW)
def test_neutral_settings_answer_as_the_full_cache(family, chain, per):
    results = neutral_of(family, company(NEUTRAL_LAW, family, chain))
    for p in prompts_of(family):
        answer, logits = results[chain, per, p]
        assert answer == full(family, *p)[1]
        torch.testing.assert_close(logits, full_logits(family, *p), atol=1e-4, rtol=1e-4)


@matrix(SMALL_LAWS)
def test_tokens_kept_are_those_declared_and_the_audit_passes(family, chain, per):
    model = build(family)
    for p in prompts_of(family):
        built, _ = together(family, per)[chain, p]
        measured = audit(built, cache_shape(model))
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


@matrix(COMPANY_LAW)
def test_company_in_prefill_and_batch_changes_nothing(family, chain, per):
    """Every prompt is read alone, and one is answered alone: on Llama another in each kind, elsewhere for one step."""
    model, prompts = build(family), prompts_of(family)
    new = new_of(family) if family == "llama" else 2
    for p in prompts:
        shared, answer = together(family, per)[chain, p]
        (alone,) = prefill(model, prompt(*p), [configured(chain, SMALL)], per=per)
        assert held(alone) == held(shared)
        if p == prompts[PER.index(per) % len(prompts)]:
            assert kvbench.generate(model, [alone], new) == [answer[:new]]


# spec 5, all evictors: the first token is that of the full cache (G2)
@matrix(SMALL_LAWS)
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
    # latents keep all of their channels
    fewer_channels = "keydiff" if family in WITH_LATENTS else "l2"
    model, lossy = build(family), ("random", "streamingllm", "keynorm", fewer_channels)
    for p in prompts_of(family):
        caches = prefill(model, prompt(*p), [configured(c, SMALL) for c in lossy])
        whole, *answers = kvbench.generate(model, [full(family, *p)[0], *caches], 8)
        assert sum(answer != whole for answer in answers) >= 3


# spec 5, all evictors: expanded = native when g=1
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("family", UNGROUPED)
def test_expanded_equals_native_without_grouped_heads(family, chain):
    if not supported(chain, family):
        pytest.skip("family not supported")
    for p in prompts_of(family):
        (native, a), (expanded, b) = (together(family, per)[chain, p] for per in PER)
        assert held(native) == held(expanded) and a == b
        assert native.nbytes() == expanded.nbytes()


@per_heads
def test_frozen_layers_keep_every_token(per):
    model, (n, seed) = build("llama"), PROMPTS[0]
    chains = [c for c in CHAINS if "frozen_layers" in registry.knob_names(c.split("+")[0])]
    entries = [configured(c, {**SMALL, "frozen_layers": [0, 2]}) for c in chains]
    for chain, frozen in zip(chains, prefill(model, prompt(n, seed), entries, per=per), strict=True):
        audit(frozen, cache_shape(model))
        for i, layer in enumerate(frozen.layers):
            for positions in ref.kept(layer):
                assert (positions == list(range(n))) == (i in (0, 2)), chain


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


@cache
def prefilled(dtype, per):
    """Return Llama's caches of all chains and the full one."""
    chains = ["full", *CHAINS]
    caches = prefill(build("llama", dtype), prompt(70), [configured(c, SMALL) for c in chains], per=per)
    return dict(zip(chains, caches, strict=True))


@pytest.mark.parametrize("chain", ["full", *CHAINS])
@per_heads
def test_bytes_at_16_bits_are_those_that_a_bf16_run_holds(chain, per):
    """The tokens of the fp32 run in tensors of the dtypes of the bf16 run."""
    dtypes = torch.float32, torch.bfloat16
    models, caches = [build("llama", dtype) for dtype in dtypes], [prefilled(dtype, per)[chain] for dtype in dtypes]
    single, half = (audit(c, cache_shape(m)) for c, m in zip(caches, models, strict=True))
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


@matrix(FORCED_LAW)
def test_bf16_neutral_settings_stay_near_the_full_cache_when_teacher_forced(family, chain, per):
    results = forced_of(family, company(FORCED_LAW, family, chain))
    for actual, expected in zip(results[chain, per], full_forced(family), strict=True):
        # a state adds up the roundings of all tokens before, and more layers those of more layers
        atol = 0.25 if family in WITH_STATES else 0.1 if family in WITH_SHARING else 6e-2
        torch.testing.assert_close(actual, expected, atol=atol, rtol=3e-2)


@pytest.mark.parametrize("setting", ["eager", "sdpa"])
def test_hooks_are_gone_and_the_attention_setting_is_back(setting):
    """One pass for all chains that compute the prompt alike, and one batch: what one leaves, no other takes away."""
    model, before = build("llama"), build("llama").config._attn_implementation
    there = hooks(model)
    model.set_attn_implementation(setting)
    try:
        caches = prefill(model, prompt(40), [configured(c, SMALL) for c in CHAINS])
        kvbench.generate(model, caches, 2)
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

"""The matrix of methods, chains, families and prompts on which every law is tried: new methods are found by themselves.

A new selector, pruner, modifier or quantiser is also tested in one composition. If ``neutral`` fails for it, say in
NEUTRAL which value of which knob switches it off.
"""

from functools import cache

import pytest
import torch
from support import method_reference as ref
from support.calibrations import ready
from support.families import FAMILIES, WHOLE, WITH_LATENTS, WITH_SHARING, build, prompt
from support.grids import grid
from support.passthrough import quantisers_pass_through

import kvbench
from kvbench.engine.decode import extend_caches
from kvbench.methods.core import registry
from kvbench.methods.core.base import Selector
from kvbench.methods.core.formats import StorageFormat
from kvbench.methods.core.replaying import ReplayingSelector

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
SMALL = {**SMALL, "multiple": 16, "probes": 1, "share": 0.5}
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
MEASURED = {knob: SMALL[knob] for knob in ("multiple", "probes")}
"""Knobs of calibrations: neutral chains have those of small ones, so that a model is measured once for both."""
PROMPTS = ((70, 1), (47, 2))


def prompts_of(family):
    """The prompts of a family as (tokens, seed): both on Llama, one elsewhere."""
    return PROMPTS if family == "llama" else PROMPTS[FAMILIES.index(family) % 2 :][:1]


def new_of(family):
    """The tokens of an answer: Llama's chains pack and evict behind more of them than show a family's own steps."""
    return 4 if family == "llama" else 3


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
    return configured(chain, {**NEUTRAL, **MEASURED})


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
    "cohere2": ("lowrank", "hidden", "rotates", "replays"),
    "exaone4": ("lowrank", "hidden", "rotates", "replays"),
    "olmo3": ("lowrank", "hidden", "rotates", "replays"),
    "gpt_oss": ("lowrank", "hidden", "rotates", "replays", "share", "uncapped"),
    "ernie4_5": ("lowrank", "rotates"),
    "glm4": ("lowrank", "rotates"),
    "minimax_m2": ("lowrank",),
    "olmo2": ("lowrank",),
    "bamba": ("hidden",),
    "falcon_h1": ("hidden",),
    "granitemoehybrid": ("hidden", "rotates"),
    "jamba": ("hidden", "rotates", "replays"),
    "lfm2": ("lowrank", "hidden"),
    "nemotron_h": ("hidden", "rotates"),
    "olmo_hybrid": ("lowrank", "hidden"),
    "qwen3_5_moe_text": ("lowrank", "hidden"),
    "qwen3_5_text": ("lowrank", "hidden"),
    "qwen3_next": ("lowrank", "hidden"),
    "llama4_text": ("lowrank", "hidden", "rotates", "replays"),
    **dict.fromkeys(WITH_SHARING, ("lowrank", "hidden", "rotates", "replays", "share")),
    **dict.fromkeys(WITH_LATENTS, ("lowrank", "rotates", "latents")),
    "kimi_linear": ("lowrank", "rotates", "latents", "hidden"),
    "longcat_flash": ("lowrank", "rotates", "latents", "hidden"),
}
"""Roles of stages that a family refuses, ``rotates`` and ``replays`` (reasons: tests/models/test_capabilities.py)."""


def supported(chain, family):
    stages = [STAGES[m] for m in chain.split("+")]
    refuses = REFUSES.get(family, ())
    return not any(
        s.role in refuses
        or (s.rotates and "rotates" in refuses)
        or (s.uncapped and "uncapped" in refuses)
        or (s.on_latents and "latents" in refuses)
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


def forced(model, caches):
    """Return each cache's logits after a token that is fed to it, and after four more at once."""
    logits = [[] for _ in caches]
    for chunk in prompt(5, 4).split([1, 4]):
        caches = extend_caches(model, caches, chunk)
        for of_cache, extended in zip(logits, caches, strict=True):
            of_cache.append(extended.logits)
    return logits


@cache
def full(family, n, seed):
    (cache,) = prefill(build(family), prompt(n, seed), ["full"])
    return cache, kvbench.generate(build(family), [cache], new_of(family))[0]


@cache
def full_logits(family, n, seed):
    """Return the full cache's logits after two more tokens."""
    return kvbench.extend(build(family), full(family, n, seed)[0], prompt(2, 8)).logits


@cache
def full_forced(family):
    """Return what ``forced`` has of the full cache in bf16."""
    model = build(family, torch.bfloat16)
    return forced(model, prefill(model, prompt(50, 3), ["full"]))[0]


FIRST = FAMILIES[: FAMILIES.index("arcee")]
"""Families on which every chain meets the first law."""


@cache
def one_of_each():
    """Return a chain of each role, one with as few stages as there is."""
    chains = {}
    for chain in sorted(CHAINS, key=lambda c: c.count("+")):
        for method in chain.split("+"):
            chains.setdefault(STAGES[method].role, chain)
    return frozenset(chains.values())


def kinds(family, chain):
    """The kinds of ``per`` under which a chain meets a family: both on Llama, one elsewhere."""
    i, j = FAMILIES.index(family), CHAINS.index(chain)
    if family in WITH_LATENTS:
        return PER[:1]  # all heads share one latent
    # a chain meets both kinds, and so does each family of WHOLE
    return PER if family == "llama" else (PER[(i + j if family in WHOLE else i) % 2],)


NEUTRAL_LAW, SMALL_LAWS, COMPANY_LAW, FORCED_LAW = (0, 3), (1, 3), (1, 6), (2, 3)
"""The share of chains that laws try on a family: those with number 0 of each 3, and so on.

Laws that read ``together`` share theirs, so that it holds no chain which none of them asks for. Beyond Llama every
chain still meets every family: in one of three laws.
"""


def meets(share, chain, family):
    """Tell whether a law of the matrix is tried on a chain and a family: all are on Llama, and a share elsewhere.

    Every family has a chain of each role in every law, and those of FIRST have all chains in the first law.
    """
    if not supported(chain, family):
        return False
    if family == "llama" or chain in one_of_each() or (share == NEUTRAL_LAW and family in FIRST):
        return True
    part, parts = share
    return (CHAINS.index(chain) + FAMILIES.index(family)) % parts == part


def tried(share, family, per):
    """Return the chains that a law tries on a family under a kind of ``per``."""
    return [c for c in CHAINS if meets(share, c, family) and per in kinds(family, c)]


UNGROUPED = ("gpt_neox", "opt")
"""Families without grouped heads: all their chains are held in both kinds, which must be the same."""


@cache
def together(family, per):
    """Run the chains of a family on all its prompts -> {(chain, prompt): (cache, answer)}.

    There is one prefill per prompt and one batch for all answers.
    """
    model, caches = build(family), {}
    chains = tried(SMALL_LAWS, family, per)
    if family in UNGROUPED:
        chains = [c for c in CHAINS if supported(c, family)]
    for p in prompts_of(family):
        small = prefill(model, prompt(*p), [configured(c, SMALL) for c in chains], per=per)
        caches.update({(c, p): m for c, m in zip(chains, small, strict=True)})
    answers = kvbench.generate(model, list(caches.values()), new_of(family))
    return {key: (cache, answer) for (key, cache), answer in zip(caches.items(), answers, strict=True)}


def company(share, family, chain):
    """Return the (chain, per) that a law runs beside a chain: itself in both kinds on Llama, elsewhere all it tries."""
    chains = (chain,) if family == "llama" else CHAINS
    return tuple((c, per) for c in chains if meets(share, c, family) for per in kinds(family, c))


@cache
def neutral_of(family, asked):
    """Run each (chain, per) under neutral settings -> {(chain, per, prompt): (answer, logits after two more tokens)}.

    There is one prefill per prompt and one batch for all answers.
    """
    model, caches = build(family), {}
    with quantisers_pass_through():
        for p in prompts_of(family):
            prefilled = prefill(model, prompt(*p), [{**neutral(c), "per": per} for c, per in asked])
            caches.update({(*key, p): cache for key, cache in zip(asked, prefilled, strict=True)})
        answers = kvbench.generate(model, list(caches.values()), new_of(family))
        logits = [c.logits for c in extend_caches(model, list(caches.values()), prompt(2, 8))]
    return {key: of_chain for key, *of_chain in zip(caches, answers, logits, strict=True)}


@cache
def forced_of(family, asked):
    """Return what ``forced`` has of each (chain, per) in bf16 under neutral settings -> {(chain, per): logits}."""
    model = build(family, torch.bfloat16)
    with quantisers_pass_through():
        caches = prefill(model, prompt(50, 3), [{**neutral(c), "per": per} for c, per in asked])
        return dict(zip(asked, forced(model, caches), strict=True))


BEYOND = pytest.mark.e2e("the matrix beyond Llama")


def matrix(share):
    """Run a test of (family, chain, per) once a chain on Llama, and once on all other families that it meets."""
    beyond = pytest.param(False, id="beyond", marks=BEYOND)

    def of_law(test):
        @pytest.mark.parametrize("chain", CHAINS)
        @pytest.mark.parametrize("llama", [pytest.param(True, id="llama"), beyond])
        def each(chain, llama):
            families = [f for f in FAMILIES if (f == "llama") == llama and meets(share, chain, f)]
            cases = [(f, per) for f in families for per in kinds(f, chain)]
            grid(("family", "per"), cases)(test)(chain=chain)

        each.__name__ = test.__name__
        return each

    return of_law

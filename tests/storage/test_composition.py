"""Which storage stages go together, as users write them; and what is stored where prompts are shorter than budgets."""

import itertools

import pytest
import torch
from support import method_reference as ref
from support.families import build, prompt
from support.grids import grid

import kvbench
from kvbench.audit.prompt_audit import audit
from kvbench.base.errors import UsageError
from kvbench.cli.main import main
from kvbench.kv.segment import storage_bytes
from kvbench.methods.core import registry
from kvbench.methods.core.resolve import chain_of
from kvbench.models.interface import cache_shape

SMALL = {"recent": 5, "observed": 8, "group": 4, "residual": 8}
PER = ("kv_head", "query_head")
TRIPLES = [
    (s, p, q)
    for s in ("snapkv", "adakv", "refreekv")
    for p in ("think", "thinkv", "l1", "l2")
    for q in ("kivi", "flexgen")
]


def entry(chain, values, **more):
    """An entry of ``chain`` with those of ``values`` that its stages own, by full key."""
    own_knobs = {f"{m}.{k}": v for m in chain.split("+") for k, v in values.items() if k in registry.knob_names(m)}
    return {"method": chain, **own_knobs, **more}


@pytest.mark.parametrize("stages", TRIPLES, ids="+".join)
def test_any_order_is_sorted_to_select_prune_quantise(stages):
    chains = [chain_of("+".join(order)) for order in itertools.permutations(stages)]
    assert all(c == chains[0] and c.name == "+".join(stages) for c in chains)
    assert len({str(c.identity()) for c in chains}) == 1
    masked = chain_of("+".join(("twilight", *stages)))
    assert [s.id for s in masked.stages] == [*stages, "twilight"]


REFUSED = {
    "kivi+flexgen": "each quantises the same values: a combination has at most one quantiser",
    "snapkv+think+flexgen+kivi": "combines flexgen and kivi, but each quantises",
    "think+thinkv": "each chooses which key channels stay: a combination has at most one",
    "thinkv+l2+kivi": "combines thinkv and l2, but each chooses which key channels stay",
    "tova+kivi": "tova evicts tokens while decoding as set here, and kivi quantises tokens together, of which some",
    "flexgen+streamingllm+qhitter": "combines streamingllm and qhitter",
    "tova+thinkv+kivi": "tova evicts tokens while decoding as set here, and kivi quantises tokens together",
    "think+flexgen+tova": "tova evicts tokens while decoding as set here; think then leaves new tokens whole",
    "h2o+quant+think": "qhitter (with lam=1: h2o+quant) itself quantises every token",
    "vatp+kivi": "vatp changes a selector's scores and needs one beside it",
    "kivi+kivi": "names kivi twice",
    "full+kivi": "full keeps everything as it is and is written alone",
}


@pytest.mark.parametrize("method", REFUSED)
def test_sets_that_cannot_be_stored_are_refused_with_the_reason(method, capsys, monkeypatch, tmp_path):
    with pytest.raises(UsageError) as caught:
        chain_of(method)
    assert REFUSED[method] in str(caught.value)
    monkeypatch.chdir(tmp_path)
    assert main(["run", f"method={method}"]) == 2
    assert REFUSED[method] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("base", "knob", "evicts", "static"),
    [
        ("h2o", "variant", "orig", "all"),
        ("streamingllm", "mode", "mask", "static"),
        ("cake", "decode_evict", True, False),
    ],
)
@pytest.mark.parametrize("storage", ["kivi", "thinkv+kivi"])
def test_a_selector_is_stored_so_only_in_the_variant_that_evicts_after_the_prompt(base, knob, evicts, static, storage):
    with pytest.raises(UsageError, match=f"{base} evicts tokens while decoding as set here"):
        chain_of({"method": f"{base}+{storage}", f"{base}.{knob}": evicts})
    assert chain_of({"method": f"{base}+{storage}", f"{base}.{knob}": static}).name == f"{base}+{storage}"


def test_knobs_that_two_stages_share_need_a_full_key():
    with pytest.raises(
        UsageError, match=r"option of two methods in twilight\+kivi: set method\.twilight\.bits and method\.kivi\.bits"
    ):
        chain_of({"method": "twilight+kivi", "bits": 4})
    assert chain_of({"method": "twilight+kivi", "kivi.bits": 4}).quantiser.bits == 4


def layer(n, d, per, heads=(4, 2)):
    g = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(h, n, d, generator=g) for h in (heads[0], heads[1], heads[1]))
    return ref.make_layer(q, k, v, per=per)


@grid("per", PER)
@grid("n", [1, 2, 5, 7, 8, 9, 13])
@grid("d", [5, 10, 77])
@grid("method", ["think", "thinkv", "l1", "kivi", "flexgen", "thinkv+kivi", "think+flexgen", "l2+kivi"])
def test_short_prompts_and_odd_heads_cost_what_the_formula_says(method, d, n, per):
    own_value = {"think", "thinkv", "l1", "l2"} & set(method.split("+"))
    chain = chain_of(entry(method, SMALL, per=per))
    dense, obs = layer(n, d, per)
    cache = chain.compress(dense, obs)
    assert ref.kept(cache) == [list(range(n))] * dense.heads
    blocks = chain.layout(n, d, 4)
    payload = sum(b.key_bytes + b.value_bytes for b in blocks)
    assert storage_bytes(t for s in cache.segments for t in s.payload()) == dense.heads * payload
    for s in cache.segments:
        complete = s.key_channels is None and s.value_channels is None
        if s.codes is None:
            assert complete == (n <= 5 or s.tokens == 5)
        else:
            # even nothing packed yet: decoding will need to know
            assert complete == (not own_value)


@pytest.mark.parametrize("per", PER)
@pytest.mark.parametrize("n", [1, 4, 9])
def test_a_model_answers_after_a_prompt_shorter_than_what_stays_exact(n, per):
    """Nothing is thin or packed within the answer, so that it is the full cache's."""
    model, ids = build("llama"), prompt(n, n)
    exact = {"kv_size": 100, "recent": 64, "residual": 64, "group": 32}
    methods = ["thinkv", "kivi", "thinkv+kivi", "snapkv+thinkv+flexgen", "adakv+think+kivi"]
    full, *caches = kvbench.prefill(model, ids, ["full", *(entry(method, exact) for method in methods)], per=per)
    for cache in caches:
        audit(cache, cache_shape(model))
    (wanted,) = kvbench.generate(model, [full], 20)
    answers = kvbench.generate(model, caches, 20)
    assert dict(zip(methods, answers, strict=True)) == dict.fromkeys(methods, wanted)

"""What holds for every selector that evicts while decoding, found by its ``positions`` knob (spec G11)."""

import itertools

import pytest
import torch
from support import method_reference as ref
from support.calibrations import ready
from support.families import build, prompt

import kvbench
from kvbench.audit.decode_audit import check_bytes, check_peak
from kvbench.base.errors import UsageError
from kvbench.engine.decode import extend_caches, generate_rows
from kvbench.engine.step import build as build_batch
from kvbench.engine.step import step
from kvbench.engine.stopping import Ending
from kvbench.methods.core import registry
from kvbench.methods.core.base import Selector
from kvbench.methods.core.evicting import EvictingSelector
from kvbench.methods.core.resolve import chain_of
from kvbench.models.interface import attached, cache_shape

pytestmark = pytest.mark.e2e("every evicting method decodes beside a slow reference")

SELECTORS = [
    m
    for m in registry.available()
    if m != "full" and isinstance(registry.make_stage(m, registry.defaults(m)), EvictingSelector)
]
# how to set those that by default evict only after the prompt, and further ways to evict
SETTINGS = {
    "h2o": [{"variant": "orig"}, {"variant": "uncomp"}, {"variant": "orig", "score_bits": 2}],
    "streamingllm": [{"mode": "mask"}],
    "scissorhands": [{"variant": "code"}, {"variant": "paper", "window": 9}],
    "tova": [{}, {"per_head": True}],
    "qhitter": [{"variant": "code"}, {"variant": "paper"}],
}
ENTRIES = {
    "-".join([m, *map(str, s.values())]): {"method": m, **s} for m in SELECTORS for s in SETTINGS.get(m, [{}])
} | {
    "vatp+h2o": {"method": "vatp+h2o", "variant": "orig"},
    "vatp+h2o+flexgen": {"method": "vatp+h2o+flexgen", "variant": "orig"},
}
SMALL = {"kv_size": 14, "window": 6, "recent": 4}
each = pytest.mark.parametrize("name", ENTRIES)
# stored keys that are packed cannot be turned to new positions
PACKED = [name for name in ENTRIES if "qhitter" in name or "flexgen" in name]
ROLLING = [name for name in ENTRIES if name not in PACKED]
rolling = pytest.mark.parametrize("name", ROLLING)


def entry(name, **more):
    """Return the entry ``name`` with the knobs of SMALL that its methods have and it does not set."""
    own_knobs = {f"{m}.{k}" for m in ENTRIES[name]["method"].split("+") for k in registry.knob_names(m)}
    small = {k: v for k, v in SMALL.items() if any(o.endswith(f".{k}") for o in own_knobs)}
    if ENTRIES[name].get("variant") == "uncomp":
        small["kv_size"] = 130
    return {**small, **ENTRIES[name], **more}


def prefill(model, ids, entries, per="kv_head"):
    """Run ``kvbench.prefill`` with random calibrations bound to the methods that need one."""
    return kvbench.prefill(model, ids, [ready(model, e, per) for e in entries])


def length(name):
    """Return a prompt's length above the entry's budget."""
    return entry(name)["kv_size"] + 26


def test_every_selector_that_can_evict_has_the_knob():
    assert {"h2o", "scissorhands", "cake", "tova", "streamingllm"} <= set(SELECTORS)
    for m in registry.available():
        if m != "full" and isinstance(registry.make_stage(m, registry.defaults(m)), Selector):
            assert ("positions" in registry.knob_names(m)) == (m in SELECTORS)
    assert all(chain_of(entry(name)).evicts for name in ENTRIES)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox"])
def test_rolled_with_budget_for_all_answers_as_the_full_cache(family):
    model, ids = build(family), prompt(40, 3)
    asked = [(name, per) for name in ROLLING for per in ("kv_head", "query_head")]
    entries = [entry(name, positions="rolled", kv_size=2000, per=per) for name, per in asked]
    caches = prefill(model, ids, ["full", *entries])
    answers = kvbench.generate(model, caches, 8)
    longer = [c.logits for c in extend_caches(model, caches, prompt(5, 4))]
    for i, case in enumerate(asked, start=1):
        assert answers[i] == answers[0], case
        torch.testing.assert_close(longer[i], longer[0], atol=1e-4, rtol=1e-4, msg=lambda m, case=case: f"{case}: {m}")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "gpt_neox", "opt"])
def test_bf16_with_budget_for_all_stays_near_the_full_cache_when_teacher_forced(family):
    """Half precision is summed up in fp32: how slots are ordered and cut shows in the last bit of a layer at most."""
    model = build(family, torch.bfloat16)
    asked = list(itertools.product(ROLLING, ("true",) if family == "opt" else ("true", "rolled")))
    caches = prefill(model, prompt(50, 3), ["full", *(entry(name, positions=p, kv_size=2000) for name, p in asked)])
    for chunk in prompt(6, 4).split([1, 1, 4]):
        caches = extend_caches(model, caches, chunk)
        for case, cache in zip(asked, caches[1:], strict=True):
            message = lambda m, case=case: f"{case}: {m}"  # noqa: E731
            torch.testing.assert_close(cache.logits, caches[0].logits, atol=6e-2, rtol=3e-2, msg=message)


@rolling
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_rolled_first_layer_attends_as_a_fresh_pass_over_what_each_head_keeps(name, family):
    """In layer 0 keys and values depend on token and position alone: a head attends as over its kept text alone."""
    model, n = build(family), length(name)
    ids, new = prompt(n, 3), prompt(6, 4)
    (cache,) = prefill(model, ids, [entry(name, positions="rolled")])
    text = torch.cat([ids, new])
    batch = build_batch(model, [cache], len(new))
    with torch.no_grad(), attached(model):
        for t in range(len(new)):
            with heads_of_layer_0(model, family) as mixed:
                step(model, batch, new[t].view(1, 1), torch.tensor([[n + t]]))
    kept_positions = ref.kept(batch.with_keys[0].continue_cache(cache.layers[0]))
    budget, group = sum(map(len, kept_positions)) // len(kept_positions), 4 // len(kept_positions)
    assert budget < n and all(p[-1] == n + len(new) - 1 for p in kept_positions)
    for h, positions in enumerate(kept_positions):
        with torch.no_grad(), heads_of_layer_0(model, family) as fresh:
            model(text[positions][None])
        for q in range(h * group, (h + 1) * group):
            torch.testing.assert_close(mixed[0][0, -1, q], fresh[0][0, -1, q], atol=1e-5, rtol=1e-4)


class heads_of_layer_0:
    """Collects what layer 0's heads [1, T, Hq, D] hand to the output projection."""

    def __init__(self, model, family):
        layer = (
            model.model.layers[0].self_attn.o_proj if family == "llama" else model.gpt_neox.layers[0].attention.dense
        )
        self.found = []
        self.hook = layer.register_forward_pre_hook(lambda _, x: self.found.append(x[0].unflatten(-1, (4, -1))))

    def __enter__(self):
        return self.found

    def __exit__(self, *_):
        self.hook.remove()


@rolling
def test_rolled_and_true_positions_differ_once_tokens_are_gone(name):
    model, n = build("llama"), length(name)
    caches = prefill(model, prompt(n, 3), [entry(name, positions=p) for p in ("true", "rolled")])
    assert torch.equal(caches[0].logits, caches[1].logits)
    true, rolled = (kvbench.extend(model, c, prompt(6, 4)).logits for c in caches)
    assert not torch.allclose(true, rolled, atol=1e-2)


@each
def test_unset_and_true_are_one_method(name):
    plain = chain_of(entry(name)).identity()
    assert all(chain_of(entry(name, positions=p)).identity() == plain for p in ("true", True, "True", None))
    knobs = plain["stages"][0]["knobs"]
    assert knobs.get("positions") == ("true" if "h2o" in name else None)
    if name not in PACKED:
        assert chain_of(entry(name, positions="rolled")).identity() != plain


@pytest.mark.parametrize("name", PACKED)
def test_rolled_is_refused_where_stored_keys_are_packed(name):
    with pytest.raises(UsageError, match=r"positions=('?)rolled\1.*quantised"):
        chain_of(entry(name, positions="rolled"))


def test_the_two_ways_to_write_a_rolled_streamingllm_are_one():
    one = chain_of({"method": "streamingllm", "mode": "rolled", "kv_size": 12})
    two = chain_of({"method": "streamingllm", "mode": "mask", "positions": "rolled", "kv_size": 12})
    assert one == two and one.identity() == two.identity() and one.evictor.rolled
    assert "positions" not in one.identity()["stages"][0]["knobs"]
    with pytest.raises(UsageError, match=r"method\.streamingllm\.positions='true' .*mode=mask keeps true ones"):
        chain_of({"method": "streamingllm", "mode": "rolled", "positions": "true"})


STATIC = [{"method": "h2o"}, {"method": "h2o", "variant": "win"}, {"method": "cake", "decode_evict": False}]


@pytest.mark.parametrize("made", [*STATIC, {"method": "streamingllm"}], ids=str)
def test_rolled_is_refused_where_nothing_is_evicted_while_decoding(made):
    with pytest.raises(UsageError, match=rf"method\.{made['method']}\.positions='rolled' .*only after the prompt"):
        chain_of({**made, "positions": "rolled"})


@each
def test_other_positions_are_refused(name):
    with pytest.raises(UsageError, match=r"\.positions='slots' is not possible: true or rolled"):
        chain_of(entry(name, positions="slots"))


@rolling
def test_rolled_is_refused_for_learned_positions(name):
    model = build("opt")
    with pytest.raises(UsageError, match="learns its positions"):
        prefill(model, prompt(30), [entry(name, positions="rolled")])


@each
@pytest.mark.parametrize("per", ["kv_head", "query_head"])
def test_budget_holds_and_a_batch_answers_as_each_row_alone(name, per):
    """Rolled and true positions, prompts above and below the budget, in one batch."""
    model = build("llama")
    sizes = (length(name), 11, length(name) - 13)
    entries = [entry(name, positions=p) for p in (("true",) if name in PACKED else ("true", "rolled"))]
    caches = [cache for n in sizes for cache in prefill(model, prompt(n, n), entries, per=per)]
    new = 6  # the short prompt fills its budget
    together = kvbench.generate(model, caches, new)
    assert together == [kvbench.generate(model, [c], new)[0] for c in caches]


def test_a_fraction_stays_that_of_the_prompt_when_text_is_read_after_it():
    """Spec 0, G9: a budget is fixed for the whole generation, a question that was withheld included."""
    model = build("llama")
    entry = {"method": "h2o", "variant": "orig", "kv_ratio": 0.25}
    (cache,) = prefill(model, prompt(80), [entry])
    longer = kvbench.extend(model, cache, prompt(40, 5))
    assert [layer.tokens for layer in longer.layers] == [20] * 3
    assert [layer.tokens for layer in kvbench.extend(model, longer, prompt(3, 6)).layers] == [20] * 3


@rolling
@pytest.mark.parametrize("per", ["kv_head", "query_head"])
def test_thin_tokens_answer_in_a_batch_as_alone_and_within_what_is_declared(name, per):
    """Channels of keys, or of both, are gone behind every selector; some of the prompts are too short to lose any."""
    model, pruned = build("llama"), []
    for pruner in ("think", "thinkv"):
        built = {f"{ENTRIES[name]['method'].split('+')[-1]}.{k}": v for k, v in entry(name).items() if k == "recent"}
        knobs = {k: v for k, v in entry(name).items() if k not in ("method", "recent")}
        method = f"{pruner}+{ENTRIES[name]['method']}"
        built |= {"method": method, f"{pruner}.recent": 5, f"{pruner}.ratio": 0.5, f"{pruner}.observed": 8, **knobs}
        pruned.append(built)
    sizes = (length(name), 5, length(name) - 13)
    caches = [cache for n in sizes for cache in prefill(model, prompt(n, n), pruned, per=per)]
    thin = [any(s.key_channels is not None for layer in c.layers for s in layer.segments) for c in caches]
    assert all(thin[:2]) and not all(thin)
    rows = [Ending(new) for new in (6, 5, 12, 4, 5, 3)]  # the short prompt fills its budget
    together = generate_rows(model, caches, rows)
    alone = [generate_rows(model, [c], [r])[0] for c, r in zip(caches, rows, strict=True)]
    assert [a.tokens for a in together] == [a.tokens for a in alone]
    for i, cache in enumerate(caches):
        check_peak(cache, together[i].held, rows[i].limit - 1)
        check_bytes(cache, together[i].stored, cache_shape(model))

"""KeyDiff: keys near the mean direction go, at once or block by block."""

import pytest
import torch
from support import method_reference as ref
from support.families import build
from transformers import DynamicCache

import kvbench
from kvbench.audit.prompt_audit import audit
from kvbench.base.errors import UsageError
from kvbench.methods.core.resolve import chain_of
from kvbench.methods.keydiff import KeyDiff, compute_anchor_scores
from kvbench.models.interface import cache_shape
from kvbench.models.releases import named_cache


def test_the_specifications_example_by_hand():
    keys = torch.tensor([[[1.0, 0], [0, 1], [1, 1]]])
    # a = ((1, 0) + (0, 1) + (.7071, .7071)) / 3 = (.569036, .569036): the third key has its direction
    torch.testing.assert_close(compute_anchor_scores(keys), torch.tensor([[-(0.5**0.5), -(0.5**0.5), -1.0]]))
    layer = ref.make_layer(torch.zeros(1, 3, 2), keys)
    assert ref.kept(KeyDiff(kv_size=2).compress(*layer)) == [[0, 1]]
    assert ref.kept(KeyDiff(kv_size=1).compress(*layer)) == [[0]]


def test_lengths_of_keys_do_not_count():
    k = ref.grid(2, 40, 8, seed=3)
    stretched = k * torch.arange(1, 41)[:, None]
    plain, longer = (KeyDiff(kv_size=13).compress(*ref.make_layer(torch.zeros(4, 40, 8), x)) for x in (k, stretched))
    assert ref.kept(plain) == ref.kept(longer)


def test_blocks_start_behind_the_budget_or_at_the_first_token():
    """By hand, C = 2: equal keys tie, and the lower index stays."""
    east, north, south = [1.0, 0.0], [0.0, 1.0], [0.0, -1.0]
    layer = ref.make_layer(torch.zeros(1, 5, 2), torch.tensor([[east, east, north, east, south]]))
    # once: the anchor looks east, so that north and south stay
    assert ref.kept(KeyDiff(kv_size=2).compress(*layer)) == [[2, 4]]
    # {0, 1} + {2}: north and an east; {0, 2} + {3}: both again; {0, 2} + {4}: the anchor is east, which goes
    assert ref.kept(KeyDiff(kv_size=2, variant="block", block=1).compress(*layer)) == [[2, 4]]
    # {0, 1} + {2, 3}: {0, 2}, then + {4}
    assert ref.kept(KeyDiff(kv_size=2, variant="block", block=2).compress(*layer)) == [[2, 4]]
    # [0, 3) leaves {0, 2}: 3 and 4 come together, east is the anchor
    paper = KeyDiff(kv_size=2, variant="paper", block=3)
    assert [(start, held.tolist()) for start, held in paper.iterate_blocks(layer[0].segments[0].k, 1, 2)] == [
        (0, [[]]), (3, [[0, 2]]), (5, [[2, 4]]),
    ]  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_neox"])
@pytest.mark.parametrize(("size", "block"), [(12, 8), (16, 16), (9, 20)])
def test_the_papers_prefill_equals_a_model_that_reads_block_by_block(family, size, block):
    model = build(family)
    ids = 3 + torch.randperm(125, generator=torch.Generator().manual_seed(0))[:61]
    entry = {"method": "keydiff", "kv_size": size, "variant": "paper", "block": block}
    (cache,) = kvbench.prefill(model, ids, [entry])
    held, kept = DynamicCache(), None
    for start in range(0, 61, block):
        new = torch.arange(start, min(start + block, 61))
        with torch.no_grad():
            logits = model(ids[None, new], position_ids=new[None], **named_cache(held)).logits[0, -1]
        heads = held.layers[0].keys.shape[1]
        kept = kept or [[[] for _ in range(heads)] for _ in held.layers]
        for layer, positions in zip(held.layers, kept, strict=True):
            chosen = torch.tensor(ref.keydiff(layer.keys[0], heads, min(size, layer.keys.shape[2])))
            for h in range(heads):
                positions[h] = [(positions[h] + new.tolist())[i] for i in chosen[h]]
            index = chosen[None, :, :, None].expand(-1, -1, -1, layer.keys.shape[3])
            layer.keys, layer.values = layer.keys.gather(2, index), layer.values.gather(2, index)
    assert [ref.kept(layer) for layer in cache.layers] == kept
    torch.testing.assert_close(cache.logits, logits, atol=1e-4, rtol=1e-4)
    for ours, theirs in zip(cache.layers, held.layers, strict=True):
        torch.testing.assert_close(ours.segments[0].k, theirs.keys[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chain", ["keydiff", "keydiff+think", "keydiff+kivi", "keydiff+palu", "uncomp-stage+keydiff"])
@pytest.mark.parametrize("per", ["kv_head", "query_head"])
def test_variants_stand_in_chains(chain, per):
    from support.calibrations import ready

    model = build("llama")
    ids = 3 + torch.randperm(125, generator=torch.Generator().manual_seed(0))[:70]
    knobs = {"kv_size": 24, "keydiff.block": 16, "frozen_layers": [1]} | ({"group": 4} if "kivi" in chain else {})
    entries = [ready(model, {"method": chain, "keydiff.variant": v, **knobs}, per) for v in ("once", "block", "paper")]
    caches = kvbench.prefill(model, ids, entries)
    for built in caches:
        audit(built, cache_shape(model))
    assert not torch.equal(caches[2].logits, caches[0].logits)
    together = kvbench.generate(model, caches, 5)
    assert together == [kvbench.generate(model, [c], 5)[0] for c in caches]


def test_a_budget_of_the_whole_prompt_reads_it_at_once():
    model, ids = build("llama"), torch.arange(3, 60)
    exact, blocks = kvbench.prefill(model, ids, ["full", {"method": "keydiff", "kv_size": 57, "variant": "paper"}])
    assert torch.equal(exact.logits, blocks.logits)


@pytest.mark.parametrize(("knob", "value"), [("variant", "all"), ("block", 0), ("block", 0.5)])
def test_impossible_knobs_are_refused(knob, value):
    with pytest.raises(UsageError, match=rf"method\.keydiff\.{knob}"):
        chain_of({"method": "keydiff", knob: value})

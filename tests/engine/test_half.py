"""Half precision on a CPU: decoding rounds where transformers rounds, and methods stay within a rounding of it."""

import copy

import pytest
import torch
from support.families import FAMILIES, LOCALS, WITH_LATENTS, WITH_SHARING, build, prompt
from support.runs import prepare

import kvbench
from kvbench.engine.decode import extend_caches
from kvbench.models.releases import CACHE_NAME, named_cache
from kvbench.models.traits import reads_one_by_one
from kvbench.storage import attend

HALF = (torch.bfloat16, torch.float16)

NEAR = (*LOCALS, "olmo2", "bamba", "nemotron_h", "qwen3_5_text", "qwen3_moe")
"""Families whose logits may differ from transformers' own in a last place: some do in one of 128 in fp16."""


AS_NEAR = ("gpt_oss", "llama4_text", *WITH_LATENTS, *WITH_SHARING)
"""Families that round in another order here: theirs are as near to the logits in fp32 as transformers' own."""


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("family", [f for f in AS_NEAR if f in FAMILIES])
def test_logits_are_as_near_to_those_in_fp32_as_transformers_own(family, dtype):
    model, more = build(family, dtype), prompt(5, 40)
    exact = copy.deepcopy(model).float()
    prompts = torch.stack([prompt(50, seed) for seed in range(16)])
    texts = torch.cat([prompts, more.expand(len(prompts), -1)], dim=1)
    with torch.no_grad():
        references, owns = (m(texts, use_cache=False).logits[:, [49, -1]] for m in (exact, model))
    caches = [kvbench.prefill(model, ids, ["full"])[0] for ids in prompts]
    distances = []
    for cache, longer, reference, own in zip(caches, extend_caches(model, caches, more), references, owns, strict=True):
        ours = torch.stack([cache.logits, longer.logits])
        distances.append(torch.stack([(t.float() - reference).norm(dim=-1) for t in (ours, own)]))
    # the median over texts: where rounding makes a token take another expert, logits jump
    of_ours, of_transformers = torch.cat(distances, dim=1).median(dim=1).values
    assert of_ours < 1.3 * of_transformers


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in AS_NEAR])
def test_the_full_caches_logits_are_transformers_own_bit_for_bit(family, dtype):
    model, ids = build(family, dtype), prompt(70)
    # windows and caps are computed in fp32, which transformers rounds in between
    near = {"atol": 2e-2 if dtype == torch.float16 else 1e-1, "rtol": 0} if family in NEAR else {"atol": 0, "rtol": 0}
    (cache,) = kvbench.prefill(model, ids, ["full"])
    seen = len(ids)
    with torch.no_grad():
        out = model(ids[None], use_cache=True)
        torch.testing.assert_close(cache.logits, out.logits[0, -1], **near)
        for chunk in prompt(8, 4).split([1, 1, 2, 4]):
            pieces = [chunk]
            if reads_one_by_one(model.config):
                pieces = list(chunk.split(1))
            for piece in pieces:
                given = {"position_ids": torch.arange(seen, seen + len(piece))[None], "use_cache": True}
                seen += len(piece)
                # of the last token alone, as here: some processors round products of one row and of several differently
                out = model(piece[None], **named_cache(out[CACHE_NAME]), **given, logits_to_keep=1)
            cache = kvbench.extend(model, cache, chunk)
            torch.testing.assert_close(cache.logits, out.logits[0, -1], **near)


@pytest.mark.parametrize("dtype", HALF)
def test_logits_with_sinks_are_nearer_the_truth_than_transformers_own(dtype):
    # transformers rounds gpt-oss's weights of attention before they are normalised
    model, ids = build("gpt_oss", dtype), prompt(70)
    (cache,) = kvbench.prefill(model, ids, ["full"])
    with torch.no_grad():
        true = copy.deepcopy(model).float()(ids[None]).logits[0, -1]
        own = model(ids[None]).logits[0, -1].float()
    assert (cache.logits.float() - true).norm() < (own - true).norm()


@pytest.mark.e2e("whole answers")
def test_full_answers_as_model_generate_in_bf16_alone_and_in_a_batch(tmp_path):
    model, tokenizer = kvbench.load_model("tiny", dtype="bfloat16")
    arguments = ["dataset=tiny/hop,tiny/labels", "length=256", "examples=3", "method=full", f"results={tmp_path}"]
    groups = prepare(*arguments).groups
    prompts = [tokenizer(e.prompt, return_tensors="pt").input_ids for g in groups for e in g.examples]
    new = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = [model.generate(ids, **new)[0, ids.shape[1] :].tolist() for ids in prompts]
    caches = [kvbench.prefill(model, ids, ["full"])[0] for ids in prompts]
    assert [kvbench.generate(model, [c], 12)[0] for c in caches] == expected
    assert kvbench.generate(model, caches, 12) == expected


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("fresh", [1, 3])
def test_attention_of_our_own_is_as_near_the_truth_as_pytorchs(dtype, fresh, monkeypatch):
    """Over padded rows and a tail; scores are large, so that rounding them would show."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size, by=1.0):
        return (by * torch.randn(*size, generator=generator)).to(dtype)

    query, tail = normal(2, 4, fresh, 16, by=6), (normal(2, 2, 5, 16), normal(2, 2, 5, 16))
    valid = torch.arange(90) < torch.tensor([[90], [60]])[..., None]
    segment = attend.RowSegment(normal(2, 2, 90, 16), normal(2, 2, 90, 16), valid)
    fused = attend.attend(query, [segment], tail, 0.25)[0]
    monkeypatch.setattr(attend, "_attend_fused", lambda *given: None)
    own_value = attend.attend(query, [segment], tail, 0.25)[0]
    exact = attend.RowSegment(segment.k.float(), segment.v.float(), valid)
    true = attend.attend(query.float(), [exact], (tail[0].float(), tail[1].float()), 0.25)[0]
    unit = torch.finfo(dtype).eps * true.abs().max()
    for actual in (fused, own_value):
        assert (actual - true).abs().max() <= unit

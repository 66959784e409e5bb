"""ASVD against a copy of the model with the products as its weights, and ranks by trying."""

import pytest
import torch
from support import lowrank_reference as slow
from support.calibrated import SAMPLES, TOKENS, bound
from support.families import LINEAR, build, prompt

import kvbench
from kvbench.base.errors import UsageError
from kvbench.methods.asvd import FRACTIONS
from kvbench.methods.core.resolve import chain_of
from kvbench.models.factors import nearest_rank

pytestmark = pytest.mark.e2e("factorises models")

N, NEW, MULTIPLE = 60, 6, 8


def stage(model, **knobs):
    return bound(model, chain_of({"method": "asvd", "multiple": MULTIPLE, "probes": 2, **knobs})).lowrank


def reference(model, made):
    return slow.asvd(model, made.tensor("mean_abs"), made.ranks, made.alpha)


@pytest.mark.parametrize("family", LINEAR)
@pytest.mark.parametrize("knobs", [{}, {"alpha": 0.0}, {"ranks_by": "uniform"}, {"alpha": 1.0, "ranks_by": "uniform"}])
def test_it_decodes_as_a_model_with_the_products_as_its_weights(family, knobs):
    model, ids = build(family), prompt(N, 4)
    calibrated = stage(model, ratio=0.4, **knobs)
    dense = reference(model, calibrated)
    chain = kvbench.methods.core.chain.Chain((calibrated,))
    (cache,), (full_cache,) = kvbench.prefill(model, ids, [chain]), kvbench.prefill(dense, ids, ["full"])
    torch.testing.assert_close(cache.logits, full_cache.logits, atol=2e-4, rtol=2e-4)
    assert kvbench.generate(model, [cache], NEW) == kvbench.generate(dense, [full_cache], NEW)
    logits = [kvbench.extend(m, c, prompt(5, 9)).logits for m, c in ((model, cache), (dense, full_cache))]
    torch.testing.assert_close(*logits, atol=2e-4, rtol=2e-4)


# spec 5: alpha = 0 is the plain singular value decomposition
def test_without_activations_it_is_the_plain_decomposition():
    model = build("qwen2")
    calibrated = stage(model, ratio=0.5, alpha=0.0, ranks_by="uniform")
    for attention, pair in zip(slow.attentions(model), calibrated.factors(model), strict=True):
        for which, factors in enumerate(pair):
            u, s, vt = torch.linalg.svd(slow.parts(attention, which), full_matrices=False)
            assert factors.ranks == (16,)
            torch.testing.assert_close(
                factors.ups[0] @ factors.down, (u[:, :16] * s[:16]) @ vt[:16], atol=1e-4, rtol=1e-4
            )
    weighed = stage(model, ratio=0.5, alpha=0.5, ranks_by="uniform").factors(model)[0][0]
    plain = calibrated.factors(model)[0][0]
    assert not torch.allclose(weighed.ups[0] @ weighed.down, plain.ups[0] @ plain.down, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_sensitivities_are_losses_with_one_projection_cut(family):
    model = build(family)
    calibrated = stage(model, ratio=0.5)
    heads = 2 if family == "llama" else 4
    full, ranks = heads * 16, calibrated.tensor("loss")
    assert ranks.shape == (3, 2, len(FRACTIONS))
    complete = [[(full,), (full,)] for _ in range(3)]
    for layer, which, j in ((0, 0, 0), (1, 1, 4), (2, 0, 8), (2, 1, 2)):
        cut = [list(pair) for pair in complete]
        cut[layer][which] = (nearest_rank(full, 1 - FRACTIONS[j], MULTIPLE),)
        dense = slow.asvd(model, calibrated.tensor("mean_abs"), cut, 0.5)
        windows = [prompt(TOKENS, 100 + i) for i in range(SAMPLES)][:2]
        with torch.no_grad():
            want = sum(float(dense(w[None], labels=w[None]).loss) for w in windows) / 2
        assert float(ranks[layer, which, j]) == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.8])
def test_ranks_by_sensitivity_keep_to_the_target(ratio):
    calibrated = stage(build("opt"), ratio=ratio)
    flat = [r for layer in calibrated.ranks for (r,) in layer]
    assert 0 < sum(flat) <= 6 * nearest_rank(64, ratio, MULTIPLE)
    assert len(set(flat)) > 1
    loss = calibrated.tensor("loss").flatten(0, 1)
    tried = [nearest_rank(64, 1 - f, MULTIPLE) for f in FRACTIONS]
    worst = max(float(row[tried.index(r)]) for row, r in zip(loss, flat, strict=True) if r in tried)
    # every rank is the smallest within the threshold that the search settled on
    place = {r: tried.index(r) for r in tried}
    smaller = [float(row[: place.get(r, 9)].min()) for row, r in zip(loss, flat, strict=True) if r > tried[0]]
    assert min(smaller) > worst


def test_what_decides_the_calibration_is_in_its_recipe():
    recipes = [
        chain_of({"method": "asvd", **knobs}).lowrank.recipe().knobs
        for knobs in ({}, {"alpha": 0.25}, {"probes": 2}, {"ranks_by": "uniform"}, {"multiple": 8})
    ]
    assert len({str(k) for k in recipes}) == 5
    assert recipes[3] == {"sensitivity": False}
    same = [chain_of({"method": "asvd", "ratio": r}).lowrank.recipe() for r in (0.2, 0.8)]
    assert same[0] == same[1]


@pytest.mark.parametrize("knobs", [{"alpha": -1}, {"probes": 0}, {"probes": 33}, {"ranks_by": "fisher"}])
def test_impossible_knobs_are_refused_by_name(knobs):
    (name,) = knobs
    with pytest.raises(UsageError, match=rf"method\.asvd\.{name}="):
        chain_of({"method": "asvd", **knobs})

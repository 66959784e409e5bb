"""UNComp's stage beside low-rank projections: one drops hidden states, the other caches the latents of those left."""

import pytest
import torch
from support import lowrank_reference
from support import method_reference as ref
from support import prefill_reference as stage_reference
from support.calibrations import ready
from support.families import LINEAR, build, prompt

import kvbench
from kvbench.audit.prompt_audit import audit
from kvbench.models.interface import cache_shape


@pytest.mark.parametrize("family", LINEAR)
@pytest.mark.parametrize("method", ["palu", "asvd"])
def test_the_stage_is_that_of_a_model_with_the_products_as_its_weights(family, method):
    model, n, new = build(family), 50, prompt(4, 9)
    knobs = {"ratio": 0.4, "multiple": 8, "starts": [0, 1], "least": 0.3}
    chain = ready(model, {"method": f"uncomp-stage+{method}", **knobs})
    pairs = chain.lowrank
    if method == "palu":
        dense = lowrank_reference.palu(model, pairs.tensor("moments"), pairs.ranks, pairs.heads_per_group * 16)
    else:
        dense = lowrank_reference.asvd(model, pairs.tensor("mean_abs"), pairs.ranks, pairs.alpha)
    attend, alive = stage_reference.staged(n, chain.hidden.sizes(n, 3), chain.hidden.window, chain.hidden.last)
    wanted = stage_reference.logits(dense, torch.cat([prompt(n, 4), new]), attend)
    (cache,) = kvbench.prefill(model, prompt(n, 4), [chain])
    audit(cache, cache_shape(model))
    for layer, stored in zip(cache.layers, alive, strict=True):
        assert ref.kept(layer) == [stored]
    torch.testing.assert_close(cache.logits, wanted[n - 1], atol=2e-4, rtol=2e-4)
    for t in range(len(new)):
        cache = kvbench.extend(model, cache, new[t : t + 1])
        torch.testing.assert_close(cache.logits, wanted[n + t], atol=2e-4, rtol=2e-4)

"""A model as transformers runs it, and the full cache held to it."""

import torch

import kvbench
from kvbench.models.releases import named_cache


def own_logits(model, ids):
    """The logits [T, V] after each of ``ids`` by the model itself, without a cache."""
    with torch.no_grad():
        return model(ids[None], use_cache=False).logits[0]


def check_full_is_the_model(model, ids, atol=1e-5, new=6):
    """Check the full cache's logits and answers against the model's, also as the cache that ``generate`` is given."""
    (cache,) = kvbench.prefill(model, ids, ["full"])
    torch.testing.assert_close(cache.logits, own_logits(model, ids)[-1], atol=atol, rtol=1e-5)
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(ids[None], **options)[0, len(ids) :].tolist()
    assert kvbench.generate(model, [cache], new) == [expected]
    with kvbench.cache(model, "full") as own:
        assert model.generate(ids[None], **named_cache(own), **options)[0, len(ids) :].tolist() == expected


def kept_by(cache):
    """The positions that each head of each layer keeps."""
    return [positions.tolist() for layer in cache.layers for positions in layer.kept_positions()]

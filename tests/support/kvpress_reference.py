"""What kvpress keeps of a prompt, found by running it."""

import torch
from transformers import DynamicCache

from kvbench.models.releases import named_cache

N = 120


def prompt(n, seed=0):
    """Distinct tokens: equal ones tie in layer 0 up to rounding, which either side may break."""
    return torch.randperm(124, generator=torch.Generator().manual_seed(seed))[:n] + 3


def theirs(model, ids, press):
    """Positions that a press keeps, per layer and kv head, found by matching its keys with the dense ones."""
    dense, small = DynamicCache(), DynamicCache()
    with torch.no_grad():
        model(ids[None], **named_cache(dense))
        with press(model):
            model(ids[None], **named_cache(small))
    collected = []
    for complete, kept_tokens in zip(dense.layers, small.layers, strict=True):
        heads = []
        for h in range(complete.keys.shape[1]):
            same = (kept_tokens.keys[0, h][:, None] == complete.keys[0, h][None]).all(-1)
            assert (same.sum(-1) == 1).all()
            heads.append(sorted(same.int().argmax(-1).tolist()))
        collected.append(heads)
    return collected

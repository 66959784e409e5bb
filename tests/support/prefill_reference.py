"""Slow, obvious prompts: the model's own layers around explicit attention, one query head after the other.

Every token passes through every layer; what a method drops is only hidden from the others.
"""

from __future__ import annotations

import itertools
import math

import torch
from transformers import AttentionInterface

_current = []


def _attention(module, query, key, value, mask, scaling=None, **kwargs):
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = _current[-1](module.layer_idx, query[0], key[0], value[0], scale)
    return out.transpose(0, 1)[None], None


AttentionInterface.register("slow_reference", _attention)


def logits(model, ids, attend):
    """Logits [n, V] of ids [n] where layers attend by ``attend``.

    attend(layer, q [Hq, n, D], k [Hk, n, D], v [Hk, n, D], scale) -> [Hq, n, D].
    """
    before = model.config._attn_implementation
    model.set_attn_implementation("slow_reference")
    _current.append(attend)
    try:
        with torch.no_grad():
            return model(input_ids=ids[None], use_cache=False).logits[0]
    finally:
        _current.pop()
        model.set_attn_implementation(before)


def weights(q, k, scale, hidden=()):
    """Causal attention [n, n] of one head, with the columns ``hidden`` invisible to all but their own row."""
    scores = scale * q @ k.T
    n = len(scores)
    for i in range(n):
        scores[i, i + 1 :] = -torch.inf
        for j in hidden:
            if j != i:
                scores[i, j] = -torch.inf
    return scores.softmax(dim=-1)


def staged(n, sizes, window, last):
    """UNComp's stage over a prompt of the first n tokens: (attend, alive), alive[l] being what layer l reads."""
    alive = [list(range(n))]

    def attend(layer, q, k, v, scale):
        here = alive[layer]
        group = len(q) // len(k)
        hidden = sorted(set(range(n)) - set(here))
        out, received = [], [0.0] * n
        for h in range(len(q)):
            a = weights(q[h], k[h // group], scale, hidden)
            out.append(a @ v[h // group])
            for i in here[-window:]:
                for j in range(n):
                    received[j] += float(a[i, j])
        if layer + 1 < len(sizes):
            forced = here[-last:]
            others = sorted((j for j in here if j not in forced), key=lambda j: (-received[j], j))
            alive.append(sorted([*forced, *others][: sizes[layer + 1]]))
        return torch.stack(out)

    return attend, alive


def clustered(q, k, scale, count):
    """CHAI's clusters of query heads, each a list, by average linkage over all pairs of members, recomputed."""
    group = len(q) // len(k)
    maps = []
    for h in range(len(q)):
        rows = [[scale * float(q[h, i] @ k[h // group, j]) for j in range(5)] for i in range(5)]
        maps.append([math.exp(x) / sum(math.exp(y) for y in row) for row in rows for x in row])

    def far(a, b):
        dot, norms = sum(x * y for x, y in zip(a, b, strict=True)), [math.sqrt(sum(x * x for x in m)) for m in (a, b)]
        return 1 - dot / (norms[0] * norms[1])

    clusters = [[h] for h in range(len(q))]
    while len(clusters) > count:

        def linkage(pair):
            a, b = pair
            return sum(far(maps[i], maps[j]) for i in clusters[a] for j in clusters[b]) / (
                len(clusters[a]) * len(clusters[b])
            )

        a, b = min(itertools.combinations(range(len(clusters)), 2), key=linkage)
        clusters[a] = sorted(clusters[a] + clusters.pop(b))
        clusters.sort()
    return clusters


def chai(counts):
    """CHAI with ``counts`` clusters by layer: (attend, leads), leads[l][h] being the head whose logits h takes."""
    leads = []

    def attend(layer, q, k, v, scale):
        lead = {h: c[0] for c in clustered(q, k, scale, counts[layer]) for h in c}
        leads.append([lead[h] for h in range(len(q))])
        group = len(q) // len(k)
        return torch.stack([weights(q[lead[h]], k[lead[h] // group], scale) @ v[h // group] for h in range(len(q))])

    return attend, leads

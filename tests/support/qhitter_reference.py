"""Slow, obvious references of packed tokens: Q-Hitter's choice by loops, and decoding over what is packed.

They share no code with the package: see method_reference.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from support.decoding_reference import loop
from support.method_reference import rounded, row_sums, stored, top


def losses(x: torch.Tensor, bits: int) -> list[list[float]]:
    """||x - Q(x)||_2 of every token of x [H, L, D]."""
    back = rounded(x, bits)
    return [
        [math.dist(a, b) for a, b in zip(*head, strict=True)] for head in zip(x.tolist(), back.tolist(), strict=True)
    ]


def spread(table: dict) -> dict:
    """The values of a table between their minimum (0) and maximum (1); 0 where these are equal."""
    low, high = min(table.values()), max(table.values())
    return {at: (x - low) / (high - low) if high > low else 0.0 for at, x in table.items()}


def friendly(k_loss: list[list[float]], v_loss: list[list[float]], n: int) -> dict:
    """(2 - e_K - e_V) / 2 by (head, token), normalised over the prompt's n tokens together, then token by token."""
    heads, result = range(len(k_loss)), {}
    for tokens in [range(n), *([j] for j in range(n, len(k_loss[0])))]:
        places = [(h, j) for h in heads for j in tokens]
        e_k, e_v = (spread({(h, j): e[h][j] for h, j in places}) for e in (k_loss, v_loss))
        result.update({at: (2 - e_k[at] - e_v[at]) / 2 for at in places})
    return result


def choose(mass, k_loss, v_loss, held, n, parts, room, now, lam, variant) -> list[set[int]]:
    """What each head keeps of the tokens ``held``, ``room`` in all; recent ones are those after now - parts[2]."""
    first, _, recent = parts
    places = [(h, j) for h, tokens in enumerate(held) for j in tokens]
    attention = spread({(h, j): mass[h][j] for h, j in places})
    if variant == "code":
        good = friendly(k_loss, v_loss, n)
    else:
        e_k, e_v = (spread({(h, j): e[h][j] for h, j in places}) for e in (k_loss, v_loss))
        good = {at: 2 - e_k[at] - e_v[at] for at in places}
    result = []
    for h, tokens in enumerate(held):
        kept_tokens = {j for j in tokens if j > now - recent}
        old = sorted(tokens - kept_tokens)
        by_attention = sorted(old, key=lambda j: (-mass[h][j], j))[: first if variant == "code" else 0]
        kept_tokens |= set(by_attention)

        def score(j, h=h):
            return mass[h][j] if lam == 1 else lam * attention[h, j] + (1 - lam) * good[h, j]

        rest = sorted((j for j in old if j not in kept_tokens), key=lambda j: (-score(j), j))
        result.append(kept_tokens | set(rest[: max(0, room - len(kept_tokens))]))
    return result


def min_max(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Every vector of x [..., D] rounded alone to 2^bits steps up from its minimum, both stored in half precision."""
    result = []
    for vector in x.reshape(-1, x.shape[-1]).float().numpy():
        low = np.float32(np.float16(vector.min()))
        scale = np.float32(np.float16((vector.max() - low) / np.float32(2**bits - 1)))
        codes = np.clip(np.rint((vector - low) / scale), 0, 2**bits - 1)
        result.append((low + codes * scale).tolist())
    return torch.tensor(result).view(x.shape)


def decoding(model, ids, new, pack, decide, heads=2, late=False):
    """``loop`` over packed tokens: from token n on queries see ``pack`` of keys and values.

    ``decide(mass, k, v, held, now)`` are a layer's tokens per head that go on being held.
    """

    def chosen(attn, held, now):
        return decide(stored(row_sums(attn, len(attn[0])), heads), attn.k, attn.v, held, now)

    return loop(model, ids, new, chosen, lambda what, layer, x: pack(x), heads=heads, late=late)


def qhitter(n, bits, parts, lam, variant, after=False):
    """``decide`` of Q-Hitter with ``parts`` for a prompt of n tokens, before a step or ``after`` the one before it."""

    def decide(mass, k, v, held, now):
        if after and now >= n:  # the token of the step that has ended is held, and the next one takes no room
            return choose(mass, losses(k, bits), losses(v, bits), held, n, parts, sum(parts), now - 1, lam, variant)
        room = sum(parts) - (now >= n)
        return choose(mass, losses(k, bits), losses(v, bits), held, n, parts, room, now, lam, variant)

    return decide


def h2o(n, heavy, recent):
    """``decide`` of H2O, which no error concerns."""

    def decide(mass, k, v, held, now):
        room, result = heavy + recent - (now >= n), []
        for scores, tokens in zip(mass, held, strict=True):
            young = {j for j in tokens if j > now - recent}
            old = sorted(tokens - young)
            result.append(young | {old[i] for i in top([scores[j] for j in old], room - len(young))})
        return result

    return decide

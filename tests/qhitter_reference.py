"""Slow, obvious references of packed tokens: Q-Hitter's choice by loops, decoding by whole passes with explicit masks.

They share no code with the package: see method_reference.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from method_reference import rounded, row_sums, stored, top
from transformers import AttentionInterface


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
        kept = {j for j in tokens if j > now - recent}
        old = sorted(tokens - kept)
        by_attention = sorted(old, key=lambda j: (-mass[h][j], j))[: first if variant == "code" else 0]
        kept |= set(by_attention)

        def score(j, h=h):
            return mass[h][j] if lam == 1 else lam * attention[h, j] + (1 - lam) * good[h, j]

        rest = sorted((j for j in old if j not in kept), key=lambda j: (-score(j), j))
        result.append(kept | set(rest[: max(0, room - len(kept))]))
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


def whole_pass(model, tokens, read, visible=None):
    """(rows A[h][i][j] per layer, keys and values per layer, last logits) of one pass under explicit attention.

    ``read(what, x, i)`` is what query i sees of keys or values x [H, L, D]; ``visible(layer, head, i)`` the tokens that
    query head ``head`` attends at i, all up to i by default.
    """
    rows, kept = [], []

    def eager(module, query, key, value, mask, scaling, **_):
        heads, length = query.shape[1], query.shape[2]
        group = heads // key.shape[1]
        kept.append((key[0], value[0]))
        out, attn = torch.zeros_like(query[0]), torch.zeros(heads, length, length)
        for i in range(length):
            k, v = (read(w, x[0], i).repeat_interleave(group, 0) for w, x in (("k", key), ("v", value)))
            for h in range(heads):
                seen = sorted(range(i + 1) if visible is None else visible(module.layer_idx, h // group, i))
                probs = (query[0, h, i] @ k[h, seen].T * scaling).softmax(-1)
                attn[h, i, seen], out[h, i] = probs, probs @ v[h, seen]
        rows.append(attn.double().tolist())
        return out.transpose(0, 1)[None], None

    AttentionInterface.register("slow_packed", eager)
    before = model.config._attn_implementation
    model.set_attn_implementation("slow_packed")
    try:
        with torch.no_grad():
            out = model(tokens[None], use_cache=False)
    finally:
        model.set_attn_implementation(before)
    return rows, kept, out.logits[0, -1]


def decoding(model, ids, new, pack, decide, heads=2, late=False):
    """Greedy decoding over packed tokens, one whole pass per token: the answer, and the tokens held at its end.

    From token n on queries see ``pack`` of keys and values, with ``late`` their own token exactly. ``decide(mass, k, v,
    held, now)`` are a layer's tokens per head that go on being held: first of the whole prompt (now = n - 1), then
    before the token at ``now`` joins them.
    """
    n, tokens, answer = len(ids), ids.tolist(), []
    seen: list[list[list[set[int]]]] = []
    packed: dict = {}

    def read(what, x, i):
        if i < n:
            return x
        at = (what, x.data_ptr(), len(tokens))
        if at not in packed:
            packed[at] = (x, pack(x))
        back = packed[at][1]
        return torch.cat([back[:, :i], x[:, i : i + 1]], 1) if late else back

    def visible(layer, head, i):
        return range(i + 1) if i < n else {*seen[i - n][layer][head], i}

    for _ in range(new):
        rows, kept, logits = whole_pass(model, torch.tensor(tokens), read, visible)
        layers = [(stored(row_sums(attn, len(attn[0])), heads), k, v) for attn, (k, v) in zip(rows, kept, strict=True)]
        if not seen:
            held = [decide(*layer, [set(range(n))] * heads, n - 1) for layer in layers]
        answer.append(int(logits.argmax()))
        tokens.append(answer[-1])
        now = len(tokens) - 1
        held = [decide(*layer, held[i], now) for i, layer in enumerate(layers)]
        seen.append(held)
        held = [[h | {now} for h in layer] for layer in held]
    return answer, [[sorted(h) for h in layer] for layer in held]


def qhitter(n, bits, parts, lam, variant):
    """``decide`` of Q-Hitter with ``parts`` for a prompt of n tokens."""

    def decide(mass, k, v, held, now):
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

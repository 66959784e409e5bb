"""A slow, obvious reference of decoding under eviction: whole passes with explicit masks, one per token.

It shares no code with the package: see method_reference.
"""

from __future__ import annotations

import torch
from method_reference import rounded, row_sums, stored, top
from transformers import AttentionInterface


class Attention(list):
    """A[h][i][j] of one layer, which knows its number."""

    layer = 0


def evicting(
    model, ids: torch.Tensor, new: int, kept, leaves, bits=None, stand_ins=None, blind=None
) -> tuple[list[int], list[list[list[int]]]]:
    """Greedy decoding of a small Llama under eviction, one whole pass with an explicit mask per token.

    ``kept(attn)`` are a layer's tokens per stored head after the prompt, by its A[h][i][j] (``attn.layer`` is its
    number). ``leaves(attn, held, head, now)`` is the set that leaves the tokens ``held`` by one stored head before the
    token at ``now`` joins them; attn then has all rows so far, under the masks that were used; with ``bits``, over keys
    rounded to them. ``stand_ins(attn)`` is the head whose output each head has after the prompt: heads that are not
    their own hold nothing. ``blind`` is how many positions back one token is held that is not seen. Returns the answer
    and what is held at its end.
    """
    config = model.config
    heads = config.num_key_value_heads
    tokens, n = ids.tolist(), len(ids)
    answer: list[int] = []
    seen: list[list[list[set[int]]]] = []  # by generated token, layer, stored head
    copies = None
    for _ in range(new):
        found, logits = masked_pass(model, torch.tensor(tokens), n, seen, bits, copies)
        layers = [Attention(a) for a in found]
        for i, attn in enumerate(layers):
            attn.layer = i
        if not seen:
            copies = None if stand_ins is None else [stand_ins(attn) for attn in layers]
            held = [[set(h) for h in kept(attn)] for attn in layers]
        answer.append(int(logits.argmax()))
        tokens.append(answer[-1])
        now = len(tokens) - 1
        held = [
            [
                held[i][h] - leaves(attn, held[i][h], h, now) | {now} if copies is None or copies[i][h] == h else set()
                for h in range(heads)
            ]
            for i, attn in enumerate(layers)
        ]
        hidden = set() if blind is None else {now - blind}
        seen.append([[h - hidden for h in layer] for layer in held])
    return answer, [[sorted(h) for h in layer] for layer in held]


def masked_pass(model, tokens: torch.Tensor, n: int, seen, bits=None, copies=None):
    """Attention A[h][i][j] per layer and the last logits, where generated token n+t sees only seen[t] of the past.

    Head h of layer i gets the output of copies[i][h] there.
    With ``bits``, A is what keys rounded to them would give; the logits are exact all the same.
    """
    rows = []

    def eager(module, query, key, value, mask, scaling, **_):
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = (query @ key.transpose(2, 3) * scaling)[0]
        length = scores.shape[-1]
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1).repeat(len(scores), 1, 1)
        for t in range(length - n):
            for h in range(len(scores)):
                visible = seen[t][module.layer_idx][h // group]
                hidden[h, n + t] = torch.tensor([j not in visible for j in range(length)])
        probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        if bits is None:
            rows.append(probs.double().tolist())
        else:
            coarse = (query @ rounded(key, bits).transpose(2, 3) * scaling)[0]
            rows.append(coarse.masked_fill(hidden, -torch.inf).softmax(-1).double().tolist())
        out = probs @ value[0]
        if copies is not None:
            out[:, n:] = out[copies[module.layer_idx], n:]
        return out.transpose(0, 1)[None], None

    AttentionInterface.register("slow_masked", eager)
    before = model.config._attn_implementation
    model.set_attn_implementation("slow_masked")
    try:
        with torch.no_grad():
            out = model(tokens[None], use_cache=False)
    finally:
        model.set_attn_implementation(before)
    return rows, out.logits[0, -1]


def h2o_decoding(model, ids, new, heavy, recent, bits=None, code_mask=False):
    """Greedy decoding with H2O by loops over explicit attention, and the tokens held at its end."""
    n = len(ids)

    def mass(attn):
        return stored(row_sums(attn, len(attn[0])), 2)

    def kept_after_prompt(attn):
        return [top(s[: n - recent], heavy) + list(range(n - recent, n)) for s in mass(attn)]

    def leaves(attn, held, head, now):
        received = mass(attn)[head]
        old = sorted((j for j in held if j <= now - recent - code_mask), key=lambda j: (received[j], -j))
        return set(old[: len(held) - (heavy + recent + code_mask - 1)])

    return evicting(model, ids, new, kept_after_prompt, leaves, bits, blind=recent if code_mask else None)

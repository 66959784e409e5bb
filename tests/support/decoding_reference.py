"""A slow, obvious reference of decoding under eviction: whole passes with explicit masks, one per token.

It shares no code with the package: see method_reference.
"""

from __future__ import annotations

import torch
from support.method_reference import rounded, row_sums, stored, top
from support.storage_reference import key_scores, value_scores
from transformers import AttentionInterface


class Attention(list):
    """A[h][i][j] of one layer, which knows its number and its exact q [Hq, L, D], k and v [Hk, L, D].

    mass: what each token received of each stored head's queries, once someone has asked.
    """

    layer = 0
    mass: list[list[float]] | None = None
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def exactly(what, layer, x):
    return x


def loop(
    model, ids, new, decide, read=exactly, started=None, heads=None, late=False, coarse=None, copied=None, blind=0
):
    """Greedy decoding, one whole pass per token: the answer, and the tokens held at its end by layer and stored head.

    ``decide(attn, held, now)`` are a layer's tokens per stored head that go on being held: first of the whole prompt
    (now = n - 1), then before the token at ``now`` joins them; attn then has all rows so far, under what was seen.
    From token n on queries see ``read(what, layer, x)`` of keys and values x [Hk, L, D], as [Hk or heads, L, D], with
    ``late`` their own token exactly; ``started(layers, held)`` is told what was kept of the prompt.
    ``coarse(layer, x)``: what rows in attn are made of instead of keys; layer None: exact ones, of the prompt's
    queries. ``copied(attn)`` is the head whose output each head has after the prompt: heads that are not their own hold
    nothing. ``blind`` is how many positions back one token is held that is not seen.
    """
    n, tokens, answer = len(ids), ids.tolist(), []
    heads = heads or getattr(model.config, "num_key_value_heads", model.config.num_attention_heads)
    seen: list[list[list[set[int]]]] = []  # by generated token, layer, stored head
    held_tokens = copies = None
    for _ in range(new):
        layers, logits = whole_pass(model, torch.tensor(tokens), read, n, seen, late, coarse, copies)
        if held_tokens is None:
            copies = None if copied is None else [copied(attn) for attn in layers]
            held_tokens = [[set(h) for h in decide(attn, [set(range(n))] * heads, n - 1)] for attn in layers]
            if started is not None:
                started(layers, held_tokens)
        answer.append(int(logits.argmax()))
        tokens.append(answer[-1])
        now = len(tokens) - 1
        held_tokens = [decide(attn, held_tokens[i], now) for i, attn in enumerate(layers)]
        held_tokens = [
            [set(h) | {now} if copies is None or copies[i][j] == j else set() for j, h in enumerate(layer)]
            for i, layer in enumerate(held_tokens)
        ]
        seen.append([[h - ({now - blind} if blind else set()) for h in layer] for layer in held_tokens])
    return answer, [[sorted(h) for h in layer] for layer in held_tokens]


def whole_pass(model, tokens, read=exactly, first=0, seen=None, late=False, coarse=None, copies=None):
    """Attention by layer and the last logits of one pass; queries from ``first`` on see what ``read`` makes of it all.

    The query at first + t sees only seen[t] of the past (None: all of it), and head h of layer i has the output of
    copies[i][h] there.
    """
    layers = []

    def eager(module, query, key, value, mask, scaling, **_):
        i, q, length = module.layer_idx, query[0], query.shape[2]

        def wide(x):
            return x.repeat_interleave(len(q) // len(x), 0)

        def weights(exact, keys, own):
            before = q[:, :first] @ wide(exact).transpose(1, 2)
            after = q[:, first:] @ wide(keys).transpose(1, 2)
            scores = torch.cat([before, after], 1) * scaling
            if own:
                torch.diagonal(scores, dim1=1, dim2=2).copy_((q * wide(key[0])).sum(-1) * scaling)
            return scores.masked_fill(hidden, -torch.inf).softmax(-1)

        hidden = torch.ones(length, length, dtype=torch.bool).triu(1).repeat(len(q), 1, 1)
        if seen is not None and length > first:
            # there is a row for every generated token and stored head
            unseen = [[[j not in visible for j in range(length)] for visible in t[i]] for t in seen[: length - first]]
            hidden[:, first:] = torch.tensor(unseen).transpose(0, 1).repeat_interleave(len(q) // len(unseen[0]), 0)
        k, v = read("k", i, key[0]), read("v", i, value[0])
        probs = weights(key[0], k, late)
        rows = probs if coarse is None else weights(coarse(None, key[0]), coarse(i, k), False)
        attn = Attention(rows.double().tolist())
        attn.layer, attn.q, attn.k, attn.v = i, q, key[0], value[0]
        layers.append(attn)
        out = torch.cat([probs[:, :first] @ wide(value[0]), probs[:, first:] @ wide(v)], 1)
        if late:
            own = torch.diagonal(probs, dim1=1, dim2=2)[..., None] * (wide(value[0]) - wide(v))
            out[:, first:] += own[:, first:]
        if copies is not None:
            out[:, first:] = out[copies[i], first:]
        return out.transpose(0, 1)[None], None

    AttentionInterface.register("slow_decoding", eager)
    before = model.config._attn_implementation
    model.set_attn_implementation("slow_decoding")
    try:
        with torch.no_grad():
            out = model(tokens[None], use_cache=False)
    finally:
        model.set_attn_implementation(before)
    return layers, out.logits[0, -1]


class Thin:
    """What queries see of a prompt's tokens that lost channels: zeros there, in all but the last ``recent`` kept.

    Channels are scored as ``kind`` does by the last ``observed`` queries; ``keys`` and ``values`` of them stay.
    """

    def __init__(self, kind, keys, values, recent, observed=8, scale=0.25):
        self.kind, self.sizes, self.recent, self.observed = kind, {"k": keys, "v": values}, recent, observed
        self.scale, self.old, self.channels = scale, [], []

    def started(self, layers, held):
        for attn, tokens in zip(layers, held, strict=True):
            n, stored_heads = attn.k.shape[1], len(tokens)
            old, channels = [], []
            for h, kept_tokens in enumerate(sorted(t) for t in tokens):
                group = len(attn.q) // stored_heads
                q = attn.q[h * group : (h + 1) * group, n - self.observed :]
                k, v = (x[h * len(x) // stored_heads] for x in (attn.k, attn.v))
                by_key = key_scores(self.kind, q, k[kept_tokens])
                by_value = value_scores(q, k, v, kept_tokens, len(kept_tokens), n, self.scale)
                channels.append({"k": top(by_key, self.sizes["k"]), "v": top(by_value, self.sizes["v"])})
                old.append(kept_tokens[: max(0, len(kept_tokens) - self.recent)])
            self.old.append(old)
            self.channels.append(channels)

    def gone(self, what, layer, head):
        """(tokens, channels) that are not there."""
        remaining = self.channels[layer][head][what]
        return self.old[layer][head], [c for c in range(16) if c not in remaining]

    def read(self, what, layer, x):
        if not self.old:
            return x
        heads = len(self.old[layer])
        wide = x.repeat_interleave(heads // len(x), 0).clone()
        for h in range(heads):
            tokens, channels = self.gone(what, layer, h)
            wide[h][[[j] for j in tokens], channels] = 0
        return wide

    def coarse(self, bits):
        """Keys rounded one by one, those of thin tokens by the channels that they have."""

        def stand_ins(layer, keys):
            out = rounded(keys, bits)
            for h in range(0 if layer is None or not self.old else len(keys)):
                remaining = self.channels[layer][h]["k"]
                for j in self.old[layer][h]:
                    out[h, j] = 0
                    out[h, j, remaining] = rounded(keys[h, j, remaining], bits)
            return out

        return stand_ins


def evicting(model, ids, new, kept, leaves, bits=None, stand_ins=None, blind=0, thin=None, heads=None):
    """``loop`` where a method says what goes: ``kept(attn)`` are a layer's tokens per stored head after the prompt,
    ``leaves(attn, held, head, now)`` the set that leaves the tokens ``held`` by one stored head before the token at
    ``now`` joins them. With ``bits`` attn is that over rounded keys, ``thin`` is how the prompt's tokens are stored."""

    def decide(attn, held, now):
        if now == len(ids) - 1:
            return kept(attn)
        return [h - leaves(attn, h, i, now) for i, h in enumerate(held)]

    more = {"copied": stand_ins, "blind": blind, "heads": heads}
    if thin is not None:
        coarse = None if bits is None else thin.coarse(bits)
        return loop(model, ids, new, decide, thin.read, thin.started, coarse=coarse, **more)
    return loop(model, ids, new, decide, coarse=None if bits is None else lambda _, k: rounded(k, bits), **more)


def h2o_decoding(model, ids, new, heavy, recent, bits=None, code_mask=False, thin=None, heads=2, after=False):
    """Greedy decoding with H2O by loops over explicit attention, and the tokens held at its end."""
    n = len(ids)

    def mass(attn):
        if attn.mass is None:  # every head of a layer asks
            attn.mass = stored(row_sums(attn, len(attn[0])), heads)
        return attn.mass

    def kept_after_prompt(attn):
        return [top(s[: n - recent], heavy) + list(range(n - recent, n)) for s in mass(attn)]

    def leaves(attn, held, head, now):
        received = mass(attn)[head]
        if after:  # the step before this one has ended: its token is among the recent ones, and C stay
            old = sorted((j for j in held if j <= now - 1 - recent), key=lambda j: (received[j], -j))
            return set(old[: max(0, len(held) - heavy - recent)])
        old = sorted((j for j in held if j <= now - recent - code_mask), key=lambda j: (received[j], -j))
        return set(old[: len(held) - (heavy + recent + code_mask - 1)])

    blind = recent if code_mask else 0
    return evicting(model, ids, new, kept_after_prompt, leaves, bits, blind=blind, thin=thin, heads=heads)

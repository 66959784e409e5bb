"""Slow, obvious references: every method over explicit attention matrices, with loops and Python's sort.

They share no code with the package. Layers are built by hand on a grid of eighths, so that dot products and sums of
squares are exact and a tie here is a tie there.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch

from kvbench.kv import ops
from kvbench.kv.exact_attention import column_sums
from kvbench.kv.observation import Observation
from kvbench.kv.segment import LayerCache


def grid(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random multiples of 1/8 in [-2, 2]."""
    return torch.randint(-16, 17, shape, generator=torch.Generator().manual_seed(seed)) / 8


def make_layer(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None = None,
    *,
    per: str = "kv_head",
    scale: float = 0.5,
    bits: tuple[int, ...] = (),
    **obs,
) -> tuple[LayerCache, Observation]:
    """The dense cache and the complete observation of one layer: q [Hq, n, D], k and v [Hk, n, D].

    ``bits`` are the widths of quantised keys whose column sums are observed, too.
    """
    n = q.shape[1]
    v = k.flip(1).clone() if v is None else v
    heads = q.shape[0] if per == "query_head" else k.shape[0]
    freq = torch.tensor([10_000 ** (-2 * i / q.shape[2]) for i in range(q.shape[2] // 2)])
    seen = {"layer": 0, "n_layers": 2, "prompt": 7, "inv_freq": freq, **obs}
    seen["colsums_q"] = {b: column_sums(q, rounded(k, b), scale) for b in bits}
    observation = Observation(n=n, scale=scale, last_q=q, first_q=q, colsums=column_sums(q, k, scale), **seen)
    return ops.dense(k, v, heads=heads, query_heads=q.shape[0]), observation


def kept(cache: LayerCache) -> list[list[int]]:
    """Positions held per stored head."""
    return [p.tolist() for p in cache.kept_positions()]


def attention(q: torch.Tensor, k: torch.Tensor, scale: float = 0.5) -> list[list[list[float]]]:
    """A[h][i][j], the causal softmax of every query head."""
    queries, keys = q.tolist(), k.tolist()
    group = len(queries) // len(keys)
    result = []
    for h, head in enumerate(queries):
        rows = []
        for i, query in enumerate(head):
            logits = [scale * sum(a * b for a, b in zip(query, keys[h // group][j], strict=True)) for j in range(i + 1)]
            rows.append(softmax(logits) + [0.0] * (len(head) - i - 1))
        result.append(rows)
    return result


def softmax(logits: list[float]) -> list[float]:
    highest = max(logits)
    exps = [math.exp(x - highest) for x in logits]
    total = sum(exps)
    return [e / total for e in exps]


def rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Every vector of x [..., D] rounded alone to 2^bits steps of a half-precision scale with an integer zero."""
    vectors, last = x.float().numpy(), 2**bits - 1
    low, high = vectors.min(-1, keepdims=True), vectors.max(-1, keepdims=True)
    scale = np.maximum((high - low) / np.float32(last), np.float32(1e-5)).astype(np.float16).astype(np.float32)
    zero = np.rint(-low / scale).clip(0, last)
    codes = (np.rint(vectors / scale) + zero).clip(0, last)
    return torch.from_numpy((codes - zero) * scale)


def top(scores: list[float], count: int) -> list[int]:
    """The ``count`` best, ties to the lower index, ascending."""
    return sorted(sorted(range(len(scores)), key=lambda j: (-scores[j], j))[:count])


def stored(per_query_head: list[list[float]], heads: int) -> list[list[float]]:
    """Scores of the stored heads: the mean over the query heads of each group."""
    group = len(per_query_head) // heads
    return [
        [sum(column) / group for column in zip(*per_query_head[h * group : (h + 1) * group], strict=True)]
        for h in range(heads)
    ]


def row_sums(attn: list[list[list[float]]], last: int) -> list[list[float]]:
    """Attention that each token received from the last ``last`` queries, per query head."""
    return [[sum(column) for column in zip(*head[-last:], strict=True)] for head in attn]


def h2o(attn, heads: int, size: int, window: int, variant: str) -> list[list[int]]:
    n = len(attn[0])
    scores = stored(row_sums(attn, n if variant == "all" else window), heads)
    return [top(s[: n - window], size - window) + list(range(n - window, n)) for s in scores]


def snapkv(attn, heads: int, size: int, window: int, kernel: int, pooling: str) -> list[list[int]]:
    n = len(attn[0])
    scores = pooled_window(attn, heads, window, kernel, pooling)
    return [top(s, size - window) + list(range(n - window, n)) for s in scores]


def pooled_window(attn, heads: int, window: int, kernel: int, pooling: str) -> list[list[float]]:
    result = []
    for s in stored([r[: len(r) - window] for r in row_sums(attn, window)], heads):
        half, pooled = kernel // 2, []
        for j in range(len(s)):
            near = [s[i] for i in range(j - half, j + half + 1) if 0 <= i < len(s)]
            pooled.append(max(near) if pooling == "max" else sum(near) / kernel)
        result.append(pooled)
    return result


def adakv(attn, heads, size, window, kernel, pooling, floor, floor_rule) -> list[list[int]]:
    """Joint ranking of (head, token) pairs of one layer; what the even floor leaves open follows it."""
    n, free = len(attn[0]), size - window
    one_more = [snapkv(attn, heads, window + m, window, kernel, pooling) for m in range(n - window + 1)]
    ranked = [[t for a, b in itertools.pairwise(o[h] for o in one_more) for t in b if t not in a] for h in range(heads)]
    scores = pooled_window(attn, heads, window, kernel, pooling)
    if floor_rule == "safe":
        sure = max(0, int(floor * size) - window)
        kept_of = [ranked[h][:sure] for h in range(heads)]
        rest = sorted((-scores[h][t], h, t) for h in range(heads) for t in ranked[h][sure:])
        for _, h, t in rest[: free * heads - sure * heads]:
            kept_of[h].append(t)
        counts = [len(x) for x in kept_of]
    else:
        best = sorted((-scores[h][t], h, t) for h in range(heads) for t in range(n - window))[: free * heads]
        shares = [(1 - floor) * sum(x[1] == h for x in best) + floor * free for h in range(heads)]
        counts = [int(x) for x in shares]
        for h in sorted(range(heads), key=lambda h: int(shares[h]) - shares[h])[: free * heads - sum(counts)]:
            counts[h] += 1
    return [sorted(ranked[h][: counts[h]]) + list(range(n - window, n)) for h in range(heads)]


def keynorm(k: torch.Tensor, heads: int, size: int, protect_recent: int) -> list[list[int]]:
    n, group = k.shape[1], heads // k.shape[0]
    result = []
    for h in range(heads):
        scores = [-math.sqrt(sum(x * x for x in token)) for token in k.tolist()[h // group]]
        result.append(top(scores[: n - protect_recent], size - protect_recent) + list(range(n - protect_recent, n)))
    return result


def streamingllm(n: int, heads: int, size: int, sinks: int) -> list[list[int]]:
    return [list(range(sinks)) + list(range(n - (size - sinks), n)) for _ in range(heads)]


def think(q: torch.Tensor, k: torch.Tensor, tokens: list[list[int]], count: int, observed: int) -> list[list[int]]:
    """Channels by the Frobenius norm of q_j k_j^T over the retained ``tokens`` of each stored head."""
    heads = len(tokens)
    queries, keys = q.tolist(), k.tolist()
    group_q, group_k = len(queries) // heads, heads // len(keys)
    result = []
    for h in range(heads):
        ours = [row for head in queries[h * group_q : (h + 1) * group_q] for row in head[-observed:]]
        held_tokens = [keys[h // group_k][t] for t in tokens[h]]
        scores = [sum((a[j] * b[j]) ** 2 for a in ours for b in held_tokens) for j in range(k.shape[2])]
        result.append(top(scores, count))
    return result


def magnitude(k: torch.Tensor, tokens: list[list[int]], count: int, p: int) -> list[list[int]]:
    heads, keys = len(tokens), k.tolist()
    group = heads // len(keys)
    return [
        top([sum(abs(keys[h // group][t][j]) ** p for t in tokens[h]) for j in range(k.shape[2])], count)
        for h in range(heads)
    ]


def pyramid(n: int, size: int, window: int, beta: int, layers: int) -> list[int]:
    """KVCache-Factory's schedule as it is written there: tokens per layer, window included."""
    if n < size:
        return [n] * layers
    if n < 2 * (size - window):
        return [size] * layers
    least = (size - window) // beta
    most = 2 * (size - window) - least
    if most >= n - window:
        most = n - window
        least = 2 * (size - window) - most
    step = (most - least) // (layers - 1)
    return [most - layer * step + window for layer in range(layers)]


def pyramidkv(attn, heads: int, size: int, window: int, kernel: int, pooling: str, beta: int, layer=0, layers=2):
    return snapkv(attn, heads, pyramid(len(attn[0]), size, window, beta, layers)[layer], window, kernel, pooling)


def tova(attn, heads: int, size: int, per_head: bool) -> list[list[int]]:
    n = len(attn[0])
    rows = [head[-1] for head in attn]
    scores = stored(rows, heads) if per_head else stored(rows, 1) * heads
    return [[*top(s[: n - 1], size - 1), n - 1] for s in scores]


def scissorhands(attn, heads: int, size: int, window: int, recent: int, variant: str) -> list[list[int]]:
    n = len(attn[0])
    scores = stored(row_sums(attn, window), heads)
    return [top(s[: n - recent], size - recent) + list(range(n - recent, n)) for s in scores]


def refreekv(attn, heads: int, T: float, m: int, k: int, mode: str, reduce: str, order: str, ranking: str):
    """Every count is found by trying: is what is left of the norm enough with one token more?"""
    n, hq = len(attn[0]), len(attn)
    mean_rows = [[s / min(k, n - j) for j, s in enumerate(head)] for head in row_sums(attn, k)]
    ranked = list(range(n - 1, m - 1, -1))
    if ranking == "attention":
        columns = row_sums(attn, n)
        received = [sum(columns[h][j] for h in range(hq)) / hq / (n - j) for j in range(n)]
        ranked = sorted(range(m, n), key=lambda j: (-received[j], j))
    ranked = list(range(m)) + ranked

    def norm(head, tokens):
        return math.sqrt(sum(head[j] ** 2 for j in tokens))

    if mode == "code":
        complete = sum(norm(head, ranked[m:]) for head in mean_rows) / hq
        count = m + 1
        while (complete - sum(norm(head, ranked[m:count]) for head in mean_rows) / hq) / complete > T:
            count += 1
        return [sorted(ranked[:count])] * heads
    vectors = {
        "mean_heads": lambda: stored(mean_rows, 1),
        "max_heads": lambda: mean_rows,
        "per_head": lambda: stored(mean_rows, heads),
    }[reduce]()
    summed = ranked if order == "sinks_first" else ranked[m:] + ranked[:m]
    counts = []
    for vector in vectors:
        place = 0
        while place < n and 1 - norm(vector, summed[: place + 1]) / norm(vector, summed) >= T:
            place += 1
        counts.append(min(n, max(1, place if order == "sinks_last" else place + 1)))
    if reduce == "max_heads":
        counts = [max(counts)]
    counts = counts if reduce == "per_head" else counts * heads
    return [sorted(ranked[:c]) for c in counts]


def expectedattention(q, k, v, heads: int, size: int, sinks: int, future: int, covariance: bool, vnorm: bool):
    """Queries turned back to position 0, their mean and covariance, turned by every future position and averaged."""
    hq, n, d = q.shape
    half, group_k, scale = d // 2, hq // k.shape[0], 0.5
    freq = [10_000 ** (-2 * i / d) for i in range(half)]

    def turned(x, at):
        c, s = [math.cos(at * f) for f in freq], [math.sin(at * f) for f in freq]
        low = [x[i] * c[i] - x[half + i] * s[i] for i in range(half)]
        return low + [x[half + i] * c[i] + x[i] * s[i] for i in range(half)]

    def ahead(x):
        each = [turned(x, n + t) for t in range(future)]
        return [sum(column) / future for column in zip(*each, strict=True)]

    def dot(a, b):
        return sum(x * y for x, y in zip(a, b, strict=True))

    per_query_head = []
    for h in range(hq):
        plain = [turned(x, -(sinks + i)) for i, x in enumerate(q[h].tolist()[sinks:])]
        mean = [sum(column) / len(plain) for column in zip(*plain, strict=True)]
        # (R (x - mean)) . k is linear in x: its mean square is k's quadratic form in the turned covariance
        centred = [ahead([a - b for a, b in zip(x, mean, strict=True)]) for x in plain] if covariance else []
        logits, mean_ahead = [], ahead(mean)
        for key in k[h // group_k].tolist()[sinks:]:
            spread = sum(dot(x, key) ** 2 for x in centred) / max(1, len(centred))
            logits.append(scale * dot(mean_ahead, key) + scale**2 * spread / 2)
        per_query_head.append(softmax(logits))
    result = []
    for h, scores in enumerate(stored(per_query_head, heads)):
        values = v[h // (heads // k.shape[0])].tolist()[sinks:]
        if vnorm:
            scores = [s * math.sqrt(dot(x, x)) for s, x in zip(scores, values, strict=True)]
        result.append([*range(sinks), *(sinks + j for j in top(scores, size - sinks))])
    return result


def keydiff(k: torch.Tensor, heads: int, size: int, variant: str = "once", block: int = 128) -> list[list[int]]:
    result = []
    for keys in k.double().tolist():

        def best(held, keys=keys):
            unit = [[x / math.hypot(*keys[j]) for x in keys[j]] for j in held]
            anchor = [sum(column) / len(held) for column in zip(*unit, strict=True)]
            scores = [-sum(a * b for a, b in zip(u, anchor, strict=True)) / math.hypot(*anchor) for u in unit]
            return [held[i] for i in top([round(s, 9) for s in scores], size)]

        n = len(keys)
        held = list(range(n if variant == "once" else size if variant == "block" else 0))
        for start in range(len(held), n, block):
            held = best(held + list(range(start, min(start + block, n))))
        result.append(best(held))
    return [result[h // (heads // len(result))] for h in range(heads)]


def chunkkv(attn, heads, size, window, kernel, pooling, chunk, variant) -> list[list[int]]:
    n = len(attn[0])
    tokens = [sum(column) for column in zip(*pooled_window(attn, heads, window, kernel, pooling), strict=True)]
    if variant == "code":
        tokens += [heads * max(max(s) for s in pooled_window(attn, heads, window, kernel, pooling))] * window
    chunks = [list(range(i, min(i + chunk, len(tokens)))) for i in range(0, len(tokens), chunk)]
    scores = [sum(tokens[j] for j in c) / (1 if variant == "paper" else len(c)) for c in chunks]
    ranked = sorted(range(len(chunks)), key=lambda c: (-round(scores[c], 9), c))
    tail = list(range(len(tokens), n))
    if variant == "fill":
        kept_tokens = [j for c in ranked for j in chunks[c]][: size - window]
    else:
        count = (size - window) // chunk if variant == "paper" else max(1, size * len(chunks) // n)
        kept_tokens = [j for c in ranked[:count] for j in chunks[c]]
    return [sorted(kept_tokens + tail)] * heads

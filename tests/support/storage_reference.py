"""A slow, obvious reference of how tokens are stored and read back while decoding.

Every stored head is a list of the vectors that attention reads: exact, with channels at zero, or rounded. It shares no
code with the package (see method_reference): the quantiser below is the documented one, group by group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from support.method_reference import top


@dataclass(frozen=True)
class Storage:
    """How a chain stores tokens. ``quantiser``: None, "kivi" or "flexgen"; ``residual`` is KIVI's R.

    ``keys`` and ``values``: channels that stay, None: all; ``recent``: last tokens that keep all.
    """

    prune: str | None = None
    keys: int | None = None
    values: int | None = None
    recent: int = 0
    observed: int = 8
    quantiser: str | None = None
    bits: int = 2
    group: int = 4
    residual: int = 8

    def packed_keys(self, tokens: int) -> int:
        """Of ``tokens`` read, those that are packed: all but the larger of ``recent`` and what does not fill a block of
        the quantiser, in whole groups."""
        block, group = (self.residual, self.group) if self.quantiser == "kivi" else (1, 1)
        past_blocks = 0
        while past_blocks + block <= tokens:
            past_blocks += block
        may_go = min(past_blocks, tokens - self.recent)
        count = 0
        while count + group <= may_go:
            count += group
        return count

    def packed_values(self, tokens: int) -> int:
        """Values go one by one, when they have left the window."""
        return max(0, tokens - max(self.recent, self.residual if self.quantiser == "kivi" else 0))


def rounded(groups: torch.Tensor, bits: int) -> torch.Tensor:
    """Groups [m, size] fp32 as stored: codes from each one's fp16 minimum up, in steps of its fp16 scale."""
    low, high = groups.amin(dim=1, keepdim=True), groups.amax(dim=1, keepdim=True)
    low16 = low.half().float()
    scale = ((high - low16).clamp(min=0) / (2**bits - 1)).half().float()
    codes = ((groups - low16) / scale).round().clamp(0, 2**bits - 1)
    return torch.where((high == low) | (scale == 0), low16, codes * scale + low16)


def by_token(rows: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """rows [m, C], each in groups of ``group`` channels, the last one shorter."""
    return torch.cat([rounded(part, bits) for part in rows.split(group, dim=1)], dim=1)


def by_channel(rows: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """rows [m, C] in groups of ``group`` tokens of one channel."""
    return torch.cat([rounded(block.T, bits).T for block in rows.split(group)])


@dataclass
class Head:
    """One stored head: what is read of its tokens [m, D], and how many of the first are stored thin or packed."""

    storage: Storage
    k: torch.Tensor
    v: torch.Tensor
    key_channels: list[int]
    value_channels: list[int]
    old_k: int = 0
    old_v: int = 0

    def store(self, keys: int, values: int) -> None:
        """So many more tokens, the oldest exact ones, are read as they are stored from now on."""
        s, pack_keys, pack_values = self.storage, by_token, by_token
        if s.quantiser is None:
            pack_keys = pack_values = untouched
        elif s.quantiser == "kivi":
            pack_keys = by_channel
        for t, start, count, channels, pack in (
            (self.k, self.old_k, keys, self.key_channels, pack_keys),
            (self.v, self.old_v, values, self.value_channels, pack_values),
        ):
            if count:
                part = pack(t[start : start + count, channels], s.bits, s.group)
                t[start : start + count] = 0
                t[start : start + count, channels] = part
        self.old_k, self.old_v = self.old_k + keys, self.old_v + values

    def settle(self) -> None:
        """Pack what has left the residual; without a quantiser new tokens stay as they are."""
        s = self.storage
        if s.quantiser is not None:
            self.store(s.packed_keys(len(self.k)) - self.old_k, s.packed_values(len(self.v)) - self.old_v)


def untouched(rows: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    return rows


class Layer:
    """One layer of one prompt: q [Hq, n, D], k and v [Hk, n, D] and the tokens that each stored head retains."""

    def __init__(self, storage: Storage, q, k, v, tokens: list[list[int]], scale: float) -> None:
        self.scale, self.query_heads, self.shared = scale, len(q), len(k)
        self.heads = []
        for h, stored in enumerate(tokens):
            queries = q[h * len(q) // len(tokens) : (h + 1) * len(q) // len(tokens), -storage.observed :]
            source = h * len(k) // len(tokens)
            self.heads.append(_stored(storage, queries, k[source], v[source], stored, q.shape[1], scale))

    def step(self, q, k, v, mass: float | None = None, estimate=lambda key: key) -> torch.Tensor:
        """Attention [Hq, T, D] of T new tokens q [Hq, T, D], k and v [Hk, T, D]; then tokens leave the residual.

        With ``mass`` each query head reads only the fewest tokens of that mass under keys ``estimate``d one by one.
        """
        out, group = torch.empty_like(q), self.query_heads // len(self.heads)
        for h, head in enumerate(self.heads):
            source = h * self.shared // len(self.heads)
            head.k, head.v = torch.cat([head.k, k[source]]), torch.cat([head.v, v[source]])
            thin = [head.key_channels if i < head.old_k else None for i in range(len(head.k))]
            for ours in range(h * group, (h + 1) * group):
                for t in range(q.shape[1]):
                    seen = len(head.k) - q.shape[1] + t + 1
                    logits = head.k[:seen] @ q[ours, t] * self.scale
                    if mass is not None:
                        coarse = torch.stack([estimated(x, c, estimate) for x, c in zip(head.k, thin, strict=True)])
                        weights = (coarse[:seen] @ q[ours, t] * self.scale).softmax(0)
                        chosen = fewest(weights.tolist(), mass)
                        logits[[j for j in range(seen) if j not in chosen]] = -math.inf
                    out[ours, t] = logits.softmax(0) @ head.v[:seen]
            head.settle()
        return out


def estimated(key: torch.Tensor, channels: list[int] | None, estimate) -> torch.Tensor:
    """``estimate`` of one key; of a thin one, of the channels that it has."""
    if channels is None:
        return estimate(key)
    out = torch.zeros_like(key)
    out[channels] = estimate(key[channels])
    return out


def fewest(weights: list[float], mass: float) -> set[int]:
    chosen: set[int] = set()
    for j in sorted(range(len(weights)), key=lambda j: -weights[j]):
        chosen.add(j)
        if sum(weights[i] for i in chosen) >= mass:
            break
    return chosen


def value_scores(q, k, v, held: list[int], counted: int, n: int, scale: float) -> list[float]:
    """||A V[:, j]||^2 over the first ``counted`` of the tokens ``held``; A of the last queries q [g, w, D]: loops."""
    squares = [0.0] * v.shape[1]
    for head in q.tolist():
        for i, query in enumerate(head):
            seen = [j for j in held if j <= n - len(head) + i]
            if not seen:
                continue
            logits = [scale * sum(a * b for a, b in zip(query, k[j].tolist(), strict=True)) for j in seen]
            exps = [math.exp(x - max(logits)) for x in logits]
            for c in range(len(squares)):
                mixed = [e / sum(exps) * float(v[j, c]) for e, j in zip(exps, seen, strict=True) if j in held[:counted]]
                squares[c] += sum(mixed) ** 2
    return squares


def key_scores(kind: str, q, keys: torch.Tensor) -> list[float]:
    """Scores of key channels by the keys [m, D] that count: ThinK's squared, or sums of magnitudes."""
    queries = q.reshape(-1, q.shape[-1])
    if kind in ("think", "thinkv"):
        return [
            float(queries[:, j].double().square().sum() * keys[:, j].double().square().sum())
            for j in range(len(keys.T))
        ]
    return [float(keys[:, j].double().abs().pow(int(kind[1])).sum()) for j in range(len(keys.T))]


def _stored(s: Storage, q, k, v, held: list[int], n: int, scale: float) -> Head:
    d, m = k.shape[1], len(held)
    head = Head(s, k[held], v[held], list(range(d)), list(range(d)))
    if s.quantiser is None:
        old_k = old_v = max(0, m - s.recent) if s.prune else 0
        counted_k = counted_v = m
    else:
        old_k, old_v = s.packed_keys(m), s.packed_values(m)
        counted_k, counted_v = old_k or m, old_v or m
    if s.keys is not None and s.keys < d:
        head.key_channels = top(key_scores(s.prune, q, k[held[:counted_k]]), s.keys)
    if s.values is not None and s.values < d:
        head.value_channels = top(value_scores(q, k, v, held, counted_v, n, scale), s.values)
    head.store(old_k, old_v)
    return head

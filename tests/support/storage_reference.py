"""A slow, obvious reference of how tokens are stored and read back while decoding.

Every stored head is a list of the vectors that attention reads: exact, with channels at zero, or rounded. It shares no
code with the package (see method_reference): the quantiser below is the documented one, group by group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from support.method_reference import softmax, top


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
    """rows [m, C], each in groups of ``group`` channels; the last one, if shorter, is filled with its last channel."""
    m, c = rows.shape
    filled = torch.cat([rows, rows[:, -1:].expand(m, -c % group)], dim=1)
    return rounded(filled.reshape(-1, group), bits).view(m, -1)[:, :c]


def by_channel(rows: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """rows [m, C] in whole groups of ``group`` tokens of one channel."""
    m, c = rows.shape
    groups = rows.view(m // group, group, c).transpose(1, 2)
    return rounded(groups.reshape(-1, group), bits).view(-1, c, group).transpose(1, 2).reshape(m, c)


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

    def step(self, q, k, v, mass: float | None = None, estimate=torch.clone) -> torch.Tensor:
        """Attention [Hq, T, D] of T new tokens q [Hq, T, D], k and v [Hk, T, D]; then tokens leave the residual.

        With ``mass`` each query head reads only the fewest tokens of that mass under keys [m, D] as ``estimate`` has
        them, a thin key by the channels that it has.
        """
        out, group = torch.empty_like(q), self.query_heads // len(self.heads)
        for h, head in enumerate(self.heads):
            source = h * self.shared // len(self.heads)
            head.k, head.v = torch.cat([head.k, k[source]]), torch.cat([head.v, v[source]])
            queries, coarse = q[h * group : (h + 1) * group], None
            if mass is not None:
                coarse = estimate(head.k)
                coarse[: head.old_k] = 0
                coarse[: head.old_k, head.key_channels] = estimate(head.k[: head.old_k, head.key_channels])
            to_come = torch.ones(q.shape[1], len(head.k), dtype=torch.bool).triu(len(head.k) - q.shape[1] + 1)
            logits = (queries @ head.k.T * self.scale).masked_fill(to_come, -math.inf)
            if coarse is not None:
                weights = (queries @ coarse.T * self.scale).masked_fill(to_come, -math.inf).softmax(2)
                for ours, row in zip(logits.flatten(0, 1), weights.flatten(0, 1).tolist(), strict=True):
                    attended = fewest(row, mass)
                    ours[[j for j in range(len(row)) if j not in attended]] = -math.inf
            out[h * group : (h + 1) * group] = logits.softmax(2) @ head.v
            head.settle()
        return out


def fewest(weights: list[float], mass: float) -> set[int]:
    chosen: set[int] = set()
    total = 0.0
    for j in sorted(range(len(weights)), key=lambda j: -weights[j]):
        chosen.add(j)
        total += weights[j]
        if total >= mass:
            break
    return chosen


def value_scores(q, k, v, held: list[int], counted: int, n: int, scale: float) -> list[float]:
    """||A V[:, j]||^2 over the first ``counted`` of the tokens ``held``; A of the last queries q [g, w, D]: loops."""
    squares = [0.0] * v.shape[1]
    keys, values, counts = k.tolist(), v.tolist(), set(held[:counted])
    for head in q.tolist():
        for i, query in enumerate(head):
            seen = [j for j in held if j <= n - len(head) + i]
            if not seen:
                continue
            logits = [scale * sum(a * b for a, b in zip(query, keys[j], strict=True)) for j in seen]
            weights = [(a, values[j]) for a, j in zip(softmax(logits), seen, strict=True) if j in counts]
            for c in range(len(squares)):
                squares[c] += sum(weight * value[c] for weight, value in weights) ** 2
    return squares


def key_scores(kind: str, q, keys: torch.Tensor) -> list[float]:
    """Scores of key channels by the keys [m, D] that count: ThinK's squared, or sums of magnitudes."""
    queries = q.reshape(-1, q.shape[-1])
    if kind in ("think", "thinkv"):
        return (queries.double().square().sum(0) * keys.double().square().sum(0)).tolist()
    return keys.double().abs().pow(int(kind[1])).sum(0).tolist()


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

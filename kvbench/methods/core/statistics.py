"""Statistics of a layer that several methods score with, all in fp32.

A[h, i, j] is the attention weight of query i of head h on token j, after the softmax.

Shapes of a prompt: Hq query heads, Hk kv heads, n tokens that the layer read, w queries of a window, D head dimension.
Shapes while decoding: B rows, H stored heads, S slots, T new tokens. The word ``heads`` in a shape means stored heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from kvbench.kv import ops
from kvbench.kv.exact_attention import causal_softmax
from kvbench.kv.observation import Observation
from kvbench.kv.segment import LayerCache, per_head
from kvbench.storage.roles import Slots


def window_rows(
    cache: LayerCache,
    obs: Observation,
    window: int,
    estimate: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the attention rows A [Hq, w, n] of the last w = min(window, n) queries of a prompt.

    ``estimate`` maps the keys to those that the queries are multiplied with, for example quantised ones. None takes the
    keys as they are.
    """
    keys = _read_keys(cache, obs)
    if estimate is not None:
        keys = estimate(keys)
    # A[h, i, :] = softmax over the tokens j <= i of scale * q_i . k_j
    return causal_softmax(obs.queries(window), keys, obs.scale)


def window_sums(cache: LayerCache, obs: Observation, window: int, block: int = 64) -> torch.Tensor:
    """Return the sums [Hq, n] over the last ``window`` queries i of A[h, i, j]: the attention that token j received.

    The queries are taken ``block`` at a time, so that memory holds only [Hq, block, n] attention weights.
    """
    queries, keys = obs.queries(window), _read_keys(cache, obs)
    # the queries are those of the last tokens: query 0 is that of token n - w
    earlier_tokens = obs.n - queries.shape[1]
    sums = torch.zeros(queries.shape[0], obs.n, device=queries.device)
    for start in range(0, queries.shape[1], block):
        rows = queries[:, start : start + block]
        end = earlier_tokens + start + rows.shape[1]
        # sum over the queries i of A[h, i, j]; keys past the last query of the block receive nothing
        sums[:, :end] += causal_softmax(rows, keys[:, :end], obs.scale).sum(dim=1)
    return sums


def _read_keys(cache: LayerCache, obs: Observation) -> torch.Tensor:
    """Return the keys [Hk, n, D] that the prompt's attention read, which may differ from the stored ones."""
    if obs.read_k is not None:
        return obs.read_k
    return ops.only_segment(cache).k


def group_mean(scores: torch.Tensor, heads: int) -> torch.Tensor:
    """Return [heads, ...]: the mean of scores [Hq, ...] over the query heads that share a stored head."""
    if scores.shape[0] == heads:
        return scores
    # [heads, group, ...]: the query heads of a group lie one after the other
    return scores.view(heads, scores.shape[0] // heads, *scores.shape[1:]).mean(dim=1)


def group_rows(probs: torch.Tensor, heads: int) -> torch.Tensor:
    """Return [B, heads, T, S]: the mean of attention probs [B, Hq, T, S] over query heads that share a stored head."""
    # [B, heads, group, T, S], as in ``group_mean``
    b, _, t, size = probs.shape
    return probs.view(b, heads, -1, t, size).mean(dim=2)


def at_heads(scores: torch.Tensor, heads: int) -> torch.Tensor:
    """Return scores [Hk, ...] as [heads, ...]: repeated where more heads are stored, averaged where fewer are."""
    # fewer heads are stored for latents, which all heads of a layer share
    if scores.shape[0] > heads:
        return group_mean(scores, heads)
    return per_head(scores, heads)


def pool(scores: torch.Tensor, kernel: int, kind: str) -> torch.Tensor:
    """Return scores [H, m] pooled over ``kernel`` (odd) neighbouring tokens. ``kind`` is ``max`` or ``avg`` (the mean).

    At both ends, neighbours that do not exist are -inf for the maximum. The mean counts them as zeros.
    """
    if kernel == 1 or scores.shape[-1] == 0:
        return scores
    if kind == "max":
        return F.max_pool1d(scores[:, None], kernel, stride=1, padding=kernel // 2)[:, 0]
    return F.avg_pool1d(scores[:, None], kernel, stride=1, padding=kernel // 2)[:, 0]


def pool_slots(scores: torch.Tensor, slots: Slots, kernel: int, kind: str) -> torch.Tensor:
    """Return scores [B, H, S] of slots pooled over ``kernel`` tokens of neighbouring positions.

    Slots hold tokens in no order, so scores are pooled in order of position and put back. Free slots come last.

    kind: ``max`` takes the largest score of the neighbours, ``avg`` their mean.
    """
    order = ops.order_by_position(slots.positions, slots.valid)
    ordered = scores.gather(2, order)
    # ``pool`` takes one row for each head: here [B * H, S]
    pooled = pool(ordered.flatten(0, 1), kernel, kind).view_as(ordered)
    # the slot in place i of the order gets the pooled score in place i
    return torch.empty_like(pooled).scatter_(2, order, pooled)


def recent_slots(slots: Slots, count: str) -> torch.Tensor:
    """Return a mask [B, H, S] of the slots that hold one of the text's last m tokens.

    m is ``slots.counts[count]``: ``count`` is a name in the method's ``token_counts``, such as "recent".
    """
    return slots.positions > slots.now - slots.counts[count]


def ring_of_rows(rows: torch.Tensor, end: int, size: int) -> torch.Tensor:
    """Return attention rows [H, w, n] as a ring [H, n, size]: each token's attention from the last ``size`` queries.

    w is at most ``size``. The attention from the query at position i is in column i mod size. The last of the w rows is
    that of position ``end`` - 1. ``end`` is the prompt's length, also where the layer read fewer tokens, so that
    columns go on with the positions of new tokens.
    """
    heads, w, n = rows.shape
    ring = rows.new_zeros(heads, n, size)
    # row r is that of position end - w + r
    columns = torch.arange(end - w, end, device=rows.device) % size
    ring[:, :, columns] = rows.transpose(1, 2)
    return ring


def fold_ring(slots: Slots, probs: torch.Tensor, size: int) -> Mapping[str, torch.Tensor]:
    """Return {"ring": the ring [B, H, S, size]} with the attention of T new queries in place of its oldest columns.

    probs [B, Hq, T, S] are the attention weights of these queries.
    """
    # if more new rows come than the ring has columns, only the last rows remain
    rows = group_rows(probs, slots.positions.shape[1])[:, :, -size:]
    # [B, H, S, T]: each slot gets its attention from the T queries
    rows = rows.transpose(2, 3)
    # the positions of the T queries are now - T + 1, ..., now
    age = torch.arange(rows.shape[3] - 1, -1, -1, device=rows.device)
    columns = (slots.now - age) % size
    return {"ring": slots.state["ring"].scatter(3, columns[:, :, None].expand_as(rows), rows)}

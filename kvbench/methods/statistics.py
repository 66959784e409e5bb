"""Statistics of a layer that several methods score with, all in fp32."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from kvbench.cache import ops
from kvbench.cache.exact_attention import causal_softmax
from kvbench.cache.observation import Observation
from kvbench.cache.segment import LayerCache, per_head


def window_rows(
    cache: LayerCache,
    obs: Observation,
    window: int,
    estimate: Callable[[torch.Tensor], torch.Tensor] = lambda keys: keys,
) -> torch.Tensor:
    """Attention rows [Hq, w, n] of the last ``w = min(window, n)`` prompt tokens over ``estimate`` of the keys."""
    return causal_softmax(obs.queries(window), estimate(_keys(cache, obs)), obs.scale)


def window_sums(cache: LayerCache, obs: Observation, window: int, block: int = 64) -> torch.Tensor:
    """Attention [Hq, n] that each token received from the last ``window`` queries, ``block`` of them at a time."""
    queries, keys = obs.queries(window), _keys(cache, obs)
    before = obs.n - queries.shape[1]
    sums = torch.zeros(queries.shape[0], obs.n, device=queries.device)
    for start in range(0, queries.shape[1], block):
        rows = queries[:, start : start + block]
        end = before + start + rows.shape[1]
        sums[:, :end] += causal_softmax(rows, keys[:, :end], obs.scale).sum(dim=1)
    return sums


def _keys(cache: LayerCache, obs: Observation) -> torch.Tensor:
    """The keys [H, n, D] that the prompt's attention read."""
    return ops.only_segment(cache).k if obs.read_k is None else obs.read_k


def group_mean(scores: torch.Tensor, heads: int) -> torch.Tensor:
    """[Hq, ...] -> [heads, ...]: the mean over the query heads that share a stored head, before pooling or top-k."""
    if scores.shape[0] == heads:
        return scores
    return scores.view(heads, scores.shape[0] // heads, *scores.shape[1:]).mean(dim=1)


def at_heads(scores: torch.Tensor, heads: int) -> torch.Tensor:
    """[Hk, ...] -> [heads, ...]: repeated where more heads are stored, the mean where they share a stored head."""
    return per_head(scores, heads) if scores.shape[0] <= heads else group_mean(scores, heads)


def top_indices(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices [H, k], ascending, of the k largest of scores [H, n]; ties go to the lower index."""
    heads, n = scores.shape
    if not scores.is_cuda and 0 < k < n:  # selecting is faster than sorting; on a GPU it would have to wait for counts
        kept = scores >= scores.kthvalue(n - k + 1, dim=-1, keepdim=True).values
        if bool((kept.sum(dim=-1) == k).all()):
            return kept.nonzero()[:, 1].view(heads, k)
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :k]
    return order.sort(dim=-1).values


def pool(scores: torch.Tensor, kernel: int, kind: str) -> torch.Tensor:
    """Smooth scores [H, m] along tokens, stride 1, same length: max pads with -inf, avg counts zero padding."""
    if kernel == 1 or scores.shape[-1] == 0:
        return scores
    if kind == "max":
        return F.max_pool1d(scores[:, None], kernel, stride=1, padding=kernel // 2)[:, 0]
    return F.avg_pool1d(scores[:, None], kernel, stride=1, padding=kernel // 2)[:, 0]

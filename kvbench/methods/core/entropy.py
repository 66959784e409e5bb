"""Truncated matrix entropy of heads, and the groups of heads and layers built on it (UNComp, arXiv 2410.03090).

Sigma is the mean over tokens of the outer products of centred rows of unit length (equation 1). Its trace is 1.
H_k = -sum over the k largest eigenvalues s of Sigma of s ln s, not renormalised (equation 9).
erank_k = exp(H_k) is the truncated effective rank (equation 10).
Rows are queries after RoPE (section 3.2).

Shapes: L layers, H heads (Hq query heads), n tokens, D head dimension.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbench.kv.model_shape import from_config
from kvbench.kv.observation import Needs, Observation
from kvbench.methods.core.recipe import CalibrationRun, Recipe

EPSILON = 1.0
"""A new group of layers begins if the effective rank falls by more than this (equation 11, the paper's value)."""


def measure_spectrum(rows: Tensor) -> Tensor:
    """Return the eigenvalues [H, D] fp64 of each head's Sigma, largest first, from its rows [H, n, D].

    A row that equals the mean has no direction and counts as zero.
    """
    # u = (x - mean) / ||x - mean||; the clamp leaves a row at the mean zero instead of NaN
    centred = rows.float() - rows.float().mean(dim=1, keepdim=True)
    unit = centred / centred.norm(dim=2, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    # Sigma = 1/n * sum over tokens of u u^T, eq. 1
    sigma = unit.transpose(1, 2) @ unit / rows.shape[1]
    # eigvalsh ascends, and rounding may leave a small negative eigenvalue
    return torch.linalg.eigvalsh(sigma.double()).flip(-1).clamp(min=0)


def compute_truncated_entropy(eigenvalues: Tensor, top: int | None = None) -> Tensor:
    """Return the truncated entropy H_k [...] of eigenvalues [..., D], largest first. ``top`` is k; None takes all D."""
    # H_k = -sum over the k largest s of s ln s, eq. 9; entr(s) = -s ln s
    return torch.special.entr(eigenvalues[..., :top]).sum(dim=-1)


def rank_heads(values: Tensor) -> Tensor:
    """Return each head's rank by values [..., H]: H - 1 is the largest. Among equals the lower head ranks higher."""
    order = values.sort(dim=-1, descending=True, stable=True).indices
    # the head at place i of the order gets the rank H - 1 - i
    rank_of_place = torch.arange(values.shape[-1] - 1, -1, -1, device=values.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, rank_of_place)


def make_entropy_recipe(top: int, samples: int, tokens: int | None) -> Recipe:
    """Return the calibration recipe by which UNComp groups heads and layers: H_k with k = ``top``."""
    return Recipe("uncomp", revision=1, samples=samples, tokens=tokens, knobs={"top": top})


@dataclass
class _LayerSums:
    """Sums over windows, fp64 on the CPU, of statistics that arrive layer by layer."""

    n_layers: int
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def add(self, name: str, layer: int, value: Tensor) -> None:
        """Add a statistic of any shape to row ``layer`` of the tensor ``name`` [L, ...]."""
        if name not in self.tensors:
            self.tensors[name] = torch.zeros(self.n_layers, *value.shape, dtype=torch.float64)
        self.tensors[name][layer] += value.double().cpu()


def measure_entropy(run: CalibrationRun) -> dict[str, Tensor]:
    """Measure the tensors that ``make_entropy_recipe`` asks for, over windows that are read one at a time.

    Raises UsageError for windows of fewer than D tokens.

    entropy: [L, Hq], the mean H_k of queries.
    counts: [L, Hq], in how many samples a head was in the half of its layer with the largest H_k (appendix A.4).
    ranks: [L, Hq], the sum of a head's ranks, for more than two groups.
    spectra: [L, Hq, D], the mean eigenvalues of queries.
    erank, erank_k: [3, L], the effective rank of queries, keys and values, untruncated and truncated, as means over
    heads.
    """
    shape, top = from_config(run.model.config), int(run.recipe.knobs["top"])
    # Sigma [D, D] cannot have full rank if a window has fewer than D tokens
    run.recipe.check(shape.head_dim, "head_dim")
    heads = shape.query_heads
    sums = _LayerSums(shape.layers)

    def on_layer(obs: Observation, k: Tensor, v: Tensor) -> None:
        query_spectra = measure_spectrum(obs.queries(obs.n))
        entropies = compute_truncated_entropy(query_spectra, top)
        ranks = rank_heads(entropies)
        sums.add("entropy", obs.layer, entropies)
        # the half of the heads with the largest H_k counts 1 (appendix A.4); a middle head is in the lower half
        is_in_upper_half = ranks >= heads - heads // 2
        sums.add("counts", obs.layer, is_in_upper_half)
        sums.add("ranks", obs.layer, ranks)
        sums.add("spectra", obs.layer, query_spectra)
        # [3] for queries, keys and values
        all_spectra = (query_spectra, measure_spectrum(k), measure_spectrum(v))
        sums.add("erank", obs.layer, torch.stack([_average_rank(spectra) for spectra in all_spectra]))
        sums.add("erank_k", obs.layer, torch.stack([_average_rank(spectra, top) for spectra in all_spectra]))

    samples = 0
    for window in run.windows():
        # the entropy is that of all queries of the window
        run.observe(window, Needs(last_q=window.numel()), on_layer)
        samples += 1
    measured = {name: (total / samples).float() for name, total in sums.tensors.items()}
    for name in ("counts", "ranks"):
        # counts and ranks are sums over samples, not means
        measured[name] = sums.tensors[name].float()
    for name in ("erank", "erank_k"):
        # [L, 3] as collected becomes [3, L]
        measured[name] = measured[name].transpose(0, 1).contiguous()
    return measured


def _average_rank(eigenvalues: Tensor, top: int | None = None) -> Tensor:
    """Return the mean over heads, a scalar, of the effective ranks by eigenvalues [H, D]. ``top`` truncates them."""
    # erank = exp(H), eq. 10
    return compute_truncated_entropy(eigenvalues, top).exp().mean()


def count_group_heads(heads: int, groups: int) -> list[int]:
    """Return how many of ``heads`` heads each of ``groups`` groups has, such as [11, 10, 11] for 32 heads in 3 groups.

    Heads beyond equal sizes go in pairs to the first and the last group, then to their neighbours, and so on. A single
    head left goes to the middle group, or to the later one of two middle groups.
    """
    sizes = [heads // groups] * groups
    # heads beyond equal sizes, as pairs and perhaps a single one
    pairs, single = divmod(heads % groups, 2)
    # the pairs go to both ends, from the outside inwards
    for i in range(pairs):
        sizes[i] += 1
        sizes[groups - 1 - i] += 1
    if single:
        sizes[groups // 2] += 1
    return sizes


def assign_groups(scores: Tensor, groups: int) -> list[int]:
    """Return each head's group by scores [H].

    Group 0 takes the heads with the largest scores, group 1 the next, and so on. Of equal scores the lower head comes
    first. ``count_group_heads`` says how many heads each group takes.
    """
    order = scores.sort(descending=True, stable=True).indices.tolist()
    group_of_head = [0] * len(order)
    start = 0
    for group, size in enumerate(count_group_heads(len(order), groups)):
        for head in order[start : start + size]:
            group_of_head[head] = group
        start += size
    return group_of_head


def find_erank_drops(eranks: Sequence[float], epsilon: float = EPSILON) -> list[int]:
    """Return the layers whose effective rank is more than ``epsilon`` below the previous layer's (equation 11)."""
    # layer i begins a group where erank(i - 1) - erank(i) > epsilon, eq. 11
    return [i for i in range(1, len(eranks)) if eranks[i - 1] - eranks[i] > epsilon]


def group_layers(eranks: Sequence[float], epsilon: float = EPSILON) -> list[range]:
    """Return the groups of layers. A new group begins at each drop of the effective rank."""
    # a group begins at each of these layers and ends before the next of them; the last is the number of layers
    edges = [0]
    edges += find_erank_drops(eranks, epsilon)
    edges.append(len(eranks))
    return [range(first, end) for first, end in itertools.pairwise(edges)]

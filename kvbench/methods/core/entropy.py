"""Truncated matrix entropy of heads, and the groups of heads and layers that it makes (UNComp, arXiv 2410.03090).

Sigma is the mean over tokens of the outer products of centred rows of unit length (equation 1), so that its trace is 1;
H_k = -sum over its k largest eigenvalues s of s ln s, not renormalised (equation 9); erank_k = exp(H_k) (equation 10).
Rows are queries after RoPE (section 3.2).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.kv.model_shape import from_config
from kvbench.kv.observation import Needs, Observation
from kvbench.methods.core.recipe import CalibrationRun, Recipe

EPSILON = 1.0


def spectrum(rows: Tensor) -> Tensor:
    """Return the eigenvalues [H, D] of Sigma of rows [H, n, D], largest first, in fp64. Rows at the mean are zero."""
    # Sigma = 1/n * sum over tokens of u u^T, with u = (x - mean) / ||x - mean||, eq. 1
    centred = rows.float() - rows.float().mean(dim=1, keepdim=True)
    unit = centred / centred.norm(dim=2, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    sigma = unit.transpose(1, 2) @ unit / rows.shape[1]
    return torch.linalg.eigvalsh(sigma.double()).flip(-1).clamp(min=0)


def entropy(eigenvalues: Tensor, top: int | None = None) -> Tensor:
    """Return H_k [...] of eigenvalues [..., D], largest first; ``top`` is k, None for all D."""
    # H_k = -sum over the k largest s of s ln s, eq. 9
    return torch.special.entr(eigenvalues[..., :top]).sum(dim=-1)


def ranks(values: Tensor) -> Tensor:
    """Return the rank of each head by values [..., H], H - 1 for the largest. Of equal ones the lower head is above."""
    order = values.sort(dim=-1, descending=True, stable=True).indices
    descending = torch.arange(values.shape[-1] - 1, -1, -1, device=values.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, descending)


def entropy_recipe(top: int, samples: int, tokens: int | None) -> Recipe:
    """Return the calibration by which UNComp groups heads and layers: H_k with k = ``top``."""
    return Recipe("uncomp", 1, samples, tokens, knobs={"top": top})


def measure_entropy(run: CalibrationRun) -> dict[str, Tensor]:
    """Return the tensors that ``entropy_recipe`` asks for, over windows that are read one at a time.

    entropy: [L, Hq], the mean H_k of queries.
    counts: [L, Hq], in how many samples a head was in the half of its layer with the largest H_k (appendix A.4).
    ranks: [L, Hq], the sum of a head's ranks, for more than two groups.
    spectra: [L, Hq, D], the mean eigenvalues of queries.
    erank, erank_k: [3, L], the untruncated and truncated effective rank of queries, keys and values, means over heads.
    """
    shape, top = from_config(run.model.config), int(run.recipe.knobs["top"])
    run.recipe.check(shape.head_dim, "head_dim")
    n_layers, heads = shape.layers, shape.query_heads
    sums: dict[str, Tensor] = {}

    def add(name: str, index: tuple[int, ...], value: Tensor, shape: tuple[int, ...]) -> None:
        if name not in sums:
            sums[name] = torch.zeros(*shape, *value.shape, dtype=torch.float64)
        sums[name][index] += value.double().cpu()

    def on_layer(obs: Observation, k: Tensor, v: Tensor) -> None:
        queries = spectrum(obs.queries(obs.n))
        truncated = entropy(queries, top)
        rank = ranks(truncated)
        for name, value in (
            ("entropy", truncated),
            ("counts", rank >= heads - heads // 2),
            ("ranks", rank),
            ("spectra", queries),
        ):
            add(name, (obs.layer,), value, (n_layers,))
        for i, eigenvalues in enumerate((queries, spectrum(k), spectrum(v))):
            # erank = exp(H), eq. 10
            add("erank", (i, obs.layer), entropy(eigenvalues).exp().mean(), (3, n_layers))
            add("erank_k", (i, obs.layer), entropy(eigenvalues, top).exp().mean(), (3, n_layers))

    count = 0
    for window in run.windows():
        run.observe(window, Needs(last_q=window.numel()), on_layer)
        count += 1
    summed = ("counts", "ranks")
    return {name: t.float() if name in summed else (t / count).float() for name, t in sums.items()}


def group_sizes(heads: int, groups: int) -> list[int]:
    """Return the heads of each group, equal but for the outer groups, which share the rest in pairs (11, 10, 11).

    A last odd head goes to the middle group, or to the lower of the two in the middle.
    """
    sizes = [heads // groups] * groups
    pairs, odd = divmod(heads % groups, 2)
    for i in range(pairs):
        sizes[i] += 1
        sizes[groups - 1 - i] += 1
    if odd:
        sizes[groups // 2] += 1
    return sizes


def assign(scores: Tensor, groups: int) -> list[int]:
    """Return the group of each head by scores [H], 0 for the largest; groups fill in turn, the lower head first."""
    order = scores.sort(descending=True, stable=True).indices.tolist()
    by_rank = [group for group, size in enumerate(group_sizes(len(order), groups)) for _ in range(size)]
    return [group for _, group in sorted(zip(order, by_rank, strict=True))]


def erank_drops(eranks: Sequence[float], epsilon: float = EPSILON) -> list[int]:
    """Return the layers whose effective rank is more than ``epsilon`` below that of the layer before (equation 11)."""
    return [i for i in range(1, len(eranks)) if eranks[i - 1] - eranks[i] > epsilon]


def layer_groups(eranks: Sequence[float], epsilon: float = EPSILON) -> list[range]:
    """Return the groups of layers, a new one at each drop of the effective rank."""
    edges = [0, *erank_drops(eranks, epsilon), len(eranks)]
    return [range(a, b) for a, b in itertools.pairwise(edges)]

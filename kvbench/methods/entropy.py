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

from kvbench.cache.observation import Needs, Observation
from kvbench.methods.recipe import CalibrationRun

EPSILON = 1.0


def spectrum(rows: Tensor) -> Tensor:
    """Eigenvalues [H, D] of Sigma of rows [H, n, D], largest first, in fp64. Rows at the mean count as zero."""
    centred = rows.float() - rows.float().mean(dim=1, keepdim=True)
    unit = centred / centred.norm(dim=2, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    sigma = unit.transpose(1, 2) @ unit / rows.shape[1]
    return torch.linalg.eigvalsh(sigma.double()).flip(-1).clamp(min=0)


def entropy(eigenvalues: Tensor, top: int | None = None) -> Tensor:
    """H_k [...] of eigenvalues [..., D], largest first; None: of all of them."""
    return torch.special.entr(eigenvalues[..., :top]).sum(dim=-1)


def ranks(values: Tensor) -> Tensor:
    """Each head's rank by values [..., H]: H - 1 for the largest, 0 for the smallest; ties rank the lower head up."""
    order = values.sort(dim=-1, descending=True, stable=True).indices
    places = torch.arange(values.shape[-1] - 1, -1, -1, device=values.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def measure(run: CalibrationRun, top: int) -> dict[str, Tensor]:
    """What UNComp groups by, over windows of token ids that are read one at a time.

    ``entropy`` [L, Hq], mean H_k of queries; ``counts`` [L, Hq], the samples in which a head was among the half of its
    layer with the largest H_k (appendix A.4); ``ranks`` [L, Hq], the sum of its ranks, for more than two groups;
    ``spectra`` [L, Hq, D], mean eigenvalues of queries; ``erank`` and ``erank_k`` [3, L], of queries, keys and values,
    means over heads, untruncated and truncated.
    """
    config = run.model.config
    n_layers, heads = int(config.num_hidden_layers), int(config.num_attention_heads)
    sums: dict[str, Tensor] = {}
    count = 0

    def add(name: str, index: tuple[int, ...], value: Tensor, shape: tuple[int, ...]) -> None:
        if name not in sums:
            sums[name] = torch.zeros(*shape, *value.shape, dtype=torch.float64)
        sums[name][index] += value.double().cpu()

    def on_layer(obs: Observation, k: Tensor, v: Tensor) -> None:
        queries = spectrum(obs.queries(obs.n))
        found = entropy(queries, top)
        place = ranks(found)
        at = (obs.layer,)
        add("entropy", at, found, (n_layers,))
        add("counts", at, place >= heads - heads // 2, (n_layers,))
        add("ranks", at, place, (n_layers,))
        add("spectra", at, queries, (n_layers,))
        for i, eigenvalues in enumerate((queries, spectrum(k), spectrum(v))):
            add("erank", (i, obs.layer), entropy(eigenvalues).exp().mean(), (3, n_layers))
            add("erank_k", (i, obs.layer), entropy(eigenvalues, top).exp().mean(), (3, n_layers))

    for window in run.samples:
        run.observe(window, Needs(last_q=window.numel()), on_layer)
        count += 1
        run.tick()
    summed = ("counts", "ranks")
    return {name: t.float() if name in summed else (t / count).float() for name, t in sums.items()}


def group_sizes(heads: int, groups: int) -> list[int]:
    """Heads per group, equal but for the outer groups, which take what is left over two at a time (11, 10, 11).

    A last odd one goes to the middle group, or to the lower of the two in the middle.
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
    """The group of each head by scores [H], 0 for the largest; groups are filled in turn, ties with the lower head."""
    order = scores.sort(descending=True, stable=True).indices.tolist()
    found = [0] * len(order)
    start = 0
    for group, size in enumerate(group_sizes(len(order), groups)):
        for head in order[start : start + size]:
            found[head] = group
        start += size
    return found


def drops(eranks: Sequence[float], epsilon: float = EPSILON) -> list[int]:
    """The layers whose effective rank lies more than ``epsilon`` below that of the layer before (equation 11)."""
    return [i for i in range(1, len(eranks)) if eranks[i - 1] - eranks[i] > epsilon]


def layer_groups(eranks: Sequence[float], epsilon: float = EPSILON) -> list[range]:
    """Layers in groups, a new one at each drop."""
    edges = [0, *drops(eranks, epsilon), len(eranks)]
    return [range(a, b) for a, b in itertools.pairwise(edges)]

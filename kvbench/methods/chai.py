"""CHAI: heads that attend alike share one head's logits and keys (arXiv 2403.08058, section 3), as UNComp runs it.

The numbers of clusters are those of UNComp's released code (https://github.com/menik1126/UNComp, run_longbench.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from kvbench.base.conf import is_whole
from kvbench.kv import ops
from kvbench.kv.model_shape import from_config
from kvbench.kv.observation import Needs, Observation
from kvbench.kv.scale import capped
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.knobs import Rule, at_least, knob, one_of
from kvbench.methods.core.prefill_changing import HeadSharer
from kvbench.methods.core.recipe import CalibrationRun, Recipe

OBSERVED = 5
"""The number of first tokens by which heads are compared (section 3)."""
LONGEST = 64
"""The most tokens of a calibration window. Only its first five tokens count."""
# runs of numbers that several of the lists below share
_MIDDLE = (24, 30, 24, 30, 28, 28, 32, 32)
_END = (18, 18, 20, 28, 18, 18, 18, 20) + (18,) * 6 + (24, 32)
LISTS: dict[str, tuple[int, ...]] = {
    "llama2": (32, 32) + (30,) * 6 + _MIDDLE + _END,
    "llama2-13b": (32, 32, 30, 30) * 3 + (30,) * 4 + _MIDDLE + _END,
    "llama3": (32, 32, 30, 30) + (32,) * 4 + _MIDDLE + (26,) * 15 + (30,),
}
"""UNComp's numbers of clusters, one for each layer, by the name of the model for which they were made."""
MEAN = sum(LISTS["llama2"]) / (32 * 32)
"""The fraction of leading heads in llama2's list: 794 of 1024."""


@dataclass(frozen=True, kw_only=True)
class Chai(HeadSharer):
    """Cluster heads by the attention of the first five tokens. A cluster's lowest head computes logits for all of it.

    Each query head has a map softmax(q k' * scale) of 5 x 5 weights between the first five tokens, without a causal
    mask. The distance of two heads is 1 - the cosine of their maps. The two nearest clusters merge by average linkage
    until c are left. Among equal distances the pair with the lowest indices merges first. The lowest head of a cluster
    leads. The others take its logits, in the whole prompt and while decoding, and read their own values with them. Keys
    are stored only for kv heads that a leading head reads. Under GQA this saves nothing unless no head of a group
    leads. Prompts of fewer than 6 tokens are left unchanged.

    clusters: c of each layer. [] takes UNComp's list for the model's shape. Models of 40 layers of 40 heads have the
    list llama2-13b. Models of 32 layers of 32 heads have llama3 under GQA, and llama2 otherwise. Any other shape takes
    llama2's mean, 794 / 1024 of the heads.
    like: the name of one of UNComp's lists, instead of ``clusters``. ``llama2`` has 32 layers and 794 of 1024 heads,
    and was also run with Mistral. ``llama2-13b`` has 40 layers and 1042 of 1600 heads, ``llama3`` 32 layers and 900 of
    1024 heads.
    counts: ``listed`` takes the numbers above. With ``calibrated``, ``share`` (default: 794 / 1024) is the fraction of
    heads that lead over all layers together. A layer whose heads are more alike has fewer leading heads. Among the
    merges of all layers, those with the smallest mean distances over windows of text happen. This is our choice: CHAI
    reads its counts by eye off the bend of each layer's clustering error.
    """

    id: ClassVar[str] = "chai"

    clusters: tuple[int, ...] = ()
    like: str | None = knob(None, Rule(f"null, {', '.join(LISTS)}", lambda name: name in LISTS))
    share: float | None = knob(None, Rule("a fraction of the heads, above 0 and at most 1", lambda x: 0 < x <= 1))
    counts: str = knob("listed", one_of("listed", "calibrated"))
    samples: int = knob(100, at_least(1, "windows"))
    tokens: int | None = knob(None, at_least(1, null=True))

    def check(self) -> None:
        is_list = isinstance(self.clusters, (list, tuple))
        counts_are_whole = is_list and all(is_whole(c) and c >= 1 for c in self.clusters)
        self.require("clusters", counts_are_whole, "a list of whole numbers, 1 or more")
        # YAML gives a list; a frozen dataclass can set its own fields only by object.__setattr__
        object.__setattr__(self, "clusters", tuple(self.clusters))
        # each of these three knobs alone decides how many heads lead, so at most one may be set
        set_knobs = [name for name in ("clusters", "like", "share") if getattr(self, name) not in ((), None)]
        if len(set_knobs) > 1:
            first, *others = set_knobs
            self.require(first, False, f"{' and '.join(others)} says how many heads lead, too: give one of them")
        has_no_list = not self.clusters and not self.like
        self.require(
            "counts",
            self.counts == "listed" or has_no_list,
            "calibrated only without clusters and like, which say how many heads lead",
        )

    def recipe(self) -> Recipe | None:
        if self.counts == "listed":
            return None
        return Recipe("chai", revision=1, samples=self.samples, tokens=self.tokens, longest=LONGEST)

    def calibrate(self, run: CalibrationRun) -> dict[str, torch.Tensor]:
        run.recipe.check(OBSERVED, "the first tokens, by which heads are compared")
        return {"distances": measure_distances(run)}

    def needs(self, n: int) -> Needs:
        return Needs(first_q=OBSERVED)

    def check_layers(self, n_layers: int) -> None:
        counts, name = self.read_listed_clusters()
        # without a list there is nothing to check
        self.require(name, not counts or len(counts) == n_layers, f"the model has {n_layers} layers")

    def check_heads(self, stored_heads: int, query_heads: int) -> None:
        counts, name = self.read_listed_clusters()
        self.require(name, max(counts, default=0) <= query_heads, f"the model has {query_heads} query heads")

    def read_listed_clusters(self) -> tuple[Sequence[int], str]:
        """Return (the numbers of clusters, one for each layer, as a knob lists them; the name of that knob).

        The numbers are () if no knob lists any; the name is then "clusters".
        """
        if self.like:
            return LISTS[self.like], "like"
        return self.clusters, "clusters"

    def leading_heads(self, n: int, layer: int, n_layers: int, query_heads: int, kv_heads: int) -> int:
        if n <= OBSERVED:
            # such a prompt is left unchanged: every head leads
            return query_heads
        return self.count_clusters(n_layers, query_heads, kv_heads)[layer]

    def count_clusters(self, n_layers: int, query_heads: int, kv_heads: int) -> Sequence[int]:
        """Return how many clusters each layer has (the paper's c), for a model of these numbers of layers and heads.

        Raises UsageError if c follows from a calibration that the stage does not have.
        """
        share = MEAN if self.share is None else self.share
        if self.counts == "calibrated":
            distances = self.measured("with counts=calibrated its clusters", "counts")["distances"]
            return divide_clusters(distances, share)
        if self.clusters:
            return self.clusters
        name = self.like
        # without any knob, the model's shape decides
        if name is None and self.share is None:
            name = choose_list(n_layers, query_heads, kv_heads)
        if name is not None:
            return LISTS[name]
        # c = share * Hq in every layer, at least 1
        return [max(1, round(share * query_heads))] * n_layers

    def leads(
        self, first_q: torch.Tensor, first_k: torch.Tensor, n: int, layer: int, n_layers: int, scale: float
    ) -> torch.Tensor | None:
        heads = first_q.shape[0]
        count = self.leading_heads(n, layer, n_layers, query_heads=heads, kv_heads=first_k.shape[0])
        if count == heads:
            return None
        lead_of_head, _ = merge_clusters(first_q, first_k, scale, count=count)
        return lead_of_head

    def compress(self, cache: LayerCache, obs: Observation) -> LayerCache:
        if obs.first_q is None:
            raise ValueError("chai reads the first queries, which were not observed")
        # another stage may have asked for more first queries than CHAI reads
        first_q = obs.first_q[:, :OBSERVED]
        first_k = ops.only_segment(cache).k[:, :OBSERVED]
        leads = self.leads(first_q, first_k, obs.n, layer=obs.layer, n_layers=obs.n_layers, scale=obs.scale)
        if leads is None:
            return cache
        # under per=query_head each stored head gets keys and values of its own before keys are dropped
        cache = ops.expand(cache)
        # keys stay only for kv heads that a leading head reads; all heads keep their values
        return replace(cache, segments=(ops.share_keys(ops.only_segment(cache), leads),))


def choose_list(n_layers: int, query_heads: int, kv_heads: int) -> str | None:
    """Return the name in LISTS of the list for a model of this shape, or None if UNComp has no such list."""
    if (n_layers, query_heads) == (40, 40):
        return "llama2-13b"
    if (n_layers, query_heads) != (32, 32):
        return None
    # models of 32 layers and 32 heads are told apart by their kv heads
    return "llama2" if kv_heads == query_heads else "llama3"


def merge_clusters(
    first_q: torch.Tensor, first_k: torch.Tensor, scale: float, count: int
) -> tuple[torch.Tensor, list[float]]:
    """Merge the query heads of a layer by average linkage until ``count`` clusters are left.

    The distance of two heads is 1 - the cosine of their attention maps over the first m tokens.

    first_q, first_k: queries [Hq, m, D] and keys [Hk, m, D] of these tokens.
    scale: the factor of q.k.

    Return (the lowest head of each head's cluster [Hq], the distances at which clusters merged, ascending). There are
    Hq - ``count`` such distances. Everything is computed in fp64 on the CPU, so that all devices give the same result.
    """
    distance = _measure_head_distances(first_q, first_k, scale)
    heads = len(distance)
    # each head begins as a cluster of its own; a cluster has the row and the column of its lowest head
    lead = torch.arange(heads)
    merges: list[float] = []
    for _ in range(heads - count):
        # argmin counts entries row by row, and takes the first of equals
        row_of_nearest, column_of_nearest = divmod(int(distance.argmin()), heads)
        a, b = sorted((row_of_nearest, column_of_nearest))
        merges.append(float(distance[a, b]))
        # average linkage: d(a + b, x) = (|a| d(a, x) + |b| d(b, x)) / (|a| + |b|)
        a_heads, b_heads = int((lead == a).sum()), int((lead == b).sum())
        merged_row = (a_heads * distance[a] + b_heads * distance[b]) / (a_heads + b_heads)
        # a cluster does not merge with itself
        merged_row[[a, b]] = torch.inf
        distance[a], distance[:, a] = merged_row, merged_row
        # b joins a, which is lower, and takes part in no further merge
        distance[b], distance[:, b] = torch.inf, torch.inf
        lead[lead == b] = a
    return lead.to(first_q.device), merges


def _measure_head_distances(first_q: torch.Tensor, first_k: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the distances [Hq, Hq] in fp64 of the attention maps of heads, with infinity on the diagonal.

    The arguments are those of ``merge_clusters``.
    """
    q = first_q.detach().to("cpu", torch.float64).contiguous()
    k = first_k.detach().to("cpu", torch.float64).contiguous()
    # maps are softmax(q k' * scale) [Hq, m, m] without a causal mask, each flattened to one vector
    logits = q @ k.repeat_interleave(len(q) // len(k), dim=0).transpose(1, 2) * scale
    maps = capped(logits, scale).softmax(dim=-1).flatten(1)
    unit = maps / maps.norm(dim=1, keepdim=True)
    # the distance is 1 - cosine, and rounding must not make it negative; infinity keeps a head from merging with itself
    return (1 - unit @ unit.T).clamp(min=0).fill_diagonal_(torch.inf)


def divide_clusters(distances: torch.Tensor, share: float) -> list[int]:
    """Return how many clusters each layer keeps, so that the fraction ``share`` of all query heads leads a cluster.

    The merges with the smallest distances over all layers happen. They are the first merges of each layer, because
    distances ascend.

    distances: [layers, Hq - 1], ascending in each layer. At these distances the heads of a layer merge, one after the
        other, into a single cluster.
    """
    layers, heads = distances.shape[0], distances.shape[1] + 1
    if heads == 1:
        # a single head has nothing to merge with
        return [1] * layers
    # each merge leaves one leading head less, so L Hq - share * L Hq merges happen over all layers
    all_heads = layers * heads
    merge_count = all_heads - round(share * all_heads)
    # there are no more merges than distances, because every layer keeps one cluster
    merge_count = min(merge_count, distances.numel())
    by_distance = distances.flatten().sort(stable=True).indices
    # the layer of each merge that happens: a layer has heads - 1 consecutive entries
    merged_layers = by_distance[:merge_count] // (heads - 1)
    return [heads - int((merged_layers == layer).sum()) for layer in range(layers)]


def measure_distances(run: CalibrationRun) -> torch.Tensor:
    """Return the distances [layers, Hq - 1] at which the heads of a layer merge: means over the windows of a run."""
    shape = from_config(run.model.config)
    total = torch.zeros(shape.layers, shape.query_heads - 1, dtype=torch.float64)

    def on_layer(obs: Observation, k: torch.Tensor, v: torch.Tensor) -> None:
        assert obs.first_q is not None
        # merging down to one cluster gives every merge its distance
        _, merges = merge_clusters(obs.first_q[:, :OBSERVED], k[:, :OBSERVED], obs.scale, count=1)
        total[obs.layer] += torch.tensor(merges, dtype=torch.float64)

    windows = 0
    for window in run.windows():
        run.observe(window, Needs(first_q=OBSERVED), on_layer)
        windows += 1
    return (total / windows).float()

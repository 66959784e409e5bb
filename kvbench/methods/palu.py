"""Palu: low-rank latents of keys and values per group of heads (arXiv 2407.21118, sections 3.1 to 3.3)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from transformers import PreTrainedModel

from kvbench.methods.core.knobs import at_least, knob, one_of
from kvbench.methods.core.lowrank import LowRankStage, Pairs
from kvbench.methods.core.recipe import CalibrationRun, Recipe
from kvbench.models.factors import (
    Factors,
    Spectrum,
    damping_needed,
    divided_ranks,
    group_size,
    join_factors,
    nearest_rank,
    whitening_factor,
)
from kvbench.models.interface import compressed_modules
from kvbench.models.lowrank import ProjectionShape, key_value_weights
from kvbench.models.lowrank_statistics import measure_moments, moments_bytes


@dataclass(frozen=True, kw_only=True)
class Palu(LowRankStage):
    """Replace the weight W of each group of heads by the pair of rank r with the nearest outputs over calibration text.

    Let S S^T = mean of x x^T over the inputs x of the text (S by Cholesky), and W S = U diag(s) V^T. The pair is
    down = sqrt(diag(s_r)) V_r^T S^-1 and up = U_r sqrt(diag(s_r)), with the r largest singular values. The cache holds
    down x. Where the mean has no Cholesky factor, the least of 1e-10, 1e-9, ... of its diagonal's average that gives it
    one is added to its diagonal, and recorded in the calibration as ``damping`` per layer. All is computed in fp64.

    ranks_by: ``fisher`` divides the remaining rank over all groups of all layers, in proportion to sqrt(E[g^2]) of
    their weights and capped at the full rank. g is the gradient of a window's mean loss, E the mean over windows, and
    the root is averaged over the group's entries. ``fisher_uniform`` gives the groups of a projection their mean,
    ``uniform`` gives every group the same. The paper takes Fisher information over 2048 samples. Here it is over the
    windows of the whitening (our choice).
    """

    id: ClassVar[str] = "palu"

    group: int = knob(4, at_least(1, "heads"))
    ranks_by: str = knob("fisher", one_of("fisher", "fisher_uniform", "uniform"))

    def recipe(self) -> Recipe | None:
        # both ways of ``fisher`` read the same statistics
        return self.make_projection_recipe("palu", {"fisher": self.ranks_by != "uniform"})

    def calibrate(self, run: CalibrationRun) -> dict[str, torch.Tensor]:
        shape = ProjectionShape.of(run.model)
        # the mean of x x^T [d, d] over fewer tokens has no full rank
        run.recipe.check(shape.hidden, "the hidden size")
        # moments [layers, d, d] are means of x x^T; fisher [layers, 2, heads] is sqrt(E[g^2]), or None for even ranks
        moments, fisher = measure_moments(run.model, run.windows(), fisher=self.ranks_by != "uniform")
        tensors = {
            # the fields of ProjectionShape in their order
            "shape": torch.tensor([shape.layers, shape.heads, shape.head_dim, shape.hidden]),
            "moments": moments,
            "damping": torch.tensor([damping_needed(m) for m in moments], dtype=torch.float64),
        }
        if fisher is not None:
            tensors["fisher"] = fisher
        return tensors

    def calibration_bytes(self, model: PreTrainedModel) -> tuple[int, int]:
        return moments_bytes(model, fisher=self.ranks_by != "uniform")

    @property
    def heads_per_group(self) -> int:
        """The number of heads in a group: the largest divisor of the model's kv heads that is at most ``group``."""
        return group_size(self.shape.heads, self.group)

    @cached_property
    def ranks(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        shape, heads_per_group = self.shape, self.heads_per_group
        groups = shape.heads // heads_per_group
        # a group's weight has a row for each channel of its heads, and a column for each hidden channel
        full_rank = min(heads_per_group * shape.head_dim, shape.hidden)
        if self.ranks_by == "uniform":
            even_ranks = (nearest_rank(full_rank, self.ratio, self.multiple),) * groups
            return ((even_ranks, even_ranks),) * shape.layers
        # [layers, 2, groups], the mean over the heads of a group
        fisher = self.tensor("fisher").double().unflatten(2, (groups, heads_per_group)).mean(dim=3)
        if self.ranks_by == "fisher_uniform":
            # one rank for each projection, [layers * 2], which all groups of the projection get
            weights = fisher.mean(dim=2).flatten().tolist()
            projection_ranks = torch.tensor(divided_ranks(weights, full_rank, self.ratio, self.multiple))
            ranks = projection_ranks.repeat_interleave(groups)
        else:
            # one rank for each group of each projection, [layers * 2 * groups]
            weights = fisher.flatten().tolist()
            ranks = torch.tensor(divided_ranks(weights, full_rank, self.ratio, self.multiple))
        by_layer = ranks.view(shape.layers, 2, groups).tolist()
        return tuple((tuple(key_ranks), tuple(value_ranks)) for key_ranks, value_ranks in by_layer)

    def factors(self, model: PreTrainedModel) -> Pairs:
        pairs = []
        for i, attention in enumerate(compressed_modules(model)):
            # S, with S S^T = mean of x x^T (Cholesky), section 3.2
            moments, damping = self.tensor("moments")[i], float(self.tensor("damping")[i])
            whitening = whitening_factor(moments.to(model.device), damping)
            # a projection is (weight, bias), and only the weight is factored
            (key_weight, _), (value_weight, _) = key_value_weights(attention, self.shape.heads)
            key_ranks, value_ranks = self.ranks[i]
            key_factors = self._factor_groups(key_weight, whitening, key_ranks)
            value_factors = self._factor_groups(value_weight, whitening, value_ranks)
            pairs.append((key_factors, value_factors))
        return tuple(pairs)

    def _factor_groups(self, weight: torch.Tensor, whitening: torch.Tensor, ranks: tuple[int, ...]) -> Factors:
        """Return the factors of a projection's ``weight`` [Hk D, d], each group of heads cut to its rank.

        whitening: S [d, d] of the projection's inputs.
        """
        # a group's weight has one row for each channel of its heads
        group_weights = weight.split(self.heads_per_group * self.shape.head_dim)
        cuts = []
        for group_weight, rank in zip(group_weights, ranks, strict=True):
            # W S = U diag(s) V^T, truncated to r
            cuts.append(Spectrum.of(group_weight, whitening).cut(rank))
        return join_factors(cuts)

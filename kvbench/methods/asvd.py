"""ASVD: low-rank latents of keys and values, input channels scaled by their activations (arXiv 2312.05821, section 3).

Defaults are those of the released code, https://github.com/hahnyuan/ASVD4LLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from transformers import PreTrainedModel

from kvbench.methods.core.knobs import Rule, knob, one_of
from kvbench.methods.core.lowrank import LowRankStage, Pairs
from kvbench.methods.core.recipe import CalibrationRun, Recipe
from kvbench.models.factors import Factors, Spectrum, join_factors, nearest_rank, searched_ranks
from kvbench.models.interface import compressed_modules
from kvbench.models.lowrank import ProjectionShape, key_value_weights
from kvbench.models.lowrank_statistics import mean_loss, mean_sizes

FRACTIONS = tuple(k / 10 for k in range(1, 10))
"""The fractions of the rank that the released code tries, one projection at a time."""


@dataclass(frozen=True, kw_only=True)
class Asvd(LowRankStage):
    """Replace the weight W of a projection, all heads together, by the pair U_r diag(s_r) V_r^T S^-1.

    W S = U diag(s) V^T is a singular value decomposition, of which the r largest singular values stay. S is diagonal.
    Its entry for input channel i is (mean of |x_i| over the tokens of the calibration text)^alpha, at least 1e-6.
    Errors in channels with large inputs therefore count more.

    ranks_by: ``uniform`` gives every projection the same rank. ``sensitivity`` tries every projection alone at a tenth,
    two tenths, ... of its rank, and measures the model's loss each time. Each projection then takes the smallest rank
    whose loss is at most a threshold. The threshold is the smallest under which all ranks add up to the target
    (bisection).
    probes: the number of windows of text over which these losses are measured.
    multiple: ranks are multiples of this number. Null stands for a sixteenth of all heads' rank.
    """

    id: ClassVar[str] = "asvd"

    samples: int = 32
    alpha: float = knob(0.5, Rule("a number, 0 or more", lambda x: x >= 0))
    ranks_by: str = knob("sensitivity", one_of("sensitivity", "uniform"))
    probes: int = 4

    def check(self) -> None:
        super().check()
        self.require(
            "probes", 1 <= self.probes <= self.samples, f"a whole number of windows, 1 to samples={self.samples}"
        )

    def recipe(self) -> Recipe | None:
        knobs: dict[str, object] = {"sensitivity": self.ranks_by == "sensitivity"}
        if self.ranks_by == "sensitivity":
            # only the losses depend on these knobs; float() because alpha=1 and alpha=1.0 are the same measurement
            knobs.update(alpha=float(self.alpha), probes=self.probes, multiple=self.multiple)
        return self.make_projection_recipe("asvd", knobs)

    def calibrate(self, run: CalibrationRun) -> dict[str, torch.Tensor]:
        shape = ProjectionShape.of(run.model)
        probes: list[torch.Tensor] = []

        def windows() -> Iterator[torch.Tensor]:
            """Yield all windows. Keep the first ``self.probes`` for the losses, because windows are read only once."""
            for window in run.windows():
                if len(probes) < self.probes:
                    probes.append(window)
                yield window

        # sizes [layers, d] are the means of |x_i| over all tokens; reading the windows also fills ``probes``
        sizes = mean_sizes(run.model, windows())
        # ``shape`` has the fields of ProjectionShape in their order
        tensors = {"shape": torch.tensor([shape.layers, shape.heads, shape.head_dim, shape.hidden]), "mean_abs": sizes}
        if self.ranks_by == "sensitivity":
            tensors["loss"] = self._measure_losses(run, sizes, probes)
        return tensors

    def calibration_steps(self, model: PreTrainedModel) -> int:
        if self.ranks_by == "uniform":
            return 0
        # ``_measure_losses`` takes one step for each projection, key and value, and each rank that is tried
        return 2 * ProjectionShape.of(model).layers * len(FRACTIONS)

    @property
    def full(self) -> int:
        """The full rank of a projection: all heads' channels, or the hidden size if that is less."""
        return min(self.shape.heads * self.shape.head_dim, self.shape.hidden)

    @cached_property
    def ranks(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        layers = self.shape.layers
        even_rank = nearest_rank(self.full, self.ratio, self.multiple)
        # one rank for each projection: keys of layer 0, values of layer 0, keys of layer 1, ...
        flat_ranks = [even_rank] * (2 * layers)
        # with ratio 0 the even rank is the full rank already
        if self.ranks_by == "sensitivity" and self.ratio > 0:
            # the losses of each projection, in the same order, at each of the tried ranks
            losses = self.tensor("loss").flatten(0, 1).tolist()
            # all ranks together must not be larger than if every projection had the even rank
            target = even_rank * 2 * layers
            flat_ranks = searched_ranks(losses, self._list_tried_ranks(self.full), self.full, target)
        key_ranks, value_ranks = flat_ranks[::2], flat_ranks[1::2]
        # each projection has a tuple of ranks, one for each group of heads; here all heads are one group
        return tuple(((key,), (value,)) for key, value in zip(key_ranks, value_ranks, strict=True))

    def factors(self, model: PreTrainedModel) -> Pairs:
        pairs = []
        spectra_by_layer = self._decompose(model, self.tensor("mean_abs"))
        for (key_spectrum, value_spectrum), ranks in zip(spectra_by_layer, self.ranks, strict=True):
            # all heads are one group, so each projection has one rank
            (key_rank,), (value_rank,) = ranks
            key_factors = join_factors([key_spectrum.cut(key_rank)])
            value_factors = join_factors([value_spectrum.cut(value_rank)])
            pairs.append((key_factors, value_factors))
        return tuple(pairs)

    def compute_scale(self, sizes: torch.Tensor) -> torch.Tensor:
        """Return the diagonal of S [..., d] in fp64. ``sizes`` [..., d] has the mean of |x_i| of each channel i."""
        # S_ii = (mean of |x_i|)^alpha, at least 1e-6: ``Spectrum`` divides by S
        return sizes.double().pow(self.alpha).clamp(min=1e-6)

    def _list_tried_ranks(self, full: int) -> list[int]:
        """Return the ranks to try for a projection of the full rank ``full``: those at each of FRACTIONS, ascending."""
        # ``nearest_rank`` takes the fraction to remove, FRACTIONS are those that stay
        return [nearest_rank(full, 1 - fraction, self.multiple) for fraction in FRACTIONS]

    def _decompose(self, model: PreTrainedModel, sizes: torch.Tensor) -> Iterator[tuple[Spectrum, Spectrum]]:
        """Yield for each layer the decompositions W S = U diag(s) V^T of its key and its value projection.

        ``sizes`` [layers, d] are the means of |x_i| of the projections' inputs.
        """
        heads = ProjectionShape.of(model).heads
        for attention, layer_sizes in zip(compressed_modules(model), sizes, strict=True):
            # a projection is (weight, bias), and only the weight is factored
            (key_weight, _), (value_weight, _) = key_value_weights(attention, heads)
            # both projections read the same input
            scale = self.compute_scale(layer_sizes)
            yield Spectrum.of(key_weight, scale), Spectrum.of(value_weight, scale)

    def _measure_losses(self, run: CalibrationRun, sizes: torch.Tensor, probes: list[torch.Tensor]) -> torch.Tensor:
        """Return the model's losses [layers, 2, fractions], each the mean over the probes.

        For each loss one projection alone, key (0) or value (1), is cut to one of ``_list_tried_ranks``. All others are
        exact. ``sizes`` [layers, d] are the means of |x_i|, ``probes`` the windows of token ids.
        """
        model, shape = run.model, ProjectionShape.of(run.model)
        # the property ``full`` reads a finished calibration, which the stage does not have yet
        full = min(shape.heads * shape.head_dim, shape.hidden)
        # exact_layers has the uncut projections in the form that ``mean_loss`` takes
        exact_layers: list[tuple[Factors, Factors]] = []
        for attention in compressed_modules(model):
            (key_weight, _), (value_weight, _) = key_value_weights(attention, shape.heads)
            exact_layers.append((_keep_exact(key_weight), _keep_exact(value_weight)))
        losses = torch.zeros(shape.layers, 2, len(FRACTIONS))
        for layer, spectra in enumerate(self._decompose(model, sizes)):
            exact_keys, exact_values = exact_layers[layer]
            # half 0 is the key projection, half 1 the value projection
            for half, spectrum in enumerate(spectra):
                # several fractions of a small rank are rounded to one, whose loss is measured once
                loss_by_rank: dict[int, float] = {}
                for j, rank in enumerate(self._list_tried_ranks(full)):
                    if rank not in loss_by_rank:
                        # only this projection is cut, and all others stay exact
                        cut = join_factors([spectrum.cut(rank)])
                        tried_layers = list(exact_layers)
                        if half == 0:
                            tried_layers[layer] = (cut, exact_values)
                        else:
                            tried_layers[layer] = (exact_keys, cut)
                        loss_by_rank[rank] = mean_loss(model, probes, tried_layers)
                    losses[layer, half, j] = loss_by_rank[rank]
                    run.tick()
        return losses


def _keep_exact(weight: torch.Tensor) -> Factors:
    """Return a weight [Hk D, d] as the factors of one group of full rank, whose latents are its outputs."""
    return Factors(down=weight.detach(), ups=(None,), ranks=(weight.shape[0],))

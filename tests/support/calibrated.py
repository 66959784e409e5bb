"""Chains bound to a calibration of a small model, over a few windows of random tokens."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from support.families import prompt
from transformers import PreTrainedModel

from kvbench.engine.prefill import make_observer
from kvbench.engine.weights_digest import digest_weights
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.recipe import Calibration, CalibrationRun, Recipe, digest
from kvbench.methods.core.stage import Stage

SAMPLES, TOKENS = 2, 60


def bound(model: PreTrainedModel, chain: Chain) -> Chain:
    """The chain with every stage that needs it calibrated on the model."""
    return replace(chain, stages=tuple(measured(model, s) if s.recipe() else s for s in chain.stages))


contents: dict[tuple[PreTrainedModel, str], Calibration] = {}
"""Calibrations by model and recipe: stages that differ in other knobs alone share one."""


@cache
def measured(model: PreTrainedModel, stage: Stage) -> Stage:
    """The stage calibrated on the model."""
    recipe = stage.recipe()
    key = model, repr(recipe)
    if key not in contents:
        contents[key] = calibration(model, stage, recipe)
    return stage.calibrated(contents[key])


def calibration(model: PreTrainedModel, stage: Stage, recipe: Recipe) -> Calibration:
    """What the stage's recipe measures on the model."""
    settled = replace(recipe, samples=SAMPLES, tokens=TOKENS)
    windows = (prompt(TOKENS, 100 + i) for i in range(SAMPLES))
    ticks: list[None] = []
    tensors = stage.calibrate(CalibrationRun(model, windows, settled, lambda: ticks.append(None), make_observer(model)))
    assert len(ticks) == SAMPLES + stage.calibration_steps(model)  # or the time left would be wrong
    return Calibration(recipe.kind, digest(tensors), digest_weights(model), tensors)

"""A digest of a model's weights, read in slices. It tells which model a calibration belongs to."""

from __future__ import annotations

import hashlib
import weakref
from pathlib import Path

import torch
from transformers import PreTrainedModel

from kvbench.base.errors import UsageError
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.recipe import Calibration

SLICE = 1024
"""The elements of a slice. Two slices of each parameter identify a model in milliseconds; all weights take seconds."""
_digests: weakref.WeakKeyDictionary[PreTrainedModel, str] = weakref.WeakKeyDictionary()
"""The digest of each model object that was asked for. It is not computed again if the weights change."""


def check_calibrated(chain: Chain, model: PreTrainedModel) -> None:
    """Raise UsageError if a stage of the chain lacks the calibration that it needs, or has one of another model."""
    # in a run the session has bound all stages; a Python user may have left the calibration out
    for stage in chain.stages:
        if stage.unbound:
            raise UsageError(
                f"method {stage.id} needs a calibration of this model: kvbench run computes it at first use; "
                f"in Python, give what kvbench.calibrate(model, tokenizer, {chain.name!r}) returns as the method entry"
            )
        if stage.calibration is not None:
            check_weights(stage.calibration, model, f"of {stage.id}")


def check_weights(calibration: Calibration, model: PreTrainedModel, where: Path | str) -> None:
    """Raise UsageError unless the calibration was computed on this model's weights. ``where`` names it in the error."""
    if calibration.weights != digest_weights(model):
        raise UsageError(
            f"the calibration {where} was computed on other weights than this model's: delete it, or use the model "
            "that it was made with; kvbench calibrate makes one for this model"
        )


def digest_weights(model: PreTrainedModel) -> str:
    """Return a digest of the names, dtypes and shapes of all parameters, and of two slices of each.

    It differs for models trained differently. It is computed once for each model object, even if the weights change.
    """
    # computed once for each model object, because a run checks its calibrations at every prompt
    if model not in _digests:
        sha256 = hashlib.sha256()
        for name, p in model.named_parameters():
            flat = p.detach().reshape(-1)
            middle = flat.numel() // 2
            slices = torch.cat([flat[:SLICE], flat[middle : middle + SLICE]])
            # NumPy has no bf16, so the digest is taken over bytes
            slice_bytes = slices.cpu().view(torch.uint8)
            sha256.update(f"{name}:{p.dtype}:{tuple(p.shape)}\n".encode())
            sha256.update(slice_bytes.numpy().tobytes())
        _digests[model] = sha256.hexdigest()
    return _digests[model]

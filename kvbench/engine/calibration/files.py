"""Calibrations on disk: tensors in <kind>-<key>.safetensors, with a record <kind>-<key>.json of what they belong to.

Each calibration is written once and checked on every read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvbench.base.errors import KvbenchError, UsageError
from kvbench.base.files import read_json, write_json
from kvbench.base.version import version
from kvbench.methods.core.recipe import Calibration, Request, digest

FORMAT = 1  # the version of the record's fields; a record of another version is refused


def path_of(folder: Path, request: Request) -> Path:
    """Return the path of the record of the calibration that ``request`` asks for, in ``folder``.

    The calibration's tensors are in a file beside the record, with the ending ``.safetensors``.
    """
    return folder / f"{request.recipe.kind}-{request.key}.json"


def save(folder: Path, request: Request, tensors: Mapping[str, Tensor], weights: str) -> Calibration:
    """Write the ``tensors`` of a calibration into ``folder``, and return the calibration.

    The tensors are written first and the record last, each in one step, so that a record means a whole calibration.
    Raises KvbenchError if a file cannot be written.

    request: the calibration that the tensors answer.
    weights: the digest of the model's weights.
    """
    path = path_of(folder, request)
    copies = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    sha256 = digest(copies)
    meta: dict[str, object] = {"format": FORMAT}
    meta |= request.identity()
    meta |= {
        "model": request.model,
        "weights": weights,
        "shapes": {name: list(t.shape) for name, t in copies.items()},
        "sha256": sha256,
        "versions": {
            "kvbench": version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    tensors_path = path.with_suffix(".safetensors")
    # several processes may compute one calibration: each writes a file of its own, and the newest file stays
    temporary = tensors_path.with_suffix(f".{os.getpid()}.tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(copies, temporary)
        temporary.replace(tensors_path)
    except OSError as error:
        raise KvbenchError(
            f"{tensors_path} could not be written ({error.strerror}): give another folder, as calibration=FOLDER"
        ) from None
    write_json(path, meta)
    return Calibration(request.recipe.kind, sha256, weights, tensors=copies, meta=meta)


def load(folder: Path, request: Request) -> Calibration:
    """Return the calibration that ``request`` asks for, read from ``folder``.

    Raises UsageError if a file is damaged or belongs to another request.
    """
    path = path_of(folder, request)
    tensors_path = path.with_suffix(".safetensors")
    remedy = f"delete {path.name} and {tensors_path.name} to compute them again"
    meta = _read_record(path, request, remedy)
    try:
        tensors = load_file(tensors_path)
    except (OSError, safetensors.SafetensorError) as error:
        # such errors may begin with an empty line, so the reason is the first line with text
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UsageError(f"the calibration {tensors_path} is damaged ({reason}): {remedy}") from None
    checksum = digest(tensors)
    if checksum != meta.get("sha256"):
        raise UsageError(
            f"the calibration {tensors_path} is damaged (its checksum is another than {path.name} says): {remedy}"
        )
    return Calibration(request.recipe.kind, checksum, str(meta.get("weights")), tensors=tensors, meta=meta)


def _read_record(path: Path, request: Request, remedy: str) -> dict[str, Any]:
    """Return the record of the calibration that ``request`` asks for.

    Raises UsageError, with the ``remedy``, if the record is damaged or belongs to another request.
    """
    try:
        meta = read_json(path)
    except UsageError:
        meta = None
    if not isinstance(meta, dict):
        raise UsageError(f"the calibration {path} is damaged: {remedy}")
    # the file's name has the request's hash: a record that disagrees with it was renamed or edited
    expected: dict[str, object] = {"format": FORMAT}
    expected |= request.identity()
    expected["model"] = request.model
    for key, value in expected.items():
        if meta.get(key) != value:
            if key == "model":
                # the two hashes would tell the user nothing
                other = "another model"
            else:
                other = f"{key} {meta.get(key)!r}, and {value!r} is needed"
            raise UsageError(f"the calibration {path} was made with {other}: {remedy}")
    return meta

"""Read a checkpoint's weights, and refuse those that transformers would make up, leave out or cast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvbench.errors import UsageError

FLOATS = ("F64", "F32", "F16", "BF16")
"""Names in safetensors of the dtypes that a parameter may be stored in."""
SHOWN = 3


def read(path: str, location: str, **options: Any) -> PreTrainedModel:
    """Return the model of ``from_pretrained(location, **options)``; ``path`` is the user's name for it in messages.

    Raises UsageError with the names of weights that are missing, left over, of another shape or no floats. What
    transformers itself leaves out (buffers of rotations, the second copy of a tied weight) is no error.
    """
    loading: Any = AutoModelForCausalLM.from_pretrained(
        location, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    model, info = loading
    shapes = [f"{n} {list(stored)} for {list(expected)}" for n, stored, expected in info["mismatched_keys"]]
    for fault, names in (
        ("has weights of another shape than its config.json says", shapes),
        ("lacks weights that its config.json asks for", info["missing_keys"]),
        ("has weights that its config.json has no place for", info["unexpected_keys"]),
        ("stores weights as integers, as quantised models do, which kvbench does not read", _integers(model, location)),
    ):
        if names:
            raise UsageError(
                f"model={path} {fault}: {_listed(names)}. Are config.json and weights of one model, and all of it?"
            )
    return model


def _listed(names: Iterable[str]) -> str:
    """Return the first names in order as text, with their number if there are more than SHOWN."""
    ordered = sorted(names)
    more = f", ... ({len(ordered)} in all)" if len(ordered) > SHOWN else ""
    return ", ".join(ordered[:SHOWN]) + more


def _integers(model: PreTrainedModel, location: str) -> list[str]:
    """Return the names of stored tensors that are not floats although the model's parameters of these names are."""
    parameters = {name for name, p in model.named_parameters() if p.is_floating_point()}
    prefix = f"{model.base_model_prefix}."
    stored: dict[str, str] = {}
    for file in sorted(_folder(model, location).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            stored |= {name: tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
    return [n for n, dtype in stored.items() if dtype not in FLOATS and (n in parameters or prefix + n in parameters)]


def _folder(model: PreTrainedModel, location: str) -> Path:
    """Return the folder of a model's files: ``location`` itself, or the folder of a hub id in the hub's cache."""
    if Path(location).is_dir():
        return Path(location)
    from huggingface_hub import try_to_load_from_cache

    commit = getattr(model.config, "_commit_hash", None)
    config_path = try_to_load_from_cache(location, "config.json", revision=commit)
    return Path(config_path).parent if isinstance(config_path, str) else Path(location)


def check_rope(path: str, parameters: Mapping[str, Any] | None, config: Any) -> None:
    """Raise UsageError for a RoPE scaling that transformers does not know or that lacks a value."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = (parameters or {}).get("rope_type", "default")
    if kind == "default":
        return
    factor = (parameters or {}).get("factor", 1.0)
    if kind not in ROPE_INIT_FUNCTIONS:
        raise UsageError(
            f"model={path}: rope_type={kind} is not known; default, {', '.join(sorted(ROPE_INIT_FUNCTIONS))} are"
        )
    if not isinstance(factor, (int, float)) or not 0 < factor < float("inf"):
        raise UsageError(f"model={path}: rope_type={kind} with factor={factor} is not possible: a number above 0")
    try:
        ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    except KeyError as error:
        raise UsageError(f"model={path}: rope_type={kind} needs {error.args[0]}=, as in factor: 4.0") from None

"""Read a checkpoint's weights, and refuse those that transformers would make up, leave out or cast."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvbench.base.errors import UsageError

FLOATS = ("F64", "F32", "F16", "BF16")
"""Names in safetensors of the dtypes that a parameter may be stored in."""
SHOWN = 3
MOST_TIMES = 4  # a tied or a missing weight is far from it, and reported by name
WRONG_SHAPE = "has weights of another shape than its config.json says"
Stored = tuple[str, Sequence[int]]
"""The dtype of a stored tensor, as safetensors names it, and its shape."""


def read(path: str, location: str, **options: Any) -> PreTrainedModel:
    """Return the model of ``from_pretrained(location, **options)``; ``path`` is the user's name for it in messages.

    Raises UsageError with the names of weights that are missing, left over, of another shape or no floats. What
    transformers itself leaves out (buffers of rotations, the second copy of a tied weight) is no error.
    """
    _check_before(path, options["config"], _stored(_folder(options["config"], location)))
    loading: Any = AutoModelForCausalLM.from_pretrained(
        location, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    model, info = loading
    shapes = [f"{n} {list(stored)} for {list(expected)}" for n, stored, expected in info["mismatched_keys"]]
    for fault, names in (
        (WRONG_SHAPE, shapes),
        ("lacks weights that its config.json asks for", info["missing_keys"]),
        ("has weights that its config.json has no place for", info["unexpected_keys"]),
        ("stores weights as integers, as quantised models do, which kvbench does not read", _integers(model, location)),
    ):
        if names:
            raise _fault(path, fault, names)
    return model


def _fault(path: str, fault: str, names: Iterable[str]) -> UsageError:
    return UsageError(
        f"model={path} {fault}: {_listed(names)}. Are config.json and weights of one model, and all of it?"
    )


def _check_before(path: str, config: Any, stored: Mapping[str, Stored]) -> None:
    """Raise UsageError, before memory is taken, for a config.json that asks for far more weights than are stored.

    Weights that transformers renames, joins or transposes keep their number, so that only a model of more numbers than
    its files hold is looked at. A download that is still to come stores nothing yet.
    """
    held = sum(math.prod(shape) for _, shape in stored.values())
    if not held or any(dtype not in FLOATS for dtype, _ in stored.values()):
        return
    with torch.device("meta"):
        asked = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    shapes = {name: list(parameter.shape) for name, parameter in asked.named_parameters()}
    wrong = [f"{n} {list(s)} for {shapes[n]}" for n, (_, s) in stored.items() if n in shapes and list(s) != shapes[n]]
    wanted = sum(math.prod(shape) for shape in shapes.values())
    if wrong and wanted > held:
        raise _fault(path, WRONG_SHAPE, wrong)
    if wanted > MOST_TIMES * held:
        raise UsageError(
            f"model={path}: its config.json asks for {wanted:,} weights, and its files hold {held:,}. Are config.json "
            "and weights of one model, and all of it?"
        )


def _listed(names: Iterable[str]) -> str:
    """Return the first names in order as text, with their number if there are more than SHOWN."""
    ordered = sorted(names)
    more = f", ... ({len(ordered)} in all)" if len(ordered) > SHOWN else ""
    return ", ".join(ordered[:SHOWN]) + more


def _integers(model: PreTrainedModel, location: str) -> list[str]:
    """Return the names of stored tensors that are not floats although the model's parameters of these names are."""
    parameters = {name for name, p in model.named_parameters() if p.is_floating_point()}
    prefix = f"{model.base_model_prefix}."
    stored = _stored(_folder(model.config, location))
    integers = [name for name, (dtype, _) in stored.items() if dtype not in FLOATS]
    return [name for name in integers if name in parameters or prefix + name in parameters]


def _stored(folder: Path) -> dict[str, Stored]:
    """Return the tensors in a folder's safetensors by name, as their headers state them."""
    stored: dict[str, Stored] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                header = tensors.get_slice(name)
                stored[name] = header.get_dtype(), header.get_shape()
    return stored


def _folder(config: Any, location: str) -> Path:
    """Return the folder of a model's files: ``location`` itself, or the folder of a hub id in the hub's cache."""
    if Path(location).is_dir():
        return Path(location)
    from huggingface_hub import try_to_load_from_cache

    commit = getattr(config, "_commit_hash", None)
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

"""Read a checkpoint's weights. Refuse weights that transformers would make up, leave out or cast."""

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
from kvbench.models import checkpoint

FLOATS = ("F64", "F32", "F16", "BF16")
"""The dtypes in which a parameter may be stored, as safetensors names them."""
SHOWN = 3
"""The most weights that a message names."""
MOST_TIMES = 4
"""A config.json that asks for more than this many times the stored weights is refused before memory is taken.

Models with a tied or a missing weight are far below this. Missing weights are reported by name later.
"""
WRONG_SHAPE = "has weights of another shape than its config.json says"
ONE_MODEL = "Do config.json and the weights belong to one model, and are all files of weights there?"
Stored = tuple[str, Sequence[int]]
"""The dtype of a stored tensor, as safetensors names it, and its shape."""


def read_weights(path: str, location: str, **options: Any) -> PreTrainedModel:
    """Return the model of ``AutoModelForCausalLM.from_pretrained(location, **options)``.

    path: the user's name for the model, for messages.
    location: a folder or a hub id.
    options: arguments of ``from_pretrained``, among them ``config``.

    Raises UsageError, with the names of the weights, if weights are missing, are left over, have another shape or are
    not floating-point numbers. Tensors that transformers itself leaves out (buffers of rotations, the second copy of a
    tied weight) are no error.
    """
    config = options["config"]
    _check_count(path, config, _read_headers(_find_folder(config, location)))
    # mismatched sizes are not ignored but reported below, all in one message
    model, info = checkpoint.read(
        AutoModelForCausalLM,
        path,
        location,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        **options,
    )
    mismatches = []
    for name, stored_shape, expected_shape in info["mismatched_keys"]:
        mismatches.append(f"{name} {list(stored_shape)} for {list(expected_shape)}")
    # transformers only reports these faults, and would run the model with made-up weights
    names_by_fault = {
        WRONG_SHAPE: mismatches,
        "lacks weights that its config.json asks for": info["missing_keys"],
        "has weights that its config.json has no place for": info["unexpected_keys"],
        "stores weights as integers, as quantised models do, which kvbench does not read": _find_integers(
            model, location
        ),
    }
    for fault, names in names_by_fault.items():
        if names:
            raise _fault(path, fault, names)
    return model


def _fault(path: str, fault: str, names: Iterable[str]) -> UsageError:
    """Return the error by which a checkpoint is refused for a ``fault`` of its weights, of which it lists the first.

    names: the names of these weights, or texts that describe them.
    """
    return UsageError(f"model={path} {fault}: {_list_first(names)}. {ONE_MODEL}")


def _check_count(path: str, config: Any, stored: Mapping[str, Stored]) -> None:
    """Raise UsageError, before memory is taken, if config.json asks for more weights than are stored.

    The file may ask for up to MOST_TIMES as many weights, as models with a tied or a missing weight do, if no stored
    weight has another shape than the model's weight of its name. Other shapes alone are no error, because transformers
    may rename, join or transpose weights without changing their number.

    stored: the tensors in the model's files by name. Before a download there are none, and nothing is checked.
    """
    stored_numbers = sum(math.prod(shape) for _, shape in stored.values())
    if not stored_numbers:
        return
    # a packed integer holds several weights, so numbers cannot be compared; such files are refused later
    if any(dtype not in FLOATS for dtype, _ in stored.values()):
        return
    # the meta device has shapes without memory
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    mismatches = []
    for name, (_, stored_shape) in stored.items():
        if name in shapes and list(stored_shape) != shapes[name]:
            mismatches.append(f"{name} {list(stored_shape)} for {shapes[name]}")
    needed_numbers = sum(math.prod(shape) for shape in shapes.values())
    if mismatches and needed_numbers > stored_numbers:
        raise _fault(path, WRONG_SHAPE, mismatches)
    if needed_numbers > MOST_TIMES * stored_numbers:
        raise UsageError(
            f"model={path}: its config.json asks for {needed_numbers:,} weights, and its files hold "
            f"{stored_numbers:,}. {ONE_MODEL}"
        )


def _list_first(names: Iterable[str]) -> str:
    """Return the first SHOWN names in alphabetical order as text, with the number of all names if there are more."""
    ordered = sorted(names)
    listed = ", ".join(ordered[:SHOWN])
    if len(ordered) > SHOWN:
        listed += f", ... ({len(ordered)} in all)"
    return listed


def _find_integers(model: PreTrainedModel, location: str) -> list[str]:
    """Return the names of stored tensors that are not floats, although the model's parameters of these names are."""
    parameters = {name for name, parameter in model.named_parameters() if parameter.is_floating_point()}
    # some checkpoints are saved without the prefix of the model's body
    prefix = f"{model.base_model_prefix}."
    # others have another prefix: names are then compared from the layer's number on, as in 0.mlp.up_proj.weight
    names_in_layers = {_cut_to_layer(name) for name in parameters} - {""}
    stored = _read_headers(_find_folder(model.config, location))
    integers = []
    for name, (dtype, _) in stored.items():
        if dtype in FLOATS:
            continue
        if name in parameters or prefix + name in parameters or _cut_to_layer(name) in names_in_layers:
            integers.append(name)
    return integers


def _cut_to_layer(name: str) -> str:
    """Return a weight's name from the layer's number on; '' for a weight outside the layers."""
    return name.partition("layers.")[2]


def _read_headers(folder: Path) -> dict[str, Stored]:
    """Return {name: (dtype, shape)} of the tensors in a folder's safetensors, as the files' headers state them."""
    stored: dict[str, Stored] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            # an open file has keys() but cannot be iterated over
            for name in tensors.keys():  # noqa: SIM118
                # a slice that is not read costs no memory
                header = tensors.get_slice(name)
                stored[name] = header.get_dtype(), header.get_shape()
    return stored


def _find_folder(config: Any, location: str) -> Path:
    """Return the folder of a model's files: ``location`` itself, or the folder of a hub id in the hub's cache.

    If the cache does not have the model, the result is a folder that does not exist.
    """
    if Path(location).is_dir():
        return Path(location)
    from huggingface_hub import try_to_load_from_cache

    # transformers notes in the configuration of which commit it is
    commit = getattr(config, "_commit_hash", None)
    config_path = try_to_load_from_cache(location, "config.json", revision=commit)
    # the cache may say that the hub has no such file, by an object that is no path
    if isinstance(config_path, str):
        return Path(config_path).parent
    return Path(location)


def check_rope(path: str, parameters: Mapping[str, object] | None, config: Any) -> None:
    """Raise UsageError for a RoPE scaling that transformers does not know or that lacks a value.

    path: the user's name for the model, for messages.
    parameters: the model's RoPE parameters; None: it has none.
    config: the model's configuration, which holds these parameters.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = parameters or {}
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        return
    factor = parameters.get("factor", 1.0)
    if kind not in ROPE_INIT_FUNCTIONS:
        raise UsageError(
            f"model={path}: rope_type={kind} is not known; default, {', '.join(sorted(ROPE_INIT_FUNCTIONS))} are"
        )
    if not isinstance(factor, (int, float)) or not 0 < factor < float("inf"):
        raise UsageError(f"model={path}: rope_type={kind} with factor={factor} is not possible: a number above 0")
    # each function reads from the configuration the values that its scaling needs, and fails if one is missing
    try:
        ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    except KeyError as error:
        raise UsageError(f"model={path}: rope_type={kind} needs {error.args[0]}=, as in factor: 4.0") from None

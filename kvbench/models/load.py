"""Load a model and its tokenizer: the embedded one, a folder, or a hub id that the user allowed to fetch."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kvbench.base.conf import LISTED, check, entries
from kvbench.base.errors import KvbenchError, MissingModel, UsageError, did_you_mean, headline, unknown
from kvbench.base.extras import require
from kvbench.models import checkpoint, fetch, manifest, traits, weights
from kvbench.models.config import ModelConfig
from kvbench.models.config_json import check_end_ids, check_sizes
from kvbench.models.releases import tell_untried

# these files of a checkpoint decide results, beside its weights
IDENTITY_FILES = (
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""The files that may hold a tokenizer's vocabulary. A tokenizer needs one of them."""
EMBEDDED = Path(__file__).parent / "embedded"
"""The folder of the models that come with kvbench, such as ``tiny``."""
SLICE = 4096
"""The most bytes that the fingerprint of a large file reads at the beginning, and at the middle, of a tensor."""
WHOLE_HASH_LIMIT = 256 * 2**20
"""Safetensors of more bytes are not read whole for a fingerprint, which would take minutes."""


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint that was found and checked, but whose weights are not loaded yet.

    location: the checkpoint's folder, or its id on the hub.
    revision: the checkpoint's commit on the hub; None for a folder.
    config: the checkpoint's transformers configuration, with the RoPE scaling that the run asks for.
    fingerprint: a text that identifies config, tokenizer and weights.
    """

    location: str
    revision: str | None
    config: Any
    fingerprint: str


def named_models() -> dict[str, dict[str, Any]]:
    """Return {name: entry} of the entries of conf/model that describe a model."""
    # one entry is a template that lists all keys, and describes no model
    return {name: entry for name, entry in entries("model").items() if name != LISTED["model"]}


def locate(cfg: ModelConfig) -> ModelSource:
    """Return the checkpoint that a run's model names. Its weights are not loaded.

    Raises UsageError if kvbench cannot run the model, and MissingModel if the checkpoint is not on this machine.
    """
    if cfg.path.startswith("embedded:"):
        folder = EMBEDDED / cfg.path.removeprefix("embedded:")
        if not (folder / "config.json").is_file():
            names = (config_file.parent.name for config_file in EMBEDDED.glob("*/config.json"))
            raise unknown("embedded model", folder.name, names)
        return _check_folder(cfg, folder)
    if cfg.path.startswith(fetch.SCHEME):
        return _check_folder(cfg, fetch.folder_of(cfg.path.removeprefix(fetch.SCHEME)))
    # a name that the user gave to a GGUF; PATH/NAME means a folder
    if cfg.path in fetch.own_packages():
        return _check_folder(cfg, fetch.folder_of(cfg.path))
    folder = Path(cfg.path).expanduser()
    try:
        exists = folder.exists()
    # the name is too long for a file
    except OSError:
        exists = False
    if exists:
        manifest.check_copy(folder)
        return _check_folder(cfg, folder)
    # an id of the hub is owner/name; any other path means a folder, which does not exist
    if cfg.path.startswith((".", "/", "~")) or cfg.path.count("/") != 1:
        raise MissingModel(
            f"model={cfg.path}: there is no such folder.{did_you_mean(cfg.path, named_models())} Give a folder with "
            "config.json and *.safetensors, an owner/name id of the Hugging Face hub, or one of "
            "kvbench list models",
            names=[cfg.path],
        )
    return _find_on_hub(cfg)


def load_tokenizer(cfg: ModelConfig, source: ModelSource) -> PreTrainedTokenizerBase:
    """Return the checkpoint's tokenizer, with the configuration's chat template if it has one.

    Raises UsageError with the reason if it cannot be loaded.
    """
    checkpoint.silence_transformers()
    folder = Path(source.location)
    # transformers' own errors do not say that the vocabulary is missing, and some releases make an empty tokenizer
    if folder.is_dir() and not any((folder / name).exists() for name in VOCABULARIES):
        raise UsageError(
            f"model={cfg.path}: its tokenizer cannot be loaded: there is none of {', '.join(VOCABULARIES)}: save the "
            "model's tokenizer into its folder"
        )
    try:
        tokenizer: PreTrainedTokenizerBase = checkpoint.read(
            AutoTokenizer, cfg.path, source.location, local_files_only=not cfg.download, **_revision_option(source)
        )
        if cfg.chat_template:
            tokenizer.chat_template = cfg.chat_template
        return tokenizer
    # its message states the reason already
    except UsageError:
        raise
    except Exception as error:
        # a damaged tokenizer fails with errors of many types
        reason = f"{type(error).__name__}: {headline(error)}"
        raise UsageError(f"model={cfg.path}: its tokenizer cannot be loaded: {reason}") from None


def end_tokens(cfg: ModelConfig, source: ModelSource) -> set[int]:
    """Return the end-of-sequence ids at which ``model.generate`` stops.

    These are the ids in the checkpoint's config and in its generation config, which may be absent. Either file may
    state one id or several.
    """
    try:
        generation = checkpoint.read(
            GenerationConfig, cfg.path, source.location, local_files_only=not cfg.download, **_revision_option(source)
        )
    # the checkpoint has no such file
    except (OSError, ValueError):
        generation = None
    token_ids: set[int] = set()
    for config in (source.config, generation):
        # one id, a list of ids, or None
        stated = getattr(config, "eos_token_id", None)
        if isinstance(stated, int):
            token_ids.add(stated)
        else:
            token_ids.update(stated or ())
    return token_ids


def weight_bytes(source: ModelSource) -> int:
    """Return the bytes of a checkpoint's safetensors on disk, or 0 if its location is not a local folder."""
    # a hub id is no folder here, so nothing is found below it
    return sum(path.stat().st_size for path in Path(source.location).glob("*.safetensors"))


def load_weights(cfg: ModelConfig, source: ModelSource, device: torch.device) -> PreTrainedModel:
    """Return the model in eval mode on ``device``, with trained weights from safetensors or random ones.

    With ``device_map`` accelerate spreads the layers over several devices instead. Raises UsageError if the model
    cannot be loaded, and KvbenchError if it does not fit into memory.
    """
    # errors below may come from a package that is newer than the newest tried release
    tell_untried()
    checkpoint.silence_transformers()
    _check_device_map(cfg)
    dtype = resolve_dtype(cfg, device, source.config)
    try:
        model = _build_model(cfg, source, dtype)
        # with a device_map, the layers are on their devices already
        if not cfg.device_map:
            model = model.to(device)  # type: ignore[arg-type]
        return model.eval()
    except torch.OutOfMemoryError:
        raise KvbenchError(f"model={cfg.path} does not fit into the memory of {device} as {dtype}") from None
    # its message states the reason already
    except UsageError:
        raise
    except SafetensorError as error:
        raise UsageError(
            f"model={cfg.path}: its safetensors are damaged: {headline(error)}. Is the download complete? "
            "weights=random runs the same architecture without them"
        ) from None
    except Exception as error:
        # transformers and the code of families fail with errors of many types
        raise UsageError(
            f"model={cfg.path} cannot be loaded on {cfg.device_map or device}: {headline(error)}"
        ) from None


def _build_model(cfg: ModelConfig, source: ModelSource, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model with random weights or with its checkpoint's. Without ``device_map`` it is on the CPU."""
    if cfg.weights == "random":
        # every run gets the same random weights
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(source.config, dtype=dtype)
    options: dict[str, object] = {}
    if cfg.device_map:
        options["device_map"] = cfg.device_map
    options |= _revision_option(source)
    return weights.read_weights(
        cfg.path,
        source.location,
        config=source.config,
        dtype=dtype,
        local_files_only=not cfg.download,
        **options,
    )


def _check_device_map(cfg: ModelConfig) -> None:
    """Raise UsageError if ``device_map`` is set but layers cannot be spread over devices.

    The reason is that random weights are not read, or that the package accelerate is missing.
    """
    if not cfg.device_map:
        return
    if cfg.weights == "random":
        raise UsageError(
            f"device_map={cfg.device_map} spreads weights as they are read, and weights=random reads none: leave out "
            "one of them"
        )
    require("accelerate", f"device_map={cfg.device_map}")


def load_model(
    name: str | Path, device: str | torch.device = "auto", dtype: str | torch.dtype = "auto", **knobs: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model by name, and return (model, tokenizer). The model is in eval mode.

    name: an entry of conf/model such as ``tiny``, a folder with config.json and *.safetensors, or an owner/name id of
    the Hugging Face hub.
    device: ``auto`` (the first CUDA device, else the CPU), ``cpu``, ``cuda`` or ``cuda:1``.
    dtype: a dtype of PyTorch or its name. ``auto`` is float32 on a CPU and the checkpoint's own dtype on a GPU.
    knobs: other options of a model, as in conf/model/hf.yaml. For example, ``download=True`` fetches a hub id that is
    not in the local cache.

    Raises UsageError with the reason if the model cannot be loaded, MissingModel if it is not on this machine, and
    KvbenchError if it does not fit into memory.
    """
    check("model", name, isinstance(name, (str, Path)) and bool(str(name)), "a name, a folder or a hub id")
    allowed = [f.name for f in fields(ModelConfig) if f.name not in ("name", "path")]
    for knob in set(knobs) - set(allowed):
        raise unknown("option of the model", knob, allowed)
    # as on the command line, a name without an entry in conf/model is the path of the entry for any checkpoint, and
    # arguments overrule the entry
    listed = named_models()
    settings: dict[str, Any] = {}
    if isinstance(name, str) and name in listed:
        settings |= listed[name]
    else:
        settings |= entries("model")[LISTED["model"]] | {"path": str(name)}
    # PyTorch prints a dtype as torch.float32, and ModelConfig takes its name alone
    settings["dtype"] = str(dtype).removeprefix("torch.")
    settings |= knobs
    cfg = ModelConfig(**settings)
    source = locate(cfg)
    return load_weights(cfg, source, resolve_device(str(device))), load_tokenizer(cfg, source)


def _read_json(path: str, file: Path) -> Any:
    """Return the parsed content of a checkpoint's JSON file. ``path`` is the user's name for the model in messages.

    Raises UsageError for a file that is not JSON.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    # json raises RecursionError for thousands of nested brackets
    except (ValueError, RecursionError):
        raise UsageError(f"model={path}: its {file.name} is not valid JSON") from None


def resolve_device(device: str) -> torch.device:
    """Return the device of a name; ``auto`` is the first CUDA device, else the CPU.

    Raises UsageError for an unknown name, and for a device that this machine does not have.
    """
    has_cuda = torch.cuda.is_available()
    if device == "auto" and has_cuda:
        return torch.device("cuda:0")
    if device == "auto":
        return torch.device("cpu")
    if re.fullmatch(r"cpu|cuda(:\d+)?", device) is None:
        raise unknown("device", device, ("auto", "cpu", "cuda", "cuda:0"))
    # a CUDA device must also be one of those that PyTorch sees; ``cuda`` without a number is the first
    resolved = torch.device(device)
    count = torch.cuda.device_count() if has_cuda else 0
    if resolved.type == "cuda" and (resolved.index or 0) >= count:
        devices = f"{count} CUDA devices" if count else "no CUDA device"
        raise UsageError(f"device={device}: PyTorch {torch.__version__} sees {devices} here; use device=cpu")
    return resolved


def fingerprint(folder: Path, whole_limit: int = WHOLE_HASH_LIMIT) -> str:
    """Return 16 digits of the SHA-256 of a folder's config, tokenizer and weights, which identify the checkpoint.

    Safetensors of more than ``whole_limit`` bytes are not read whole: only their headers, and the beginning and middle
    of every tensor, count. Raises UsageError if one of these names is not a file.
    """
    digest = hashlib.sha256()
    # other files, such as a README, change no result
    paths = [path for path in folder.iterdir() if path.suffix == ".safetensors" or path.name in IDENTITY_FILES]
    for path in sorted(paths):
        if not path.is_file():
            raise UsageError(f"model={folder}: {path.name} is no file")
        size = path.stat().st_size
        # names and sizes count as well: the same bytes in files of other names are another checkpoint
        digest.update(f"{path.name}:{size}\n".encode())
        with path.open("rb") as file:
            if size > whole_limit and path.suffix == ".safetensors":
                for content in _read_slices(file):
                    digest.update(content)
            else:
                # files may be larger than memory, so they are read block by block
                while block := file.read(2**20):
                    digest.update(block)
    return digest.hexdigest()[:16]


def _read_slices(file: BinaryIO) -> Iterator[bytes]:
    """Yield the header of a safetensors file, then two slices of each tensor: its beginning and its middle.

    file: the open file, at its beginning.
    """
    # a file has 8 bytes with the header's length, the header in JSON, and then all tensors, at the header's offsets
    length = file.read(8)
    header = file.read(int.from_bytes(length, "little"))
    yield length + header
    tensors_start = file.tell()
    for name, entry in sorted(json.loads(header).items()):
        # this entry describes the file, and has no tensor
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        for offset in (start, (start + end) // 2):
            file.seek(tensors_start + offset)
            # a slice ends with its tensor
            yield file.read(min(SLICE, end - offset))


def _check_folder(cfg: ModelConfig, folder: Path) -> ModelSource:
    """Return the checkpoint in a folder. Raises UsageError with the reason if it cannot be used."""
    # main is the default of conf/model/hf.yaml, which serves folders as well
    if cfg.revision not in (None, "main"):
        hint = f"it is a commit of a hub id, and model={cfg.path} is a folder; leave it out"
        raise UsageError(f"model.revision={cfg.revision} is not possible: {hint}")
    if not folder.is_dir():
        raise UsageError(f"model={cfg.path} is a file; give the folder that holds config.json and *.safetensors")
    if not (folder / "config.json").is_file():
        raise UsageError(f"model={cfg.path} is not a model folder: it has no config.json")
    # sizes are checked first, because transformers would build a model of any sizes with the right types
    check_sizes(cfg.path, _read_json(cfg.path, folder / "config.json"))
    if (folder / "generation_config.json").is_file():
        check_end_ids(cfg.path, "generation_config.json", _read_json(cfg.path, folder / "generation_config.json"))
    if (folder / "adapter_config.json").exists():
        raise UsageError(
            f"model={cfg.path} holds an adapter (adapter_config.json), which kvbench does not apply: merge it into its "
            "base model's weights and save those"
        )
    if cfg.weights == "trained":
        _check_weight_files(cfg, folder)
    # the configuration is read last, as it may run into errors that the checks above explain better
    try:
        config = config_with_scaling(cfg, checkpoint.read_config(cfg.path, folder))
    # its message states the reason already
    except UsageError:
        raise
    except Exception as error:
        # the families' own checks raise errors of many types
        raise UsageError(f"model={cfg.path}: its config.json cannot be used: {headline(error)}") from None
    return ModelSource(location=str(folder), revision=None, config=config, fingerprint=fingerprint(folder))


def _check_weight_files(cfg: ModelConfig, folder: Path) -> None:
    """Raise UsageError if a folder has no safetensors, or if its index of them is damaged or names missing files."""
    if not any(folder.glob("*.safetensors")):
        has_pickles = any(folder.glob("*.bin"))
        pickles = " (*.bin files are pickles, which kvbench does not load)" if has_pickles else ""
        raise UsageError(
            f"model={cfg.path} has no *.safetensors weights{pickles}. Convert or finish the download, or use "
            "weights=random for the same architecture without them"
        )
    index = folder / "model.safetensors.index.json"
    # a model in one file has no index
    if not index.is_file():
        return
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    # the errors of a text that is not JSON, and of JSON of another form
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise UsageError(f"model={cfg.path}: its model.safetensors.index.json is damaged") from None
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise UsageError(
            f"model={cfg.path} is half downloaded: {len(missing)} of {len(names)} weight files are missing, "
            f"{missing[0]} first"
        )


def _find_on_hub(cfg: ModelConfig) -> ModelSource:
    """Return the checkpoint of a hub id, from the local cache, or from the hub if the run may download it.

    Raises MissingModel, with the remedy, if it is not found.
    """
    try:
        config = checkpoint.read_config(cfg.path, cfg.path, revision=cfg.revision, local_files_only=not cfg.download)
    # the checkpoint is there, and its message states why it cannot be used
    except UsageError:
        raise
    except Exception as error:
        # the hub and its cache fail with errors of many types
        raise MissingModel(_absence_message(cfg, error), names=[cfg.path]) from None
    # transformers notes the commit in the configuration. The commit identifies the files, whereas a branch such as
    # "main" may move to others
    commit = getattr(config, "_commit_hash", None) or cfg.revision
    return ModelSource(
        location=cfg.path, revision=commit, config=config_with_scaling(cfg, config), fingerprint=f"{cfg.path}@{commit}"
    )


def _absence_message(cfg: ModelConfig, error: Exception) -> str:
    """Return the message for a hub id that is not on this machine, or that could not be downloaded for ``error``."""
    # hf is the entry of conf/model for any hub id; other entries have names of their own
    if cfg.name == "hf":
        name, where = cfg.path, ""
    else:
        name, where = cfg.name, f" ({cfg.path})"
    if cfg.download:
        return f"model {name}{where} could not be downloaded. The hub said: {headline(error)}"
    if cfg.revision == "main":
        message = f"model {name}{where} is not on this machine."
    else:
        message = f"model {name}{where}, revision {cfg.revision}, is not on this machine."
    if cfg.name == "hf":
        message += " Download it: add download=true."
    else:
        # an entry of conf/model has a command of its own
        message += f" Download it: `kvbench model fetch {name}`, or add download=true."
    message += " Or pass a local folder: model=PATH."
    if cfg.shape is not None:
        message += f" The bytes of its caches need no download: `kvbench bench memory model={name} n=8192`."
    return message


def config_with_scaling(cfg: ModelConfig, config: Any) -> Any:
    """Return the checkpoint's ``config`` after checking it, with the RoPE scaling that the run asks for, if any.

    The scaling is written into ``config`` itself. Raises UsageError for a scaling that is not possible, and for a model
    that kvbench does not run.
    """
    if cfg.rope_scaling:
        parameters = getattr(config, "rope_parameters", None)
        if parameters is None:
            raise UsageError(
                f"model.rope_scaling={dict(cfg.rope_scaling)}: {cfg.path} has no rotary positions to scale"
            )
        config.rope_parameters = dict(parameters) | dict(cfg.rope_scaling)
    weights.check_rope(cfg.path, getattr(config, "rope_parameters", None), config)
    # called for its error if kvbench cannot run the model
    try:
        traits.of_config(config)
    except UsageError as error:
        raise UsageError(f"model={cfg.path}: {error}") from None
    return config


def resolve_dtype(cfg: ModelConfig, device: torch.device, config: Any) -> torch.dtype:
    """Return the dtype to run in: the one that the user set, or for ``auto`` float32 on a CPU, else the checkpoint's.

    A checkpoint that states no dtype runs in bfloat16 on a GPU.
    """
    # ModelConfig has checked the name
    if cfg.dtype != "auto":
        return getattr(torch, cfg.dtype)
    # CPUs without bf16 units compute half precision slowly
    if device.type == "cpu":
        return torch.float32
    # None if config.json does not state one
    checkpoint_dtype = getattr(config, "dtype", None)
    if isinstance(checkpoint_dtype, torch.dtype):
        return checkpoint_dtype
    return torch.bfloat16


def _revision_option(source: ModelSource) -> dict[str, Any]:
    """Return the option of transformers for a checkpoint's commit, or {} for a folder."""
    if source.revision:
        return {"revision": source.revision}
    return {}

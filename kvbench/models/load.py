"""Load a model and its tokenizer: the embedded one, a folder, or a hub id that the user allowed to fetch."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as hf_logging

from kvbench.base.conf import LISTED, check, entries
from kvbench.base.errors import KvbenchError, MissingModel, UsageError, did_you_mean, headline, unknown
from kvbench.base.extras import require
from kvbench.models import fetch, manifest, traits, weights
from kvbench.models.config import ModelConfig
from kvbench.models.config_json import check_end_ids, check_sizes
from kvbench.models.releases import tell_untried

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
"""Files of which a tokenizer needs one."""
EMBEDDED = Path(__file__).parent / "embedded"
SLICE = 4096
WHOLE_HASH_LIMIT = 256 * 2**20


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint.

    location: its folder, or its id on the hub.
    revision: its commit on the hub, None for a folder.
    fingerprint: a text that identifies config, tokenizer and weights.
    """

    location: str
    revision: str | None
    config: Any
    fingerprint: str


def named_models() -> dict[str, dict[str, Any]]:
    """Return the entries of conf/model that name a model."""
    return {name: entry for name, entry in entries("model").items() if name != LISTED["model"]}


def locate(cfg: ModelConfig) -> ModelSource:
    """Return the checkpoint of a model, before anything large is read. Raises UsageError if kvbench cannot run it."""
    if cfg.path.startswith("embedded:"):
        folder = EMBEDDED / cfg.path.removeprefix("embedded:")
        if not (folder / "config.json").is_file():
            raise unknown("embedded model", folder.name, (p.parent.name for p in EMBEDDED.glob("*/config.json")))
        return _check_folder(cfg, folder)
    if cfg.path.startswith(fetch.SCHEME):
        return _check_folder(cfg, fetch.located(cfg.path.removeprefix(fetch.SCHEME)))
    folder = Path(cfg.path).expanduser()
    try:
        exists = folder.exists()
    except OSError:  # of a name that no file can have
        exists = False
    if exists:
        manifest.check_copy(folder)
        return _check_folder(cfg, folder)
    if cfg.path.startswith((".", "/", "~")) or cfg.path.count("/") != 1:
        raise MissingModel(
            f"model={cfg.path}: there is no such folder.{did_you_mean(cfg.path, named_models())} Give a folder with "
            "config.json and *.safetensors, an owner/name id of the Hugging Face hub, or one of "
            "python -m kvbench list models",
            [cfg.path],
        )
    return _find_on_hub(cfg)


def load_tokenizer(cfg: ModelConfig, source: ModelSource) -> PreTrainedTokenizerBase:
    """Return the checkpoint's tokenizer, with the run's own chat template if it has one."""
    _quiet()
    try:
        options = {"local_files_only": not cfg.download, **_options(source)}
        tokenizer = AutoTokenizer.from_pretrained(source.location, **options)
        if cfg.chat_template:
            tokenizer.chat_template = cfg.chat_template
        return tokenizer
    except Exception as error:
        why = f"{type(error).__name__}: {headline(error)}"
        if Path(source.location).is_dir() and not any((Path(source.location) / name).exists() for name in VOCABULARIES):
            why = f"there is none of {', '.join(VOCABULARIES)}: save the model's tokenizer into its folder"
        raise UsageError(f"model={cfg.path}: its tokenizer cannot be loaded: {why}") from None


def end_tokens(cfg: ModelConfig, source: ModelSource) -> set[int]:
    """Return the end-of-sequence ids at which ``model.generate`` stops.

    They are those of the checkpoint's config and of its generation config, which may be absent; either may name one id
    or several.
    """
    token_ids: set[int] = set()
    try:
        generation = GenerationConfig.from_pretrained(
            source.location, local_files_only=not cfg.download, **_options(source)
        )
    except (OSError, ValueError):
        generation = None
    for holder in (source.config, generation):
        eos = getattr(holder, "eos_token_id", None)
        token_ids |= {eos} if isinstance(eos, int) else set(eos or ())
    return token_ids


def weight_bytes(source: ModelSource) -> int:
    """Return the bytes of a checkpoint's safetensors on disk; 0 if its location is not a local folder."""
    return sum(p.stat().st_size for p in Path(source.location).glob("*.safetensors"))


def load_weights(cfg: ModelConfig, source: ModelSource, device: torch.device) -> PreTrainedModel:
    """Return the model in eval mode on ``device``, with trained weights from safetensors or random ones.

    With ``device_map`` accelerate spreads its layers over devices instead.
    """
    tell_untried()
    _quiet()
    _check_device_map(cfg)
    dtype = resolve_dtype(cfg, device, source.config)
    try:
        if cfg.weights == "random":
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(source.config, dtype=dtype)
        else:
            model = weights.read(
                cfg.path,
                source.location,
                config=source.config,
                dtype=dtype,
                local_files_only=not cfg.download,
                **({"device_map": cfg.device_map} if cfg.device_map else {}),
                **_options(source),
            )
        return model.eval() if cfg.device_map else model.to(device).eval()
    except torch.OutOfMemoryError:
        raise KvbenchError(f"model={cfg.path} does not fit into the memory of {device} as {dtype}") from None
    except UsageError:
        raise
    except SafetensorError as error:
        raise UsageError(
            f"model={cfg.path}: its safetensors are damaged: {headline(error)}. Is the download complete? "
            "weights=random runs the same architecture without them"
        ) from None
    except Exception as error:
        raise UsageError(
            f"model={cfg.path} cannot be loaded on {cfg.device_map or device}: {headline(error)}"
        ) from None


def _check_device_map(cfg: ModelConfig) -> None:
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
    """Return (model, tokenizer) by name: an entry of conf/model such as ``tiny``, a folder, or a hub id.

    ``knobs`` are fields of ModelConfig; ``download=True`` fetches a hub id that is not in the local cache.
    """
    check("model", name, isinstance(name, (str, Path)) and bool(str(name)), "a name, a folder or a hub id")
    allowed = [f.name for f in fields(ModelConfig) if f.name not in ("name", "path")]
    for knob in set(knobs) - set(allowed):
        raise unknown("knob of the model", knob, allowed)
    entry = named_models().get(name, {}) if isinstance(name, str) else {}
    facts = {"name": str(name), "path": str(name), **entry, "dtype": str(dtype).removeprefix("torch."), **knobs}
    cfg = ModelConfig(**facts)
    source = locate(cfg)
    return load_weights(cfg, source, resolve_device(str(device))), load_tokenizer(cfg, source)


def _read_json(path: str, file: Path) -> Any:
    """Return the content of a checkpoint's file; ``path`` is the user's name for the model."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise UsageError(f"model={path}: its {file.name} is not valid JSON") from None


def resolve_device(device: str) -> torch.device:
    """Return a device by name; ``auto`` is the first CUDA device, else the CPU. Raises UsageError if it is absent."""
    if device == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if re.fullmatch(r"cpu|cuda(:\d+)?", device) is None:
        raise unknown("device", device, ("auto", "cpu", "cuda", "cuda:0"))
    resolved = torch.device(device)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if resolved.type == "cuda" and (resolved.index or 0) >= count:
        devices = f"{count} CUDA devices" if count else "no CUDA device"
        raise UsageError(f"device={device}: PyTorch {torch.__version__} sees {devices} here; use device=cpu")
    return resolved


def fingerprint(folder: Path) -> str:
    """Return 16 digits of the SHA-256 of a folder's config, tokenizer and weights, which identify the checkpoint.

    Of safetensors above 256 MiB only the header and the beginning and middle of every tensor are read.
    """
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix == ".safetensors" or p.name in IDENTITY_FILES):
        if not path.is_file():
            raise UsageError(f"model={folder}: {path.name} is no file")
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\n".encode())
        with path.open("rb") as f:
            if size > WHOLE_HASH_LIMIT and path.suffix == ".safetensors":
                for part in _slices(f):
                    digest.update(part)
            else:
                while block := f.read(2**20):
                    digest.update(block)
    return digest.hexdigest()[:16]


def _slices(f: BinaryIO) -> Iterator[bytes]:
    """Yield the header of a safetensors file and two slices of each tensor, at its beginning and in its middle."""
    length = f.read(8)
    header = f.read(int.from_bytes(length, "little"))
    yield length + header
    start = f.tell()
    for name, entry in sorted(json.loads(header).items()):
        if name != "__metadata__":
            first, last = entry["data_offsets"]
            for offset in (first, (first + last) // 2):
                f.seek(start + offset)
                yield f.read(min(SLICE, last - offset))


def _check_folder(cfg: ModelConfig, folder: Path) -> ModelSource:
    """Return the checkpoint in a folder. Raises UsageError with the reason if it cannot be used."""
    if cfg.revision not in (None, "main"):
        hint = f"it is a commit of a hub id, and model={cfg.path} is a folder; leave it out"
        raise UsageError(f"model.revision={cfg.revision} is not possible: {hint}")
    if not folder.is_dir():
        raise UsageError(f"model={cfg.path} is a file; give the folder that holds config.json and *.safetensors")
    if not (folder / "config.json").is_file():
        raise UsageError(f"model={cfg.path} is not a model folder: it has no config.json")
    check_sizes(cfg.path, _read_json(cfg.path, folder / "config.json"))
    if (folder / "generation_config.json").is_file():
        check_end_ids(cfg.path, "generation_config.json", _read_json(cfg.path, folder / "generation_config.json"))
    if (folder / "adapter_config.json").exists():
        raise UsageError(
            f"model={cfg.path} holds an adapter (adapter_config.json), which kvbench does not apply: merge it into its "
            "base model's weights and save those"
        )
    if cfg.weights == "trained" and not any(folder.glob("*.safetensors")):
        pickles = " (*.bin files are pickles, which kvbench does not load)" if any(folder.glob("*.bin")) else ""
        raise UsageError(
            f"model={cfg.path} has no *.safetensors weights{pickles}. Convert or finish the download, or use "
            "weights=random for the same architecture without them"
        )
    _check_shards(cfg, folder)
    try:
        config = scaled(cfg, AutoConfig.from_pretrained(folder))
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"model={cfg.path}: its config.json cannot be used: {headline(error)}") from None
    return ModelSource(str(folder), None, config, fingerprint(folder))


def _check_shards(cfg: ModelConfig, folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if cfg.weights != "trained" or not index.is_file():
        return
    try:
        wanted = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise UsageError(f"model={cfg.path}: its model.safetensors.index.json is damaged") from None
    missing = sorted(w for w in wanted if not (folder / w).is_file())
    if missing:
        raise UsageError(
            f"model={cfg.path} is half downloaded: {len(missing)} of {len(wanted)} weight files are missing, "
            f"{missing[0]} first"
        )


def _find_on_hub(cfg: ModelConfig) -> ModelSource:
    try:
        config = AutoConfig.from_pretrained(cfg.path, revision=cfg.revision, local_files_only=not cfg.download)
    except Exception as error:
        online = "add" if cfg.name == "hf" else f"python -m kvbench model fetch {cfg.name}, or add"
        remedy = (
            f"the hub said: {headline(error)}"
            if cfg.download
            else f"it is no folder and not in the local hub cache; {online} download=true to fetch it, or give a folder"
        )
        if cfg.shape is not None:
            remedy += f". What caches take needs no checkpoint: python -m kvbench bench memory model={cfg.name} n=8192"
        raise MissingModel(f"model={cfg.path} (revision {cfg.revision}): {remedy}", [cfg.path]) from None
    commit = getattr(config, "_commit_hash", None) or cfg.revision
    return ModelSource(cfg.path, commit, scaled(cfg, config), f"{cfg.path}@{commit}")


def scaled(cfg: ModelConfig, config: Any) -> Any:
    """Return the checkpoint's config with the run's own RoPE scaling, if it asks for one.

    Raises UsageError for a scaling that is not possible, and for a model that kvbench does not run.
    """
    if cfg.rope_scaling:
        parameters = getattr(config, "rope_parameters", None)
        if parameters is None:
            raise UsageError(
                f"model.rope_scaling={dict(cfg.rope_scaling)}: {cfg.path} has no rotary positions to scale"
            )
        config.rope_parameters = {**parameters, **cfg.rope_scaling}
    weights.check_rope(cfg.path, getattr(config, "rope_parameters", None), config)
    try:
        traits.of_config(config)
    except UsageError as error:
        raise UsageError(f"model={cfg.path}: {error}") from None
    return config


def resolve_dtype(cfg: ModelConfig, device: torch.device, config: Any) -> torch.dtype:
    """Return the dtype to run in: the model's knob, or for ``auto`` float32 on a CPU, else the checkpoint's own."""
    if cfg.dtype != "auto":
        return getattr(torch, cfg.dtype)
    if device.type == "cpu":
        return torch.float32
    checkpoint_dtype = getattr(config, "dtype", None)
    return checkpoint_dtype if isinstance(checkpoint_dtype, torch.dtype) else torch.bfloat16


def _options(source: ModelSource) -> dict[str, Any]:
    return {"revision": source.revision} if source.revision else {}


def _quiet() -> None:
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)

"""Convert a GGUF file, the format of llama.cpp, to the folder that transformers reads, by transformers' own reader.

Each quantised weight of a GGUF file is a scale times a small integer (plus an offset). Only float32 represents these
products exactly, so weights are written as float32, and they are the same bytes with every release of transformers. A
file of which transformers would leave out a part is refused, because the model would be another.
"""

from __future__ import annotations

import copy
import io
import json
import math
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError

from kvbench.base.errors import KvbenchError, UsageError, headline
from kvbench.base.extras import require
from kvbench.models import checkpoint, traits, weights
from kvbench.models.releases import READS_GGUF

GPT2_SPLITS = ("gpt-2", "granite-docling", "jais", "mpt", "olmo", "trillion")
"""The pre-tokenizers, by the names that GGUF gives them, that split a text by GPT-2's regular expression."""
DIGITS_FIRST = ("codeshell", "command-r", "exaone", "mellum2", "minerva-7b", "refact", "smollm", "starcoder")
"""The pre-tokenizers that split off single digits, and then split by GPT-2's regular expression."""
TRIED_TOKENS = 64
"""The number of tokens on which the logits of the converted model are compared with those of the GGUF."""
TOLERANCE = 1e-4
"""The largest difference of two logits that count as equal, absolute and relative to the logit."""


def convert(
    path: Path, folder: Path, say: Callable[[str], None], known: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Write the config, tokenizer and weights of the GGUF file ``path`` into ``folder``, which must exist.

    say: prints a line of progress.
    known: the contents of the folder's JSON files by name, written in place of those that the installed release of
        transformers makes of the GGUF. In tokenizer.json the vocabulary, merges and added tokens are filled in.

    ``check_installed`` must have passed. Raises KvbenchError if the file cannot be converted, and OSError if a file
    cannot be read or written.
    """
    release = f"transformers {transformers.__version__}"
    # earlier releases build some tokenizers wrongly, which the checksums of known files reveal
    if not READS_GGUF and known is None:
        raise UsageError(
            f"{path.name} needs transformers 5.23 or newer, and this is {release}: pip install -U transformers"
        )
    try:
        _convert(path, folder, say, known)
    except KvbenchError:
        raise
    except Exception as error:
        # the system's errors have a number, and the caller explains them; transformers raises some without
        if isinstance(error, OSError) and error.errno is not None:
            raise
        # the readers fail on damaged and unknown files with errors of many types
        hint = "" if READS_GGUF else ". It may need transformers 5.23 or newer"
        raise KvbenchError(f"{path.name} is no GGUF file that {release} can read: {headline(error)}{hint}") from None


def check_installed() -> None:
    """Raise UsageError, with the command that mends it, if a package that converts GGUF files is missing."""
    for package in ("gguf", "accelerate"):
        require(package, "converting a GGUF file", extra="gguf")


def _convert(
    path: Path, folder: Path, say: Callable[[str], None], known: Mapping[str, Mapping[str, Any]] | None
) -> None:
    """Do the work of ``convert``. Raises errors of many types."""
    # imported here, because only a conversion needs them
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint.silence_transformers()
    reader = GGUFReader(str(path))
    config = checkpoint.read_config(path.name, path.parent, gguf_file=path.name)
    # transformers names the GGUF here, and would read it again
    vars(config).pop("quantization_config", None)
    _check_whole(path.name, reader, config)
    # releases that can leave weights packed, on a GPU, have this class
    unpack = transformers.GgufConfig(dequantize=True) if READS_GGUF else None
    say(f"reading {len(reader.tensors)} tensors as float32")
    # a bar of its own, which transformers has no switch for
    with redirect_stderr(io.StringIO()):
        model, info = checkpoint.read(
            AutoModelForCausalLM,
            path.name,
            path.parent,
            gguf_file=path.name,
            config=config,
            dtype=torch.float32,
            quantization_config=unpack,
            output_loading_info=True,
        )
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"it has no {missing[0]}")
    ids = torch.arange(TRIED_TOKENS).unsqueeze(0) * (config.vocab_size // TRIED_TOKENS)
    with torch.inference_mode():
        expected = model(ids).logits
    _add_end_tokens(reader, model.generation_config)
    tokenizer = checkpoint.read(AutoTokenizer, path.name, path.parent, gguf_file=path.name)
    _set_splits(path.name, reader, tokenizer, say)
    say(f"writing {folder.name}")
    # transformers refuses to save a model that it read from a GGUF
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:
        raise KvbenchError(f"the weights could not be written to {folder}: {headline(error)}") from None
    # safetensors lets only the owner read its files
    for file in folder.glob("*.safetensors"):
        file.chmod((folder / "config.json").stat().st_mode)
    del model
    if known is None:
        tokenizer.save_pretrained(folder)
    else:
        _write_known(folder, known, json.loads(tokenizer.backend_tokenizer.to_str()))
    config = checkpoint.read_config(path.name, folder)
    converted = weights.read_weights(path.name, str(folder), config=config, dtype=torch.float32)
    with torch.inference_mode():
        actual = converted.eval()(ids).logits
    # a NaN equals nothing
    if not torch.allclose(actual, expected, TOLERANCE, TOLERANCE):
        raise ValueError("the converted model has other logits than the GGUF")


def _check_whole(name: str, reader: Any, config: Any) -> None:
    """Raise KvbenchError unless transformers' model of ``config`` takes up all that the GGUF file states.

    name: the file's name, for messages.
    reader: the GGUFReader of the file.
    """
    import torch
    from transformers import AutoModelForCausalLM

    parts = _read(reader, "split.count", 1)
    if parts > 1:
        raise KvbenchError(f"{name} is one of {parts} parts: join them with llama.cpp's llama-gguf-split --merge")
    try:
        traits.of_config(config)
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None
    scaling = {key: field.contents() for key, field in reader.fields.items() if ".rope.scaling." in key}
    rotation = str(getattr(config, "rope_parameters", None))
    if any(key.endswith(".factor") and value != 1 for key, value in scaling.items()) and "factor" not in rotation:
        raise KvbenchError(f"{name} scales its rotations ({scaling}), which transformers leaves out of its config")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    taken = sum(parameter.numel() for parameter in model.parameters())
    stored = 0
    for tensor in reader.tensors:
        # some files repeat the embedding as the output
        if not (tensor.name == "output.weight" and config.tie_word_embeddings):
            stored += math.prod(int(size) for size in tensor.shape)
    if taken != stored:
        raise KvbenchError(
            f"{name} holds {stored:,} weights, and transformers' {type(model).__name__} has {taken:,}: it would be "
            "another model. (Files of Llama 3.1 and later have rope_freqs.weight, which transformers leaves out)"
        )


def _add_end_tokens(reader: Any, generation_config: Any) -> None:
    """Add the tokens at which a turn or a message ends, if the GGUF file states them, to those that end an answer."""
    stated = {_read(reader, f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")} - {None}
    ends = generation_config.eos_token_id
    own = set(ends) if isinstance(ends, list) else {ends} - {None}
    if stated - own:
        generation_config.eos_token_id = sorted(own | stated)


def _set_splits(name: str, reader: Any, tokenizer: Any, say: Callable[[str], None]) -> None:
    """Let the tokenizer split off single digits if the GGUF file says so. Tell the user if the splits are a guess.

    transformers splits by GPT-2's regular expression if it does not know the pre-tokenizer that the file names.

    name: the file's name, for the message.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    kind = _read(reader, "tokenizer.ggml.pre")
    backend = tokenizer.backend_tokenizer
    if _read(reader, "tokenizer.ggml.model") != "gpt2" or not isinstance(backend.pre_tokenizer, ByteLevel):
        return
    if kind in DIGITS_FIRST:
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    elif kind not in GPT2_SPLITS:
        say(
            f"{name} names the pre-tokenizer {kind}, which transformers {transformers.__version__} does not know: it "
            "splits texts as GPT-2 does, and the tokens may differ from the original model's"
        )


def _write_known(folder: Path, known: Mapping[str, Mapping[str, Any]], built: Mapping[str, Any]) -> None:
    """Write the JSON files in ``known``, by name, with the tokens of the tokenizer ``built`` from the GGUF."""
    for name, content in known.items():
        filled = dict(content)
        indent: int | None = 2
        if name == "tokenizer.json":
            model = built["model"]
            merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
            filled["model"] = content["model"] | {"vocab": model["vocab"], "merges": merges}
            # earlier releases add tokens of other models
            filled["added_tokens"] = [token for token in built["added_tokens"] if token["content"] in model["vocab"]]
            # with an indent, each entry of the vocabulary would take a line
            indent = None
        (folder / name).write_text(json.dumps(filled, ensure_ascii=False, indent=indent), encoding="utf-8")


def _read(reader: Any, key: str, default: Any = None) -> Any:
    """Return the value of a GGUF file's field, or ``default`` if the file does not have the field."""
    field = reader.get_field(key)
    return default if field is None else field.contents()

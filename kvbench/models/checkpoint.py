"""Read what a checkpoint states, and run no code of it. Nothing else in kvbench calls ``from_pretrained``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PretrainedConfig
from transformers.utils import logging as hf_logging

from kvbench.base.errors import UsageError


def read(loader: type, name: str, location: str | Path, **options: Any) -> Any:
    """Return what ``loader.from_pretrained(location, **options)`` reads of a checkpoint.

    loader: a class of transformers, such as ``AutoTokenizer``.
    name: the user's name for the model, for messages.
    location: a folder or a hub id.

    Raises UsageError if only code that comes with the checkpoint could read it.
    """
    reader: Any = loader
    with refusing_code(name):
        return reader.from_pretrained(location, trust_remote_code=False, **options)


def read_config(name: str, location: str | Path, **options: Any) -> PretrainedConfig:
    """Return a checkpoint's configuration without the names of its own classes, which a later step could import.

    name, location, options: as ``read`` has them. Raises UsageError as ``read`` does.
    """
    config: PretrainedConfig = read(AutoConfig, name, location, **options)
    _forget_classes(config)
    return config


def _forget_classes(config: PretrainedConfig) -> None:
    """Remove ``auto_map`` from a configuration and from those inside it (``text_config``)."""
    vars(config).pop("auto_map", None)
    for part in vars(config).values():
        if isinstance(part, PretrainedConfig):
            _forget_classes(part)


@contextmanager
def refusing_code(name: str) -> Iterator[None]:
    """Raise UsageError, in kvbench's words, where transformers says that a checkpoint needs its own code.

    name: the user's name for the model.
    """
    try:
        yield
    except ValueError as error:
        # transformers advises this option, by which the code would run
        if "trust_remote_code" not in str(error):
            raise
        raise UsageError(
            f"model={name} brings its own code (auto_map in its config.json or tokenizer_config.json), and "
            f"transformers {transformers.__version__} cannot read it without. kvbench runs no code of a checkpoint: "
            "use one of a family that transformers itself has, or a release of transformers that has this family"
        ) from None


def silence_transformers() -> None:
    """Turn off transformers' progress bars and advice, which would mix with kvbench's own lines."""
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)

"""The differences between supported releases of transformers, and the newest releases that the tests have run on."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import transformers
from transformers import cache_utils
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvbench.base.visible import say

NEWEST_TRIED = {
    "transformers": "5.24",
    "torch": "2.13",
    "tokenizers": "0.23",
    "safetensors": "0.8",
    "huggingface_hub": "2.4",
    "numpy": "2.4",
    "scipy": "1.17",
    "rapidfuzz": "3.14",
    "hydra-core": "1.3",
    "omegaconf": "2.3",
    "pyyaml": "6.0",
}
"""The newest releases on which the whole test suite passes, of packages that decide what is read, computed or scored.

constraints.txt pins these releases.
"""
CACHE_NAMES = ("cache", "past_key_values")
"""The names of the cache in calls and outputs of transformers: the first from release 5.24 on, the second before."""


def _find_cache_name() -> str:
    """Return the cache's name in the installed release of transformers, found by the fields of a model's output."""
    newer, older = CACHE_NAMES
    output_fields = {field.name for field in fields(CausalLMOutputWithPast)}
    return newer if newer in output_fields else older


CACHE_NAME = _find_cache_name()
"""The name of the cache in the installed release of transformers."""


HOLDS_STATES = hasattr(cache_utils, "DummyLayer")
"""True if the installed release of transformers holds the states of all families in the one way that kvbench knows."""


def named_cache(cache: Any) -> dict[str, Any]:
    """Return {name: cache}, a keyword argument for a model's forward pass, for ``generate`` and for a model's output.

    The installed release of transformers decides the name.
    """
    return {CACHE_NAME: cache}


def caches_among(kwargs: Mapping[str, object]) -> list[object]:
    """Return the caches among the keyword arguments of a call, under either name."""
    return [kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None]


def note_on_untried(installed: Mapping[str, str], newest_tried: Mapping[str, str] = NEWEST_TRIED) -> str | None:
    """Return a note on the packages that are newer than the newest tried release; None if there are no such packages.

    installed: the installed version of each package by name.
    newest_tried: the newest tried release of each package by name.
    """
    newer = []
    # packages that are not installed are extras, which the run does without
    for name, tried in newest_tried.items():
        if name in installed and _minor_version(installed[name]) > _minor_version(tried):
            newer.append(f"{name} {installed[name]} (up to {tried})")
    if not newer:
        return None
    return f"not tried with this version of {', '.join(newer)}: if something breaks, install the one in brackets"


@functools.cache
def tell_untried() -> None:
    """Tell the user, once in a process, which installed packages are newer than the newest tried release.

    ``functools.cache`` keeps a second call from running.
    """
    installed = {}
    for name in NEWEST_TRIED:
        with suppress(PackageNotFoundError):  # not installed, or installed without a record of its version
            installed[name] = version(name)
    note = note_on_untried(installed)
    if note is not None:
        say(note)


def _minor_version(release: str) -> tuple[int, ...]:
    """Return (major, minor) of a version such as 5.24.0, 2.13.0+cpu or 5.25.0.dev0."""
    # patch releases are taken to change nothing
    return tuple(int(part) for part in re.findall(r"\d+", release)[:2])


READS_GGUF = _minor_version(transformers.__version__) >= (5, 23)
"""True if the installed release of transformers builds the tokenizers of GGUF files as llama.cpp does."""

"""The options of a run that say which model to load, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.base.conf import check, identity, is_whole, runtime
from kvbench.base.errors import unknown

DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
"""The names of accelerate's ways to spread layers over devices."""


@dataclass(frozen=True)
class ModelConfig:
    """A model to load, as an entry of conf/model describes it.

    Fields marked ``identity`` change results and are part of a cell's identity. Fields marked ``runtime`` are not.

    name: the entry's name.
    path: a folder, an owner/name id of the Hugging Face hub, or a place known to kvbench (``embedded:``, ``fetched:``).
    revision: the commit or branch of a hub id.
    dtype: the precision to run in: float32, bfloat16, float16 or auto (see ``load.resolve_dtype``).
    weights: ``trained``, or ``random`` for the same architecture without a checkpoint.
    attention: how the prompt is attended: ``sdpa``, or ``eager`` for a plain softmax in fp32.
    context: the longest text in tokens; None: the checkpoint's own limit.
    prompt_limits: the longest prompt, in tokens, by the name of the paper that used it.
    prompt_templates: templates for this model that differ from those of a prompt preset, by the preset's name.
    chat_template: a Jinja template in place of the tokenizer's own.
    stop: texts that end an answer, beside the end-of-sequence tokens.
    rope_scaling: RoPE parameters laid over the checkpoint's own, such as {rope_type: linear, factor: 4}.
    device_map: how accelerate spreads the layers over devices; None: one device.
    download: True if a hub id that is not in the local cache may be fetched.
    verified: True if the entry has ever been run.
    shape: the numbers of layers and heads, from which bytes of caches are computed without a checkpoint.
    architecture: the settings of the architecture, for ``weights=random`` without a checkpoint.
    fetch: the package of the Python index that the model's files come from, with their checksums.

    Raises UsageError for a value that is not possible.
    """

    name: str = identity()
    path: str = identity()
    revision: str | None = identity(default=None)
    dtype: str = identity(default="auto")
    weights: str = identity(default="trained")
    attention: str = identity(default="sdpa")
    context: int | None = identity(default=None)
    prompt_limits: Mapping[str, int] = identity(default_factory=dict)
    prompt_templates: Mapping[str, str] = identity(default_factory=dict)
    chat_template: str | None = identity(default=None)
    stop: tuple[str, ...] = identity(default=())
    rope_scaling: Mapping[str, object] | None = identity(default=None)
    device_map: Any = runtime(default=None)
    download: bool = runtime(default=False)
    verified: bool = runtime(default=False)
    shape: Mapping[str, int] | None = runtime(default=None)
    architecture: Mapping[str, Any] | None = runtime(default=None)
    fetch: Mapping[str, object] | None = runtime(default=None)

    def __post_init__(self) -> None:
        """Raise UsageError for an impossible value: YAML and the command line give values of any type."""
        choices = {
            "dtype": ("auto", "float32", "bfloat16", "float16"),
            "weights": ("trained", "random"),
            "attention": ("sdpa", "eager"),
        }
        for key, allowed in choices.items():
            value = getattr(self, key)
            if value not in allowed:
                raise unknown(f"value of model.{key}", value, allowed)
        are_texts = isinstance(self.stop, (list, tuple)) and all(isinstance(text, str) and text for text in self.stop)
        check("model.stop", self.stop, are_texts, "a list of texts that are not empty")
        # YAML gives a list, and a list cannot be hashed; a frozen dataclass is set only in this way
        object.__setattr__(self, "stop", tuple(self.stop))
        if isinstance(self.device_map, str) and self.device_map not in DEVICE_MAPS:
            hint = "Or a mapping of layers to devices."
            raise unknown("value of model.device_map", self.device_map, DEVICE_MAPS, hint)
        is_map = self.device_map is None or isinstance(self.device_map, (str, Mapping))
        allowed_maps = f"{', '.join(DEVICE_MAPS)}, or a mapping of layers to devices"
        check("model.device_map", self.device_map, is_map, allowed_maps)
        for key, text in (("revision", self.revision), ("chat_template", self.chat_template)):
            # YAML reads a revision such as 20240101 as a number
            is_text = text is None or (isinstance(text, str) and bool(text))
            check(f"model.{key}", text, is_text, "a text, in quotes if it is a number, or null")
        scaling = self.rope_scaling
        is_scaling = scaling is None or (isinstance(scaling, Mapping) and "rope_type" in scaling)
        allowed_scaling = "null or a mapping with rope_type, as {rope_type: linear, factor: 4}"
        check("model.rope_scaling", scaling, is_scaling, allowed_scaling)
        context = self.context
        is_length = context is None or (is_whole(context) and context >= 1)
        check("model.context", context, is_length, "a whole number")
        # a text such as "false" would be true
        check("model.download", self.download, isinstance(self.download, bool), "true or false")

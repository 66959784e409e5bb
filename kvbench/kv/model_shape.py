"""The shape of a model's cache. conf/model states it, so that bytes can be computed without a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from kvbench.base.errors import UsageError

POSITION_BYTES = 4


@dataclass(frozen=True)
class Shape:
    """Layers, heads (Hq query heads in groups over Hk kv heads) and head dimension D.

    layers: the layers that methods compress. They attend all tokens, or all of the model's layers slide.
    local_layers: the other layers. They attend and hold only the last ``window`` tokens, and no method compresses them.
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    local_layers: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        has_local = bool(self.local_layers or self.window)
        for name, value in asdict(self).items():
            # a model has both local layers and a window, or neither of them
            may_be_zero = name in ("local_layers", "window") and not has_local
            least = 0 if may_be_zero else 1
            # Python counts True and False as integers
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UsageError(f"model.shape.{name}={value!r} is not possible: a whole number, {least} or more")
        if self.query_heads % self.kv_heads:
            raise UsageError(
                f"model.shape.query_heads={self.query_heads} is not possible: a multiple of kv_heads={self.kv_heads}"
            )

    @property
    def all_layers(self) -> int:
        """The number of the model's layers, local layers included."""
        return self.layers + self.local_layers

    def full_bytes(self, tokens: int, itemsize: int, heads: int | None = None) -> int:
        """Return the bytes of all keys and values of ``tokens``, stored under ``heads`` (default: the kv heads).

        Local layers hold the tokens of their window under the kv heads.
        """
        # the 2 stands for keys and values
        compressible = 2 * self.layers * (heads or self.kv_heads) * tokens * self.head_dim * itemsize
        return compressible + self.local_bytes(tokens, itemsize)

    def local_bytes(self, tokens: int, itemsize: int) -> int:
        """Return the bytes of the keys and values that local layers hold of ``tokens``."""
        return 2 * self.local_layers * self.kv_heads * min(tokens, self.window) * self.head_dim * itemsize

    def local_overhead(self, tokens: int) -> int:
        """Return the bytes of the positions that local layers hold of ``tokens``."""
        return self.local_layers * min(tokens, self.window) * POSITION_BYTES

    @property
    def note(self) -> str | None:
        """A note on local layers for readers of a run's results, or None for a model without local layers."""
        if not self.local_layers:
            return None
        return (
            f"{self.local_layers} of {self.all_layers} layers are local (window {self.window}) and pass through: "
            f"methods, budgets and tokens kept are of the other {self.layers}, bytes of all layers."
        )

    def __str__(self) -> str:
        local = ""
        if self.local_layers:
            local = f" and {self.local_layers} local ones (window {self.window})"
        return (
            f"{self.layers} layers{local}, {self.query_heads} query and {self.kv_heads} kv heads of dimension "
            f"{self.head_dim}"
        )


def from_entry(entry: Mapping[str, int]) -> Shape:
    """Return the shape written in an entry of conf/model. Raises UsageError if a part is missing, unknown or wrong."""
    names = [f.name for f in fields(Shape)]
    needed = [f.name for f in fields(Shape) if f.default is MISSING]
    if not set(needed) <= set(entry) <= set(names):
        raise UsageError(
            f"model.shape={dict(entry)} is not possible: a mapping with {', '.join(needed)}, all of them, and with "
            "local_layers and window where the model has local layers"
        )
    return Shape(**entry)


def local_layers(config: Any) -> frozenset[int]:
    """Return the layers that attend a sliding window, if other layers attend all tokens; else no layer."""
    kinds = list(getattr(config, "layer_types", None) or ())
    # where all layers slide, methods compress all of them under the model's own window
    if getattr(config, "sliding_window", None) is None or len(set(kinds)) < 2:
        return frozenset()
    return frozenset(i for i, kind in enumerate(kinds) if kind == "sliding_attention")


def from_config(config: Any) -> Shape:
    """Return the shape of a checkpoint, read from its Hugging Face configuration."""
    heads, local = int(config.num_attention_heads), len(local_layers(config))
    # configurations without grouped queries have no num_key_value_heads, and many have no head_dim
    return Shape(
        layers=int(config.num_hidden_layers) - local,
        query_heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        local_layers=local,
        window=int(config.sliding_window) if local else 0,
    )

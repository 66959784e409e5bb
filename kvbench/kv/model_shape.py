"""The shape of a model's cache, on which its bytes depend, known from conf/model without a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from kvbench.errors import UsageError


@dataclass(frozen=True)
class Shape:
    """Layers, heads (Hq query heads in groups over Hk kv heads) and head dimension D."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"model.shape.{name}={value!r} is not possible: a whole number, 1 or more")
        if self.query_heads % self.kv_heads:
            raise UsageError(
                f"model.shape.query_heads={self.query_heads} is not possible: a multiple of kv_heads={self.kv_heads}"
            )

    def full_bytes(self, tokens: int, itemsize: int, heads: int | None = None) -> int:
        """Return the bytes of all keys and values of ``tokens``, stored under ``heads``, by default the kv heads."""
        return 2 * self.layers * (heads or self.kv_heads) * tokens * self.head_dim * itemsize

    def __str__(self) -> str:
        return (
            f"{self.layers} layers, {self.query_heads} query and {self.kv_heads} kv heads of dimension {self.head_dim}"
        )


def from_entry(entry: Mapping[str, Any]) -> Shape:
    """Return the shape written in an entry of conf/model. Raises UsageError if a part of it is missing."""
    names = [f.name for f in fields(Shape)]
    if set(entry) != set(names):
        raise UsageError(f"model.shape={dict(entry)} is not possible: a mapping with {', '.join(names)}, all of them")
    return Shape(**entry)


def from_config(config: Any) -> Shape:
    """Return the shape of a checkpoint by its Hugging Face configuration."""
    heads = int(config.num_attention_heads)
    return Shape(
        layers=int(config.num_hidden_layers),
        query_heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
    )

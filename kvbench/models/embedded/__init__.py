"""The embedded tiny model: its weights, its tokenizer and everything that made them."""

from __future__ import annotations

from pathlib import Path


def path() -> Path:
    """Return the folder with weights and tokenizer, for ``from_pretrained`` (in a clone and in an installed wheel)."""
    return Path(__file__).resolve().parent / "tiny"

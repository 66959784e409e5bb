"""Write docs/what-is-measured.md from the objects that runs use (data folder: KVBENCH_DATA, if set)."""

from __future__ import annotations

import os
from pathlib import Path

from describe import page

from kvbench.models.config import ModelConfig
from kvbench.models.load import load_tokenizer, locate

PAGE = Path(__file__).resolve().parent.parent / "docs" / "what-is-measured.md"


def main() -> int:
    """Write the page."""
    PAGE.parent.mkdir(exist_ok=True)
    cfg = ModelConfig(name="tiny", path="embedded:tiny")
    text = page(os.environ.get("KVBENCH_DATA"), load_tokenizer(cfg, locate(cfg)))
    PAGE.write_text(text, encoding="utf-8")
    print(PAGE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

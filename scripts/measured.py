"""Write docs/what-is-measured.md from the configuration, formats and metrics that runs use. It reads no data."""

from __future__ import annotations

from pathlib import Path

from describe import page

PAGE = Path(__file__).resolve().parent.parent / "docs" / "what-is-measured.md"


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

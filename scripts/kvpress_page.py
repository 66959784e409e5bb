"""Write the table of kvpress's presses in docs/kvpress.md, from the kvpress that is installed (make test-peers)."""

from __future__ import annotations

from pathlib import Path

from kvbench.methods.core.kvpress_package import installed_version, press_records
from kvbench.report import writers

PAGE = Path(__file__).parent.parent / "docs" / "kvpress.md"
START = "| method |"


def table() -> str:
    """Return the table of all presses as Markdown, with the version that has them."""
    rows = []
    for item in press_records():
        knobs = " ".join(f"`{knob}={_text(default)}`" for knob, default in item["knobs"].items())
        rows.append((f"`{item['id']}`", item["there"], item["here"], knobs))
    text = writers.table(("method", "dropped tokens or channels, in kvpress", "in kvbench", "options"), rows)
    return f"{text}\nkvpress {installed_version()}, {len(rows)} presses.\n"


def page() -> str:
    """Return the whole page with the current table."""
    return PAGE.read_text("utf-8").partition(START)[0] + table()


def _text(default: object) -> str:
    if default in (None, ()):
        return "null" if default is None else "SHARE,…"
    return str(default).lower() if isinstance(default, bool) else str(default)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")

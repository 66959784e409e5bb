"""Print the core packages of pyproject.toml but torch at the oldest releases that it allows, as pip's requirements."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def oldest(dependencies: Sequence[str]) -> list[str]:
    """Return ``name==bound.*`` for each ``name>=bound``. A bound of one number, 2, is the release 2.0."""
    pins = []
    for dependency in dependencies:
        name, bound = re.match(r"([\w-]+)>=([\d.]+)", dependency).groups()  # type: ignore[union-attr]
        if "." not in bound:
            bound += ".0"
        pins.append(f"{name}=={bound}.*")
    return pins


def main() -> None:
    """Print the requirements on one line, quoted for a shell."""
    dependencies = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]
    print(shlex.join(pin for pin in oldest(dependencies) if not pin.startswith("torch==")))


if __name__ == "__main__":
    main()

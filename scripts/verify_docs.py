"""Check that the decimal numbers and per cents of README.md and of the pages of results stand in files they link to.

python scripts/verify_docs.py     fail with every one that no file of its section has

A section's sources are the files that it links to, and for a picture the CSV beside it. Code, and the tables of figures
(tests/papers/figures/test_committed.py holds them against their own CSV), are not looked at.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    "README.md",
    *(f"results/{page}.md" for page in ("README", "papers", "comparison", "figures", "tiny", "time-and-memory")),
)
NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*\.\d+(?![\w]*\.\d)")
PERCENT = re.compile(r"(?<![\w.,])\d+(?= %)")
"""Numbers that are checked: decimals, and whole per cents."""
ANY = re.compile(r"(?<![\w.])\d+(?![\w.]*\d)")
LINK = re.compile(r"\]\(([^)#]+)")
NO_RESULT = re.compile(r"`[^`]*`|\]\([^)]*\)|Python \d\.\d+ to \d\.\d+|Apache-2\.0|95 %")
"""Code, addresses of links, versions, and the level of all intervals."""
FIGURES = "| figure |"


Lines = list[tuple[int, str]]


def sections(text: str) -> Iterator[tuple[str, Lines]]:
    """Yield (heading, numbered lines) of each section, without code and without the tables of figures."""
    title, code, figures = "", False, False
    lines: Lines = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            code = not code
        figures = line.startswith("|") and (figures or line.startswith(FIGURES))
        if line.startswith("#") and not code:
            yield title, lines
            title, lines = line.strip("# "), []
        elif not code and not figures:
            lines.append((number, line))
    yield title, lines


def sources(lines: Lines, folder: Path) -> set[str]:
    """Return the numbers in all files that ``lines`` link to. A picture counts as the CSV beside it."""
    numbers: set[str] = set()
    for link in LINK.findall("\n".join(line for _, line in lines)):
        path = folder / link
        path = path.with_suffix(".csv") if path.suffix in (".png", ".svg") else path
        if path.is_file() and path.suffix in (".md", ".csv", ".txt", ".jsonl", ".yaml"):
            text = path.read_text(encoding="utf-8")
            numbers |= {*NUMBER.findall(text), *ANY.findall(text)}
    return numbers


def unsourced(page: Path, root: Path = ROOT) -> Iterator[str]:
    """Yield a message for each decimal number or per cent of a page that no source of its section has."""
    for title, lines in sections(page.read_text(encoding="utf-8")):
        source_numbers = sources(lines, page.parent)
        for line_number, line in lines:
            prose = NO_RESULT.sub("", line)
            for number in (*NUMBER.findall(prose), *PERCENT.findall(prose)):
                if number not in source_numbers:
                    yield f"{page.relative_to(root)}:{line_number}: {number} is in no file that '{title}' links to"


def main() -> int:
    """Print the numbers without a source. Return 1 if there are any."""
    wrong = [line for page in PAGES for line in unsourced(ROOT / page)]
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

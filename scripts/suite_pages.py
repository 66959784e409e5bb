"""The site's leaderboard: a table of all rows committed below results/suite, and how to submit one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvbench.base.formatting import format_number
from kvbench.report import writers
from kvbench.suite import card, definition
from kvbench.suite.definition import FULL
from kvbench.suite.folder import CARD, PICTURE, RESULTS, SAMPLES

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "results" / definition.FOLDER
PAGE = "leaderboard.md"
TRIAL = "tiny"
"""The suite to try the command with, whose rows no leaderboard takes."""


def rows(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """Return all committed rows of full editions, each with its folder below the repository's root."""
    found = []
    for path in sorted(folder.glob(f"**/{RESULTS}")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["edition"] == FULL and row["role"] != "full":
                found.append(row | {"folder": path.parent.relative_to(folder.parents[1]).as_posix()})
    return found


def page(folder: Path = FOLDER) -> str:
    """Return the page of the leaderboard as Markdown."""
    parts = ["# Leaderboard", *_introduction()]
    committed = rows(folder)
    for name in definition.suite_names():
        if name == TRIAL:
            continue
        of_suite = [row for row in committed if row["suite"] == name]
        parts.append(f"## {name}")
        suite = definition.load(name)
        parts.append(
            f"{suite.about[0].upper()}{suite.about[1:]}. A score of 100 is as good as the full cache. A "
            "score of 0 is as good as random tokens at the same bytes."
        )
        if not of_suite:
            parts.append("No row is committed yet.")
            continue
        for place in dict.fromkeys(row["folder"] for row in of_suite):
            parts.append(f"![What a compressed cache retains, by part and bytes]({place}/{PICTURE})")
        parts.append(_table(suite, of_suite))
    parts += _submission()
    return "\n\n".join(parts) + "\n"


def _introduction() -> Iterator[str]:
    yield (
        "A row is a method at a share of the full cache's bytes. Brackets are 95 % intervals. A mean with † is over "
        "fewer parts: compare it only with means over the same parts. A rank is 1 and the number of rows of the "
        "same budget and folder that are better by an interval. Click the head of a column to sort the table. Type "
        "into the field to filter its rows. `kvbench verify` computes every number again from the committed samples, "
        "and CI runs `kvbench verify` on each folder."
    )


def _table(suite: definition.Suite, committed: Sequence[dict[str, Any]]) -> str:
    heads = ["method", "model", "budget", "mean", *(part.name for part in suite.parts)]
    heads += ["bytes %", "rank", "division", "by", "commit", "evidence"]
    lines = []
    for row in sorted(committed, key=lambda row: (row["budget"], row["rank"] or len(committed), -(row["mean"] or 0.0))):
        lines.append(_cells(suite, row))
    return writers.table(heads, lines)


def _cells(suite: definition.Suite, row: dict[str, Any]) -> list[str]:
    mark = card.FEWER_PARTS if any(part.name not in row["parts"] for part in suite.parts) else ""
    mean = mark
    if row["nothing_compressed"]:
        mean = "nothing compressed"
    elif row["mean"] is not None:
        mean = card.write_score(row["mean"], row["ci"], mark)
    cells = [row["name"], row["model"], f"1/{row['budget']}", mean]
    for part in suite.parts:
        score = row["parts"].get(part.name)
        cells.append("" if score is None else _number(score["retained"]))
    place = row["folder"]
    commits = ", ".join(commit[:8] for commit in row["commit"])
    evidence = f"[card]({place}/{CARD}), [rows]({place}/{RESULTS}), [samples]({place}/{SAMPLES})"
    cells += [
        format_number(row["bytes"]),
        str(row["rank"] or ""),
        row["division"],
        row["contributor"] or "kvbench",
    ]
    return [*cells, commits, evidence]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return format_number(value, 0)


def _submission() -> Iterator[str]:
    yield "## Put your method here"
    yield (
        "1. Write your method in one file ([how](docs/own.md)), and take a first look: "
        "`KVBENCH_METHODS=my_methods kvbench suite retain-v1-mini method=mymethod edition=quick`.\n"
        "2. Measure it with the same command without `edition=quick`, and add `contributor=NAME` and "
        "`output=results/suite/retain-v1-mini/NAME`. `--plan` says how long this takes. Repeat the command to resume.\n"
        "3. Check the folder: `kvbench verify results/suite/retain-v1-mini/NAME`.\n"
        "4. Open a pull request that adds the folder, and say where the method's code is. A workflow checks "
        "all but the scores of the answers, whose texts are in no repository. Before merging, a maintainer runs the "
        "whole check. Neither can run your method."
    )
    yield (
        "Rows of the closed division have the suite's model, precision and prompts. A row with another `model=` is in "
        "the open division. It is listed with its model, and it is not compared with other rows."
    )

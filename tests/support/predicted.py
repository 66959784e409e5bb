"""Answers that were generated elsewhere, and how tests score them."""

import json
from pathlib import Path
from statistics import fmean

from kvbench.cli.main import main

PREDICTIONS = Path(__file__).parent / "predictions"


def mean(scores):
    known = [s for s in scores if s is not None]
    return 100 * fmean(known) if known else None


def run(capsys, *arguments):
    """(status, JSON, stderr) of one score."""
    status = main(["score", *map(str, arguments), "--json"])
    captured = capsys.readouterr()
    return status, json.loads(captured.out), captured.err


def by_dataset(result):
    return {t["dataset"]: t for t in result["tasks"]}


def write(folder, name, *rows):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def row(pred="nine", answers=("nine",), **more):
    return {"pred": pred, "answers": list(answers), "all_classes": None, "length": 10, **more}

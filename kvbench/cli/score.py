"""score: answers that were generated elsewhere, by the official metrics, beside what papers print."""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

from kvbench.base.errors import UsageError, say
from kvbench.cli.run import output_arguments
from kvbench.plan.keys import Key, one_of, pairs, values

KEYS = (
    Key("code_sim", "levenshtein"),
    Key("split", "auto", partial(one_of, "split", ("auto", "standard", "e"))),
    Key("metric"),
    Key("model"),
    Key("method"),
    Key("setting", ""),
    Key("prompt"),
    Key("results", "results"),
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("path", metavar="PATH", help="folder of predictions, or one file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="how to score, and what made the answers")
    parser.add_argument("--model", help="model that made the answers, the same as model=")
    parser.add_argument("--method", help="method that made the answers, the same as method=")
    parser.add_argument("--store", action="store_true", help="import each dataset as a cell; needs model= method=")
    parser.add_argument("--timing", action="store_true", help="add the seconds of each dataset to the table")
    output_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Score and print. Return exit status 1 if a file could not be scored, 2 if none could."""
    start = time.perf_counter()
    options = _parse_options(args)
    from kvbench.report import writers
    from kvbench.store.store import ResultStore
    from kvbench.studies import imports
    from kvbench.studies.imports import scoring, stored, table, verdict
    from kvbench.tasks import longbench, metrics

    longbench.metric_name("lcc", options["code_sim"])
    if options["metric"] is not None:
        metrics.metric(options["metric"])
    source = verdict.PredictionSource(options["model"], options["method"], options["setting"], options["prompt"])
    if args.store and not (source.model and source.method):
        raise UsageError("--store needs model=NAME method=NAME: what made these answers")
    files, errors = _read_predictions(imports.find(Path(args.path)), options)
    read_at = time.perf_counter()
    scored = [scoring.score_file(predictions, name) for predictions, name in files]
    scored_at = time.perf_counter()
    verdicts = verdict.beside(source, scored, options["code_sim"])
    records, means = table.tasks(scored, verdicts), verdict.means(source, scored)
    cells = []
    if args.store and scored:
        store = ResultStore(Path(options["results"]).expanduser())
        cells = stored.store_cells(store, source, scored)
        for record, cell in zip(records, cells, strict=True):
            record["cell"] = cell
    timing = {"read_s": round(read_at - start, 2), "score_s": round(scored_at - read_at, 2)}
    if args.json:
        result = {
            "path": args.path,
            "code_sim": options["code_sim"],
            "tasks": records,
            "mean": table.average(records),
            "published_means": [{"paper": p, "table": t, **m} for (p, t), m in means.items()],
            "errors": errors,
            "timing": {**timing, "total_s": round(time.perf_counter() - start, 2)},
        }
        print(json.dumps(result, indent=1, ensure_ascii=False))
    elif args.format == "csv":
        print(table.as_csv(records), end="")
    elif scored:
        notes = table.notes(records, verdicts)
        if cells:
            notes.append(f"Imported as {len(cells)} cells of {options['results']}/cells (python -m kvbench list runs).")
        print(writers.compose(table.sheets(records, verdicts, means, args.timing), notes, args.format), end="")
    if scored:
        _report_time(records, timing, time.perf_counter() - start)
    for error in errors:
        say(error["error"])
    return 0 if not errors else 1 if scored else 2


def _parse_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the value of each of KEYS by name. Raises UsageError for an unknown, repeated or empty key."""
    options = [f"{k}={v}" for k, v in (("model", args.model), ("method", args.method)) if v is not None]
    texts = pairs([*options, *args.overrides], "code_sim=difflib")
    for key, text in texts.items():
        one_of("key of score", [k.name for k in KEYS], key)
        if not text:
            raise UsageError(f"{key}= is empty")
    return values(KEYS, texts)


def _read_predictions(paths: list[Path], options: dict[str, Any]) -> tuple[list[tuple[Any, str]], list[dict[str, str]]]:
    """Return (predictions with their metrics, errors): the files that can be scored, and the errors of the others."""
    from kvbench.studies import imports
    from kvbench.studies.imports import layouts, scoring
    from kvbench.tasks import longbench

    answers, errors = [], []
    for path in paths:
        if len(paths) > 1 and layouts.unrelated(path):
            say(f"skipped {path}: a CSV without the column predicted_answer")
            continue
        try:
            answers.append((path, imports.read(path)))
        except UsageError as error:
            errors.append({"file": str(path), "error": str(error)})
    if not answers and not errors:
        raise UsageError(f"{paths[0].parent} holds no predictions ({imports.LAYOUTS})")
    predictions_by_split = imports.settle_split([p for _, every in answers for p in every], options["split"])
    files = []
    for predictions in predictions_by_split:
        try:
            name = scoring.choose_metric(predictions, options["code_sim"], options["metric"])
            scoring.check(predictions, name)
            files.append((predictions, name))
        except UsageError as error:
            errors.append({"file": str(predictions.path), "error": str(error)})
    order = list(longbench.TASKS)
    files.sort(key=lambda f: order.index(f[0].dataset) if f[0].dataset in order else len(order))
    return files, errors


def _report_time(records: list[dict[str, Any]], timing: dict[str, float], total: float) -> None:
    slow = ", ".join(f"{r['dataset']} {r['seconds']:.1f} s" for r in sorted(records, key=lambda r: -r["seconds"])[:3])
    say(
        f"{sum(r['n'] for r in records)} answers to {len(records)} datasets in {total:.1f} s: "
        f"start and reading {timing['read_s']:.1f} s, scoring and intervals {timing['score_s']:.1f} s"
        + (f"; most in {slow}" if slow else "")
    )

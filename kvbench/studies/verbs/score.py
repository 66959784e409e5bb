"""score: score answers of other programs by the official metrics, and print them beside published values."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.base.errors import KvbenchError, UsageError
from kvbench.base.visible import say
from kvbench.plan.keys import Key, check_choice, parse_pairs, values
from kvbench.run.console import add_format_option

if TYPE_CHECKING:
    from kvbench.studies.imports.base import Predictions
    from kvbench.studies.imports.distances import ImportedDistance
    from kvbench.studies.imports.scoring import Scored
    from kvbench.studies.imports.table import TaskRecord
    from kvbench.studies.imports.verdict import PredictionSource

KEYS = (
    Key("code_sim", "levenshtein"),
    Key("split", "auto", partial(check_choice, "split", ("auto", "standard", "e"))),
    Key("metric"),
    Key("model"),
    Key("method"),
    Key("setting", ""),
    Key("prompt"),
    Key("results", "results"),
)
"""The key=value arguments of ``score``."""


@dataclass(frozen=True)
class ScoreOptions:
    """The values of KEYS; None for a key without a default that was not given.

    code_sim: the backend of code similarity, levenshtein or difflib.
    split: the split of LongBench that the answers belong to: standard, e (LongBench-E), or auto.
    metric: the metric for datasets that are not LongBench's.
    model: the model that made the answers.
    method: the method that made the answers.
    setting: the method's settings; '' for none.
    prompt: the entry of conf/prompt for the answers' prompts.
    results: the folder in which results are stored.
    """

    code_sim: str
    split: str
    metric: str | None
    model: str | None
    method: str | None
    setting: str
    prompt: str | None
    results: str


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("path", metavar="PATH", help="folder of predictions, or one file")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="options of scoring, and model= and method= of the answers"
    )
    parser.add_argument("--model", help="model that made the answers, the same as model=")
    parser.add_argument("--method", help="method that made the answers, the same as method=")
    parser.add_argument(
        "--store", action="store_true", help="store each dataset as a result (needs model= and method=)"
    )
    parser.add_argument("--timing", action="store_true", help="also show the seconds that scoring each dataset took")
    add_format_option(parser)


def main(args: argparse.Namespace) -> int:
    """Score the answers at a path and print the scores.

    Return exit status 1 if a file could not be scored, 2 if none could.
    """
    start = time.perf_counter()
    options = _parse_options(args)
    from kvbench.report import writers
    from kvbench.studies import imports
    from kvbench.studies.imports import distances, scoring, table, verdict
    from kvbench.tasks import longbench, metrics

    # a wrong metric or backend is an error before any file is read; lcc is a task that code_sim= is for
    longbench.metric_name("lcc", options.code_sim)
    if options.metric is not None:
        metrics.choose(options.metric)
    # logs with divergences are no answers to score
    divergence_files = distances.find_files(Path(args.path))
    if divergence_files:
        return _print_distances([distances.read_divergence(path) for path in divergence_files], options, args)
    source = verdict.PredictionSource(
        model=options.model, method=options.method, setting=options.setting, prompt=options.prompt
    )
    if args.store and not (source.model and source.method):
        raise UsageError("--store needs model=NAME method=NAME: the model and method that made these answers")
    files, errors = _read_predictions(imports.find_files(Path(args.path)), options)
    read_at = time.perf_counter()
    scored = []
    for predictions, name in files:
        try:
            scored.append(scoring.score_file(predictions, name))
        except KvbenchError as failure:
            # a metric of one's own failed
            errors.append({"file": str(predictions.path), "error": f"{predictions.path}: {failure}"})
    scored_at = time.perf_counter()
    timing = {"read_s": round(read_at - start, 2), "score_s": round(scored_at - read_at, 2)}
    verdicts = verdict.judge_published(source, scored, options.code_sim)
    means = verdict.read_published_means(source, scored)
    records = table.build_records(scored, verdicts)
    cells = []
    if args.store and scored:
        cells = _store_scores(records, source, scored, options)
    if args.json:
        content = {
            "path": args.path,
            "code_sim": options.code_sim,
            "tasks": records,
            "mean": table.compute_english_mean(records),
            "published_means": [{"paper": paper, "table": name} | mean for (paper, name), mean in means.items()],
            "errors": errors,
            "timing": timing | {"total_s": round(time.perf_counter() - start, 2)},
        }
        print(json.dumps(content, indent=1, ensure_ascii=False))
    elif args.format == "csv":
        print(table.as_csv(records), end="")
    elif scored:
        notes = table.write_notes(records, verdicts)
        if cells:
            notes.append(f"Imported as {len(cells)} results below {options.results}/cells (kvbench list runs).")
        tables = table.build_tables(records, verdicts, means, args.timing)
        print(writers.compose(tables, notes, args.format), end="")
    # a program may read stdout, so times and errors go to stderr
    if scored:
        _report_time(records, timing, time.perf_counter() - start)
    for record in errors:
        say(record["error"])
    if errors:
        return 1 if scored else 2
    return 0


def _store_scores(
    records: Sequence[TaskRecord], source: PredictionSource, scored: list[Scored], options: ScoreOptions
) -> list[str]:
    """Store each dataset as a result, add its id to the dataset's record, and return the ids."""
    from kvbench.store.store import ResultStore
    from kvbench.studies.imports import stored

    # importing the same answers again changes nothing: a cell's id is a hash of them
    store = ResultStore(Path(options.results).expanduser())
    cells = stored.store_cells(store, source, scored)
    for record, cell in zip(records, cells, strict=True):
        record["cell"] = cell
    return cells


def _print_distances(divergences: Sequence[ImportedDistance], options: ScoreOptions, args: argparse.Namespace) -> int:
    """Print divergences that another program measured, and store them with --store. Return exit status 0."""
    from kvbench.report import writers
    from kvbench.store.store import ResultStore
    from kvbench.studies.imports import distances

    notes = [distances.NOTE]
    if args.store:
        # without model=, the model that the first file names stands for all
        model = options.model or divergences[0].model
        if not model:
            raise UsageError("--store needs model=NAME: the model that has these divergences")
        cells = distances.store_cells(ResultStore(Path(options.results).expanduser()), divergences, model)
        notes.append(f"Imported as {len(cells)} results below {options.results}/cells (kvbench list runs).")
    if args.json:
        content = {"path": args.path, "distances": distances.make_records(divergences)}
        print(json.dumps(content, indent=1, ensure_ascii=False))
    else:
        print(writers.compose([distances.build_table(divergences)], notes, args.format), end="")
    return 0


def _parse_options(args: argparse.Namespace) -> ScoreOptions:
    """Return the value of each of KEYS. Raises UsageError for an unknown, repeated or empty key."""
    # --model X means model=X, so both together are a key given twice
    overrides = list(args.overrides)
    if args.method is not None:
        overrides.insert(0, f"method={args.method}")
    if args.model is not None:
        overrides.insert(0, f"model={args.model}")
    texts = parse_pairs(overrides, "code_sim=difflib")
    for key, text in texts.items():
        check_choice("key of score", [known.name for known in KEYS], key)
        if not text:
            raise UsageError(f"{key}= is empty")
    return ScoreOptions(**values(KEYS, texts))


def _read_predictions(
    paths: Sequence[Path], options: ScoreOptions
) -> tuple[list[tuple[Predictions, str]], list[dict[str, str]]]:
    """Read prediction files, and choose a metric for the answers to each dataset.

    Return (predictions with the names of their metrics, an error for each file that cannot be scored). Datasets of
    LongBench come first, in the order of its paper. Other datasets follow in the order of their files.
    """
    from kvbench.studies import imports
    from kvbench.studies.imports import layouts, scoring

    predictions: list[Predictions] = []
    errors = []
    for path in paths:
        # a folder of runs may hold tables of other kinds; a file that the user names is always read
        if len(paths) > 1 and layouts.is_unrelated(path):
            say(f"skipped {path}: a CSV without the column predicted_answer")
            continue
        try:
            predictions += imports.read_predictions(path)
        except UsageError as error:
            errors.append({"file": str(path), "error": str(error)})
    if not predictions and not errors:
        raise UsageError(f"{paths[0].parent} holds no predictions ({imports.LAYOUTS})")
    files = []
    # a folder's split follows from all of its files, so settle it after reading them
    for file in imports.settle_split(predictions, options.split):
        try:
            name = scoring.choose_metric(file, options.code_sim, options.metric)
            scoring.check_answers(file, name)
            files.append((file, name))
        except UsageError as error:
            errors.append({"file": str(file.path), "error": str(error)})
    files.sort(key=_place_in_longbench)
    return files, errors


def _place_in_longbench(entry: tuple[Predictions, str]) -> int:
    """Return the index of predictions, given with their metric, in LongBench's paper; other datasets come last."""
    from kvbench.tasks import longbench

    predictions, _ = entry
    order = list(longbench.TASKS)
    if predictions.dataset in order:
        return order.index(predictions.dataset)
    return len(order)


def _report_time(records: Sequence[TaskRecord], timing: dict[str, float], total: float) -> None:
    """Print the seconds of reading and scoring to stderr, and the three datasets that took longest."""
    # a stable sort of the negative seconds: datasets with equal times keep their order
    slowest = sorted(records, key=lambda record: -record["seconds"])[:3]
    count = sum(record["n"] for record in records)
    text = (
        f"{count} answers to {len(records)} datasets in {total:.1f} s: "
        f"start and reading {timing['read_s']:.1f} s, scoring and intervals {timing['score_s']:.1f} s"
    )
    if slowest:
        names = ", ".join(f"{record['dataset']} {record['seconds']:.1f} s" for record in slowest)
        text += f"; most in {names}"
    say(text)

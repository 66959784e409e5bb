"""Imported answers as cells of a ResultStore: beside measured ones, and never mistaken for them.

``identity.kind`` is ``imported``. Such a cell has no chain, no device and no bytes. It has the answers, their
references, and the model and the method as the user states them.
"""

from __future__ import annotations

import hashlib
import json

from kvbench.base.errors import UsageError
from kvbench.base.files import format_line, write_json
from kvbench.base.version import version
from kvbench.plan.cells import SCHEMA
from kvbench.store.store import ResultStore
from kvbench.studies.imports.scoring import Scored, compute_printed_mean
from kvbench.studies.imports.verdict import PredictionSource
from kvbench.tasks.longbench import TASKS
from kvbench.tasks.metrics import metric

KIND = "imported"
"""The kind of a result whose answers another program generated."""


def store_cells(store: ResultStore, source: PredictionSource, scored: list[Scored]) -> list[str]:
    """Write one cell per dataset and return the cells' ids. Importing the same answers again changes nothing.

    Raises UsageError without model and method, or if two files answer one dataset.
    """
    if not source.model or not source.method:
        raise UsageError("--store needs what made these answers: model=NAME method=NAME, as in model=llama2-7b-chat")
    # two files with answers to one dataset are two runs; model and method cannot tell them apart
    paths_by_column: dict[str, list[str]] = {}
    for file in scored:
        paths_by_column.setdefault(name_column(file), []).append(str(file.predictions.path))
    for column, paths in paths_by_column.items():
        if len(paths) > 1:
            raise UsageError(
                f"--store: {len(paths)} files answer {column} ({', '.join(paths)}); give the PATH of one run"
            )
    # check the folder before writing the first cell, so that no part of an import stays behind
    store.check()
    return [_store_cell(store, source, file) for file in scored]


def name_column(scored: Scored) -> str:
    """Return the task's id in tables, in the dataset configuration's form: ``longbench_zh/dureader``.

    A dataset that LongBench does not have is ``imported/NAME``.
    """
    name, extended = scored.predictions.dataset, scored.predictions.extended
    spec = TASKS.get(name)
    if spec is None:
        return f"{KIND}/{name}"
    if extended:
        return f"longbench_e/{name}"
    if spec.chinese:
        return f"longbench_zh/{name}"
    return f"longbench/{name}"


def collect_identity(source: PredictionSource, scored: Scored) -> dict[str, object]:
    """Return everything that decides an imported score, from which the cell's id is computed."""
    # the examples have no ids here, so their references identify them
    examples = [[answer.references, answer.classes, answer.length] for answer in scored.predictions.answers]
    content = json.dumps(examples)
    return {
        "schema": SCHEMA,
        "kind": KIND,
        "model": source.model,
        "method": source.method,
        "setting": source.setting,
        "prompt": source.prompt,
        "task": name_column(scored),
        "content": hashlib.sha256(content.encode()).hexdigest(),
        "predictions": scored.predictions.sha256,
        "metric": metric(scored.metric).identity(),
    }


def _store_cell(store: ResultStore, source: PredictionSource, scored: Scored) -> str:
    facts = collect_identity(source, scored)
    # ids have the form of measured cells' ids: 16 hexadecimal digits of the hash of the identity
    cell = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    folder = store.folder(cell)
    folder.mkdir(parents=True, exist_ok=True)
    # shard 0 is the only one, since an import is one process
    (folder / "samples-0.jsonl").write_text("".join(_write_samples(scored)), encoding="utf-8")
    store.write_metrics(cell, _summarise_scores(scored))
    label = str(source.method)
    if source.setting:
        label += " " + source.setting.replace(";", " ")
    provenance = {
        "kvbench": version(),
        "file": str(scored.predictions.path),
        "layout": scored.predictions.layout,
    }
    # write the record last, since a cell exists once it has a record
    record = {
        "id": cell,
        "kind": KIND,
        "label": label,
        "column": name_column(scored),
        "identity": facts,
        "provenance": [provenance],
    }
    write_json(folder / "cell.json", record)
    return cell


def _write_samples(scored: Scored) -> list[str]:
    """Return a line of JSON for each answer with its score, in the form in which the store has samples."""
    lines = []
    for i, (answer, score) in enumerate(zip(scored.predictions.answers, scored.scores, strict=True)):
        sample = {
            "id": f"{i:05d}",
            "prediction": _replace_surrogates(answer.prediction),
            "score": score,
            "answers": [_replace_surrogates(reference) for reference in answer.references],
            "meta": {"length": answer.length, "place": answer.place},
        }
        lines.append(format_line(sample))
    return lines


def _summarise_scores(scored: Scored) -> dict[str, object]:
    """Return the mean score with its interval, in the form in which the store has summaries."""
    ci = None
    if scored.interval is not None:
        scale = metric(scored.metric).scale
        ci = [scale * end for end in scored.interval]
    return {
        "status": KIND,
        "metric": scored.metric,
        "n": len(scored.scores),
        "of": len(scored.scores),
        "unscored": sum(score is None for score in scored.scores),
        "score": compute_printed_mean(scored.metric, scored.scores),
        "ci": ci,
    }


def _replace_surrogates(text: str) -> str:
    """Replace lone halves of surrogate pairs by question marks. JSON may spell them, but UTF-8 cannot encode them."""
    return text.encode("utf-8", errors="replace").decode("utf-8")

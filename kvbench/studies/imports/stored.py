"""Imported answers as cells of a ResultStore: beside measured ones, and never mistaken for them.

``identity.kind`` is ``imported``. There is no chain, no device and no byte: what is known is the answers, their
references, and what the user says of model and method.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import kvbench
from kvbench.base.errors import UsageError
from kvbench.base.files import line_of, write_json
from kvbench.plan.cells import SCHEMA
from kvbench.store.store import ResultStore
from kvbench.studies.imports.scoring import Scored, printed
from kvbench.studies.imports.verdict import PredictionSource
from kvbench.tasks.longbench import TASKS
from kvbench.tasks.metrics import metric

KIND = "imported"


def store_cells(store: ResultStore, source: PredictionSource, scored: list[Scored]) -> list[str]:
    """Write one cell per dataset and return the cells' ids; importing the same answers again changes nothing.

    Raises UsageError without model and method, or where two files answer one dataset.
    """
    if not source.model or not source.method:
        raise UsageError("--store needs what made these answers: model=NAME method=NAME, as in model=llama2-7b-chat")
    columns = [column(s) for s in scored]
    for name in columns:
        if columns.count(name) > 1:
            files = ", ".join(str(s.predictions.path) for s in scored if column(s) == name)
            raise UsageError(f"--store: {columns.count(name)} files answer {name} ({files}); give the PATH of one run")
    store.check()
    return [_store(store, source, s) for s in scored]


def column(scored: Scored) -> str:
    """Return the task's id in tables, as the dataset configuration names it: ``longbench_zh/dureader``."""
    name, extended = scored.predictions.dataset, scored.predictions.extended
    spec = TASKS.get(name)
    if spec is None:
        return f"{KIND}/{name}"
    if extended:
        return f"longbench_e/{name}"
    return f"longbench{'_zh' if spec.chinese else ''}/{name}"


def identity(source: PredictionSource, scored: Scored) -> dict[str, Any]:
    """Return everything that decides what the imported number is."""
    answers = scored.predictions.answers
    references = json.dumps([[a.references, a.classes, a.length] for a in answers])
    return {
        "schema": SCHEMA,
        "kind": KIND,
        "model": source.model,
        "method": source.method,
        "setting": source.setting,
        "prompt": source.prompt,
        "task": column(scored),
        "content": hashlib.sha256(references.encode()).hexdigest(),
        "predictions": scored.predictions.sha256,
        "metric": {"name": scored.metric, "revision": metric(scored.metric).revision},
    }


def _store(store: ResultStore, source: PredictionSource, scored: Scored) -> str:
    facts = identity(source, scored)
    cell = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    folder = store.folder(cell)
    label = " ".join(filter(None, (str(source.method), source.setting.replace(";", " "))))
    provenance = {
        "kvbench": kvbench.__version__,
        "file": str(scored.predictions.path),
        "layout": scored.predictions.layout,
    }
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        line_of(
            {
                "id": f"{i:05d}",
                "prediction": _unicode(answer.prediction),
                "score": value,
                "answers": [_unicode(r) for r in answer.references],
                "meta": {"length": answer.length, "place": answer.place},
            }
        )
        for i, (answer, value) in enumerate(zip(scored.predictions.answers, scored.scores, strict=True))
    ]
    (folder / "samples-0.jsonl").write_text("".join(lines), encoding="utf-8")
    scale = metric(scored.metric).scale
    store.write_metrics(
        cell,
        {
            "status": KIND,
            "metric": scored.metric,
            "n": len(scored.scores),
            "of": len(scored.scores),
            "unscored": sum(s is None for s in scored.scores),
            "score": printed(scored.metric, scored.scores),
            "ci": None if scored.interval is None else [scale * x for x in scored.interval],
        },
    )
    # last, since a cell exists from its record on
    record = {"id": cell, "kind": KIND, "label": label, "column": column(scored), "identity": facts}
    write_json(folder / "cell.json", {**record, "provenance": [provenance]})
    return cell


def _unicode(text: str) -> str:
    """Replace halves of surrogate pairs, which JSON may spell and no file can hold."""
    return text.encode("utf-8", errors="replace").decode("utf-8")

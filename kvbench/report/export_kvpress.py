"""Stored cells as folders of kvpress's results, which its leaderboard reads: predictions, metrics and configuration."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from kvbench.base.conf import entries, read_yaml
from kvbench.base.errors import UsageError
from kvbench.base.files import disk_error
from kvbench.methods.core import registry
from kvbench.report.listing import StoredCell
from kvbench.store.labels import differences
from kvbench.store.results import Sample
from kvbench.store.store import ResultStore
from kvbench.tasks.metrics.kvpress_match import any_contained, share_contained

RULER = (
    *(f"niah_{name}" for name in ("single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3")),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
)
RULER_SAMPLES = 500  # of each task


@dataclass(frozen=True)
class Run:
    """The cells of one folder: one model and one method on the tasks of one data set and length.

    name: what the data set is called in the folder.
    tasks: the stored cell of each task, with its samples.
    """

    name: str
    data_dir: str
    tasks: Mapping[str, tuple[StoredCell, tuple[Sample, ...]]]

    @property
    def cell(self) -> StoredCell:
        """One of the cells, which are of one model, method and prompt."""
        return next(cell for cell, _ in self.tasks.values())

    @property
    def samples(self) -> list[Sample]:
        return [sample for _, samples in self.tasks.values() for sample in samples]

    @property
    def is_ruler(self) -> bool:
        return self.name.partition("@")[0] == "ruler"

    @property
    def press(self) -> str:
        """What kvpress's registry calls the method, or its name here."""
        method = "+".join(stage["id"] for stage in self._stages()) or "full"
        known = read_yaml(Path(registry.__file__).with_name("kvpress.yaml"))["registered"]
        return str(known.get(method) or method.removeprefix("kvpress:").replace(":", "_").replace("+", "_"))

    @property
    def ratio(self) -> float:
        """The share removed: as it was asked for, or else as it was held."""
        for knobs in (stage["knobs"] for stage in self._stages()):
            if knobs.get("compression_ratio") is not None:
                return float(knobs["compression_ratio"])
            if knobs.get("kv_ratio") is not None:
                return round(1 - knobs["kv_ratio"], 9)
        shares = [1 - s.kept / s.n for s in self.samples]
        return round(sum(shares) / len(shares), 4) + 0.0

    @property
    def channel_ratio(self) -> float | None:
        """The share of key channels that ThinK drops."""
        found = [s["knobs"]["ratio"] for s in self._stages() if s["id"] == "think"]
        return float(found[0]) if found else None

    @property
    def fraction(self) -> float:
        """The share of the data set's examples that was measured."""
        whole = sum(RULER_SAMPLES if self.is_ruler else cell.record.of or 1 for cell, _ in self.tasks.values())
        return min(1.0, round(len(self.samples) / whole, 4))

    @property
    def model(self) -> str:
        """The model's name on the hub, where its entry of conf/model has one."""
        name = self.cell.record.model
        path = str(entries("model").get(name, {}).get("path") or "")
        return path if path.count("/") == 1 and not path.startswith((".", "/")) else name

    @property
    def unchanged(self) -> bool:
        """True if nothing was compressed on any task, so that the scores are the full cache's."""
        return all(cell.unchanged for cell, _ in self.tasks.values())

    def _stages(self) -> Sequence[Mapping[str, Any]]:
        stages: Sequence[Mapping[str, Any]] = self.cell.record.identity["chain"]["stages"]
        return stages

    def config(self, root: Path) -> dict[str, Any]:
        """Return what kvpress writes of a run, in its order; the press is written as kvbench labels the method."""
        prompt = self.cell.record.identity["prompt"]
        facts = self.cell.record.provenance[-1] if self.cell.record.provenance else {}
        return {
            "dataset": self.name,
            "data_dir": self.data_dir,
            "model": self.model,
            "device": str(facts.get("device", "")),
            "press_name": self.press,
            "compression_ratio": self.ratio,
            "key_channel_compression_ratio": self.channel_ratio,
            "fraction": self.fraction,
            "max_new_tokens": None,
            "max_context_length": prompt.get("max_length"),
            "query_aware": bool(prompt.get("query_aware", True)),
            "needle_depth": None,
            "compression_interval": None,
            "target_size": None,
            "hidden_states_buffer_size": None,
            "output_dir": str(root),
            "log_level": "INFO",
            "model_kwargs": {"dtype": facts.get("dtype")},
            "press_init_command": f"kvbench {facts.get('kvbench', '')} {self.cell.label}",
            "seed": 42,
            "fp8": False,
        }

    def metrics(self) -> Any:
        """Return the scores in the form that kvpress has for the data set, from 0 to 100 with two digits."""
        if self.is_ruler:
            return {t: {"string_match": string_match(t, samples)} for t, (_, samples) in sorted(self.tasks.items())}
        scores = {
            task: {cell.summary.metric: round(cell.summary.score, 2)}
            for task, (cell, _) in sorted(self.tasks.items())
            if cell.summary is not None and cell.summary.score is not None
        }
        # of LongBench kvpress writes one number, for the one task of the folder
        return next(iter(scores[self.data_dir].values())) if self.data_dir in scores else scores

    def predictions(self) -> str:
        """Return the answers as kvpress's CSV. Contexts and questions are not stored, so there is no such column."""
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(["id", "task", "answer", "predicted_answer", "compression_ratio"])
        for task, (_, samples) in self.tasks.items():
            for s in samples:
                # as pandas writes an array of numpy
                references = str(np.array(s.answers or (), dtype=object))
                rows.writerow([s.id, task, references, s.prediction, self.ratio])
        return text.getvalue()


def string_match(task: str, samples: Iterable[Sample]) -> float:
    """Return a task's score as kvpress computes it: of answers to questions one reference is enough, else the share."""
    score = any_contained if task.startswith("qa_") else share_contained
    scores = [score(s.prediction, s.answers or ()) or 0.0 for s in samples]
    return round(100 * sum(scores) / len(scores), 2)


def folder_name(config: Mapping[str, Any]) -> str:
    """Return the name of a run's folder as kvpress makes it of the run's configuration."""
    model = str(config["model"]).replace("/", "--")
    ratio = next(config[k] for k in ("threshold", "head_compression_ratio", "compression_ratio") if k in config)
    names = [config["dataset"], config["data_dir"], model, config["press_name"], f"{ratio:.2f}"]
    if config.get("fraction", 1.0) < 1:
        names.append(f"fraction{config['fraction']:.3f}")
    if config.get("max_context_length") is not None:
        names.append(f"max_context{config['max_context_length']}")
    if config.get("query_aware"):
        names.append("query_aware")
    if config.get("key_channel_compression_ratio") is not None:
        names.append(f"key_channel_cr{config['key_channel_compression_ratio']:.2f}")
    if config.get("needle_depth") is not None:
        names.append(f"needle_depth{config['needle_depth']}")
    # a task's knobs may hold a path, and a folder below a folder is none of the leaderboard's
    return "__".join(str(n).replace("/", "--") for n in names if n)


Answered = tuple[StoredCell, tuple[Sample, ...]]
"""A stored cell with its samples."""


def runs(store: ResultStore, cells: Iterable[StoredCell], name: str | None) -> tuple[list[Run], list[str]]:
    """Return the measured cells as kvpress divides them, RULER by length and other data sets by task, and notes.

    ``name`` replaces the name of the data set. Substitutes of RULER's tasks are left out. A folder has room for one
    cell of a method and task. Of several, measured under different settings, the one is taken under whose settings
    all methods together have most answers, or else the one measured last; a note says what differs in the others.
    A method that compressed nothing is left out with a note, since a folder cannot say so.
    """
    alike: dict[tuple[Any, ...], dict[str, list[Answered]]] = {}
    answers = Counter[tuple[str, str]]()
    for cell in cells:
        column, _, knobs = cell.record.column.partition(" ")
        dataset, _, rest = column.partition("/")
        task, _, length = rest.partition("/")
        samples = tuple(store.samples(cell.id).values()) if "chain" in cell.record.identity else ()
        if not samples or (dataset == "ruler" and task not in RULER):
            continue
        prompt = json.dumps(cell.record.identity["prompt"], sort_keys=True)
        data_dir = "_".join(filter(None, (length if dataset == "ruler" else task, knobs.replace(",", "_"))))
        of_run = alike.setdefault((name or dataset, data_dir, cell.record.model, cell.label, prompt), {})
        of_run.setdefault(task, []).append((cell, samples))
        answers[cell.record.column, _settings(cell)] += len(samples)
    chosen: list[Run] = []
    unchanged: list[str] = []
    left_out: dict[tuple[str, str, str], list[str]] = {}
    for key, tasks in alike.items():
        taken: dict[str, Answered] = {}
        for task, some in tasks.items():
            *others, taken[task] = sorted(some, key=partial(_rank, answers))
            for other in others:
                words, taken_words = _what_differs(other, taken[task])
                left_out.setdefault((other[0].record.column, words, taken_words), []).append(other[0].id)
        run = Run(key[0], key[1], taken)
        if run.unchanged:
            unchanged.append(f"{run.cell.label} on {', '.join(cell.record.column for cell, _ in taken.values())}")
        else:
            chosen.append(run)
    notes = [
        f"{column}: cells with {taken_words} are written, not those with {words} (cells={','.join(ids)} writes these)"
        for (column, words, taken_words), ids in left_out.items()
    ]
    notes += [f"{run}: left out, since nothing was compressed and its scores are the full cache's" for run in unchanged]
    return chosen, notes


def _rank(answers: Mapping[tuple[str, str], int], answered: Answered) -> tuple[int, int, str]:
    """Return by what a cell goes before others of its method and task: the answers under its settings, its own, age."""
    cell, samples = answered
    return answers[cell.record.column, _settings(cell)], len(samples), cell.changed or ""


def _what_differs(*cells: Answered) -> list[str]:
    """Return for each cell, in words, the settings in which it differs from the others and how much it answers."""
    settings = differences([cell.record.identity for cell, _ in cells])
    return [
        f"{words or 'another method'}, {len(samples)} prompts of {sum(s.n for s in samples) / len(samples):.0f} tokens"
        for words, (_, samples) in zip(settings, cells, strict=True)
    ]


def _settings(cell: StoredCell) -> str:
    """Return all settings of a cell but its method's as text."""
    return json.dumps({k: v for k, v in cell.record.identity.items() if k != "chain"}, sort_keys=True, default=str)


def write(run: Run, root: Path) -> Path:
    """Write one run's folder below ``root`` and return it."""
    config = run.config(root)
    folder = root / folder_name(config)
    texts = {
        "predictions.csv": run.predictions(),
        "metrics.json": json.dumps(run.metrics(), indent=4),
        "config.yaml": yaml.safe_dump(config, sort_keys=False),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise disk_error(error, folder) from error
    return folder


def check_names(found: Sequence[Run], root: Path) -> None:
    """Raise UsageError where two runs would be one folder."""
    methods: dict[str, str] = {}
    for run in found:
        folder = folder_name(run.config(root))
        if folder in methods:
            raise UsageError(
                f"{methods[folder]} and {run.cell.label} would both be the folder {folder}: choose with method=, cells="
            )
        methods[folder] = run.cell.label

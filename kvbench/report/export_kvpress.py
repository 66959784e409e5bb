"""Write stored cells as folders of kvpress's results, for its leaderboard: predictions, metrics and configuration."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import yaml

from kvbench.base.conf import entries, read_yaml
from kvbench.base.errors import UsageError
from kvbench.base.files import disk_error
from kvbench.methods.core import registry
from kvbench.report.listing import StoredCell
from kvbench.store.labels import describe_differences
from kvbench.store.results import Facts, Sample
from kvbench.store.store import ResultStore
from kvbench.tasks.metrics.kvpress_match import any_contained, share_contained

# the 13 tasks of RULER (arXiv 2404.06654)
RULER = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
    "qa_1",
    "qa_2",
)
# kvpress's data set has this many examples of each task and length
RULER_SAMPLES = 500

Answered = tuple[StoredCell, tuple[Sample, ...]]
"""A stored cell with its samples."""


class StageRecord(TypedDict):
    """The part of a stage's identity that names its method and its knobs.

    id: the method's id, such as ``think``.
    knobs: the method's options by name.
    """

    id: str
    knobs: Mapping[str, Any]


@dataclass(frozen=True)
class RunKey:
    """The properties that all cells of one folder share.

    name: the data set's name in the folder.
    data_dir: kvpress's name for a part of the data set: a length of RULER, a task of others, and any swept knobs.
    model: the name of the model's entry.
    label: the method with its budgets.
    prompt: the prompt's identity as JSON.
    """

    name: str
    data_dir: str
    model: str
    label: str
    prompt: str


@dataclass(frozen=True)
class Run:
    """The cells of one folder: one model and one method on the tasks of one data set and length.

    name: the data set's name in the folder.
    data_dir: kvpress's name for a part of the data set: a length of RULER, a task of others, and any swept knobs.
    tasks: the stored cell of each task, with its samples.
    """

    name: str
    data_dir: str
    tasks: Mapping[str, Answered]

    @property
    def cell(self) -> StoredCell:
        """The first of the cells. All have the same model, method and prompt."""
        return next(cell for cell, _ in self.tasks.values())

    @property
    def samples(self) -> list[Sample]:
        """All samples of the run, task by task."""
        run_samples: list[Sample] = []
        for _, samples in self.tasks.values():
            run_samples += samples
        return run_samples

    @property
    def is_ruler(self) -> bool:
        """True if the data set is RULER. Its name may have a variant behind an @."""
        return self.name.partition("@")[0] == "ruler"

    @property
    def press(self) -> str:
        """The method's name in kvpress's registry, or else kvbench's, without ``kvpress:`` and with _ for : and +."""
        # the names of the stages make the method's name; a chain without stages is the full cache
        method = "+".join(stage["id"] for stage in self._stages()) or "full"
        registered_names = read_yaml(Path(registry.__file__).with_name("kvpress.yaml"))["registered"]
        press_name = registered_names.get(method)
        if press_name:
            return str(press_name)
        # the name becomes part of the folder's name, and : and + are not safe there on every system
        return method.removeprefix("kvpress:").replace(":", "_").replace("+", "_")

    @property
    def ratio(self) -> float:
        """The removed share of the cache: the configured one, or else the measured one."""
        for stage in self._stages():
            knobs = stage["knobs"]
            # kvpress's own presses have this knob
            if knobs.get("compression_ratio") is not None:
                return float(knobs["compression_ratio"])
            # kvbench's methods have the kept share
            if knobs.get("kv_ratio") is not None:
                # rounding removes the digits that the subtraction adds: 1 - 0.9 is 0.09999999999999998
                return round(1 - knobs["kv_ratio"], 9)
        # a budget of tokens has no ratio of its own: take the mean of 1 - kept / n over the samples
        removed_shares = [1 - sample.kept / sample.n for sample in self.samples]
        mean_share = sum(removed_shares) / len(removed_shares)
        # a mean just below 0 rounds to -0.0; adding 0.0 makes it 0.0
        return round(mean_share, 4) + 0.0

    @property
    def channel_ratio(self) -> float | None:
        """The share of key channels that ThinK drops. It is None for a chain without ThinK."""
        for stage in self._stages():
            if stage["id"] == "think":
                return float(stage["knobs"]["ratio"])
        return None

    @property
    def fraction(self) -> float:
        """The share of the data set's examples that was measured."""
        total = 0
        for cell, _ in self.tasks.values():
            if self.is_ruler:
                # kvbench may make fewer examples of RULER than kvpress's data set has
                total += RULER_SAMPLES
            else:
                # an imported cell may not know how many examples there are: with 1, its answers count as all of them
                total += cell.record.of or 1
        # there may be more answers than examples if their number is not known
        return min(1.0, round(len(self.samples) / total, 4))

    @property
    def model(self) -> str:
        """The model's name on the hub if its entry of conf/model has one."""
        name = self.cell.record.model
        # the model of an imported cell may have no entry
        path = str(entries("model").get(name, {}).get("path") or "")
        # a path of the form owner/name is on the hub, any other is a folder of this machine
        if path.count("/") == 1 and not path.startswith((".", "/")):
            return path
        return name

    @property
    def unchanged(self) -> bool:
        """True if nothing was compressed on any task. The scores are then the full cache's."""
        return all(cell.unchanged for cell, _ in self.tasks.values())

    def _stages(self) -> Sequence[StageRecord]:
        stages: Sequence[StageRecord] = self.cell.record.identity["chain"]["stages"]
        return stages

    def config(self, root: Path) -> dict[str, object]:
        """Return the run's configuration with kvpress's keys in kvpress's order.

        The entry ``press_init_command`` holds kvbench's version and its label of the method. Keys without a counterpart
        in kvbench have kvpress's defaults.
        """
        prompt = self.cell.record.identity["prompt"]
        # several processes may have measured the cell: the facts of the last one are used
        facts: Facts = self.cell.record.provenance[-1] if self.cell.record.provenance else {}
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
        """Return the scores in kvpress's form for the data set, from 0 to 100 with two digits.

        RULER has {task: {"string_match": score}}, LongBench one number, and any other data set {task: {metric: score}}.
        """
        if self.is_ruler:
            matches = {}
            for task, (_, samples) in sorted(self.tasks.items()):
                matches[task] = {"string_match": string_match(task, samples)}
            return matches
        scores_by_task = {}
        for task, (cell, _) in sorted(self.tasks.items()):
            # a cell without any scored answer has no mean
            if cell.summary is not None and cell.summary.score is not None:
                scores_by_task[task] = {cell.summary.metric: round(cell.summary.score, 2)}
        if self.data_dir in scores_by_task:
            # kvpress writes one bare number for LongBench: a folder has one task, named by its data_dir
            (score,) = scores_by_task[self.data_dir].values()
            return score
        return scores_by_task

    def predictions(self) -> str:
        """Return the answers as kvpress's CSV. Contexts and questions are not stored, so their columns are missing."""
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(["id", "task", "answer", "predicted_answer", "compression_ratio"])
        for task, (_, samples) in self.tasks.items():
            for sample in samples:
                # kvpress's references are numpy arrays, and pandas writes these as their text
                references = str(np.array(sample.answers or (), dtype=object))
                rows.writerow([sample.id, task, references, sample.prediction, self.ratio])
        return text.getvalue()


def string_match(task: str, samples: Iterable[Sample]) -> float:
    """Return the score of a task's ``samples``, at least one, as kvpress computes it: from 0 to 100 with two digits.

    An answer to a question of qa_1 or qa_2 needs one of the references. Any other task's answer scores the share of
    references that it contains.
    """
    match_score: Callable[[str, Sequence[str]], float | None] = share_contained
    if task.startswith("qa_"):
        match_score = any_contained
    # an answer without references has no score (None) and counts as 0
    scores = [match_score(sample.prediction, sample.answers or ()) or 0.0 for sample in samples]
    return round(100 * sum(scores) / len(scores), 2)


def folder_name(config: Mapping[str, Any]) -> str:
    """Return the name of a run's folder as kvpress makes it from the run's configuration, ``Run.config``."""
    model = str(config["model"]).replace("/", "--")
    # some presses have another key than compression_ratio: kvpress writes the first of these that exists
    ratio_keys = ("threshold", "head_compression_ratio", "compression_ratio")
    ratio = next(config[key] for key in ratio_keys if key in config)
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
    # a task's knobs may hold a path, but the leaderboard reads no folders below a folder
    return "__".join(str(name).replace("/", "--") for name in names if name)


def find_runs(store: ResultStore, cells: Iterable[StoredCell], name: str | None) -> tuple[list[Run], list[str]]:
    """Return (the runs to write as folders, notes on results that are left out).

    name: a name that replaces the data set's; None to keep it.

    Cells are divided into runs as kvpress divides them, RULER by length and other data sets by task. Substitutes of
    RULER's tasks are left out, as are results with several answers a prompt. A method that compressed nothing is left
    out with a note, since a folder cannot say so. A folder has room for one cell of a method and task. If several were
    measured under different settings, the settings with most answers of all methods win, then the cell with most
    answers, then the cell written last. A note says how the others differ.
    """
    cells_by_run, answers = _group_by_run(store, cells, name)
    compressed_runs: list[Run] = []
    unchanged_notes: list[str] = []
    # pairs (a cell that is left out, the cell that is written in its place)
    replaced_cells: list[tuple[Answered, Answered]] = []
    for key, cells_by_task in cells_by_run.items():
        tasks: dict[str, Answered] = {}
        for task, candidates in cells_by_task.items():
            *others, written = sorted(candidates, key=partial(_rank, answers))
            tasks[task] = written
            replaced_cells += [(other, written) for other in others]
        run = Run(key.name, key.data_dir, tasks)
        if run.unchanged:
            columns = ", ".join(cell.record.column for cell, _ in tasks.values())
            unchanged_notes.append(
                f"{run.cell.label} on {columns}: left out, since nothing was compressed and its scores are the full "
                "cache's"
            )
        else:
            compressed_runs.append(run)
    return compressed_runs, _note_replaced_cells(replaced_cells) + unchanged_notes


def _note_replaced_cells(replaced_cells: Iterable[tuple[Answered, Answered]]) -> list[str]:
    """Return a note for each way in which cells that are left out differ from the cells written in their place.

    replaced_cells: the pairs (a cell that is left out, the cell that is written).
    """
    # one note names all cells with the same (column, words on the cell left out, words on the written cell)
    ids_by_difference: dict[tuple[str, str, str], list[str]] = {}
    for other, written in replaced_cells:
        other_cell, _ = other
        words, written_words = _describe_differences(other, written)
        difference = (other_cell.record.column, words, written_words)
        ids_by_difference.setdefault(difference, []).append(other_cell.id)
    notes = []
    for (column, words, written_words), ids in ids_by_difference.items():
        notes.append(
            f"{column}: results with {written_words} are written, not those with {words} "
            f"(cells={','.join(ids)} writes these)"
        )
    return notes


def _group_by_run(
    store: ResultStore, cells: Iterable[StoredCell], name: str | None
) -> tuple[dict[RunKey, dict[str, list[Answered]]], Counter[tuple[str, str]]]:
    """Return the measured cells by run and task, and the number of answers by (column, settings).

    name: a name that replaces the data set's; None to keep it.
    """
    cells_by_run: dict[RunKey, dict[str, list[Answered]]] = {}
    # answers of all methods by (column, settings): methods compare only under the same settings
    answers = Counter[tuple[str, str]]()
    for cell in cells:
        # a column is dataset/task/length, then a space and the swept knobs
        column, _, knobs = cell.record.column.partition(" ")
        dataset, _, task_and_length = column.partition("/")
        task, _, length = task_and_length.partition("/")
        # an imported cell may lack its chain, and then it has no press
        if "chain" not in cell.record.identity:
            continue
        samples = tuple(store.samples(cell.id).values())
        is_substitute = dataset == "ruler" and task not in RULER
        if not samples or is_substitute:
            continue
        # kvpress's files have one answer a prompt
        if any(sample.draws for sample in samples):
            continue
        # kvpress divides RULER by length and other data sets by task
        data_dir = length if dataset == "ruler" else task
        dir_words = [word for word in (data_dir, knobs.replace(",", "_")) if word]
        key = RunKey(
            name=name or dataset,
            data_dir="_".join(dir_words),
            model=cell.record.model,
            label=cell.label,
            prompt=json.dumps(cell.record.identity["prompt"], sort_keys=True),
        )
        cells_by_task = cells_by_run.setdefault(key, {})
        cells_by_task.setdefault(task, []).append((cell, samples))
        answers[cell.record.column, _serialise_settings(cell)] += len(samples)
    return cells_by_run, answers


def _rank(answers: Mapping[tuple[str, str], int], answered: Answered) -> tuple[int, int, str]:
    """Return the sort key among the cells of one method and task. The cell with the largest key is written.

    The key is (all methods' answers under the cell's settings, the cell's own answers, the time of its last write).

    answers: the number of all methods' answers by (column, settings).
    """
    cell, samples = answered
    answers_under_settings = answers[cell.record.column, _serialise_settings(cell)]
    # '' stands in for an unknown time, since None cannot be compared with a text
    return answers_under_settings, len(samples), cell.last_write or ""


def _describe_differences(*cells: Answered) -> list[str]:
    """Return a text for each cell: the settings that differ from the other cells', and how many prompts it answers.

    Each cell must have at least one sample.
    """
    settings = describe_differences([cell.record.identity for cell, _ in cells])
    texts = []
    for words, (_, samples) in zip(settings, cells, strict=True):
        tokens = sum(sample.n for sample in samples) / len(samples)
        # cells of one label may still differ in their stages' knobs, which ``describe_differences`` leaves out
        texts.append(f"{words or 'another method'}, {len(samples)} prompts of {tokens:.0f} tokens")
    return texts


def _serialise_settings(cell: StoredCell) -> str:
    """Return a cell's settings without its method as JSON. Cells that differ only in the method have the same text."""
    settings = {key: value for key, value in cell.record.identity.items() if key != "chain"}
    return json.dumps(settings, sort_keys=True, default=str)


def write_run(run: Run, root: Path) -> Path:
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


def check_names(runs: Sequence[Run], root: Path) -> None:
    """Raise UsageError if two runs would be written into folders of the same name below ``root``."""
    labels_by_folder: dict[str, str] = {}
    for run in runs:
        folder = folder_name(run.config(root))
        if folder in labels_by_folder:
            raise UsageError(
                f"{labels_by_folder[folder]} and {run.cell.label} would both be the folder {folder}: choose with "
                "method=, cells="
            )
        labels_by_folder[folder] = run.cell.label

"""Workloads of printed cells: a dataset in the form of ``run``, with the paper's knobs and the row's own.

A table's LongBench columns are read from LongBench or from MiniLongBench, never from both. Full LongBench is used if at
least as many columns can be read from it as from MiniLongBench.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from kvbench.base.conf import entries
from kvbench.base.errors import MissingData, UsageError, unknown
from kvbench.papers.spec import row_knobs, stand_ins
from kvbench.papers.spec.table_spec import DatasetKnob, TableRow, TableSpec
from kvbench.plan import config
from kvbench.plan.cells import Group
from kvbench.plan.config import DatasetConfig, RunConfig
from kvbench.plan.inputs import Inputs
from kvbench.tasks.base import Tokenizer
from kvbench.tasks.longbench import TASKS
from kvbench.tasks.needle import PHRASINGS
from kvbench.tasks.source import ENVIRONMENT, data_root

FAMILIES = {"full": "longbench", "mini": "longbench_mini"}
"""The entry of conf/dataset that each value of longbench= stands for."""

INSTEAD = {"wikitext103": ("wikitext2", "wikitext103: the test text of WikiText-2, whose articles are the same.")}
"""By dataset: the dataset that a stand-in reads if the first is not on this machine, and the note that says so."""

ROW_KNOBS = ("shots",)
"""Keys of a row's setting that are knobs of its datasets, not of its method. A dataset may lack such a knob."""


@dataclass(frozen=True)
class TableWorkload:
    """The data to read for a published ``dataset``.

    name: the dataset in the form of ``run`` (``longbench/qasper``).
    knobs: settings that replace those of its conf/dataset entry. Lists are tuples here, since workloads are keys.
    parts: the lengths of a needle test to read, or None for all.
    """

    dataset: str
    name: str
    knobs: tuple[tuple[str, object], ...] = ()
    parts: tuple[str, ...] | None = None

    @property
    def entry(self) -> str:
        """The name of the dataset's entry in conf/dataset: ``longbench`` for ``longbench/qasper``."""
        return self.name.partition("/")[0]

    @property
    def whole(self) -> TableWorkload:
        """The same workload with all of its parts, since a run reads all parts of a dataset at once."""
        return replace(self, parts=None)

    def owns(self, group: Group, label: str) -> bool:
        """Return True if a run's group is one of this workload's tasks.

        label: the workload's label (see ``label_workloads``).
        """
        # a group's column is dataset/part, followed by its label
        task, _, group_label = group.column.partition(" ")
        dataset, _, part = task.partition("/")
        # a workload names one task, or a dataset with all of its tasks
        if group_label != label or self.name not in (task, dataset):
            return False
        return self.parts is None or part in self.parts


def label_workloads(workloads: Iterable[TableWorkload]) -> dict[TableWorkload, str]:
    """Return a label for each workload: the settings in which it differs from another workload of the same dataset.

    A label is a text such as ``shots=4``. It is '' if the workload differs in no setting, or is the only one of its
    dataset.
    """
    label_of: dict[TableWorkload, str] = {}
    distinct = list(dict.fromkeys(workloads))
    for workload in distinct:
        others = [dict(other.knobs) for other in distinct if other.name == workload.name and other != workload]
        differing = []
        for knob, value in workload.knobs:
            if any(knobs.get(knob) != value for knobs in others):
                differing.append(f"{knob}={value}")
        label_of[workload] = " ".join(differing)
    return label_of


@dataclass(frozen=True)
class WorkloadChooser:
    """Chooses the data that a table's cells read, by the table, the model's context and the user's arguments.

    cfg: the run with every dataset that may be read.
    settings: the keys that the user typed, with their values.
    tokenizer: the model's tokenizer, since some datasets make prompts of a given number of tokens.
    inputs: the tasks read so far.
    context: the model's context in tokens; None if it has no limit.
    small: True if the tiny suite's tasks are read in place of the datasets.
    """

    table: TableSpec
    cfg: RunConfig
    settings: Mapping[str, object]
    tokenizer: Tokenizer
    inputs: Inputs
    context: int | None
    small: bool

    def choose_workload(self, row: TableRow, dataset: str, family: str) -> TableWorkload:
        """Return the data that is read for a dataset in a row.

        family: the dataset that LongBench's columns are read from, a value of FAMILIES.
        """
        if self.small:
            task = stand_ins.choose_tiny_task(dataset, self.table)
            return TableWorkload(dataset=task, name=f"tiny/{task}")
        name = f"{family}/{dataset}" if dataset in TASKS else dataset
        knobs: dict[str, object] = dict(self._find_paper_knobs(row, dataset))
        knobs |= _read_dataset_knobs(row, name)
        typed_knobs = self._list_typed_knobs()
        # lengths become parts, not a knob, so that all rows read one dataset and each its own lengths. Lengths that the
        # user typed hold for all rows in place of the paper's, so they need no parts
        parts = None
        if "lengths" in knobs and "lengths" not in typed_knobs:
            lengths = self._find_paper_lengths(row, dataset)
            parts = tuple(str(length) for length in lengths if self._fits_context(row, dataset, length))
        kept_knobs = []
        for knob, value in knobs.items():
            if knob not in typed_knobs and knob != "lengths":
                # workloads are keys of mappings, so their values must be hashable
                kept_knobs.append((knob, tuple(value) if isinstance(value, list) else value))
        return TableWorkload(dataset, name, tuple(kept_knobs), parts)

    def note_long_prompts(self, row: TableRow, dataset: str) -> str:
        """Return a note on the paper's prompts of a row that do not fit this model's context; '' if all fit."""
        # lengths that the user typed replace the paper's, and a run refuses those that do not fit
        if "lengths" in self._list_typed_knobs():
            return ""
        lengths = self._find_paper_lengths(row, dataset)
        too_long = [str(length) for length in lengths if not self._fits_context(row, dataset, length)]
        if not too_long:
            return ""
        prompts = f"prompts of {', '.join(too_long)} tokens, which rows of {row.model} have"
        return f"{dataset}: {prompts}, are beyond the model's context."

    def _list_typed_knobs(self) -> set[str]:
        names = set()
        for key in self.settings:
            # a knob may be typed behind its owner and a dot: method.think.ratio is ratio
            names.add(key.rpartition(".")[2])
        return names

    def _find_paper_knobs(self, row: TableRow, dataset: str) -> dict[str, DatasetKnob]:
        workloads = self.table.workloads
        knobs = dict(workloads.get(dataset, {}))
        # a model's own values replace values for all models
        knobs.update(workloads.get(f"{dataset}/{row.model}", {}))
        return knobs

    def _find_paper_lengths(self, row: TableRow, dataset: str) -> list[int]:
        lengths = self._find_paper_knobs(row, dataset).get("lengths")
        if not isinstance(lengths, list):
            return []
        stated_context = row_knobs.parse_setting(row.setting).get("context")
        if stated_context is None:
            return lengths
        # a context of 4k has 4,096 tokens
        longest = 1024 * int(stated_context.removesuffix("k"))
        return [length for length in lengths if length <= longest]

    def _fits_context(self, row: TableRow, dataset: str, length: int) -> bool:
        limit = self.cfg.prompt.max_length
        if limit is not None and length > limit:
            return False
        if self.context is None:
            return True
        # tables that state lengths also state how the needle is asked for, which limits its answer
        phrasing = PHRASINGS[str(self._find_paper_knobs(row, dataset)["phrasing"])]
        return length + phrasing.max_new_tokens <= self.context

    def configure_dataset(self, workload: TableWorkload, label: str = "") -> DatasetConfig:
        """Return a workload as a dataset of a run. Raises UsageError for an unknown dataset, or for swept knobs.

        label: the words that tell the workload from others of its dataset (see ``label_workloads``).
        """
        # if the user sweeps a knob, the run has one dataset for each of its values
        matches = [dataset for dataset in self.cfg.datasets if dataset.name == workload.entry]
        if not matches:
            raise unknown("dataset", workload.entry, entries("dataset"))
        if len(matches) > 1:
            raise UsageError(f"{self.table.id} takes one value of each option of {workload.entry}, not a grid")
        dataset = matches[0]
        knobs = dict(dataset.knobs)
        for knob, value in workload.knobs:
            knobs[knob] = list(value) if isinstance(value, tuple) else value
        if workload.parts is not None:
            knobs["lengths"] = [int(part) for part in workload.parts]
        # longbench/qasper is one task; a name without a task stands for all tasks of its dataset
        task = workload.name.partition("/")[2]
        tasks = (task,) if task else ()
        return replace(dataset, knobs=knobs, tasks=tasks, label=label)

    def why_unreadable(self, workload: TableWorkload) -> str:
        """Return the reason why a workload cannot be read, without paths of this machine, or '' if it can be read.

        The examples are loaded to find out.
        """
        # None stands for all parts, () for none
        if workload.parts == ():
            return f"all of its lengths are beyond the model's context of {self.context} tokens"
        try:
            dataset = self.configure_dataset(workload)
            knobs = dict(dataset.knobs)
            # prompts of a given length are made one by one; the first shows whether any is possible
            for knob in ("lengths", "depths"):
                values = knobs.get(knob)
                if isinstance(values, list):
                    knobs[knob] = values[:1]
            self.inputs.tasks(dataset.name, knobs, dataset.tasks, self.tokenizer, data=self.cfg.data_root)
        except MissingData as error:
            if data_root(self.cfg.data_root) is None:
                # the same reason for all datasets, so that a reader meets it once
                return f"no data folder is named (data.root=FOLDER, or the environment variable {ENVIRONMENT})"
            # the whole message names the data folder and the command that fetches the file
            name, _, _ = str(error).partition(" not found in ")
            return f"the file {name} is not in the data folder"
        except UsageError as error:
            return self._shorten_message(str(error))
        return ""

    def _shorten_message(self, message: str) -> str:
        reason = message.partition(": put the file there yourself")[0]
        # a missing data folder is an error of its own, so no message names it
        with suppress(UsageError):
            root = data_root(self.cfg.data_root)
            if root is not None:
                reason = reason.replace(f" below {root}", "").replace(f"{root}/", "")
        return reason.replace(", which does not exist", ", which is not there").removesuffix(":")

    def choose_family(self, datasets: Iterable[str], asked: str) -> str:
        """Return the conf/dataset entry from which a table's LongBench columns are read, a value of FAMILIES.

        datasets: the datasets of the table's columns.
        asked: the user's choice, a key of FAMILIES; '' for the entry from which most columns can be read here.

        Raises UsageError for a choice that does not exist, and for any choice with the tiny model.
        """
        if asked and asked not in FAMILIES:
            raise unknown("value of longbench", asked, FAMILIES)
        if asked and self.small:
            raise UsageError(f"longbench={asked} is not possible with model={stand_ins.MODEL}, which has its own tasks")
        if asked:
            return FAMILIES[asked]
        columns = [dataset for dataset in datasets if dataset in TASKS]
        # nothing is read from LongBench then, so any family will do
        if self.small or not columns:
            return FAMILIES["full"]
        readable_counts = {}
        for family in FAMILIES.values():
            workloads = [TableWorkload(column, f"{family}/{column}") for column in columns]
            readable_counts[family] = sum(not self.why_unreadable(workload) for workload in workloads)
        # a tie goes to the first: the full data
        return max(readable_counts, key=readable_counts.__getitem__)


def _read_dataset_knobs(row: TableRow, name: str) -> dict[str, int]:
    """Return the knobs of a dataset that a row's setting states, such as {"shots": 4}; {} for other settings."""
    entry_name = name.partition("/")[0]
    # a dataset that kvbench cannot read has no entry; the table reports it as absent
    entry = entries("dataset").get(entry_name, {})
    settings = row_knobs.parse_setting(row.setting)
    return {knob: int(settings[knob]) for knob in ROW_KNOBS if knob in settings and knob in entry}


def configure_run(settings: Mapping[str, object], datasets: Iterable[str], small: bool) -> RunConfig:
    """Return the configuration that runs ``settings`` on all datasets that can serve the published ``datasets``.

    On a ``small`` model only the tiny dataset serves. Otherwise each published dataset is served by itself, by its
    replacement in INSTEAD, or, for a LongBench task, by every family of LongBench's files.
    """
    names: list[str] = []
    if small:
        names.append("tiny")
    else:
        for dataset in datasets:
            if dataset in TASKS:
                names.extend(FAMILIES.values())
                continue
            names.append(dataset)
            if dataset in INSTEAD:
                replacement, _ = INSTEAD[dataset]
                names.append(replacement)
    # the table reports datasets that kvbench cannot read as absent
    entry_names = [name for name in dict.fromkeys(names) if name in entries("dataset")]
    return config.configure(dict(settings) | {"dataset": entry_names})

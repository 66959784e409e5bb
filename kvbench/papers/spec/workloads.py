"""Workloads of printed cells: a dataset as ``run`` takes it, with the paper's knobs and the row's own.

LongBench's columns of a table are all of LongBench or all of MiniLongBench, never of both: of LongBench where all of
them can be read, else of MiniLongBench where it is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from kvbench.base.conf import entries
from kvbench.base.errors import UsageError, unknown
from kvbench.papers.spec import row_knobs, stand_ins
from kvbench.papers.spec.table_spec import TableRow, TableSpec
from kvbench.plan import config
from kvbench.plan.cells import Group
from kvbench.plan.config import DatasetConfig, RunConfig
from kvbench.tasks.base import Tokenizer, load_tasks
from kvbench.tasks.longbench import TASKS
from kvbench.tasks.needle import PHRASINGS
from kvbench.tasks.source import data_root

FAMILIES = {"full": "longbench", "mini": "longbench_mini"}
"""Values of longbench= and the dataset that each is."""

INSTEAD = {"wikitext103": ("wikitext2", "wikitext103: the test text of WikiText-2, whose articles are the same.")}
"""On a stand-in: what is read where a dataset is not there, with the note that says so."""

ROW_KNOBS = ("shots",)
"""Facts of a row that are knobs of its datasets, where they have such a knob."""


@dataclass(frozen=True)
class TableWorkload:
    """The data that are read for a published ``dataset``.

    name: the dataset as ``run`` takes it (``longbench/qasper``).
    knobs: settings that replace those of its conf/dataset entry.
    parts: the lengths of a needle test that are read; None for all.
    """

    dataset: str
    name: str
    knobs: tuple[tuple[str, Any], ...] = ()
    parts: tuple[str, ...] | None = None

    @property
    def entry(self) -> str:
        """Return the entry of conf/dataset."""
        return self.name.partition("/")[0]

    @property
    def whole(self) -> TableWorkload:
        """Return the same workload with all of its parts, which are read at once."""
        return replace(self, parts=None)

    def owns(self, group: Group, label: str) -> bool:
        """Tell whether a run's group is one of its tasks; ``label`` tells it from others of its dataset."""
        task, _, group_label = group.column.partition(" ")
        same = group_label == label and self.name in (task, task.partition("/")[0])
        return same and (self.parts is None or task.partition("/")[2] in self.parts)


def labels(workloads: Iterable[TableWorkload]) -> dict[TableWorkload, str]:
    """Return by workload the knobs that tell it from others of its name; '' where it is alone."""
    by_workload: dict[TableWorkload, str] = {}
    distinct = list(dict.fromkeys(workloads))
    for w in distinct:
        others = [dict(o.knobs) for o in distinct if o.name == w.name and o != w]
        by_workload[w] = " ".join(f"{k}={v}" for k, v in w.knobs if any(o.get(k) != v for o in others))
    return by_workload


@dataclass(frozen=True)
class Reader:
    """The facts that decide how datasets are read: the table, the model's context, and the user's arguments.

    ``context`` is in tokens. ``cfg`` is the run with every dataset that may be read, ``written`` its arguments. With
    ``small`` the tiny suite's tasks are read.
    """

    declared: TableSpec
    cfg: RunConfig
    written: tuple[str, ...]
    tokenizer: Tokenizer
    context: int | None
    small: bool

    def workload(self, row: TableRow, dataset: str, family: str) -> TableWorkload:
        """Return the data that is read for a dataset in a row."""
        if self.small:
            task = stand_ins.task_of(dataset, self.declared)
            return TableWorkload(task, f"tiny/{task}")
        name = f"{family}/{dataset}" if dataset in TASKS else dataset
        knobs, facts = self._knobs(row, dataset), row_knobs.parse(row.setting)
        plain = entries("dataset").get(name.partition("/")[0], {})
        knobs |= {k: int(facts[k]) for k in ROW_KNOBS if k in facts and k in plain}
        typed, parts = self._typed(), None
        if "lengths" in knobs and "lengths" not in typed:
            parts = tuple(str(n) for n in self._lengths(row, dataset) if self._fits(n, knobs))
        settings = tuple(
            (k, tuple(v) if isinstance(v, list) else v) for k, v in knobs.items() if k not in typed and k != "lengths"
        )
        return TableWorkload(dataset, name, settings, parts)

    def beyond(self, row: TableRow, dataset: str) -> list[int]:
        """Return the paper's lengths that do not fit this model's context; none if the user typed lengths."""
        if "lengths" in self._typed():
            return []
        knobs = self._knobs(row, dataset)
        return [n for n in self._lengths(row, dataset) if not self._fits(n, knobs)]

    def _typed(self) -> set[str]:
        """Return the names, without owners, of the knobs that the user typed; these override the paper's."""
        return {w.partition("=")[0].rpartition(".")[2] for w in self.written}

    def _knobs(self, row: TableRow, dataset: str) -> dict[str, Any]:
        """Return the paper's knobs of a dataset, in the rows of one model."""
        knobs = self.declared.workloads
        return {**knobs.get(dataset, {}), **knobs.get(f"{dataset}/{row.model}", {})}

    def _lengths(self, row: TableRow, dataset: str) -> list[int]:
        """Return the paper's lengths within the row's own context; none of a dataset without that knob."""
        stated = row_knobs.parse(row.setting).get("context")  # as in 4k
        lengths = self._knobs(row, dataset).get("lengths", ())
        return [n for n in lengths if stated is None or n <= 1024 * int(stated.removesuffix("k"))]

    def _fits(self, length: int, knobs: Mapping[str, Any]) -> bool:
        """Tell whether a prompt of that many tokens is read whole, with room for its answer."""
        answer, limit = PHRASINGS[knobs["phrasing"]].max_new_tokens, self.cfg.prompt.max_length
        return (self.context is None or length + answer <= self.context) and (limit is None or length <= limit)

    def config(self, workload: TableWorkload, label: str = "") -> DatasetConfig:
        """Return the dataset of a run; raise UsageError for an unknown one, or for a grid of its knobs."""
        matches = [d for d in self.cfg.datasets if d.name == workload.entry]
        if not matches:
            raise unknown("dataset", workload.entry, entries("dataset"))
        if len(matches) > 1:
            raise UsageError(f"{self.declared.id} takes one value of each knob of {workload.entry}, not a grid")
        knobs = {**matches[0].knobs, **{k: list(v) if isinstance(v, tuple) else v for k, v in workload.knobs}}
        if workload.parts is not None:
            knobs["lengths"] = [int(n) for n in workload.parts]
        tasks = tuple(filter(None, [workload.name.partition("/")[2]]))
        return replace(matches[0], knobs=knobs, tasks=tasks, label=label)

    def why_not(self, workload: TableWorkload) -> str:
        """Return the reason why a workload cannot be read, without paths of this machine; '' if it can be read."""
        if workload.parts == ():
            return f"all of its lengths are beyond the model's context of {self.context} tokens"
        try:
            dataset = self.config(workload)
            # prompts of a given length are made one by one: the first shows whether there is any
            few = {k: v[:1] for k, v in dataset.knobs.items() if k in ("lengths", "depths") and isinstance(v, list)}
            knobs = {**dataset.knobs, **few}
            load_tasks(dataset.name, knobs, dataset.tasks, self.tokenizer, self.cfg.data_root)
        except UsageError as error:
            # without the ways to get a file, which are always the same
            reason = str(error).partition(": put the file there yourself")[0]
            with suppress(UsageError):
                if (root := data_root(self.cfg.data_root)) is not None:
                    reason = reason.replace(f" below {root}", "").replace(f"{root}/", "")
            return reason.replace(", which does not exist", ", which is not there").removesuffix(":")
        return ""

    def family(self, datasets: Iterable[str], asked: str) -> str:
        """Return the conf/dataset entry that a table's LongBench columns are read from.

        It is ``longbench`` or ``longbench_mini``: what the user ``asked`` for, else the one from which most columns can
        be read here.
        """
        if asked and asked not in FAMILIES:
            raise unknown("value of longbench", asked, FAMILIES)
        if asked and self.small:
            raise UsageError(f"longbench={asked} is not possible with model={stand_ins.MODEL}, which has its own tasks")
        columns = [d for d in datasets if d in TASKS]
        if asked or self.small or not columns:
            return FAMILIES[asked or "full"]
        readable = {f: sum(not self.why_not(TableWorkload(d, f"{f}/{d}")) for d in columns) for f in FAMILIES.values()}
        return max(readable, key=lambda f: readable[f])  # a tie goes to the first: the full data


def composed(written: Sequence[str], datasets: Iterable[str], small: bool) -> RunConfig:
    """Parse ``written`` as a run with every dataset that published ``datasets`` may be read from."""
    names = {"tiny": None} if small else {}
    for dataset in () if small else datasets:
        names |= dict.fromkeys(FAMILIES.values() if dataset in TASKS else (dataset, *INSTEAD.get(dataset, ())[:1]))
    entry_names = [n for n in names if n in entries("dataset")]
    return config.read([*written, f"dataset={','.join(entry_names)}"])

"""The timing of the papers' efficiency tables, as declared in kvbench/papers/data/<paper>/bench<N>.yaml.

``python -m kvbench.papers.timed.bench_spec`` prints the tables' rows that are declared as not run, with the reasons.

kvbench.papers.timed.row_matching finds the measured row for each printed cell.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import yaml

from kvbench.base.conf import YAML_LOADER
from kvbench.base.errors import KvbenchError, UsageError
from kvbench.bench import workload
from kvbench.papers import data_files as papers_files
from kvbench.papers.spec.published import Published

SMALL = ("device=cpu", "threads=1", "repeats=3", "generate=sampled", "steps=8")
"""Arguments of ``bench time`` with which a stand-in is timed."""


@dataclass(frozen=True)
class Scale:
    """The divisors that scale a paper's workloads down to a stand-in.

    lengths: the divisor of numbers of tokens: of the prompt, generated, and kept (``kv_size``).
    rows: the divisor of a batch's rows. One row is left at least.
    memory: the process's limit in GiB for a workload with as many rows as fit.
    without: arguments that only suit the paper's models, and are dropped.
    """

    lengths: int = 1
    rows: int = 1
    memory: float | None = None
    without: Sequence[str] = ()

    def scale_workload(self, name: str) -> str:
        """Return a workload at the stand-in's size, rounded up, with at least two new tokens and one row.

        name: the paper's workload as text, such as ``4096+128x8``: prompt tokens, new tokens and rows.
        """
        paper = workload.parse_workload(name)
        prompt = math.ceil(paper.prompt / self.lengths)
        # the first token counts as the time to the first token, so a time per token needs a second one
        new = max(2, math.ceil(paper.new / self.lengths))
        batch = math.ceil(paper.batch / self.rows) if paper.batch is not None else None
        return workload.Workload(prompt, new, batch).name

    def scale_arguments(self, text: str) -> str:
        """Return a method's text, or arguments, with ``kv_size`` scaled and the words of ``without`` left out.

        text: words separated by spaces, such as ``snapkv kv_size=128``.
        """

        def scale_size(match: re.Match[str]) -> str:
            size = int(match[1])
            return f"kv_size={size // self.lengths}"

        words = [word for word in text.split() if word not in self.without]
        # the word boundary excludes knobs with names that end in kv_size
        return re.sub(r"\bkv_size=(\d+)", scale_size, " ".join(words))

    def describe(self) -> str:
        """Return the scale in words, for the notes below a table."""
        parts = []
        if self.lengths > 1:
            parts.append(f"numbers of tokens are those of the paper over {self.lengths}")
        if self.rows > 1:
            parts.append(f"rows those over {self.rows}, rounded up")
        if self.memory:
            parts.append(f"as many rows as fit into {self.memory:g} GiB")
        if self.without:
            parts.append(f"without {', '.join(self.without)}")
        return "; ".join(parts) or "as in the paper"


@dataclass(frozen=True)
class BenchSpec:
    """The declaration of one efficiency table.

    results: the name, without folder and .jsonl, of the file with the measured rows.
    model: the model to time, an entry of conf/model.
    base: the published method in the denominator of ratios.
    arguments: the arguments of ``bench time`` for all methods.
    methods: our method's text by published method. A key such as ``kivi bits=2`` holds for rows with this setting only.
    quantities: the quantity of ``bench time`` by published metric.
    workload: the workload of a row as a template, with keys of the row's settings in braces.
    workloads: the workloads of datasets that do not follow the template.
    device: the paper's device, if its rows do not name devices.
    notes: further facts that readers of our rows must know.
    not_run: why cells are not run, by their model, method or dataset. A key with settings behind the name concerns only
    cells with these settings.
    stand_in: the divisors for a small model on a CPU.
    scaled: True if the declaration was scaled down for a small model.
    """

    results: str
    model: str
    base: str
    arguments: str
    methods: Mapping[str, str]
    quantities: Mapping[str, str]
    workload: str = ""
    workloads: Mapping[str, str] = field(default_factory=dict)
    device: str = ""
    notes: Sequence[str] = ()
    not_run: Mapping[str, str] = field(default_factory=dict)
    stand_in: Scale = field(default_factory=Scale)
    scaled: bool = False

    def find_row_key(self, cell: Published, method: str | None = None) -> tuple[str, str] | None:
        """Return (workload, method) of our row for a published cell, or None if no such row is declared.

        method: another published method in place of the cell's own, for example the base row's.
        """
        workload_name = self.find_printed_workload(cell)
        text = self._find_method_text(method or cell.method, _list_facts(cell))
        if not workload_name or text is None:
            return None
        # ``scale_for`` scaled the methods' texts already
        if self.scaled:
            workload_name = self.stand_in.scale_workload(workload_name)
        return workload_name, text

    def _find_method_text(self, method: str, facts: set[str]) -> str | None:
        """Return the text in ``methods`` for a published method; None if there is none."""
        text = None
        # a key without settings, such as ``kivi``, serves the rows for which no other key fits: 0 settings beat -1
        most_settings = -1
        for key, candidate in self.methods.items():
            name, *settings = key.split()
            if name == method and facts.issuperset(settings) and len(settings) > most_settings:
                text, most_settings = candidate, len(settings)
        return text

    def find_printed_workload(self, cell: Published) -> str:
        """Return the workload of a published cell at the paper's size; '' if it is not known."""
        # the prompts of some datasets have lengths of their own
        if self.workloads.get(cell.dataset):
            return self.workloads[cell.dataset]
        try:
            return self.workload.format(**cell.settings)
        except KeyError:
            # the row lacks a setting that the template asks for
            return ""

    def why_not(self, cell: Published) -> str:
        """Return the reason why a published cell is not run, or '' if it is run."""
        # the first reason that fits wins
        facts = _list_facts(cell)
        for key, reason in self.not_run.items():
            name, *settings = key.split()
            if name in (cell.model, cell.method, cell.dataset) and facts.issuperset(settings):
                return reason
        return ""

    def scale_for(self, model: str) -> BenchSpec:
        """Return this table's declaration for a small model, with sizes scaled down by ``stand_in``."""
        # the published settings stay, since cells are matched by them; only the arguments that run are scaled
        methods = {name: self.stand_in.scale_arguments(text) for name, text in self.methods.items()}
        arguments = self.stand_in.scale_arguments(self.arguments)
        return replace(self, model=model, arguments=arguments, methods=methods, scaled=True)

    def list_arguments(self, workloads: Sequence[str]) -> list[str]:
        """Return the arguments of ``bench time`` that measure this table's methods on ``workloads``.

        workloads: the names of workloads at the size that is run, scaled for a stand-in.
        """
        arguments = [f"model={self.model}"]
        arguments.extend(self.arguments.split())
        arguments.append(f"workloads={','.join(workloads)}")
        # other libraries are timed beside ours only if a table prints them
        if "peers=" not in self.arguments:
            arguments.append("peers=none")
        if self.scaled:
            arguments.extend(SMALL)
            if self.stand_in.memory:
                arguments.append(f"memory_limit={self.stand_in.memory}")
        return arguments


def _list_facts(cell: Published) -> set[str]:
    return {f"{key}={value}" for key, value in cell.settings.items()}


def table_ids() -> list[tuple[str, str]]:
    """Return (paper, table) of every efficiency table that is declared, in the order of the papers' tables."""

    def paper_and_number(table_id: tuple[str, str]) -> tuple[str, int]:
        paper, table = table_id
        # table 10 stands behind table 9
        return paper, int(table)

    names = [(path.parent.name, path.stem.removeprefix("bench")) for path in papers_files("*/bench[0-9]*.yaml")]
    return sorted(names, key=paper_and_number)


@cache
def load(paper: str, table: str) -> BenchSpec:
    """Read the declaration of one efficiency table.

    Raises UsageError for a table without a declaration, KvbenchError for a damaged file.
    """
    name = f"{paper}/bench{table}.yaml"
    path = next(iter(papers_files(name)), None)
    if path is None:
        raise UsageError(
            f"table {paper}/{table}: {name} is missing. Beside paper.yaml, this file says how a table of times or "
            "memory is measured, as kvbench/papers/data/think/bench10.yaml does"
        )
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=YAML_LOADER)
        stand_in = Scale(**content.get("stand_in", {}))
        return BenchSpec(**content | {"stand_in": stand_in})
    # TypeError: an unknown or a missing key; AttributeError: no mapping
    except (TypeError, AttributeError, yaml.YAMLError) as error:
        raise KvbenchError(f"{path}: {error}") from None


def main() -> int:
    """Print the table rows that are declared as not run, with the reason of each."""
    for paper, table in table_ids():
        for names, reason in load(paper, table).not_run.items():
            print(f"{paper}/{table}: not run: {names}: {reason}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

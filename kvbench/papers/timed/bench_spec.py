"""The timing of the papers' efficiency tables, as declared in kvbench/papers/data/<paper>/bench<N>.yaml.

    python -m kvbench.papers.timed.bench_spec        the tables' rows that are declared and not run, with the reason

Which measured row stands for which printed cell is found in kvbench.papers.timed.row_matching.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import yaml

from kvbench.base.errors import KvbenchError, unknown
from kvbench.bench import workload
from kvbench.papers import files as papers_files
from kvbench.papers.spec.published import Published

SMALL = ("device=cpu", "threads=1", "repeats=3", "generate=sampled", "steps=8")
"""Arguments with which a stand-in is timed."""


@dataclass(frozen=True)
class Scale:
    """The sizes of a stand-in's workloads, as parts of the paper's.

    lengths: divides the numbers of tokens of the prompt, generated, and kept (``kv_size``). rows: divides the rows of a
    batch, down to one. memory: the process's limit in GiB where a workload has as many rows as fit. without: arguments
    that are made for the paper's models and dropped.
    """

    lengths: int = 1
    rows: int = 1
    memory: float | None = None
    without: Sequence[str] = ()

    def workload(self, name: str) -> str:
        """Return a workload at the stand-in's size, rounded up, with at least two new tokens and one row."""
        paper = workload.parse(name)
        prompt, new = math.ceil(paper.prompt / self.lengths), max(2, math.ceil(paper.new / self.lengths))
        batch = None if paper.batch is None else math.ceil(paper.batch / self.rows)
        return workload.Workload(prompt, new, batch).name

    def knobs(self, text: str) -> str:
        """Scale the ``kv_size`` in a method's text, and drop the arguments of ``without``."""
        words = [w for w in text.split() if w not in self.without]
        return re.sub(r"\bkv_size=(\d+)", lambda m: f"kv_size={int(m[1]) // self.lengths}", " ".join(words))

    def words(self) -> str:
        """Describe the scale in words, for below a table."""
        parts = [f"numbers of tokens are those of the paper over {self.lengths}"] if self.lengths > 1 else []
        parts += [f"rows those over {self.rows}, rounded up"] if self.rows > 1 else []
        parts += [f"as many rows as fit into {self.memory:g} GiB"] if self.memory else []
        parts += [f"without {', '.join(self.without)}"] if self.without else []
        return "; ".join(parts) or "as in the paper"


@dataclass(frozen=True)
class BenchSpec:
    """The declaration of one efficiency table.

    results: the file of measured rows. base: the published method that ratios are to. arguments: those of ``bench
    time`` for all methods. methods: our row by published method, which names as many settings as tell it apart.
    quantities: ours by published metric. workload: a template with the settings of a row in braces; workloads: one for
    each dataset instead. device: the paper's, where its rows name none. notes: more that a reader must know about our
    rows. not_run: reasons by model, method or dataset, followed by settings where a reason is about some cells only.
    stand_in: the scale of a small model on a CPU. scaled: True on the stand-in's side.
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

    def ours(self, cell: Published, method: str | None = None) -> tuple[str, str] | None:
        """Return (workload, method) of our row for a published cell; None where there is none."""
        printed = self.printed_workload(cell)
        parts = {f"{k}={v}" for k, v in cell.settings.items()}
        texts = [words for words in self.methods if words.split()[0] == (method or cell.method)]
        matches = [words for words in texts if set(words.split()[1:]) <= parts]
        if not printed or not matches:
            return None
        ours = self.methods[max(matches, key=lambda words: len(words.split()))]
        return (self.stand_in.workload(printed) if self.scaled else printed), ours

    def printed_workload(self, cell: Published) -> str:
        """Return the workload of a published cell at the paper's size; '' where it is not known."""
        try:
            return self.workloads.get(cell.dataset, "") or self.workload.format(**cell.settings)
        except KeyError:
            return ""

    def why_not(self, cell: Published) -> str:
        """Return the reason why a published cell is not run; '' if it is run."""
        names, facts = (cell.model, cell.method, cell.dataset), {f"{k}={v}" for k, v in cell.settings.items()}
        reasons = ((*words.split(), why) for words, why in self.not_run.items())
        return next((why for name, *parts, why in reasons if name in names and set(parts) <= facts), "")

    def on(self, model: str) -> BenchSpec:
        """Return the same table on a small model, at the stand-in's sizes."""
        knobs = self.stand_in.knobs
        methods = {name: knobs(text) for name, text in self.methods.items()}
        return replace(self, model=model, arguments=knobs(self.arguments), methods=methods, scaled=True)

    def words(self, workloads: Sequence[str]) -> list[str]:
        """Return the arguments of ``bench time`` that measure this table's methods on ``workloads``."""
        words = [f"model={self.model}", *self.arguments.split(), f"workloads={','.join(workloads)}"]
        words += [] if "peers=" in self.arguments else ["peers=none"]
        memory = [f"memory_limit={self.stand_in.memory}"] if self.stand_in.memory else []
        return [*words, *SMALL, *memory] if self.scaled else words


def tables() -> list[tuple[str, str]]:
    """Return (paper, table) of every declaration."""
    names = [(p.parent.name, p.stem.removeprefix("bench")) for p in papers_files("*/bench[0-9]*.yaml")]
    return sorted(names, key=lambda t: (t[0], int(t[1])))


@cache
def load(paper: str, table: str) -> BenchSpec:
    """Read one declaration; raise UsageError for one that is not there, KvbenchError for a damaged file."""
    path = next(iter(papers_files(f"{paper}/bench{table}.yaml")), None)
    if path is None:
        raise unknown("efficiency table", f"{paper}/{table}", [f"{p}/{t}" for p, t in tables()])
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        return BenchSpec(**{**raw, "stand_in": Scale(**raw.get("stand_in", {}))})
    except (TypeError, AttributeError, yaml.YAMLError) as error:
        raise KvbenchError(f"{path}: {error}") from None


def main() -> int:
    """Print the rows that are declared and not run, with the reason."""
    for paper, table in tables():
        for names, reason in load(paper, table).not_run.items():
            print(f"{paper}/{table}: not run: {names}: {reason}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

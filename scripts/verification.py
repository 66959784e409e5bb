"""The shared parts of ``--verify`` in all scripts: which tables their samples give, and which not.

A table may differ, or it may be impossible to make here, because texts or a model are missing. Both end with status 1,
the second kind unless ``--without`` allows it.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvbench.base.conf import entries
from kvbench.base.errors import Damaged, MissingData, MissingFiles, MissingModel, UsageError
from kvbench.base.visible import say
from kvbench.models import load
from kvbench.plan import config
from kvbench.plan.inputs import Inputs
from kvbench.plan.run_plan import RunPlan
from kvbench.store.cell import hash_identity
from kvbench.store.sample_reader import SampleReader
from kvbench.tasks.source import ENVIRONMENT

KINDS = {"data": MissingData, "model": MissingModel}
"""What may be missing, by its word in ``--without``."""


@dataclass
class Verification:
    """The findings on the tables so far.

    same: the names of the tables that their samples give.
    differing: the names of the tables that differ, by the command that makes them anew.
    missing: the names of the tables that were not made again, by kind and reason.
    """

    same: list[str] = field(default_factory=list)
    differing: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    missing: dict[tuple[str, str], list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, name: str, is_same: Callable[[], bool], remedy: str) -> None:
        """Verify one table by ``is_same``, which may raise MissingFiles. ``remedy`` makes the table anew."""
        try:
            names = self.same if is_same() else self.differing[remedy]
        except MissingFiles as error:
            names = self.missing[_reason(error)]
        except (Contradiction, Damaged) as error:
            names = self.differing[str(error)]
        names.append(name)

    def add_text(self, path: Path, make: Callable[[], str], name: str, remedy: str) -> None:
        """Verify one text file by what ``make`` returns."""
        self.add(name, lambda: path.exists() and path.read_text(encoding="utf-8") == make(), remedy)

    def join(self, other: Verification) -> None:
        """Add the findings of ``other``, behind these."""
        self.same += other.same
        for remedy, names in other.differing.items():
            self.differing[remedy] += names
        for reason, names in other.missing.items():
            self.missing[reason] += names

    def close(self, without: Iterable[str]) -> int:
        """Print the verified, differing and unverified tables. Return the exit status.

        It is 1 if a table differs, or was not verified for a reason that is not in ``without``.
        """
        allowed = set(without)
        if self.same:
            print(f"verified: {len(self.same)} as their samples give them: {', '.join(self.same)}", flush=True)
        for (kind, reason), names in self.missing.items():
            consent = f" (allowed by --without {kind})" if kind in allowed else ""
            say(f"not verified{consent}: {reason}: {', '.join(names)}")
        for remedy, names in self.differing.items():
            differ = "differs from its samples" if len(names) == 1 else "differ from their samples"
            say(f"{', '.join(names)} {differ}; {remedy}")
        return int(bool(self.differing) or any(kind not in allowed for kind, _ in self.missing))


def _reason(error: MissingFiles) -> tuple[str, str]:
    """Return the kind of the missing files, and their names with a remedy."""
    names = ", ".join(error.names)
    if isinstance(error, MissingModel):
        return "model", f"model {names} missing: fetch it with kvbench model fetch {names}"
    folder = os.environ.get(ENVIRONMENT)
    if names:
        return "data", f"{names} missing below {ENVIRONMENT}={folder}"
    if folder:
        return "data", f"data folder missing: {ENVIRONMENT}={folder} is no folder, set it to one"
    return "data", f"data folder missing: set {ENVIRONMENT}=FOLDER"


class Contradiction(Exception):
    """The error for samples that cannot belong to the cell under which they are filed, with the reason."""


def check(reader: SampleReader, runs: Sequence[RunPlan], model: str, inputs: Inputs | None = None) -> None:
    """Raise MissingData if ``runs`` lack cells of the store because the texts of their tasks are not here.

    inputs: the tokenizers and tasks read so far; None: there are none.

    Raise Contradiction for samples that are filed under another cell.
    """
    store = reader.store
    check_samples(reader, runs)
    planned = {cell.id for run in runs for group in run.groups for cell in group.cells}
    records = [store.cell(cell) for cell in store.cells() if cell not in planned]
    need_texts({str(record.identity["task"]) for record in records if record is not None}, model, inputs or Inputs())


def check_samples(reader: SampleReader, runs: Iterable[RunPlan]) -> None:
    """Raise Contradiction if a cell's id is not its identity's, or its samples belong to another task or budget.

    Samples of two methods under one budget cannot be told apart, since a line does not name its method.
    """
    store = reader.store
    for name in store.cells():
        record = store.cell(name)
        if record is not None and hash_identity(record.identity) != name:
            raise Contradiction(f"the record of cell {name} ({record.label} on {record.column}) is another cell's")
    lengths: dict[tuple[str, str], int] = {}
    cells = {cell.id: cell for run in runs for group in run.groups for cell in group.cells}
    for cell in cells.values():
        task, references = cell.full.id, {e.id: tuple(e.answers) for e in cell.task.examples}
        for name, sample in reader.read(cell.id).items():
            budget, n = cell.chain.nominal(sample.n), lengths.setdefault((task, name), sample.n)
            if name not in references:
                why = "is no example of its task"
            elif sample.answers not in (None, references[name]):
                why = "has other references than its task"
            elif sample.n != n:
                why = f"has {sample.n} tokens, and {n} in another cell"
            elif sample.nominal != budget:
                why = f"was asked to keep {sample.nominal} tokens, and not {budget}"
            else:
                continue
            raise Contradiction(
                f"the samples of cell {cell.id} ({cell.label} on {cell.column}) are another cell's: {name} {why}"
            )


def need_texts(tasks: Iterable[str], model: str, inputs: Inputs) -> None:
    """Raise MissingData if the texts of one of ``tasks`` (dataset/task) are not here."""
    names = sorted(tasks)
    if not names:
        return
    cfg = config.read([f"model={model}", "method=full", "dataset=tiny"])
    tokenizer = inputs.tokenizer(cfg.model, load.locate(cfg.model))
    for task in names:
        dataset, _, name = task.partition("/")
        try:
            inputs.tasks(dataset, entries("dataset").get(dataset, {}), [name] if name else [], tokenizer)
        except MissingData:
            raise
        except UsageError:  # the texts are here, but the examples made from them differ
            continue


def verified(verify: Callable[[Verification], None], without: Iterable[str]) -> int:
    """Let ``verify`` add its tables, print what came out, and return the exit status as ``close`` does."""
    findings = Verification()
    verify(findings)
    return findings.close(without)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add --verify and --without."""
    parser.add_argument("--verify", action="store_true", help="make it again from samples and compare")
    add_without(parser)


def add_without(parser: argparse.ArgumentParser) -> None:
    """Add --without."""
    parser.add_argument(
        "--without",
        type=_kinds,
        default=(),
        metavar="data,model",
        help="what may be missing: tables that need it are named as not verified, with status 0",
    )


def _kinds(text: str) -> tuple[str, ...]:
    """Return the kinds in a list separated by commas. The list may be empty."""
    kinds = tuple(filter(None, text.split(",")))
    wrong = [kind for kind in kinds if kind not in KINDS]
    if wrong:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is not one of {', '.join(KINDS)}")
    return kinds

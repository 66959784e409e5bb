"""The ledger of claims: verdicts with their evidence as plain data, its files, and its texts and tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill, shorten
from typing import Any

from kvbench.base.errors import UsageError
from kvbench.base.files import write_json
from kvbench.base.formatting import format_number, with_interval
from kvbench.papers.claims import claims
from kvbench.papers.claims.claims import (
    CONTRADICTED,
    DIVERGENCE,
    FRAGILE,
    IN_LINE,
    LIKELIHOOD,
    MEASURES,
    MIXED,
    NO_DIFFERENCE,
    NOT_DECIDABLE,
    NOT_REPRODUCED,
    NOTHING,
    POINTS,
    SUPPORTED,
    UNDECIDED,
)
from kvbench.papers.spec import catalogue, stand_ins
from kvbench.report.table import WIDTH, Table
from kvbench.tasks.metrics import stats

FOLDER = "claims"
"""The folder below a results folder with a ledger for each model."""
OWN = "own"
"""The folder below a results folder for files of the user's own runs. git ignores it."""
STATEMENT_WIDTH = 46
"""The most characters in a line of the column with the papers' statements."""
MARKS = {
    SUPPORTED: "✓",
    CONTRADICTED: "✗",
    IN_LINE: "≈",
    NOT_REPRODUCED: "≠",
    NO_DIFFERENCE: "=",
    MIXED: "±",
    FRAGILE: "~",
    UNDECIDED: "?",
}
"""The sign of each verdict. Other verdicts are marked by a dash."""
NAMES = {POINTS: "points", LIKELIHOOD: "likelihood", DIVERGENCE: "divergence"}
"""The measures' names beside their numbers."""
BY = {POINTS: "points", LIKELIHOOD: "the likelihood of the answer", DIVERGENCE: "divergence"}
"""The measures' names behind a verdict that they decided."""
UNITS = {POINTS: "", LIKELIHOOD: " nats", DIVERGENCE: " %"}
"""The measures' units behind their numbers."""

ABOUT_NATS = (
    "Likelihood of the answer: how many nats a token the reference answer loses against the full cache, one nat at "
    "most. The number is the other method's loss minus that of the claim's method. Only tasks with short references "
    "count. Divergence: from the full cache's next-token distribution on its own greedy answer. The number is the "
    "difference of two divergences over their sum, in per cent. Above 0 the claim's method is the better one. Where "
    "nothing is to be lost, the margins are those of a gain that is next to nothing: "
    f"{NOTHING[LIKELIHOOD]:g} nats, and {100 * NOTHING[DIVERGENCE]:g} % of the divergence. No method is compared with "
    "the full cache by divergence. Papers claim scores, so only points find a claim "
    f"{SUPPORTED} or {CONTRADICTED}. The other two measures find it {IN_LINE} or {NOT_REPRODUCED}. Each has a third of "
    "the level, and they answer different questions."
)

Measure = dict[str, Any]
"""A claim's verdict by one measure: the fields of ``claims.Verdict``, rounded.

Numbers other than p-values and counts are in hundredths. ``n`` and ``tasks`` hold by task the number of examples and
the mean difference, ``settings`` and ``settings_ci`` by pair the mean difference and its interval.
"""
Record = dict[str, Any]
"""A claim (the fields of ``claims.Claim``) with its verdict and side by the measure ``decided_by``, '' if none decides.

``ran`` has the labels of the methods that ran, ``cells`` the ids of the compared cells, ``reason`` why data are
missing, and ``measures`` the verdict by each measure.
"""
Ledger = dict[str, Any]
"""The claims of one or more papers with their ``verdicts`` on one ``model``, in JSON's form.

``stand_in``: whether the model is a substitute for the papers' models. ``level``: the accepted chance of any wrong
verdict. ``tested``: the number of claims that a score can decide. ``notes``: sentences on the data that were read.
"""


def ledger_path(model: str, results: Path, papers: Sequence[str]) -> Path:
    """Return the path of a model's ledger below a results folder.

    The file is named after the model. The file of a ledger of only some papers has their names behind the model's.
    """
    # a ledger of some papers is corrected for fewer claims, so it must not replace the ledger of all
    suffix = f".{'-'.join(papers)}" if len(papers) != len(claims.papers_with_claims()) else ""
    return results / FOLDER / f"{model.replace('/', '--')}{suffix}.json"


def own_path(model: str, results: Path, papers: Sequence[str]) -> Path:
    """Return the path of a ledger that a user's own run of ``kvbench claims`` writes, apart from published ledgers."""
    return ledger_path(model, results / OWN, papers)


def write_ledger(content: Ledger, path: Path) -> Path:
    """Write a ledger as JSON to ``path`` and return the path. Folders that are missing are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, content)
    return path


def read_ledgers(results: Path) -> list[Ledger]:
    """Read the ledgers below a results folder, the tiny model's last. Raises UsageError for a damaged ledger."""
    # False sorts before True, so the tiny model comes last
    paths = sorted((results / FOLDER).glob("*.json"), key=lambda path: (path.stem == stand_ins.MODEL, path.name))
    return [read_ledger(path) for path in paths]


def read_ledger(path: Path) -> Ledger:
    """Read the ledger of a file. Raises UsageError for a damaged one."""
    try:
        content: Ledger = json.loads(path.read_text(encoding="utf-8"))
        # showing the ledger raises KeyError or TypeError here if a field is missing or has another form
        compare_ledgers([content])
        write_notes(content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} cannot be read ({error}); run kvbench claims --measure again") from None
    return content


def read_with_own(results: Path) -> list[Ledger]:
    """Read the ledgers below a results folder, the tiny model's last.

    A user's own ledger replaces the committed one of the same model and claims.

    Raises UsageError for a damaged ledger.
    """
    # ``read_ledgers`` looks for FOLDER below the folder that it is given; a user's own ledgers come first and stay
    chosen: dict[tuple[str, str], Ledger] = {}
    for content in read_ledgers(results / OWN) + read_ledgers(results):
        ids = "\n".join(record["id"] for record in content["verdicts"])
        chosen.setdefault((content["model"], ids), content)
    return sorted(chosen.values(), key=lambda content: (content["model"] == stand_ins.MODEL, content["model"]))


def find_stored(model: str, results: Path, papers: Sequence[str]) -> Path | None:
    """Return the path of a model's stored ledger that has the claims of ``papers``; None if there is none.

    A user's own ledger comes before the committed one, and one of these papers alone before one of all papers.
    """
    every = claims.papers_with_claims()
    for path in (own_path(model, results, papers), own_path(model, results, every), ledger_path(model, results, every)):
        if path.exists():
            return path
    return None


def any_measured(content: Ledger) -> bool:
    """Return True if at least one pair of answers was measured for any claim of a ledger."""
    for record in content["verdicts"]:
        if any(sum(numbers["n"].values()) for numbers in record["measures"].values()):
            return True
    return False


def tally_verdicts(records: Sequence[Record]) -> list[str]:
    """Return, for each measure, how many claims have each verdict: ``points: 9 supported · 4 contradicted``."""
    lines = []
    for measure in MEASURES:
        words = [record["measures"][measure]["verdict"] for record in records if measure in record["measures"]]
        counts = []
        for word in claims.VERDICTS:
            # the measure's own two words are named even with a count of 0, since readers look for them
            if word in words or word in claims.SIDES[measure]:
                counts.append(f"{words.count(word)} {word}")
        if words:
            lines.append(f"{measure}: {' · '.join(counts)}")
    return lines


def write_brief(content: Ledger) -> str:
    """Return a ledger as text for a terminal: the tallies of verdicts, the model, then two parts for each claim.

    The first part is a line with the claim's difference and verdict. The second is the tested statement below it.
    The ledger must have a claim.
    """
    records = content["verdicts"]
    lines = tally_verdicts(records)
    deciding = [_choose_measure(record) for record in records]
    counts = [sum(numbers["n"].values()) for _, numbers in deciding]
    most = max(counts)
    # a maximum of 0 means that nothing was measured, which the line of each claim says
    if 0 < most < stats.FEWEST:
        lines.append(f"! n = {most} at most. Preview only: so few examples decide nothing.")
    lines.append(fill(f"{_describe_model(content)}.", WIDTH, break_on_hyphens=False))
    differences = [_format_difference(measure, numbers["mean"], numbers["ci"]) for measure, numbers in deciding]
    id_width = max(len(record["id"]) for record in records)
    difference_width = max(map(len, differences))
    count_width = len(str(most))
    paper = ""
    for record, difference, count in zip(records, differences, counts, strict=True):
        if record["paper"] != paper:
            paper = record["paper"]
            lines += ["", catalogue.read_paper(paper).called]
        start = f"{MARKS.get(record['verdict'], '—')} {record['id']:{id_width}}  "
        if difference:
            text = f"{difference:{difference_width}}  n {count:<{count_width}}  {_describe_briefly(record, count)}"
        elif record["reason"]:
            # a reason can name twenty datasets, so it is cut; --explain prints it whole
            text = shorten(f"{record['verdict']}: {record['reason']}", WIDTH - len(start), placeholder=" …")
        else:
            text = record["verdict"]
        lines.append(start + text)
        lines.append(fill(record["tested"], WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(lines) + "\n"


def _choose_measure(record: Record) -> tuple[str, Measure]:
    if record["decided_by"]:
        return record["decided_by"], record["measures"][record["decided_by"]]
    # measures stand in the order in which they are tried, so the first one with the claim's verdict gave it
    for measure, numbers in record["measures"].items():
        if numbers["verdict"] == record["verdict"]:
            return measure, numbers
    # every verdict comes from a measure, so only a file edited by hand can lead here
    return next(iter(record["measures"].items()))


def _describe_briefly(record: Record, count: int) -> str:
    text = record["verdict"]
    if record["decided_by"] and len(record["measures"]) > 1:
        text += f" by {record['decided_by']}"
    if record["side"]:
        text += f", {record['side']} in the mean"
    _, numbers = _choose_measure(record)
    needs = numbers["needs"]
    if needs is not None and needs > count:
        text += f", about {needs:,} would decide"
    return text


def compare_ledgers(ledgers: Sequence[Ledger]) -> Table:
    """Return a table with a row for each claim and a column for each ledger, with the verdict and its numbers.

    The first column has the claim's words, from the first ledger that has the claim. A ledger without it has a dash.
    """
    records_by_ledger: list[dict[str, Record]] = []
    for content in ledgers:
        records_by_ledger.append({record["id"]: record for record in content["verdicts"]})
    # go in reverse, so that the first ledger's record of a claim replaces later ledgers' records
    first_records: dict[str, Record] = {}
    for records in reversed(records_by_ledger):
        first_records.update(records)
    rows = []
    for first in first_records.values():
        words = f"{MARKS.get(first['verdict'], '—')} {first['id']}"
        for text in (f"“{first['quote']}” ({first['paper']}, {first['where']})", f"Tested: {first['tested']}"):
            words += "\n" + fill(text, STATEMENT_WIDTH, break_on_hyphens=False)
        cells = [words]
        for records in records_by_ledger:
            record = records.get(first["id"])
            if record is None:
                cells.append("—")
            else:
                cells.append(f"{describe_verdict(record)}\n{describe_evidence(record)}")
        rows.append(tuple(cells))
    headers = ["what the paper says, and what is tested", *map(_format_header, ledgers)]
    return Table(tuple(headers), tuple(rows), left=len(headers), ruled=True, breaks=True)


def _format_header(content: Ledger) -> str:
    header = content["model"]
    if content["stand_in"]:
        header += ", a substitute model"
    # the lines of a ledger do not name the measure if all of its numbers are points
    if not _has_measures_beside_points(content["verdicts"]):
        header += ": points"
    return header


def _has_measures_beside_points(records: Sequence[Record]) -> bool:
    return any(len(record["measures"]) > 1 for record in records)


def describe_verdict(record: Record) -> str:
    """Return a claim's verdict in words, with the side that the mean takes and the measure that decided it, if any."""
    text = _name_verdict(record)
    if record["decided_by"] and len(record["measures"]) > 1:
        text += f" by {BY[record['decided_by']]}"
    return text


def _name_verdict(record: Record | Measure) -> str:
    if record["side"]:
        return f"{record['verdict']} ({record['side']} in the mean)"
    return record["verdict"]


def describe_evidence(record: Record) -> str:
    """Return the numbers behind a claim's verdict as lines, a block for each measure; a dash if none was measured."""
    lines = []
    for measure, numbers in record["measures"].items():
        if numbers["mean"] is not None:
            lines += _describe_measure(record, measure, numbers)
    # minus signs are as wide as plus signs, unlike hyphens
    return "\n".join(lines).replace("-", "−") or "—"


def _choose_scale(measure: str) -> tuple[int, int]:
    if measure == LIKELIHOOD:
        return 100, 3
    return 1, 1


def _find_margin(record: Record, measure: str) -> float:
    if record["test"] == "better":
        return 0.0
    if measure == POINTS:
        return record["margin"]
    return 100 * NOTHING[measure]


def _format_difference(measure: str, mean: float | None, ci: Sequence[float] | None) -> str:
    """Return a mean difference and its interval as text; '' without a difference."""
    if mean is None:
        return ""
    scale, digits = _choose_scale(measure)
    if ci is not None:
        # a single example has no interval
        ci = [bound / scale for bound in ci]
    text = with_interval(mean / scale, ci, digits, sign=True, mark=UNITS[measure], gap=" ")
    # minus signs are as wide as plus signs, unlike hyphens
    return text.replace("-", "−")


def _describe_measure(record: Record, measure: str, numbers: Measure) -> list[str]:
    assert numbers["mean"] is not None  # callers describe only what was measured
    scale, digits = _choose_scale(measure)
    margin = _find_margin(record, measure)
    difference = _format_difference(measure, numbers["mean"], numbers["ci"])
    if margin:
        difference += f", margin {margin / scale:g}{UNITS[measure]}"
    if len(record["measures"]) > 1:
        difference = f"{NAMES[measure]}: {_name_verdict(numbers)}\n{difference}"
    # the mean of a task must exceed the bound to be for the claim
    lines = [difference, _describe_sample(numbers), _count_tasks(list(numbers["tasks"].values()), -margin)]
    if len(numbers["settings"]) > 1:
        for mean, ci in zip(numbers["settings"], numbers["settings_ci"], strict=True):
            lines.append(f"setting {_format_difference(measure, mean, ci)}")
    if numbers["needs"] is not None:
        decide = "could" if numbers["verdict"] == NOT_DECIDABLE else "would"
        lines.append(f"about {numbers['needs']:,} pairs {decide} decide")
    # on the tiny model the rows also ran with the paper's windows, unless its prompts are too short for them
    if numbers["elsewhere"] is not None:
        lines.append(f"the paper's windows {format_number(numbers['elsewhere'] / scale, digits, sign=True)}")
    elif numbers["why_not"]:
        lines.append("the paper's windows do not fit")
    return lines


def _describe_sample(numbers: Measure) -> str:
    # tasks can have different numbers of examples
    sizes = numbers["n"].values()
    fewest, most = min(sizes), max(sizes)
    n = str(fewest) if fewest == most else f"{fewest} to {most}"
    task_word = "tasks" if len(sizes) > 1 else "task"
    # only a claimed gain has a p-value for no difference
    p_values = [p for p in (numbers["p_for"], numbers["p_against"], numbers["p_same"]) if p is not None]
    return f"n {n} in {len(sizes)} {task_word}, p {min(p_values):.2g}"


def _count_tasks(task_means: Sequence[float], least: float) -> str:
    # a task is on neither side if its mean is the bound itself, up to rounding
    tasks_for = sum(task_mean > least + claims.SAME for task_mean in task_means)
    tasks_against = sum(task_mean < least - claims.SAME for task_mean in task_means)
    tasks_even = len(task_means) - tasks_for - tasks_against
    return f"tasks for {tasks_for}, even {tasks_even}, against {tasks_against}"


def _describe_model(content: Ledger) -> str:
    note = str(content["model"])
    if content["dtype"]:
        note += f", {content['dtype']}"
    if not content["stand_in"]:
        return note
    if content["model"] == stand_ins.MODEL:
        read_here = "tasks and budgets are its own, so that nothing here is said about a paper"
    else:
        read_here = "it reads the papers' data under their budgets and windows"
    return f"{note}, a substitute for the papers' models: {read_here}"


def write_notes(content: Ledger) -> list[str]:
    """Return notes for readers that explain a ledger's numbers and verdicts, then the ledger's own notes."""
    tested = content["tested"]
    # the corrected p-value that a verdict needs: a third of the level for each hypothesis, shared among the measures
    measure_count = max((len(record["measures"]) for record in content["verdicts"]), default=1)
    p_needed = content["level"] / 3 / measure_count
    lines = [
        f"{_describe_model(content)}.",
        "Differences are paired, in points of 100, pooled over tasks, [95 % interval]. p is corrected for the number "
        f"of claims (signs of the differences are flipped at random; Holm). A verdict needs a p of {p_needed:.2g} or "
        f"less. The chance of one or more wrong verdicts on the {tested} claims, by any measure, is then at most "
        f"{100 * content['level']:g} %. It is higher if verdicts decided how long to measure.",
        f"{NO_DIFFERENCE}: a claimed gain is shown to be less than a point, 0.01 nats a token, or 10 % of the "
        f"divergence. {MIXED}: decided in the mean, but a task or setting of {stats.FEWEST} pairs or more is told to "
        f"have the other sign. {FRAGILE}: with the paper's windows unscaled the mean has the other sign. {UNDECIDED}: "
        f"the line says how many pairs would decide the claim with a chance of {claims.POWER:.0%}, if the difference "
        f"stayed as it is. {NOT_DECIDABLE}: there are too few pairs. Even the clearest possible result would not "
        "support the claim; the line says how many pairs could decide it. A claim of losing nothing counts one lost "
        "pair more than was seen. For losses in nats, a nat counts as 100 points, and no pair counts more than 100. "
        "Tasks on which the full cache fails are left out. The same examples decide this, so the tasks that are left "
        "favour the full cache slightly.",
    ]
    if _has_measures_beside_points(content["verdicts"]):
        lines.append(ABOUT_NATS)
    return lines + content["notes"]


def list_reasons(content: Ledger) -> list[str]:
    """Return a sentence for each reason for a missing verdict or missing data, with the claims that it concerns."""
    ids_by_reason: dict[str, list[str]] = {}
    for record in content["verdicts"]:
        if record["reason"]:
            ids_by_reason.setdefault(record["reason"], []).append(record["id"])
    return [f"{content['model']}, {', '.join(ids)}: {reason}." for reason, ids in ids_by_reason.items()]

"""Divergences that other programs print: logs of ``llama-perplexity --kl-divergence``, and REFRACT's JSON.

They are shown as those programs say them. kvbench has seen neither the tokens nor the distributions behind them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvbench.base.errors import UsageError
from kvbench.base.files import format_line, parse_finite_json, write_json
from kvbench.base.formatting import format_number, format_significant
from kvbench.base.version import version
from kvbench.plan.cells import SCHEMA
from kvbench.report.table import Table
from kvbench.store.cell import hash_identity
from kvbench.store.store import ResultStore
from kvbench.studies.imports.stored import KIND

LLAMA, REFRACT = "llama-perplexity", "REFRACT"
STATISTICS = "====== KL divergence statistics ======"
"""The line of llama-perplexity's log under which the divergences stand."""
REFRACT_SCHEMA = "refract.report."
"""The start of the schema's name in REFRACT's reports, by which they are recognised."""
ENDINGS = (".log", ".txt", ".out", ".json")
"""The endings of files whose content is searched for divergences."""
# "Mean    KLD:   0.001241 ±   0.000030", "99.9%   KLD:   0.072012", "Same top p: 98.561 ± 0.122 %"
_NUMBER = r"(-?\d+(?:\.\d+)?)"
_LINE = re.compile(rf"^\s*(.+?)\s*:\s*{_NUMBER}\s*%?\s*(?:±\s*{_NUMBER}\s*%?)?\s*$", re.MULTILINE)
"""A line of statistics: (name, value, standard error, or '' without one)."""
_WINDOWS = re.compile(r"computing over (\d+) chunks, n_ctx=(\d+)")
"""The line that states the number of windows, and the tokens of a window."""
_TYPE_K = re.compile(r"(?:--cache-type-k|-ctk)[ =](\S+)")
_TYPE_V = re.compile(r"(?:--cache-type-v|-ctv)[ =](\S+)")
NORMAL_95 = 1.96
"""A 95 % interval reaches this many standard errors to each side of the mean."""


@dataclass(frozen=True, kw_only=True)
class ImportedDistance:
    """The divergence of one cache from the reference of the program that measured it, in nats a token.

    A field is None if the program does not state it.

    path: the file that was read.
    program: LLAMA or REFRACT.
    label: the row as the file names it.
    kl_mean: the mean divergence.
    error: the standard error of ``kl_mean``.
    percentiles: divergences by the percentile's name, such as ``99.9%``.
    top1: the share of equal first choices in per cent.
    ppl: the perplexity.
    ppl_ratio: the perplexity over the reference's.
    chunks: the number of windows.
    context: the tokens of a window.
    model: the model as the file names it; '' if it names none.
    sha256: the digest of the file's text.
    """

    path: str
    program: str
    label: str
    kl_mean: float
    error: float | None = None
    percentiles: Mapping[str, float] | None = None
    top1: float | None = None
    ppl: float | None = None
    ppl_ratio: float | None = None
    chunks: int | None = None
    context: int | None = None
    model: str = ""
    sha256: str = ""


def find_files(path: Path) -> list[Path]:
    """Return the files that hold divergences: ``path`` itself, or those of a folder; [] if there are none."""
    if path.is_file():
        paths = [path]
    elif path.is_dir():
        paths = sorted(entry for entry in path.iterdir() if entry.is_file())
    else:
        return []
    return [entry for entry in paths if entry.suffix in ENDINGS and _find_program(_read_text(entry))]


def _read_text(path: Path) -> str:
    """Return the text of a file; bytes that are no UTF-8 are replaced. Raises UsageError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def _find_program(content: str) -> str:
    """Return the program that wrote a file's text, LLAMA or REFRACT; '' for any other text."""
    if STATISTICS in content:
        return LLAMA
    if f'"{REFRACT_SCHEMA}' in content and content.lstrip().startswith("{"):
        return REFRACT
    return ""


def read_divergence(path: Path) -> ImportedDistance:
    """Return the divergence in a file that ``find_files`` returned. Raises UsageError if the file is damaged."""
    content = _read_text(path)
    digest = hashlib.sha256(content.encode()).hexdigest()
    if _find_program(content) == REFRACT:
        return _read_refract(path, content, digest)
    return _read_llama_log(path, content, digest)


def _read_llama_log(path: Path, content: str, digest: str) -> ImportedDistance:
    """Return the divergence that a log of llama-perplexity states.

    Its statistics stand at the end, one ``name: number`` a line. ``content`` is the log's text, ``digest`` its SHA-256.
    """
    values, errors = _read_statistics(content)
    if "Mean KLD" not in values:
        raise UsageError(f"{path}: there is no line 'Mean KLD' below {STATISTICS!r}; the program may have been stopped")
    percentiles = {}
    for name, value in values.items():
        if name.endswith(" KLD") and name != "Mean KLD":
            percentiles[name.removesuffix(" KLD")] = value
    chunks, context = None, None
    windows = _WINDOWS.search(content)
    if windows is not None:
        chunks, context = int(windows.group(1)), int(windows.group(2))
    return ImportedDistance(
        path=str(path),
        program=LLAMA,
        # if the shell echoed the command into the log, its cache types name the row; otherwise the file's name does
        label=_find_cache_types(content) or path.stem,
        kl_mean=values["Mean KLD"],
        error=errors.get("Mean KLD"),
        percentiles=percentiles,
        top1=values.get("Same top p"),
        ppl=values.get("Mean PPL(Q)"),
        ppl_ratio=values.get("Mean PPL(Q)/PPL(base)"),
        chunks=chunks,
        context=context,
        sha256=digest,
    )


def _read_statistics(content: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return (values, standard errors) of the statistics in a log of llama-perplexity, by name.

    A statistic without a standard error is missing among the errors.
    """
    # the statistics stand below the log's first heading, such as ====== Perplexity statistics ======
    statistics_text = content[content.index("====== ") :]
    values: dict[str, float] = {}
    errors: dict[str, float] = {}
    for padded_name, value, error in _LINE.findall(statistics_text):
        name = " ".join(padded_name.split())
        values[name] = float(value)
        # if a name is repeated, its last line counts, with its error or without
        errors.pop(name, None)
        if error:
            errors[name] = float(error)
    return values, errors


def _find_cache_types(content: str) -> str:
    """Return the types of keys and values that llama.cpp's options in a log name, such as ``q8_0/f16``; '' for none."""
    k, v = _TYPE_K.search(content), _TYPE_V.search(content)
    if k is None and v is None:
        return ""
    # a type that is not named is llama.cpp's default
    types = [match.group(1) if match else "f16" for match in (k, v)]
    # keys and values of one type are named once: q8_0 instead of q8_0/q8_0
    return "/".join(dict.fromkeys(types))


def _read_refract(path: Path, content: str, digest: str) -> ImportedDistance:
    """Return the divergence that a report of REFRACT states. ``content`` is its JSON, ``digest`` the SHA-256."""
    try:
        report: dict[str, Any] = parse_finite_json(content)
        axis = report["axes"]["kld"]
        mean = float(axis["mean_kld"])
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no whole report of REFRACT: {error!r} in axes.kld.mean_kld") from None
    return ImportedDistance(
        path=str(path),
        program=REFRACT,
        label=str(report.get("candidate", path.stem)),
        kl_mean=mean,
        top1=axis.get("same_topp_pct"),
        ppl=axis.get("ppl"),
        chunks=axis.get("chunks"),
        context=axis.get("ctx"),
        model=str(report.get("model", "")),
        sha256=digest,
    )


def build_table(distances: Sequence[ImportedDistance]) -> Table:
    """Return the table of imported divergences."""
    heads = ("row", "program", "KL, nats a token", "99.9 %", "same first choice, %", "perplexity", "of the reference's")
    rows = []
    for distance in distances:
        kl = format_significant(distance.kl_mean)
        if distance.error is not None:
            kl += f" ± {format_significant(distance.error, 2)}"
        highest = None
        if distance.percentiles is not None:
            highest = distance.percentiles.get("99.9%")
        rows.append(
            (
                distance.label,
                distance.program,
                kl,
                format_significant(highest),
                format_number(distance.top1, 2),
                format_number(distance.ppl, 4),
                format_number(distance.ppl_ratio, 4),
            )
        )
    return Table(heads, tuple(rows), left=2)


NOTE = (
    "Imported: the numbers are the programs' own, each against its own reference cache, on tokens that kvbench has not "
    "seen. ±: standard error of the mean as the program says it."
)


def store_cells(store: ResultStore, distances: Sequence[ImportedDistance], model: str) -> list[str]:
    """Store a result for each divergence, marked as imported, for figures and reports. Return the results' ids.

    model: the name of the model that was measured.
    """
    store.check()
    return [_store_cell(store, distance, model) for distance in distances]


def _store_cell(store: ResultStore, distance: ImportedDistance, model: str) -> str:
    identity = {
        "schema": SCHEMA,
        "kind": KIND,
        "model": model,
        "program": distance.program,
        "label": distance.label,
        "sha256": distance.sha256,
    }
    cell = hash_identity(identity)
    folder = store.folder(cell)
    folder.mkdir(parents=True, exist_ok=True)
    # the windows behind a file's numbers are not known, so the result has one sample for all of them
    sample: dict[str, object] = {"id": "00000", "prediction": "", "score": distance.ppl, "answers": []}
    (folder / "samples-0.jsonl").write_text(format_line(sample), encoding="utf-8")
    store.write_metrics(cell, _summarise_distance(distance))
    # write the record last, since a result exists once it has a record
    record = {
        "id": cell,
        "kind": KIND,
        "label": f"{distance.program} {distance.label}",
        "column": f"{KIND}/divergence",
        "of": 1,
        "identity": identity,
        "provenance": [{"kvbench": version(), "file": distance.path, "layout": distance.program, "model": model}],
    }
    write_json(folder / "cell.json", record)
    return cell


def _summarise_distance(distance: ImportedDistance) -> dict[str, object]:
    """Return a divergence in the form in which the store has summaries, as one sample."""
    ci = None
    if distance.error is not None:
        half_width = NORMAL_95 * distance.error
        ci = [distance.kl_mean - half_width, distance.kl_mean + half_width]
    divergence = {
        "kl_mean": distance.kl_mean,
        "ci": ci,
        "top1": distance.top1,
        "ppl_ratio": distance.ppl_ratio,
        "floor": None,
        "at_floor": None,
    }
    return {
        "status": KIND,
        "metric": "perplexity",
        "n": 1,
        "of": 1,
        "unscored": int(distance.ppl is None),
        "score": distance.ppl,
        "ci": None,
        "fidelity": {"reference": divergence},
    }


def make_records(distances: Sequence[ImportedDistance]) -> list[dict[str, object]]:
    """Return the divergences as ``--json`` prints them."""
    return [asdict(distance) | {"imported": True} for distance in distances]

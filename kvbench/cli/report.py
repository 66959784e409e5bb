"""report: everything on one HTML page that needs no network."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from kvbench.errors import KvbenchError, UsageError

EXAMPLES = """examples:
  python -m kvbench report samples=1 output=report.html
  python -m kvbench report samples=0
  python -m kvbench report results=results method=full,snapkv,h2o kv_ratio=0.125 samples=2

Tables are those of `table`, from results/tables/*.samples.jsonl.gz where they are committed and else from the store;
claims are what `claims` last wrote; figures are those of results/figures. samples= examples of each task are shown with
every method's answer and the tokens that it kept: by default of full, streamingllm, h2o, snapkv and snapkv+think on the
tiny suite; method=, dataset=, kv_ratio=, ... choose others, as in `run`. They are measured where they are missing."""
METHODS = ("method=full,streamingllm,h2o,snapkv,snapkv+think", "kv_ratio=0.125")


def arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="output=, samples=, results=, and run's keys")


def main(args: argparse.Namespace) -> int:
    """Write the page and print its path."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if any("=" not in o for o in args.overrides):
        raise UsageError("report takes key=value only, as in output=report.html samples=1")
    given = dict(o.partition("=")[::2] for o in args.overrides)
    output = Path(given.pop("output", "report.html"))
    count = given.pop("samples", "1")
    if not count.isdigit():
        raise UsageError(f"samples={count} is not possible: a whole number, 0 for none")
    results, model = given.get("results", "results"), given.get("model", "tiny")
    text = _page(Path(results), model, int(count), [f"{k}={v}" for k, v in given.items()], "method" in given)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise KvbenchError(f"output={output} could not be written ({error.strerror})") from None
    print(f"{output} ({len(text.encode()) / 2**20:.1f} MiB)")
    return 0


def _page(results: Path, model: str, count: int, overrides: list[str], chosen: bool) -> str:
    from kvbench import config, experiment
    from kvbench.cli.rewrite import rewrite
    from kvbench.html import page, samples, tables

    written = [o for o in overrides if not o.startswith("results=")]
    run = rewrite([*([] if chosen else METHODS), *written, f"results={results}", f"limit={max(1, count)}"]).runs[0]
    shown: list[dict[str, Any]] = []
    if count:
        shown = samples.collect(experiment.prepare(config.parse(config.compose_config(run))), count)
    sections = [
        ("tables", "Tables", page.tables(tables.sections(model, str(results), results / "tables"))),
        ("figures", "Figures", page.figures(results / "figures")),
        ("claims", "Claims", _claims(results)),
        ("audit", "Audit", _audit()),
        ("samples", "Examples", page.browser(len(shown))),
        ("runs", "Runs", _runs(results)),
    ]
    return page.build("kvbench", sections, shown)


def _claims(results: Path) -> str:
    """The ledger that `claims` wrote last."""
    from kvbench.html import page

    path = results / "claims.json"
    if not path.exists():
        return "<p>None yet: python -m kvbench claims.</p>"
    try:
        verdicts = json.loads(path.read_text(encoding="utf-8"))["verdicts"]
        body = [
            (
                v["claim"]["id"],
                v["claim"]["says"],
                v["claim"]["where"],
                v["verdict"],
                "—" if v["mean"] is None else f"{v['mean']:+.1f}",
                "—" if not v["ci"] else f"[{v['ci'][0]:.1f}, {v['ci'][1]:.1f}]",
                v["n"],
                v["reason"],
            )
            for v in verdicts
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} cannot be read ({error}); run python -m kvbench claims again") from None
    head = ("claim", "what the paper says", "where", "verdict", "difference", "interval", "n", "why")
    return page.rows(head, body, [f"verdict-{v['verdict'].split()[0]}" for v in verdicts])


def _audit() -> str:
    from kvbench.html import page
    from kvbench.papers.audit import audit

    head = ("paper", "table", "row", "cell", "printed", "recomputed", "weight", "why")
    return page.rows(
        head,
        [(f.paper, f.table, f.row, f.cell, f.printed, f.recomputed, f.weight, f.why) for f in audit()],
    )


def _runs(results: Path) -> str:
    """Every cell of the store with what it was measured with."""
    from kvbench.html import page
    from kvbench.store import ResultStore

    store = ResultStore(results)
    body = []
    for cell in store.cells():
        record = store.cell(cell) or {}
        facts = (record.get("provenance") or [{}])[-1]
        kept = ("device", "torch", "transformers", "dtype", "commit")
        body.append(
            (
                record.get("label", ""),
                record.get("column", ""),
                len(store.samples(cell)),
                *(facts.get(k) for k in kept),
                cell,
            )
        )
    head = ("method", "dataset", "n", "device", "torch", "transformers", "dtype", "commit", "cell")
    return page.rows(head, body) if body else "<p>No cells in the store.</p>"

"""list: what there is to run, read from the same YAML files that run reads."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import Any

from kvbench.base.conf import conf_dir
from kvbench.base.errors import UsageError, say, unknown
from kvbench.plan import presets

KINDS = ("methods", "datasets", "models", "metrics", "presets", "figures", "tables", "runs", "kvpress")
ASKED = ("tables", "runs", "kvpress")
"""The kinds that are listed only if they are named."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument(
        "kind",
        nargs="*",
        help=f"{', '.join(KINDS)} (default: all but {' and '.join(ASKED)}); runs take results=, status=, model=, "
        "method=, dataset=",
    )
    parser.add_argument("--results", help="folder of results, for runs, tables (default results)")


def main(args: argparse.Namespace) -> int:
    """Print the lists asked for."""
    from kvbench.cli.runs import table
    from kvbench.report.listing import FILTERS, given, rows
    from kvbench.store.store import ResultStore

    args.filters = given([k for k in args.kind if "=" in k], ("results", *FILTERS))
    named = args.filters.pop("results", args.results)
    kinds = [k for k in args.kind if "=" not in k] or [k for k in KINDS if k not in ASKED]
    for kind in kinds:
        if kind not in KINDS:
            raise unknown("kind of list", kind, KINDS)
    if args.filters and "runs" not in kinds:
        raise UsageError(f"{next(iter(args.filters))}= chooses among runs: python -m kvbench list runs ...")
    folder = Path(named or "results").expanduser()
    cells = []
    if "runs" in kinds:
        store = ResultStore(folder)
        if named is not None:
            store.check_there()
        cells = rows(store, args.filters)
    lists: dict[str, list[Any]] = {
        kind: [cell.json() for cell in cells] if kind == "runs" else _items(kind, folder) for kind in kinds
    }
    if args.json:
        print(json.dumps(lists, indent=1, ensure_ascii=False))
        return 0
    for kind, items in lists.items():
        if kind == "runs":
            chosen = " ".join(f"{k}={v}" for k, v in args.filters.items())
            none = f"no runs in {folder}{f' with {chosen}' if chosen else ' yet'}\n"
            print(table(cells, store) if cells else none, end="")
            continue
        print(f"{kind}:")
        for item in items:
            knobs = " ".join(f"{k}={_short(v)}" for k, v in item.get("knobs", {}).items())
            for text in filter(None, (f"{item['id']:<18} {item['about']}", f"{'':18} {knobs}" if knobs else "")):
                print(fill(text, 100, initial_indent="  ", subsequent_indent=" " * 21, break_long_words=False))
            for s in item.get("settings", ()) if kind in args.kind else ():
                what = f"{s['key'].removeprefix('method.')}={_short(s['value'])}"
                text = f"{what:<30} {s['source']}" + (f" ({s['model']} only)" if s["model"] else "")
                print(fill(text, 100, initial_indent=" " * 6, subsequent_indent=" " * 37, break_long_words=False))
        if not items:
            print("  none")
    return 0


def _items(kind: str, results: Path) -> list[dict[str, Any]]:
    """Return the entries of one kind as plain data, each with ``id``, ``about`` and more."""
    if kind == "methods":
        return _methods()
    if kind == "tables":
        return _tables(results)
    if kind == "metrics":
        from kvbench.tasks.metrics import METRICS

        return [{"id": m.name, "about": m.description} for m in METRICS.values()]
    if kind == "presets":
        settings = {name: [asdict(s) for s in presets.settings(name)] for name in presets.available()}
        return [{"id": name, "about": presets.about(name), "settings": s} for name, s in settings.items()]
    if kind == "kvpress":
        from kvbench.methods.core.kvpress_package import listing as presses

        return presses()
    if kind == "figures":
        from kvbench.cli.plot import listing

        return listing()
    return _yaml(kind.removesuffix("s"))


def _yaml(group: str) -> list[dict[str, Any]]:
    from kvbench.base.conf import entry

    items = []
    for path in sorted((conf_dir() / group).glob("*.yaml")):
        try:
            knobs = entry(group, path)
        except UsageError as error:
            items.append({"id": path.stem, "about": f"cannot be used: {error}", "knobs": {}})
            continue
        first = path.read_text(encoding="utf-8").splitlines()[0]
        items.append({"id": path.stem, "about": first.lstrip("# "), "knobs": _knobs(knobs)})
    return items


def _methods() -> list[dict[str, Any]]:
    from kvbench.methods.core import registry

    for sentence in registry.broken_files().values():
        say(sentence)
    items = _yaml("method")
    for method in sorted(set(registry.available()) - {item["id"] for item in items}):
        try:
            about, knobs = registry.described(method)
            items.append({"id": method, "about": about, "knobs": knobs})
        except UsageError as error:
            items.append({"id": method, "about": f"cannot be used: {error}", "knobs": {}})
    return items


def _knobs(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in entry.items() if not k.startswith("_") and k != "name"}


def _tables(results: Path) -> list[dict[str, Any]]:
    from kvbench.papers.measured import coverage
    from kvbench.papers.spec import catalogue

    known = [coverage.read(results / folder) for folder in ("tiny", "tables")]
    items = []
    for entry in (e for p in catalogue.chosen("all") for e in p.entries):
        marked = [", ".join(f"{n} {kind}" for kind, n in entry.counts().items() if n)]
        ours = [lines[entry.name] for lines in known if entry.name in lines]
        for line in ours:
            found = ", ".join(f"{line[s]} {s}" for s in coverage.STATES if line[s] != "0")
            marked.append(f"{line['model']}: {found}")
        said = "; ".join(filter(None, marked))
        about = f"{entry.kind}: {entry.title}" + (f" ({said})" if said else "")
        here = [{"model": line["model"], **{s: int(line[s]) for s in coverage.STATES}} for line in ours]
        items.append({"about": about, **entry.as_json(), "ours": here})
    return items


def _short(value: Any) -> str:
    if isinstance(value, dict) and value:
        return "{" + ", ".join(f"{k}: {_short(v)}" for k, v in value.items()) + "}"
    return value if isinstance(value, str) else json.dumps(value)

"""list: what there is to run, read from the same YAML files that run reads."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from textwrap import fill
from typing import Any

from kvbench import presets
from kvbench.errors import unknown
from kvbench.methods import registry

EXAMPLES = """examples:
  python -m kvbench list
  python -m kvbench list methods --json
  python -m kvbench list presets            (every value with where it comes from)
  python -m kvbench list runs"""
KINDS = ("methods", "datasets", "models", "metrics", "presets", "runs")


def arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument(
        "kind", nargs="*", help=f"{', '.join(KINDS)} (default: all but runs), and results=FOLDER for runs"
    )
    parser.add_argument("--results", default="results", help="folder of results, for runs (default results)")
    parser.add_argument("--json", action="store_true", help="print as JSON on stdout")


def main(args: argparse.Namespace) -> int:
    """Print the lists asked for."""
    folders = [k.partition("=")[2] for k in args.kind if k.startswith("results=")]
    args.results = folders[-1] if folders else args.results
    kinds = [k for k in args.kind if "=" not in k] or [k for k in KINDS if k != "runs"]
    for kind in kinds:
        if kind not in KINDS:
            raise unknown("kind of list", kind, KINDS)
    found = {kind: _LISTS[kind](args) for kind in kinds}
    if args.json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
        return 0
    for kind, items in found.items():
        print(f"{kind}:")
        for item in items:
            knobs = " ".join(f"{k}={_short(v)}" for k, v in item.get("knobs", {}).items())
            for text in filter(None, (f"{item['id']:<18} {item['about']}", f"{'':18} {knobs}" if knobs else "")):
                print(fill(text, 100, initial_indent="  ", subsequent_indent=" " * 21, break_long_words=False))
            for line in item.get("settings", ()) if kind in args.kind else ():
                print(_setting(line))
        if not items:
            print("  none yet" if kind == "runs" else "  none")
    return 0


def _yaml(group: str) -> list[dict[str, Any]]:
    from kvbench.cli.rewrite import entries

    items = []
    for name, entry in entries(group).items():
        first = (registry.conf_dir() / group / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
        knobs = {k: v for k, v in entry.items() if not k.startswith("_") and k != "name"}
        items.append({"id": name, "about": first.lstrip("# "), "knobs": knobs})
    return items


def _metrics(args: argparse.Namespace) -> list[dict[str, Any]]:
    from kvbench.metrics import METRICS

    return [{"id": m.name, "about": m.description} for m in METRICS.values()]


def _presets(args: argparse.Namespace) -> list[dict[str, Any]]:
    from dataclasses import asdict

    return [
        {"id": name, "about": presets.about(name), "settings": [asdict(s) for s in presets.settings(name)]}
        for name in presets.available()
    ]


def _setting(setting: dict[str, Any]) -> str:
    """One value of a preset with its source, and the model that it is for."""
    what = f"{setting['key'].removeprefix('method.')}={_short(setting['value'])}"
    text = f"{what:<30} {setting['source']}" + (f" ({setting['model']} only)" if setting["model"] else "")
    return fill(text, 100, initial_indent=" " * 6, subsequent_indent=" " * 37, break_long_words=False)


def _runs(args: argparse.Namespace) -> list[dict[str, Any]]:
    from kvbench.store import ResultStore
    from kvbench.store_files import read_json

    store = ResultStore(Path(args.results))
    items = []
    for cell in store.cells():
        record = store.cell(cell) or {}
        metrics = read_json(store.folder(cell) / "metrics.json") or {}
        refused = store.refusal(cell)
        state = f"refused: {refused}" if refused else f"{metrics.get('n', len(store.samples(cell)))} examples"
        score = f", {metrics['metric']} {metrics['score']:.1f}" if metrics.get("score") is not None else ""
        origin = f" (imported, {record['identity']['model']})" if record.get("kind") == "imported" else ""
        about = f"{record.get('label')} on {record.get('column')}{origin}: {state}{score}"
        items.append({"id": cell, "about": about})
    return items


def _short(value: Any) -> str:
    if isinstance(value, dict) and value:
        return "{" + ", ".join(f"{k}: {_short(v)}" for k, v in value.items()) + "}"
    return "null" if value is None else json.dumps(value) if not isinstance(value, str) else value


_LISTS = {
    "methods": lambda args: _yaml("method"),
    "datasets": lambda args: _yaml("dataset"),
    "models": lambda args: _yaml("model"),
    "metrics": _metrics,
    "presets": _presets,
    "runs": _runs,
}

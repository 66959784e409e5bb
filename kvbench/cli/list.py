"""list: the methods, datasets, models and so on that can be run, read from the same YAML files that run reads."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import fill

from kvbench.base.conf import conf_dir
from kvbench.base.errors import UsageError, unknown
from kvbench.base.visible import say
from kvbench.cli.verbs import load_plugin, plugins
from kvbench.plan import presets

LISTINGS = tuple(plugins("list"))
"""The kinds that other rooms list."""
KINDS = ("methods", "datasets", "models", "metrics", "presets") + LISTINGS + ("runs", "kvpress")
ASKED = ("tables", "runs", "kvpress")
"""The kinds that are listed only if they are named."""


@dataclass(frozen=True)
class ListItem:
    """One entry of a list.

    record: the item as ``--json`` prints it.
    settings: the values that a preset sets.
    """

    id: str
    about: str
    record: Mapping[str, object]
    knobs: Mapping[str, object] = field(default_factory=dict)
    settings: Sequence[presets.Setting] = ()


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

    # kinds and filters may stand in any order
    keys = list(FILTERS)
    keys.append("results")
    filters = given([word for word in args.kind if "=" in word], keys)
    # results= and --results are the same, and a folder that is named must be there
    named_folder = filters.pop("results", args.results)
    named_kinds = [word for word in args.kind if "=" not in word]
    kinds = named_kinds or [kind for kind in KINDS if kind not in ASKED]
    for kind in kinds:
        if kind not in KINDS:
            raise unknown("list", kind, KINDS)
    if filters and "runs" not in kinds:
        raise UsageError(f"{next(iter(filters))}= chooses among runs: kvbench list runs ...")
    folder = Path(named_folder or "results").expanduser()
    store = ResultStore(folder)
    cells = []
    if "runs" in kinds:
        if named_folder is not None:
            store.check_there()
        cells = rows(store, filters)
    items_by_kind = {kind: _items(kind, folder) for kind in kinds if kind != "runs"}
    if args.json:
        records: dict[str, list[Mapping[str, object]]] = {}
        for kind in kinds:
            if kind == "runs":
                records[kind] = [cell.json() for cell in cells]
            else:
                records[kind] = [item.record for item in items_by_kind[kind]]
        print(json.dumps(records, indent=1, ensure_ascii=False))
        return 0
    # a kind that is named twice is listed once
    for kind in dict.fromkeys(kinds):
        if kind != "runs":
            # settings are many: they are printed where presets are named
            _print_items(kind, items_by_kind[kind], with_settings=kind in named_kinds)
        elif cells:
            print(table(cells, store), end="")
        else:
            chosen = " ".join(f"{key}={value}" for key, value in filters.items())
            print(f"no runs in {folder} {f'with {chosen}' if chosen else 'yet'}")
    return 0


def _print_items(kind: str, items: Sequence[ListItem], with_settings: bool) -> None:
    """Print a line for each item, with its knobs below it and, if asked for, a preset's settings."""
    print(f"{kind}:")
    for item in items:
        lines = [f"{item.id:<18} {item.about}"]
        if item.knobs:
            knobs = " ".join(f"{name}={_short(value)}" for name, value in item.knobs.items())
            lines.append(f"{'':18} {knobs}")
        for line in lines:
            print(fill(line, 100, initial_indent="  ", subsequent_indent=" " * 21, break_long_words=False))
        if with_settings:
            for setting in item.settings:
                line = f"{setting.key.removeprefix('method.')}={_short(setting.value)}"
                line = f"{line:<30} {setting.source}"
                if setting.model:
                    line += f" ({setting.model} only)"
                print(fill(line, 100, initial_indent=" " * 6, subsequent_indent=" " * 37, break_long_words=False))
    if not items:
        print("  none")


def _items(kind: str, results: Path) -> list[ListItem]:
    """Return the entries of one kind; ``results`` is the folder of results, which tables are measured in."""
    if kind == "methods":
        return _methods()
    if kind == "metrics":
        return _metrics()
    if kind == "presets":
        return _presets()
    if kind == "kvpress":
        return _presses()
    if kind in LISTINGS:
        records = load_plugin("list", kind)(results)
        return [ListItem(record["id"], record["about"], record) for record in records]
    # the other kinds are groups of conf/, which have names in the singular
    return _entries(kind.removesuffix("s"))


def _metrics() -> list[ListItem]:
    # imports wait until a list needs them, so that the other lists are printed at once
    from kvbench.tasks.metrics import METRICS

    return [_item(metric.name, metric.description) for metric in METRICS.values()]


def _presets() -> list[ListItem]:
    items = []
    for name in presets.available():
        about, settings = presets.about(name), presets.settings(name)
        record = {"id": name, "about": about, "settings": [asdict(setting) for setting in settings]}
        items.append(ListItem(name, about, record, settings=settings))
    return items


def _presses() -> list[ListItem]:
    from kvbench.methods.core.kvpress_package import listing

    return [ListItem(record["id"], record["about"], record, knobs=record["knobs"]) for record in listing()]


def _item(name: str, about: str, knobs: Mapping[str, object] | None = None) -> ListItem:
    """Return an item whose record has its id, its description and, unless None, its knobs."""
    if knobs is None:
        return ListItem(name, about, {"id": name, "about": about})
    return ListItem(name, about, {"id": name, "about": about, "knobs": knobs}, knobs)


def _entries(group: str) -> list[ListItem]:
    """Return the entries of a group of conf/, each with its file's first comment and its knobs."""
    from kvbench.base.conf import entry

    items = []
    for path in sorted((conf_dir() / group).glob("*.yaml")):
        # one malformed file of a user must not hide the others
        try:
            values = entry(group, path)
        except UsageError as error:
            items.append(_item(path.stem, f"cannot be used: {error}", {}))
            continue
        first_line = path.read_text(encoding="utf-8").splitlines()[0]
        # keys such as _target_ are Hydra's
        knobs = {key: value for key, value in values.items() if not key.startswith("_") and key != "name"}
        items.append(_item(path.stem, first_line.lstrip("# "), knobs))
    return items


def _methods() -> list[ListItem]:
    """Return the methods with a YAML file, and behind them those that are a Python file alone."""
    from kvbench.methods.core import registry

    for sentence in registry.broken_files().values():
        say(sentence)
    items = _entries("method")
    for method in sorted(set(registry.available()) - {item.id for item in items}):
        try:
            about, knobs = registry.described(method)
            items.append(_item(method, about, knobs))
        except UsageError as error:
            items.append(_item(method, f"cannot be used: {error}", {}))
    return items


def _short(value: object) -> str:
    """Return a value as users type it: mappings without quotes, texts as they are."""
    if isinstance(value, dict) and value:
        return "{" + ", ".join(f"{key}: {_short(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, str):
        return value
    return json.dumps(value)

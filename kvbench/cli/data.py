"""data: show which datasets are on this machine, fetch them with checksums, and print the prompts that models read."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, TypedDict
from urllib.parse import urlsplit

from kvbench.base.errors import UsageError
from kvbench.base.visible import say, without_password
from kvbench.plan.keys import divide

if TYPE_CHECKING:
    from kvbench.base.example import Example
    from kvbench.plan.run_plan import RunPlan
    from kvbench.tasks.base import Task
    from kvbench.tasks.fetch import FileSource

ACTIONS = ("status", "fetch", "show")
WIDTH = 100
LEGEND = (
    "present: you put the files there. fetched: `kvbench data fetch` put them there. not verified: nobody has tried "
    "this download yet."
)
"""The words of ``data status``."""
REPLACED = " is read in their place"
"""The end of a dataset's state if one file of another layout replaces its missing files."""


class TurnRecord(TypedDict):
    """One question of a context as the model reads it, with its references."""

    question: str
    answers: list[str]


class PromptRecord(TypedDict, total=False):
    """An example as the model reads it, whole (``prompt``) and divided where the cache is compressed.

    tokens: the number of the prompt's tokens.
    cut: the number of tokens that were cut out of the prompt.
    context: the text that is compressed.
    after: the text that is read behind the compressed context.
    answer_prefix: the beginning of the answer, which the model reads last.
    answers: the references.
    meta: facts about the example, such as its length.
    turns: the questions of a context with several. Only such a record has this key.
    """

    task: str
    id: str
    tokens: int
    cut: int
    prompt: str
    context: str
    after: str
    question: str
    answer_prefix: str
    answers: list[str]
    meta: dict[str, object]
    max_new_tokens: int
    turns: list[TurnRecord]


class DatasetRecord(TypedDict):
    """The state of a dataset's files, and where the files come from.

    state: the state of all files in words.
    files: the state of each file, by its place below the data folder.
    repo, revision, verified, licence: the keys of the dataset's entry; None for a key that the entry does not have.
    commits: the commits that the fetched files come from.
    """

    dataset: str
    state: str
    files: dict[str, str]
    repo: str | None
    revision: str | None
    commits: list[str]
    verified: bool | None
    licence: str | None


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("action", choices=ACTIONS, help="status: list datasets. fetch: download. show: print prompts")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="id | key=value",
        help="names of datasets, and data.root=FOLDER. show also takes the keys of run",
    )


def main(args: argparse.Namespace) -> int:
    """Show or fetch datasets. Return exit status 1 if a file has changed or a download failed."""
    ids, options = divide(args.overrides)
    if args.action == "show":
        return _print_prompts(ids, options, args.json)
    for key in options:
        if key != "data.root":
            raise UsageError(f"data {args.action} takes data.root=FOLDER, not {key}=")
    folder = options.get("data.root")
    if "data.root" in options and not folder:
        raise UsageError("data.root= is empty: name a folder, as in data.root=FOLDER")
    if args.action == "fetch":
        return _fetch_datasets(ids, folder, args.json)
    return _print_status(ids, folder, args.json)


def _print_prompts(ids: list[str], options: dict[str, str], as_json: bool) -> int:
    """Print the first prompts of the datasets with these ids as the model reads them. Return exit status 0."""
    from kvbench.plan import config, run_plan, words

    if not ids:
        raise UsageError("data show needs a dataset, as in: data show tiny/needle limit=1 prompt=plain")
    # a run needs a method, and the full cache's prompts are those of all methods
    run_options = {"dataset": ",".join(ids), "method": "full", "limit": "1"}
    run_options |= options
    requests = words.request_runs(run_options)
    # reading: nothing is written, so that the results folder need not be there
    plans = [run_plan.prepare(config.parse(request), reading=True) for request in requests]
    records = []
    for plan in plans:
        for group in plan.groups:
            for example in group.examples:
                records.append(_make_prompt_record(plan, group.task, example))
    if as_json:
        print(json.dumps({"examples": records}, indent=1, ensure_ascii=False))
        return 0
    for record in records:
        _print_prompt(record)
    return 0


def _print_prompt(record: PromptRecord) -> None:
    """Print a prompt in the parts that the model reads one after another, and an empty line."""
    heading = f"{record['task']}, example {record['id']}: {record['tokens']} tokens"
    if record["cut"]:
        heading += f", {record['cut']} cut from the middle"
    print(f"{heading}\n{record['context']}")
    for turn in record.get("turns", ()):
        print(f"--- a question on the compressed context:\n{turn['question']}")
        print(f"--- references: {', '.join(map(repr, turn['answers']))}")
    if record["after"]:
        print(f"--- read after the compression:\n{record['after']}")
    # a text that is scored, and a context of several questions, have no references of their own
    if record["answers"]:
        references = ", ".join(map(repr, record["answers"]))
        print(f"--- at most {record['max_new_tokens']} new tokens; references: {references}")
    print()


def _make_prompt_record(plan: RunPlan, task: Task, example: Example) -> PromptRecord:
    """Return an example as the model reads it, as text, whole and divided where the cache is compressed."""
    from kvbench.tasks.encoding import EncodedTurns, encode_prompt

    # the tokens that are compressed, and those that are read behind the compressed ones
    context_ids: Sequence[int]
    after_ids: Sequence[int]
    questions: Sequence[Sequence[int]] = ()
    text = example.scored
    if text is not None:
        # the tokens before ``prefix`` are compressed, and those from it on are scored
        context_ids, after_ids = text.ids[: text.prefix], text.ids[text.prefix :]
        cut = 0
        max_new_tokens = 0
    else:
        encoded = encode_prompt(plan.tokenizer, example, task, policy=plan.cfg.prompt, context=plan.context)
        context_ids, after_ids = encoded.ids, encoded.question
        cut = encoded.cut
        max_new_tokens = example.max_new_tokens
        if isinstance(encoded, EncodedTurns):
            questions = encoded.questions
    decode = plan.tokenizer.decode
    record: PromptRecord = {
        "task": task.id,
        "id": example.id,
        "tokens": len(context_ids) + len(after_ids),
        "cut": cut,
        # all tokens at once: a word's pieces on both sides of the cut may decode otherwise together than apart
        "prompt": decode(list(context_ids) + list(after_ids)),
        "context": decode(context_ids),
        "after": decode(after_ids),
        "question": example.question,
        "answer_prefix": example.answer_prefix,
        "answers": list(example.answers),
        "meta": example.facts(),
        "max_new_tokens": max_new_tokens,
    }
    if example.turns:
        turns: list[TurnRecord] = []
        for question_ids, turn in zip(questions, example.turns, strict=True):
            turns.append({"question": decode(question_ids), "answers": list(turn.answers)})
        record["turns"] = turns
    return record


def _fetch_datasets(ids: list[str], folder: str | None, as_json: bool) -> int:
    """Fetch the datasets with these ids and print the number of fetched files. Return exit status 0."""
    from kvbench.tasks import fetch, hub, source

    # no id does not mean all: together they are a long download
    if not ids:
        fetchable = sorted(name for name, file_source in fetch.read_sources().items() if file_source)
        raise UsageError(f"data fetch needs a dataset: {', '.join(fetchable)}")
    # all ids are looked up before the first file is downloaded
    sources = [fetch.find_source(name) for name in ids]
    if folder is not None:
        path = Path(folder).expanduser()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"data.root={path} cannot be created: {error.strerror}") from None
    root = source.data_root(folder)
    if root is None:
        raise UsageError(f"data fetch needs a data folder: data.root=FOLDER or the variable {source.ENVIRONMENT}")
    report = []
    lines = []
    for file_source in sources:
        fetched_paths = fetch.fetch(file_source, root, hub.HuggingFace(), say)
        report.append(
            {
                "dataset": file_source.dataset,
                "fetched": fetched_paths,
                "licence": file_source.licence,
                "root": str(root),
            }
        )
        outcome = "no file was missing"
        if fetched_paths:
            outcome = f"{len(fetched_paths)} of {len(file_source.files)} files fetched"
        lines.append(f"{file_source.dataset}: {outcome}, in {root}. Licence: {file_source.licence}")
    if as_json:
        print(json.dumps(report, indent=1, ensure_ascii=False))
    else:
        print("\n".join(lines))
    return 0


def _print_status(ids: list[str], folder: str | None, as_json: bool) -> int:
    """Print the state of the datasets with these ids, or of all. Return exit status 1 if a file has changed."""
    from kvbench.base.errors import unknown
    from kvbench.tasks import fetch, source

    # without a data folder, all files are missing
    root = source.data_root(folder)
    sources = fetch.read_sources()
    for name in ids:
        if name not in sources:
            raise unknown("dataset", name, sources, listed_by="kvbench list datasets")
    # the records of fetched files
    lock: fetch.Lock = fetch.read_lock(root) if root else {}
    report = []
    # an error for each file that is no longer as it was fetched
    changed_errors = []
    for name in ids or sources:
        file_source = sources[name]
        states: dict[str, str] = {}
        if file_source is not None:
            for file in file_source.files:
                state = fetch.state_of_file(root, file, lock)
                states[file.destination] = state
                if root and state == "changed":
                    changed_errors.append(fetch.changed_error(root, file))
        record = _make_dataset_record(name, file_source, states, lock)
        # one file of another layout can replace the missing files of some datasets
        instead = file_source.instead if file_source is not None else ""
        if root and instead and (root / instead).is_file() and "missing" in states.values():
            record["state"] += f"; {instead}{REPLACED}"
        report.append(record)
    if as_json:
        root_text = str(root) if root else None
        print(json.dumps({"root": root_text, "datasets": report}, indent=1, ensure_ascii=False))
    else:
        _print_table(report, root, sources)
    for error in changed_errors:
        say(str(error))
    return 1 if changed_errors else 0


def _make_dataset_record(
    name: str, file_source: FileSource | None, states: dict[str, str], lock: Mapping[str, Mapping[str, object]]
) -> DatasetRecord:
    """Return a dataset's state, with the commits that its fetched files come from.

    states: the state of each file, by its place below the data folder.
    lock: the records of fetched files.
    """
    commits = set()
    for place in states:
        # files with an address of their own have no commit
        if place in lock and "commit" in lock[place]:
            commits.add(str(lock[place]["commit"]))
    record: DatasetRecord = {
        "dataset": name,
        "state": _summarise_states(states),
        "files": states,
        "repo": None,
        "revision": None,
        "commits": sorted(commits),
        "verified": None,
        "licence": None,
    }
    if file_source is not None:
        record["repo"] = file_source.repo
        # a revision is that of a repo: files with an address of their own have none
        if file_source.repo:
            record["revision"] = file_source.revision
        record["verified"] = file_source.verified
        record["licence"] = file_source.licence
    return record


def _summarise_states(states: Mapping[str, str]) -> str:
    """Return the state that all files have, or else how many files are in each state."""
    if not states:
        return "no files listed"
    counts = Counter(states.values())
    if len(counts) == 1:
        return next(iter(counts))
    parts = [f"{n} {state}" for state, n in sorted(counts.items())]
    return f"{', '.join(parts)}, of {len(states)} files"


def _print_table(report: Sequence[DatasetRecord], root: Path | None, sources: Mapping[str, FileSource | None]) -> None:
    """Print the datasets, those whose files are there first."""
    print(f"data folder: {root or 'none (set data.root=FOLDER or the environment variable KVBENCH_DATA)'}")
    print(fill(LEGEND, WIDTH))
    groups: dict[str, list[DatasetRecord]] = {"ready": [], "partly": [], "missing": []}
    for record in report:
        groups[_choose_heading(record, sources[record["dataset"]])].append(record)
    for heading, records in groups.items():
        if records:
            print(f"\n{heading}:")
        for record in records:
            _print_record(record, sources[record["dataset"]])


def _choose_heading(record: DatasetRecord, file_source: FileSource | None) -> str:
    """Return the heading below which a dataset stands: whether its files are there."""
    # kvbench itself generates a dataset without a source
    if file_source is None or record["state"].endswith(REPLACED):
        return "ready"
    n_files = len(record["files"])
    n_missing = sum(state == "missing" for state in record["files"].values())
    if n_files and not n_missing:
        return "ready"
    if n_missing < n_files:
        return "partly"
    return "missing"


def _print_record(record: DatasetRecord, file_source: FileSource | None) -> None:
    """Print a line for a dataset, and below it where its files come from and which are missing."""
    if record["files"]:
        state = record["state"]
    elif file_source is None:
        # kvbench generates the dataset
        state = "nothing to download"
    else:
        # the dataset is a file of the user's
        state = "no download listed, put the file there yourself"
    print(fill(f"  {record['dataset']:<17} {state}", WIDTH, subsequent_indent=" " * 20, break_long_words=False))
    if file_source is None:
        return
    origin = ", ".join(dict.fromkeys(_shorten_url(file.url) for file in file_source.files if file.url))
    if record["repo"]:
        origin = f"{record['repo']} at {record['revision']}"
        # the first digits of a commit tell it from others, as git abbreviates it
        commits = ", ".join(commit[:12] for commit in record["commits"])
        if commits:
            origin += f" (fetched: {commits})"
    verified = "verified" if record["verified"] else "not verified"
    _print_detail(f"from {origin}; {verified}; licence: {record['licence']}")
    # if all files are missing, the state says so already
    missing = [place for place, state in record["files"].items() if state == "missing"]
    if missing and len(missing) < len(record["files"]):
        _print_detail(f"missing: {', '.join(missing)}")


def _shorten_url(url: str) -> str:
    """Return the host of an address, with the first two parts of its path: on GitHub, the owner and the repository."""
    parts = urlsplit(without_password(url))
    # a path begins with a slash, so its first part is empty
    _, *path_parts = parts.path.split("/")
    return "/".join([parts.netloc] + path_parts[:2])


def _print_detail(text: str) -> None:
    """Print a text below a dataset's state, in lines of at most WIDTH characters."""
    print(fill(text, WIDTH, initial_indent=" " * 20, subsequent_indent=" " * 20, break_long_words=False))

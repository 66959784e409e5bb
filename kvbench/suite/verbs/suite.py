"""suite: measure methods on a fixed suite with controls, and write the card."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.base.errors import KvbenchError, UsageError
from kvbench.base.visible import describe_duration, say
from kvbench.plan.keys import check_choice, parse_pairs
from kvbench.plan.words import split_list, value_of
from kvbench.run.console import print_plans, stopping
from kvbench.suite import definition
from kvbench.suite.definition import EDITIONS, FULL, Suite

if TYPE_CHECKING:
    from kvbench.suite.plan import SuiteRun
    from kvbench.suite.scores import PartSamples

RUN_KEYS = ("results", "device", "memory", "threads", "batch_rows", "data.root", "calibration")
"""Keys of `run` that change no result and that the suite passes on."""
SHARD_KEYS = ("shard", "shards")
"""Keys of `run` by which several processes share the prompts."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("suite", nargs="?", default="", help="name of the suite, for example retain-v1-mini")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="method=, edition=, output=, ...")
    parser.add_argument(
        "--plan", action="store_true", help="show what would be measured and how long it takes, and stop"
    )
    parser.add_argument("--stored", action="store_true", help="measure nothing, make the card from stored results")
    parser.add_argument(
        "--lock",
        action="store_true",
        help="write the suite's lock (hashes of prompts and settings) again. "
        "Results can be compared only under the same lock",
    )


def main(args: argparse.Namespace) -> int:
    """Measure a suite and print its card. Return the exit status."""
    if not args.suite or "=" in args.suite:
        raise UsageError(f"name a suite: kvbench suite {definition.suite_names()[0]} method=snapkv")
    from kvbench.suite import folder as folders
    from kvbench.suite import plan

    options = parse_pairs(args.overrides, example="method=snapkv or edition=quick")
    edition = check_choice("edition", EDITIONS, options.pop("edition", FULL))
    suite = definition.load(args.suite, edition)
    if args.lock:
        return _write_lock(suite)
    methods = split_list(options.pop("method", ""))
    output = options.pop("output", "")
    contributor = options.pop("contributor", "")
    source = options.pop("from", "")
    settings: dict[str, object] = {key: options.pop(key) for key in RUN_KEYS if key in options}
    if "model" in options:
        settings["model"] = options.pop("model")
    shard = {key: options.pop(key) for key in SHARD_KEYS if key in options}
    # all other keys are options of the user's methods
    knobs = {key: value_of(text) for key, text in options.items()}
    run = plan.prepare(suite, methods, knobs, settings | shard)
    # the lock and the card are about all prompts, even if only a shard of them is measured here
    whole = plan.prepare(suite, methods, knobs, settings) if shard else run
    division = _choose_division(whole, settings)
    if source:
        folders.take_answers(Path(source), whole)
    if args.plan:
        if args.json:
            return print_plans(run.plans, as_json=True)
        print("\n".join(_describe_plan(run)))
        return 0
    if not args.stored:
        status = _measure_parts(run, ["suite", args.suite] + args.overrides, quiet=args.json)
        if status is not None:
            return status
        if shard:
            left = 0
            for part_run in run.parts:
                left += sum(todo.answers_to_do for todo in part_run.plan.todo())
            if left:
                raise KvbenchError(
                    f"{left} answers of this shard are missing, for the reasons above. Repeat the command"
                )
            print(
                "This shard is measured. After the last shard, run the command without shard= and shards= for the card."
            )
            return 0
    folder = Path(output) if output else _choose_folder(run, settings)
    return _finish_suite(whole, folder, division, contributor, as_json=args.json)


def _write_lock(suite: Suite) -> int:
    """Write the lock of a suite with all its editions, and print its path. Return exit status 0."""
    from kvbench.suite import lock, plan

    planned_editions = {}
    for name in EDITIONS:
        edition_suite = definition.load(suite.name, name)
        planned_editions[name] = plan.prepare(edition_suite, methods=[], options={}, settings={})
    lock.write_lock(suite, planned_editions)
    print(definition.lock_path(suite.name))
    return 0


def _measure_parts(run: SuiteRun, command: list[str], quiet: bool) -> int | None:
    """Measure the missing answers of all parts. Return the exit status if the user stopped it, else None.

    command: the words of the command line, for the message on how to go on.
    quiet: True to show no progress.
    """
    from kvbench.run import experiment

    with stopping(run.plans, command) as stop:
        for number, part_run in enumerate(run.parts, start=1):
            # the progress lines that follow count this part alone
            if not quiet:
                say(f"part {number} of {len(run.parts)}, {part_run.part.name}: {part_run.part.about}")
            experiment.fill(part_run.plan, quiet=quiet)
    return stop.status


def _describe_plan(run: SuiteRun) -> Iterator[str]:
    """Yield lines of text on a planned suite: its rows with their budgets, and each part's missing answers.

    The time left is added for parts whose speed is known from earlier answers.
    """
    from kvbench.plan.forecast import forecast_run

    yield f"{run.suite.name}, {run.suite.edition} edition: {run.suite.about}"
    budgets: dict[str, list[str]] = {}
    for row in run.rows:
        budgets.setdefault(row.name, []).append(f"1/{row.budget}")
    width = max(map(len, budgets))
    for name, shares in budgets.items():
        yield f"  {name:{width}}  {' '.join(shares)}"
    total_seconds = 0.0
    is_total_known = True
    for part_run in run.parts:
        groups = forecast_run(part_run.plan).groups
        done = sum(group.answers_done for group in groups)
        left = sum(group.answers_to_do for group in groups)
        line = f"{part_run.part.name}: {len(groups)} tasks, {done:,} of {done + left:,} answers are measured"
        unfinished = [group for group in groups if group.answers_to_do]
        known_seconds = [group.seconds for group in unfinished if group.seconds is not None]
        # a task without any answer has no measured speed, and then the sum is unknown
        if len(known_seconds) < len(unfinished):
            is_total_known = False
        else:
            part_seconds = sum(known_seconds)
            total_seconds += part_seconds
            if unfinished:
                line += f", about {describe_duration(part_seconds)} left"
        yield line
    if is_total_known and total_seconds:
        yield f"together: about {describe_duration(total_seconds)} left"
    elif not is_total_known:
        yield "The time left is known once each task has a few answers: run the suite, stop it, and ask again."


def _choose_division(run: SuiteRun, settings: Mapping[str, object]) -> str:
    """Return the division of a run: open if it names a model, else closed.

    Raises UsageError for a closed run whose prompts or checkpoint are not those of the suite's lock.
    """
    from kvbench.suite import lock
    from kvbench.suite.folder import CLOSED, OPEN

    if "model" in settings:
        return OPEN
    differences = lock.list_differences(run.suite, run, lock.hash_run(run))
    if differences:
        problems = "\n".join(f"  {problem}" for problem in differences)
        raise UsageError(f"this is not {run.suite.name}:\n{problems}")
    return CLOSED


def _choose_folder(run: SuiteRun, settings: Mapping[str, object]) -> Path:
    """Return the folder of the user's own cards, which git ignores: below results/own."""
    name = run.suite.name
    if run.suite.edition != FULL:
        name += f"-{run.suite.edition}"
    return Path(str(settings.get("results", "results"))) / "own" / definition.FOLDER / name


def _finish_suite(run: SuiteRun, folder: Path, division: str, contributor: str, as_json: bool) -> int:
    """Score the measured rows, write the suite's folder and print the card. Return exit status 0.

    run: the plan of all prompts.
    division: closed or open.
    contributor: the user's ``contributor=``, '' for none.

    Raises KvbenchError if a control is worse than the negative one.
    """
    from kvbench.suite import card, card_picture, plan
    from kvbench.suite import folder as folders
    from kvbench.suite.scores import list_control_problems, score_rows

    samples, full = plan.collect_samples(run)
    scored = score_rows(run.suite, samples, full)
    problems = list_control_problems(scored)
    if problems:
        indented = "\n".join(f"  {problem}" for problem in problems)
        raise KvbenchError(
            f"{run.suite.name}: controls score below the negative control, so the scores cannot be trusted:\n{indented}"
        )
    samples_by_row: dict[tuple[str, int | None], Mapping[str, PartSamples]] = {("full", None): full}
    samples_by_row |= {(row.name, row.budget): row.parts for row in samples}
    rows = folders.make_lines(run, scored, samples_by_row, division=division, contributor=contributor)
    folders.write_folder(folder, run, rows, card.write_card(run.suite, scored, "md"))
    card_picture.draw_card(run.suite, scored, folder / folders.PICTURE)
    if as_json:
        print(json.dumps(card.as_plain(run.suite, rows, card.write_notes(run.suite, scored)), indent=1))
        return 0
    print(card.write_card(run.suite, scored, "text"), end="")
    left_out = sorted({row.name for row in run.rows} - {entry.name for entry in scored})
    if left_out:
        print(f"Left out of the card, because a part is not measured: {', '.join(left_out)}.")
    print(f"Card, rows and samples: {folder} ({folders.CARD}, {folders.PICTURE}, {folders.RESULTS}, {folders.SAMPLES})")
    print(f"Anybody can check them: kvbench verify {folder}")
    return 0

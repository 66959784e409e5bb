"""Ask engines the prompts that they have not answered yet, and store each answer as soon as it comes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime

from kvbench.base.errors import KvbenchError
from kvbench.base.example import Example
from kvbench.base.progress import Tick, progress
from kvbench.base.version import version
from kvbench.engine.stopping import cut_text
from kvbench.engines.engine import AskedPrompt, Engine, EngineError, Reply
from kvbench.engines.rows import EngineRow, EngineRun
from kvbench.plan.cells import Group
from kvbench.report.summary import show_mean
from kvbench.store.provenance import read_commit
from kvbench.store.results import Facts
from kvbench.store.store_writer import Writer

Line = dict[str, object]
"""One line of a result's file, by field."""


def measure(run: EngineRun, quiet: bool = False) -> list[str]:
    """Ask the engine all prompts that the rows of a run have not answered, and store its answers.

    Return an error message for each row's task of which some prompts have no answer. Raises EngineError if the engine
    cannot go on; the answers so far are stored.
    """
    problems: list[str] = []
    unanswered = run.count_unanswered()
    try:
        with progress(unanswered, quiet) as tick:
            for row in run.rows:
                # an engine whose answers are all here is not started
                if unanswered[row.label]:
                    problems += _measure_row(run, row, tick)
    finally:
        # answers that were stored before an error get their metrics, too
        for row in run.rows:
            for group in run.plan.groups:
                write_metrics(run, group, row)
    return problems


def _measure_row(run: EngineRun, row: EngineRow, tick: Tick) -> list[str]:
    """Measure one row. Return an error message for each task of which some prompts have no answer."""
    problems = []
    engine = row.open()
    try:
        for group in run.plan.groups:
            examples = run.find_unanswered(group, row)
            if not examples:
                continue
            try:
                _measure_cell(run, group, row, engine=engine, examples=examples, tick=tick)
            except EngineError as error:
                run.plan.store.mark(run.make_cell(group, row), "failed", str(error))
                # otherwise only some prompts have no answer, and the engine can still answer the next task
                if error.ends_run:
                    raise
                problems.append(f"{row.label} on {group.column}: {error}")
    finally:
        engine.close()
    return problems


def _measure_cell(
    run: EngineRun, group: Group, row: EngineRow, engine: Engine, examples: Sequence[Example], tick: Tick
) -> None:
    """Ask the engine the examples of one task, several at once, and store each answer as it comes.

    tick: the progress line, which counts answers by the row's label.
    """
    prompts = [run.make_prompt(group, example) for example in examples]
    # only this thread stores answers, so that no two lines are written into each other
    with open_writer(run, group, row, engine) as writer, ThreadPoolExecutor(max_workers=run.parallel) as pool:
        examples_asked: dict[Future[Reply], Example] = {}
        for prompt, example in zip(prompts, examples, strict=True):
            examples_asked[pool.submit(_ask, engine, prompt)] = example
        failures = []
        for example, reply in _collect_replies(examples_asked):
            try:
                line = _build_line(group, example, reply)
            except KvbenchError as error:
                # a metric of one's own failed on this answer
                failures.append(error)
                continue
            writer.append(line)
            tick(row.label, 1)
    if failures:
        raise EngineError(f"{failures[0]} ({len(failures)} of {len(examples)} answers)", ends_run=False)


def _ask(engine: Engine, prompt: AskedPrompt) -> Reply:
    """Return the engine's answer to a prompt, cut at the first of the prompt's stop texts."""
    reply = engine.ask(prompt)
    text = cut_text(reply.text, prompt.stop)
    if text == reply.text:
        return reply
    # the engine counted tokens behind the cut as well
    return replace(reply, text=text, new_tokens=None)


@contextmanager
def open_writer(run: EngineRun, group: Group, row: EngineRow, engine: Engine) -> Iterator[Writer]:
    """Yield a writer that stores a row's answers to one task while the context is open.

    An error inside the context marks the result as interrupted.
    """
    cell = run.make_cell(group, row)
    facts: Line = {"kvbench": version(), "commit": read_commit(), "model": run.plan.cfg.model_name}
    facts |= engine.facts()
    # the answers are those of the model that a server serves; of the model= named here only the tokenizer is used
    facts["model"] = facts.get("served", facts["model"])
    # answers of two versions of an engine do not mix: the store refuses another ``device``
    facts["device"] = f"{facts['engine']} {facts['version']}".strip()
    # tables order rows by the time at which their measurement began, which is stored if there are answers already
    record = run.plan.store.cell(cell.id)
    if record is not None and record.provenance:
        facts["began"] = str(record.provenance[0].get("began", ""))
    else:
        facts["began"] = datetime.now(UTC).isoformat(timespec="seconds")
    writer = run.plan.store.open(cell, facts, shard=0, mix=run.plan.cfg.mix)
    try:
        yield writer
    except BaseException:
        # Ctrl-C, too, ends the answers in the middle
        run.plan.store.mark(cell, "interrupted", "the engine's answers ended in the middle")
        raise
    finally:
        writer.close()
        # the store syncs the files of all writers that it lists, and this one is closed
        run.plan.store.writers.pop(cell.id, None)


def _collect_replies(examples_asked: Mapping[Future[Reply], Example]) -> Iterator[tuple[Example, Reply]]:
    """Yield each example with its reply as soon as the reply comes.

    After an error that ends the run, no further prompt is asked. Replies to prompts that were asked earlier are still
    yielded, and then the error is raised. Refused prompts are counted and raised as one error at the end.

    examples_asked: the example of each reply that is awaited.
    """
    failure: EngineError | None = None
    refused: list[EngineError] = []
    try:
        for future in as_completed(examples_asked):
            # this prompt was never asked, since an earlier one failed
            if future.cancelled():
                continue
            try:
                reply = future.result()
            except EngineError as error:
                if error.ends_run:
                    # the first such error names the cause; later ones follow from it
                    failure = failure or error
                    _cancel(examples_asked)
                else:
                    refused.append(error)
            else:
                yield examples_asked[future], reply
    finally:
        # the caller may stop early, by an error of its own or Ctrl-C
        _cancel(examples_asked)
    if failure is not None:
        raise failure
    if refused:
        raise EngineError(f"{refused[0]} ({len(refused)} of {len(examples_asked)} prompts)", ends_run=False)


def _cancel(futures: Iterable[Future[Reply]]) -> None:
    """Cancel the prompts that were not asked yet. Prompts that were asked go on."""
    for future in futures:
        future.cancel()


def _build_line(group: Group, example: Example, reply: Reply) -> Line:
    """Return the line that stores an answer with its score. It lacks the fields that the engine does not report."""
    line: Line = {
        "id": example.id,
        "prediction": reply.text,
        "score": group.task.score(reply.text, example),
        "answers": list(example.answers),
        "meta": example.facts(),
        "seconds": round(reply.seconds, 4),
    }
    if reply.new_tokens is not None:
        line["new_tokens"] = reply.new_tokens
    if reply.first:
        line["first"] = dict(reply.first)
    if reply.bytes is not None:
        line["bytes_said"] = reply.bytes
    return line


def write_metrics(run: EngineRun, group: Group, row: EngineRow, further_facts: Facts | None = None) -> None:
    """Write the metrics of a row on a task: the mean score of its stored answers, and counts.

    Without answers nothing is written. ``further_facts`` are written beside the metrics.
    """
    cell = run.make_cell(group, row)
    lines = list(run.plan.store.lines(cell.id).values())
    if not lines:
        return
    # the metric gives some answers no score
    scores = [float(line["score"]) for line in lines if line["score"] is not None]
    mean, ci = show_mean(group.task.metric, scores)
    # ``limit=`` may have asked for a part of the task's examples only
    status = "complete" if len(lines) == len(group.task.examples) else "done"
    summary = {
        "status": status,
        "metric": group.task.metric,
        "n": len(lines),
        "of": len(group.task.examples),
        "unscored": len(lines) - len(scores),
        "score": mean,
        "ci": ci,
        "empty": sum(not line["prediction"].strip() for line in lines),
    }
    run.plan.store.write_metrics(cell.id, summary | dict(further_facts or {}))

"""Carry out a prepared run: load the model, measure group after group, and report."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from kvbench.base.errors import UsageError, ending
from kvbench.base.visible import say
from kvbench.engine import memory, precision
from kvbench.engine.shared_prefix import SharedPrefix
from kvbench.engine.stopping import find_special_token
from kvbench.models import load, traits
from kvbench.plan.cells import Group, pair_by_question, rounds
from kvbench.plan.config import RunConfig
from kvbench.plan.run_plan import RunPlan, find_refusals, identify, open_session, threads
from kvbench.report.of_run import report_run
from kvbench.report.report import Report
from kvbench.report.summary import summarise
from kvbench.report.unchanged import is_unchanged
from kvbench.run.display import Display
from kvbench.run.host import Host
from kvbench.run.listener import Listener, Listeners
from kvbench.run.runner import run_groups
from kvbench.store.cell import Cell
from kvbench.store.provenance import collect_provenance
from kvbench.store.results import CellSummary, Facts, Status
from kvbench.store.sample_reader import SampleReader
from kvbench.store.store import DAMAGED
from kvbench.tasks.base import Tokenizer

WAITING_S, WAITING_SAID_S = 2.0, 60.0
"""Seconds between two looks whether another process has ended, and between two lines that say so."""
ROUNDED = 4
"""The number of tasks whose first prompts are read to measure rounding."""


def calibrate(cfg: RunConfig, quiet: bool = False) -> list[Facts]:
    """Compute the calibrations that the run's methods lack. Return a record of each calibration that the methods use.

    quiet: True to show no progress.

    Raises UsageError if no method needs a calibration.
    """
    device = load.resolve_device(cfg.device)
    source = load.locate(cfg.model)
    for reason in find_refusals(cfg, source).values():
        raise UsageError(reason)
    tokenizer = cast(Tokenizer, load.load_tokenizer(cfg.model, source))
    context = traits.context_length(source.config, cfg.model.context)
    session = open_session(cfg, identify(cfg, source, device), tokenizer, context)
    # a chain requests the calibrations of its stages; many need none
    chains = [configured.chain for configured in cfg.chains if session.requests(configured.chain)]
    if not chains:
        names = ",".join(configured.chain.name for configured in cfg.chains)
        raise UsageError(f"method={names} needs no calibration")
    # like a run's numbers, a calibration's sums depend on the number of threads
    set_threads(cfg, source.config)
    model = load.load_weights(cfg.model, source, device)
    # by file, since several methods can use one calibration
    records: dict[str, Facts] = {}
    for chain in chains:
        # binding computes the calibrations that no file has yet
        bound = session.bind(chain, model, quiet)
        requests = session.requests(chain)
        for stage in bound.stages:
            if stage.calibration is not None:
                file = str(session.path(requests[stage.id]))
                records[file] = {"method": stage.id, "file": file} | dict(stage.calibration.meta)
    return list(records.values())


def measure(prepared: RunPlan, quiet: bool = False, listeners: Sequence[Listener] = ()) -> Report:
    """Measure all missing answers and write each cell's metrics. Return the run's report.

    quiet: True to show no progress.
    listeners: further listeners to the run's events.
    """
    summaries = fill(prepared, quiet, listeners)
    return report_run(prepared, summaries)


def fill(prepared: RunPlan, quiet: bool = False, listeners: Sequence[Listener] = ()) -> dict[str, CellSummary]:
    """Measure all missing answers and write each cell's metrics. Return the summaries of cells by their ids.

    No report is made, since groups may have different cells.

    quiet: True to show no progress.
    listeners: further listeners to the run's events.
    """
    all_listeners = list(listeners)
    if not quiet:
        # the display is told of each event before any logger is
        all_listeners.insert(0, Display())
    broadcast = Listeners(all_listeners)
    summaries: dict[str, CellSummary] = {}
    # the cells that have not ended, by column
    unfinished = {group.column: {cell.id for cell in group.cells} for group in prepared.groups}
    try:
        broadcast.begin(prepared)
        for group in _measure_groups(prepared, quiet, broadcast):
            summaries |= _settle_group(prepared, group, broadcast)
            unfinished[group.column] -= {cell.id for cell in group.cells}
    # an interrupt, too: answers that were stored before the end still get their metrics
    except BaseException as error:
        for group in prepared.groups:
            _settle_group(prepared, group.only(unfinished[group.column]), broadcast, error)
        raise
    finally:
        broadcast.close()
    return summaries


def settle(prepared: RunPlan, listeners: Sequence[Listener] = ()) -> Report:
    """Write each cell's metrics from the samples of all shards, without measuring. Return the run's report.

    listeners: listeners to the run's events.
    """
    broadcast = Listeners(listeners)
    summaries: dict[str, CellSummary] = {}
    try:
        broadcast.begin(prepared)
        for group in prepared.groups:
            summaries |= _settle_group(prepared, group, broadcast)
    finally:
        broadcast.close()
    return report_run(prepared, summaries)


def _measure_groups(prepared: RunPlan, quiet: bool, broadcast: Listeners) -> Iterator[Group]:
    """Measure the groups round after round, in parts that fit into memory. Yield each group of a round when it is done.

    A task may have a group with its question in view and one with it withheld. Such a pair is read once, if both groups
    fit into memory whole.
    """
    # reporting stored results needs no weights, so the model is not loaded
    if not any(group_work.answers_to_do for group_work in prepared.todo()):
        yield from prepared.groups
        return
    measurement = _Measurement(prepared, quiet, broadcast)
    for groups in rounds(prepared.groups):
        # (pair of groups, its cells that another process measures): wait for these last
        unfinished_pairs: list[tuple[tuple[Group, ...], list[Cell]]] = []
        for pair in pair_by_question(prepared.bound(groups, measurement.host.model, quiet)):
            busy = measurement.measure_pair([prepared.drop_damaged(group) for group in pair])
            if busy:
                unfinished_pairs.append((pair, busy))
            else:
                yield from pair
        for pair, busy in unfinished_pairs:
            measurement.measure_left(pair, busy)
            yield from pair


class _Measurement:
    """The measuring of a run's groups by one loaded model.

    prepared: the run's plan.
    quiet: True to show no progress.
    broadcast: the listeners to the run's events.
    host: the loaded model with the run's settings.
    facts: the provenance of the samples.
    """

    def __init__(self, prepared: RunPlan, quiet: bool, broadcast: Listeners) -> None:
        """Load the model, and collect the provenance of the samples."""
        self.prepared, self.quiet, self.broadcast = prepared, quiet, broadcast
        thread_count = set_threads(prepared.cfg, prepared.source.config)
        model = prepared.load_model()
        self.host = make_host(prepared, model)
        facts = dict(collect_provenance(model, thread_count))
        facts["model"] = prepared.cfg.model_name
        # half precision alone changes answers; readers must be able to tell this effect from compression
        facts |= _measure_rounding(self.host, prepared.groups)
        self.facts = facts
        # in a commit's name, + marks a clone with local changes
        if not quiet and str(facts["commit"]).endswith("+"):
            say(f"the code has local changes (commit {facts['commit']}): results say so")

    def measure_pair(self, pair: Sequence[Group]) -> list[Cell]:
        """Measure a group, or a task with its question in view and withheld, in parts that fit into memory.

        pair: one group, or the two groups of a task.

        Return the cells that are left out because another process measures them.
        """
        parts_of_groups = [self.prepared.estimate(group).parts(group, self.host.memory) for group in pair]
        if all(len(parts) == 1 for parts in parts_of_groups):
            # each group fits whole, so their shared prompts are read once
            return self._measure_parts([parts[0] for parts in parts_of_groups])
        busy: list[Cell] = []
        for parts in parts_of_groups:
            for part in parts:
                busy += self._measure_parts([part])
        return busy

    def measure_left(self, pair: Sequence[Group], busy: Sequence[Cell]) -> None:
        """Wait for the process that measures the cells ``busy`` of a pair, and measure what it leaves."""
        waited_s = 0.0
        # the other process may fail, and the answers that it leaves must still be measured
        while busy:
            # WAITING_S divides WAITING_SAID_S, so this is true once in WAITING_SAID_S, and at the beginning
            if waited_s % WAITING_SAID_S == 0 and not self.quiet:
                cells = f"{busy[0].label} on {busy[0].column}"
                if len(busy) > 1:
                    cells += f" and {len(busy) - 1} other results"
                say(f"waiting for another run, which measures {cells}; what it leaves is measured here")
            time.sleep(WAITING_S)
            waited_s += WAITING_S
            # cells that were measured here are done; only the others are tried again
            ids = {cell.id for cell in busy}
            busy = self.measure_pair([group.only(ids) for group in pair])

    def _measure_parts(self, parts: Sequence[Group]) -> list[Cell]:
        """Measure parts together. Return the cells that are left out because another process measures them."""
        cfg, store = self.prepared.cfg, self.prepared.store
        return run_groups(self.host, parts, store, self.facts, shard=cfg.shard, mix=cfg.mix, listeners=self.broadcast)


def _measure_rounding(host: Host, groups: Sequence[Group]) -> Facts:
    """Return {"rounding": effect of rounding alone in half precision}, or {} in fp32 or if it cannot be measured.

    The effect is measured on the first prompts of the first ROUNDED tasks.
    """
    if host.model.dtype == torch.float32:
        return {}
    comparison = None
    # an error of a prompt or of the model is reported when the run reads that prompt
    with suppress(Exception):
        first_prompts = [host.encode(group.examples[0], group.task).ids for group in groups if group.examples]
        prompts = first_prompts[:ROUNDED]
        comparison = precision.compare_rounding(host.model, [torch.tensor(ids) for ids in prompts])
    if comparison is None:
        return {}
    return {"rounding": comparison}


def _settle_group(
    prepared: RunPlan, group: Group, broadcast: Listeners, error: BaseException | None = None
) -> dict[str, CellSummary]:
    """Write the metrics of a group's cells, tell the listeners how each cell ended, and return the metrics by cell id.

    ``error`` is the error that ended the run early, if any. A cell without samples and a refused cell get no metrics.
    """
    store = prepared.store
    reader = SampleReader(store)
    summaries = {}
    # the ids of cells that lack an answer; ``left`` gives the cells that each example still needs
    unfinished = set()
    for cells in prepared.left(group).values():
        unfinished |= {cell.id for cell in cells}
    for cell in group.cells:
        summary = None
        # a run that ended early keeps the metrics of cells that it had not begun
        begun = error is None or cell.id in store.writers
        if begun and store.damage(cell.id) is None:
            summary = _write_metrics(cell, group, reader)
        if summary is not None:
            summaries[cell.id] = summary
        status, reason = _describe_end(store.status(cell.id), cell.id in unfinished, error)
        broadcast.ended(cell, status, summary, reason)
    return summaries


def _describe_end(stored: Status, is_unfinished: bool, error: BaseException | None) -> tuple[str, str | None]:
    """Return (the status, the reason) of a cell for the listeners, as they hear that the cell has ended.

    stored: the cell's status in the store.
    is_unfinished: True if the cell lacks an answer.
    error: the error that ended the run early; None if the run was carried out.
    """
    status, reason = stored.status, stored.reason
    if status == DAMAGED:
        status = "failed"
    elif status not in ("complete", "refused", "failed", "interrupted"):
        # cells that another process measures, and cells without examples in this shard, count as done
        status = "interrupted" if error is not None and is_unfinished else "done"
    if not reason and error is not None and status == "interrupted":
        reason = ending(error)
    return status, reason


def _write_metrics(cell: Cell, group: Group, reader: SampleReader) -> CellSummary | None:
    """Write the metrics of a cell's samples and return them. Return None without samples, or if the cell is refused."""
    store = reader.store
    samples = reader.read(cell.id)
    if not samples or store.refusal(cell.id) is not None:
        return None
    task = group.task
    summary = summarise(list(samples.values()), task.metric, len(task.examples), task.thought)
    record: dict[str, object] = {"status": "done"}
    if summary.n == summary.of:
        record["status"] = "complete"
    record |= summary.record()
    # a method that compressed nothing has the full cache's scores; later readers of the file must know
    if is_unchanged(cell, samples, reader):
        record["nothing_compressed"] = True
    store.write_metrics(cell.id, record)
    return summary


def make_host(prepared: RunPlan, model: PreTrainedModel) -> Host:
    """Return the host of this run: the loaded model with its settings for prompts and answers."""
    cfg = prepared.cfg
    prefix = SharedPrefix(model, cfg.shared_prefix) if cfg.shared_prefix is not None else None
    return Host(
        model=model,
        tokenizer=prepared.tokenizer,
        policy=cfg.prompt,
        stop=collect_stop_tokens(prepared),
        stop_texts=cfg.model.stop,
        context=prepared.context,
        sampling=cfg.sampling,
        batch_rows=cfg.batch_rows,
        plain=cfg.model.attention == "eager",
        memory=memory.cache_limit(cfg.memory, memory.measure_device_shares(model)),
        prefix=prefix,
    )


def collect_stop_tokens(prepared: RunPlan) -> frozenset[int]:
    """Return the token ids that end an answer: the end-of-sequence ids, and the stop texts that are special tokens."""
    cfg, tokenizer = prepared.cfg.model, prepared.tokenizer
    stop_ids = set(load.end_tokens(cfg, prepared.source))
    special_ids = (find_special_token(tokenizer, text) for text in cfg.stop)
    stop_ids.update(token for token in special_ids if token is not None)
    if prepared.model is not None:
        # a model that the user passed in may end with other tokens than its checkpoint says
        model_ends = getattr(prepared.model.generation_config, "eos_token_id", None)
        # one id, a list of ids, or None
        if isinstance(model_ends, int):
            stop_ids.add(model_ends)
        else:
            stop_ids |= set(model_ends or ())
    end_id = getattr(tokenizer, "eos_token_id", None)
    if end_id is not None:
        stop_ids.add(end_id)
    return frozenset(stop_ids)


def set_threads(cfg: RunConfig, config: Any) -> int:
    """Set PyTorch's number of threads for the run and return it.

    config: the model's configuration, by which narrow models get one thread.
    """
    torch.set_num_threads(threads(cfg, config))
    return torch.get_num_threads()

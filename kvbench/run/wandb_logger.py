"""A run on Weights & Biases. Each cell has one W&B run with the cell's id, so a resumed cell continues its own run.

Logging runs in a thread beside the run. Without logger=wandb, wandb is not imported and nothing leaves the machine. If
the service cannot be reached, the runs are kept below the results folder instead.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean
from threading import Thread
from typing import Any, NamedTuple

from kvbench.base.extras import require
from kvbench.base.visible import say
from kvbench.methods.core.registry import ALWAYS_NAMED
from kvbench.plan.cells import Group
from kvbench.plan.config import LoggerConfig
from kvbench.plan.run_plan import RunPlan
from kvbench.report.heatmap import Heat, build_map, draw_map, read_points, rescale_score, score_silence
from kvbench.run.listener import Listener
from kvbench.store.cell import Cell
from kvbench.store.results import CellSummary, Sample
from kvbench.tasks.metrics import metric

CONNECT_S, FINISH_S = 10, 10
"""Seconds to wait for the service when a run is started, and when it is finished."""
CLOSE_S = {"online": 30, "offline": 120}
"""Seconds to wait for the logger's thread at the end of a run, by mode.

An offline run only writes files, and these do not hang, however busy the machine is.
"""
RUNTIME = ("limit", "batch_rows", "shared_prefix", "threads", "device", "mix", "shard", "shards")
"""The settings of the run that the config of a W&B run holds under ``runtime``."""
ROW_EVERY_S = 2.0
"""The least seconds between two rows of progress of one cell."""
SETTINGS: dict[str, Any] = {
    "console": "off",
    "silent": True,
    "disable_code": True,
    "disable_git": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
    "init_timeout": CONNECT_S,
    "finish_timeout": FINISH_S,
}
"""The settings of wandb.

Nothing about the machine is sent but the facts that a cell records, and a silent service costs a few seconds.
"""


def listeners(cfg: LoggerConfig) -> tuple[Listener, ...]:
    """Return the listeners that the configuration asks for: () or one that logs to W&B.

    Raises UsageError if wandb is not installed.
    """
    if cfg.mode == "disabled":
        return ()
    require("wandb", "logger=wandb")
    return (WandbLogger(cfg),)


class WandbLogger:
    """The listener that logs a run to W&B. It hands events to its own thread, so the run waits only at its end."""

    def __init__(self, cfg: LoggerConfig) -> None:
        self._cfg = cfg
        self._events: SimpleQueue[Callable[[_Sender], None] | None] = SimpleQueue()
        # a daemon thread, so that a hanging service cannot keep the program from ending
        self._thread = Thread(target=self._send_events, name="wandb", daemon=True)
        self._folder, self._warned = Path(), False

    def begin(self, prepared: RunPlan) -> None:
        """Start the thread that sends all events."""
        self._folder = Path(prepared.store.root)
        self._events.put(lambda sender: sender.begin(prepared))
        self._thread.start()

    def reading(self, column: str) -> None:
        """Do nothing: a W&B run has no place for prompts that have no answer yet."""

    def stored(self, cell: Cell, sample: Sample) -> None:
        """Queue the event for the thread."""
        self._events.put(lambda sender: sender.stored(cell, sample))

    def ended(self, cell: Cell, status: str, means: CellSummary | None, reason: str | None) -> None:
        """Queue the event for the thread."""
        self._events.put(lambda sender: sender.ended(cell, status, means, reason))

    def close(self) -> None:
        """Wait until the thread has sent everything, but no longer than the mode's seconds in CLOSE_S."""
        self._events.put(lambda sender: sender.close())
        # None ends the thread after all earlier events
        self._events.put(None)
        # a service that is down delays the run by at most this time
        self._thread.join(CLOSE_S[self._cfg.mode])
        if self._thread.is_alive():
            self._warn(f"takes more than {CLOSE_S[self._cfg.mode]} s and is not waited for")
        elif self._cfg.mode == "offline" and not self._warned:
            folder = self._folder / "wandb"
            say(f"the W&B runs are kept in {folder}; `wandb sync {folder}/offline-run-*` sends them")

    def _send_events(self) -> None:
        """Let a sender handle the queued events until None comes. This runs in the logger's thread."""
        try:
            sender = _Sender(self._cfg, self._warn)
            while (event := self._events.get()) is not None:
                event(sender)
        except Exception as error:
            self._warn(f"failed ({_describe_error(error)}) and is left out from here on")

    def _warn(self, problem: str) -> None:
        """Print a warning about the first ``problem``, and nothing about later ones."""
        if not self._warned:
            self._warned = True
            # stderr may be closed by now
            with suppress(OSError, ValueError):
                say(
                    f"W&B {problem}. Measuring goes on, and the results are in {self._folder} as ever; what "
                    f"W&B has not got lies in {self._folder}/wandb, and `wandb sync` sends it"
                )


@dataclass
class _CellRun:
    """The open W&B run of one cell. A step is the number of samples on disk, so a resumed cell continues its steps.

    wandb_run: wandb's own object, which logs and finishes the run.
    group: the cell's group.
    samples: the cell's samples on disk, by example.
    last_row_s: the time of the row that was logged last, in seconds of the monotonic clock.
    """

    wandb_run: Any
    group: Group
    samples: dict[str, Sample]
    last_row_s: float = -ROW_EVERY_S

    def progress(self) -> dict[str, Any]:
        """Return how many answers there are, their mean score and the mean share of tokens kept, by W&B's names.

        Without samples or scores, the means are left out.
        """
        samples = self.samples.values()
        # the store may hold samples of a larger limit than this run's
        run_ids = {example.id for example in self.group.examples}
        answered_ids = run_ids & self.samples.keys()
        row: dict[str, Any] = {"progress/answers": len(answered_ids), "progress/of": len(run_ids)}
        scores = [s.score for s in samples if s.score is not None]
        if scores:
            row["progress/score"] = metric(self.group.task.metric).show(fmean(scores))
        if samples:
            row["progress/kept_percent"] = fmean(100 * s.kept / s.n for s in samples)
        return row


class _NeedleMaps(NamedTuple):
    """The two heat maps of one method, with the same points.

    scores: the method's mean scores.
    found: how much of the needle it found, in per cent.
    """

    scores: Heat
    found: Heat


class _Sender:
    """The object in the logger's thread that handles the run's events. Only this class uses wandb.

    prepared: the plan of the run, from ``begin`` on.
    mode: ``online``, or ``offline`` to write runs to files.
    warn: the function that reports a problem to the user.
    open_runs: the open W&B run of each cell, by the cell's id.
    """

    prepared: RunPlan

    def __init__(self, cfg: LoggerConfig, warn: Callable[[str], None]) -> None:
        # without logger=wandb this class is not used, and wandb is not imported
        import wandb

        self.wandb, self.cfg, self.mode, self.warn = wandb, cfg, cfg.mode, warn
        wandb.setup(wandb.Settings(**SETTINGS))
        self.open_runs: dict[str, _CellRun] = {}

    def begin(self, prepared: RunPlan) -> None:
        """Log in. Without a key, or if the service does not answer, go on with files."""
        self.prepared = prepared
        if self.mode != "online":
            return
        # wandb would ask for a key on the terminal, and nobody may be waiting there
        if not self.wandb.login(prompt=False, verify=False):
            self._go_offline("there is no key; wandb login sets one")
        elif reason := _explain_unreachable(self.wandb.setup().settings.base_url):
            self._go_offline(reason)

    def stored(self, cell: Cell, sample: Sample) -> None:
        """Add a sample to its cell's run, and log a row of progress if the last one is ROW_EVERY_S old."""
        cell_run = self._open_run(cell)
        # an example that is measured again replaces its sample, so the step stays the same
        cell_run.samples[sample.id] = sample
        # short answers may come faster than W&B accepts rows
        if time.monotonic() - cell_run.last_row_s >= ROW_EVERY_S:
            cell_run.last_row_s = time.monotonic()
            cell_run.wandb_run.log(cell_run.progress(), step=len(cell_run.samples))

    def ended(self, cell: Cell, status: str, means: CellSummary | None, reason: str | None) -> None:
        """Log a cell's last row with a table of answers, write its summary, and finish its run."""
        cell_run = self._open_run(cell)
        row = cell_run.progress()
        stored_samples = list(self.prepared.store.samples(cell.id).values())
        shown_samples = stored_samples[: self.cfg.samples]
        if shown_samples:
            references_of_task = {example.id: example.answers for example in cell_run.group.task.examples}
            table = self.wandb.Table(columns=["id", "prediction", "answers", "score", "kept %"])
            for sample in shown_samples:
                references = sample.answers
                if references is None:
                    # samples of older versions hold no references; the task still has them
                    references = references_of_task.get(sample.id, ())
                kept_percent = round(100 * sample.kept / sample.n, 3)
                table.add_data(sample.id, sample.prediction, "\n".join(references), sample.score, kept_percent)
            row["samples"] = table
        cell_run.wandb_run.log(row, step=len(cell_run.samples))
        values: dict[str, object] = {"status": status}
        if reason:
            values["reason"] = reason
        if means is not None:
            values |= flatten_summary(means)
            values |= self._record_unchanged(cell)
        cell_run.wandb_run.summary.update(values)
        del self.open_runs[cell.id]
        # W&B marks a run as failed by its exit code
        exit_code = 0 if status in ("complete", "done") else 1
        cell_run.wandb_run.finish(exit_code=exit_code)

    def _record_unchanged(self, cell: Cell) -> dict[str, object]:
        """Return {"nothing_compressed": True} if the scores say nothing about the method, as metrics.json does."""
        if self.prepared.store.metrics(cell.id).get("nothing_compressed") is True:
            return {"nothing_compressed": True}
        return {}

    def close(self) -> None:
        """Finish all open runs, and log the heat maps of the needle tasks, if there are any, in a run of their own."""
        # runs that are still open here belong to cells that did not end
        for cell_run in self.open_runs.values():
            cell_run.wandb_run.finish(exit_code=1)
        maps = _build_heat_maps(self.prepared)
        if maps:
            self._log_heat_maps(maps)

    def _log_heat_maps(self, maps: Mapping[str, _NeedleMaps]) -> None:
        # a map of a method that compressed nothing says nothing about the method
        titles = {label: f"{label}: {found.mean():.0f} %" for label, (_, found) in maps.items()}
        titles |= {label: f"{label}: nothing was compressed" for label in self._find_unchanged()}
        # the maps have a run of their own, since a map spans lengths, and so cells
        cells = self._needle_cells()
        cell_ids = sorted(cell.id for cell in cells)
        # the same cells give the same id, so that a resumed run goes on in the same W&B run
        run_id = "needle-" + hashlib.sha256(" ".join(cell_ids).encode()).hexdigest()[:9]
        heat_run = self._start_run(run_id, cells[0], "needle heat maps", "heatmap", {"cells": cell_ids})
        table = self.wandb.Table(columns=["method", "length", "depth", "score", "n", "found"])
        images = []
        for label, (scores, found) in maps.items():
            # both maps have the same points, in the same order
            for score_row, (_, _, found_percent, _) in zip(scores.rows(), found.rows(), strict=True):
                table.add_data(label, *score_row, found_percent)
            images.append(self.wandb.Image(draw_map(found, titles[label]), caption=titles[label]))
        heat_run.log({"heatmap": images, "heatmap_values": table})
        heat_run.finish()

    def _find_unchanged(self) -> set[str]:
        """Return the labels of the methods that compressed nothing of any needle task."""
        # a method that compressed in one task is left out, even if it compressed nothing in another
        labels, compressing = set(), set()
        for cell in self._needle_cells():
            labels.add(cell.label)
            if not self._record_unchanged(cell):
                compressing.add(cell.label)
        return labels - compressing

    def _needle_cells(self) -> list[Cell]:
        cells: list[Cell] = []
        for group in self.prepared.groups:
            if group.task.category == "needle":
                cells += group.cells
        return cells

    def _open_run(self, cell: Cell) -> _CellRun:
        """Return the open W&B run of a cell. It is started when it is first asked for."""
        if cell.id not in self.open_runs:
            cfg = self.prepared.cfg
            # every cell of the run is in one group
            group = next(group for group in self.prepared.groups if group.only([cell.id]).cells)
            # W&B filters and groups runs by their job_type: the run of a whole cell, or of one shard
            job_type = "shard" if cfg.shards > 1 else "cell"
            wandb_run = self._start_run(
                name_run(cell, cfg.shard, cfg.shards),
                cell,
                name=f"{cell.label} · {cell.column}",
                job_type=job_type,
                config=describe_run(self.prepared, cell),
            )
            self.open_runs[cell.id] = _CellRun(wandb_run, group, self.prepared.store.samples(cell.id))
        return self.open_runs[cell.id]

    def _start_run(self, run_id: str, cell: Cell, name: str, job_type: str, config: dict[str, object]) -> Any:
        """Start a W&B run beside the open ones and return it. If the service fails in any way, start it on disk.

        run_id: the id by which W&B resumes the run.
        cell: the run's cell, or one of several, whose dataset names the group of the run.
        name, job_type: the run's name and kind on W&B's pages.
        config: the settings that W&B's pages show.
        """
        dataset = cell.task.id.partition("/")[0]
        preset = self.prepared.cfg.preset
        group_name = f"{preset}/{dataset}" if preset else dataset

        def start() -> Any:
            """Start the run on the service, or on disk if ``self.mode`` is offline."""
            # an offline file knows no earlier run; `wandb sync` sends several files with one id one after the other
            resume: Any = "allow" if self.mode == "online" else None
            return self.wandb.init(
                id=run_id,
                name=name,
                group=self.cfg.group or group_name,
                job_type=job_type,
                config=config,
                project=self.cfg.project,
                entity=self.cfg.entity,
                mode=self.mode,
                resume=resume,
                dir=str(self.prepared.store.root),
                reinit="create_new",
                settings=self.wandb.Settings(**SETTINGS),
            )

        try:
            return start()
        except Exception as error:
            if self.mode != "online":
                raise
            self._go_offline(_describe_error(error))
            return start()

    def _go_offline(self, reason: str) -> None:
        """Write to files from now on, and warn the user of the ``reason``.

        A cell with an open run continues in a file with the same id, from the store.
        """
        self.mode = "offline"
        # a run of the service cannot go on in a file
        self.open_runs.clear()
        # a run that could not be started keeps its id until the service ends
        self.wandb.teardown()
        self.wandb.setup(self.wandb.Settings(**SETTINGS))
        self.warn(f"cannot be used ({reason})")


def name_run(cell: Cell, shard: int, shards: int) -> str:
    """Return the id of a cell's W&B run. Two processes cannot write one run, so each shard has its own."""
    if shards == 1:
        return cell.id
    return f"{cell.id}-{shard}of{shards}"


def describe_run(prepared: RunPlan, cell: Cell) -> dict[str, object]:
    """Return the config of a cell's W&B run: the keys to group by, the cell's identity and its runtime settings.

    Folders of this machine are left out.
    """
    cfg, record = prepared.cfg, prepared.store.cell(cell.id)
    model = cfg.model_name
    # a hub id is owner/name; any other path without an entry in conf/model is a folder
    if cfg.model.name == "hf" and cfg.model.path.count("/") != 1:
        model = Path(model).name
    provenance: list[object] = list(record.provenance) if record is not None else []
    config: dict[str, object] = {
        "cell": cell.id,
        "label": cell.label,
        "method": cell.chain.name,
        "per": cell.chain.per,
    }
    # W&B groups runs by these keys: the budgets, which labels always name
    for stage in cell.chain.stages:
        for knob in ALWAYS_NAMED:
            value = getattr(stage, knob, None)
            if value is not None:
                config[knob] = value
    config |= {
        "task": cell.task.id,
        "column": cell.column,
        "model": model,
        "preset": cfg.preset,
        "identity": dict(cell.identity),
        "runtime": {key: getattr(cfg, key) for key in RUNTIME},
        "provenance": provenance,
    }
    return config


def flatten_summary(means: CellSummary) -> dict[str, object]:
    """Return a cell's means under flat names, with intervals as two numbers and tokens kept in per cent."""
    values: dict[str, object] = {}
    if means.full_bytes:
        values["kept_percent"] = 100 * means.kept / means.prompt_tokens
    return values | flatten_names(means.record())


def flatten_names(values: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Return nested values under flat names joined by /, without None. An interval ci becomes ci_low and ci_high."""
    flat: dict[str, object] = {}
    for key, value in values.items():
        # W&B plots single numbers, not pairs
        if key.endswith("ci") and value is not None:
            low, high = value
            flat |= {f"{prefix}{key}_low": low, f"{prefix}{key}_high": high}
        elif isinstance(value, Mapping):
            flat |= flatten_names(value, f"{prefix}{key}/")
        elif value is not None:
            flat[f"{prefix}{key}"] = value
    return flat


def _build_heat_maps(prepared: RunPlan) -> dict[str, _NeedleMaps]:
    """Return the two maps of each method on the needle dataset, by label. Refused cells are left out."""
    # (length, depth, score) of each sample
    score_points: dict[str, list[tuple[float, float, float]]] = {}
    found_points: dict[str, list[tuple[float, float, float]]] = {}
    for group in prepared.groups:
        if group.task.category != "needle":
            continue
        show, silence = metric(group.task.metric).show, score_silence(group.task)
        for cell in group.cells:
            # a refused cell must not be reported, in a picture either
            if prepared.store.refusal(cell.id) is not None:
                continue
            points = read_points(prepared.store.samples(cell.id).values(), show)
            score_points.setdefault(cell.label, []).extend(points)
            # an empty answer scores ``silence``, and found 0 % of the needle
            above_silence = [(length, depth, rescale_score(score, silence)) for length, depth, score in points]
            found_points.setdefault(cell.label, []).extend(above_silence)
    maps = {}
    for label, points in score_points.items():
        # a method without an answer yet has no map
        if points:
            maps[label] = _NeedleMaps(scores=build_map(points), found=build_map(found_points[label]))
    return maps


def _explain_unreachable(url: str) -> str | None:
    """Return why a service does not answer, or None if it does. Asking is quicker than starting a run there."""
    import requests

    try:
        requests.get(url, timeout=CONNECT_S, allow_redirects=False)
    except requests.RequestException as error:
        return f"{url} does not answer: {type(error).__name__}"
    return None


def _describe_error(error: Exception) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if not text:
        return type(error).__name__
    return f"{type(error).__name__}: {text}"

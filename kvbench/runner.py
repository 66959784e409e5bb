"""One group of cells: read each prompt once, compress by every method, audit, decode together, score, store."""

from __future__ import annotations

import os
import platform
import subprocess
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import kvbench
from kvbench.cache import native
from kvbench.cache.audit import Measured, Refused, audit
from kvbench.cache.peak import Stored, check_bytes, check_peak
from kvbench.config import Sampling
from kvbench.errors import KvbenchError, UsageError
from kvbench.listener import Listeners
from kvbench.metrics import score
from kvbench.model.decode import Ending, extend_cache, generate_rows
from kvbench.model.interface import attached, synchronise
from kvbench.model.likelihood import teacher_force
from kvbench.model.prefill import check_window, prefill_chains
from kvbench.plan import Cell, Group, pending
from kvbench.store import ResultStore, Writer
from kvbench.store_files import Sample
from kvbench.tasks.base import Task, Tokenizer
from kvbench.tasks.prompt import Encoded, PromptPolicy, encode
from kvbench.types import Cache, Example

ROWS_CPU, ROWS_GPU = 48, 128
BATCH_BYTES = 2 * 2**30
Tick = Callable[[str, int], None]


@dataclass(frozen=True)
class Host:
    """A loaded model, how prompts reach it, and how it answers. ``context`` is its longest text in tokens."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    policy: PromptPolicy
    stop: frozenset[int]
    context: int | None
    sampling: Sampling = field(default_factory=Sampling)
    batch_rows: int | None = None
    plain: bool = False

    def shape(self) -> tuple[int, int, torch.dtype]:
        """(kv heads, head dimension, dtype) of the model's cache."""
        c = self.model.config
        heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
        dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        return int(heads), int(dim), self.model.dtype


@dataclass
class Row:
    """One prompt under one method, waiting to be decoded."""

    cell: Cell
    example: Example
    cache: Cache
    measured: Measured
    cut: int


@dataclass
class GroupRun:
    """The state of one group while it is measured."""

    host: Host
    store: ResultStore
    writers: dict[str, Writer]
    tick: Tick
    listeners: Listeners = field(default_factory=Listeners)
    refused: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def full(self) -> bool:
        limit = self.host.batch_rows or (ROWS_GPU if self.host.model.device.type == "cuda" else ROWS_CPU)
        # a decode batch pads and copies what the caches hold
        held = 2 * sum(r.measured.payload + r.measured.overhead for r in self.rows)
        return len(self.rows) >= limit or held >= BATCH_BYTES

    def read(self, example: Example, cells: Sequence[Cell]) -> None:
        """Prefill one prompt for the cells that need it and audit what each kept."""
        active = [c for c in cells if c.id not in self.refused]
        if not active:
            return
        encoded = self._encode(example, active[0].task)
        ids = torch.tensor(encoded.ids)
        try:
            longest = len(example.tokens) or len(encoded) + example.max_new_tokens
            active = self._fitting(active, longest, example)
            if not active:
                return
            caches = prefill_chains(self.host.model, ids, [c.chain for c in active], self.host.plain)
        except torch.OutOfMemoryError:
            raise KvbenchError(
                f"out of memory while reading {example.id} ({len(encoded.ids)} tokens) for {len(active)} methods. "
                "Everything measured so far is safe; run fewer methods at once, or lower max_length"
            ) from None
        for cell, cache in zip(active, caches, strict=True):
            try:
                measured = audit(cache, *self.host.shape())
                if encoded.question:
                    cache = extend_cache(self.host.model, cache, encoded.question)
                self.rows.append(Row(cell, example, cache, measured, encoded.cut))
            except Refused as reason:
                self.refuse(cell, str(reason), example)
        if example.tokens:
            self.force(example)

    def force(self, example: Example) -> None:
        """Score the rest of a text under every cache that waits, and store one line each."""
        rows, self.rows = self.rows, []
        rest = torch.tensor(example.tokens[int(example.meta["prefix"]) :])
        synchronise(self.host.model.device)
        start = time.perf_counter()
        held: dict[int, list[int]] = {}
        stored: dict[int, Stored] = {}
        losses = teacher_force(self.host.model, [r.cache for r in rows], rest, int(example.meta["chunk"]), held, stored)
        synchronise(self.host.model.device)
        share = (time.perf_counter() - start) / max(1, len(rows) * len(rest))
        for i, (row, loss) in enumerate(zip(rows, losses, strict=True)):
            score = float(loss.sum()) / float(example.meta["divisor"])
            line = {**self._line(row, len(rest), share, len(rows)), "prediction": "", "score": score}
            self.add(row, line, held[i], len(rest) - 1, stored.get(i))

    def add(self, row: Row, line: Sample, held: Sequence[int], fed: int, stored: Stored | None) -> None:
        """Store the line of a row that held ``held`` tokens in each layer while it read ``fed``, or refuse its cell."""
        cell, example = row.cell, row.example
        if cell.id in self.refused:
            return
        try:
            line["decode_peak"] = check_peak(row.cache, held, fed)
            if stored is not None:
                check_bytes(row.cache, stored, *self.host.shape())
        except Refused as reason:
            self.refuse(cell, str(reason), example)
            return
        self.store.clear_refusal(cell.id, example.id)
        self.writers[cell.id].append(line)
        self.tick(cell.label, 1)
        self.listeners.stored(cell, line)

    def refuse(self, cell: Cell, reason: str, example: Example) -> None:
        """Take the cell out of the run and record why; its rows that wait are dropped."""
        self.refused[cell.id] = f"{reason} (example {example.id})"
        self.store.refuse(cell, self.refused[cell.id], example.id)
        self.rows = [r for r in self.rows if r.cell.id != cell.id]

    def _fitting(self, cells: Sequence[Cell], tokens: int, example: Example) -> list[Cell]:
        """The cells that can run a text of ``tokens``.

        Beyond a sliding window only the full cache can, and beyond the model's context only rolled positions.
        """
        fitting = []
        context = self.host.context
        for cell in cells:
            selector = cell.chain.selector
            try:
                if example.tokens and context is not None and tokens > context and not (selector and selector.rolled):
                    raise UsageError(
                        f"a text of {tokens} tokens exceeds the model's context of {context}: lower length=, or stream "
                        "it with positions that roll (method=streamingllm mode=rolled)"
                    )
                check_window(self.host.model, tokens, [cell.chain])
                fitting.append(cell)
            except UsageError as reason:
                self.refuse(cell, str(reason), example)
        return fitting

    def flush(self) -> None:
        """Decode all waiting rows as one batch, score them and store one line each."""
        rows, self.rows = self.rows, []
        if not rows:
            return
        device = self.host.model.device
        synchronise(device)
        start = time.perf_counter()
        attended: dict[int, float] = {}
        held: dict[int, list[int]] = {}
        stored: dict[int, Stored] = {}
        endings = [self._ending(r) for r in rows]
        tokens = generate_rows(self.host.model, [r.cache for r in rows], endings, attended, held, stored)
        synchronise(device)
        share = (time.perf_counter() - start) / sum(len(t) for t in tokens)
        for i, (row, answer) in enumerate(zip(rows, tokens, strict=True)):
            line = self._sample(row, answer, share, len(rows))
            # of methods that mask: what they hold says nothing about how little they read
            self.add(
                row,
                {**line, **({"attended": attended[i]} if i in attended else {})},
                held[i],
                len(answer) - 1,
                stored.get(i),
            )

    def _ending(self, row: Row) -> Ending:
        task = row.cell.task
        return Ending(
            row.example.max_new_tokens,
            self.host.stop | self._last_tokens(task.stop),
            max(task.min_new_tokens, self.host.policy.min_new_tokens or 0),
            self._last_tokens(task.forbid_first),
            self.host.sampling.temperature,
            self.host.sampling.top_p,
            zlib.crc32(f"{self.host.sampling.sample_seed}/{row.example.id}".encode()),
        )

    def _last_tokens(self, texts: Sequence[str]) -> frozenset[int]:
        """The last token of each text, as LongBench stops samsum at a newline."""
        return frozenset(self.host.tokenizer.encode(t, add_special_tokens=False)[-1] for t in texts)

    def _encode(self, example: Example, task: Task) -> Encoded:
        if example.tokens:
            return self._text(example)
        context = self.host.context
        room = None if context is None else context - example.max_new_tokens
        return encode(self.host.tokenizer, example, task, self.host.policy, room)

    def _text(self, example: Example) -> Encoded:
        """The prefix of a text to be scored."""
        return Encoded(example.tokens[: int(example.meta["prefix"])], (), 0)

    def _sample(self, row: Row, answer: list[int], seconds_per_token: float, batch: int) -> Sample:
        ending = self._ending(row)
        kept_ids = answer[:-1] if answer and answer[-1] in ending.stop else answer
        text = self.host.tokenizer.decode(kept_ids, skip_special_tokens=True)
        line = self._line(row, len(answer), seconds_per_token, batch)
        value = score(row.cell.task.metric, row.cell.task.answer(text), row.example)
        return {**line, "prediction": text, "score": value, "answers": list(row.example.answers)}

    def _line(self, row: Row, new_tokens: int, seconds_per_token: float, batch: int) -> Sample:
        """What every stored line says, whatever the example was scored by."""
        capacity = row.cell.chain.capacity(row.measured.n)
        return {
            "id": row.example.id,
            **asdict(row.measured),
            "cut": row.cut,
            "shrunk": bool(capacity and capacity.shrunk),
            "new_tokens": new_tokens,
            "meta": dict(row.example.meta),
            "timing": {
                "prefill_s": round(row.cache.prefill_s, 6),
                "compress_s": round(row.cache.compress_s, 6),
                "decode_s": round(seconds_per_token * new_tokens, 6),
                "batch_rows": batch,
            },
        }


def run_group(
    host: Host,
    group: Group,
    store: ResultStore,
    provenance: dict[str, Any],
    shard: int,
    mix: bool,
    tick: Tick,
    listeners: Listeners | None = None,
) -> dict[str, str]:
    """Measure what is missing of one group; returns the reasons of refused cells by cell id.

    Whatever ends it early (interrupt, full disk, out of memory), finished examples stay and are not run again.
    """
    todo = pending(group, {c.id: list(store.samples(c.id)) for c in group.cells})
    if not todo:
        return {}
    with ExitStack() as stack:
        writers = {}
        for cell in group.cells:
            if any(cell in cells for cells in todo.values()):
                writers[cell.id] = store.open(cell, {**provenance, **cell.chain.provenance()}, shard, mix)
                stack.callback(writers[cell.id].close)
        run = GroupRun(host, store, writers, tick, listeners or Listeners())
        stack.enter_context(attached(host.model))
        for example in group.examples:
            if example.id in todo:
                run.read(example, todo[example.id])
                if run.full():
                    run.flush()
        run.flush()
        return run.refused


def provenance(model: PreTrainedModel, threads: int) -> dict[str, Any]:
    """What the numbers were measured with. ``torch`` is the minor version: patches do not change results."""
    device = model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {platform.machine()}"
    return {
        "kvbench": kvbench.__version__,
        "commit": git_commit(),
        "device": name,
        "threads": threads,
        "torch": ".".join(torch.__version__.split("+")[0].split(".")[:2]),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "packed": "compiled" if device.type == "cpu" and native.available() else "plain",
    }


def git_commit() -> str | None:
    """The commit of the clone that the package runs from, with ``+`` if it has local changes; None elsewhere."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        git = ["git", "-C", os.fspath(root)]
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, timeout=10)
        dirty = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if commit.returncode:
        return None
    return commit.stdout.strip() + ("+" if dirty.stdout.strip() else "")

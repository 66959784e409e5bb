"""The plan of a run, checked without loading weights: its groups of cells, and their remaining work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvbench.base.errors import UsageError
from kvbench.base.example import Example
from kvbench.base.visible import say
from kvbench.engine.batch import default_rows
from kvbench.engine.calibration.session import DEFAULT_FOLDER, Session
from kvbench.engine.processors import count_allowed
from kvbench.engine.shared_prefix import check_pieces
from kvbench.kv.model_shape import local_layers
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.recipe import Request
from kvbench.models import load, traits
from kvbench.plan import equal_memory
from kvbench.plan.advice import LITTLE_LEFT, about_ignored, about_larger_caches, about_left_out, about_prompts
from kvbench.plan.cells import Group, build_groups, pending, rounds
from kvbench.plan.config import RunConfig
from kvbench.plan.estimate import Estimate, count_longest, estimate, keeps_everything
from kvbench.plan.inputs import Inputs
from kvbench.store.cell import Cell
from kvbench.store.results import CellRecord, Sample
from kvbench.store.store import ResultStore
from kvbench.tasks.base import Tokenizer
from kvbench.tasks.encoding import encode_prompt
from kvbench.tasks.prompt import Encoded
from kvbench.tasks.source import data_root

SMALL_MODEL = 256
"""The hidden size below which a model runs on one thread."""


@dataclass(frozen=True)
class GroupTodo:
    """The remaining work of one group in prompts and answers, and the answers already stored.

    task: the group's column.
    methods, cells: the labels and the ids of the group's cells.
    examples, of: the number of the task's examples in this run, and in all.
    answers_to_do, answers_done: the number of answers to decode, and of answers in the store.
    prefills: the prompts to read.
    prefills_saved: the answers that share the prefill of another answer.
    calibrations: a text for each calibration to compute before any answer.
    """

    task: str
    methods: list[str]
    cells: list[str]
    examples: int
    of: int
    answers_to_do: int
    answers_done: int
    prefills: int
    prefills_saved: int
    calibrations: list[str]


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run: its groups of cells, with all facts that are known before weights are loaded.

    The run's configuration, data, checkpoint and results folder were found good.

    cfg: the run's configuration.
    source: the checkpoint's configuration, folder and fingerprint.
    tokenizer: the checkpoint's tokenizer.
    groups: the groups of cells, one for each task.
    context: the tokens that the model can read; None if unknown.
    dtype: the model's number type, by PyTorch's name.
    store: the store of results.
    session: reads and computes the calibrations of this model.
    matched: the chains whose kv_size was chosen for equal memory.
    model: a model that the user has loaded; None if the checkpoint's weights are loaded.
    refused: the reasons why methods cannot run on this model, by label. They are left out.
    """

    cfg: RunConfig
    source: load.ModelSource
    tokenizer: Tokenizer
    groups: tuple[Group, ...]
    context: int | None
    dtype: str
    store: ResultStore
    session: Session
    matched: tuple[equal_memory.Matched, ...] = ()
    model: PreTrainedModel | None = None
    refused: Mapping[str, str] = field(default_factory=dict)

    def left(self, group: Group) -> dict[str, list[Cell]]:
        """Return the cells that still need each example, by example id. Leave out examples that no cell needs."""
        return pending(self.drop_damaged(group), self.store)

    def drop_damaged(self, group: Group) -> Group:
        """Return the group without the cells with damaged files. Such cells are neither read nor measured."""
        return replace(group, cells=tuple(c for c in group.cells if self.store.damage(c.id) is None))

    def advice(self) -> list[str]:
        """Return notes, before any prompt is read, on settings known to be untested, pointless or harmful."""
        tasks = [g.task for g in self.groups]
        model = traits.of_config(self.source.config)
        notes = [note for note in (model.note, model.shape.note) if note]
        calibration_keys = [f"{key}=" for key in ("calibration", "calibration_text") if getattr(self.cfg, key)]
        if calibration_keys and not any(self.session.requests(entry.chain) for entry in self.cfg.chains):
            verb = "are" if len(calibration_keys) > 1 else "is"
            keys = " and ".join(calibration_keys)
            notes.append(f"{keys} {verb} not read: no method of this run is calibrated.")
        notes += about_left_out(tasks)
        notes += about_prompts(self.cfg.prompt, tasks, self.tokenizer)
        notes += about_ignored(self.cfg, tasks)
        notes += self._note_unreached_budgets()
        longest = max(self._count_tokens(group, group.examples[0]) for group in self.groups)
        notes += about_larger_caches(self.cfg.chains, model.shape, longest)
        return notes

    def note_drawn_answers(self) -> list[str]:
        """Return the note that the answers drawn for one prompt count as one; [] if a prompt has one answer."""
        count = max((group.task.samples for group in self.groups), default=1)
        if count == 1:
            return []
        return [f"The {count} answers drawn for a prompt (samples_per_prompt=) are counted as one answer."]

    def note_cut_prompts(self) -> list[str]:
        """Return a note for each task whose first prompt will be cut to a small part of its tokens."""
        notes = []
        for group in self.groups:
            # texts that are scored are never cut
            first = next((e for e in group.examples if not e.scored), None)
            if first is None:
                continue
            encoded = self._encode(first, group)
            if encoded is None:
                continue
            tokens_left = len(encoded)
            all_tokens = tokens_left + encoded.cut
            if tokens_left < LITTLE_LEFT * all_tokens:
                notes.append(
                    f"{group.column}: the first prompt is cut to {tokens_left:,} of {all_tokens:,} tokens "
                    "(the model's context or max_length=): what is asked for may be cut out, and scores may say "
                    "nothing."
                )
        return notes

    def _encode(self, example: Example, group: Group) -> Encoded | None:
        """Return a prompt as token ids, or None if it cannot be encoded. The runner meets and reports that error."""
        try:
            return encode_prompt(self.tokenizer, example, group.task, self.cfg.prompt, self.context)
        # templates and tokenizers are the user's, and may raise anything
        except Exception:
            return None

    def _count_tokens(self, group: Group, example: Example) -> int:
        if example.scored is not None:
            return len(example.scored.ids)
        encoded = self._encode(example, group)
        if encoded is None:
            return 0
        return len(encoded)

    def _note_unreached_budgets(self) -> list[str]:
        """Return a note for each method whose budget exceeds every prompt of a task with its answer."""
        columns_by_label: dict[str, list[str]] = {}
        for group in self.groups:
            # the tokens of the longest prompt; 0 if no example is left to answer
            remaining = self.left(group)
            examples = [example for example in group.examples if example.id in remaining]
            n = count_longest(examples, partial(self._count_tokens, group))
            answer = max((e.max_new_tokens for e in group.examples), default=0)
            for cell in group.cells:
                if n and keeps_everything(cell.chain, n, answer):
                    columns_by_label.setdefault(cell.label, []).append(f"{group.column} (at most {n} tokens)")
        notes = []
        for label, columns in columns_by_label.items():
            notes.append(
                f"{label}: nothing will be compressed of {', '.join(columns)}: no prompt is longer than its budget."
            )
        return notes

    def load_model(self) -> PreTrainedModel:
        """Return the model that the user gave, or read the checkpoint's weights now."""
        if self.model is not None:
            return self.model
        return load.load_weights(self.cfg.model, self.source, load.resolve_device(self.cfg.device))

    def share_layers(self) -> dict[torch.device, float]:
        """Return the devices that will hold the model, each with its share of the layers.

        If ``device_map`` decides, all GPUs of this machine get equal shares.
        """
        device = load.resolve_device(self.cfg.device)
        if self.cfg.model.device_map and device.type == "cuda":
            count = torch.cuda.device_count()
            return {torch.device("cuda", i): 1 / count for i in range(count)}
        return {device: 1.0}

    def count_prefills(self, group: Group, parts: Sequence[Group]) -> int:
        """Return how many prompts are read if the group runs in ``parts``."""
        count = 0
        for cells in self.left(group).values():
            for part in parts:
                part_ids = {c.id for c in part.cells}
                # methods with equal keys share a prefill
                count += len({c.chain.prefill_key for c in cells if c.id in part_ids})
        return count

    def estimate(self, group: Group) -> Estimate:
        """Return the estimate of the memory and time that the group's remaining work takes."""
        config, dtype = self.source.config, getattr(torch, self.dtype)
        device = load.resolve_device(self.cfg.device)

        group = self.drop_damaged(group)
        return estimate(
            group,
            self.left(group),
            {c.id: self.store.samples(c.id) for c in group.cells},
            traits.shape_of(config),
            itemsize=dtype.itemsize,
            hidden_size=int(config.hidden_size),
            rows=self.cfg.batch_rows or default_rows(device),
            prompt_tokens=partial(self._count_tokens, group),
        )

    def samples(self, group: Group, cell: Cell) -> dict[str, Sample]:
        """Return a cell's stored samples by example, for this run's examples only."""
        ids = {e.id for e in group.examples}
        return {i: sample for i, sample in self.store.samples(cell.id).items() if i in ids}

    def answers(self, row: int) -> dict[str, dict[str, float]]:
        """Return the stored scores in [0, 1] of the cells at index ``row``, by task and example.

        All groups must have their cells in the same order, so that an index stands for a method.
        """
        by_task = {}
        for group in self.groups:
            # sort them, since resamples depend on the order
            samples = sorted(self.samples(group, group.cells[row]).items())
            scores = {i: sample.score for i, sample in samples if sample.score is not None}
            if scores:
                by_task[group.task.id] = scores
        return by_task

    def records(self) -> list[CellRecord]:
        """Return the records of this run's cells that have an answer in the store."""
        records = []
        for cell in self._list_cells():
            if self.store.damage(cell.id) is not None:
                continue
            # a file's size tells whether it has answers, without reading it
            sample_files = self.store.folder(cell.id).glob("samples-*.jsonl")
            if not any(file.stat().st_size for file in sample_files):
                continue
            record = self.store.cell(cell.id)
            if record is not None:
                records.append(record)
        return records

    def _list_cells(self) -> Iterator[Cell]:
        for group in self.groups:
            yield from group.cells

    def todo(self) -> list[GroupTodo]:
        """Return for each group the prompts to read, the answers to decode and the answers already stored."""
        todos = []
        for group in self.groups:
            remaining = self.left(group)
            answers_to_do = sum(len(cells) for cells in remaining.values())
            # each round reads the prompts again; here a round has one group
            prefills = self.count_prefills(group, [part for (part,) in rounds([group])])
            # several methods may need the same calibration, which is computed once
            missing: dict[str, Request] = {}
            for cells in remaining.values():
                for cell in cells:
                    missing |= {request.key: request for request in self.session.missing(cell.chain)}
            calibrations = []
            for request in missing.values():
                recipe = request.recipe
                size = f"{recipe.samples} samples of {recipe.tokens} tokens"
                calibrations.append(f"{recipe.kind} ({size}, {request.text})")
            todo = GroupTodo(
                task=group.column,
                methods=labels(group),
                cells=[c.id for c in group.cells],
                examples=len(group.examples),
                of=len(group.task.examples),
                answers_to_do=answers_to_do,
                answers_done=len(group.cells) * len(group.examples) - answers_to_do,
                prefills=prefills,
                prefills_saved=answers_to_do - prefills,
                calibrations=calibrations,
            )
            todos.append(todo)
        return todos

    def bound(self, groups: Sequence[Group], model: PreTrainedModel, quiet: bool) -> tuple[Group, ...]:
        """Return groups with every chain bound to its calibration. Compute missing calibrations first.

        quiet: True to show no progress.
        """
        # a chain stands in every group, and needs to be bound once
        calibrated: dict[Chain, Chain] = {}
        bound_groups = []
        for group in groups:
            cells = []
            for cell in group.cells:
                if cell.chain not in calibrated:
                    calibrated[cell.chain] = self.session.bind(cell.chain, model, quiet)
                cells.append(replace(cell, chain=calibrated[cell.chain]))
            bound_groups.append(replace(group, cells=tuple(cells)))
        return tuple(bound_groups)


def labels(group: Group) -> list[str]:
    """Return the labels of a group's cells."""
    return [cell.label for cell in group.cells]


def prepare(cfg: RunConfig, reading: bool = False, inputs: Inputs | None = None) -> RunPlan:
    """Return the plan of a run, after all checks that need no weights. Raises UsageError naming key and value.

    reading: True if nothing will be written, so that the results folder need not be writable.
    inputs: the tokenizers and tasks that the caller's other plans have read; None: there are none.
    """
    if inputs is None:
        inputs = Inputs()
    store = ResultStore(Path(cfg.results).expanduser())
    if not reading:
        store.check()
    # refuse a missing device before anything is read
    load.resolve_device(cfg.device)
    source = load.locate(cfg.model)
    plan = plan_run(cfg, source, inputs.tokenizer(cfg.model, source), store, inputs=inputs)
    if not reading:
        for cell in plan._list_cells():
            damage = store.damage(cell.id)
            if damage is not None:
                say(f"{cell.label} on {cell.column} is left out: {damage}")
    return plan


def plan_run(
    cfg: RunConfig,
    source: load.ModelSource,
    tokenizer: Tokenizer,
    store: ResultStore,
    model: PreTrainedModel | None = None,
    inputs: Inputs | None = None,
) -> RunPlan:
    """Return the plan of a run on a checkpoint, or on a ``model`` that is loaded already.

    No weights are read, and nothing is measured. Methods that cannot run on this model are left out with a message.
    Raises UsageError if no method is left.
    """
    if cfg.data_root:
        # refuse a missing folder even if no dataset reads it
        data_root(cfg.data_root)
    identity = identify(cfg, source, load.resolve_device(cfg.device))
    context = traits.context_length(source.config, cfg.model.context)
    shape = traits.shape_of(source.config)
    session = open_session(cfg, identity, tokenizer, context)
    check_pieces(cfg.shared_prefix, source.config)
    refused = find_refusals(cfg, source)
    # the full cache alone would answer nothing that was asked
    if refused and len(refused) == sum(bool(entry.chain.stages) for entry in cfg.chains):
        raise UsageError(next(iter(refused.values())))
    cfg = replace(cfg, chains=tuple(entry for entry in cfg.chains if entry.label not in refused))
    cfg, matched = equal_memory.match_budgets(cfg, shape)
    groups = build_groups(cfg, identity, tokenizer, context, shape.layers, session.chain_identity, inputs)
    for label, why in refused.items():
        say(f"{label} is left out: {why}")
    return RunPlan(
        cfg=cfg,
        source=source,
        tokenizer=tokenizer,
        groups=tuple(groups),
        refused=refused,
        context=context,
        dtype=str(identity["dtype"]),
        store=store,
        session=session,
        matched=matched,
        model=model,
    )


def find_refusals(cfg: RunConfig, source: load.ModelSource) -> dict[str, str]:
    """Return the reasons why methods of the run cannot run on this model, by label."""
    model = traits.of_config(source.config)
    reasons = {}
    for entry in cfg.chains:
        try:
            entry.chain.check_model(model)
        except UsageError as error:
            reasons[entry.label] = str(error)
    return reasons


def identify(cfg: RunConfig, source: load.ModelSource, device: torch.device) -> dict[str, object]:
    """Return the facts about the model that are part of a cell's identity."""
    facts: dict[str, object] = {
        "fingerprint": source.fingerprint,
        "weights": cfg.model.weights,
        "attention": cfg.model.attention,
        "rope_scaling": cfg.model.rope_scaling,
        "dtype": str(load.resolve_dtype(cfg.model, device, source.config)).removeprefix("torch."),
    }
    # earlier versions compressed local layers, or left them exact under formats: this fact tells their results apart
    if local_layers(source.config):
        facts["local"] = "coded by formats"
    return facts


def open_session(cfg: RunConfig, identity: Mapping[str, object], tokenizer: Tokenizer, context: int | None) -> Session:
    """Return the session that reads and computes the calibrations of this run's model.

    identity: the facts about the model that decide numbers.
    context: the tokens that the model can read; None if unknown.
    """
    return Session(
        folder=Path(cfg.calibration or Path(cfg.results) / DEFAULT_FOLDER).expanduser(),
        identity=identity,
        tokenizer=tokenizer,
        context=context,
        own_corpus=cfg.model.path == "embedded:tiny",
        text=cfg.calibration_text,
        data=cfg.data_root,
    )


def threads(cfg: RunConfig, config: Any, available: int | None = None) -> int:
    """Return how many threads to use: the configured number, else one for a model narrower than SMALL_MODEL.

    config: the model's configuration.
    available: the threads for all other models; None: PyTorch's own number within the system's limit.
    """
    if cfg.threads:
        return cfg.threads
    # tiny matrices are faster on one thread, since several threads mostly wait
    if int(getattr(config, "hidden_size", SMALL_MODEL)) < SMALL_MODEL:
        return 1
    if available is None:
        available = min(torch.get_num_threads(), count_allowed())
    return available

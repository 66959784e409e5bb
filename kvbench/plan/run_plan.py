"""A run that was checked without loading weights, with the work that is left of it and the memory and time for that."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from kvbench.base.errors import KvbenchError, Refused, say
from kvbench.base.example import Example
from kvbench.engine import memory, precision
from kvbench.engine.calibration.session import DEFAULT_FOLDER, Session
from kvbench.engine.processors import allowed
from kvbench.engine.shared_prefix import check_pieces
from kvbench.kv.model_shape import Shape, from_config, local_layers
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.loading import located
from kvbench.methods.core.shared_functions import Functions
from kvbench.methods.core.walls import contained
from kvbench.models import load, traits
from kvbench.plan import equal_memory
from kvbench.plan.advice import LITTLE_LEFT, about_ignored, about_prompts
from kvbench.plan.cells import Cell, Group, GroupPlan, GroupTodo, Plan, build_groups, pairs, pending, rounds
from kvbench.plan.config import RunConfig
from kvbench.plan.estimate import Estimate, cache_bytes, estimate
from kvbench.run.host import default_rows, encode_prompt
from kvbench.store.results import CellRecord, Sample
from kvbench.store.store import ResultStore
from kvbench.tasks.base import Tokenizer
from kvbench.tasks.prompt import Encoded
from kvbench.tasks.source import data_root

SMALL_MODEL = 256


@dataclass(frozen=True)
class RunPlan:
    """A run whose configuration, data, checkpoint and results folder were found good; no weights are loaded yet.

    unplanned: why a method that is not kvbench's own is left out, by its label: it fails when it is asked for a plan.
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
    unplanned: Mapping[str, str] = field(default_factory=dict)

    def left(self, group: Group) -> dict[str, list[Cell]]:
        """Return the cells that still need each example, by example id, without examples that no cell needs."""
        usable = self.usable(group)
        return pending(usable, {c.id: list(self.store.lines(c.id)) for c in usable.cells})

    def usable(self, group: Group) -> Group:
        """Return the group without the cells whose files are damaged: these are neither read nor measured."""
        return replace(group, cells=tuple(c for c in group.cells if self.store.damage(c.id) is None))

    def advice(self) -> list[str]:
        """Return notes on settings known to be untested, pointless or harmful, before any prompt is read."""
        model = traits.of_config(self.source.config)
        prompts = about_prompts(self.cfg.prompt, [g.task for g in self.groups], self.tokenizer)
        notes = [note for note in (model.note, model.shape.note) if note]
        given = [k for k in ("calibration", "calibration_text") if getattr(self.cfg, k)]
        if given and not any(self.session.requests(e.chain) for e in self.cfg.chains):
            keys = " and ".join(f"{key}=" for key in given)
            notes.append(f"{keys} {'are' if len(given) > 1 else 'is'} not read: no method of this run is calibrated.")
        ignored = about_ignored(self.cfg, [g.task for g in self.groups])
        return [*notes, *prompts, *ignored, *self._unreached()]

    def cuts(self) -> list[str]:
        """Return a note for each task whose first prompt is cut to a small part of its tokens, before it is read."""
        notes = []
        for group in self.groups:
            first = next((e for e in group.examples if not e.tokens), None)
            encoded = None if first is None else self._encoded(first, group)
            if encoded is None or len(encoded) >= LITTLE_LEFT * (len(encoded) + encoded.cut):
                continue
            notes.append(
                f"{group.column}: the first prompt is cut to {len(encoded):,} of {len(encoded) + encoded.cut:,} tokens "
                "(the model's context or max_length=): what is asked for may be cut out, and scores may say nothing."
            )
        return notes

    def _encoded(self, example: Example, group: Group) -> Encoded | None:
        """Return a prompt as token ids; None where it cannot be: the runner meets that again, and says why."""
        try:
            return encode_prompt(self.tokenizer, example, group.task, self.cfg.prompt, self.context)
        except Exception:
            return None

    def _unreached(self) -> list[str]:
        """Return a note for each method whose budget is larger than every prompt of a task with its answer."""
        tasks: dict[str, list[str]] = {}
        for group in self.groups:
            n = self.estimate(group).prompt_tokens
            answer = max((e.max_new_tokens for e in group.examples), default=0)
            for cell in group.cells:
                if n and keeps_everything(cell.chain, n, answer):
                    tasks.setdefault(cell.label, []).append(f"{group.column} (at most {n} tokens)")
        return [
            f"{label}: nothing will be compressed of {', '.join(columns)}: no prompt is longer than its budget."
            for label, columns in tasks.items()
        ]

    def plan(self) -> Plan:
        """Return what is left to measure, with the memory and time of each group and the memory limit.

        No weights are loaded.
        """
        limit = memory.cache_limit(self.cfg.memory, self.devices())
        weights = int(memory.USED_SHARE * load.weight_bytes(self.source))
        cache_memory = limit if self.cfg.memory is not None else max(0, limit - weights)
        device = load.resolve_device(self.cfg.device)
        estimates = {g.column: self.estimate(g) for g in self.groups}
        parts_of: dict[str, list[Group]] = {g.column: [] for g in self.groups}
        shared = dict.fromkeys(parts_of, 0)  # contexts that are read with another group's prompts
        for together in rounds(self.groups):
            for pair in pairs(together):
                parts_of_pair = [estimates[g.column].parts(g, cache_memory) for g in pair]
                for group, its_parts in zip(pair, parts_of_pair, strict=True):
                    parts_of[group.column] += its_parts
                if len(pair) == 2 and all(len(its_parts) == 1 for its_parts in parts_of_pair):
                    seen, withheld = pair
                    shared[withheld.column] += self._shared(seen, withheld)
        groups = []
        for group, todo in zip(self.groups, self.todo(), strict=True):
            group_estimate, parts = estimates[group.column], parts_of[group.column]
            extra_prefills = self._prefills(group, parts) - todo.prefills - shared[group.column]
            todo = replace(
                todo, prefills=todo.prefills + extra_prefills, prefills_saved=todo.prefills_saved - extra_prefills
            )
            planned = GroupPlan(
                **vars(todo),
                prompt_tokens=group_estimate.prompt_tokens,
                bytes=max((group_estimate.bytes(p.cells, cache_memory) for p in parts), default=0),
                parts=[[c.label for c in p.cells] for p in parts],
                too_large=[c.label for p in parts for c in p.cells if group_estimate.alone(c) > cache_memory],
                seconds=group_estimate.seconds,
            )
            groups.append(planned)
        dtype = precision.dtype_reason(self.cfg.model.dtype, self.dtype, device)
        return Plan(cache_memory, str(device), dtype, groups, [*self.advice(), *self.cuts()])

    def load_model(self) -> PreTrainedModel:
        """Return the model: the one that was given, or the checkpoint's weights, read now."""
        if self.model is not None:
            return self.model
        return load.load_weights(self.cfg.model, self.source, load.resolve_device(self.cfg.device))

    def devices(self) -> dict[torch.device, float]:
        """Return the devices that will hold the model, each with its share of the layers.

        If ``device_map`` decides, all GPUs of this machine get equal shares.
        """
        device = load.resolve_device(self.cfg.device)
        if self.cfg.model.device_map and device.type == "cuda":
            count = torch.cuda.device_count()
            return {torch.device("cuda", i): 1 / count for i in range(count)}
        return {device: 1.0}

    def _prefills(self, group: Group, parts: Sequence[Group]) -> int:
        """Return how many prompts are read if the group runs in ``parts``."""
        part_ids = [{c.id for c in p.cells} for p in parts]
        return sum(
            len({c.chain.prefill_key for c in cells if c.id in ids})
            for cells in self.left(group).values()
            for ids in part_ids
        )

    def _shared(self, seen: Group, withheld: Group) -> int:
        """Return how many contexts are read by the passes over the prompts with their questions in view."""
        left = self.left(seen)
        contexts = (cells for i, cells in self.left(withheld).items() if i in left)
        return sum(any(not c.chain.prefill_key for c in cells) for cells in contexts)

    def estimate(self, group: Group) -> Estimate:
        """Return the estimate of the memory and time that the group's remaining work takes."""
        config, dtype = self.source.config, getattr(torch, self.dtype)
        device = load.resolve_device(self.cfg.device)

        def tokens(example: Example) -> int:
            if example.tokens:
                return len(example.tokens)
            return len(self._encoded(example, group) or ())

        group = self.usable(group)
        samples = {c.id: self.store.samples(c.id) for c in group.cells}
        rows = self.cfg.batch_rows or default_rows(device)
        shape, hidden = from_config(config), int(config.hidden_size)
        functions = Functions()
        try:
            return estimate(group, self.left(group), samples, shape, dtype.itemsize, hidden, rows, tokens)
        finally:
            functions.restored()  # methods are asked for their needs and budgets here, outside all walls

    def samples(self, group: Group, cell: Cell) -> dict[str, Sample]:
        """Return what is stored of a cell by example, of this run's examples alone."""
        ids = {e.id for e in group.examples}
        return {i: sample for i, sample in self.store.samples(cell.id).items() if i in ids}

    def answers(self, row: int) -> dict[str, dict[str, float]]:
        """Return the stored scores in [0, 1] of the cells at index ``row``, by task and example."""
        by_task = {}
        for group in self.groups:
            # sorted: resamples depend on the order
            samples = sorted(self.samples(group, group.cells[row]).items())
            scores = {i: sample.score for i, sample in samples if sample.score is not None}
            if scores:
                by_task[group.task.id] = scores
        return by_task

    def records(self) -> list[CellRecord]:
        """Return the records of this run's cells that have an answer in the store."""
        sound = [c.id for g in self.groups for c in g.cells if self.store.damage(c.id) is None]
        answered = [i for i in sound if any(p.stat().st_size for p in self.store.folder(i).glob("samples-*.jsonl"))]
        return [record for i in answered if (record := self.store.cell(i)) is not None]

    def todo(self) -> list[GroupTodo]:
        """Return for each group the prompts to read, the answers to decode and the answers already stored."""
        plans = []
        for group in self.groups:
            remaining = self.left(group)
            answers = sum(len(cells) for cells in remaining.values())
            prefills = self._prefills(group, [part for (part,) in rounds([group])])
            missing = {r.key: r for cells in remaining.values() for c in cells for r in self.session.missing(c.chain)}
            computed = [(request.recipe, request.text) for request in missing.values()]
            todo = GroupTodo(
                task=group.column,
                methods=[c.label for c in group.cells],
                cells=[c.id for c in group.cells],
                examples=len(group.examples),
                of=len(group.task.examples),
                answers_to_do=answers,
                answers_done=len(group.cells) * len(group.examples) - answers,
                prefills=prefills,
                prefills_saved=answers - prefills,
                calibrations=[f"{r.kind} ({r.samples} samples of {r.tokens} tokens, {text})" for r, text in computed],
            )
            plans.append(todo)
        return plans

    def bound(self, groups: Sequence[Group], model: PreTrainedModel, quiet: bool) -> tuple[Group, ...]:
        """Return groups with every chain bound to its calibration. Missing calibrations are computed first."""
        chains = list(dict.fromkeys(c.chain for g in groups for c in g.cells))
        ready = {chain: self.session.bind(chain, model, quiet) for chain in chains}
        return tuple(replace(g, cells=tuple(replace(c, chain=ready[c.chain]) for c in g.cells)) for g in groups)


def keeps_everything(chain: Chain, n: int, answer: int) -> bool:
    """Return True if a method does nothing but choose tokens, and its budget is never reached.

    ``n`` and ``answer`` are the tokens of the prompt and of the longest answer.
    """
    if not chain.stages or any(s.role not in ("selector", "modifier") for s in chain.stages):
        return False
    capacity = chain.capacity(n)
    # without a budget of the user's the data decide, and a capacity is only the most that may stay
    if capacity is None or capacity.tokens < n or chain.selector is None or chain.selector.nominal(n) is None:
        return False
    evictor = chain.evictor
    if evictor is None or (evictor.every and answer <= evictor.every):  # it never comes to choose while decoding
        return True
    # a capacity is cut to the prompt, and the budget while decoding is not
    sizes = [getattr(chain.selector, name, None) for name in ("decode_budget", "kv_size")]
    budget = next((size for size in sizes if size is not None), capacity.tokens)
    return bool(budget >= n + answer)


def prepare(cfg: RunConfig, reading: bool = False) -> RunPlan:
    """Return the plan of a run, after all checks that need no weights. Raises UsageError naming key and value.

    With ``reading`` nothing will be written, so the results folder need not be writable.
    """
    store = ResultStore(Path(cfg.results).expanduser())
    if not reading:
        store.check()
    load.resolve_device(cfg.device)
    source = load.locate(cfg.model)
    plan = plan_of(cfg, source, lambda: cast(Tokenizer, load.load_tokenizer(cfg.model, source)), store)
    if not reading:
        for cell in (c for g in plan.groups for c in g.cells):
            damage = store.damage(cell.id)
            if damage is not None:
                say(f"{cell.label} on {cell.column} is left out: {damage}")
    return plan


def plan_of(
    cfg: RunConfig,
    source: load.ModelSource,
    tokenizer: Callable[[], Tokenizer],
    store: ResultStore,
    model: PreTrainedModel | None = None,
) -> RunPlan:
    """Return the plan of a run on a checkpoint, or on a ``model`` that is loaded already."""
    if cfg.data_root:
        data_root(cfg.data_root)  # a folder that is not there is refused even where no dataset reads it
    loaded_tokenizer = tokenizer()
    identity = identify(cfg, source, load.resolve_device(cfg.device))
    context = context_of(cfg, source)
    session = open_session(cfg, identity, loaded_tokenizer, context)
    unplanned = {e.label: why for e in cfg.chains if (why := _asked(e.chain, _plain_questions)) is not None}
    cfg = replace(cfg, chains=tuple(e for e in cfg.chains if e.label not in unplanned))
    foreign = [e.chain.name for e in cfg.chains if e.chain.foreign]
    with contained(", ".join(foreign), bool(foreign), seed=0, watched=False):  # methods are asked for needs and budgets
        cfg, matched = equal_memory.settle(cfg, from_config(source.config))
        check_model(cfg, source)
        groups = tuple(build_groups(cfg, identity, loaded_tokenizer, context, session.chain_identity))
    if foreign:
        lengths = _lengths(groups, cfg, loaded_tokenizer, context)
        ask = partial(_budget_questions, shape=from_config(source.config), lengths=lengths)
        unplanned |= {e.label: why for e in cfg.chains if (why := _asked(e.chain, ask)) is not None}
    groups = tuple(replace(g, cells=tuple(c for c in g.cells if c.label not in unplanned)) for g in groups)
    cfg = replace(cfg, chains=tuple(e for e in cfg.chains if e.label not in unplanned))
    for label, why in unplanned.items():
        if not any(g.cells for g in groups):
            raise KvbenchError(f"{label}: {why}")
        say(f"{label} is left out: {why}")
    return RunPlan(
        cfg=cfg,
        source=source,
        tokenizer=loaded_tokenizer,
        groups=groups,
        unplanned=unplanned,
        context=context,
        dtype=identity["dtype"],
        store=store,
        session=session,
        matched=matched,
        model=model,
    )


def _asked(chain: Chain, ask: Callable[[Chain], object]) -> str | None:
    """Return why a method that is not kvbench's own cannot answer what ``ask`` asks of it, None if it can.

    All of it is asked here once, in its walls, so that a method that fails costs its own row and not the run.
    """
    if not chain.foreign:
        return None
    try:
        with contained(chain.name, seed=0):
            ask(chain)
    except Refused:
        return None  # the runner meets it on a prompt, and refuses the cell
    except Exception as error:
        return located(error, chain.name)
    return None


def _plain_questions(chain: Chain) -> object:
    """Ask a method what is read of it before its prompts are known."""
    return chain.identity(), chain.prefill_key, chain.evictor, chain.rolled, hash(chain)


def _budget_questions(chain: Chain, shape: Shape, lengths: Collection[int]) -> None:
    """Ask a method for its budgets and bytes on prompts of these lengths."""
    for n in lengths:
        chain.needs(n)
        cache_bytes(chain, shape, n, itemsize=2)
        keeps_everything(chain, n, answer=1)


def _lengths(groups: Sequence[Group], cfg: RunConfig, tokenizer: Tokenizer, context: int | None) -> set[int]:
    """Return the tokens of the first and of the longest prompt of each group."""
    lengths = set()
    for group in groups:
        longest = sorted(group.examples, key=lambda e: len(e.tokens) or len(e.prompt))[-1:]
        for example in (*group.examples[:1], *longest):
            with suppress(Exception):  # the runner meets a prompt that cannot be encoded again, and says why
                tokens = example.tokens or encode_prompt(tokenizer, example, group.task, cfg.prompt, context)
                lengths.add(len(tokens))
    return lengths


def check_model(cfg: RunConfig, source: load.ModelSource) -> None:
    """Raise UsageError if a method of the run cannot run on this model, or it cannot read prompts in pieces."""
    model = traits.of_config(source.config)
    check_pieces(cfg.shared_prefix, source.config)
    for entry in cfg.chains:
        entry.chain.check_model(model)


def identify(cfg: RunConfig, source: load.ModelSource, device: torch.device) -> dict[str, Any]:
    """Return the facts about the model that are part of a cell's identity.

    ``local`` is one of them only where local layers pass through: once methods compressed these, too.
    """
    return {
        "fingerprint": source.fingerprint,
        "weights": cfg.model.weights,
        "attention": cfg.model.attention,
        "rope_scaling": cfg.model.rope_scaling,
        "dtype": str(load.resolve_dtype(cfg.model, device, source.config)).removeprefix("torch."),
        **({"local": "passed through"} if local_layers(source.config) else {}),
    }


def context_of(cfg: RunConfig, source: load.ModelSource) -> int | None:
    """Return how many tokens the model can read, as configured or else as its checkpoint says; None if unknown."""
    return cfg.model.context or getattr(source.config, "max_position_embeddings", None)


def open_session(cfg: RunConfig, identity: Mapping[str, Any], tokenizer: Tokenizer, context: int | None) -> Session:
    """Return the session that reads and computes the calibrations of this run's model."""
    return Session(
        folder=Path(cfg.calibration or Path(cfg.results) / DEFAULT_FOLDER).expanduser(),
        identity=identity,
        tokenizer=tokenizer,
        context=context,
        own_corpus=cfg.model.path == "embedded:tiny",
        text=cfg.calibration_text,
        data=cfg.data_root,
    )


def threads(cfg: RunConfig, config: Any) -> int:
    """Return how many threads to use: the configured number, else one for a model narrower than SMALL_MODEL.

    Without either it is PyTorch's default, within what the system allows. Tiny matrices are faster on one thread, since
    several mostly wait.
    """
    small = int(getattr(config, "hidden_size", SMALL_MODEL)) < SMALL_MODEL
    return cfg.threads or (1 if small else min(torch.get_num_threads(), allowed()))

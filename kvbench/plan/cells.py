"""Build the cells of a run's configuration, and the groups of cells that share prefills."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvbench.base.errors import UsageError
from kvbench.base.example import Example
from kvbench.engine.stopping import find_special_token
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.evicting import EvictingSelector
from kvbench.methods.core.resolve import ChainConfig
from kvbench.plan.config import THROUGH_CACHE, DatasetConfig, RunConfig
from kvbench.plan.inputs import Inputs
from kvbench.store.cell import Cell
from kvbench.store.fidelity import fidelity_identity
from kvbench.store.store import ResultStore
from kvbench.tasks.base import UNCUT, Task, Tokenizer
from kvbench.tasks.encoding import encode_prompt
from kvbench.tasks.metrics import check_installed, metric
from kvbench.tasks.prompt import PromptPolicy, check_policy

SCHEMA = 1
"""The version of the facts in a cell's identity. It is one of these facts."""
LEAST_PROMPT = 32
"""Tokens. If the context leaves less room than this for a prompt, the plan encodes the prompt to see what is cut."""


@dataclass(frozen=True)
class Group:
    """The cells of one task, which read the same prompts. Each prompt is read once per distinct prefill key.

    task: the task.
    column: the task with any swept values, as it heads a column of the table.
    cells: one cell for each method.
    examples: this run's examples of the task, those of its limit and shard, in order.
    """

    task: Task
    column: str
    cells: tuple[Cell, ...]
    examples: tuple[Example, ...]

    @property
    def full_cell(self) -> Cell | None:
        """The full cache's cell; None if the run measures no full cache."""
        return next((cell for cell in self.cells if cell.chain.is_full), None)

    def only(self, ids: Container[str]) -> Group:
        """Return the group with only the cells whose id is in ``ids``."""
        return replace(self, cells=tuple(cell for cell in self.cells if cell.id in ids))


def build_groups(
    cfg: RunConfig,
    model_identity: Mapping[str, object],
    tokenizer: Tokenizer | None,
    context: int | None,
    n_layers: int,
    identify: Callable[[Chain], Mapping[str, object]] = Chain.identity,
    inputs: Inputs | None = None,
) -> list[Group]:
    """Return a run's groups, one per task. Each begins with the full cache's cell unless ``baseline=false``.

    model_identity: the facts about the model that decide numbers.
    context: the number of tokens that the model can read; None if unlimited.
    n_layers: the number of layers that methods compress.
    identify: returns all facts that decide a chain's results: the chain's own identity, and its calibration's identity
        if it has one.
    inputs: the tasks read so far; None: none.

    Raises UsageError for data and settings that do not fit each other, and if there is nothing to measure.
    """
    chains = with_baseline(cfg.chains, cfg.baseline)
    groups: list[Group] = []
    if inputs is None:
        inputs = Inputs()
    for dataset in cfg.datasets:
        for task in _load_dataset(cfg, dataset, chains, tokenizer, inputs):
            check_installed(task.metric)
            task = _set_samples(task, cfg.sampling.samples_per_prompt)
            task = replace(task, thought=cfg.prompt.find_thought(tokenizer, task))
            label = dataset.label
            # the examples of a task are alike: all are texts that are scored, or none is
            if task.turns or task.examples[0].scored:
                # here both values of query_aware= mean the same protocol, so neither gets a column of its own
                label = ",".join(part for part in label.split(",") if not part.startswith("query_aware="))
            column = f"{task.id} {label}".strip()
            # both values of query_aware= give this column if its name leaves them out: measure it once
            if any(g.column == column for g in groups):
                continue
            identity = _collect_identity(cfg, task, tokenizer, model_identity, context)
            if task.turns not in ("", "isolated") and "fidelity" in identity:
                raise UsageError(
                    f"{task.id}: kl=true compares questions that do not see each other: take turns=isolated, not "
                    f"turns={task.turns}"
                )
            cells = []
            for config in chains:
                cell_identity = identity | {"chain": identify(config.chain)}
                cells.append(Cell(cell_identity, config.chain, config.label, task=task, column=column))
            check_policy(tokenizer, task, cfg.prompt)
            _check_answers(task, context)
            _check_chunks(task, [c.chain for c in chains], n_layers)
            limit = cfg.limit if cfg.limit is not None else dataset.default_limit
            examples = select_shard(task.take_examples(limit), cfg)
            _check_room(task, examples, cfg.prompt, tokenizer, context)
            groups.append(Group(task, column, tuple(cells), examples))
    # one shard of several may have no example
    if not any(g.examples for g in groups) and cfg.shards == 1:
        raise UsageError("nothing to measure: the datasets have no examples")
    return groups


def _load_dataset(
    cfg: RunConfig, dataset: DatasetConfig, chains: Sequence[ChainConfig], tokenizer: Tokenizer | None, inputs: Inputs
) -> Sequence[Task]:
    """Return the tasks of one dataset of the run, with their examples.

    Raises UsageError for data that are missing, and if tokens are to be read through the cache and cannot.
    """
    knobs = dict(dataset.knobs)
    if cfg.reads_through_cache:
        _check_through_cache(dataset.name, knobs, chains)
        # these windows have no prompt: only their first token is read at once
        knobs["windows"] = "llamacpp"
    return inputs.tasks(
        dataset.name,
        knobs,
        dataset.tasks,
        tokenizer=tokenizer,
        data=cfg.data_root,
        policy=cfg.prompt,
        query_aware=dataset.query_aware,
    )


def _set_samples(task: Task, count: int) -> Task:
    """Return the task with ``count`` answers a prompt. Texts that are scored have no answers, and stay as they are.

    Raises UsageError for several answers where a context has several questions.
    """
    # the examples of a task are alike: all are texts that are scored, or none is
    if count == 1 or task.examples[0].scored:
        return task
    if task.turns:
        raise UsageError(f"{task.id}: samples_per_prompt={count} is not possible where a context has several questions")
    return replace(task, samples=count)


def _collect_identity(
    cfg: RunConfig, task: Task, tokenizer: Tokenizer | None, model_identity: Mapping[str, object], context: int | None
) -> dict[str, object]:
    """Return all facts but the method that decide the numbers of a task's cells, for their ids.

    A text that is scored has no answer: no context limits it, and no settings of decoding apply.

    model_identity: the facts about the model that decide numbers.
    context: the number of tokens that the model can read; None if unlimited.
    """
    prompt = dict(cfg.prompt.identity(task, tokenizer))
    decoding: dict[str, object] = {}
    if not task.examples[0].scored:
        prompt["context"] = context
        decoding = cfg.sampling.identity() | {"model_stop": list(cfg.model.stop)} | task.list_answer_settings()
        if tokenizer is not None and any(find_special_token(tokenizer, text) is None for text in cfg.model.stop):
            # earlier versions ended an answer at the last token of a text, and have other answers under the older id
            decoding["model_stop_at"] = "text"
        if cfg.prompt.min_new_tokens is not None:
            decoding["min_new_tokens"] = max(cfg.prompt.min_new_tokens, task.min_new_tokens)
    identity = {
        "schema": SCHEMA,
        "model": dict(model_identity),
        "task": task.id,
        "content": task.content_hash(),
        "prompt": prompt,
        "decoding": decoding,
        "metric": metric(task.metric).identity(),
    }
    # only some cells have these keys, so that all others keep their ids
    if task.turns:
        identity["turns"] = task.turns
    # some tasks are compared with the full cache in any case, by default settings
    if cfg.kl or task.fidelity:
        tokens = cfg.kl_tokens if cfg.kl else None
        identity["fidelity"] = fidelity_identity(tokens)
    return identity


def _check_through_cache(dataset: str, knobs: Mapping[str, object], chains: Sequence[ChainConfig]) -> None:
    """Raise UsageError unless the dataset's windows have no prompt and methods only change how tokens are stored."""
    if "windows" not in knobs:
        raise UsageError(
            f"kl_mode={THROUGH_CACHE} reads windows of a text, not dataset={dataset}: take dataset=fidelity/wikitext2"
        )
    for config in chains:
        quantiser = config.chain.quantiser
        if quantiser is not None and (quantiser.frozen_bytes("k") or quantiser.frozen_bytes("v")):
            raise UsageError(
                f"kl_mode={THROUGH_CACHE} reads a text through the cache, with no whole prompt from which "
                f"{config.chain.name} could set its scales: take a format with a scale for each token or "
                "block, or kl=true"
            )
        if any(stage.role != "quantise" for stage in config.chain.stages):
            raise UsageError(
                f"kl_mode={THROUGH_CACHE} has no prompt that {config.chain.name} could compress: it compares storage "
                "formats, which code each token as it comes. Take kl=true"
            )


def _check_answers(task: Task, context: int | None) -> None:
    """Raise UsageError if answers cannot be scored, or if they leave no room in the context for their prompts.

    Prompts of the categories UNCUT must fit as a whole.
    """
    # only metrics of likelihoods are printed as a function of their mean, and have a formula
    if metric(task.metric).formula is not None and not task.examples[0].scored:
        raise UsageError(
            f"{task.id}: metric={task.metric} is not possible for answers: it measures texts that the model only "
            "reads, such as those of dataset=wikitext2"
        )
    # an unlimited context has room for all
    if context is None:
        return
    for example in task.examples:
        # the length in tokens; 0 if the prompt may be cut, or its length is unknown
        length = example.meta.get("tokens", 0) if task.category in UNCUT else 0
        if length and length + example.max_new_tokens > context:
            raise UsageError(
                f"{task.id}: {length} tokens and an answer of {example.max_new_tokens} exceed the model's context of "
                f"{context}; cutting the middle could cut what is asked for: lower lengths="
            )
        if not example.scored and example.max_new_tokens >= context:
            raise UsageError(
                f"{task.id}, example {example.id}: max_new_tokens={example.max_new_tokens} leaves no room for a prompt "
                f"in the model's context of {context} tokens"
            )


def _check_room(
    task: Task, examples: Sequence[Example], policy: PromptPolicy, tokenizer: Any, context: int | None
) -> None:
    """Raise UsageError if the context holds little more than an answer, so that most of a prompt would be cut."""
    for example in examples:
        # a prompt is encoded only if the context leaves little room for it
        if example.scored or context is None or context - example.max_new_tokens >= LEAST_PROMPT:
            continue
        encoded = encode_prompt(tokenizer, example, task, policy, context)
        tokens_left = len(encoded)
        # less than half of the prompt is left
        if encoded.cut > tokens_left:
            raise UsageError(
                f"{task.id}, example {example.id}: the model's context of {context} tokens and an answer of "
                f"{example.max_new_tokens} leave {tokens_left} of the prompt's {tokens_left + encoded.cut} tokens: "
                "give a longer model.context= if the model reads more, shorter prompts, or a lower max_new_tokens="
            )


def _check_chunks(task: Task, chains: Sequence[Chain], n_layers: int) -> None:
    """Raise UsageError if a text is fed in chunks that a method cannot take while decoding.

    A chunk may be larger than the method's budget, or may not end where the method chooses tokens again.

    n_layers: the number of layers that methods compress.
    """
    # all texts of a task are fed in equal chunks
    text = task.examples[0].scored
    if text is None:
        return
    for chain in chains:
        selector = chain.selector
        if isinstance(selector, EvictingSelector) and selector.evicts:
            budget = selector.max_chunk(text.prefix, n_layers)
            if budget < text.chunk:
                raise UsageError(
                    f"{task.id}: chunk={text.chunk} tokens at once do not fit into the budget of {budget} that "
                    f"{chain.name} holds after a prefix of {text.prefix}: lower chunk="
                )
        if chain.evictor is None:
            continue
        # a method that chooses again after every so many tokens must find a chunk's end there
        every = chain.evictor.every
        if every % text.chunk:
            raise UsageError(
                f"{task.id}: chunk={text.chunk} does not divide decode_every={every} of {chain.name}, which chooses "
                "again between two chunks: lower chunk="
            )


def with_baseline(chains: Sequence[ChainConfig], baseline: bool) -> list[ChainConfig]:
    """Return the chains with the full cache's first. With ``baseline``, add the full cache if it is missing."""
    full = [c for c in chains if c.chain.is_full]
    compressing = [c for c in chains if c.chain.stages]
    if not full and baseline:
        full = [ChainConfig(Chain(), "full")]
    return full + compressing


def with_full(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells of one prompt. If they are compared with a full cache that is missing, add a hidden one."""
    # all cells of a task are compared, or none is
    if not cells or not cells[0].fidelity or any(c.chain.is_full for c in cells):
        return list(cells)
    # the hidden cell is not stored, so it needs no identity of its own
    hidden_full = replace(cells[0], chain=Chain(), label="full", hidden=True)
    return [*cells, hidden_full]


def rounds(groups: Sequence[Group]) -> list[tuple[Group, ...]]:
    """Return the groups in at most two rounds: first kvbench's own methods, then those from outside.

    So the answers of kvbench's own methods are stored before a user's code compresses anything. Each round reads its
    prompts anew. Groups without cells in a round are left out.
    """
    groups_by_round = []
    for foreign in (False, True):
        groups_of_round = []
        for group in groups:
            cells = tuple(cell for cell in group.cells if cell.chain.foreign == foreign)
            if cells:
                groups_of_round.append(replace(group, cells=cells))
        if groups_of_round:
            groups_by_round.append(tuple(groups_of_round))
    return groups_by_round


def pair_by_question(groups: Sequence[Group]) -> list[tuple[Group, ...]]:
    """Return the groups in tuples of one or two. Two are a task with its question in view, then with it withheld."""
    # the members of each pair so far, in the order in which pairs were begun
    pairs: list[list[Group]] = []
    for group in groups:
        for pair in pairs:
            if _completes(group, pair):
                pair.append(group)
                break
        else:
            # other knobs may give a task several groups of one kind: each begins another pair
            pairs.append([group])
    # query_aware is true for a question in view, and comes first
    return [tuple(sorted(pair, key=lambda group: not group.task.query_aware)) for pair in pairs]


def _completes(group: Group, pair: Sequence[Group]) -> bool:
    """Return True if ``pair`` has one group, of the same task and with its question read at the other time."""
    if len(pair) != 1:
        return False
    (other,) = pair
    return group.task.id == other.task.id and group.task.query_aware != other.task.query_aware


def pending(group: Group, store: ResultStore) -> dict[str, list[Cell]]:
    """Return the cells that still need each example, by example id. Leave out examples that no cell needs."""
    # the ids of the stored examples, by cell
    finished = {c.id: set(store.lines(c.id)) for c in group.cells}
    cells_by_example = {}
    for example in group.examples:
        cells = [c for c in group.cells if example.id not in finished[c.id]]
        if cells:
            cells_by_example[example.id] = cells
    return cells_by_example


def select_shard(examples: Sequence[Example], cfg: RunConfig) -> tuple[Example, ...]:
    """Return the examples of this shard. A hash of an example's id decides its shard, whatever the order and limit."""
    if cfg.shards == 1:
        return tuple(examples)
    examples_here = []
    for example in examples:
        digest = hashlib.sha256(example.id.encode()).hexdigest()
        if int(digest, 16) % cfg.shards == cfg.shard:
            examples_here.append(example)
    return tuple(examples_here)

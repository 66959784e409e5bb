"""The source of figures of activations: a model, the prompts that it reads, and the options of the figure.

``locate`` finds the checkpoint and the texts, from a run's configuration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.base.errors import UsageError
from kvbench.base.example import Example
from kvbench.engine.calibration import text as texts
from kvbench.engine.limits import check_capacity
from kvbench.engine.prefill import prepare_ids
from kvbench.engine.prompt_pass import observe_prompt
from kvbench.kv.model_shape import Shape, from_config
from kvbench.kv.observation import Needs, Observation
from kvbench.methods.core.chain import Chain
from kvbench.models import load, traits
from kvbench.models.interface import sliding_window
from kvbench.papers.figures.figure import Figure
from kvbench.plan.config import RunConfig
from kvbench.run import experiment
from kvbench.tasks.base import Task, Tokenizer, load_tasks, read_text
from kvbench.tasks.prompt import check_policy, encode

OnLayer = Callable[[Observation, Tensor, Tensor], None]
"""A function that takes a layer's observation, its keys and its values [kv heads, n, D]."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as token ids.

    source: the text or task that it is from, as figures show it.
    name: its own name, for errors.
    ids: the token ids [n].
    """

    source: str
    name: str
    ids: Tensor


@dataclass(frozen=True)
class Reading:
    """A model and the prompts that it reads for one figure.

    knobs: the figure's options by name.
    decode: returns the text of a token id.
    tick: is called by the figure after each prompt, to show progress.
    """

    model: PreTrainedModel
    prompts: Sequence[Prompt]
    knobs: Mapping[str, Any] = field(default_factory=dict)
    decode: Callable[[int], str] = str
    tick: Callable[[], None] = lambda: None

    @property
    def shape(self) -> Shape:
        """The model's numbers of layers, heads and channels."""
        return from_config(self.model.config)

    def ids(self, prompt: Prompt, least: int = 2, why: str = "a figure needs two tokens") -> Tensor:
        """Return the prompt's ids [n] on the model's device, cut to the knob ``tokens``.

        Raises UsageError if fewer than ``least`` tokens are left, with ``why`` as the reason. Raises it also for more
        tokens than the model reads with full attention.
        """
        ids = prepare_ids(self.model, prompt.ids)
        if self.knobs.get("tokens") is not None:
            # attention is causal: the first tokens of a prompt are computed as if it ended there
            ids = ids[: self.knobs["tokens"]]
        if len(ids) < least:
            raise UsageError(f"{prompt.name} has {len(ids)} tokens: {why}; give longer prompts, or a higher tokens=")
        check_capacity(self.model, len(ids))
        # a longer prompt would have attention that no longer sums over all of its tokens
        window = sliding_window(self.model.config)
        if window is not None and len(ids) > window:
            raise UsageError(
                f"{prompt.name} has {len(ids)} tokens, and the model attends only to a sliding window of {window}: "
                f"figures show full attention; give tokens={window} or less"
            )
        return ids

    def read(self, ids: Tensor, needs: Needs, on_layer: OnLayer, chain: Chain | None = None) -> None:
        """Read a prompt in one pass, and call ``on_layer`` with each layer's observation, keys and values [Hk, n, D].

        needs: the quantities that the observation must have.
        chain: the methods under which the prompt is read; None for the full cache.
        """
        # only one layer's activations are held at a time, so that long prompts fit into memory
        observe_prompt(self.model, ids, needs, on_layer, chain=chain)

    def layers(self, depths: Sequence[float]) -> list[int]:
        """Return the numbers of the layers to show, ascending: those in the knob ``layers``, else those at ``depths``.

        The layer at depth d, 0 <= d < 1, has the share d of all layers before it. Figures of models with few and with
        many layers are comparable this way. The depth -1 is the last layer. Raises UsageError for a layer that the
        model does not have.
        """
        count = self.shape.layers
        numbers = self.knobs.get("layers")
        if not numbers:
            numbers = []
            for depth in depths:
                if depth < 0:
                    numbers.append(count - 1)
                else:
                    numbers.append(int(depth * count))
        return self._check_numbers("layers", numbers, count)

    def chosen_heads(self, default: Sequence[int], count: int) -> list[int]:
        """Return the numbers of the heads to show, ascending: those in the knob ``heads``, else ``default``.

        Raises UsageError for a head that the model does not have.

        count: the number of heads that the model has, kv heads or query heads as the figure shows.
        """
        return self._check_numbers("heads", self.knobs.get("heads") or default, count)

    def _check_numbers(self, knob: str, numbers: Sequence[int], count: int) -> list[int]:
        """Return layer or head numbers ascending, each once. Raises UsageError for a number of ``count`` or more."""
        absent = [number for number in numbers if number >= count]
        if absent:
            raise UsageError(
                f"{knob}={absent[0]} is not possible: the model has {knob} 0 to {count - 1} in this figure"
            )
        return sorted(set(numbers))


SAMPLES, TOKENS = 6, 1024
"""By default a text is read as so many windows, each of so many tokens."""


@dataclass(frozen=True)
class Origin:
    """A checkpoint and the texts that figures read with it, both checked.

    Prompts come either from tasks or from one long text. Weights are loaded when a figure first asks for ``model``.

    tasks: the tasks of the datasets of ``cfg``, each with the name that figures show; () if a text is read.
    text: the text of a file, or the text by which this model is calibrated; None if tasks are read.
    samples: how many windows of the text are read.
    tokens: the tokens of each window; None for the figure's own number.
    """

    cfg: RunConfig
    source: load.ModelSource
    tokenizer: Tokenizer
    tasks: tuple[tuple[Task, str], ...]
    text: texts.CalibrationText | None = None
    samples: int = SAMPLES
    tokens: int | None = None

    @property
    def context(self) -> int | None:
        """The longest prompt that the model takes, in tokens; None if the model does not state it."""
        return traits.context_length(self.source.config, self.cfg.model.context)

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model. The first access loads its weights."""
        return load.load_weights(self.cfg.model, self.source, load.resolve_device(self.cfg.device))

    def prompts(self, figure: Figure) -> list[Prompt]:
        """Return the prompts that the figure reads: windows of the text, or examples of the tasks."""
        if self.text is not None:
            tokens = self.tokens or figure.knobs.get("tokens") or TOKENS
            # a model that does not state its context reads at most TOKENS, which most models can
            tokens = min(tokens, self.context or TOKENS)
            count = self.samples
            if figure.most:
                count = min(count, figure.most)
            windows = self.text.windows(self.tokenizer, count, tokens)
            return [Prompt(self.text.name, f"sample {i}", ids) for i, ids in enumerate(windows, start=1)]
        # limit= of the user replaces the figure's number of examples
        limit = self.cfg.limit if self.cfg.limit is not None else figure.each
        prompts = []
        for task, name in self.tasks:
            for example in task.take_examples(limit):
                prompts.append(Prompt(name, f"{task.id}, example {example.id}", self._encode(task, example)))
        return prompts[: figure.most]

    def facts(self, prompts: Sequence[Prompt], tokens: int | None) -> dict[str, str]:
        """Return the facts about a figure's data by key, for the head of its CSV: model, texts and prompts.

        tokens: how many tokens of each prompt the figure reads; None for all.
        """
        model_cfg = self.cfg.model
        # hf stands for a model without an entry in conf/model: its folder or hub id is its name
        name = model_cfg.path if model_cfg.name == "hf" else model_cfg.name
        dtype = load.resolve_dtype(model_cfg, load.resolve_device(self.cfg.device), self.source.config)
        model = f"{name} ({self.source.fingerprint}), {str(dtype).removeprefix('torch.')}"
        if model_cfg.weights == "random":
            model += ", random weights"
        counts = Counter(prompt.source for prompt in prompts)
        lengths = [len(prompt.ids[:tokens]) for prompt in prompts]
        return {
            "model": model,
            "texts": ", ".join(f"{source} ({count})" for source, count in counts.items()),
            "prompts": f"{len(prompts)} of {min(lengths)} to {max(lengths)} tokens",
        }

    def _encode(self, task: Task, example: Example) -> torch.Tensor:
        if example.scored is not None:
            return torch.tensor(example.scored.ids)
        # a run leaves room for the answer behind the prompt, and cuts a longer prompt accordingly
        room = None
        if self.context is not None:
            room = self.context - example.max_new_tokens
        encoded = encode(self.tokenizer, example, task, self.cfg.prompt, room)
        return torch.tensor(list(encoded.ids) + list(encoded.question))


def locate(cfg: RunConfig, named: bool, text: str | None, samples: int | None, tokens: int | None) -> Origin:
    """Return the checkpoint and the texts of ``cfg``, found and checked before any weights are loaded.

    If the user named neither datasets nor a text, the tiny model reads the tiny suite. Any other model then reads the
    text of its calibrations (WikiText-2). Sets PyTorch's number of threads.

    Raises UsageError, with the key and the value, for anything that is not possible.

    named: True if the user named datasets.
    text: the file to read in place of datasets; None if the user named no file.
    samples, tokens: the number of the text's windows and the tokens of each; None for the defaults.
    """
    source = load.locate(cfg.model)
    # refuse a device that is missing before any text is read
    load.resolve_device(cfg.device)
    tokenizer = cast(Tokenizer, load.load_tokenizer(cfg.model, source))
    is_tiny = cfg.model.path == "embedded:tiny"
    experiment.set_threads(cfg, source.config)
    # the tiny model was trained for the tiny suite; a pretrained model reads a long text unless datasets are named
    if text is not None or not (named or is_tiny):
        content = _read_text(cfg, text)
        return Origin(cfg, source, tokenizer, tasks=(), text=content, samples=samples or SAMPLES, tokens=tokens)
    if samples is not None:
        raise UsageError(f"samples={samples} counts windows of text=FILE: prompts of a dataset are counted by limit=")
    tasks = tuple(_load_named_tasks(cfg, tokenizer))
    for task, _ in tasks:
        # the prompt policy may be impossible for this task or tokenizer
        check_policy(tokenizer, task, cfg.prompt)
    return Origin(cfg, source, tokenizer, tasks=tasks, tokens=tokens)


def _load_named_tasks(cfg: RunConfig, tokenizer: Tokenizer) -> Iterator[tuple[Task, str]]:
    renderer = cfg.prompt.make_renderer(tokenizer)
    for dataset in cfg.datasets:
        tasks = load_tasks(
            dataset.name,
            dataset.knobs,
            dataset.tasks,
            tokenizer=tokenizer,
            data=cfg.data_root,
            render=renderer,
            query_aware=dataset.query_aware,
        )
        for task in tasks:
            dataset_name, _, part = task.id.partition("/")
            # ids are dataset/part; if there is only one dataset, the part alone tells its tasks apart
            name = task.id
            if len(cfg.datasets) == 1 and task.category == "language modelling":
                # the part behind wikitext2/ is the unit of its perplexity, which figures do not show
                name = dataset_name
            elif len(cfg.datasets) == 1 and part:
                name = part
            # a grid of a dataset's knobs makes several datasets of one name, which their labels tell apart
            yield task, f"{name} {dataset.label}".strip()


def _read_text(cfg: RunConfig, file: str | None) -> texts.CalibrationText:
    if file:
        content = read_text(Path(file).expanduser(), f"text={file}")
        if not content.strip():
            raise UsageError(f"text={file} is empty")
        return texts.FileText(f"the file {Path(file).name}", content)
    try:
        # the tiny model, which has a corpus of its own, reads its suite instead
        return texts.find(own_corpus=False, user_file=None, data=cfg.data_root)
    except UsageError as error:
        raise UsageError(f"name what the model is to read, as dataset=NAME or text=FILE: {error}") from None

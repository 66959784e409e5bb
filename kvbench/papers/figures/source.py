"""From a run's configuration to the model and prompts that figures read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from kvbench.base.errors import UsageError
from kvbench.base.example import Example
from kvbench.engine.calibration import text as texts
from kvbench.models import load
from kvbench.papers.figures.figure import Figure
from kvbench.papers.figures.reading import Prompt
from kvbench.plan.config import RunConfig
from kvbench.run import experiment
from kvbench.tasks.base import Task, Tokenizer, load_tasks, read_text
from kvbench.tasks.prompt import check, encode

SAMPLES, TOKENS = 6, 1024


@dataclass(frozen=True)
class Origin:
    """A checkpoint and the texts to read, both checked; weights are loaded when a figure asks for ``model``.

    ``named``: prompts of the datasets of ``cfg``; else ``samples`` windows of ``tokens`` tokens of a text: ``text``
    (a file), or what a calibration of this model reads.
    """

    cfg: RunConfig
    source: load.ModelSource
    tokenizer: Tokenizer
    tasks: tuple[tuple[Task, str], ...]  # with the name under which figures show it
    text: texts.CalibrationText | None = None
    samples: int = SAMPLES
    tokens: int | None = None

    @property
    def context(self) -> int | None:
        """Return the longest text that the model takes, in tokens."""
        return self.cfg.model.context or getattr(self.source.config, "max_position_embeddings", None)

    @cached_property
    def model(self) -> PreTrainedModel:
        """Return the loaded model."""
        return load.load_weights(self.cfg.model, self.source, load.resolve_device(self.cfg.device))

    def prompts(self, figure: Figure) -> list[Prompt]:
        """Return the prompts that the figure reads."""
        if self.text is not None:
            room = self.context or TOKENS
            size = min(self.tokens or figure.knobs.get("tokens") or TOKENS, room)
            windows = self.text.windows(self.tokenizer, min(self.samples, figure.most or self.samples), size)
            return [Prompt(self.text.name, f"sample {i + 1}", ids) for i, ids in enumerate(windows)]
        prompts = []
        for task, name in self.tasks:
            limit = self.cfg.limit if self.cfg.limit is not None else figure.each
            prompts += [Prompt(name, f"{task.id}, example {e.id}", self._ids(task, e)) for e in task.taken(limit)]
        return prompts[: figure.most]

    def facts(self, prompts: Sequence[Prompt], tokens: int | None) -> dict[str, Any]:
        """Return the origin of a figure's data, for the head of its CSV: the first ``tokens`` of each prompt."""
        cfg, config = self.cfg, self.source.config
        counts = {s: sum(p.source == s for p in prompts) for s in dict.fromkeys(p.source for p in prompts)}
        lengths = sorted(len(p.ids[:tokens]) for p in prompts)
        dtype = load.resolve_dtype(cfg.model, load.resolve_device(cfg.device), config)
        return {
            "model": f"{cfg.model.name if cfg.model.name != 'hf' else cfg.model.path} ({self.source.fingerprint}), "
            f"{str(dtype).removeprefix('torch.')}" + (", random weights" if cfg.model.weights == "random" else ""),
            "texts": ", ".join(f"{s} ({n})" for s, n in counts.items()),
            "prompts": f"{len(prompts)} of {lengths[0]} to {lengths[-1]} tokens",
        }

    def _ids(self, task: Task, example: Example) -> torch.Tensor:
        """Return an example's ids, cut as a run cuts its prompt, with the question behind them."""
        if example.tokens:
            return torch.tensor(example.tokens)
        room = None if self.context is None else self.context - example.max_new_tokens
        encoded = encode(self.tokenizer, example, task, self.cfg.prompt, room)
        return torch.tensor([*encoded.ids, *encoded.question])


def locate(cfg: RunConfig, named: bool, text: str | None, samples: int | None, tokens: int | None) -> Origin:
    """Find and check the checkpoint and texts of ``cfg``, before any weights are loaded.

    ``named`` says that the user named datasets; without, the tiny model reads the tiny suite, and others the text that
    a calibration of theirs reads (WikiText-2). Raises UsageError naming key and value.
    """
    source = load.locate(cfg.model)
    load.resolve_device(cfg.device)
    tokenizer = cast(Tokenizer, load.load_tokenizer(cfg.model, source))
    is_tiny = cfg.model.path == "embedded:tiny"
    experiment.set_threads(cfg, source.config)
    if text is not None or not (named or is_tiny):
        return Origin(cfg, source, tokenizer, (), _text(cfg, text), samples or SAMPLES, tokens)
    if samples is not None:
        raise UsageError(f"samples={samples} counts windows of text=FILE: prompts of a dataset are counted by limit=")
    tasks = tuple(_tasks(cfg, tokenizer))
    for task, _ in tasks:
        check(tokenizer, task, cfg.prompt)
    return Origin(cfg, source, tokenizer, tasks, None, SAMPLES, tokens)


def _tasks(cfg: RunConfig, tokenizer: Tokenizer) -> Iterator[tuple[Task, str]]:
    """Yield the tasks of a run's datasets with the names that figures show."""
    for d in cfg.datasets:
        for task in load_tasks(d.name, d.knobs, d.tasks, tokenizer, cfg.data_root, cfg.prompt.renderer(tokenizer)):
            dataset, _, part = task.id.partition("/")
            # what follows wikitext2/ is the unit of its perplexity
            name = dataset if task.category == "language modelling" else part
            yield task, f"{name if name and len(cfg.datasets) == 1 else task.id} {d.label}".strip()


def _text(cfg: RunConfig, file: str | None) -> texts.CalibrationText:
    """Return the content of a text file, else what a calibration of the model reads; UsageError for an empty file."""
    if file:
        content = read_text(Path(file).expanduser(), f"text={file}")
        if not content.strip():
            raise UsageError(f"text={file} is empty")
        return texts.FileText(f"the file {Path(file).name}", content)
    try:
        return texts.find(False, None, cfg.data_root)
    except UsageError as error:
        raise UsageError(f"name what the model is to read, as dataset=NAME or text=FILE: {error}") from None

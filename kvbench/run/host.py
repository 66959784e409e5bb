"""The host of a run: a loaded model with the run's settings for prompts and answers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from kvbench.cache.model_shape import from_config
from kvbench.engine.memory import GIB
from kvbench.example import Example
from kvbench.run.config import Sampling
from kvbench.tasks.base import Task, Tokenizer
from kvbench.tasks.prompt import Encoded, PromptPolicy, encode


def default_rows(device: torch.device) -> int:
    """Return the default number of rows decoded together on a device, at most."""
    return 128 if device.type == "cuda" else 96


@dataclass(frozen=True)
class Host:
    """A loaded model with its tokenizer and its settings for prompts and answers.

    ``context`` is its longest text in tokens, ``memory`` the bytes that the caches of a decode batch may take.
    """

    model: PreTrainedModel
    tokenizer: Tokenizer
    policy: PromptPolicy
    stop: frozenset[int]
    context: int | None
    sampling: Sampling = field(default_factory=Sampling)
    batch_rows: int | None = None
    plain: bool = False
    memory: int = 2 * GIB

    def shape(self) -> tuple[int, int, torch.dtype]:
        """Return (kv heads, head dimension, dtype) of the model's cache."""
        shape = from_config(self.model.config)
        return shape.kv_heads, shape.head_dim, self.model.dtype

    @property
    def most_rows(self) -> int:
        """Return the most rows decoded together."""
        return self.batch_rows or default_rows(self.model.device)

    def encode(self, example: Example, task: Task) -> Encoded:
        """Return the example's prompt as the model reads it, or the prefix of a text to be scored."""
        if example.tokens:
            return Encoded(example.tokens[: int(example.meta["prefix"])], (), 0)
        room = None if self.context is None else self.context - example.max_new_tokens
        return encode(self.tokenizer, example, task, self.policy, room)

    def batching(self) -> dict[str, object]:
        """Return the batch policy, which affects numbers in half precision. Each sample states its number of rows."""
        return {"rows": self.most_rows, "order": "by example, then by cell; rows enter as others leave"}

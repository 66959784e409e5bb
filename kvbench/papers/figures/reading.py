"""What figures of activations are computed from: a model, the prompts it reads, and the knobs of the figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.model_shape import from_config
from kvbench.cache.observation import Needs, Observation
from kvbench.engine.prefill import as_prompt, check_capacity, observe
from kvbench.errors import UsageError
from kvbench.methods.chain import Chain
from kvbench.models.interface import sliding_window

OnLayer = Callable[[Observation, Tensor, Tensor], None]


@dataclass(frozen=True)
class Prompt:
    """Token ids [n] with a name; ``source`` is the text or task that it is from."""

    source: str
    name: str
    ids: Tensor


def _nothing() -> None:
    """A tick that shows nothing."""


@dataclass(frozen=True)
class Reading:
    """A model and what it is to read. ``decode`` names a token id; ``tick`` is called after each prompt."""

    model: PreTrainedModel
    prompts: Sequence[Prompt]
    knobs: Mapping[str, Any] = field(default_factory=dict)
    decode: Callable[[int], str] = str
    tick: Callable[[], None] = _nothing

    @property
    def n_layers(self) -> int:
        """Layers of the model."""
        return int(self.model.config.num_hidden_layers)

    @property
    def heads(self) -> tuple[int, int]:
        """(kv heads, query heads)."""
        shape = from_config(self.model.config)
        return shape.kv_heads, shape.query_heads

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return from_config(self.model.config).head_dim

    def ids(self, prompt: Prompt, least: int = 2, why: str = "a figure needs two tokens") -> Tensor:
        """The prompt's ids on the model's device, cut to the knob ``tokens``.

        Raises UsageError where fewer than ``least`` are left, or more than the model reads with full attention.
        """
        ids = as_prompt(self.model, prompt.ids)
        if self.knobs.get("tokens") is not None:
            # attention is causal: the first tokens of a prompt are computed as if it ended there
            ids = ids[: self.knobs["tokens"]]
        if len(ids) < least:
            raise UsageError(f"{prompt.name} has {len(ids)} tokens: {why}; give longer prompts, or a higher tokens=")
        check_capacity(self.model, len(ids))
        window = sliding_window(self.model.config)
        if window is not None and len(ids) > window:
            raise UsageError(
                f"{prompt.name} has {len(ids)} tokens, and the model attends a sliding window of {window}: figures "
                f"show full attention; give tokens={window} or less"
            )
        return ids

    def read(self, ids: Tensor, needs: Needs, on_layer: OnLayer, chain: Chain | None = None) -> None:
        """Hand every layer of one pass over ``ids`` to ``on_layer``: observation, keys and values [Hk, n, D]."""
        observe(self.model, ids, needs, on_layer, chain=chain)

    def layers(self, depths: Sequence[float]) -> list[int]:
        """The knob ``layers``, or the layers at these depths, 0 for the first and below 1; -1 is the last one."""
        asked = self.knobs.get("layers")
        found = asked or [self.n_layers - 1 if d < 0 else int(d * self.n_layers) for d in depths]
        return self._existing("layers", found, self.n_layers)

    def chosen_heads(self, default: Sequence[int], count: int) -> list[int]:
        """The knob ``heads``, or ``default``, of ``count`` heads."""
        return self._existing("heads", self.knobs.get("heads") or default, count)

    def _existing(self, knob: str, found: Sequence[int], count: int) -> list[int]:
        wrong = [i for i in found if i >= count]
        if wrong:
            raise UsageError(f"{knob}={wrong[0]} is not possible: the model has {knob} 0 to {count - 1} in this figure")
        return sorted(set(found))

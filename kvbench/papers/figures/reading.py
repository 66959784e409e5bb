"""The source of figures of activations: a model, the prompts that it reads, and the options of the figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from kvbench.base.errors import UsageError
from kvbench.engine.limits import check_capacity
from kvbench.engine.prefill import prepare_ids
from kvbench.engine.prompt_pass import observe_prompt
from kvbench.kv.model_shape import Shape, from_config
from kvbench.kv.observation import Needs, Observation
from kvbench.methods.core.chain import Chain
from kvbench.models.interface import sliding_window

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

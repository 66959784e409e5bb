"""The stage: one step of a method, with its knobs, its needs, its promises and its work.

Shapes: n prompt tokens, Hk kv heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from transformers import PreTrainedModel

from kvbench.base.errors import UsageError
from kvbench.kv.observation import Needs, Observation
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.contract import Block, Expected
from kvbench.methods.core.foreign import hash_source
from kvbench.methods.core.knobs import Knobs
from kvbench.methods.core.recipe import Calibration, CalibrationRun, Recipe

Role = Literal["hidden", "lowrank", "selector", "modifier", "prune", "quantise", "mask", "share"]
"""The part of a prompt's computation or of its cache that a stage changes.

hidden: hidden states, which it drops between the layers of a prompt. lowrank: projections, whose latents are cached.
selector: the tokens that stay. modifier: a selector's scores. prune: the channels that stay. quantise: the bits of a
number. mask: the tokens that a decode step attends. share: the query heads that take another head's logits.
"""


@dataclass(frozen=True, kw_only=True)
class Stage(Knobs):
    """One step of a method. Subclasses are frozen dataclasses whose fields are the knobs that users type.

    The files in conf/method explain every knob in a line. Docstrings say more about knobs that change the formula.

    Fields with ``metadata={"knob": False}`` are no knobs. The only one here is ``calibration``, the measurement of a
    model that some stages need (see ``recipe``). It is None until it is bound by ``calibrated``.

    Subclasses set these attributes:

    role: the place of the stage in a chain.
    revision: a number that is raised when the stage's results change, so that earlier results are not reused.
    rotates: True if it rotates queries or keys to other positions.
    uncapped: True if its formula holds only for models that neither cap logits nor have sinks.
    on_latents: why it has no meaning where one latent stands for the keys and values of all heads; "" if it has.
    rebalances: True if budgets depend on all layers, see ``rebalance``.
    adapts: True if it changes the model itself, see ``adapt``.
    changes: why keys or values that it stores exactly differ from the prompt's, for example because it merges them.
    """

    role: ClassVar[Role]
    revision: ClassVar[int] = 1
    rotates: ClassVar[bool] = False
    uncapped: ClassVar[bool] = False
    on_latents: ClassVar[str] = ""
    rebalances: ClassVar[bool] = False
    adapts: ClassVar[bool] = False
    changes: ClassVar[str] = ""

    calibration: Calibration | None = field(default=None, repr=False, metadata={"knob": False})

    # ---- the model, and measurements of it

    def adapt(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """Return a context in which the model is changed, for prefill and decoding. By default nothing changes.

        On exit the model is restored, even after an error.
        """
        return nullcontext()

    def recipe(self) -> Recipe | None:
        """Return the measurement of a model, over a text, that the stage needs before it can run.

        None if it needs no measurement. A stage that returns a recipe also implements ``calibrate``.
        """
        return None

    def calibrate(self, run: CalibrationRun) -> dict[str, torch.Tensor]:
        """Return the tensors, by name, that ``recipe`` asks for, measured on the model and text of ``run``.

        Memory must not depend on the number of samples. Raises UsageError where ``recipe.check`` does.
        """
        raise TypeError(f"{type(self).__name__} does not say how it is calibrated")

    def calibration_bytes(self, model: PreTrainedModel) -> tuple[int, int]:
        """Return (bytes in memory beside the model, bytes on disk) that measuring takes, or (0, 0) if they are few."""
        return 0, 0

    def calibration_steps(self, model: PreTrainedModel) -> int:
        """Return how often ``calibrate`` calls ``run.tick`` after the windows are read, for the display of progress."""
        return 0

    def calibrated(self, calibration: Calibration) -> Stage:
        """Return the stage with the result of ``calibrate`` bound to it."""
        return replace(self, calibration=calibration)

    def identity(self) -> dict[str, object]:
        """Return everything that decides the stage's results: its id, its revision and its knobs.

        A stage that is not kvbench's own adds the hash of its code. Knobs that are not set are left out, so that a new
        optional knob leaves earlier results valid.
        """
        # the order of the keys is part of the identity: chains are told apart by its text
        identity: dict[str, object] = {"id": self.id, "revision": self.revision}
        code = hash_source(self)
        if code:
            identity["code"] = code
        identity["knobs"] = {knob: value for knob, value in self.knobs().items() if value is not None}
        return identity

    def measured(self, result: str, knob: str = "it") -> Mapping[str, torch.Tensor]:
        """Return the tensors of the stage's calibration. Raises UsageError if the stage has no calibration.

        result: the words for the property that follows from the tensors, such as "its ranks", for the error.
        knob: the knob that makes the calibration necessary; "it" if the method needs one under any knobs.
        """
        # bytes can be computed without a model, but not for a stage that a model's statistics decide
        if self.calibration is None:
            raise UsageError(
                f"method {self.id} was not calibrated, and {result}, hence its bytes, follow from that: leave {knob} "
                "out where no model is read (match=, bench), or see kvbench.calibrate"
            )
        return self.calibration.tensors

    @property
    def unbound(self) -> bool:
        """True if the stage needs a calibration and has no calibration yet."""
        return self.recipe() is not None and self.calibration is None

    # ---- the prompt's computation, and what the stage reads of it

    def check_layers(self, n_layers: int) -> None:
        """Raise UsageError if the knobs do not fit a model of ``n_layers`` layers.

        They may name a layer that the model does not have, or a list with another number of layers.
        """

    def check_heads(self, stored_heads: int, query_heads: int) -> None:
        """Raise UsageError if the stage cannot run on a model whose layers have these numbers of heads.

        stored_heads: the kv heads, or all query heads under ``per=query_head``.
        """

    @property
    def prefill_key(self) -> str:
        """A text with all that changes how the prompt is computed (``read``, ``adapt``, ...), or '' if nothing does.

        Stages with equal texts can share one prefill of a prompt. By default, a stage that overrides ``read`` or adapts
        the model shares it with equal stages only.
        """
        if self.adapts or type(self).read is not Stage.read:
            return str(self.identity())
        return ""

    def read(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (keys, values), each [Hk, n, D], that the prompt's own attention reads in place of k and v.

        The cache still gets k and v.
        """
        return k, v

    def needs(self, n: int) -> Needs:
        """Return the parts of each layer that the stage reads, for a prompt of n tokens."""
        return Needs()

    # ---- the promises, to which the audit holds the stage

    def expected(self, n: int, layer: int, n_layers: int, heads: int) -> Expected | None:
        """Return how many of n prompt tokens each of ``heads`` stored heads of this layer holds after prefill.

        Return None if the stage chooses no tokens.
        """
        return None

    def expected_sum(self, n: int, n_layers: int, heads: int) -> int | None:
        """Return how many tokens all layers and heads hold together after prefill of n tokens.

        Return None if ``expected`` of each layer already fixes the tokens of the layer.
        """
        return None

    def layout(self, blocks: list[Block], head_dim: int, itemsize: int) -> list[Block]:
        """Return the sizes of a stored head's segments after this stage, given their sizes ``blocks`` before it.

        An exact number takes ``itemsize`` bytes. The audit compares the bytes that the head holds with the sum of the
        returned blocks.
        """
        return blocks

    # ---- the work

    def compress(self, cache: LayerCache, obs: Observation) -> LayerCache:
        """Return the cache of one finished layer after this stage."""
        return cache

    def rebalance(self, caches: Sequence[LayerCache], n_layers: int) -> list[LayerCache]:
        """Return the caches of layers 0 .. len(caches) - 1 of ``n_layers``, trimmed to the tokens that may still stay.

        The method is called each time that a layer is finished, so that no layer holds all its tokens until the last
        one is finished. The last call decides: a single call at the end must give the same result.
        """
        # the result has as many caches as came in, in their order
        return list(caches)

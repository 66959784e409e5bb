"""The stage: one step of a method, with its knobs and what it needs, promises and does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from transformers import PreTrainedModel

from kvbench.base.errors import UsageError
from kvbench.kv.observation import Needs, Observation
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.contract import Block, Expected
from kvbench.methods.core.foreign import code_of
from kvbench.methods.core.knobs import Knobs
from kvbench.methods.core.recipe import Calibration, CalibrationRun, Recipe

Role = Literal["hidden", "lowrank", "selector", "modifier", "prune", "quantise", "mask", "share"]


@dataclass(frozen=True, kw_only=True)
class Stage(Knobs):
    """One step of a method. Subclasses are frozen dataclasses whose fields are the knobs that users type.

    conf/method explains them; docstrings say more of those that change the formula.

    Fields with ``metadata={"knob": False}`` are no knobs: a stage's calibration is bound to it, see ``recipe``.
    """

    role: ClassVar[Role]
    revision: ClassVar[int] = 1
    rotates: ClassVar[bool] = False  # True: it rotates queries or keys to other positions
    uncapped: ClassVar[bool] = False  # True: its formula holds only where no model caps logits
    rebalances: ClassVar[bool] = False  # True: budgets depend on all layers, see ``rebalance``
    adapts: ClassVar[bool] = False  # True: the model itself is changed, see ``adapt``
    changes: ClassVar[str] = ""  # why keys or values that it stores exactly are not the prompt's (it merges them, say)

    calibration: Calibration | None = field(default=None, repr=False, metadata={"knob": False})

    def adapt(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """Change the model for prefill and decoding; on exit it is restored, whatever happens."""
        return nullcontext()

    def recipe(self) -> Recipe | None:
        """Return what must be measured of a model, over a text, before the stage can run, or None if nothing."""
        return None

    def calibrate(self, run: CalibrationRun) -> dict[str, torch.Tensor]:
        """Return what ``recipe`` asks for, measured on the model and text of ``run``: tensors by name.

        Memory must not depend on the number of samples. Raises UsageError where ``recipe.check`` does.
        """
        raise TypeError(f"{type(self).__name__} does not say how it is calibrated")

    def calibration_bytes(self, model: PreTrainedModel) -> tuple[int, int]:
        """Return (bytes in memory beside the model, bytes on disk) that measuring takes; (0, 0) if next to none."""
        return 0, 0

    def calibration_steps(self, model: PreTrainedModel) -> int:
        """Return how many ticks ``calibrate`` makes after the windows are read."""
        return 0

    def calibrated(self, data: Calibration) -> Stage:
        """Return the stage with the result of ``calibrate`` bound to it."""
        return replace(self, calibration=data)

    def identity(self) -> dict[str, Any]:
        """Return everything that decides the stage's results, with the hash of its code where that is not kvbench's.

        Knobs that are not set are left out, so that a new optional knob leaves earlier results valid.
        """
        code = code_of(self)
        knobs = {k: v for k, v in self.knobs().items() if v is not None}
        return {"id": self.id, "revision": self.revision, **({"code": code} if code else {}), "knobs": knobs}

    def measured(self, what: str, knob: str = "it") -> Mapping[str, torch.Tensor]:
        """Return the tensors of the stage's calibration, from which ``what`` follows. Raises UsageError without it."""
        if self.calibration is None:
            raise UsageError(
                f"method {self.id} was not calibrated, and {what}, hence its bytes, follow from that: leave {knob} out "
                "where no model is read (match=, bench), or see kvbench.calibrate"
            )
        return self.calibration.tensors

    @property
    def unbound(self) -> bool:
        """True if the stage needs a calibration and has none."""
        return self.recipe() is not None and self.calibration is None

    def check_layers(self, n_layers: int) -> None:
        """Raise UsageError for a model of ``n_layers`` if the knobs name other layers, or none for some of them."""

    def check_heads(self, stored: int, query_heads: int) -> None:
        """Raise UsageError for a model of ``query_heads`` and ``stored`` heads that the stage cannot run on."""

    @property
    def prefill_key(self) -> str:
        """All that changes how the prompt is computed, such as ``read`` and ``adapt``; '' if it is computed exactly."""
        return ""

    def read(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (keys, values) [Hk, n, D] that the prompt's own attention reads in place of k and v.

        k and v are stored all the same.
        """
        return k, v

    def needs(self, n: int) -> Needs:
        """Return what the stage reads of each layer of a prompt of n tokens."""
        return Needs()

    def expected(self, n: int, layer: int, n_layers: int, heads: int) -> Expected | None:
        """Return how many tokens each stored head holds after prefill; None if the stage does not choose tokens."""
        return None

    def expected_sum(self, n: int, n_layers: int, heads: int) -> int | None:
        """Return the tokens of all layers and heads after prefill; None where ``expected`` of each layer says all."""
        return None

    def layout(self, blocks: list[Block], head_dim: int, itemsize: int) -> list[Block]:
        """Return the blocks that the stage makes of ``blocks``. The bytes that a head holds must equal their sum."""
        return blocks

    def compress(self, cache: LayerCache, obs: Observation) -> LayerCache:
        """Return the cache of one finished layer after this stage."""
        return cache

    def rebalance(self, caches: Sequence[LayerCache], n_layers: int) -> list[LayerCache]:
        """Trim layers 0 .. len(caches) - 1 of ``n_layers`` to the tokens that they can still hope to keep.

        Called as each layer is finished, so that none waits dense for the last; the last call decides. One call at the
        end must give the same.
        """
        return list(caches)

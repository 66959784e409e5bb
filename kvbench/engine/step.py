"""A decode batch and one step of it: new tokens of many rows through the model at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache as HFCache

from kvbench.audit.decode_audit import Stored
from kvbench.engine.decode_layer import RowLayer
from kvbench.engine.row_bytes import stored_bytes
from kvbench.errors import UsageError
from kvbench.methods.prompt_cache import Cache
from kvbench.models.interface import KvbenchLayer, sliding_window
from kvbench.models.lowrank import lifts
from kvbench.storage.evicting_rows import Rotary


def build(
    model: PreTrainedModel, caches: Sequence[Cache], capacity: int, at_once: int = 1, give_up: bool = False
) -> list[RowLayer]:
    """The decode batch of ``caches``, one RowLayer per model layer, with room for ``capacity`` new tokens.

    The model is as their chains adapt it, for as long as the batch is used.

    ``at_once`` of them at most come in one step. ``give_up`` empties the list ``caches``: each layer is freed once
    the batch has it, so that memory never holds all of them twice.
    """
    window = sliding_window(model.config)
    windowed = window is not None and max(c.seen for c in caches) + capacity > window
    chains = [c.chain for c in caches]
    evictors = [c.evictor for c in chains]
    lifted = lifts(model)
    rotary = rotation(model) if any(e is not None and e.rolled for e in evictors) else None
    columns = deque([c.layers[i] for c in caches] for i in range(len(caches[0].layers)))
    if give_up:
        assert isinstance(caches, list)
        caches.clear()
    layers = []
    for i in range(len(columns)):
        maskers, coders = [c.masker(i) for c in chains], [c.coder for c in chains]
        lift = lifted[i] if lifted else None
        layers.append(
            RowLayer(columns.popleft(), capacity, windowed, evictors, i, rotary, maskers, coders, at_once, lift)
        )
    return layers


def stored_in(batch: Sequence[RowLayer]) -> list[Stored]:
    """What the storage of each row of a batch holds now."""
    columns = zip(*(stored_bytes(layer) for layer in batch), strict=True)
    return [Stored(batch[0].used, column) for column in columns]


def rotation(model: PreTrainedModel) -> Rotary:
    """The model's rotary frequencies; raises UsageError for one with learned positions (OPT)."""
    found = next((m for m in model.modules() if hasattr(m, "inv_freq")), None)
    if found is None:
        raise UsageError(
            f"positions=rolled needs rotary positions, the family {model.config.model_type!r} learns its positions"
        )
    return Rotary(found.inv_freq)  # type: ignore[arg-type]


def step(model: PreTrainedModel, batch: Sequence[KvbenchLayer], tokens: Tensor, positions: Tensor) -> Tensor:
    """Feed ``tokens`` [B, T] at ``positions`` [B, T]; returns the logits [B, 1, V] after the last."""
    out = model(
        input_ids=tokens,
        position_ids=positions,
        past_key_values=HFCache(layers=list(batch)),
        use_cache=True,
        logits_to_keep=1,
    )
    return out.logits

"""A decode batch and one step of it: new tokens of many rows through the model at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache as HFCache

from kvbench.base.errors import UsageError
from kvbench.engine.decode_layer import RowLayer
from kvbench.kv.model_shape import local_layers
from kvbench.methods.core.prompt_cache import Cache
from kvbench.models.interface import KvbenchLayer, sliding_window
from kvbench.models.lowrank import lifts
from kvbench.models.releases import named_cache
from kvbench.storage.format import Room, StoredRow
from kvbench.storage.roles import Rotary


def build(
    model: PreTrainedModel, caches: Iterable[Cache], capacity: int, at_once: int = 1, alone: bool = False
) -> list[RowLayer]:
    """Build the decode batch of ``caches``: one RowLayer per model layer, with room for ``capacity`` new tokens.

    At most ``at_once`` of them come in one step, under ``alone`` as if each came in a step of its own. The model must
    stay as the chains adapt it while the batch is used. Methods know the layers by their numbers without local ones.
    Layers with no other reference, as where ``caches`` is ``given_up``, are freed one by one once the batch holds them,
    so that memory never holds all of them twice.
    """
    rows = list(caches)
    window = sliding_window(model.config)
    windowed = window is not None and max(c.seen for c in rows) + capacity > window
    room = Room(tokens=capacity, at_once=at_once, alone=alone, windowed=windowed)
    chains = [(c.chain, c.chain.evictor) for c in rows]
    lifted = lifts(model)
    rotary = rotation(model) if any(e is not None and e.rolled for _, e in chains) else None
    compressed, local = ([*zip(*layers, strict=True)] for layers in ([c.layers for c in rows], [c.local for c in rows]))
    del rows
    columns = deque(enumerate(compressed))
    for i, column in zip(sorted(local_layers(model.config)), local, strict=True):
        columns.insert(i, (i, column))
    del compressed, local
    layers: list[RowLayer] = []
    while columns:
        i, column = columns.popleft()
        stored = [
            StoredRow(
                cache=cache,
                layer=i,
                masker=chain.masker(i),
                coder=chain.coder_at(i),
                evictor=evictor,
                lift=lifted[i] if lifted else None,
                rotary=rotary,
            )
            for cache, (chain, evictor) in zip(column, chains, strict=True)
        ]
        layers.append(RowLayer(stored, room))
        del stored, column
    return layers


def given_up(caches: list[Cache]) -> Iterator[Cache]:
    """Yield the caches, removing each from the list."""
    while caches:
        yield caches.pop(0)


def rotation(model: PreTrainedModel) -> Rotary:
    """Return the model's rotary frequencies. Raises UsageError for one with learned positions (OPT)."""
    module = next((m for m in model.modules() if hasattr(m, "inv_freq")), None)
    if module is None:
        raise UsageError(
            f"positions=rolled needs rotary positions, the family {model.config.model_type!r} learns its positions"
        )
    return Rotary(module.inv_freq)  # type: ignore[arg-type]


def step(
    model: PreTrainedModel, batch: Sequence[KvbenchLayer], tokens: Tensor, positions: Tensor, whole: bool = False
) -> Tensor:
    """Feed ``tokens`` [B, T] at ``positions`` [B, T]; return the logits [B, 1, V] after the last.

    With ``whole``, return the logits [B, T, V] after each token.
    """
    out = model(
        input_ids=tokens,
        position_ids=positions,
        use_cache=True,
        logits_to_keep=0 if whole else 1,  # 0: all
        **named_cache(HFCache(layers=list(batch))),
    )
    return out.logits

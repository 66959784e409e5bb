"""The check that a chain writes into nothing that it is handed, since chains share these tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

from torch import Tensor

from kvbench.base.errors import Refused
from kvbench.kv.observation import Observation
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.chain import Chain

Version = tuple[str, Tensor, int]
"""A name for messages, a tensor, and its version, which PyTorch increments at every write in place."""


def note_versions(cache: LayerCache, obs: Observation) -> list[Version]:
    """Return the versions of all tensors that a chain is handed of one layer."""
    tensors = []
    for segment in cache.segments:
        tensors += [("keys", segment.k), ("values", segment.v), ("positions", segment.positions)]
    for f in fields(obs):
        name = "a result of Observation.once" if f.name == "scratch" else f.name
        tensors += [(name, t) for t in _find_tensors(getattr(obs, f.name))]
    # PyTorch does not count writes into inference tensors
    return [(name, t, t._version) for name, t in tensors if not t.is_inference()]


def check_unwritten(versions: Sequence[Version], chain: Chain, layer: int) -> None:
    """Raise Refused, with the name of the first changed tensor, if ``chain`` has written into one in place."""
    for name, t, version in versions:
        if t._version != version:
            raise Refused(f"{chain.name} changes what it is handed in place: {name} of layer {layer}; clone first")


def _find_tensors(value: object) -> Iterator[Tensor]:
    """Yield the tensors in the value of a field of Observation: the value itself, or those in its items."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, LayerCache):
        yield from value.tensors()
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _find_tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _find_tensors(item)

"""One layer of a prompt as it is handed to a chain, and the check that the chain leaves it unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import fields, replace

from torch import Tensor

from kvbench.base.errors import Refused
from kvbench.kv.content import have_same_bits
from kvbench.kv.observation import Observation
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.chain import Chain


class HandedLayer:
    """One layer's ``cache`` and ``obs`` (observation) as they are handed to one chain.

    A foreign chain, whose code is not all kvbench's own, gets copies. It may write into them at any time and in any way
    without reaching other methods, and ``check`` compares their bits with the originals. kvbench's own chains share the
    tensors. For them ``check`` compares each tensor's version, which PyTorch increments at every write in place.
    """

    def __init__(self, chain: Chain, cache: LayerCache, obs: Observation) -> None:
        self.chain, self.cache, self.obs = chain, cache, obs
        self._tensors = list(_name_tensors(cache, obs))  # (name, tensor)
        self._copies: list[Tensor] = []  # a foreign chain has a copy of each tensor here
        self._versions: list[int] = []  # kvbench's own chains have the version of each tensor here
        if chain.foreign:
            # deepcopy copies a tensor once even if it occurs twice, so that copies share memory as the tensors do
            self.cache, self.obs = deepcopy((cache, replace(obs, scratch={})))
            self._copies = [t for _, t in _name_tensors(self.cache, self.obs)]
        else:
            self._tensors += [("a result of Observation.once", t) for t in _find_tensors(obs.scratch)]
            self._versions = [_count_writes(t) for _, t in self._tensors]

    def check(self) -> None:
        """Raise Refused, with the name of the first changed tensor, if the chain has changed a tensor."""
        changed_names: list[str] = []
        if self.chain.foreign:
            for (name, t), copy in zip(self._tensors, self._copies, strict=True):
                # an unchanged copy still has its storage and exactly the bits of the tensor
                if copy.untyped_storage().nbytes() < copy.nbytes or not have_same_bits(t, copy):
                    changed_names.append(name)
        else:
            for (name, t), version in zip(self._tensors, self._versions, strict=True):
                if _count_writes(t) != version:
                    changed_names.append(name)
        if changed_names:
            raise Refused(
                f"{self.chain.name} changes what it is handed in place: {changed_names[0]} of layer {self.obs.layer}; "
                "clone first"
            )


def _name_tensors(cache: LayerCache, obs: Observation) -> Iterator[tuple[str, Tensor]]:
    """Yield (name for messages, tensor) for all tensors that a chain receives, except those in ``obs.scratch``."""
    for segment in cache.segments:
        yield "keys", segment.k
        yield "values", segment.v
        yield "positions", segment.positions
    for f in fields(obs):
        # ``scratch`` is left out, because chains share it and fill it while they run
        if f.name != "scratch":
            for t in _find_tensors(getattr(obs, f.name)):
                yield f.name, t


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


def _count_writes(t: Tensor) -> int:
    """Return how often a tensor was written in place; 0 for inference tensors, whose writes PyTorch does not count."""
    if t.is_inference():
        return 0
    return t._version

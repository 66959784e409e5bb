"""One layer of a prompt as it is handed to a chain, with the check that the chain leaves it unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from kvbench.base.errors import Refused
from kvbench.kv.content import same_bits
from kvbench.kv.observation import Observation
from kvbench.kv.segment import LayerCache
from kvbench.methods.core.chain import Chain


class Handed:
    """The ``cache`` and ``obs`` handed to one chain: shared by all chains, or copies for code not kvbench's own.

    Writes into copies, now or later and by any means, cannot reach other methods; the check compares their bits. Writes
    into shared tensors show in the version that PyTorch counts up.
    """

    def __init__(self, chain: Chain, cache: LayerCache, obs: Observation) -> None:
        self.chain, self.cache, self.obs = chain, cache, obs
        self._shared = [*_tensors(cache, obs)]
        if chain.foreign:
            self.cache, self.obs = deepcopy((cache, replace(obs, scratch={})))
            self._copies = [t for _, t in _tensors(self.cache, self.obs)]
            return
        self._copies = []
        self._shared += [("a result of Observation.once", t) for t in _flat(obs.scratch)]
        self._versions = [_version(t) for _, t in self._shared]

    def check(self) -> None:
        """Raise Refused with the name of a changed tensor unless all are as they were handed."""
        if self._copies:
            # a copy must still have storage and the very bits of the tensor
            changed = [
                name
                for (name, t), copy in zip(self._shared, self._copies, strict=True)
                if copy.untyped_storage().nbytes() < copy.nbytes or not same_bits(t, copy)
            ]
        else:
            changed = [name for (name, t), v in zip(self._shared, self._versions, strict=True) if _version(t) != v]
        if changed:
            raise Refused(
                f"{self.chain.name} changes what it is handed in place: {changed[0]} of layer {self.obs.layer}; "
                "clone first"
            )


def _tensors(cache: LayerCache, obs: Observation) -> Iterator[tuple[str, Tensor]]:
    for s in cache.segments:
        yield from (("keys", s.k), ("values", s.v), ("positions", s.positions))
    for f in fields(obs):
        if f.name != "scratch":
            yield from ((f.name, t) for t in _flat(getattr(obs, f.name)))


def _flat(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value of Observation."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, LayerCache):
        yield from value.tensors()
    elif isinstance(value, (tuple, list, Mapping)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _flat(part)


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version

"""One prompt's layers under a chain, as the model finishes them."""

from __future__ import annotations

from dataclasses import replace

from kvbench.cache import ops
from kvbench.methods.chain import Chain
from kvbench.types import LayerCache, Needs, Observation


class Layers:
    """One prompt's layers under a chain, added as the model finishes them; ``caches`` hold them all at last."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.caches: list[LayerCache] = []
        balancer = chain.rebalancer
        at = chain.stages.index(balancer) if balancer else -1
        self._first, self._later = chain.stages[: at + 1], chain.stages[at + 1 :]
        self._waiting: list[Observation] = []

    def add(self, dense: LayerCache, obs: Observation) -> None:
        """The next finished layer. Stages behind one that rebalances wait for the last."""
        balancer = self.chain.rebalancer
        if balancer is None:
            self.caches.append(self.chain.compress(dense, obs))
            return
        for stage in self._first:
            dense = self.chain.run(stage, dense, obs)
        self.caches = balancer.rebalance([*self.caches, dense], obs.n_layers)
        self._waiting.append(self._needed(obs))
        if len(self.caches) == obs.n_layers:
            for i, seen in enumerate(self._waiting):
                for stage in self._later:
                    self.caches[i] = self.chain.run(stage, self.caches[i], seen)
                self.caches[i] = ops.expand(self.caches[i])

    def _needed(self, obs: Observation) -> Observation:
        """What later stages read of a layer: the rest need not outlive it."""
        needs = Needs()
        for stage in self._later:
            needs = needs | stage.needs(obs.prompt_tokens)
        return replace(
            obs,
            last_q=obs.queries(needs.last_q).clone() if needs.last_q else None,
            first_q=obs.first_q if needs.first_q else None,
            colsums=obs.colsums if needs.colsums else None,
            colsums_q={bits: t for bits, t in obs.colsums_q.items() if bits in needs.colsums_bits},
            hidden=obs.hidden if needs.hidden else None,
            found={},
        )

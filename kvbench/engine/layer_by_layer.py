"""One prompt's layers under a chain, as the model finishes them."""

from __future__ import annotations

from dataclasses import replace

from kvbench.cache import ops
from kvbench.cache.content import strange
from kvbench.cache.observation import Needs, Observation
from kvbench.cache.segment import LayerCache, Segment
from kvbench.methods.chain import Chain


class Layers:
    """One prompt's layers under a chain, added as the model finishes them; ``caches`` hold them all at last."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.caches: list[LayerCache] = []
        balancer = chain.rebalancer
        at = chain.stages.index(balancer) if balancer else -1
        self._first, self._later = chain.stages[: at + 1], chain.stages[at + 1 :]
        self._waiting: list[Observation] = []
        self.strange = ""  # what was found, in words, that the prompt does not have where it was said to be

    def add(self, dense: LayerCache, obs: Observation) -> None:
        """The next finished layer. Stages behind one that rebalances wait for the last."""
        balancer = self.chain.rebalancer
        if balancer is None:
            self.caches.append(self.chain.compress(dense, obs))
            return
        for stage in self._first:
            dense = self.chain.run(stage, dense, obs)
        before = [*self.caches, dense]
        self.caches = balancer.rebalance(before, obs.n_layers)
        for i, (old, new) in enumerate(zip(before, self.caches, strict=True) if self.chain.foreign else ()):
            if old.segments[0].positions.shape[0] == 1 and old.segments[0].lengths is None:
                self._compare(i, new, old.segments[0], whole=False)
        self._waiting.append(self._needed(obs))
        if len(self.caches) == obs.n_layers:
            for i, seen in enumerate(self._waiting):
                for stage in self._later:
                    self.caches[i] = self.chain.run(stage, self.caches[i], seen)
                self.caches[i] = ops.expand(self.caches[i])

    def compare(self, dense: Segment, obs: Observation) -> None:
        """Hold the layer that was added last to the prompt's own keys and values, or to its latents."""
        if self.chain.lowrank and obs.latents is not None:
            dense = replace(dense, k=obs.latents[0][None], v=obs.latents[1][None])
        self._compare(obs.layer, self.caches[-1], dense, obs.positions is None)

    def _compare(self, layer: int, found: LayerCache, source: Segment, whole: bool) -> None:
        if not self.strange and not any(s.changes for s in self.chain.stages):
            what = strange(found, source, whole)
            self.strange = what and f"layer {layer} holds {what}"

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

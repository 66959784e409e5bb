"""One prompt's layers under a chain, as the model finishes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from kvbench.kv import ops
from kvbench.kv.content import find_mismatch
from kvbench.kv.observation import Needs, Observation
from kvbench.kv.segment import LayerCache, Segment
from kvbench.methods.core.chain import Chain


class CompressedLayers:
    """One prompt's layers under a chain, added as the model finishes them; ``caches`` holds all of them in the end."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.caches: list[LayerCache] = []
        balancer = chain.rebalancer
        split = chain.stages.index(balancer) + 1 if balancer else 0
        self._first, self._later = chain.stages[:split], chain.stages[split:]
        self._waiting: list[Observation] = []
        self.mismatch = ""  # the first layer that holds what the prompt does not have there, in words

    def add(self, dense: LayerCache, obs: Observation) -> None:
        """Compress the next finished layer. Stages behind one that rebalances wait for the last layer."""
        balancer = self.chain.rebalancer
        if balancer is None:
            self.caches.append(self.chain.compress(dense, obs))
            return
        for stage in self._first:
            dense = self.chain.run(stage, dense, obs)
        # a layer more changes the shares of all, so that earlier ones may be trimmed again
        untrimmed = [*self.caches, dense]
        self.caches = balancer.rebalance(untrimmed, obs.n_layers)
        for i, (previous, trimmed) in enumerate(zip(untrimmed, self.caches, strict=True) if self.chain.foreign else ()):
            if previous.segments[0].positions.shape[0] == 1 and previous.segments[0].lengths is None:
                self._compare(i, trimmed, previous.segments[0], all_read=False)
        self._waiting.append(self._for_later(obs))
        if len(self.caches) == obs.n_layers and self.chain.replayer is None:  # the shares are final
            self._settle()

    def _settle(self) -> None:
        """Run the stages behind the one that rebalances, once its shares are final."""
        for i, waiting in enumerate(self._waiting):
            for stage in self._later:
                self.caches[i] = self.chain.run(stage, self.caches[i], waiting)
            self.caches[i] = ops.expand(self.caches[i])

    def replayed(self, received: Sequence[Tensor] | None) -> None:
        """Compress the layers, whole until now, by the attention [Hq, n] that further passes found in each.

        None: there were no passes, as all tokens stay.
        """
        dense, selector = self.caches, self.chain.replayer
        if received is not None and selector is not None:
            # a stored head has the best score of its query heads
            scores = [r.view(c.heads, -1, r.shape[1]).amax(dim=1) for r, c in zip(received, dense, strict=True)]
            scored = [ops.with_state(c, score=s) for c, s in zip(dense, scores, strict=True)]
            self.caches = selector.rebalance(scored, len(scored))
        self._settle()
        for i, (cache, waiting) in enumerate(zip(dense, self._waiting, strict=True)):
            self._compare(i, self.caches[i], _source(self.caches[i], cache.segments[0], waiting), all_read=True)

    def compare(self, dense: Segment, obs: Observation) -> None:
        """Compare the layer that was added last with the prompt's own keys and values, or with its latents."""
        self._compare(obs.layer, self.caches[-1], _source(self.caches[-1], dense, obs), obs.positions is None)

    def _compare(self, layer: int, cache: LayerCache, source: Segment, all_read: bool) -> None:
        if not self.mismatch and not any(s.changes for s in self.chain.stages):
            difference = find_mismatch(cache, source, all_read)
            self.mismatch = difference and f"layer {layer} holds {difference}"

    def _for_later(self, obs: Observation) -> Observation:
        """Return the observation with only what later stages read, so that the rest need not outlive the layer."""
        needs = Needs.union(stage.needs(obs.prompt_tokens) for stage in self._later)
        return replace(
            obs,
            last_q=obs.queries(needs.last_q).clone() if needs.last_q else None,
            first_q=obs.first_q if needs.first_q else None,
            colsums=obs.colsums if needs.colsums else None,
            colsums_q={bits: t for bits, t in obs.colsums_q.items() if bits in needs.colsums_bits},
            hidden=obs.hidden if needs.hidden else None,
            call=obs.call if needs.call else None,
            scratch={},
        )


def _source(cache: LayerCache, dense: Segment, obs: Observation) -> Segment:
    """Return what a layer's cache must equal: the prompt's keys and values, or its latents where it stores these."""
    if obs.latents is None or not any(s.latent for s in cache.segments):
        return dense
    return replace(dense, k=obs.latents[0][None], v=obs.latents[1][None])

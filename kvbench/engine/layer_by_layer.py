"""One prompt's layers under a chain. They are compressed as the model finishes them."""

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
    """One prompt's layers under a chain, added as the model finishes them.

    chain: the methods that compress the layers.
    caches: the layers so far. After the last layer, all of them are compressed.
    mismatch: the first layer whose keys, values or positions differ from the prompt's, in words; "" for none.
    """

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.caches: list[LayerCache] = []
        self.mismatch = ""
        # A stage that rebalances divides one budget over all layers. Later stages wait until the shares are final.
        # Without such a stage the chain compresses each layer at once, and no stage waits.
        first_waiting = 0
        if chain.rebalancer:
            first_waiting = chain.stages.index(chain.rebalancer) + 1
        self._first_stages = chain.stages[:first_waiting]
        self._later_stages = chain.stages[first_waiting:]
        self._observations: list[Observation] = []  # one for each layer so far; later stages read them

    def add_layer(self, dense: LayerCache, obs: Observation) -> None:
        """Compress the next finished layer. Stages after one that rebalances wait for the last layer.

        dense: the layer's uncompressed cache.
        obs: the layer's observation.
        """
        balancer = self.chain.rebalancer
        if balancer is None:
            self.caches.append(self.chain.compress(dense, obs))
            return
        for stage in self._first_stages:
            dense = self.chain.run(stage, dense, obs)
        # each new layer changes the shares of all layers, so that earlier layers may be trimmed again
        self.caches = balancer.rebalance([*self.caches, dense], obs.n_layers)
        self._observations.append(self._reduce_observation(obs))
        if len(self.caches) == obs.n_layers and self.chain.replayer is None:
            self._run_later_stages()

    def _run_later_stages(self) -> None:
        """Run the stages after the rebalancing stage, once the shares of that stage are final.

        Then repeat each layer's heads to the chain's stored heads: under ``per=query_head`` an uncut cache has kv
        heads.
        """
        for i, obs in enumerate(self._observations):
            for stage in self._later_stages:
                self.caches[i] = self.chain.run(stage, self.caches[i], obs)
            self.caches[i] = ops.expand(self.caches[i])

    def finish_replay(self, received: Sequence[Tensor] | None) -> None:
        """Compress the layers, which hold all tokens until now, after the model has read the prompt again.

        received: for each layer, the attention [Hq, n] that its tokens received in the further passes; None if there
            were no such passes, because all tokens stay.
        """
        dense_layers, selector = self.caches, self.chain.replayer
        if received is not None and selector is not None:
            scored = []
            for layer_received, dense in zip(received, dense_layers, strict=True):
                # [heads, Hq / heads, n]: the scores by stored head and by the query heads that read it
                by_stored_head = layer_received.view(dense.heads, -1, layer_received.shape[1])
                # a stored head takes the best score of its query heads: [heads, n]
                score = by_stored_head.amax(dim=1)
                scored.append(ops.with_state(dense, score=score))
            # the selector divides one budget over all layers and drops the tokens with the lowest scores
            self.caches = selector.rebalance(scored, len(scored))
        self._run_later_stages()
        # record in ``mismatch`` if a layer does not hold the prompt's own keys and values
        for i, (dense, obs) in enumerate(zip(dense_layers, self._observations, strict=True)):
            source = _select_source(self.caches[i], dense.segments[0], obs)
            self._compare(i, self.caches[i], source, all_read=True)

    def compare_newest(self, dense: Segment, obs: Observation) -> None:
        """Compare the layer added last with the prompt's own keys and values, or with its latents."""
        source = _select_source(self.caches[-1], dense, obs)
        self._compare(obs.layer, self.caches[-1], source, all_read=obs.positions is None)

    def _compare(self, layer: int, cache: LayerCache, source: Segment, all_read: bool) -> None:
        """Record in ``mismatch`` how a layer's cache differs from ``source``, the keys and values that it must hold.

        Nothing is compared if a stage of the chain is meant to change keys and values. ``all_read`` is True if the
        layer has read all tokens of the prompt.
        """
        changes_meant = any(stage.changes for stage in self.chain.stages)
        # the first mismatch is the one to report
        if self.mismatch or changes_meant:
            return
        difference = find_mismatch(cache, source, all_read)
        if difference:
            self.mismatch = f"layer {layer} holds {difference}"

    def _reduce_observation(self, obs: Observation) -> Observation:
        """Return the observation with only the parts that later stages read, so that the rest can be freed."""
        # the observations of all layers wait at the same time, so each of them must be small
        needs = Needs.union(stage.needs(obs.prompt_tokens) for stage in self._later_stages)
        smaller = replace(
            obs,
            last_q=None,
            colsums_q={bits: sums for bits, sums in obs.colsums_q.items() if bits in needs.colsums_bits},
            scratch={},
        )
        if needs.last_q:
            smaller = replace(smaller, last_q=obs.queries(needs.last_q).clone())
        if not needs.first_q:
            smaller = replace(smaller, first_q=None)
        if not needs.colsums:
            smaller = replace(smaller, colsums=None)
        if not needs.hidden:
            smaller = replace(smaller, hidden=None)
        if not needs.call:
            smaller = replace(smaller, call=None)
        return smaller


def _select_source(cache: LayerCache, dense: Segment, obs: Observation) -> Segment:
    """Return the segment whose numbers a layer's cache must hold: the prompt's keys and values, or its latents.

    dense: the prompt's keys and values. The latents of ``obs`` count if the cache stores latents.
    """
    if obs.latents is None or not any(segment.latent for segment in cache.segments):
        return dense
    latent_k, latent_v = obs.latents
    return replace(dense, k=latent_k[None], v=latent_v[None])

"""ExpectedAttention: keep the tokens that future queries are expected to attend to (arXiv 2510.00636, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.kv import ops
from kvbench.kv.observation import Needs, Observation
from kvbench.kv.segment import LayerCache, Segment, per_head
from kvbench.methods.core.base import Selector
from kvbench.methods.core.contract import Capacity
from kvbench.methods.core.knobs import Rule, at_least, knob
from kvbench.methods.core.statistics import at_heads, group_mean
from kvbench.storage.roles import Rotary


@dataclass(frozen=True, kw_only=True)
class ExpectedAttention(Selector):
    """Score of token j = (a_j + epsilon) * ||v_j||_2 with the expected attention a_j, as kvpress computes it.

    a = softmax over tokens j of log E[exp(scale q.k_j)] for a future query q. Future queries are assumed to be normally
    distributed, with mean m and covariance S. Then log E[exp(scale q.k)] = scale m.k + scale^2 k' S k / 2. Both m and S
    come from the prompt's queries after the sinks: their own rotations are undone, and they are turned by the average
    rotation of the next ``future`` positions. Under GQA a_j is the mean over a group's query heads.

    The method needs rotary positions. A bias of the query projection counts.

    covariance: false leaves out the second term, so that only m counts.
    vnorm: false takes a_j alone as the score.
    """

    id: ClassVar[str] = "expectedattention"
    rotates: ClassVar[bool] = True
    uncapped: ClassVar[bool] = True  # the formula for E[exp(q.k)] does not hold for capped logits

    sinks: int = knob(4, at_least(0, "tokens"))
    future: int = knob(512, Rule("1 to 100000 positions", lambda count: 1 <= count <= 100_000))
    covariance: bool = True
    vnorm: bool = True
    epsilon: float = knob(0.0, Rule("a number, 0 or more", lambda x: x >= 0))

    def sink_size(self) -> int:
        return self.sinks

    def needs(self, n: int) -> Needs:
        return Needs(last_q=n)

    def scores(self, cache: LayerCache, obs: Observation, capacity: Capacity) -> torch.Tensor:
        segment, sinks = ops.only_segment(cache), capacity.sinks

        def score_segment() -> tuple[Segment, torch.Tensor]:
            return segment, self._score_tokens(segment, cache.heads, obs, sinks)

        # chains that differ in their budget alone share the scores; ``once`` returns those of the first chain
        settings = (sinks, self.future, self.covariance, self.vnorm, self.epsilon, cache.heads)
        scored_segment, scores = obs.once(("expected scores", *settings), score_segment)
        if scored_segment.k is segment.k and scored_segment.v is segment.v:
            return scores
        # another stage has changed the keys or values of one of the two chains
        return self._score_tokens(segment, cache.heads, obs, sinks)

    def _score_tokens(self, segment: Segment, heads: int, obs: Observation, sinks: int) -> torch.Tensor:
        """Return the scores [heads, n] of all tokens. The first ``sinks`` tokens, which always stay, get 0."""
        # m [Hq, D] and S [Hq, D, D] of future queries
        mean, cov = obs.once(("expected query", sinks, self.future), lambda: self._estimate_queries(obs, sinks))
        query_heads = len(mean)
        keys = per_head(segment.k[:, sinks:].float(), query_heads)
        # log E[exp(scale q.k)] = scale m.k + scale^2 k' S k / 2: first the mean of the logit, then half its variance
        logits = (keys @ mean[:, :, None])[..., 0] * obs.scale
        if self.covariance:
            quadratic_forms = ((keys @ cov) * keys).sum(dim=-1)
            logits += quadratic_forms * (obs.scale**2 / 2)
        scores = group_mean(logits.softmax(dim=-1), heads)
        if self.vnorm:
            # s_j = (a_j + epsilon) * ||v_j||_2
            value_norms = segment.v[:, sinks:].float().norm(dim=-1)
            scores = (scores + self.epsilon) * at_heads(value_norms, heads)
        return torch.nn.functional.pad(scores, (sinks, 0))

    def _estimate_queries(self, obs: Observation, sinks: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean m [Hq, D] and the covariance S [Hq, D, D] of future queries.

        They are estimated from the prompt's queries after its first ``sinks`` tokens. Raises ValueError for a model
        without rotary positions.
        """
        if obs.inv_freq is None:
            raise ValueError("expectedattention undoes rotations, which were not observed")
        rotary = Rotary(obs.inv_freq)
        q = obs.queries(obs.n)[:, sinks:].float()
        # turned to position 0, queries are as before their rotation
        unrotated = rotary.turn(q, start=obs.token_positions(q.device)[sinks:], end=0)
        # mean and covariance of these queries, over the tokens
        mean = unrotated.mean(dim=1)
        centred = unrotated - mean[:, None]
        cov = centred.transpose(1, 2) @ centred / centred.shape[1]
        # R [D, D] is the average rotation to the next ``future`` positions: its row i is the image of axis i
        future_positions = torch.arange(obs.prompt_tokens, obs.prompt_tokens + self.future, device=q.device)
        axes = torch.eye(q.shape[2], device=q.device)
        rotation = rotary.mean_turn(axes, future_positions)
        # queries q become q R, so m = mean R and S = R^T cov R
        return mean @ rotation, rotation.T @ cov @ rotation

"""What methods are handed while a prompt is read, and the random numbers that they draw."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from support.families import build, prompt

import kvbench
from kvbench.base.errors import Refused
from kvbench.kv import ops
from kvbench.kv.observation import Needs
from kvbench.methods.core.base import Selector
from kvbench.methods.core.chain import Chain


@dataclass(frozen=True, kw_only=True)
class Writes(Selector):
    """Keeps the last tokens, and writes from its second layer on into what ``where`` names."""

    id = "writes"
    where: str = ""

    def needs(self, n):
        return Needs(last_q=8, first_q=8, colsums=True, hidden=True)

    def scores(self, cache, obs, capacity):
        (s,) = cache.segments
        own = {"keys": s.k, "values": s.v, "positions": s.positions}
        if obs.layer == 1:
            own.get(self.where, getattr(obs, self.where, None))[:1].zero_()
        return torch.arange(obs.n)[None].expand(cache.heads, -1)


@pytest.mark.parametrize("where", ["keys", "values", "positions", "last_q", "first_q", "colsums", "hidden", "inv_freq"])
def test_a_method_that_writes_into_what_it_is_handed_is_refused(where):
    reason = f"writes changes what it is handed in place: {where} of layer 1; clone first"
    model = build("llama")
    frequencies = model.model.rotary_emb.inv_freq.clone()
    with pytest.raises(Refused, match=reason):
        kvbench.prefill(model, prompt(40), [Chain((Writes(where=where, kv_size=16),))])
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)


@dataclass(frozen=True, kw_only=True)
class Draws(Selector):
    """Keeps tokens that torch, Python and NumPy draw together."""

    id = "draws"

    def scores(self, cache, obs, capacity):
        return torch.rand(1, obs.n) + random.random() + torch.tensor(np.random.rand(1, obs.n))

    def pick(self, cache, scores, budget):
        return ops.select(cache, scores.topk(budget).indices.sort().values)


def test_draws_depend_on_the_prompt_alone_and_leave_no_trace():
    model, chain = build("llama"), Chain((Draws(kv_size=16),))

    def kept(ids, *others):
        caches = kvbench.prefill(model, ids, [*others, chain])
        return [positions.tolist() for layer in caches[-1].layers for positions in layer.kept_positions()]

    def draw():
        return torch.rand(3).tolist(), random.random(), np.random.rand()

    def seed():
        random.seed(5), np.random.seed(5), torch.manual_seed(5)

    seed()
    expected = draw()
    seed()
    first = kept(prompt(40, 1))
    assert draw() == expected
    assert kept(prompt(40, 1), "snapkv") == first
    assert kept(prompt(40, 2)) != first
    assert len({tuple(positions) for positions in first}) > 1


@dataclass(frozen=True, kw_only=True)
class ReadsHalf(Selector):
    """Lets the prompt's attention read halved keys, without a ``prefill_key`` of its own."""

    id = "readshalf"

    def read(self, k, v):
        return k / 2, v

    def scores(self, cache, obs, capacity):
        return torch.arange(obs.n)[None].expand(cache.heads, -1)


def test_a_method_that_alters_what_attention_reads_is_read_apart():
    model, ids, altered = build("llama"), prompt(40), Chain((ReadsHalf(kv_size=16),))
    (plain,) = kvbench.prefill(model, ids, ["full"])
    (alone,) = kvbench.prefill(model, ids, [altered])
    beside, full = kvbench.prefill(model, ids, [altered, "full"])
    assert torch.equal(full.logits, plain.logits)
    assert torch.equal(beside.logits, alone.logits) and not torch.equal(alone.logits, plain.logits)

"""The audit passes honest caches, with bytes equal to hand-written formulas, and refuses dishonest methods."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from support import processes
from support.families import LOCALS, PLAIN, build, prompt

import kvbench
from kvbench.audit.accounting import bytes_declared
from kvbench.audit.prompt_audit import audit
from kvbench.base.errors import Refused
from kvbench.kv import ops
from kvbench.kv.segment import Segment
from kvbench.methods.core.base import Selector
from kvbench.methods.core.chain import Chain
from kvbench.models import traits
from kvbench.models.interface import cache_shape


def heads_of(model):
    c = model.config
    heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    if c.model_type == "gemma4_text":
        return heads, 32
    dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return heads, dim


LOCAL_LAYERS = dict.fromkeys(LOCALS, 2) | {"gemma2": 1, "llama4_text": 2}


def measured(model, cache):
    return audit(cache, cache_shape(model))


@pytest.mark.parametrize("family", PLAIN)
@pytest.mark.parametrize("per", ["kv_head", "query_head"])
def test_bytes_equal_the_spec_formula(family, per):
    model = build(family)
    kv, d = heads_of(model)
    shape = traits.of_model(model).shape
    n, size, recent, layers = 100, 40, 8, shape.layers
    chain = [{"method": "snapkv+think", "snapkv.window": 16, "kv_size": size, "recent": recent, "ratio": 0.4}]
    (cache,) = kvbench.prefill(model, prompt(n), chain, per=per)
    m = measured(model, cache)
    h = model.config.num_attention_heads if per == "query_head" else kv
    t = d - int(0.4 * d)
    # a local layer holds its window of 24 tokens under the kv heads, whatever ``per`` says, and their positions once
    held = LOCAL_LAYERS.get(family, 0) * 24
    # states are held whole, under whatever heads
    local_d = 16 if family == "gemma4_text" else d
    local = held * 2 * kv * local_d * 4 + shape.state_bytes(4)
    assert m.payload == layers * 4 * h * ((size - recent) * t + recent * d + size * d) + local
    assert m.overhead == layers * (4 * h * size + 2 * h * t) + held * 4
    assert m.payload + m.overhead == cache.nbytes()
    assert m.full_bytes == layers * 2 * kv * n * d * 4 + local
    # recurrent states are held in fp32 in models of 16 bits, too
    in_fp32 = 4 * shape.recurrent_numbers
    assert 2 * (m.payload16 - in_fp32) == m.payload - in_fp32
    assert 2 * (m.full16 - in_fp32) == m.full_bytes - in_fp32
    assert m.overhead16 == m.overhead
    assert m.kept == m.nominal == size
    one = layers * 4 * ((size - recent) * t + recent * d + size * d)
    query_heads = model.config.num_attention_heads
    assert (m.payload_kv_head, m.payload_query_head) == (kv * one + local, query_heads * one + local)
    declared = bytes_declared(cache.chain, shape, n, 4)
    assert (declared.payload, declared.overhead, declared.tokens) == (m.payload, m.overhead, size)


@pytest.mark.parametrize("per", ["kv_head", "query_head"])
def test_ragged_heads_count_their_mean_under_the_other_kind(per):
    model = build("llama")
    ragged = {"method": "refreekv", "mode": "eq1", "reduce": "per_head", "T": 0.2, "frozen_layers": []}
    (cache,) = kvbench.prefill(model, prompt(60, 1), [ragged], per=per)
    assert len({len(p) for layer in cache.layers for p in layer.kept_positions()}) > 1
    m = measured(model, cache)
    assert m.payload == getattr(m, f"payload_{per}")
    assert m.payload_query_head == 2 * m.payload_kv_head


def test_full_cache_bytes_on_bf16():
    model = build("llama", torch.bfloat16)
    (cache,) = kvbench.prefill(model, prompt(64), ["full"])
    m = measured(model, cache)
    assert m.payload == m.full_bytes == m.payload_kv_head == 3 * 2 * 2 * 64 * 16 * 2
    assert m.payload_query_head == 2 * m.full_bytes
    assert m.overhead == 3 * 4 * 64


@dataclass(frozen=True, kw_only=True)
class KeepsEverything(Selector):
    id: ClassVar[str] = "liar"

    def compress(self, cache, obs):
        return cache


@dataclass(frozen=True, kw_only=True)
class Views(Selector):
    id: ClassVar[str] = "views"

    def compress(self, cache, obs):
        (s,) = cache.segments
        k = self.budget(obs.n, obs.layer, obs.n_layers)
        return replace(cache, segments=(Segment(s.k[:, :k], s.v[:, :k], s.positions[:, :k].clone()),))


@dataclass(frozen=True, kw_only=True)
class FirstOnly(Selector):
    """Compresses the first prompt it ever sees and no other."""

    id: ClassVar[str] = "firstonly"
    done: ClassVar[set] = set()

    def compress(self, cache, obs):
        if self.done and obs.prompt not in self.done:
            return cache
        self.done.add(obs.prompt)
        return super().compress(cache, obs)

    def scores(self, cache, obs, capacity):
        return torch.arange(obs.n)[None].expand(cache.heads, -1)


@dataclass(frozen=True, kw_only=True)
class Repeats(Selector):
    id: ClassVar[str] = "repeats"

    def compress(self, cache, obs):
        k = self.budget(obs.n, obs.layer, obs.n_layers)
        return ops.select(cache, torch.zeros(cache.heads, k, dtype=torch.int64))


@pytest.mark.parametrize(
    ("stage", "reason"),
    [
        (
            KeepsEverything(kv_ratio=0.125),
            r"declares exactly 10. Its class declares other numbers by budget\(\), expected\(\)",
        ),
        (Views(kv_ratio=0.5), "view"),
        (Repeats(), "distinct"),
    ],
)
def test_broken_methods_are_refused_with_the_reason(stage, reason):
    model = build("llama")
    (cache,) = kvbench.prefill(model, prompt(80), [Chain((stage,))])
    with pytest.raises(Refused, match=reason):
        measured(model, cache)


@dataclass(frozen=True, kw_only=True)
class Lies(Selector):
    """Keeps the last tokens, and returns the cache that ``lie`` makes of them."""

    id: ClassVar[str] = "lies"
    lie: str = ""

    def compress(self, cache, obs):
        (s,) = ops.select(cache, torch.arange(obs.n)[None, -self.budget(obs.n, obs.layer, obs.n_layers) :]).segments
        return LIES[self.lie][0](cache, s)


def changed(change):
    """A lie about the kept segment: ``change`` returns the fields that are replaced in it."""
    return lambda cache, s: replace(cache, segments=(replace(s, **change(s)),))


ORDER = "does not hold distinct prompt positions 0..79 in order"
OTHERS = "that are not those of the prompt at the positions it names"
LIES = {
    "half precision": (changed(lambda s: {"k": s.k.half(), "v": s.v.half()}), "payload bytes"),
    "a copy in the state": (changed(lambda s: {"state": {"copy": s.k.clone()}}), "overhead bytes"),
    "values are keys": (changed(lambda s: {"v": s.k}), "shares its storage"),
    "fewer values": (changed(lambda s: {"v": s.v[:, :-1].clone()}), "different lengths"),
    "more heads": (changed(lambda s: {name: torch.cat([t, t]) for name, t in tensors(s).items()}), "payload bytes"),
    "unsorted": (changed(lambda s: {"positions": s.positions.flip(1)}), ORDER),
    "beyond the prompt": (changed(lambda s: {"positions": s.positions + 70}), ORDER),
    "before the prompt": (changed(lambda s: {"positions": s.positions - 70}), ORDER),
    "positions of other tokens": (changed(lambda s: {"positions": s.positions - 20}), f"holds keys {OTHERS}"),
    "values of other heads": (changed(lambda s: {"v": s.v.flip(0)}), f"holds values {OTHERS}"),
    "keys that nobody computed": (changed(lambda s: {"k": s.k + 1}), f"holds keys {OTHERS}"),
    "no tokens": (
        lambda cache, s: ops.select(cache, torch.zeros(1, 0, dtype=torch.int64)),
        "holds no token at all|keeps 0 tokens",
    ),
    "more tokens than were read": (
        lambda cache, s: replace(cache, segments=(s,), seen=999),
        "says that it has read 999 tokens",
    ),
}


def tensors(s):
    return {"k": s.k, "v": s.v, "positions": s.positions}


@pytest.mark.parametrize("lie", LIES)
def test_a_cache_that_is_not_what_its_method_declares_is_refused(lie):
    model = build("llama")
    (cache,) = kvbench.prefill(model, prompt(80), [Chain((Lies(lie=lie, kv_ratio=0.5),))])
    with pytest.raises(Refused, match=LIES[lie][1]):
        measured(model, cache)


def test_compressing_only_the_first_example_is_refused():
    model, chain = build("llama"), Chain((FirstOnly(kv_ratio=0.5),))
    FirstOnly.done.clear()
    (first,) = kvbench.prefill(model, prompt(80, 1), [chain])
    (second,) = kvbench.prefill(model, prompt(80, 2), [chain])
    measured(model, first)
    with pytest.raises(Refused, match="keeps 80 tokens"):
        measured(model, second)


def test_process_holds_what_the_audit_says():
    """Storages alive because of a cache, found by walking live objects, equal its nbytes: nothing dense lingers."""
    import gc

    def alive():
        gc.collect()
        tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}

    model, ids = build("llama"), prompt(200)
    kvbench.prefill(model, ids, ["snapkv"])
    before = alive()
    (cache,) = kvbench.prefill(model, ids, ["snapkv+think"], kv_size=50)
    after = alive()
    grown = sum(size for ptr, size in after.items() if ptr not in before)
    assert cache.nbytes() <= grown <= cache.nbytes() + cache.logits.nbytes + 64


@dataclass(frozen=True, kw_only=True)
class SharesLayers(Selector):
    """Hands out the first layer's tensors for every layer."""

    id: ClassVar[str] = "shares"
    first: ClassVar[list] = []

    def compress(self, cache, obs):
        if obs.layer == 0:
            self.first[:] = [super().compress(cache, obs)]
        return self.first[0]

    def scores(self, cache, obs, capacity):
        return torch.arange(obs.n)[None].expand(cache.heads, -1)


def test_layers_that_share_tensors_are_refused():
    model = build("llama")
    (cache,) = kvbench.prefill(model, prompt(80), [Chain((SharesLayers(),))])
    with pytest.raises(Refused, match="shares its storage"):
        measured(model, cache)


@dataclass(frozen=True, kw_only=True)
class Mass(Selector):
    """Keeps a running score with each token, and declares its bytes."""

    id: ClassVar[str] = "mass"

    def scores(self, cache, obs, capacity):
        return torch.arange(obs.n)[None].expand(cache.heads, -1)

    def compress(self, cache, obs):
        kept_tokens = super().compress(cache, obs)
        (s,) = kept_tokens.segments
        return replace(kept_tokens, segments=(replace(s, state={"mass": torch.zeros(s.heads, s.tokens)}),))

    def layout(self, blocks, head_dim, itemsize):
        return [replace(b, slot_overhead=4) for b in blocks]


def test_declared_state_is_overhead_and_passes():
    model = build("llama")
    (cache,) = kvbench.prefill(model, prompt(80), [Chain((Mass(kv_size=20),))])
    m = measured(model, cache)
    assert m.overhead == 3 * 2 * 20 * (4 + 4)
    assert m.nominal == 20


def test_frozen_layers_show_the_budget_asked_for_beside_what_is_kept():
    model = build("llama")
    (cache,) = kvbench.prefill(model, prompt(80), ["snapkv"], kv_size=40, frozen_layers=[0])
    m = measured(model, cache)
    assert (m.nominal, m.kept) == (40, (80 + 40 + 40) / 3)


@pytest.mark.e2e("starts a process")
def test_resident_memory_of_the_process_shrinks_with_the_cache():
    """Real resident memory: eight caches at an eighth of the tokens take about an eighth of eight full ones."""
    code = """
import ctypes, gc, torch, kvbench
from transformers import LlamaConfig, LlamaForCausalLM
torch.set_num_threads(1)
torch.manual_seed(0)
config = LlamaConfig(vocab_size=99, hidden_size=64, intermediate_size=64, num_hidden_layers=8,
                     num_attention_heads=8, num_key_value_heads=8, head_dim=128)
model = LlamaForCausalLM(config).eval()
def resident():
    # what the allocator keeps of freed scratch memory is no part of a cache
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(open('/proc/self/statm').read().split()[1]) * 4096

# attention over so short a prompt costs little, and its caches are as large as longer ones of fewer layers
ids = torch.randint(3, 99, (256,))
chains = [[{'method': 'streamingllm', 'kv_ratio': 0.125}], ['full']]
for chain in chains: kvbench.prefill(model, ids, chain)
held = []
for chain in chains:
    before = resident()
    held.append([kvbench.prefill(model, ids, chain)[0] for _ in range(8)])
    print(resident() - before, sum(c.nbytes() for c in held[-1]))
"""
    process = processes.start_code(code)
    out, err = process.communicate()
    assert process.returncode == 0, err
    grown = []
    for line in out.splitlines():
        growth, nbytes = map(int, line.split())
        grown.append(growth)
        assert 0.95 * nbytes < growth < 1.15 * nbytes
    assert grown[1] > 6 * grown[0]

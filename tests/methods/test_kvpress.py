"""The adapter of kvpress's presses, around a package of its shape: the real one is not installed with kvbench."""

import sys
from dataclasses import dataclass, field
from types import ModuleType

import pytest
import torch
from support.families import build, prompt

import kvbench
from kvbench.audit.prompt_audit import audit
from kvbench.base import extras
from kvbench.base.errors import Refused, UsageError
from kvbench.cli.main import main
from kvbench.methods.core import kvpress as adapter
from kvbench.methods.core import kvpress_package as package
from kvbench.methods.core import registry
from kvbench.methods.core.resolve import chain_of, resolve
from kvbench.models.interface import cache_shape

N = 60


@dataclass
class BasePress:
    def post_init_from_model(self, model):
        pass


@dataclass
class ScorerPress(BasePress):
    compression_ratio: float = 0.0


@dataclass
class FirstPress(ScorerPress):
    """Prefers the even positions, then the first ones; it looks at all that a press may look at."""

    every: int = 2
    seed: int | None = None
    told: list = field(default_factory=list, init=False, repr=False)

    def __post_init__(self):
        assert self.every > 0, "every must be positive"

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        n = keys.shape[2]
        cos, sin = kwargs["position_embeddings"]
        assert hidden_states.shape == (1, n, module.config.hidden_size) and attentions is None
        assert cos.shape == sin.shape == (1, n, module.head_dim) and kwargs["position_ids"].shape == (1, n)
        later, _ = module.rotary_emb(hidden_states, torch.arange(n, n + 3)[None])
        assert later.shape == (1, 3, module.head_dim)
        query = module.q_proj(hidden_states)
        assert query.shape[1] == n and int(n * (1 - self.compression_ratio)) == 15
        scores = -torch.arange(n).float() + 1000 * (torch.arange(n) % self.every == 0)
        return scores.expand(keys.shape[:3])


@dataclass
class RandomPress(ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return torch.rand(keys.shape[:3])


@dataclass
class BrokenPress(ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        raise AssertionError("no such window")


@dataclass
class TrainedPress(ScorerPress):
    def post_init_from_model(self, model):
        raise FileNotFoundError


@dataclass
class AdaKVPress(BasePress):
    press: ScorerPress
    alpha_safeguard: float = 0.2

    @property
    def compression_ratio(self):
        return self.press.compression_ratio

    @compression_ratio.setter
    def compression_ratio(self, value):
        self.press.compression_ratio = value

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        scores = self.press.score(module, hidden_states, keys, values, attentions, kwargs)
        assert scores.shape == keys.shape[:3]
        drop = torch.ones(keys.shape[1:3], dtype=torch.bool)
        drop[0, :20] = drop[1, :10] = False
        heads, tokens = drop.nonzero().T
        module.masked_key_indices = torch.zeros_like(heads), heads, tokens
        return keys, values


@dataclass
class ChunkPress(BasePress):
    press: ScorerPress
    chunk_length: int = 20

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        places = torch.cat([torch.arange(start, start + 5) for start in range(0, keys.shape[2], self.chunk_length)])
        return keys[:, :, places.flip(0)], values[:, :, places.flip(0)]


@dataclass
class OddPress(BasePress):
    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        return keys, values


PRESSES = (FirstPress, RandomPress, BrokenPress, TrainedPress, AdaKVPress, ChunkPress, OddPress)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    module, utils = ModuleType("kvpress"), ModuleType("kvpress.utils")
    for cls in (BasePress, ScorerPress, *PRESSES):
        setattr(module, cls.__name__, cls)
    module.__version__ = "0.0.test"
    monkeypatch.setitem(sys.modules, "kvpress", module)
    monkeypatch.setitem(sys.modules, "kvpress.utils", utils)
    monkeypatch.setattr(extras, "installed", lambda name: True)
    monkeypatch.setattr(package, "version", lambda name: module.__version__)
    known = package.import_package, adapter._make_class, registry.defaults
    for cached in known:
        cached.cache_clear()
    yield module
    for cached in known:
        cached.cache_clear()


def kept(entry):
    (cache,) = kvbench.prefill(build("llama"), prompt(N), [entry])
    audit(cache, cache_shape(build("llama")))
    return [[p.tolist() for p in layer.kept_positions()] for layer in cache.layers]


EVEN = list(range(0, 30, 2))


@pytest.mark.parametrize("name", ["first", "First", "FirstPress", "first_press"])
@pytest.mark.parametrize("budget", [{"kv_size": 15}, {"kv_ratio": 0.25}, {"compression_ratio": 0.75}])
def test_a_press_scores_and_its_best_tokens_are_stored(name, budget):
    model = build("llama")
    parts = {*model.modules()}
    assert kept({"method": f"kvpress:{name}", **budget}) == [[EVEN] * 2] * 3
    assert {*model.modules()} == parts and not any("rotary_emb" in m.__dict__ for m in parts)


def test_the_fields_of_a_press_are_its_knobs():
    assert registry.knob_names("kvpress:first")[-2:] == ("every", "seed")
    assert kept({"method": "kvpress:first", "kv_size": 15, "every": 3})[0][0] == list(range(0, 45, 3))
    (swept,) = {c.chain.name for c in resolve(["kvpress:first"], {"every": [2, 3], "kv_size": 15})}
    assert swept == "kvpress:first"
    with pytest.raises(UsageError, match="unknown option each"):
        chain_of("kvpress:first", {"each": 3})
    with pytest.raises(UsageError, match="every='x' is not possible: a whole number"):
        chain_of("kvpress:first", {"every": "x"})
    with pytest.raises(UsageError, match="kvpress does not take these options: every must be positive"):
        chain_of("kvpress:first", {"every": 0})
    with pytest.raises(UsageError, match="a budget of its own"):
        chain_of("kvpress:first", {"compression_ratio": 0.5, "kv_size": 15})


def test_help_has_the_knobs_and_the_presss_own_words(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--help", "kvpress:FirstPress"])
    shown = capsys.readouterr().out
    assert "kvpress:first" in shown and "  every: 2\n" in shown and "Prefers the even positions" in shown
    assert main(["list", "kvpress"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    runs, refused = "kvbench runs it and removes them", "kvbench does not run it: it does not score tokens"
    assert f"kvpress:adakv:NAME AdaKVPress; dropped tokens are masked in kvpress; {runs}" in shown
    assert f"kvpress:odd OddPress; dropped tokens are removed in kvpress; {refused}" in shown


def test_identity_is_the_presses_their_fields_and_kvpresss_version(stand_in):
    def identity(**knobs):
        return chain_of({"method": "kvpress:adakv:first", "kv_size": 15, **knobs}).identity()

    (stage,) = identity()["stages"]
    assert stage["presses"] == ["AdaKVPress", "FirstPress"] and stage["kvpress"] == "0.0.test"
    assert stage["knobs"] == {"kv_size": 15, "frozen_layers": (), "alpha_safeguard": 0.2, "every": 2}
    assert "code" not in stage and identity(every=3) != identity() != identity(alpha_safeguard=0.3)
    before = identity()
    stand_in.__version__ = "0.0.other"
    assert identity() != before


def test_heads_keep_what_a_wrapper_does_not_mask():
    for layer in kept({"method": "kvpress:adakv:first", "kv_size": 15}):
        assert layer == [list(range(20)), list(range(10))]
    model = build("llama")
    assert not any("masked_key_indices" in m.__dict__ for m in model.modules())


def test_what_a_press_removes_by_itself_is_found_by_its_keys():
    entry = {"method": "kvpress:chunk:first", "compression_ratio": 0.75}
    assert kept(entry) == [[[*range(5), *range(20, 25), *range(40, 45)]] * 2] * 3


def test_a_press_stands_in_a_chain_with_others():
    (cache,) = kvbench.prefill(build("llama"), prompt(N), [{"method": "kvpress:random+think", "kv_size": 50}])
    audit(cache, cache_shape(build("llama")))
    assert any(s.key_channels is not None for s in cache.layers[0].segments)


def test_random_draws_follow_from_the_prompt_and_the_layer():
    first, again = kept("kvpress:random"), kept("kvpress:random")
    assert first == again and first[0] != first[1]
    state = torch.random.get_rng_state()
    kept("kvpress:random")
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("kvpress:frist", "unknown press frist of kvpress. Did you mean first?"),
        ("kvpress:odd", "OddPress does not run here: it does not score tokens"),
        ("kvpress:trained", "TrainedPress does not run here: it reads a trained file of the model"),
        ("kvpress:adakv", "wraps a press that scores tokens: name it, as in kvpress:adakv:snapkv"),
        ("kvpress:first:first", "FirstPress wraps no other press"),
        ("kvpress:adakv:chunk:first", "AdaKVPress needs a press that scores tokens inside it"),
    ],
)
def test_what_does_not_run_is_refused_with_the_reason(method, reason):
    with pytest.raises(UsageError) as refused:
        chain_of(method)
    assert reason in str(refused.value)


def test_an_assertion_of_a_press_is_one_line():
    with pytest.raises(Refused, match="kvpress:broken fails in layer 0: AssertionError: no such window"):
        kept("kvpress:broken")
    with pytest.raises(Refused, match="per=kv_head"):
        kept({"method": "kvpress:random", "per": "query_head"})


def test_without_the_package_the_one_sentence_names_the_command(monkeypatch):
    package.import_package.cache_clear()
    monkeypatch.setattr(extras, "installed", lambda name: False)
    with pytest.raises(UsageError, match=r"needs the package kvpress, which is not installed: pip install .*\[peers\]"):
        chain_of("kvpress:first")


def test_a_share_is_told_so_that_every_budget_comes_back():
    """C13: int(n * (1 - r)) is C for the r that a press is told."""
    stage = chain_of({"method": "kvpress:first", "kv_size": 15}).stages[0]
    for n in (*range(2, 60), 997, 1000, 3937, 5000):
        assert all(int(n * (1 - stage._compute_ratio(n, n, budget))) == budget for budget in range(1, n))


def test_a_share_removed_is_rounded_as_kvpress_rounds():
    """C6: n = 1000."""
    tokens = {r: package.count_kept(1000, r) for r in (0.25, 0.5, 0.75, 0.875, 0.9, 0.8, 0.7)}
    assert tokens == {0.25: 750, 0.5: 500, 0.75: 250, 0.875: 125, 0.9: 99, 0.8: 199, 0.7: 300}
    assert chain_of({"method": "kvpress:first", "compression_ratio": 0.9}).nominal(1000) == 99

"""A recorded decode step gives the logits of plain steps, and is refused where steps are not alike."""

import pytest
import torch
from support.families import OPT_WAITS
from support.families import build as family

import kvbench
from kvbench.base.errors import KvbenchError
from kvbench.engine import cuda_graph
from kvbench.engine.cuda_graph import Graph
from kvbench.engine.step import build, step
from kvbench.methods.core.registry import knob_names
from kvbench.models.interface import attached

pytestmark = pytest.mark.e2e("every method decodes")

KNOBS = {"kv_size": 48, "ratio": 0.4, "value_ratio": 0.4}
N, NEW = 90, 3


def caches(model, methods, rows=2):
    g = torch.Generator().manual_seed(0)
    read = [torch.randint(3, 120, (N,), generator=g) for _ in range(rows)]
    owned = [{k for m in method.split("+") for k in knob_names(m)} for method in methods]
    requested = [
        {"method": m, **{k: v for k, v in KNOBS.items() if k in ours}} for m, ours in zip(methods, owned, strict=True)
    ]
    return [c for ids in read for c in kvbench.prefill(model, ids, requested)]


@pytest.mark.parametrize(
    ("name", "methods"),
    [
        ("llama", ["full"]),
        ("llama", ["snapkv+think"]),
        ("llama", ["full", "snapkv", "adakv", "adakv+think"]),
        ("opt", ["full", "snapkv"]),
        ("opt", ["adakv+thinkv"]),
    ],
)
def test_a_graph_gives_the_logits_of_plain_steps(name, methods):
    if name == "opt" and OPT_WAITS:
        pytest.skip("OPT of this release of transformers cannot be recorded")
    model = family(name, num_hidden_layers=2)
    cache = caches(model, methods, 2 if len(methods) == 1 else 1)
    with torch.no_grad(), attached(model):
        plain, recorded = build(model, cache, NEW + 1), build(model, cache, NEW + 1)
        graph = Graph(model, recorded)
        token = torch.stack([c.logits for c in cache]).argmax(dim=-1)[:, None]
        for i in range(NEW + 1):
            positions = torch.full_like(token, N + i)
            want = step(model, plain, token, positions)
            # a plain step may follow
            actual = graph.step(token, positions) if i < NEW else step(model, recorded, token, positions)
            assert (actual - want).abs().max() < 1e-5 * want.abs().max()
            token = want[:, -1].argmax(dim=-1)[:, None]
    for ours, peers_value in zip(recorded.with_keys, plain.with_keys, strict=True):
        assert ours.payload() == peers_value.payload() and ours.held().tolist() == peers_value.held().tolist()
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(tail(ours), tail(peers_value), strict=True))


def test_a_model_that_cannot_be_recorded_is_refused_in_words(monkeypatch):
    model = family("llama")
    cache = caches(model, ["full"], 1)
    monkeypatch.setattr(cuda_graph, "step", lambda *given: step(*given) * float(step(*given).max()))
    with (
        torch.no_grad(),
        attached(model),
        pytest.raises(KvbenchError, match=r"own code cannot be recorded.*step=plain"),
    ):
        Graph(model, build(model, cache, NEW))


def test_a_graph_follows_plain_steps():
    model = family("llama")
    cache = caches(model, ["snapkv"])
    with torch.no_grad(), attached(model):
        plain, recorded = build(model, cache, NEW), build(model, cache, NEW)
        for layer in recorded.with_keys:
            # storage that was never written holds anything
            ((_, rows),) = layer.formats
            rows.keys, rows.values = (torch.full((2, x.shape[0], NEW, x.shape[2]), torch.nan) for x in dense(rows))
        token = torch.tensor([[5], [7]])
        for i in range(NEW):
            positions = torch.full_like(token, N + i)
            if i == 1:
                graph = Graph(model, recorded)
            actual = graph.step(token, positions) if i >= 1 else step(model, recorded, token, positions)
            assert torch.allclose(actual, step(model, plain, token, positions), atol=1e-4)


def tail(layer):
    ((_, rows),) = layer.formats
    return rows.tail()


def dense(rows):
    """Keys and values [H, L, D] of the only group's first row."""
    (group,) = rows.groups
    return group.segments[0].k[0], group.segments[0].v[0]


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("kivi", "quantises tokens or keeps latents"),
        ("tova", "evicts while decoding"),
        ("twilight", "decides in each step what is attended"),
        ("chai", "heads share logits"),
    ],
)
def test_steps_that_are_not_alike_have_no_graph(method, why):
    model = family("llama")
    cache = caches(model, [method], rows=1)
    with torch.no_grad(), attached(model), pytest.raises(KvbenchError, match=f"layer [02]: its? {why}"):
        Graph(model, build(model, cache, NEW))


def test_a_sliding_window_that_is_outgrown_has_no_graph():
    model = family("mistral")
    (cache,) = caches(model, ["full"], rows=1)
    before, model.config.sliding_window = model.config.sliding_window, N
    try:
        with torch.no_grad(), attached(model), pytest.raises(KvbenchError, match="outgrows the model's sliding window"):
            Graph(model, build(model, [cache], NEW))
    finally:
        model.config.sliding_window = before

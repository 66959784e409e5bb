"""On a device of its own, such as a GPU: nothing stays behind on the CPU, and a recorded step waits for nothing."""

import copy

import pytest
import torch
from support.elsewhere import DEVICE, Elsewhere, moved, pretended
from support.every_method import NEW, N, answered, methods_on, parsed
from support.families import OPT_WAITS
from support.families import build as family

from kvbench.bench.sampling import lengthen
from kvbench.engine import cuda_graph
from kvbench.engine.prefill import prefill_chains
from kvbench.engine.step import build
from kvbench.methods.core.chain import Chain
from kvbench.models.interface import attached

pytestmark = pytest.mark.e2e("every method decodes")


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_every_method_runs_where_the_model_is(name):
    """Every method on Llama, and every sixth on OPT, which rotates no keys."""
    chains = methods_on(name)
    # those that change what the model computes are apart
    model = copy.deepcopy(family(name, num_hidden_layers=2))
    want = answered(model, chains)
    moved(model)
    with pretended():
        actual = answered(model, chains)
    for ours, peers_value in zip(actual, want, strict=True):
        assert ours.device == DEVICE and (ours.inner - peers_value).abs().max() < 1e-4


def test_what_mixes_devices_fails_as_on_a_gpu():
    with pretended() as waits:
        there = torch.ones(3, device=DEVICE)
        with pytest.raises(RuntimeError, match="same device"):
            there + torch.ones(3)
        assert not waits
        there[there > 0] + there[torch.tensor([0])]
        assert float(there.sum()) == 3 and torch.tensor([2], device=DEVICE).tolist() == [2]
        assert waits == ["aten::index", "aten::index", "aten::_local_scalar_dense", "tensor", "tolist"]


@pytest.mark.parametrize("name", ["llama", "opt", "gpt_neox"])
@pytest.mark.parametrize("method", ["full", "snapkv+think", "adakv"])
def test_a_recorded_step_waits_for_nothing(name, method, monkeypatch):
    """CUDA records no step in which the processor waits for the device or hands it numbers."""
    if name == "opt" and OPT_WAITS:
        pytest.skip("OPT of this release of transformers cannot be recorded")
    model, ids = moved(copy.deepcopy(family(name))), torch.arange(3, 3 + N)
    requests = []

    def recorded(run, device):
        run()
        before = len(waits)
        run()
        requests.extend(waits[before:])
        return run

    monkeypatch.setattr(cuda_graph, "record_operations", recorded)
    with pretended() as waits, torch.no_grad(), attached(model):
        chain = parsed(method) if method != "full" else Chain()
        batch = build(model, [prefill_chains(model, ids, [chain])[0] for _ in range(2)], NEW)
        recording = cuda_graph.Graph(model, batch)
        assert isinstance(recording.place, Elsewhere) and requests == []
        lengthen(model, batch, 9)
        before = len(waits)
        token = torch.zeros(2, 1, dtype=torch.int64, device=DEVICE)
        recording.step(token, token + N + 9)
        assert waits[before:] == []

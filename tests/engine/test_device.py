"""On a device of its own, such as a GPU: nothing stays behind on the CPU, and a recorded step waits for nothing."""

import copy
from functools import partial

import pytest
import torch
from support.elsewhere import DEVICE, Elsewhere, moved, pretended
from support.families import OPT_WAITS, SMALL_BLOCKS
from support.families import build as family

from kvbench.audit.accounting import bytes_held
from kvbench.bench.sampling import lengthen
from kvbench.engine import cuda_graph
from kvbench.engine.prefill import prefill_chains
from kvbench.engine.step import build, step
from kvbench.methods.core import registry
from kvbench.methods.core.base import Modifier
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.resolve import chain_of
from kvbench.models.interface import attached

pytestmark = pytest.mark.e2e("every method decodes")

CHAINS = ["snapkv+think", "adakv+think", "adakv+kivi", "think+kivi", "h2o+think variant=orig", "scissorhands+vatp"]
CHAINS += [
    "keydiff variant=paper block=16",
    "snapkv+think decode_budget=36 decode_every=1",
    "chunkkv variant=code reuse=2",
]
N, NEW = 60, 40


def every_method():
    """Those that need no calibration, each by itself or on the first that it decorates, and some chains."""
    written = [*CHAINS, "uncomp-group grouping=random"]
    for name in registry.available():
        stage = registry.make_stage(name, registry.defaults(name)) if name != "full" else None
        if stage is None or not stage.unbound:
            written.append(f"{stage.decorates[0]}+{name}" if isinstance(stage, Modifier) else name)
    return [parsed(w) for w in written]


def parsed(written):
    method, *knobs = written.split()
    sized = any("kv_size" in registry.knob_names(m) for m in method.split("+"))
    size = {"kv_size": 40} if sized else {}
    return chain_of(
        {
            "method": method,
            **SMALL_BLOCKS.get(method, {}),
            **size,
            **{k: int(v) if v.isdigit() else v for k, v in map(partial(str.split, sep="="), knobs)},
        }
    )


def answered(model, chains):
    """Logits of two steps of every chain's two rows, a few tokens apart, and of one where half of the rows are left."""
    ids = torch.randint(3, 120, (N,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), attached(model):
        read = [prefill_chains(model, ids[:n], chains) for n in (N, N - 15)]
        caches = [c for pair in zip(*read, strict=True) for c in pair]
        assert all(bytes_held(layer).total > 0 for c in caches for layer in c.layers)
        batch, collected = build(model, caches, NEW), []
        starts = torch.tensor([[c.seen] for c in caches], device=model.device)
        token = torch.full_like(starts, 5)
        for t in range(2):
            collected.append(step(model, batch, token, starts + t))
        odd = torch.arange(1, len(caches), 2)
        for layer in batch.with_keys:
            layer.keep(odd)
            assert all(n > 0 for n in layer.payload())
        collected.append(step(model, batch, token[1::2], starts[1::2] + 2))
    return collected


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_every_method_runs_where_the_model_is(name):
    """Every method on Llama, and every sixth on OPT, which rotates no keys."""
    chains = every_method()
    if name == "opt":
        chains = [c for c in chains if "expectedattention" not in c.name][::6]
    # those that change what the model computes are apart
    model = copy.deepcopy(family(name))
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

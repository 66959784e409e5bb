"""On a real GPU, and skipped without one: every method's logits beside those of a CPU, a CUDA graph, a whole run."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from support.every_method import NEW, N, answered, methods_on, parsed
from support.families import build as family

from kvbench.bench import timing
from kvbench.bench.workload import Workload
from kvbench.engine.cuda_graph import Graph
from kvbench.engine.prefill import prefill_chains
from kvbench.engine.step import build, step
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.resolve import ChainConfig
from kvbench.models.interface import attached
from kvbench.storage import kernels

pytestmark = [
    pytest.mark.e2e("every method decodes on a GPU"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("path", ["plain", "kernels"])
@pytest.mark.parametrize("name", ["llama", "opt"])
def test_every_method_computes_on_a_gpu_what_it_computes_on_a_cpu(name, path, monkeypatch):
    """Methods run one by one, and those that fail or differ are named all at once: a GPU's time is scarce."""
    monkeypatch.setenv(kernels.SWITCH, "on" if path == "kernels" else "off")
    chains = methods_on(name)
    on_cpu = copy.deepcopy(family(name))
    on_gpu = copy.deepcopy(on_cpu).to("cuda")
    wrong = {}
    for chain in chains:
        try:
            want, actual = answered(on_cpu, [chain]), answered(on_gpu, [chain])
        except Exception as error:
            wrong[chain.name] = f"{type(error).__name__}: {error}"
            continue
        assert all(logits.is_cuda for logits in actual)
        difference = max((ours.cpu() - theirs).abs().max().item() for ours, theirs in zip(actual, want, strict=True))
        if not difference < 1e-3:
            wrong[chain.name] = f"logits differ by {difference:.2g}"
    assert not wrong, json.dumps(wrong, indent=2)


@pytest.mark.parametrize("path", ["plain", "kernels"])
@pytest.mark.parametrize("method", ["full", "snapkv", "snapkv+think", "adakv", "adakv+think"])
def test_a_cuda_graph_gives_the_logits_of_plain_steps(method, path, monkeypatch):
    monkeypatch.setenv(kernels.SWITCH, "on" if path == "kernels" else "off")
    model = copy.deepcopy(family("llama")).to("cuda")
    chain = Chain() if method == "full" else parsed(method)
    ids = torch.arange(3, 3 + N, device="cuda")
    with torch.no_grad(), attached(model):
        caches = [prefill_chains(model, ids, [chain])[0] for _ in range(2)]
        plain, recorded = build(model, copy.deepcopy(caches), NEW), build(model, caches, NEW)
        graph = Graph(model, recorded)
        token = torch.full((2, 1), 5, device="cuda")
        for i in range(4):
            positions = torch.full_like(token, N + i)
            want = step(model, plain, token, positions)
            actual = graph.step(token, positions)
            assert (actual - want).abs().max() < 1e-3 * want.abs().max()
            token = want[:, -1].argmax(dim=-1)[:, None]


def test_a_run_on_a_gpu_scores_as_on_a_cpu(tmp_path):
    scores = {}
    for device in ("cpu", "cuda"):
        command = [
            sys.executable,
            "-m",
            "kvbench",
            "run",
            "model=tiny",
            f"device={device}",
            "method=snapkv+think,kivi,kvzip",
        ]
        command += ["ratio=0.4", "limit=2", f"results={tmp_path / device}", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        rows = json.loads(done.stdout)["rows"]
        scores[device] = {(row["method"], cell["task"]): cell["score"] for row in rows for cell in row["cells"]}
    assert len(scores["cpu"]) == 4 * 6 and scores["cuda"] == scores["cpu"]


def test_a_limit_on_memory_leaves_room_to_measure_the_bandwidth():
    """The limit is for the entrants: the copy that measures the bandwidth takes a gibibyte."""
    model = copy.deepcopy(family("llama")).to("cuda")
    settings = timing.Settings(overrides=(), facts={}, repeats=1, limit=0.25)
    (row,) = timing.measure_entrants(
        model, [timing.Entrant("full", ChainConfig(Chain(), "full"))], Workload(40, 4, 1), settings
    )
    assert row["status"] == "measured", row["reason"]
    assert row["roofline"]["bandwidth"] > 1e11

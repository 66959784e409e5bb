"""Memory for caches: asked for, or a share of what is free on the device that has least room for its part."""

import copy
from pathlib import Path

import pytest
import torch
from support.families import COMMON, FAMILIES, GQA, build, prompt
from transformers import LlamaConfig, LlamaForCausalLM

import kvbench
from kvbench.engine import likelihood, memory
from kvbench.models.interface import attention_modules

CPU, META = torch.device("cpu"), torch.device("meta")


def test_what_is_asked_for_is_taken_whatever_is_free():
    assert memory.cache_limit(1.5, {CPU: 1.0}, lambda device: 0) == 3 * 2**29


@pytest.mark.parametrize(
    ("free", "shares", "room"),
    [
        ({CPU: 1000}, {CPU: 1.0}, 1000),
        # 1000 bytes for a quarter of every cache are room for 4000 in all, 1500 bytes for the rest room for 2000
        ({CPU: 1000, META: 1500}, {CPU: 0.25, META: 0.75}, 2000),
        ({CPU: 400, META: 1500}, {CPU: 0.25, META: 0.75}, 1600),
    ],
)
def test_the_device_with_least_room_for_its_part_decides(free, shares, room):
    assert memory.cache_limit(None, shares, free.__getitem__) == int(memory.USED_SHARE * room)


@pytest.mark.parametrize("family", FAMILIES)
def test_shares_are_those_of_the_attention_layers(family):
    model = copy.deepcopy(build(family))  # all tests share the one that is built
    assert memory.measure_device_shares(model) == {CPU: 1.0}
    # accelerate leaves the weights of each layer on the device of that layer
    first, *others = attention_modules(model)
    first.to(META)
    layers = 1 + len(others)
    assert memory.measure_device_shares(model) == pytest.approx({META: 1 / layers, CPU: 1 - 1 / layers})


def test_free_memory_of_the_machine_is_a_part_of_all_of_it():
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
    assert 0 < memory.free_bytes(CPU) < int(total.split()[1]) * 1024


@pytest.mark.e2e("300 steps of a wide vocabulary")
def test_a_long_comparison_takes_no_more_memory_than_a_short_one(monkeypatch):
    """What is kept of each step must not split the heap, or every step's logits need memory of their own."""
    torch.manual_seed(0)
    sizes = {**COMMON, **GQA, "vocab_size": 40_000, "num_hidden_layers": 1, "intermediate_size": 32}
    model = LlamaForCausalLM(LlamaConfig(**sizes, head_dim=16)).eval()
    entry = {"method": "h2o", "variant": "orig", "kv_size": 16}
    full, cache = kvbench.prefill(model, prompt(30), ["full", entry])
    resident, step = [], likelihood.step

    def watched(*arguments, **knobs):
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
        return step(*arguments, **knobs)

    monkeypatch.setattr(likelihood, "step", watched)
    likelihood.diverge(model, full, [cache], prompt(300, 3))
    assert len(resident) > 299
    assert resident[298] - resident[100] < 100 * 2**20  # 200 steps of 2 MB of logits

"""Attention over exact rows equals a loop over heads in double precision, by PyTorch and by kvbench-kernels in C."""

import functools

import pytest
import torch
from support.families import build, prompt

import kvbench
from kvbench.storage.exact_rows import ExactRows
from kvbench.storage.format import Room, StoredRow
from kvbench.storage.kernels import SWITCH, exact_heads, on_cpu

SCALE = 0.3
ROWS = {
    "whole": ["full", {"method": "snapkv", "kv_size": 36}, {"method": "snapkv", "kv_size": 9, "window": 4}],
    "heads of several lengths": [{"method": "adakv", "kv_size": 36}, {"method": "adakv", "kv_size": 40}],
    "thin keys": [{"method": "snapkv+think", "kv_size": 40, "ratio": 0.4}, {"method": "think", "ratio": 0.6}, "full"],
    "thin keys of heads of several lengths": [{"method": "adakv+think", "kv_size": 40, "ratio": 0.4}, "full"],
    "thin values": [{"method": "thinkv", "ratio": 0.4, "value_ratio": 0.5}, "full"],
}


def attend_slowly(cache, tail, query):
    """Attention [Hq, D] of query [Hq, D] over a layer's cache and its tail of keys and values [Hk, t, D]."""
    query = query.double()
    stored = max(s.heads for s in cache.segments)
    out = torch.empty_like(query)
    for index, q in enumerate(query):
        head = index * stored // len(query)
        keys, values = (t.double()[index * len(t) // len(query)] for t in tail)
        logits, rows = [keys @ q], [values]
        for segment in cache.segments:
            s = segment.head(head * segment.heads // stored)
            own_query, own_values = q, s.v[0].double()
            if s.key_channels is not None:
                own_query = q[s.key_channels[0].long()]
            if s.value_channels is not None:
                own_values = torch.zeros(s.tokens, len(q), dtype=torch.double)
                own_values[:, s.value_channels[0].long()] = s.v[0].double()
            logits.append(s.k[0].double() @ own_query)
            rows.append(own_values)
        out[index] = (SCALE * torch.cat(logits)).softmax(0) @ torch.cat(rows)
    return out


class Text:
    """Rows of unequal lengths, what they are asked and told in 12 steps, and what each step reads.

    After the sixth step the first row leaves, and the others attend what they attended before.
    """

    def __init__(self, name, per):
        model, random = build("llama"), torch.Generator().manual_seed(0)
        caches = [c for length in (70, 43) for c in kvbench.prefill(model, prompt(length), ROWS[name], per=per)]
        self.layers = layers = [cache.layers[1] for cache in caches]
        self.steps, tail = [], torch.empty(2, len(layers), 2, 0, 16)
        for step in range(12):
            query = torch.randn(len(layers), 4, 1, 16, generator=random)
            new = torch.randn(2, len(layers), 2, 1, 16, generator=random)
            tail = torch.cat([tail, new], dim=3)
            rows = enumerate(layers)
            wanted = torch.stack([attend_slowly(layer, tail[:, row], query[row, :, 0]) for row, layer in rows])
            self.steps.append((query, new, wanted))
            if step == 5:
                layers, tail = layers[1:], tail[:, 1:]


text = functools.cache(Text)


@pytest.mark.parametrize("per", ["kv_head", "query_head"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("switch", ["off", "on"])
def test_each_head_attends_its_own_tokens_and_the_new_ones(switch, name, threads, per, monkeypatch):
    monkeypatch.setenv(SWITCH, switch)
    if switch == "on" and not on_cpu.installed():
        pytest.skip("kvbench-kernels is not installed (pip install ./kernels, with a C compiler)")
    monkeypatch.setattr(on_cpu, "EXACT_BYTES_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    served = []
    attend_exact = on_cpu.attend_exact
    monkeypatch.setattr(on_cpu, "attend_exact", lambda *given: served.append(attend_exact(*given)))
    layers, steps = text(name, per).layers, text(name, per).steps
    rows = ExactRows([StoredRow(cache=layer) for layer in layers], Room(tokens=40))
    for step, (query, new, wanted) in enumerate(steps):
        rows.add(new[0], new[1], torch.tensor([[layer.seen + step] for layer in layers]))
        out = rows.attend(query, SCALE, None)
        torch.testing.assert_close(out[:, :, 0].double(), wanted, atol=2e-6, rtol=1e-5)
        if step == 5:
            rows.keep(torch.arange(1, len(layers)))
            layers = layers[1:]
    assert bool(served) == (switch == "on")


def test_a_step_of_several_tokens_and_thin_values_are_left_to_pytorch(monkeypatch):
    monkeypatch.setenv(SWITCH, "on")
    assert not on_cpu.reads_exact(torch.zeros(1, 4, 2, 16)) and not on_cpu.reads_exact(torch.zeros(1, 4, 1, 20))
    assert not on_cpu.reads_exact(torch.zeros(1, 4, 1, 16, dtype=torch.float16))
    (cache,) = kvbench.prefill(build("llama"), prompt(70), [{"method": "thinkv", "ratio": 0.4, "value_ratio": 0.5}])
    rows = ExactRows([StoredRow(cache=cache.layers[0])], Room(tokens=4))
    readable = [exact_heads.can_read(s, 16) for group in rows.groups for s in group.segments]
    # the newest tokens have all channels
    assert readable == [False, True]


@pytest.mark.parametrize(
    ("tokens", "parts", "expected"),
    [
        ([8, 4, 2, 1, 1], 2, [(0, 1), (1, 4)]),
        ([5, 5, 5, 5, 5, 5], 3, [(0, 2), (2, 2), (4, 2)]),
        ([9], 2, [(0, 1)]),
        ([0, 0], 2, [(0, 2)]),
        ([1, 1, 10], 3, [(0, 2), (2, 1)]),
    ],
)
def test_threads_get_about_equally_many_tokens(tokens, parts, expected):
    assert list(exact_heads.split_evenly(tuple(tokens), parts)) == expected

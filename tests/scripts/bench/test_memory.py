"""The decode benchmark's verdict, and what it measures of one method."""

from types import SimpleNamespace

import memory
import pytest

pytestmark = pytest.mark.e2e("runs benchmarks")


@pytest.fixture(autouse=True)
def no_collection(monkeypatch):
    """Collect no garbage of the tests' own process, whose growth is looked at roughly."""
    monkeypatch.setattr(memory, "gc", SimpleNamespace(collect=lambda: None))


FLAT = {"early": 10.0, "late": 10.0, "tokens": 256.0, "excess": 0.0}


@pytest.mark.parametrize(
    ("change", "status"),
    [({}, 0), ({"late": 10.0 + 3 * 2**20}, 1), ({"tokens": 256.5}, 1), ({"excess": 1.0}, 1), ({"late": 2.0**20}, 0)],
)
@pytest.mark.parametrize("name", ["h2o orig", "cake", "streamingllm rolled"])
def test_one_method_that_grows_or_holds_too_much_fails_the_benchmark(name, change, status, capsys):
    def measure(method, new):
        if method == name:
            return {**FLAT, **change}
        return FLAT

    assert memory.decode_report(2000, measure) == status
    lines = [line for line in capsys.readouterr().out.splitlines() if "MISSED" in line]
    assert [line.split("  ")[1].strip() for line in lines] == [name] * status


def test_the_full_cache_is_there_to_compare_with_and_may_grow():
    def measure(method, new):
        if method == "full":
            return {"early": 0.0, "late": 1e9, "tokens": 2512.0, "excess": 0.0}
        return FLAT

    assert memory.decode_report(2000, measure) == 0


@pytest.mark.parametrize("name", ["full", "h2o uncomp", "cake", "qhitter code", "uncomp-group"])
def test_tokens_are_counted_in_every_layer(name):
    actual = memory.decode_growth(name, 20)
    assert actual["tokens"] == (532 if name == "full" else 256) and actual["excess"] <= 0
    assert actual["late"] > 0 and actual["early"] > 0


def test_every_method_that_evicts_while_decoding_is_measured():
    from kvbench.methods.core import registry
    from kvbench.methods.core.evicting import EvictingSelector
    from kvbench.methods.core.resolve import chain_of

    stages = {m: registry.make_stage(m, registry.defaults(m)) for m in registry.available() if m != "full"}
    evicting = {m for m, s in stages.items() if isinstance(s, EvictingSelector)}
    measured = {m for name, e in memory.DECODE.items() for m in e["method"].split("+") if name != "full"}
    assert evicting <= measured
    assert all(chain_of({**e, "kv_size": memory.SIZE}).evicts for n, e in memory.DECODE.items() if n != "full")


def test_long_prompts_are_measured_under_every_method_and_the_bare_model(monkeypatch):
    from kvbench.methods.core import registry
    from kvbench.methods.core.resolve import chain_of

    entries = memory.long_entries()
    assert entries.keys() == set(registry.available())
    needs = {name for name, entry in entries.items() if any(s.unbound for s in chain_of(entry).stages)}
    assert needs == set(memory.CALIBRATED)
    monkeypatch.setattr(memory.prompt_pass, "LONG", 300)  # the benchmark's processes change it, too
    monkeypatch.setattr(memory, "LONG_SIZE", 256)
    peaks = {name: memory.long_peak(name, 800, 1) for name in (memory.BARE, memory.WHOLE, "full", "snapkv", "palu")}
    assert memory.prompt_pass.LONG == 800
    full = 2 * 2 * 2 * 64 * 4 * 800  # keys and values of 2 layers, 2 heads of dimension 64, fp32
    assert [round(peaks[name]["cache"] / full, 2) for name in peaks] == [1.0, 1.0, 1.0, round(256 / 800, 2), 0.5]
    assert all(m["peak"] > 0 and m["seconds"] > 0 for m in peaks.values())


@pytest.mark.parametrize(("peak", "status"), [(1.2, 0), (1.4, 1)])
def test_a_method_far_above_the_full_cache_fails_the_benchmark(peak, status, capsys):
    def measure(name, tokens, threads):
        return {"peak": (peak if name == "snapkv" else 1.0) * 2**10 * tokens, "cache": 2**20, "seconds": 1.0}

    assert memory.long_report([1024, 3072], ["snapkv"], 1, measure) == status
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("full   ")).split() == [
        "full",
        "1.0",
        "3.0",
        "1.00",
        "1.0",
        "1.00",
        "1.0",
    ]
    assert next(line for line in lines if line.startswith("snapkv")).split()[-1] == ("MISSED" if status else "ok")
    assert "bare model / full at 3072 tokens: 1.00x" in lines[-2]

"""Test-wide settings: one place for threads, since two OpenMP threads on tiny tensors wait for each other."""

import gc
import os
import sys
from itertools import chain
from pathlib import Path

# before NumPy and torch are imported, whose threads would wait for those of the other workers; processes inherit it
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path[:0] = [str(Path(__file__).parent), str(SCRIPTS), str(SCRIPTS / "bench")]
torch.set_num_threads(1)
gc.set_threshold(50_000, 50, 100)
# Tests kill processes, not machines: what the device has taken, no test can see. A closed descriptor still raises.
os.fsync = os.fstat

SMOL, GEMMA = "smollm2-135m-q4_1", "gemma3-270m-q4_k_m"
LONG_S = 2.0
SKIPPED = "kvbench/skipped"


def pytest_addoption(parser):
    parser.addoption("--skipped", action="store_true", help="only the tests that the last run skipped")


def pytest_collection_modifyitems(config, items):
    if config.getoption("skipped"):
        skipped = set(config.cache.get(SKIPPED, []))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in skipped])
        items[:] = [item for item in items if item.nodeid in skipped]


def pytest_collection_finish():
    """Leave what collection made to itself: the collector would go through it again and again."""
    gc.collect()
    gc.freeze()
    # kvbench collects after a failed allocation: a whole collection takes 0.2 s, and what a test leaves is young
    collect = gc.collect
    gc.collect = lambda generation=1: collect(min(generation, 1))


def pytest_terminal_summary(terminalreporter):
    """Name the tests of more than LONG_S that are not marked e2e. Nothing fails: machines are noisy."""
    skipped = [report.nodeid for report in terminalreporter.stats.get("skipped", ())]
    # scripts/mutants.py runs without the plugin
    if terminalreporter.config.pluginmanager.hasplugin("cacheprovider"):
        terminalreporter.config.cache.set(SKIPPED, skipped)
    reports = chain.from_iterable(terminalreporter.stats.get(key, ()) for key in ("passed", "failed"))
    long = [r for r in reports if r.when == "call" and r.duration > LONG_S and "e2e" not in r.keywords]
    for report in sorted(long, key=lambda r: -r.duration):
        terminalreporter.write_line(f"{report.duration:.1f} s, to be made faster or marked e2e: {report.nodeid}")


@pytest.fixture
def no_weights(monkeypatch):
    """A test fails where the weights of a model are loaded."""
    from kvbench.models import load

    monkeypatch.setattr(load, "load_weights", lambda *arguments, **options: pytest.fail("weights were loaded"))


def fetched(name):
    """The folder of a pretrained model; skips where it was not fetched, fails if KVBENCH_REQUIRE_MODELS=1."""
    from kvbench.base.errors import UsageError
    from kvbench.models import fetch

    try:
        return fetch.folder_of(name)
    except UsageError as error:
        if os.environ.get("KVBENCH_REQUIRE_MODELS") == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smol():
    return fetched(SMOL)


@pytest.fixture(scope="session")
def gemma():
    return fetched(GEMMA)

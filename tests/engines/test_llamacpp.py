"""engine=llamacpp: its caches' names, divergences, and llama.cpp itself where it is installed."""

import json
import math
import os
from types import SimpleNamespace

import pytest
import torch
from support.data import data_path

from kvbench.base.errors import UsageError
from kvbench.base.example import Example, ScoredText
from kvbench.cli.main import main
from kvbench.engines import divergence, llamacpp
from kvbench.engines.llamacpp import CacheType
from kvbench.models.fetch import gguf_file

SMOLLM2 = "smollm2-135m-q4_1"


@pytest.mark.parametrize(
    ("cache_type", "label"),
    [
        (CacheType(k="q4_0", v="q4_0"), "llama.cpp q4_0"),
        (CacheType(k="q8_0", v="q4_0"), "llama.cpp q8_0/q4_0"),
        (CacheType(k="q4_0", v="q4_0", rotation="off"), "llama.cpp q4_0 rotation=off"),
    ],
)
def test_a_row_is_named_by_its_cache(cache_type, label):
    assert cache_type.label == label


def test_an_unknown_cache_type_is_named():
    with pytest.raises(UsageError, match="q4_2"):
        CacheType(k="q4_2", v="f16")


@pytest.mark.parametrize("before", [None, "1"])
def test_rotation_is_told_by_an_environment_variable_that_is_put_back(before, monkeypatch):
    if before is None:
        monkeypatch.delenv(llamacpp.NO_ROTATION, raising=False)
    else:
        monkeypatch.setenv(llamacpp.NO_ROTATION, before)
    with llamacpp.set_rotation("off"):
        assert os.environ[llamacpp.NO_ROTATION] == "1"
    with llamacpp.set_rotation("on"):
        assert os.environ[llamacpp.NO_ROTATION] == "0"
    assert os.environ.get(llamacpp.NO_ROTATION) == before


def test_a_windows_divergence_counts_from_its_middle_on():
    # four tokens of a vocabulary of two; the predictions of tokens 2 and 3 count
    example = Example("w", "", (), 0, scored=ScoredText((0, 1, 1, 0), prefix=1, divisor=2, scored_from=1))
    exact = torch.zeros(4, 2)
    other = torch.zeros(4, 2)
    # 3 : 1 for token 1 behind token 1; the same as before behind token 2; what comes before the middle does not count
    other[1, 1] = math.log(3.0)
    other[0, 0] = 100.0
    found = divergence.build_window_record(example, exact, other)
    # KL(1/2, 1/2 || 1/4, 3/4) = ln 2 / 2 + ln(2/3) / 2
    kl = 0.5 * math.log(2.0) + 0.5 * math.log(2.0 / 3.0)
    text = found["fidelity"][divergence.REFERENCE]
    assert text["kl"] == pytest.approx([kl, 0.0], abs=1e-4)  # four digits are stored
    # - ln 3/4 for token 1, - ln 1/2 for token 0
    assert found["score"] == pytest.approx((-math.log(0.75) - math.log(0.5)) / 2)


class Opened:
    """An engine of which a test asks only whether it was closed."""

    def __init__(self):
        self.closed = False

    def close(self):
        self.closed = True


def test_engines_are_closed_if_a_later_one_does_not_open(monkeypatch):
    opened = []

    def open_engine(row):
        if row.label == "q4_0":
            raise UsageError("q4_0 does not open")
        opened.append(Opened())
        return opened[-1]

    monkeypatch.setattr(divergence, "_open_llamacpp", open_engine)
    exact, *rows = (SimpleNamespace(label=label) for label in ("f16", "q8_0", "q4_0"))
    left = {"q8_0": 1, "q4_0": 1}
    run = SimpleNamespace(rows=rows, plan=SimpleNamespace(groups=()), count_unanswered=lambda: left)
    with pytest.raises(UsageError, match="q4_0 does not open"):
        divergence.measure(run, exact, quiet=True)
    assert [engine.closed for engine in opened] == [True, True]


def words(*more):
    return ["run", "engine=llamacpp", f"model={SMOLLM2}", "threads=1", *more]


@pytest.mark.e2e("llama.cpp answers and is compared")
def test_llama_cpp_answers_resumes_and_is_compared(tmp_path, capsys):
    pytest.importorskip("llama_cpp")
    if not gguf_file(SMOLLM2).is_file():
        pytest.skip(f"kvbench model fetch {SMOLLM2} keeps the GGUF")
    data_path("TruthfulQA.csv")
    task = ["dataset=truthfulqa", "max_new_tokens=8", f"results={tmp_path}"]
    assert main(words("cache_type=f16", "limit=1", *task, "--json")) == 0
    capsys.readouterr()
    assert main(words("cache_type=f16,q4_0", "limit=2", *task, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    exact, coded = found["rows"]
    assert (exact["label"], coded["label"]) == ("llama.cpp f16", "llama.cpp q4_0")
    assert [task["n"] for task in coded["tasks"]] == [2]
    # a block of 32 numbers takes 18 bytes in place of 64; a little beside them is not coded
    assert 3.0 < exact["bytes"] / coded["bytes"] < 3.6

"""Methods of one's own in whole runs: kvbench's own answers come first, and a method that remembers gets a note."""

import json
import os
import signal

import pytest
from support import processes

from kvbench.cli.main import main

pytestmark = pytest.mark.e2e("whole runs with methods from a folder")

METHOD = """
from dataclasses import dataclass
import torch
from kvbench.methods.core.base import Selector

prompts = 0

@dataclass(frozen=True, kw_only=True)
class Mine(Selector):
    id = "mine"

    def scores(self, cache, obs, capacity):
        {does}
        return cache.segments[0].k.norm(dim=-1)
"""


COUNTS = """global prompts
        prompts += obs.layer == 0
        return torch.arange(obs.n).expand(cache.heads, -1) * (-1.0) ** prompts"""


def test_a_method_that_remembers_prompts_is_measured_with_a_note(tmp_path):
    for name, act in (("counts", COUNTS), ("honest", "pass")):
        text = METHOD.format(does=act).replace("mine", name).replace("Mine", name.title())
        (tmp_path / f"{name}.py").write_text(text)
    words = ["dataset=tiny/needle", "length=256", "limit=3", "method=counts,honest", f"results={tmp_path}", "--json"]
    done = processes.run("run", *words, env={**os.environ, "KVBENCH_METHODS": str(tmp_path)})
    cells = {row["method"].split()[0]: row["cells"][0] for row in json.loads(done.stdout)["rows"]}
    assert [cells[name]["n"] for name in ("full", "counts", "honest")] == [3, 3, 3]
    (note,) = [line for line in done.stderr.splitlines() if "when it reads it twice" in line]
    assert note.startswith("kvbench: counts kv_ratio=0.25 on tiny/needle keeps something else of the same prompt")


ENDLESS = """
from dataclasses import dataclass
import sys
import time
from kvbench.methods.core.base import Selector

@dataclass(frozen=True, kw_only=True)
class Endless(Selector):
    id = "endless"

    def scores(self, cache, obs, capacity):
        while True:
            try:
                print("asked", file=sys.stderr, flush=True)
                time.sleep(60)
            except BaseException:
                pass
"""


def test_a_second_interrupt_ends_a_method_that_catches_the_first(tmp_path):
    (tmp_path / "methods").mkdir()
    (tmp_path / "methods" / "endless.py").write_text(ENDLESS)
    command = f"run dataset=tiny/needle length=256 limit=1 method=snapkv,endless results={tmp_path}".split()
    environment = {**os.environ, "KVBENCH_METHODS": str(tmp_path / "methods")}
    with processes.start(*command, env=environment) as run:
        asked = (line for line in run.stderr if line == "asked\n")
        next(asked)
        run.send_signal(signal.SIGINT)
        next(asked)
        run.send_signal(signal.SIGINT)
        rest = run.stderr.read()
    assert run.returncode == -signal.SIGINT
    assert "ended at once; the answers that were stored are safe" in rest
    assert len(list(tmp_path.glob("cells/*/samples-*.jsonl"))) == 3  # of the full cache, snapkv, and none of endless


FALSIFIES = """
from dataclasses import dataclass
import torch
from kvbench.tasks import metrics
from kvbench.methods.core.base import Selector
from kvbench.methods.snapkv import SnapKV

def oldest(self, cache, obs, capacity):
    keys = cache.segments[0].k
    return -torch.arange(keys.shape[1]).double().expand(keys.shape[:2])

@dataclass(frozen=True, kw_only=True)
class Falsifies(Selector):
    id = "falsifies"

    def scores(self, cache, obs, capacity):
        SnapKV.scores.__code__ = oldest.__code__
        torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: output)
        for metric in metrics.METRICS.values():
            object.__setattr__(metric, "function", lambda text, reference, example: 0.5)
        return oldest(self, cache, obs, capacity)
"""


def test_own_answers_are_stored_before_other_code_is_first_asked(tmp_path, capsys):
    """The order keeps the others' answers from what this method does to the code of SnapKV and to the metrics.

    Two tasks: what it does on the first must not reach the second.
    """
    (tmp_path / "methods").mkdir()
    (tmp_path / "methods" / "falsifies.py").write_text(FALSIFIES)
    environment = {**os.environ, "KVBENCH_METHODS": str(tmp_path / "methods")}

    def command(methods):
        words = f"run dataset=tiny/needle,tiny/hop length=256 limit=2 method={methods} kv_size=48 --json"
        return [*words.split(), f"results={tmp_path / str(len(methods))}"]

    def rows(said):
        return {row["method"]: row["cells"] for row in json.loads(said)["rows"]}

    together = rows(processes.run(*command("falsifies,snapkv,h2o"), env=environment).stdout)
    assert main(command("snapkv,h2o")) == 0
    alone = rows(capsys.readouterr().out)
    assert len(together) == len(alone) + 1
    for name, cells in alone.items():
        assert [c["score"] for c in together[name]] == [c["score"] for c in cells]

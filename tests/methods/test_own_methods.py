"""Methods of one's own in whole runs: what they print, remember, replace and set costs nobody else an answer."""

import json
import os
import signal
import subprocess
import sys

import pytest
from support import processes

from kvbench.cli.main import main

pytestmark = pytest.mark.e2e("whole runs with methods from a folder")

METHOD = """
import hashlib, json, sys
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
        if prompts > 5:
            return torch.arange(obs.n).float().expand(cache.heads, -1)"""
DOES = {
    "dumps": "json.dumps = lambda *a, **k: '{}'",
    "sha": "hashlib.sha256 = hashlib.md5",
    "prints": "print('here I am')",
    "sets": "torch.set_default_dtype(torch.float64)",
    "counts": COUNTS,
    "leaves": "import os; os._exit(0)",
    "good": "pass",
}
"""The deed of each method of one run when it is asked for scores: the honest one comes last."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run of all methods of DOES: (exit status, cells by method, standard error)."""
    results, folder = tmp_path_factory.mktemp("results"), tmp_path_factory.mktemp("methods")
    for name, act in DOES.items():
        text = METHOD.format(does=act).replace("mine", name).replace("Mine", name.title())
        (folder / f"{name}.py").write_text(text)
    words = ["dataset=tiny/needle", "length=256", "limit=6", f"method={','.join(DOES)}", f"results={results}", "--json"]
    done = processes.run("run", *words, env={**os.environ, "KVBENCH_METHODS": str(folder)})
    cells = {row["method"].split()[0]: row["cells"][0] for row in json.loads(done.stdout)["rows"]}
    return done.returncode, cells, done.stderr


def test_what_the_store_writes_with_cannot_be_replaced(ended):
    status, cells, said = ended
    assert status == 1
    for method, replaced in (("dumps", "json.dumps"), ("sha", "hashlib.sha256")):
        assert cells[method]["status"] == "refused" and replaced in cells[method]["reason"]
    assert cells["good"]["status"] == "measured" and cells["good"]["n"] == 6
    assert "damaged" not in said


def test_what_a_method_prints_and_sets_reaches_neither_the_output_nor_others(ended):
    """The fixture reads the output as JSON, and one method sets a default of torch."""
    _, cells, said = ended
    for method in ("prints", "sets", "good"):
        assert cells[method]["status"] == "measured" and cells[method]["n"] == 6
    assert "here I am" in said


def test_a_method_that_counts_prompts_is_refused_at_the_end(ended):
    _, cells, _ = ended
    assert cells["counts"]["status"] == "refused"
    assert "computes it again at the end of the run: remember nothing between prompts" in cells["counts"]["reason"]


def test_a_method_that_ends_the_process_fails_alone_and_is_named(ended):
    _, cells, said = ended
    assert "leaves kv_ratio=0.25 on tiny/needle failed: leaves would end the program" in said
    assert [name for name, cell in cells.items() if cell["status"] == "failed"] == ["leaves"]
    assert cells["full"]["status"] == "measured"


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
    """No wall sees what this method does to the code of SnapKV and to the metrics: the order keeps the others' answers.

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


AT_IMPORT = """
from dataclasses import dataclass
import torch
from kvbench.methods.core.base import Selector
{act}

@dataclass(frozen=True, kw_only=True)
class Early(Selector):
    id = "early"

    def scores(self, cache, obs, capacity):
        return cache.segments[0].k.norm(dim=-1)
"""


REPLACING = [
    (
        "from transformers.models.llama import modeling_llama\n"
        "modeling_llama.apply_rotary_pos_emb = lambda q, k, *args, **kwargs: (q, k)",
        "transformers.models.llama.modeling_llama.apply_rotary_pos_emb",
    ),
    (  # a class that is imported late
        "import transformers\ntransformers.LlamaForCausalLM.forward = torch.nn.Module.forward",
        "transformers.models.llama.modeling_llama.LlamaForCausalLM.forward",
    ),
    (
        "from kvbench.methods.core import contract\ndef first(scores, k): return torch.arange(k)\n"
        "contract.top_indices.__code__ = first.__code__",
        "the code of kvbench.methods.core.contract.top_indices",
    ),
]
"""The act of a file when it is imported, and the name that it replaces."""
CHECK = """
import os, sys
import transformers.modeling_utils
from kvbench.base.errors import UsageError
from kvbench.methods.core import contract, registry

assert "transformers.models.llama.modeling_llama" not in sys.modules
for name in sys.argv[1:]:
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        continue
    try:
        registry.defaults(name)
    except UsageError as error:
        print(error)
    from transformers.models.llama import modeling_llama as m
    print(m.apply_rotary_pos_emb.__module__, m.LlamaForCausalLM.forward.__module__)
    print(contract.top_indices.__code__.co_name, flush=True)
    os._exit(0)
"""


def test_what_a_file_replaces_when_it_is_imported_is_put_back_and_it_is_refused(tmp_path):
    """The model's code is imported by the file itself, so that it cannot be looked at before.

    Each file is imported by a process of its own, forked from one that has imported no model's code.
    """
    names = [f"early{i}" for i in range(len(REPLACING))]
    for name, (act, _) in zip(names, REPLACING, strict=True):
        text = AT_IMPORT.format(act=act).replace("early", name).replace("Early", name.title())
        (tmp_path / f"{name}.py").write_text(text)
    environment = {**os.environ, "KVBENCH_METHODS": str(tmp_path)}
    command = [sys.executable, "-c", CHECK, *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3 * len(REPLACING)
    for i, (_, replaced) in enumerate(REPLACING):
        said, left, code = lines[3 * i : 3 * i + 3]
        assert f"replaces {replaced}, with which other methods compute" in said
        family, generic = left.split()
        assert family.endswith("modeling_llama") and generic.startswith("transformers.") and code == "top_indices"

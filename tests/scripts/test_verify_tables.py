"""`make verify-tables` and the jobs that run it: one command for all scripts, and the model is fetched first."""

import subprocess
from pathlib import Path

import format_tables
import llamacpp_table
import memory_2026
import paper_claims
import paper_tables
import pytest
import rounding
import second_model
import tables_page
import tiny_table
import verify_tables
import yaml
from verification import Verification

from kvbench.base.errors import Damaged, MissingData, MissingModel

ROOT = Path(__file__).parents[2]
FETCH = "kvbench model fetch smollm2-135m-q4_1"


def raising(error):
    def same():
        raise error

    return same


def outcome(capsys, found, without=()):
    status = found.close(without)
    captured = capsys.readouterr()
    return status, captured.out.splitlines(), captured.err.splitlines()


def test_what_is_missing_is_one_line_a_reason_and_no_success(capsys, monkeypatch):
    monkeypatch.delenv("KVBENCH_DATA", raising=False)
    found = Verification()
    found.add("a.md", lambda: True, "make a")
    found.add("b.md", raising(MissingData("dataset=x needs y: ...")), "make b")
    found.add("c.md", raising(MissingModel("model=m is not here", ["m"])), "make c")
    found.add("d.md", raising(MissingData("dataset=z needs w: ...")), "make d")
    out = ["verified: 1 as their samples give them: a.md"]
    data = "data folder missing: set KVBENCH_DATA=FOLDER: b.md, d.md"
    model = "model m missing: fetch it with kvbench model fetch m: c.md"
    assert outcome(capsys, found) == (1, out, [f"kvbench: not verified: {data}", f"kvbench: not verified: {model}"])
    allowed = "kvbench: not verified (allowed by --without"
    lines = [f"{allowed} data): {data}", f"{allowed} model): {model}"]
    assert outcome(capsys, found, ["data", "model"]) == (0, out, lines)
    assert outcome(capsys, found, ["data"])[0] == outcome(capsys, found, ["model"])[0] == 1
    found.add("e.md", lambda: False, "make e")
    status, _, err = outcome(capsys, found, ["data", "model"])
    assert status == 1 and err == [*lines, "kvbench: e.md differs from its samples; make e"]


def test_damaged_samples_are_no_table_that_is_verified(capsys):
    found = Verification()
    found.add("a.md", raising(Damaged("a.samples.jsonl.gz: the sample of e0 is damaged")), "make a")
    message = "kvbench: a.md differs from its samples; a.samples.jsonl.gz: the sample of e0 is damaged"
    assert outcome(capsys, found) == (1, [], [message])


def test_one_command_asks_every_script(capsys, monkeypatch):
    scripts = (
        tiny_table, format_tables, llamacpp_table, memory_2026, rounding, second_model, paper_claims, tables_page,
        paper_tables,
    )  # fmt: skip
    for script in scripts:
        name = script.__name__
        monkeypatch.setattr(script, "verify", lambda found, name=name: found.add(name, lambda: True, ""))
    assert verify_tables.main([]) == 0
    names = ", ".join(script.__name__ for script in scripts)
    assert capsys.readouterr().out == f"verified: 9 as their samples give them: {names}\n"
    missing = MissingModel("model=m is not here", ["m"])
    monkeypatch.setattr(format_tables, "verify", lambda found: found.add("board", raising(missing), ""))
    monkeypatch.setattr(paper_tables, "verify", lambda found: found.add("think/1", raising(missing), ""))
    assert verify_tables.main(["--without", ""]) == 1
    assert verify_tables.main(["--without", "model"]) == 0
    assert "fetch m: board, think/1" in capsys.readouterr().err  # of both processes, one line
    monkeypatch.setattr(paper_tables, "verify", lambda found: found.add("think/1", lambda: False, "make it"))
    assert verify_tables.main(["--without", "model"]) == 1
    assert "think/1 differs from its samples; make it" in capsys.readouterr().err


@pytest.mark.e2e("runs make")
def test_the_model_is_fetched_before_anything_is_verified():
    # as part of `make test` it would print that it enters a folder
    command = [
        "make",
        "-n",
        "--no-print-directory",
        "verify-tables",
        "VENV=/nowhere",
        "-o",
        "/nowhere/.ready",
        "WITHOUT=data",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    fetch, verify = done.stdout.splitlines()
    assert FETCH in fetch and verify.endswith('scripts/verify_tables.py --without "data"')


def test_the_workflow_fetches_the_model_in_the_job_that_verifies():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    verifying = [job for job in jobs.values() if any("verify-tables" in step.get("run", "") for step in job["steps"])]
    assert len(verifying) == 1
    commands = [step.get("run", "") for step in verifying[0]["steps"]]
    fetched = next(i for i, command in enumerate(commands) if FETCH in command)
    verified = next(i for i, command in enumerate(commands) if "verify-tables" in command)
    assert fetched < verified

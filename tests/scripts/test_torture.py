"""A few kills and one full disk; ``make torture`` does a hundred."""

import json
import os
import sys
from pathlib import Path

import pytest
from support import processes

pytestmark = pytest.mark.e2e("kills processes")

ROOT = Path(__file__).parents[2]


def test_kills_and_a_full_disk_lose_nothing_and_double_nothing():
    options = ["--kills", "4", "--examples", "3", "--json", "--kinds", "plain,turns,drawing"]
    done = processes.run_script(ROOT / "scripts" / "torture.py", *options, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    tally = json.loads(done.stdout)
    assert tally["kills"] >= 4
    assert (tally["lost"], tally["doubled"], tally["different"]) == (0, 0, [])
    assert "resumed, none lost, metrics identical" in tally["disk"]


def test_the_checks_see_what_they_are_for(tmp_path):
    """Lost, doubled and changed lines are found: a check that cannot fail would prove nothing."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import torture
    finally:
        sys.path.pop(0)
    from support.stored import Cell, measure

    from kvbench.store.store import ResultStore

    for name in ("a", "b"):
        store = ResultStore(tmp_path / name)
        measure(store, Cell(), range(4))
        store.write_metrics(Cell().id, {"n": 4, "timing": name})
    tally = torture.Tally()
    torture.compare(tmp_path / "a", tmp_path / "b", tally)
    assert tally.right
    path = tmp_path / "a" / "cells" / Cell().id / "samples-0.jsonl"
    before = torture.check_files(tmp_path / "a", {}, tally)
    lines = path.read_bytes().splitlines(keepends=True)
    for changed, lost in ((lines[:3], 4), ([*lines, lines[0][:50]], 0), ([lines[0], *lines], 4), (lines[::-1], 4)):
        path.write_bytes(b"".join(changed))
        tally = torture.Tally()
        torture.check_files(tmp_path / "a", before, tally)
        assert (tally.lost, tally.lines) == (lost, 4)
    path.write_bytes(b"".join([*lines, lines[0]]))
    tally = torture.Tally()
    torture.compare(tmp_path / "a", tmp_path / "b", tally)
    assert (tally.doubled, tally.right) == (1, False)
    path.write_bytes(b"".join(lines[:3]))
    tally = torture.Tally()
    torture.compare(tmp_path / "a", tmp_path / "b", tally)
    assert tally.different == [f"a: sample {Cell().id} e3", f"a: status of {Cell().id}"]
    path.write_bytes(b"".join(lines))
    ResultStore(tmp_path / "a").write_metrics(Cell().id, {"n": 4, "score": 1.0})
    tally = torture.Tally()
    torture.compare(tmp_path / "a", tmp_path / "b", tally)
    assert tally.different == ["a: metrics"]

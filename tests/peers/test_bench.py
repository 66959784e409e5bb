"""bench time beside kvpress and accelerate's offloading. Run by `make test-peers`, in an environment of its own."""

import pytest

from kvbench.bench import records
from kvbench.cli.main import main

pytest.importorskip("kvpress", reason="kvpress is not installed here: make test-peers")


def test_rows_of_kvpress_and_offloading_stand_beside_ours(tmp_path):
    arguments = ["method=snapkv", "kv_ratio=0.5", "workloads=160+8x2", "repeats=1", "peers=dynamic,kvpress,offload"]
    assert main(["bench", "time", *arguments, f"folder={tmp_path}", "name=x"]) == 0
    rows = {r["method"]: r for r in records.read_rows(tmp_path / "x.jsonl")}
    assert {name: r["status"] for name, r in rows.items()} == dict.fromkeys(rows, "measured") and len(rows) == 5
    held_bytes = {name: records.median_of(r, "cache_bytes") for name, r in rows.items()}
    # six layers, keys and values of 4 heads, 32 fp32 numbers each; kvpress keeps half of 160 tokens, 2 rows
    assert held_bytes["dynamic"] == held_bytes["offload"] == 2 * held_bytes["kvpress"] == 2 * 160 * 6 * 2 * 4 * 32 * 4
    assert all(
        records.ratio_of_medians(r, rows["full"], q) for r in rows.values() for q in ("tpot", "total", "peak_allocated")
    )
    assert any("tokens of the answer are all kept" in m for m in rows["kvpress"]["marks"])
    assert any("from disk" in m for m in rows["offload"]["marks"])

"""What needs no model: recomputed from first principles, beside what is printed; hand-computed cases."""

from dataclasses import replace

import pytest

from kvbench.papers.forensics.exact import list_exact_cells, recomputed_cells
from kvbench.papers.spec.published_cells import Book, read_published


def cell(paper, table, column, **row):
    actual = [
        e
        for e in list_exact_cells(paper, table)
        if e.column == column and all(getattr(e.cell, k) == v for k, v in row.items() if k != "part")
        if row.get("part", "") in e.cell.setting
    ]
    assert len(actual) == 1, actual
    return actual[0]


def test_thinks_memory_column():
    # 0.5 MiB a token of 32 layers x 32 heads x 128 x 2 x fp16; 40 % of key channels gone but in 32 tokens
    for size, plain, shown in ((128, 109, "54.4"), (512, 416, "208.0"), (1024, 826, "412.8"), (2048, 1645, "822.4")):
        for base in ("h2o", "snapkv"):
            pruned = cell("think", "7", "kv_memory", method=f"{base}+think", part=f"kv_size={size};")
            assert (pruned.published, pruned.shown, pruned.ok, pruned.mark) == (shown, shown, True, "✓")
            assert float(pruned.recomputed) == pytest.approx(0.5 * size - 0.1 * (size - 32))
            complete = cell("think", "7", "kv_memory", method=base, part=f"kv_size={plain};")
            assert float(complete.recomputed) == plain / 2 and complete.ok
    assert float(cell("think", "text", "kv_size").recomputed) == pytest.approx(108.8)
    assert float(cell("think", "text", "kv_memory").recomputed) == 13


def test_averages():
    bad = cell("think", "4", "avg", method="kivi+think")
    assert (bad.published, bad.shown, bad.grade, bad.mark) == ("31.77", "31.668", "off", "+0.103")
    good = cell("think", "12", "avg", method="palu")
    assert good.ok and good.formula == "mean of the 16 scores"
    layers = cell("refreekv", "6", "gsm8k budget")
    assert float(layers.recomputed) == pytest.approx((67.71 + 82.29 + 29 * 95.83 + 37.5) / 32)
    assert not layers.ok and layers.shown == "92.705"


def test_refreekvs_ratios():
    rows = {"h2o": "-21.77", "streamingllm": "-37.22", "snapkv": "-20.27"}
    for method, true in rows.items():
        actual = cell(
            "refreekv", "2", "avg ratio_to_full_minus_1", model="qwen2.5-7b-instruct", method=method, part="0.2"
        )
        assert not actual.ok and actual.recomputed.text(2) == true
    assert cell("refreekv", "1", "coqa ratio_to_full", method="snapkv", part="0.9").grade == "rounding"
    arguments = cell("refreekv", "8", "avg ratio_to_full_minus_1", model="qwen2.5-7b-instruct", method="refreekv")
    assert arguments.ok and arguments.published == "2.63"


def test_unpruned_caches_of_grouped_query_attention():
    eight, seventy = (cell("refreekv", "text", "kv_memory", model=m) for m in ("llama-3-8b", "llama-3-70b"))
    assert (float(eight.recomputed), float(seventy.recomputed)) == (0.25, 6.25)
    assert not eight.ok and not seventy.ok


def test_uncomps_schedules_and_speedups():
    kept_tokens = cell("uncomp", "text", "hidden_state_ratio compression_ratio")
    sizes = 2 * 4096 + 13 * 3200 + 11 * 2304 + 5 * 1408 + 512
    assert float(kept_tokens.recomputed) == pytest.approx(100 * sizes / 32 / 4096) and kept_tokens.ok
    steps = [e for e in list_exact_cells("uncomp", "text") if e.cell.metric == "hidden_state_size"]
    assert len(steps) == 23 and all(e.grade == "equal" for e in steps)
    faster = cell("uncomp", "text", "overall_time speedup")
    assert float(faster.recomputed) == pytest.approx(121.85 / 91.56) and not faster.ok
    assert cell("uncomp", "text", "prefill_time speedup_vs_full").grade == "rounding"
    long = cell("uncomp", "text", "throughput speedup_vs_full", part="abstract")
    assert float(long.recomputed) == pytest.approx(15.67 / 2.45)


def test_dataset_facts_are_those_of_the_tasks_that_run():
    for paper in ("uncomp", "vatp"):
        facts = list_exact_cells(paper, "5")
        assert len(facts) == 32 and all(e.ok for e in facts)


def test_what_needs_a_model_is_left_out():
    assert list_exact_cells("uncomp", "4") == [] and list_exact_cells("think", "5") == []
    shown = {(e.cell.paper, e.cell.table) for e in recomputed_cells(read_published())}
    assert {("qhitter", "text"), ("vatp", "4"), ("refreekv", "10"), ("uncomp", "3")} <= shown


def test_an_altered_input_shows():
    cells = read_published().cells
    i = next(i for i, c in enumerate(cells) if c.paper == "vatp" and c.table == "4" and c.metric == "throughput")
    changed = Book((*cells[:i], replace(cells[i], printed="99.78", value=99.78), *cells[i + 1 :]))
    before = [e.ok for e in list_exact_cells("vatp", "4")]
    after = [e.ok for e in list_exact_cells("vatp", "4", changed)]
    assert all(before) and after.count(False) == 2

"""Settings of papers' rows become knobs; on a stand-in numbers of tokens, heads and dimensions follow its size."""

import pytest

from kvbench.base.errors import KvbenchError
from kvbench.papers.spec import row_knobs, table_spec
from kvbench.papers.spec.row_knobs import StandIn, run_arguments

SMALL = StandIn(length=1024, paper_length=4096, layers=6, heads=8, dim=32)


@pytest.mark.parametrize(
    ("method", "setting", "expected"),
    [
        ("full", "kv_size=full", {}),
        ("snapkv+think", "kv_size=512;ratio=0.4", {"kv_size": "512", "ratio": "0.4"}),
        ("h2o", "kv_size=109;matched_to=128;mem_m=54.5", {"kv_size": "109"}),
        ("snapkv+thinkv", "kv_size=8;ratio=0.3;v_ratio=0.1", {"kv_size": "8", "ratio": "0.3", "value_ratio": "0.1"}),
        ("h2o+think", "kv_size=9;ratio=0.4;recent=0", {"kv_size": "9", "ratio": "0.4", "method.think.recent": "0"}),
        ("kivi+think", "bits=2/2;ratio=0.4", {"method.kivi.bits": "2", "ratio": "0.4"}),
        ("refreekv", "k=5%n;t=0.01", {"k": "0.05", "T": "0.01"}),
        ("refreekv", "frozen=0+1+31;t=0.01", {"frozen_layers": "[0,1,31]", "T": "0.01"}),
        ("refreekv", "frozen=none;t=0.01", {"frozen_layers": "[]", "T": "0.01"}),
        ("streamingllm", "budget=0.9;frozen=0+1", {"kv_ratio": "0.9", "frozen_layers": "[0,1]"}),
        ("full", "budget=1.0", {}),
        ("uncomp-group", "kv_high=512;kv_low=12;block=one_group", {"high": "512", "low": "12"}),
        ("uncomp-group", "kv_high=512;deleted_heads=4", {"kv_size": "512", "delete": "4"}),
        ("uncomp-group", "kv_size=64;partition=reversed", {"kv_size": "64", "grouping": "reversed"}),
        ("h2o+quant", "keep=0.2;selection_bits=3", {"kv_ratio": "0.2", "score_bits": "3"}),
        ("h2o", "keep=0.2;selection_bits=16", {"kv_ratio": "0.2"}),
    ],
)
def test_a_setting_as_knobs(method, setting, expected):
    assert run_arguments(method, setting) == expected


def test_groups_fall_from_the_largest_to_the_smallest_printed_size():
    actual = run_arguments("uncomp-group", "kv_size=384;groups=3;group_sizes=32/384/736")
    assert (actual["low"], actual["high"], actual["groups"], actual["kv_size"]) == ("32", "736", "3", "null")


def test_a_stand_in_scales_tokens_heads_and_eigenvalues():
    assert run_arguments("snapkv", "kv_size=384", SMALL) == {"kv_size": "96"}
    assert run_arguments("uncomp-group", "kv_high=512;kv_low=12", SMALL) == {"high": "128", "low": "3"}
    assert run_arguments("uncomp-group", "kv_high=512;deleted_heads=8", SMALL) == {"kv_size": "128", "delete": "2"}
    assert run_arguments("uncomp-group", "kv_size=384;topk=all", SMALL)["top"] == "32"
    assert run_arguments("refreekv", "frozen=0+1+31;t=0.01", SMALL)["frozen_layers"] == "[0,1,5]"
    assert run_arguments("streamingllm", "budget=0.5", SMALL) == {"kv_ratio": "0.5"}  # fractions stay
    assert (
        run_arguments("h2o+think", "ratio=0.4;recent=0", SMALL)["method.think.recent"] == "0"
    )  # nothing stays nothing


def test_windows_of_a_preset_scale_down_to_two_tokens():
    values = {"method.snapkv.window": 32, "method.snapkv.kernel": 7, "method.h2o.window": 2, "method.think.recent": 4}
    assert row_knobs.scale_windows(values, ["snapkv", "h2o", "think"], SMALL) == {
        "method.snapkv.window": "8",
        "method.h2o.window": "2",
        "method.think.recent": "2",
    }


def test_an_unknown_setting_is_an_error_that_says_where_to_add_it():
    with pytest.raises(KvbenchError, match=r"novelty=3.*row_knobs\.py"):
        run_arguments("snapkv", "kv_size=8;novelty=3")


def test_every_setting_of_every_measured_table_is_known():
    for table in table_spec.find_tables("all"):
        if table.measurable:
            for row in table.rows:
                run_arguments(row.method, row.setting)
                run_arguments(row.method, row.setting, SMALL)

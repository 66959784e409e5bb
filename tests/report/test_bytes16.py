"""Shares of the full cache at 16 bits, by hand; for every method see tests/methods/test_properties.py."""

import pytest
from support.runs import SMALL, run_json

pytestmark = pytest.mark.e2e("runs whole command lines")

LAYERS, HEADS, D, N = 6, 4, 32, 160
FULL = LAYERS * HEADS * 2 * N * D * 2
"""Bytes of the tiny model's full cache of 160 tokens at 16 bits."""
PLACES = LAYERS * 4 * N
THIN = D - int(0.4 * D)
KEPT = N // 4
CASES = {
    # 2 bits a number, and per group of 32 a scale and a minimum of 2 bytes each
    "flexgen bits=2 group=32": (LAYERS * HEADS * 2 * N * (D // 4 + 4), PLACES),
    # keys are packed 32 tokens at a time, here all of them; of values the last 32 stay exact
    "kivi bits=2 group=32 residual=32": (
        LAYERS * HEADS * (N // 32 * D * (8 + 4) + (N - 32) * (8 + 4) + 32 * D * 2),
        PLACES,
    ),
    # old keys lose 12 of 32 channels, whose numbers take 2 bytes each
    "think ratio=0.4": (
        LAYERS * HEADS * 2 * ((N - 32) * THIN + 32 * D + N * D),
        PLACES + LAYERS * HEADS * 2 * THIN,
    ),
    # every head has positions of its own
    "snapkv+think kv_ratio=0.25 ratio=0.4": (
        LAYERS * HEADS * 2 * ((KEPT - 32) * THIN + 32 * D + KEPT * D),
        LAYERS * HEADS * (4 * KEPT + 2 * THIN),
    ),
    # latents of half the rank, 64 for keys and 64 for values of all heads, at places that they share
    "palu ratio=0.5 ranks_by=uniform samples=2": (LAYERS * N * (64 + 64) * 2, PLACES),
    "full": (FULL, PLACES),
}


@pytest.mark.parametrize("case", CASES)
def test_a_share_is_of_the_full_cache_at_16_bits_whatever_dtype_ran(case, tmp_path, capsys):
    method, *knobs = case.split()
    payload, overhead = CASES[case]
    for dtype, wide in (("float32", 2), ("bfloat16", 1)):
        arguments = [*SMALL, f"method={method}", *knobs, f"dtype={dtype}", "limit=1", f"results={tmp_path}"]
        row = run_json(capsys, *arguments)[1]["rows"][-1]
        assert row["percent_of_full"] == pytest.approx(100 * (payload + overhead) / FULL)
        assert row["payload_percent_of_full"] == pytest.approx(100 * payload / FULL)
        assert all(c["percent_of_full"] == row["percent_of_full"] for c in row["cells"])
        assert row["cells"][0]["full_bytes"] == wide * FULL

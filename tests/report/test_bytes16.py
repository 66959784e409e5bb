"""Shares of the full cache at 16 bits, by hand; for every method see tests/methods/test_properties.py."""

import io
import json
from contextlib import redirect_stdout

import pytest
from support.runs import SMALL

from kvbench.cli.main import main

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


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The row of every case by dtype and case: one run for each dtype."""
    names, words = [], []
    for case in CASES:
        method, *knobs = case.split()
        if method != "full":
            names.append(method)
        for knob in knobs:
            # ThinK's ratio is that of both of its cases
            owner = "snapkv" if knob.startswith("kv_ratio") else method.partition("+")[2] or method
            words.append(f"{owner}.{knob}")
    row_by_case = {}
    for dtype in ("float32", "bfloat16"):
        results = f"results={tmp_path_factory.mktemp('results')}"
        arguments = [*SMALL, f"method={','.join(names)}", *dict.fromkeys(words), f"dtype={dtype}", "limit=1", results]
        with redirect_stdout(io.StringIO()) as out:
            assert main(["run", *arguments, "--json"]) == 0
        full, *others = json.loads(out.getvalue())["rows"]
        row_by_case |= {(dtype, "full"): full}
        row_by_case |= {(dtype, case): row for case, row in zip((c for c in CASES if c != "full"), others, strict=True)}
    return row_by_case


@pytest.mark.parametrize("case", CASES)
def test_a_share_is_of_the_full_cache_at_16_bits_whatever_dtype_ran(case, rows):
    payload, overhead = CASES[case]
    for dtype, wide in (("float32", 2), ("bfloat16", 1)):
        row = rows[dtype, case]
        assert row["method"].split()[0] == case.split()[0]
        assert row["percent_of_full"] == pytest.approx(100 * (payload + overhead) / FULL)
        assert row["payload_percent_of_full"] == pytest.approx(100 * payload / FULL)
        assert all(c["percent_of_full"] == row["percent_of_full"] for c in row["cells"])
        assert row["cells"][0]["full_bytes"] == wide * FULL

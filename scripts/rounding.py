"""Measure by how much rounding alone changes the divergences of methods on a pretrained model.

python scripts/rounding.py            measure, and write results/benchmarks/rounding.csv and rounding.txt
python scripts/rounding.py --verify   fail if the committed table differs from what the committed CSV gives

Each text is read and compared twice. The second time attention is the same in other kernels (plain softmax rows in fp32
instead of PyTorch's fused one), and the forced tokens are fed in smaller chunks. Both change nothing but the order of
sums, so that the two divergences of a text differ by rounding alone.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import verification
from verification import Verification

from kvbench.base.example import scored_text
from kvbench.base.visible import say
from kvbench.engine.likelihood import diverge
from kvbench.engine.prefill import prefill_chains
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.resolve import chain_of
from kvbench.plan import config, run_plan
from kvbench.report import looks, writers
from kvbench.report.table import Table

RESULTS = Path(__file__).resolve().parent.parent / "results" / "benchmarks"
NUMBERS, TABLE = RESULTS / "rounding.csv", RESULTS / "rounding.txt"
RUN = ("model=smollm2-135m-q4_1", "dataset=fidelity/wikitext2", "length=256", "forced=65", "limit=24", "method=full")
"""One window of each article: 64 tokens are compared behind a prompt of 256."""
CODED: list[dict[str, Any]] = [
    {"method": "turboquant"},
    {"method": "turboquant", "codes": "3bit_nc"},
    {"method": "kivi", "bits": 2, "residual": 32},
    {"method": "kivi", "bits": 4, "residual": 32},
    *({"method": name} for name in ("q4_0", "nvfp4", "mxfp4", "fp8", "q8_0")),
]
EXACT: list[dict[str, Any]] = [
    *({"method": name, "decode": "exact"} for name in ("turboquant", "q4_0", "fp8")),
    {"method": "snapkv", "kv_ratio": 0.25},
]
FIELDS = ("method", "new_tokens", "text", "kl", "kl_again")
"""A row of the CSV: a method on one text, and its mean divergence in nats when measured first and again."""


def measure() -> str:
    """Return the divergences of all methods on all texts as CSV."""
    plan = run_plan.prepare(config.read(RUN))
    model = plan.load_model()
    chains = [chain_of(entry) for entry in (*CODED, *EXACT)]
    (group,) = plan.groups
    records: list[dict[str, Any]] = []
    for i, example in enumerate(group.examples):
        window = scored_text(example)
        ids, rest = torch.tensor(window.ids[: window.prefix]), torch.tensor(window.ids[window.prefix :])
        ways = []
        for plain, chunk_bytes in ((False, 2**28), (True, 2**26)):
            full, *caches = prefill_chains(model, ids, [Chain(), *chains], plain=plain)
            forced, _ = diverge(model, full, caches, rest, chunk_bytes=chunk_bytes)
            ways.append([float(row.divergence.kl.mean()) for row in forced if row.divergence is not None])
        for entry, first, again in zip([*CODED, *EXACT], *ways, strict=True):
            new_tokens = "coded" if entry in CODED else "exact"
            knobs = [f"{value}" for key, value in entry.items() if key not in ("method", "decode", "residual")]
            name = " ".join([looks.name_methods(str(entry["method"])), *knobs])
            values = (name, new_tokens, example.id, f"{first:.10g}", f"{again:.10g}")
            records.append(dict(zip(FIELDS, values, strict=True)))
        say(f"{i + 1} of {len(group.examples)} texts")
    return writers.csv(FIELDS, records)


def table(numbers: str) -> str:
    """Return the table that the CSV gives, as text."""
    by_method: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in csv.DictReader(numbers.splitlines()):
        pair = float(row["kl"]), float(row["kl_again"])
        by_method.setdefault((row["method"], row["new_tokens"]), []).append(pair)
    body = []
    for (method, new_tokens), pairs in by_method.items():
        kl, again = np.array(pairs).T
        change = np.abs(again - kl)
        nats = (kl.mean(), change.mean(), change.max(), abs(again.mean() - kl.mean()))
        part = 100 * change.mean() / kl.mean()
        body.append((method, new_tokens, f"{nats[0]:.3g}", *(f"{x:.1e}" for x in nats[1:]), f"{part:.2g}"))
    head = ("method", "new tokens", "KL, nats", "change of a text", "largest", "of the mean", "a text's, % of KL")
    texts = len(next(iter(by_method.values())))
    notes = (
        f"`python scripts/rounding.py`: SmolLM2-135M in fp32, {texts} articles of WikiText-2, 64 tokens behind 256. "
        "Every text is measured twice by sums in another order.",
        "change of a text: absolute difference of its two divergences, mean over texts. largest: that of one text. "
        "of the mean: difference between the two means.",
    )
    return writers.compose([Table(head, tuple(body), left=2)], notes, "text") + "\n"


def verify(found: Verification) -> None:
    """Add the table to ``found``: it must be what the committed CSV gives."""

    def make() -> str:
        return table(NUMBERS.read_text(encoding="utf-8"))

    found.add_text(TABLE, make, f"benchmarks/{TABLE.name}", "python scripts/rounding.py")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure or verify; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verification.add_options(parser)
    args = parser.parse_args(arguments)
    if args.verify:
        return verification.verified(verify, args.without)
    numbers = measure()
    NUMBERS.write_text(numbers, encoding="utf-8")
    TABLE.write_text(table(numbers), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

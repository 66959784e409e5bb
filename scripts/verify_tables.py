"""Verify all committed tables and ledgers: make each again from its samples and compare.

python scripts/verify_tables.py                  status 1 if one differs, or cannot be made again here
python scripts/verify_tables.py --without data   the same, but texts may be missing: what needs them is named

Tables on the tiny model need nothing else. Those on a pretrained model need it (kvbench model fetch) for its
tokenizer and shape, and the texts that were read, below KVBENCH_DATA, since a cell's id covers them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import format_tables
import llamacpp_table
import memory_2026
import paper_claims
import paper_tables
import rounding
import second_model
import shards
import tables_page
import tiny_table
import verification
from verification import Verification


def main(arguments: Sequence[str] | None = None) -> int:
    """Verify everything and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verification.add_without(parser)
    args = parser.parse_args(arguments)
    return shards.ended(lambda: _verify(args.without))


PARTS = (
    (tiny_table, format_tables, llamacpp_table, memory_2026, rounding, second_model, paper_claims, tables_page),
    (paper_tables,),
)
"""The scripts whose tables are verified, in two parts that take about equally long."""


def _verify(without: Sequence[str]) -> int:
    """Verify each part in a process of its own. Return the exit status."""
    findings = Verification()
    with ProcessPoolExecutor(len(PARTS), mp_context=get_context("fork")) as pool:
        for findings_of_part in pool.map(_verify_part, range(len(PARTS))):
            findings.join(findings_of_part)
    return findings.close(without)


def _verify_part(number: int) -> Verification:
    """Return the findings of one part's scripts."""
    findings = Verification()
    for script in PARTS[number]:
        script.verify(findings)
    return findings


if __name__ == "__main__":
    raise SystemExit(main())

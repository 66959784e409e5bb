"""Verify all committed tables and ledgers: make each again from its samples and compare.

python scripts/verify_tables.py                  status 1 if one differs, or cannot be made again here
python scripts/verify_tables.py --without data   the same, but texts may be missing: what needs them is named

Tables on the tiny model need nothing else. Those on a pretrained model need it (kvbench model fetch) for its
tokenizer and shape, and the texts that were read, below KVBENCH_DATA, since a cell's id covers them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import format_tables
import llamacpp_table
import memory_2026
import paper_claims
import paper_tables
import rounding
import shards
import tiny_table
import verification
from verification import Verification


def main(arguments: Sequence[str] | None = None) -> int:
    """Verify everything and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verification.add_without(parser)
    args = parser.parse_args(arguments)
    return shards.ended(lambda: _verify(args.without))


def _verify(without: Sequence[str]) -> int:
    found = Verification()
    tiny_table.verify(found)
    format_tables.verify(found)
    llamacpp_table.verify(found)
    memory_2026.verify(found)
    rounding.verify(found)
    paper_tables.verify(found)
    paper_claims.verify(found)
    return found.close(without)


if __name__ == "__main__":
    raise SystemExit(main())

"""bench time: seconds, tokens a second and peaks of methods and peers, end to end."""

from __future__ import annotations

import argparse
import json


def main(args: argparse.Namespace) -> int:
    """Measure what is missing and print all that was asked for; 1 if a row failed."""
    from kvbench.bench import request, time_table

    rows, path = request.measure(args.overrides, args.plan, beside=not args.json)
    over = dict(o.partition("=")[::2] for o in args.overrides).get("over", request.OWN["over"])
    if args.plan:
        return 0
    if args.json:
        print(json.dumps(time_table.as_json(rows, over), indent=1, ensure_ascii=False))
    else:
        print(time_table.render(rows, over=over), end="")
        print(f"Rows: {path}")
    return 1 if any(row["status"] == "failed" for row in rows) else 0

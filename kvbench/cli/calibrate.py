"""calibrate: measure what methods need of a model, and keep it; a run does the same at first use."""

from __future__ import annotations

import argparse
import json

from kvbench.base.errors import UsageError
from kvbench.plan import words


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="method, model, and how to calibrate")


def main(args: argparse.Namespace) -> int:
    """Compute missing calibrations and print all."""
    if not any(o.startswith("method=") for o in args.overrides):
        raise UsageError("calibrate needs a method, as in: python -m kvbench calibrate method=uncomp-group")
    overrides = [f"calibration_{o}" if o.startswith("text=") else o for o in args.overrides]
    from kvbench.plan import config
    from kvbench.run import experiment

    cfgs = [config.parse(run) for run in words.read(overrides).runs]
    records = [record for cfg in cfgs for record in experiment.calibrate(cfg, quiet=args.json)]
    if args.json:
        print(json.dumps(records, indent=1, ensure_ascii=False))
        return 0
    for r in records:
        shapes = ", ".join(f"{name} {shape}" for name, shape in r["shapes"].items())
        print(f"{r['method']}: {r['file']}")
        print(f"  {r['samples']} samples of {r['tokens']} tokens, {r['text']}; sha256 {r['sha256'][:16]}")
        print(f"  {shapes}")
    return 0

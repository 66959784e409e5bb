"""calibrate: compute and store the statistics of a model that some methods need. A run does the same at first use."""

from __future__ import annotations

import argparse
import json

from kvbench.base.errors import UsageError
from kvbench.plan import words


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="method=, model=, and options of the calibration"
    )


def main(args: argparse.Namespace) -> int:
    """Compute the calibrations that the methods lack, and print all that the methods use. Return exit status 0."""
    if not any(word.startswith("method=") for word in args.overrides):
        raise UsageError("calibrate needs a method, as in: kvbench calibrate method=uncomp-group")
    run_words = []
    for word in args.overrides:
        # text= is a run's key calibration_text=
        if word.startswith("text="):
            word = f"calibration_{word}"
        run_words.append(word)
    from kvbench.plan import config

    runs = words.read(run_words)
    for run in runs:
        config.check_request(run)
    # this imports PyTorch, which takes seconds
    from kvbench.run import experiment

    # all runs are parsed before the first calibration, which may take minutes, is computed
    cfgs = [config.parse(run) for run in runs]
    records = []
    for cfg in cfgs:
        records += experiment.calibrate(cfg, quiet=args.json)
    if args.json:
        print(json.dumps(records, indent=1, ensure_ascii=False))
        return 0
    for record in records:
        shapes = ", ".join(f"{name} {shape}" for name, shape in record["shapes"].items())
        print(f"{record['method']}: {record['file']}")
        # the first digits of the digest tell two calibrations apart
        sha256 = record["sha256"][:16]
        print(f"  {record['samples']} samples of {record['tokens']} tokens, {record['text']}; sha256 {sha256}")
        print(f"  {shapes}")
    return 0

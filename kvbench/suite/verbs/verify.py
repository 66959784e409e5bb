"""verify: check a suite's folder, number by number, from its samples."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument(
        "--without-texts",
        action="store_true",
        help="if the datasets are not on this machine, check everything except the scores of answers",
    )
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="a folder that `kvbench suite` wrote")


def main(args: argparse.Namespace) -> int:
    """Check folders and print the findings. Return exit status 1 if one of them is not verified."""
    from kvbench.suite.verify import check_folder, describe_findings, verify_folder

    places = [Path(name) for name in args.folders]
    for place in places:
        check_folder(place)
    findings = {str(place): verify_folder(place, args.without_texts) for place in places}
    if args.json:
        print(json.dumps({name: asdict(checked) for name, checked in findings.items()}, indent=1, ensure_ascii=False))
    else:
        for name, checked in findings.items():
            print(describe_findings(Path(name), checked))
    return int(any(checked.problems for checked in findings.values()))

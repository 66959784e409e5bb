"""run: compose, plan, measure, print."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from textwrap import fill
from typing import Any

from kvbench.cli import launchers
from kvbench.cli.rewrite import rewrite

EXAMPLES = """examples:
  python -m kvbench run method=snapkv+think ratio=0.4
  python -m kvbench run method=full,snapkv,snapkv+think kv_size=64,128 dataset=tiny/needle,tiny/code limit=4
  python -m kvbench run method=snapkv per=kv_head,query_head limit=4 --plan
  python -m kvbench run method=streamingllm,snapkv kv_ratio=0.125 limit=4 --json
  python -m kvbench run preset=think method=snapkv,snapkv+think kv_size=64 limit=4
  python -m kvbench run method=snapkv,snapkv+think kv_size=128 match=bytes limit=4 --plan
  python -m kvbench run -m shards=2 method=snapkv limit=4
  python -m kvbench run method=snapkv limit=4 logger=wandb logger.mode=offline
  python -m kvbench run method=snapkv --config

keys: method= (joined by +, listed by ,), dataset=, model=, any knob of a method (kv_ratio=, kv_size=, ratio=,
window=, ...; method.snapkv.window= by full name), per=, limit=, results=, baseline=false. Comma lists are grids.

preset=think|refreekv|uncomp|vatp|qhitter sets the variants, windows, prompt and per of a paper's tables in place of
the plain defaults; what you type wins. What each sets, and where that comes from: python -m kvbench list presets.

match=bytes sets the kv_size of all other methods to what holds as many bytes as the last one named (or reference=):
snapkv+think at 128 tokens holds as much as snapkv at 109. match=nominal counts as ThinK's table 7 does, with a fraction
of a channel; match=true is what preset= says, or bytes. The report states every kv_size found and the bytes of both."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="what to measure, and how")
    parser.add_argument("--plan", action="store_true", help="show what would be measured, and stop")
    parser.add_argument("--config", action="store_true", help="print the composed configuration, and stop")
    parser.add_argument("-m", "--multirun", action="store_true", help="sweep shard=0,1,... through a Hydra launcher")
    output_arguments(parser)


def output_arguments(parser: argparse.ArgumentParser) -> None:
    """How a report is printed."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    parser.add_argument("--format", choices=("text", "md", "csv", "latex"), default="text", help="of the table")


def main(args: argparse.Namespace) -> int:
    """Measure and print; refused cells make the exit status 1."""
    command = rewrite(args.overrides, args.multirun)
    launchers.check(command)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from kvbench import config, experiment
    from kvbench.wandb_logger import listeners

    if args.config:
        from omegaconf import OmegaConf

        for overrides in command.runs:
            cfg = config.compose_config(overrides)
            print(json.dumps(OmegaConf.to_container(cfg), indent=1) if args.json else OmegaConf.to_yaml(cfg))
        return 0
    prepared = [experiment.prepare(config.parse(config.compose_config(o))) for o in command.runs]
    if args.plan:
        plans = [
            {
                "model": p.cfg.model.path,
                "preset": p.cfg.preset,
                "groups": p.todo(),
                "matched": [{**asdict(m), "text": str(m)} for m in p.matched],
            }
            for p in prepared
        ]
        return _print_plan(plans, args.json)
    if command.sweep:
        from kvbench.cli.sweep import sweep

        sweep(command, prepared[0])
        reports = [experiment.settle(prepared[0], listeners(prepared[0].cfg.logger))]
    else:
        reports = [experiment.measure(p, args.json, listeners(p.cfg.logger)) for p in prepared]
    return print_reports(reports, args)


def print_reports(reports: list[dict[str, Any]], args: argparse.Namespace) -> int:
    """Print reports as asked for; the status is 1 if any cell was refused."""
    from kvbench import render

    if args.json:
        print(json.dumps(reports[0] if len(reports) == 1 else reports, indent=1, ensure_ascii=False))
    else:
        for r in reports:
            if len(reports) > 1:
                print(f"model {r['model']}\n")
            print(render.render(r, args.format), end="")
    refused = [c for r in reports for row in r["rows"] for c in row["cells"] if c["status"] == "refused"]
    if refused:
        print(f"kvbench: {len(refused)} of the cells were refused; the reasons stand in the table", file=sys.stderr)
    return 1 if refused else 0


def _print_plan(plans: list[dict[str, Any]], as_json: bool) -> int:
    if as_json:
        print(json.dumps(plans, indent=1, ensure_ascii=False))
        return 0
    for plan in plans:
        print(f"model {plan['model']}" + (f", preset {plan['preset']}" if plan["preset"] else ""))
        for m in plan["matched"]:
            print(fill(m["text"], 100, initial_indent="  ", subsequent_indent="    "))
        for g in plan["groups"]:
            text = (
                f"{g['task']}: {g['examples']} of {g['of']} examples x {len(g['methods'])} methods; "
                f"{g['answers_done']} answers done, {g['answers_to_do']} to do in {g['prefills']} prefills "
                f"({g['prefills_saved']} saved by sharing)"
            )
            print(fill(text, 100, initial_indent="  ", subsequent_indent="    "))
        for text in dict.fromkeys(c for g in plan["groups"] for c in g["calibrations"]):
            print(fill(f"computed first: calibration of {text}", 100, initial_indent="  ", subsequent_indent="    "))
        for method, cells in _methods(plan["groups"]).items():
            print(
                fill(f"method {method}: cells {', '.join(cells)}", 100, initial_indent="  ", subsequent_indent="    ")
            )
    return 0


def _methods(groups: list[dict[str, Any]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for g in groups:
        for method, cell in zip(g["methods"], g["cells"], strict=True):
            found.setdefault(method, []).append(cell)
    return found

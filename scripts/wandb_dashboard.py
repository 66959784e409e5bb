"""Set up the dashboard of kvbench's runs on Weights & Biases: scores by method and budget, score over bytes, progress.

python scripts/wandb_dashboard.py --entity my-team --project kvbench
python scripts/wandb_dashboard.py --dry-run          prints what would be set up; nothing is sent

Needs the package wandb-workspaces (pip install -e '.[wandb]'); --dry-run works without it. The names are those
that kvbench/run/wandb_logger.py logs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

NAME = "kvbench"
Panel = Mapping[str, Any]
SECTIONS: Mapping[str, Sequence[Panel]] = {
    "Scores by method and budget": (
        {"kind": "bars", "title": "score", "metric": "score", "groupby": "label"},
        {"kind": "scatter", "title": "score by kv_size", "x": "config:kv_size", "y": "summary:score"},
        {"kind": "scatter", "title": "score by kv_ratio", "x": "config:kv_ratio", "y": "summary:score"},
        {"kind": "bars", "title": "lower end of the 95 % interval", "metric": "ci_low", "groupby": "label"},
        {"kind": "bars", "title": "upper end of the 95 % interval", "metric": "ci_high", "groupby": "label"},
    ),
    "Score over bytes": (
        {"kind": "scatter", "title": "% of the full cache", "x": "summary:percent_of_full", "y": "summary:score"},
        {"kind": "scatter", "title": "payload", "x": "summary:payload", "y": "summary:score"},
        {"kind": "bars", "title": "overhead, bytes", "metric": "overhead", "groupby": "label"},
        {"kind": "bars", "title": "decode, s per token", "metric": "timing/decode_s_per_token", "groupby": "label"},
    ),
    "Progress": (
        {"kind": "lines", "title": "answers", "metrics": ["progress/answers", "progress/of"]},
        {"kind": "lines", "title": "score so far", "metrics": ["progress/score"]},
    ),
    "Samples and needle": (
        {"kind": "media", "title": "needle", "key": "heatmap"},
        {"kind": "table", "title": "samples", "key": "samples"},
        {"kind": "table", "title": "needle, by length and depth", "key": "heatmap_values"},
    ),
}
"""Sections and their panels: all that there is to the dashboard. ``config:`` and ``summary:`` name where a value is."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Save the workspace at W&B, or print its plan. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entity", default="", help="user or team (default: W&B's)")
    parser.add_argument("--project", default="kvbench", help="as in logger.project= (default kvbench)")
    parser.add_argument("--dry-run", action="store_true", help="print the dashboard as JSON, and stop")
    args = parser.parse_args(arguments)
    if args.dry_run:
        print(json.dumps({"name": NAME, "project": args.project, "sections": SECTIONS}, indent=1))
        return 0
    try:
        import wandb_workspaces.workspaces  # noqa: F401
    except ModuleNotFoundError:
        print("the package wandb-workspaces is missing: pip install -e '.[wandb]'", file=sys.stderr)
        return 2
    try:
        saved = workspace(args.entity or _entity(), args.project).save()
    except Exception as error:
        print(f"W&B did not take the dashboard: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(saved.url)
    return 0


def workspace(entity: str, project: str) -> Any:
    """Return the dashboard as a wandb_workspaces Workspace that is not yet saved."""
    import wandb_workspaces.workspaces as ws

    sections = [
        ws.Section(name=name, panels=[_panel(p) for p in panels], is_open=True) for name, panels in SECTIONS.items()
    ]
    return ws.Workspace(entity=entity, project=project, name=NAME, sections=sections)


def _panel(panel: Panel) -> Any:
    import wandb_workspaces.reports.v2 as wr

    title = panel["title"]
    if panel["kind"] == "bars":
        return wr.BarPlot(title=title, metrics=[panel["metric"]], groupby=f"config.{panel['groupby']}")
    if panel["kind"] == "scatter":
        return wr.ScatterPlot(title=title, x=_axis(panel["x"]), y=_axis(panel["y"]))
    if panel["kind"] == "lines":
        return wr.LinePlot(title=title, y=list(panel["metrics"]))
    if panel["kind"] == "media":
        return wr.MediaBrowser(title=title, media_keys=[panel["key"]])
    return wr.WeavePanelSummaryTable(table_name=panel["key"])


def _axis(name: str) -> Any:
    import wandb_workspaces.reports.v2 as wr

    where, _, key = name.partition(":")
    return wr.Config(key) if where == "config" else wr.SummaryMetric(key)


def _entity() -> str:
    import wandb

    return str(wandb.Api().default_entity or "")


if __name__ == "__main__":
    raise SystemExit(main())

"""Hydra launchers: their names, and whether the launcher that a command line names is installed."""

from __future__ import annotations

from kvbench.base.errors import unknown
from kvbench.base.extras import require
from kvbench.plan.words import RunRequest

LAUNCHERS = {
    "basic": None,
    "ray": "hydra_plugins.hydra_ray_launcher",
    "submitit_local": "hydra_plugins.hydra_submitit_launcher",
    "submitit_slurm": "hydra_plugins.hydra_submitit_launcher",
}
"""The launchers, each with the package that it needs."""


def check_launcher(request: RunRequest) -> None:
    """Raise UsageError, naming the extra, for a launcher that is unknown or not installed."""
    # without a word on it, Hydra runs jobs one after another in its own process
    name = "basic"
    for word in request.sweep:
        if word.startswith("hydra/launcher="):
            name = word.removeprefix("hydra/launcher=")
            break
    if name not in LAUNCHERS:
        raise unknown("launcher", name, LAUNCHERS)
    # Hydra's own launcher needs no package
    package = LAUNCHERS[name]
    if package:
        require(package, f"hydra/launcher={name}")

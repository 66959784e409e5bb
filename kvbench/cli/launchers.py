"""Hydra launchers: which there are, and whether the one that a command line names is installed."""

from __future__ import annotations

from importlib.util import find_spec

from kvbench.errors import UsageError, unknown
from kvbench.run.words import Command

LAUNCHERS = {
    "basic": ("hydra", ""),
    "ray": ("hydra_plugins.hydra_ray_launcher", "ray"),
    "submitit_local": ("hydra_plugins.hydra_submitit_launcher", "slurm"),
    "submitit_slurm": ("hydra_plugins.hydra_submitit_launcher", "slurm"),
}
"""The launchers, each with the module that it needs and kvbench's extra that installs it."""


def check(command: Command) -> None:
    """Raise UsageError, naming the extra, for a launcher that is unknown or not installed."""
    name = next((o.partition("=")[2] for o in command.sweep if o.startswith("hydra/launcher=")), "basic")
    if name not in LAUNCHERS:
        raise unknown("launcher, hydra/launcher", name, LAUNCHERS)
    module, extra = LAUNCHERS[name]
    if not installed(module):
        raise UsageError(
            f"hydra/launcher={name} is not installed here: pip install 'kvbench[{extra}]', or from a clone "
            f"pip install -e '.[{extra}]'"
        )


def installed(module: str) -> bool:
    """Return True if a module could be imported. It is not imported."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False

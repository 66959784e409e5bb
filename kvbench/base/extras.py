"""Optional packages: the extra of kvbench that installs each, and the error for a missing one."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from kvbench.base.errors import UsageError

EXTRAS = {
    "accelerate": "gpu",
    "datasets": "data",
    "gguf": "gguf",
    "hydra_plugins.hydra_ray_launcher": "ray",
    "hydra_plugins.hydra_submitit_launcher": "slurm",
    "jieba": "zh",
    "kvpress": "peers",
    "llama_cpp": "llamacpp",
    "lm_eval": "lm-eval",
    "math_verify": "math",
    "matplotlib": "plots",
    "openai": "engines",
    "punkt": "data",
    "rouge_score": "data",
    "triton": "gpu",
    "wandb": "wandb",
    "wonderwords": "data",
}
"""The extra of each package, by the name that it is imported under."""


def require(package: str, use: str, extra: str | None = None) -> None:
    """Raise UsageError, with the command that installs ``package``, if the package is missing.

    package: a key of EXTRAS.
    use: the part of kvbench that needs the package, as the error names it.
    extra: an extra that installs the package; None for the one in EXTRAS.
    """
    if not installed(package):
        raise missing(package, use, extra)


def missing(package: str, use: str, extra: str | None = None) -> UsageError:
    """Return the error for a package of EXTRAS that is not installed, although ``use`` needs it."""
    extra = extra or EXTRAS[package]
    if (Path(__file__).parents[2] / "pyproject.toml").is_file():
        # install a clone from its own folder: otherwise pip would put a release in its place
        command = f"pip install -e '.[{extra}]'"
    else:
        command = f"pip install 'kvbench[{extra}]'"
    return UsageError(f"{use} needs the package {package}, which is not installed: {command}")


def installed(package: str) -> bool:
    """Return True if a package is installed. The package is not imported, since importing it may take seconds."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the package that contains it is missing
        return False

"""run -m: one Hydra job per shard, by whichever launcher the user chose. Launchers own no state."""

from __future__ import annotations

import os
import re
import sys

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench.base.conf import conf_dir
from kvbench.base.errors import KvbenchError, UsageError
from kvbench.plan import config, run_plan, words
from kvbench.plan.run_plan import RunPlan
from kvbench.plan.words import RunRequest
from kvbench.run import experiment
from kvbench.run.wandb_logger import listeners


def job(cfg: DictConfig) -> None:
    """Measure one shard, in the folder that the sweep was started from.

    ``cfg`` is the configuration that Hydra composed for the job. Its ``words`` are those that the user typed.
    """
    os.chdir(HydraConfig.get().runtime.cwd)
    # Hydra's own values of the sweep come behind the words that the user typed
    job_words = list(cfg.words)
    job_words += [f"shard={cfg.shard}", f"shards={cfg.shards}"]
    (request,) = words.read(job_words)
    run = config.parse(request, OmegaConf.to_container(cfg))  # type: ignore[arg-type]
    experiment.measure(run_plan.prepare(run), listeners=listeners(run.logger))


def run_shards(request: RunRequest, prepared: RunPlan) -> None:
    """Run every shard of a run through Hydra's launcher. Raises KvbenchError if one did not end.

    ``prepared`` is the whole run, as this machine sees it.
    """
    _check_dtype(request, prepared)
    # a job parses the user's own words again: Hydra's overrides cannot say all that they can
    arguments = ["kvbench", "--multirun"]
    arguments += config.group_overrides(request)
    arguments.append(f"+words=[{','.join(map(_quote, request.words))}]")
    arguments.append(f"results={_quote(prepared.cfg.results)}")
    arguments += request.sweep
    data_folder = os.environ.get("KVBENCH_DATA")
    if data_folder:
        # workers on a cluster have an environment of their own
        arguments.append(f"+hydra.job.env_set.KVBENCH_DATA={_quote(os.path.abspath(data_folder))}")
    # this variable makes Hydra let kvbench's errors through instead of printing its own
    os.environ["HYDRA_FULL_ERROR"] = "1"
    # Hydra reads its arguments from sys.argv
    previous_arguments = sys.argv
    sys.argv = arguments
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")(job)()
    except KvbenchError:
        # its message is for the user already
        raise
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(f"the launcher cannot be set up: {config.flatten_hydra_error(error)}") from None
    except Exception as error:
        # each launcher has its own errors for a job that ended early
        raise KvbenchError(
            f"a shard ended early ({_explain_end(error)}). Finished answers are safe. Run the same command again to "
            "measure the rest"
        ) from error
    finally:
        sys.argv = previous_arguments


def _quote(text: str) -> str:
    """Return a text quoted so that Hydra reads it unchanged."""
    # Hydra's grammar: a quote inside is escaped, and backslashes count only in front of a quote, where they are doubled
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)
    # backslashes at the end stand in front of the closing quote, so they are doubled, too
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f"'{escaped}'"


def _check_dtype(request: RunRequest, prepared: RunPlan) -> None:
    """Raise UsageError if workers with GPUs would choose another precision, and so other cells, than this machine."""
    # a precision that is named is the same everywhere, and with a GPU here auto means the same as there
    if prepared.cfg.model.dtype != "auto" or torch.cuda.is_available():
        return
    for word in request.sweep:
        # launchers have keys such as hydra.launcher.gpus_per_node
        key, _, value = word.partition("=")
        if "gpu" in key and value != "0":
            raise UsageError(
                f"{word.lstrip('+')} asks for workers with GPUs, and this machine has none. dtype=auto would mean one "
                "precision there and another one here. Name the precision, as in dtype=bfloat16"
            )


def _explain_end(error: BaseException) -> str:
    """Return why a job ended: the first line of its error, or the last line of a worker's traceback from Ray."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    first_line, last_line = lines[0], lines[-1]
    # Ray's error begins with the worker's name, such as ray::..., and a traceback follows
    reason = last_line if "ray::" in first_line else first_line
    return f"{type(error).__name__}: {reason}"

"""The composed configuration as typed, frozen records. Every field is marked as identity or runtime of a result."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench.base.conf import check, check_piece_size, conf_dir, entries, identity, is_whole, read_config, runtime
from kvbench.base.errors import UsageError, unknown
from kvbench.methods.core import registry
from kvbench.methods.core.knob_owners import check_values, find_grids, gather_entries, overlay_layers
from kvbench.models.config import ModelConfig
from kvbench.plan import presets, words
from kvbench.plan.keys import parse_pairs
from kvbench.plan.words import RunRequest
from kvbench.tasks.prompt import TEMPLATES, PromptPolicy

if TYPE_CHECKING:
    from kvbench.methods.core.resolve import ChainConfig

THROUGH_CACHE = "through_cache"
"""The ``kl_mode`` under which every token is read from the cache as it is stored, prompts too."""
AFTER_PREFILL = "after_prefill"
"""The ``kl_mode`` under which the prompt is read exactly and then compressed."""
MATCH = ("bytes", "compressed", "nominal")
"""The kinds of equal memory (``equal_memory``)."""
KL_MODES = (AFTER_PREFILL, THROUGH_CACHE)
MAX_THREADS = 1024
"""The largest ``threads``. A million would take the machine down before PyTorch refused it."""
LEAST_MEMORY = 1e-6
"""The smallest ``memory`` in GiB. No cache of a token fits into less."""
LEAST_TEMPERATURE = 1e-4
"""The lowest ``temperature`` above 0. Logits divided by it stay far below float32's largest number."""


def _is_number(value: Any) -> bool:
    """Return True if a value is a finite number of at least 0. Booleans are no numbers here."""
    is_of_type = is_whole(value) or isinstance(value, float)
    # this excludes nan, too: a comparison with nan is False
    return is_of_type and 0 <= value < float("inf")


@dataclass(frozen=True)
class DatasetConfig:
    """One entry of conf/dataset, with one combination of its options.

    name: the entry's name.
    knobs: the values of the entry's options.
    tasks: the names of the tasks to run; empty for all.
    label: the values of swept options in this combination, for the head of its columns.
    default_limit: the examples of each task if the run sets no limit; None for all.
    query_aware: whether questions are read before the compression. None leaves the choice to each task.
    """

    name: str = identity()
    knobs: Mapping[str, object] = identity()
    tasks: tuple[str, ...] = identity(default=())
    label: str = runtime(default="")
    default_limit: int | None = runtime(default=None)
    query_aware: bool | None = identity(default=None)


@dataclass(frozen=True)
class Sampling:
    """The choice of tokens: greedy at temperature 0, else drawn with a seed per example that batches do not affect.

    temperature: the number by which logits are divided; 0 for greedy decoding.
    top_p: the probability of the smallest set of likeliest tokens from which tokens are drawn.
    sample_seed: the run's part of each example's seed.
    samples_per_prompt: the answers drawn for each prompt, each with a seed of its own.
    """

    temperature: float = identity(default=0.0)
    top_p: float = identity(default=1.0)
    sample_seed: int = identity(default=0)
    samples_per_prompt: int = identity(default=1)

    def __post_init__(self) -> None:
        temperature_fits = _is_number(self.temperature) and (
            self.temperature == 0 or LEAST_TEMPERATURE <= self.temperature <= 1000
        )
        check("temperature", self.temperature, temperature_fits, f"0 (greedy), or {LEAST_TEMPERATURE:g} to 1000")
        top_p_fits = _is_number(self.top_p) and 0 < self.top_p <= 1
        check("top_p", self.top_p, top_p_fits, "above 0, at most 1")
        check("sample_seed", self.sample_seed, is_whole(self.sample_seed), "a whole number")
        count = self.samples_per_prompt
        check("samples_per_prompt", count, is_whole(count) and count >= 1, "a whole number, 1 or more")
        if count > 1 and not self.temperature:
            raise UsageError(
                f"samples_per_prompt={count} is not possible with temperature=0: greedy answers to one prompt are all "
                "the same. Give a temperature= above 0, such as 0.7"
            )

    def identity(self) -> dict[str, object]:
        """Return the settings that decide the numbers. If decoding is greedy, ``top_p`` and the seed are left out."""
        # the seed is not used then, and cells must not differ by it
        if not self.temperature:
            return {"greedy": True}
        settings: dict[str, object] = {"temperature": self.temperature, "top_p": self.top_p, "seed": self.sample_seed}
        # without the key, cells of one answer a prompt keep their earlier ids
        if self.samples_per_prompt > 1:
            settings["samples_per_prompt"] = self.samples_per_prompt
        return settings


@dataclass(frozen=True)
class LoggerConfig:
    """The service, besides the results folder, that receives a run: none, or Weights & Biases.

    name: ``none`` or ``wandb``.
    mode: ``online``, ``offline`` for a log on disk, or ``disabled``.
    project: the project at Weights & Biases.
    entity: the user or team; None for the service's default.
    group: the name of a group of runs; None to let the run choose one.
    samples: how many answers the table of each result shows.
    """

    name: str = runtime(default="none")
    mode: str = runtime(default="disabled")
    project: str = runtime(default="kvbench")
    entity: str | None = runtime(default=None)
    group: str | None = runtime(default=None)
    samples: int = runtime(default=100)

    def __post_init__(self) -> None:
        modes = ("online", "offline", "disabled")
        check("logger.mode", self.mode, self.mode in modes, ", ".join(modes))
        if self.mode != "disabled" and self.name != "wandb":
            raise UsageError(f"logger.mode={self.mode} needs a logger: add logger=wandb")
        is_name = isinstance(self.project, str) and bool(self.project)
        check("logger.project", self.project, is_name, "a name")
        check("logger.samples", self.samples, is_whole(self.samples) and self.samples >= 0, "a whole number, 0 or more")


@dataclass(frozen=True)
class RunConfig:
    """One run: a model, its chains and datasets, and the settings of prompts, decoding and resources.

    model: the model.
    chains: the methods and their combinations.
    datasets: the datasets with their tasks.
    prompt: how prompts are written.
    sampling: how tokens are chosen.
    max_length: the longest prompt in tokens; None for the limit of the prompt policy and of the model's context.
    kl: whether next-token distributions are compared with the full cache's.
    kl_tokens: the most tokens of a text that are compared; None for the default.
    kl_mode: one of KL_MODES.
    baseline: whether the full cache is measured, too.
    limit: the number of examples of each task; None for the dataset's default.
    results: the folder of results.
    batch_rows: the most answers that are decoded at once; None to choose by the device.
    shared_prefix: the tokens of a piece in which prompts are read and shared; None to read each prompt whole.
    memory: the GiB that caches may take; None to choose by the free memory.
    threads: the number of CPU threads; None to choose by the machine and the model.
    device: ``auto``, or a device of PyTorch.
    mix: whether one result may have samples from different devices or versions of PyTorch.
    data_root: the folder of datasets; None for the default folder.
    calibration: the folder of calibrations; None for the folder in ``results``.
    calibration_text: the text file that a calibration reads; None for the default text.
    shard: the number of the part of the examples that this process measures, from 0.
    shards: the number of such parts.
    preset: the paper whose settings the run has; None for none.
    match: the kind of equal memory, one of MATCH; None to leave budgets as they are.
    reference: the method to which the others are matched; None for the last one.
    logger: the service that receives the run.
    """

    model: ModelConfig = identity()
    chains: tuple[ChainConfig, ...] = identity()
    datasets: tuple[DatasetConfig, ...] = identity()
    prompt: PromptPolicy = identity(default_factory=PromptPolicy)
    sampling: Sampling = identity(default_factory=Sampling)
    max_length: int | None = identity(default=None)
    kl: bool = identity(default=False)
    kl_tokens: int | None = identity(default=None)
    kl_mode: str = identity(default=AFTER_PREFILL)
    baseline: bool = runtime(default=True)
    limit: int | None = runtime(default=None)
    results: str = runtime(default="results")
    batch_rows: int | None = runtime(default=None)
    shared_prefix: int | None = runtime(default=None)
    memory: float | None = runtime(default=None)
    threads: int | None = runtime(default=None)
    device: str = runtime(default="auto")
    mix: bool = runtime(default=False)
    data_root: str | None = runtime(default=None)
    calibration: str | None = runtime(default=None)
    calibration_text: str | None = runtime(default=None)
    shard: int = runtime(default=0)
    shards: int = runtime(default=1)
    preset: str | None = runtime(default=None)
    match: str | None = runtime(default=None)
    reference: str | None = runtime(default=None)
    logger: LoggerConfig = runtime(default_factory=LoggerConfig)

    @property
    def reads_through_cache(self) -> bool:
        """True if every token is read from the cache as it is stored, prompts too."""
        return self.kl and self.kl_mode == THROUGH_CACHE

    @property
    def model_name(self) -> str:
        """The model's entry in conf/model. A model without an entry has its folder or its hub id as its name."""
        # the entry hf loads any folder or hub id
        if self.model.name == "hf":
            return self.model.path
        return self.model.name

    def __post_init__(self) -> None:
        tokens_fit = self.kl_tokens is None or (is_whole(self.kl_tokens) and self.kl_tokens >= 2)
        check("kl_tokens", self.kl_tokens, tokens_fit, "a number of tokens, 2 or more, or null")
        check("kl_mode", self.kl_mode, self.kl_mode in KL_MODES, f"one of {', '.join(KL_MODES)}")
        if self.kl_mode == THROUGH_CACHE and self.kl_tokens is not None:
            raise UsageError(
                f"kl_tokens={self.kl_tokens} is not possible with kl_mode={THROUGH_CACHE}, which reads windows"
            )
        for name in ("baseline", "mix", "kl"):
            check(name, getattr(self, name), isinstance(getattr(self, name), bool), "true or false")
        for name in ("max_length", "limit", "batch_rows", "threads"):
            value = getattr(self, name)
            check(name, value, value is None or (is_whole(value) and value >= 1), "a whole number, 1 or more")
        check_piece_size(self.shared_prefix)
        threads_fit = self.threads is None or self.threads <= MAX_THREADS
        check("threads", self.threads, threads_fit, f"auto, or 1 to {MAX_THREADS}")
        memory_fits = self.memory is None or (_is_number(self.memory) and self.memory >= LEAST_MEMORY)
        check("memory", self.memory, memory_fits, "auto, or GiB that caches may take, 0.000001 (1 KiB) or more")
        shards_fit = is_whole(self.shards) and 1 <= self.shards <= words.MAX_SHARDS
        check("shards", self.shards, shards_fit, f"1 to {words.MAX_SHARDS}")
        shard_fits = is_whole(self.shard) and 0 <= self.shard < self.shards
        check("shard", self.shard, shard_fits, f"0 to {self.shards - 1}, since shards={self.shards}")
        is_name = self.reference is None or isinstance(self.reference, str)
        check("reference", self.reference, is_name, "one of method=, or null")
        check("device", self.device, isinstance(self.device, str), "auto, cpu, cuda, cuda:0, ...")
        check("results", self.results, bool(self.results) and isinstance(self.results, str), "a folder")
        # a typed match=true is one of the two kinds by now (``words._read_match``)
        check("match", self.match, self.match in (None, *MATCH), f"{', '.join(MATCH)}, or true for one of them")
        # keys as the user types them
        paths = {
            "calibration": self.calibration,
            "calibration_text": self.calibration_text,
            "data.root": self.data_root,
        }
        for key, path in paths.items():
            check(key, path, path is None or (isinstance(path, str) and bool(path)), "a path, or null")


def read(arguments: Sequence[str]) -> RunConfig:
    """Return the one run that ``key=value`` arguments ask for. Raises UsageError naming the key and value at fault.

    The arguments must name one model at most, since each model has a run of its own.
    """
    return configure(parse_pairs(arguments))


def configure(settings: Mapping[str, object]) -> RunConfig:
    """Return the one run that settings ask for: keys of ``run`` with Python values, or with texts as typed.

    Raises UsageError naming the key and value at fault.
    """
    return parse(words.request(settings))


def parse(
    request: RunRequest,
    composed: Mapping[str, object] | None = None,
    methods: Sequence[str | Mapping[str, object]] | None = None,
) -> RunConfig:
    """Return the run that a request asks for, with grids of knobs expanded. Raises UsageError naming key and value.

    composed: Hydra's composition of the request's ``group_overrides``, if it was made before.
    methods: the request's methods, if some are dicts with knobs of their own.
    """
    # PyTorch is imported only now: ``check_request`` waits for nothing
    from kvbench.methods.core.resolve import resolve

    raw = compose(request, composed)
    knobs: dict[str, object] = {registry.PER: raw["per"]}
    knobs |= request.knobs
    try:
        chains = resolve(methods or raw["chains"], knobs, request.preset_values)
    except UsageError as error:
        raise presets.explain(error, request.preset) from None
    return replace(_build_config(request, raw), chains=tuple(chains))


def check_request(request: RunRequest) -> None:
    """Raise UsageError for a value of a request that is not possible, as far as this is known without PyTorch."""
    raw = compose(request)
    check_values([registry.read_method(method) for method in raw["chains"]], request.knobs)
    _build_config(request, raw)


def _build_config(request: RunRequest, raw: Mapping[str, Any]) -> RunConfig:
    """Return the run of a request without its chains. Raises UsageError naming key and value.

    raw: the entries of conf/ that the request chooses, with its values set.
    """
    model = ModelConfig(**raw["model"])
    # fields of RunConfig that are keys of conf/ by the same name; some of them are replaced by records below
    other_settings: dict[str, Any] = {}
    for field in fields(RunConfig):
        if field.name in raw and field.name not in ("model", "chains"):
            other_settings[field.name] = raw[field.name]
    other_settings["prompt"] = _build_prompt_policy(raw, model)
    other_settings["sampling"] = Sampling(**{field.name: raw[field.name] for field in fields(Sampling)})
    other_settings["data_root"] = raw["data"]["root"]
    other_settings["preset"] = request.preset
    logger = LoggerConfig(**raw["logger"])
    if logger.name != "wandb":
        for key, value in request.values.items():
            if key.startswith("logger."):
                raise UsageError(f"{key}={value} needs a logger: add logger=wandb")
    other_settings["logger"] = logger
    # None leaves the number to the machine
    for key in ("batch_rows", "memory", "threads"):
        if other_settings[key] == "auto":
            other_settings[key] = None
    return RunConfig(model=model, chains=(), datasets=tuple(_build_dataset_configs(raw)), **other_settings)


def group_overrides(request: RunRequest) -> list[str]:
    """Return the Hydra overrides that choose the request's entries from the groups of conf/."""
    datasets: dict[str, None] = {}
    for task in request.tasks or read_config()["tasks"]:
        # a task is written DATASET or DATASET/TASK
        dataset, _, _ = task.partition("/")
        datasets[dataset] = None
    overrides = [f"{group}={entry}" for group, entry in request.groups.items()]
    overrides.append(f"dataset=[{','.join(datasets)}]")
    # methods are resolved by ``resolve``, not by Hydra
    overrides.append("method=[]")
    return overrides


def compose(request: RunRequest, composed: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the entries of conf/ that the request chooses, with the request's values set.

    The knobs of methods are left to ``resolve``.

    composed: Hydra's composition of the request's ``group_overrides``, if it was made before. It is not changed.

    Raises UsageError for a key that does not exist, and for a value that the user must give.
    """
    if composed is not None:
        raw = copy.deepcopy(dict(composed))
    else:
        raw = _compose_with_hydra(group_overrides(request))
    methods = request.methods or tuple(read_config()["chains"])
    per = request.preset_values.get("per", raw["per"])
    raw |= {"chains": list(methods), "preset": {"name": request.preset}, "per": per}
    raw["tasks"] = list(request.tasks) or raw["tasks"]
    for key, value in request.values.items():
        parent, _, last = key.rpartition(".")
        mapping = raw
        prefix = ""
        if parent:
            prefix = f"{parent}."
            # ``words`` accepts only keys below groups that exist
            for part in parent.split("."):
                mapping = mapping[part]
        if last not in mapping:
            names = [f"{prefix}{name}" for name in mapping]
            raise unknown("key", key, names, listed_by="kvbench run --help keys")
        mapping[last] = value
    # entries of conf/ write ??? for a value that has no default
    for key, value in raw["model"].items():
        if value == "???":
            raise UsageError(f"model.{key} has no value; give model.{key}=...")
    return raw


def compose_with_knobs(request: RunRequest) -> dict[str, Any]:
    """Return the configuration that ``run --config`` prints: that of ``compose``, with the stages' knobs in ``method``.

    The knobs are only printed. A run takes its methods' knobs from ``resolve``.
    """
    raw = compose(request)
    plain_entries = gather_entries(registry.read_method(method) for method in raw["chains"])
    raw["method"] = overlay_layers(plain_entries, request.preset_values, request.knobs)
    return raw


@lru_cache(maxsize=256)
def _compose_folder(folder: Path, overrides: tuple[str, ...]) -> DictConfig:
    """Return the configurations in ``folder`` as Hydra composes them. They are cached, since composing takes 50 ms."""
    with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
        return hydra_compose(config_name="config", overrides=list(overrides))


def _compose_with_hydra(overrides: Sequence[str]) -> dict[str, object]:
    """Return conf/ as Hydra composes it under ``overrides``. Raises UsageError in place of Hydra's errors."""
    try:
        composed = _compose_folder(conf_dir(), tuple(overrides))
        return OmegaConf.to_container(composed, resolve=True)  # type: ignore[return-value]
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(flatten_hydra_error(error)) from None


def _list_limit_names() -> set[str]:
    names: set[str] = set()
    for entry in entries("model").values():
        names.update(entry["prompt_limits"])
    return names


def _build_prompt_policy(raw: Mapping[str, Any], model: ModelConfig) -> PromptPolicy:
    """Return the prompt policy. The model's length limit for it applies unless ``max_length`` is set.

    If the model's entry states a template for this policy (off, on, skip or a Jinja text), the policy uses it.

    raw: the composed entries of conf/, with the run's values.
    """
    policy = dict(raw["prompt"])
    # a setting of datasets, typed as one of prompts: _build_dataset_configs reads it
    del policy["query_aware"]
    template = model.prompt_templates.get(policy["name"])
    if template in TEMPLATES:
        policy["template"] = template
    # the entry states a Jinja text; a chat template that the user gave takes precedence
    elif template is not None and model.chat_template is None:
        fits = "messages" in template and not policy["system"]
        key = f"model.prompt_templates.{policy['name']}"
        check(key, template, fits, "off, on, skip, or Jinja of messages without system=")
        policy["frame"] = template
    # the name of the paper whose limits the prompts have, not a number
    limits = policy.pop("limits")
    if limits is not None and limits not in _list_limit_names():
        raise unknown("value of prompt.limits", limits, _list_limit_names())
    policy["max_length"] = raw["max_length"]
    if limits and policy["max_length"] is None:
        policy["max_length"] = model.prompt_limits.get(limits)
    return PromptPolicy(**policy)


def _read_query_aware(value: Any) -> tuple[bool | None, ...]:
    """Return each value of ``query_aware=`` that is asked for: true, false, or None for each task's own choice.

    A list of both values asks for both. Raises UsageError for another value.
    """
    if not isinstance(value, list):
        if not isinstance(value, bool | None):
            raise UsageError(f"prompt.query_aware={value!r} is not possible: true, false, or null")
        return (value,)
    check("query_aware", value, bool(value), "true, false, or both")
    for part in value:
        check("query_aware", part, isinstance(part, bool), "true, false, or both")
    return tuple(value)


def _build_dataset_configs(raw: Mapping[str, Any]) -> Iterator[DatasetConfig]:
    """Yield each chosen dataset, once for each combination of ``query_aware=`` and its swept knobs.

    raw: the composed entries of conf/, with the run's values.
    """
    query_aware_values = _read_query_aware(raw["prompt"]["query_aware"])
    for name, entry in raw["dataset"].items():
        tasks = _select_tasks(name, raw["tasks"])
        # a list is a grid of values unless the knob's default is a list
        grid_by_key = dict(find_grids(entry, entries("dataset").get(name, {})))
        for key, grid in grid_by_key.items():
            check(f"dataset.{name}.{key}", grid, bool(grid), "a value, or a list of at least one")
        combinations = itertools.product(*grid_by_key.values())
        # query_aware varies slowest: all combinations of knobs come with its first value, then all with its second
        for query_aware, combination in itertools.product(query_aware_values, combinations):
            swept_values = dict(zip(grid_by_key, combination, strict=True))
            label = [f"{key}={value}" for key, value in swept_values.items()]
            if len(query_aware_values) > 1:
                # each value of query_aware has columns of its own
                label.insert(0, f"query_aware={words.text_of(query_aware)}")
            knobs = dict(entry) | swept_values
            # an entry's default_limit is for the run, and no knob of the dataset's loader
            default_limit = knobs.pop("default_limit", None)
            yield DatasetConfig(
                name, knobs, tasks, label=",".join(label), default_limit=default_limit, query_aware=query_aware
            )


def _select_tasks(dataset: str, written_tasks: Sequence[str]) -> tuple[str, ...]:
    """Return a dataset's tasks that were typed, or () if the whole dataset was typed, such as ``tiny``.

    written_tasks: the typed tasks of all datasets, such as ``tiny/needle`` and ``tiny``.
    """
    names: list[str] = []
    for written in written_tasks:
        owner, _, task = str(written).partition("/")
        if owner == dataset:
            names.append(task)
    if "" in names:
        return ()
    return tuple(dict.fromkeys(names))


def flatten_hydra_error(error: Exception) -> str:
    """Return one of Hydra's error messages in one line, without hints on Hydra's internals."""
    lines = str(error).splitlines()
    # Hydra often wraps the error of OmegaConf that says what is wrong
    cause = error.__cause__
    if cause is not None and str(cause) not in str(error):
        lines += str(cause).splitlines()
    kept = []
    for line in lines:
        is_internal = "HYDRA_FULL_ERROR" in line or "reference_type" in line
        if line.strip() and not is_internal:
            kept.append(line.strip())
    return "; ".join(kept)

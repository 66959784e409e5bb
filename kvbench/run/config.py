"""The composed configuration as typed, frozen records. Every field says whether it is part of a result's identity."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench.conf import check, conf_dir, entries, identity, is_whole, runtime
from kvbench.errors import UsageError, unknown
from kvbench.methods import registry
from kvbench.methods.chain import Chain
from kvbench.models.config import ModelConfig
from kvbench.run import presets
from kvbench.tasks.prompt import TEMPLATES, PromptPolicy

MAX_THREADS = 1024
"""More than any processor has; a million would take the machine down before PyTorch says no."""
BUDGETS = ("kv_size", "kv_ratio", "ratio", "value_ratio")


@dataclass(frozen=True)
class DatasetConfig:
    """One dataset entry with its knobs settled, and which of its tasks are wanted (none named: all)."""

    name: str = identity()
    knobs: Mapping[str, Any] = identity()
    tasks: tuple[str, ...] = identity(default=())
    label: str = runtime(default="")
    default_limit: int | None = runtime(default=None)


@dataclass(frozen=True)
class ChainConfig:
    """One method of the run with its knobs settled; ``label`` names the knobs that the user set or swept.

    ``entries`` are the knobs by method as they were before the budget settled them, ``written`` the method as typed.
    """

    chain: Chain = identity()
    label: str = runtime(default="")
    entries: Mapping[str, Mapping[str, Any]] = runtime(default_factory=dict)
    written: str = runtime(default="")


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: greedily at temperature 0, else drawn, seeded per example and independent of batches."""

    temperature: float = identity(default=0.0)
    top_p: float = identity(default=1.0)
    sample_seed: int = identity(default=0)

    def __post_init__(self) -> None:
        number = isinstance(self.temperature, (int, float)) and self.temperature >= 0
        check("temperature", self.temperature, number, "0 (greedy) or more")
        check("top_p", self.top_p, isinstance(self.top_p, (int, float)) and 0 < self.top_p <= 1, "above 0, at most 1")
        check("sample_seed", self.sample_seed, is_whole(self.sample_seed), "a whole number")

    def identity(self) -> dict[str, Any]:
        """What of it decides the numbers."""
        if not self.temperature:
            return {"greedy": True}
        return {"temperature": self.temperature, "top_p": self.top_p, "seed": self.sample_seed}


@dataclass(frozen=True)
class LoggerConfig:
    """Where a run is followed besides its results folder: nowhere, or Weights & Biases."""

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
        text = isinstance(self.project, str) and bool(self.project)
        check("logger.project", self.project, text, "a name")
        check("logger.samples", self.samples, is_whole(self.samples) and self.samples >= 0, "a whole number, 0 or more")


@dataclass(frozen=True)
class RunConfig:
    """One run: a model, its chains and datasets, and how to go about it."""

    model: ModelConfig = identity()
    chains: tuple[ChainConfig, ...] = identity()
    datasets: tuple[DatasetConfig, ...] = identity()
    prompt: PromptPolicy = identity(default_factory=PromptPolicy)
    sampling: Sampling = identity(default_factory=Sampling)
    max_length: int | None = identity(default=None)
    baseline: bool = runtime(default=True)
    limit: int | None = runtime(default=None)
    results: str = runtime(default="results")
    batch_rows: int | None = runtime(default=None)
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

    def __post_init__(self) -> None:
        for name in ("baseline", "mix"):
            check(name, getattr(self, name), isinstance(getattr(self, name), bool), "true or false")
        for name in ("max_length", "limit", "batch_rows", "threads"):
            value = getattr(self, name)
            check(name, value, value is None or (is_whole(value) and value >= 1), "a whole number, 1 or more")
        enough = self.threads is None or self.threads <= MAX_THREADS
        check("threads", self.threads, enough, f"auto, or 1 to {MAX_THREADS}")
        number = isinstance(self.memory, (int, float)) and not isinstance(self.memory, bool) and self.memory > 0
        check("memory", self.memory, self.memory is None or number, "auto, or GiB that caches may take, above 0")
        check("shards", self.shards, is_whole(self.shards) and self.shards >= 1, "a whole number, 1 or more")
        whole = is_whole(self.shard) and 0 <= self.shard < self.shards
        check("shard", self.shard, whole, f"0 to {self.shards - 1}, since shards={self.shards}")
        check("results", self.results, bool(self.results), "a folder")
        check("match", self.match, self.match in (None, "bytes", "nominal"), "bytes, nominal, or true for either")
        for name in ("calibration", "calibration_text"):
            value = getattr(self, name)
            check(name, value, value is None or (isinstance(value, str) and bool(value)), "a path, or null")


def compose_config(overrides: Sequence[str]) -> DictConfig:
    """The Hydra composition of plain overrides; its errors come as UsageError."""
    try:
        with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
            return compose(config_name="config", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(plain(error)) from None


def parse(cfg: DictConfig) -> RunConfig:
    """The typed run of one composition; grids of knobs are expanded. Raises UsageError naming key and value."""
    try:
        raw: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", "") or ""
        raise UsageError(f"{key or 'a key'} has no value; give {key}=... ({plain(error)})") from None
    raw.pop("hydra", None)
    model = ModelConfig(**raw["model"])
    chains = tuple(_chains(raw))
    datasets = tuple(_datasets(raw))
    rest = {f.name: raw[f.name] for f in fields(RunConfig) if f.name in raw and f.name not in ("model", "chains")}
    rest["prompt"], rest["sampling"] = (
        _prompt(raw, model),
        Sampling(raw["temperature"], raw["top_p"], raw["sample_seed"]),
    )
    rest["data_root"], rest["preset"] = raw["data"]["root"], raw["preset"]["name"]
    rest["logger"] = LoggerConfig(**raw["logger"])
    for key in ("batch_rows", "memory", "threads"):
        rest[key] = None if rest[key] == "auto" else rest[key]
    return RunConfig(model=model, chains=chains, datasets=datasets, **rest)


def _chains(raw: Mapping[str, Any]) -> Iterator[ChainConfig]:
    entries: Mapping[str, Mapping[str, Any]] = raw.get("method") or {}
    pers = raw["per"] if isinstance(raw["per"], list) else [raw["per"]]
    seen = set()
    for written in raw["chains"]:
        parts, fixed = registry.split(str(written)), registry.settled(str(written))
        free = {m: {k: v for k, v in (entries.get(m) or {}).items() if (m, k) not in fixed} for m in parts}
        axes = [(m, k, v) for m in parts for k, v in _axes(free[m], registry.defaults(m))]
        for axis, given in [("per", pers), *((f"method.{m}.{k}", v) for m, k, v in axes)]:
            check(axis, given, bool(given), "a value, or a list of at least one")
        for per, *chosen in itertools.product(pers, *(v for _, _, v in axes)):
            settled = {m: {**free[m], **{k: v for (o, k), v in fixed.items() if o == m}} for m in parts}
            for (m, k, _), value in zip(axes, chosen, strict=True):
                settled[m][k] = value
            try:
                made = chain_config(settled, str(per), {(m, k) for m, k, _ in axes}, str(written))
            except UsageError as error:
                raise presets.explain(error, raw["preset"]["name"]) from None
            key = (made.chain.name, repr(made.chain.identity()))
            if key not in seen:
                seen.add(key)
                yield made


def chain_config(
    entries: Mapping[str, Mapping[str, Any]], per: str, swept: Collection[tuple[str, str]] = (), written: str = ""
) -> ChainConfig:
    """One chain of settled knobs by method, with its label; ``swept`` (method, knob) are named in it in any case.

    ``written`` is the method as the user wrote it: the label has the aliases in it, not what they stand for.
    """
    settled = {m: registry.by_size(e) for m, e in entries.items()}
    chain = registry.make_chain(settled, per)
    return ChainConfig(chain, _label(chain, settled, swept, written), entries, written)


def _limit_names() -> set[str]:
    """The papers for which some model of conf/model states a prompt limit."""
    return {name for entry in entries("model").values() for name in entry["prompt_limits"]}


def _prompt(raw: Mapping[str, Any], model: ModelConfig) -> PromptPolicy:
    """The prompt policy with the model's limit for the paper that it names; ``max_length`` wins over it.

    Where a preset's script treated this model otherwise, the model entry says so: off, on, skip, or a template's text.
    """
    given = dict(raw["prompt"])
    own = model.prompt_templates.get(given["name"])
    if own in TEMPLATES:
        given["template"] = own
    elif own is not None and model.chat_template is None:  # a template that the user gave wins
        fits = "messages" in own and not given["system"]
        key = f"model.prompt_templates.{given['name']}"
        check(key, own, fits, "off, on, skip, or Jinja of messages without system=")
        given["frame"] = own
    limits = given.pop("limits")
    if limits is not None and limits not in _limit_names():
        raise unknown("name of a prompt limit, prompt.limits", limits, _limit_names())
    limit = model.prompt_limits.get(limits) if limits else None
    return PromptPolicy(**{**given, "max_length": raw["max_length"] if raw["max_length"] is not None else limit})


def _datasets(raw: Mapping[str, Any]) -> Iterator[DatasetConfig]:
    entries: Mapping[str, Mapping[str, Any]] = raw["dataset"]
    for name, entry in entries.items():
        wanted = [str(t).partition("/") for t in raw["tasks"]]
        mine = [task for owner, _, task in wanted if owner == name]
        tasks = () if "" in mine else tuple(dict.fromkeys(mine))
        defaults = _yaml_defaults(name)
        axes = list(_axes(entry, defaults))
        for chosen in itertools.product(*(v for _, v in axes)):
            knobs = {**entry, **{k: v for (k, _), v in zip(axes, chosen, strict=True)}}
            limit = knobs.pop("default_limit", None)
            label = ",".join(f"{k}={v}" for (k, _), v in zip(axes, chosen, strict=True))
            yield DatasetConfig(name, knobs, tasks, label, limit)


def _axes(entry: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """Knobs given as a grid: a list where the default is none, or a list of lists where it is one."""
    for key, value in entry.items():
        if isinstance(value, list) and (
            not isinstance(defaults.get(key), list) or any(isinstance(v, list) for v in value)
        ):
            yield key, value


def _yaml_defaults(dataset: str) -> Mapping[str, Any]:
    return entries("dataset").get(dataset, {})


def _label(
    chain: Chain, settled: Mapping[str, Mapping[str, Any]], swept: Collection[tuple[str, str]], written: str
) -> str:
    """The chain's name with its budgets, its place in a grid, and what differs from the plain defaults."""
    changed, fixed = [], registry.settled(written)
    for stage in chain.stages:
        plain = registry.defaults(stage.id)
        for knob, value in settled[stage.id].items():
            unset = knob.startswith("_") or getattr(stage, knob, value) is None
            plainly = value == plain.get(knob) and knob not in BUDGETS and (stage.id, knob) not in swept
            if unset or plainly or (stage.id, knob) in fixed:
                continue
            changed.append(f"{knob}={','.join(map(str, value)) if isinstance(value, list) else value}")
    if chain.stages and chain.per != "kv_head":
        changed.append(f"per={chain.per}")
    return " ".join([registry.as_written(chain.name, written), *changed])


def plain(error: Exception) -> str:
    """Hydra's message without its internals."""
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    cause = error.__cause__
    if cause is not None and str(cause) and str(cause) not in str(error):
        lines += [line.rstrip() for line in str(cause).splitlines() if line.strip()]
    return "; ".join(line.strip() for line in lines if "HYDRA_FULL_ERROR" not in line and "reference_type" not in line)

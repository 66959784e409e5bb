"""Parse the command line into requests. This alone knows the shorthand, which golden tests pin.

method=full,snapkv+think kv_size=64,128   ->  methods full, snapkv+think; method.snapkv.kv_size [64, 128]
model=../my/checkpoint                    ->  model hf, model.path '../my/checkpoint'
dataset=tiny/needle,file path=x.jsonl     ->  tasks tiny/needle, file; dataset.file.path 'x.jsonl'
preset=think method=snapkv                ->  prompt think, preset's values below what is typed
method=h2o,h2o+think reference=h2o+think  ->  methods h2o, h2o+think; reference h2o+think, match bytes
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbench.base.conf import LISTED, entries, top_level, whole_config
from kvbench.base.errors import UsageError, unknown
from kvbench.methods.core import registry
from kvbench.plan import keys, presets

GROUPS = {"model": "tiny", "method": "snapkv", "dataset": "tiny", "prompt": "plain", "logger": "wandb"}
"""The config groups that a command line chooses from, each with an example."""
MODEL_FACTS = ("name", "path", "verified", "prompt_limits", "prompt_templates", "shape", "architecture", "fetch")
MAX_SHARDS = 4096  # each is a job of its own
MOST_DIGITS = 400  # longer ones are texts: Python's floats end before
WHOLE = re.compile(r"[+-]?\d+(_\d+)*")
REAL = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?")
NAMED = {"null": None, "true": True, "false": False, "inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}


@dataclass(frozen=True)
class RunRequest:
    """One run as it was asked for, before conf/ supplies the rest.

    words: the arguments of this run alone.
    groups: the entries of conf/ chosen for model, prompt and logger.
    methods, tasks: as typed; empty if none were typed.
    knobs: values of the methods' knobs by key (``kv_size``, ``method.snapkv.window``).
    values: all other values by full key (``limit``, ``model.dtype``).
    """

    words: tuple[str, ...]
    groups: Mapping[str, str] = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    knobs: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    preset: str | None = None


@dataclass(frozen=True)
class Command:
    """A parsed command line: one request per model.

    Under -m, ``sweep`` holds the Hydra overrides that cut the run into shards and set up the launcher.
    """

    runs: tuple[RunRequest, ...]
    sweep: tuple[str, ...] = ()


def read(arguments: Sequence[str], multirun: bool = False) -> Command:
    """Return the command that ``key=value`` arguments ask for. Raises UsageError for one that is not allowed."""
    texts = keys.pairs(arguments)
    empty = next((k for k, v in texts.items() if k in GROUPS and not v), None)
    if empty is not None:
        raise UsageError(f"{empty}= is empty: name one, as in {empty}={GROUPS[empty]}")
    methods = split_list(texts["method"]) if "method" in texts else whole_config()["chains"]
    tasks = split_list(texts["dataset"]) if "dataset" in texts else whole_config()["tasks"]
    datasets = _dataset_names(tasks)
    groups = {}
    for group, kind in (("prompt", "prompt policy"), ("logger", "logger")):
        if group in texts:
            if texts[group] not in entries(group):
                raise unknown(kind, texts[group], entries(group))
            groups[group] = texts[group]
    knobs: dict[str, Any] = {}
    values: dict[str, Any] = {}
    overrides: list[str] = []
    for key, value in texts.items():
        if key in GROUPS or key in ("preset", "match") or (multirun and key in ("shard", "shards")):
            continue
        if key.startswith(("hydra.", "hydra/", "+hydra.", "++hydra.")):
            overrides.append(_launcher_override(key, value))
        else:
            for full_key, read_value in _parse_argument(key, value, methods, datasets).items():
                (knobs if full_key.startswith("method.") else values)[full_key.removeprefix("method.*.")] = read_value
    models = split_list(texts.get("model", "tiny"))
    sweep = _shard_overrides(texts) if multirun and {"shard", "shards"} & texts.keys() else []
    if multirun and not sweep:
        raise UsageError("-m sweeps shards: give shard=0,1,2,3 or shards=4 (other comma lists are grids without -m)")
    if multirun and len(models) > 1:
        raise UsageError(f"-m with {len(models)} models: run one model at a time, or leave out -m")
    if overrides and not multirun:
        raise UsageError(f"{overrides[0]} sets up a launcher and needs -m, as in: -m shard=0,1 {overrides[0]}")
    preset = texts.get("preset")
    left_out = ("model", "shard", "shards") if sweep else ("model",)
    words = [f"{k}={v}" for k, v in texts.items() if k not in left_out and "hydra" not in k]
    requests = []
    for model in models:
        # a name that is no entry of conf/model is a checkpoint folder or a hub id
        is_entry = model in entries("model")
        preset_values = presets.values(preset, model) if preset is not None else {}
        prompt = {"prompt": preset_values["prompt"]} if "prompt" in preset_values else {}
        request = RunRequest(
            words=(*([f"model={model}"] if "model" in texts else ()), *words),
            groups={"model": model if is_entry else "hf", **prompt, **groups},
            methods=tuple(methods if "method" in texts else ()),
            tasks=tuple(tasks if "dataset" in texts else ()),
            knobs=knobs,
            values=({} if is_entry else {"model.path": model}) | values | _matching_kind(texts, preset_values),
            preset=preset,
        )
        requests.append(request)
    return Command(tuple(requests), (*sweep, *overrides))


def split_list(value: str) -> list[str]:
    """Return the parts of a text between the commas outside brackets and quotes: ``[0,1],[2]`` has two parts."""
    parts, depth, quote, start = [], 0, "", 0
    for i, ch in enumerate(value):
        if quote:
            quote = "" if ch == quote else quote
        elif ch in "'\"":
            quote = ch
        elif ch in "[{(":
            depth += 1
        elif ch in "]})":
            depth -= 1
        elif ch == "," and depth == 0:
            parts.append(value[start:i].strip())
            start = i + 1
    return [*parts, value[start:].strip()]


def value_of(text: str) -> Any:
    """Return the value that a text stands for: None, a bool, a number, a list, a mapping, or else the text itself."""
    if text.lower() in NAMED:
        return NAMED[text.lower()]
    if WHOLE.fullmatch(text) and len(text) < MOST_DIGITS:
        return int(text)
    if REAL.fullmatch(text):
        return float(text)
    if text[:1] + text[-1:] in ("''", '""') and len(text) > 1:
        return text[1:-1].replace("\\" + text[0], text[0])
    inner = split_list(text[1:-1]) if text[1:-1].strip() else []
    if text[:1] + text[-1:] == "[]":
        return [value_of(part) for part in inner]
    if text[:1] + text[-1:] == "{}" and all(":" in part for part in inner):
        return {value_of(k.strip()): value_of(v.strip()) for k, _, v in (part.partition(":") for part in inner)}
    return text


def _dataset_names(tasks: Sequence[str]) -> list[str]:
    """Return the dataset of each task (``tiny`` of ``tiny/needle``), once. Raises UsageError for an unknown one."""
    cut_off = next((t for t in tasks if t.endswith("/") or t.startswith("/")), None)
    if cut_off is not None:
        name = cut_off.strip("/").partition("/")[0]
        raise UsageError(
            f"dataset={cut_off} names no task: write {name if name in entries('dataset') else 'tiny'} for a whole "
            "dataset, or a task of it, as tiny/needle (python -m kvbench list datasets)"
        )
    names = list(dict.fromkeys(t.partition("/")[0] for t in tasks))
    for name in names:
        if name not in entries("dataset"):
            raise unknown("dataset", name, entries("dataset"), "A file of your own: dataset=file path=prompts.jsonl")
    return names


def _matching_kind(texts: Mapping[str, str], preset: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"match": kind of equal memory}, or {} if none is asked for.

    The kind is the one typed. With match=true, or reference= alone, it is the preset's, or else bytes.
    """
    kind = texts.get("match", "true" if "reference" in texts else "null")
    if kind in ("null", "false"):
        return {}
    ratio = next((k for k in texts if k.rpartition(".")[2] == "kv_ratio"), None)
    if ratio is not None:
        raise UsageError(
            f"{ratio}={texts[ratio]} is not possible with match={kind}: a fraction of each prompt is no fixed number "
            "of bytes. Give the reference a kv_size, as in kv_size=128; that of the others is found"
        )
    return {"match": preset.get("match", "bytes") if kind == "true" else value_of(kind)}


def _shard_overrides(texts: Mapping[str, str]) -> list[str]:
    """Return the Hydra overrides that sweep all shards: shard=0,1,2,3 and shards=4. Users type one of them or both."""
    count = keys.whole("shards", 1).value(texts)
    if count is not None and count > MAX_SHARDS:
        raise UsageError(f"shards={count} is not possible: 1 to {MAX_SHARDS}")
    value = texts.get("shard", ",".join(map(str, range(count or 0))))
    parts = split_list(value)
    consecutive = all(p.isdigit() for p in parts) and sorted(map(int, parts)) == list(range(len(parts)))
    if not consecutive or count not in (None, len(parts)):
        of = f" of shards={count}" if count else ""
        raise UsageError(f"shard={value}{of} is not possible: all shards from 0 on, as in -m shard=0,1,2,3")
    return [f"shard={','.join(parts)}", f"shards={len(parts)}"]


def _launcher_override(key: str, value: str) -> str:
    """Return a launcher's option as a Hydra override, with ``++`` since its schema lists only some of the options."""
    plain_key = key.lstrip("+")
    return f"++{plain_key}={value}" if plain_key.startswith("hydra.launcher.") else f"{key}={value}"


def _parse_argument(key: str, value: str, methods: Sequence[str], datasets: Sequence[str]) -> dict[str, Any]:
    """Return one ``key=value`` argument as {full key: value}. Raises UsageError if it is not allowed.

    A knob typed without its owner gets the owner's key. A knob of methods gets the key ``method.*.window``, which
    stands for all methods that have it.
    """
    plain_key = key.lstrip("+")
    if "${" in value:
        raise UsageError(f"{key}={value} is not possible: write the value itself, interpolations are not read here")
    if any(value.count(a) != value.count(b) for a, b in ("[]", "{}", "()")):
        raise UsageError(f"{key}={value} is not possible: its brackets do not match")
    if plain_key == "shard" and len(split_list(value)) > 1:
        raise UsageError(f"shard={value} is a sweep: add -m, as in: run -m shard={value}")
    if plain_key in top_level():
        # per= alone may be swept
        if plain_key != "per" and len(split_list(value)) > 1:
            raise UsageError(f"{key}={value} is not possible: {plain_key} takes one value")
        return {plain_key: _read_grid(value, top_level()[plain_key])}
    if plain_key == "data.root":
        return {plain_key: _read_grid(value, None)}
    group, _, rest = plain_key.partition(".")
    if not rest:
        return _parse_plain_knob(plain_key, value, methods, datasets)
    if group in registry.available() or registry.of_kvpress(group):
        # snapkv.window is short for method.snapkv.window
        group, rest = "method", plain_key
    if group not in GROUPS:
        raise unknown("key", key, [*top_level(), "data.root", *(f"{g}.…" for g in GROUPS)])
    return _parse_full_key(group, rest, value, methods, datasets)


def _parse_full_key(
    group: str, rest: str, value: str, methods: Sequence[str], datasets: Sequence[str]
) -> dict[str, Any]:
    """Return {full key: value} for the key ``group.rest``. Raises UsageError for a key that this run does not have."""
    if group in LISTED:
        known = entries(group)[LISTED[group]]
        name, _, inner = rest.partition(".")
        if name not in known or (inner and not isinstance(known[name], dict)):
            raise unknown(f"knob of the {group}", rest, known)
        return {f"{group}.{rest}": _read_grid(value, known[name])}
    owner, _, knob = rest.partition(".")
    if not knob:
        raise UsageError(f"{group}.{rest}={value} names no knob: write {group}.{rest}.KNOB={value} (run --help {rest})")
    if group == "method":
        used = list(dict.fromkeys(s for m in methods for s in registry.split(m)))
        known = registry.defaults(owner)
    else:
        used, known = list(datasets), entries("dataset").get(owner, {})
    if owner not in used:
        raise UsageError(f"{group}.{rest}={value}: this run has no {group} {owner!r}; it has {', '.join(used)}")
    if knob not in known or knob.startswith("_"):
        raise unknown(f"knob of {group} {owner}", knob, (k for k in known if not k.startswith("_")))
    return {f"{group}.{owner}.{knob}": _read_grid(value, known[knob])}


def _parse_plain_knob(knob: str, value: str, methods: Sequence[str], datasets: Sequence[str]) -> dict[str, Any]:
    """Return {full key: value} for a knob typed without its owner, with one key for each owner of its group.

    Raises UsageError if no owner has the knob, or if owners in several groups have it.
    """
    stages = list(dict.fromkeys(s for m in methods for s in registry.split(m)))
    holders = {
        **{f"dataset.{d}": entries("dataset")[d] for d in datasets},
        "model": {k: v for k, v in entries("model")["hf"].items() if k not in MODEL_FACTS},
        "prompt": {k: v for k, v in entries("prompt")["plain"].items() if k != "name"},
        **{f"method.{s}": registry.defaults(s) for s in stages},
    }
    owners = [o for o, known in holders.items() if knob in known and not knob.startswith("_")]
    if len({o.partition(".")[0] for o in owners}) > 1:
        raise UsageError(f"{knob}={value} could mean {' or '.join(f'{o}.{knob}' for o in owners)}: write the full key")
    if not owners:
        if knob == "paper":
            name = value.partition("/")[0]
            raise UsageError(
                f"paper={value} is not a key here: `python -m kvbench table {name}/2` measures a table of the paper, "
                f"preset={name} sets what its tables were made with"
            )
        names = {k for known in holders.values() for k in known if not k.startswith("_")}
        chains = ", ".join("+".join(registry.split(m)) for m in methods)
        raise registry.unknown_knob(
            knob, value, {"preset", *GROUPS, *names, *top_level()}, f"No method of {chains} owns it."
        )
    # resolve decides which stages take a knob of methods
    prefixes = ["method.*"] if owners[0].startswith("method.") else owners
    return {f"{o}.{knob}": _read_grid(value, holders[owners[0]][knob]) for o in prefixes}


def _read_grid(value: str, default: Any) -> Any:
    """Return the value that a text stands for. A comma list is one value for a knob whose default is a list.

    For any other knob it is a grid: the list of the values to sweep.
    """
    parts = split_list(value)
    if isinstance(default, list):
        return value_of(value) if value.startswith("[") and len(parts) == 1 else [value_of(p) for p in parts]
    return [value_of(p) for p in parts] if len(parts) > 1 else value_of(value)

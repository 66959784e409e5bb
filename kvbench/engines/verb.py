"""``kvbench run engine=...``: measure rows of an engine, and print them beside the others on the same prompts."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from kvbench.base.errors import UsageError
from kvbench.base.visible import say
from kvbench.engines import divergence, llamacpp, table
from kvbench.engines.llamacpp import CacheType
from kvbench.engines.measure import measure
from kvbench.engines.rows import EngineRow, EngineRun, check_tasks
from kvbench.engines.server import Server
from kvbench.models.fetch import SCHEME, gguf_file
from kvbench.plan import config, run_plan
from kvbench.plan.keys import Key, check_choice, choice, parse_pairs, values, whole
from kvbench.plan.run_plan import RunPlan
from kvbench.plan.words import split_list
from kvbench.report import writers
from kvbench.tasks.encoding import encode_prompt

OPENAI, LLAMACPP = "openai", "llamacpp"
ENGINES = (OPENAI, LLAMACPP)
"""The values of engine=."""
KEYS = (
    Key("engine", None, partial(check_choice, "engine", ENGINES)),
    Key("url"),
    Key("served"),
    Key("label"),
    Key("baseline", ""),
    whole("parallel", 1, "4"),
    whole("timeout", 1, "600"),
    Key("gguf"),
    Key("cache_type"),
    Key("cache_type_k"),
    Key("cache_type_v"),
    choice("rotation", llamacpp.ROTATIONS),
    choice("kl", ("false", "true")),
)
"""The keys that only a run with an engine has."""
OF_SERVER = ("url", "served", "parallel", "timeout")
"""The keys that only engine=openai takes."""
OF_LLAMACPP = ("gguf", "cache_type", "cache_type_k", "cache_type_v", "rotation", "kl")
"""The keys that only engine=llamacpp takes."""
REFUSED = {
    "method": "an engine compresses its own cache. Leave it out, and name the row with label=",
    "preset": "presets set options of kvbench's methods. prompt= and max_length= choose the prompts",
    "match": "an engine's bytes are its own word",
    "reference": "an engine's bytes are its own word. baseline= names the row to compare with",
    "kl_mode": "engine=llamacpp kl=true reads every token through the cache",
    "min_new_tokens": "OpenAI's interface has no such option: an answer ends where the model ends it",
    "temperature": "answers of engines are greedy",
    "samples_per_prompt": "answers of engines are greedy",
    "logger": "rows of engines are not logged. kvbench export jsonl hands them on",
    "shard": "parallel= asks several prompts at once",
    "shards": "parallel= asks several prompts at once",
}
"""Keys of `run` that have no meaning with an engine, and why."""


def main(args: argparse.Namespace) -> int:
    """Measure the rows and print the table. Return exit status 1 if a task of a row failed, 130 after Ctrl-C."""
    options, cfg = read_request(args.overrides)
    # kl=true compares next-token distributions on given texts; otherwise the engine answers the prompts
    compares = options["kl"] == "true"
    plan = run_plan.prepare(cfg)
    if not compares:
        check_tasks(plan)
    run = _plan_rows(plan, options)
    if args.plan:
        for row in run.rows:
            for group in plan.groups:
                print(f"{row.label} on {group.column}: {len(run.left(group, row))} of {len(group.examples)} to do")
        return 0
    problems: list[str] = []
    try:
        if compares:
            divergence.measure(run, _exact_row(plan, options), quiet=args.json)
        else:
            problems = measure(run, quiet=args.json)
    except KeyboardInterrupt:
        command = shlex.join(["kvbench", "run", *args.overrides])
        say(f"interrupted. The answers so far are stored; to go on:\n  {command}")
        return 130
    if compares:
        _print_divergences(run, args)
    else:
        _print_answers(run, args)
    for problem in problems:
        say(problem)
    return int(bool(problems))


def read_request(overrides: Sequence[str]) -> tuple[dict[str, object], config.RunConfig]:
    """Return the values of KEYS, and the configuration of the run whose prompts the engine is asked.

    One of the overrides must be ``engine=``.

    Raises UsageError for a key that is missing, or that has no meaning with the engine.
    """
    texts = parse_pairs(overrides, example="engine=openai url=http://127.0.0.1:8000/v1 served=NAME")
    if "fidelity" in texts:
        # the name of kl= in earlier versions
        texts["kl"] = texts.pop("fidelity")
    engine_texts = {key.name: texts.pop(key.name) for key in KEYS if key.name in texts}
    for key, reason in REFUSED.items():
        if key in texts:
            raise UsageError(f"{key}= is not possible with engine={engine_texts['engine']}: {reason}")
    options = values(KEYS, engine_texts)
    of_others: Sequence[str] = OF_SERVER if options["engine"] == LLAMACPP else OF_LLAMACPP
    for key in of_others:
        if key in engine_texts:
            reason = ": a server gives no distributions. engine=llamacpp kl=true compares them" if key == "kl" else ""
            raise UsageError(f"{key}= is not a key of engine={options['engine']}{reason}")
    if "model" not in texts:
        raise UsageError("model= is missing: the tokenizer of that model counts and cuts the prompts")
    settings = texts | {"method": "full"}
    if options["kl"] == "true":
        settings["kl_mode"] = "through_cache"
    elif "query_aware" not in settings:
        # some tasks withhold their question unless told otherwise, and no engine takes it apart
        settings["query_aware"] = "true"
    return options, config.configure(settings)


def _plan_rows(plan: RunPlan, options: Mapping[str, object]) -> EngineRun:
    """Return the engine's rows that the options name, on a plan's prompts."""
    baseline = str(options["baseline"])
    if options["engine"] == OPENAI:
        # prompt=chat asks for the server's own template; other policies are rendered here, as for kvbench's own rows
        chat = plan.cfg.prompt.name == "chat"
        row = _server_row(options)
        return EngineRun(run=plan, rows=(row,), chat=chat, baseline=baseline, parallel=int(str(options["parallel"])))
    rows = tuple(_llamacpp_row(plan, options, cache_type) for cache_type in _cache_types(options))
    return EngineRun(run=plan, rows=rows, baseline=baseline)


def _server_row(options: Mapping[str, object]) -> EngineRow:
    """Return the row of a server. Raises UsageError for a missing key, and for a url that is not an http address."""
    for key, meaning in (("url", "the server's address"), ("served", "the name of the model that it serves")):
        if not options[key]:
            raise UsageError(f"{key}= is missing: {meaning}, as in url=http://127.0.0.1:8000/v1 served=NAME")
    url, served = str(options["url"]), str(options["served"])
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"url={url} is no address: it begins with http:// or https://")
    try:
        is_address = bool(urlsplit(url).hostname) and urlsplit(url).port != 0
    except ValueError:
        # the port is no number
        is_address = False
    if not is_address:
        raise UsageError(f"url={url} is no address: give it as http://HOST:PORT/v1")

    def connect() -> Server:
        server = Server(url, served, timeout_s=float(str(options["timeout"])))
        server.check()
        return server

    label = str(options["label"] or served)
    return EngineRow(label=label, identity={"name": OPENAI, "served": served}, open=connect)


def _cache_types(options: Mapping[str, object]) -> Sequence[CacheType]:
    """Return llama.cpp's cache types that the options name, one for each row."""
    rotation = str(options["rotation"])
    k, v = options["cache_type_k"], options["cache_type_v"]
    if k or v:
        if options["cache_type"]:
            raise UsageError("cache_type= names both types: leave it out beside cache_type_k= and cache_type_v=")
        return [CacheType(k=str(k or llamacpp.EXACT), v=str(v or llamacpp.EXACT), rotation=rotation)]
    names = split_list(str(options["cache_type"] or llamacpp.EXACT))
    return [CacheType(k=name, v=name, rotation=rotation) for name in names]


def _llamacpp_row(plan: RunPlan, options: Mapping[str, object], cache_type: CacheType) -> EngineRow:
    """Return the row of llama.cpp with one type of cache.

    Raises UsageError if there is no GGUF, and if one label= is to name several rows.
    """
    gguf = _path_of_gguf(plan, options)
    every_logit = options["kl"] == "true"
    label = str(options["label"] or cache_type.label)
    if options["label"] and "," in str(options["cache_type"] or ""):
        raise UsageError(f"label={label} is not possible for several cache types: each row is named by its own")
    threads = plan.cfg.threads

    def start() -> llamacpp.LlamaCpp:
        return llamacpp.LlamaCpp(gguf, cache_type, _longest_tokens(plan), threads, every_logit)

    return EngineRow(
        label=label,
        identity=llamacpp.identity(llamacpp.fingerprint(gguf), cache_type),
        open=start,
    )


def _longest_tokens(plan: RunPlan) -> int:
    """Return the number of tokens that a cache must hold: those of the longest text, or longest prompt with answer."""
    # 1 for a plan without examples: a cache cannot be empty
    lengths = [1]
    for group in plan.groups:
        for example in group.examples:
            if example.scored is not None:
                lengths.append(len(example.scored.ids))
            else:
                encoded = encode_prompt(plan.tokenizer, example, group.task, plan.cfg.prompt, plan.context)
                lengths.append(len(encoded) + example.max_new_tokens)
    return max(lengths)


def _exact_row(plan: RunPlan, options: Mapping[str, object]) -> EngineRow:
    """Return the row of llama.cpp's f16 cache, with which the other rows are compared."""
    exact = CacheType(k=llamacpp.EXACT, v=llamacpp.EXACT)
    return _llamacpp_row(plan, dict(options) | {"label": None, "cache_type": None}, exact)


def _path_of_gguf(plan: RunPlan, options: Mapping[str, object]) -> Path:
    """Return the path of the GGUF that the user named, or else of the GGUF that a fetched model was converted from.

    Raises UsageError if there is no such file.
    """
    name = plan.cfg.model.path
    if options["gguf"]:
        path = Path(str(options["gguf"])).expanduser()
        if not path.is_file():
            raise UsageError(f"gguf={path}: there is no such file")
        return path
    if not name.startswith(SCHEME):
        raise UsageError(f"gguf= is missing: the file of the model {plan.cfg.model_name} for llama.cpp")
    path = gguf_file(name.removeprefix(SCHEME))
    if not path.is_file():
        raise UsageError(f"{path} is not here: kvbench model fetch {plan.cfg.model_name} keeps it there")
    return path


def _print_answers(run: EngineRun, args: argparse.Namespace) -> None:
    """Print the table of all rows on these prompts."""
    answered = table.build_report(run)
    if args.json:
        print(json.dumps(asdict(answered), indent=1, ensure_ascii=False))
        return
    print(writers.compose(table.tables(answered), table.notes(answered), args.format), end="")


def _print_divergences(run: EngineRun, args: argparse.Namespace) -> None:
    """Print the table of divergences."""
    by_label = divergence.summarise_rows(run)
    if args.json:
        print(json.dumps({label: asdict(summary) for label, summary in by_label.items()}, indent=1, ensure_ascii=False))
        return
    print(writers.compose([divergence.table(by_label)], divergence.notes(by_label), args.format), end="")

"""``kvbench run engine=...``: measure rows of an engine, and print them beside the others on the same prompts."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
from kvbench.models.fetch import gguf_file, models_folder
from kvbench.plan import config, run_plan
from kvbench.plan.advice import about_left_out, about_prompts
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


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The values of KEYS. A key that the user did not give has its default, or None if it has no default.

    engine: one of ENGINES.
    url, served: the server's address, and the name of the model that it serves.
    label: the row's name in tables; None for a name that the engine implies.
    baseline: the label of the row that others are compared with; '' for the row that was measured first.
    parallel: how many prompts a server is asked at once.
    timeout: the seconds after which a question to a server counts as failed.
    gguf: the path of the model's file for llama.cpp.
    cache_type: the types of llama.cpp's caches, joined by commas, each for keys and values.
    cache_type_k, cache_type_v: the type of keys and the type of values of a single row, in place of ``cache_type``.
    rotation: one of ``llamacpp.ROTATIONS``.
    kl: "true" to compare distributions of the next token, "false" to answer prompts.
    """

    engine: str
    url: str | None
    served: str | None
    label: str | None
    baseline: str
    parallel: int
    timeout: int
    gguf: str | None
    cache_type: str | None
    cache_type_k: str | None
    cache_type_v: str | None
    rotation: str
    kl: str

    @property
    def compares(self) -> bool:
        """True if the run compares distributions of the next token on given texts, and answers no prompts."""
        return self.kl == "true"


def main(args: argparse.Namespace) -> int:
    """Measure the rows and print the table. Return exit status 1 if a task of a row failed, 130 after Ctrl-C."""
    options, cfg = read_request(args.overrides)
    plan = run_plan.prepare(cfg)
    if not options.compares:
        check_tasks(plan)
    tasks = [group.task for group in plan.groups]
    for note in about_left_out(tasks) + about_prompts(plan.cfg.prompt, tasks, plan.tokenizer):
        say(note)
    run = _plan_rows(plan, options)
    if args.plan:
        _print_plan(run)
        return 0
    problems: list[str] = []
    try:
        if options.compares:
            exact = CacheType(k=llamacpp.EXACT, v=llamacpp.EXACT)
            # the user's label and cache types are those of the other rows
            exact_row = _build_llamacpp_row(plan, replace(options, label=None, cache_type=None), exact)
            divergence.measure(run, exact_row, quiet=args.json)
        else:
            problems = measure(run, quiet=args.json)
    except KeyboardInterrupt:
        command = shlex.join(["kvbench", "run", *args.overrides])
        say(f"interrupted. The answers so far are stored; to go on:\n  {command}")
        return 130
    if options.compares:
        _print_divergences(run, args)
    else:
        _print_answers(run, args)
    for problem in problems:
        say(problem)
    return 1 if problems else 0


def read_request(overrides: Sequence[str]) -> tuple[EngineOptions, config.RunConfig]:
    """Return the engine's options, and the configuration of the run whose prompts the engine is asked.

    Raises UsageError for a key that is missing, or that has no meaning with the engine.

    overrides: the words ``KEY=VALUE`` of the command line. One of them must be ``engine=``.
    """
    texts = parse_pairs(overrides, example="engine=openai url=http://127.0.0.1:8000/v1 served=NAME")
    if "fidelity" in texts:
        # the name of kl= in earlier versions
        texts["kl"] = texts.pop("fidelity")
    # the other keys are those of any run
    engine_texts = {key.name: texts.pop(key.name) for key in KEYS if key.name in texts}
    for key, reason in REFUSED.items():
        if key in texts:
            raise UsageError(f"{key}= is not possible with engine={engine_texts['engine']}: {reason}")
    options = _read_options(engine_texts)
    if "model" not in texts:
        raise UsageError("model= is missing: the tokenizer of that model counts and cuts the prompts")
    # the plan of the full cache has the engine's prompts
    settings = texts | {"method": "full"}
    if options.compares:
        settings["kl_mode"] = "through_cache"
    elif "query_aware" not in settings:
        # some tasks by default withhold the question until the context is compressed, which no engine does
        settings["query_aware"] = "true"
    return options, config.configure(settings)


def _read_options(engine_texts: Mapping[str, str]) -> EngineOptions:
    """Return the engine's options from {key: text as the user typed it}. The key ``engine`` must be among them.

    Raises UsageError for a value that is not allowed, and for a key that only another engine takes.
    """
    options = EngineOptions(**values(KEYS, engine_texts))
    keys_of_others: Sequence[str] = OF_SERVER if options.engine == LLAMACPP else OF_LLAMACPP
    for key in keys_of_others:
        if key in engine_texts:
            reason = ""
            if key == "kl":
                reason = ": a server gives no distributions. engine=llamacpp kl=true compares them"
            raise UsageError(f"{key}= is not a key of engine={options.engine}{reason}")
    return options


def _plan_rows(plan: RunPlan, options: EngineOptions) -> EngineRun:
    """Return the engine's rows that the options name, on a plan's prompts."""
    if options.engine == OPENAI:
        # prompt=chat asks for the server's own template; other policies are rendered here, as for kvbench's own rows
        chat = plan.cfg.prompt.name == "chat"
        row = _build_server_row(options)
        return EngineRun(plan=plan, rows=(row,), chat=chat, baseline=options.baseline, parallel=options.parallel)
    rows = tuple(_build_llamacpp_row(plan, options, cache_type) for cache_type in _list_cache_types(options))
    return EngineRun(plan=plan, rows=rows, baseline=options.baseline)


def _build_server_row(options: EngineOptions) -> EngineRow:
    """Return the row of a server. Raises UsageError for a missing key, and for a url that is not an http address."""
    url, served = options.url, options.served
    example = "as in url=http://127.0.0.1:8000/v1 served=NAME"
    if not url:
        raise UsageError(f"url= is missing: the server's address, {example}")
    if not served:
        raise UsageError(f"served= is missing: the name of the model that it serves, {example}")
    _check_url(url)

    def connect() -> Server:
        server = Server(url, served, timeout_s=float(options.timeout))
        server.check()
        return server

    return EngineRow(label=options.label or served, identity={"name": OPENAI, "served": served}, open=connect)


def _check_url(url: str) -> None:
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"url={url} is no address: it begins with http:// or https://")
    try:
        is_address = bool(urlsplit(url).hostname) and urlsplit(url).port != 0
    except ValueError:
        # the port is no number
        is_address = False
    if not is_address:
        raise UsageError(f"url={url} is no address: give it as http://HOST:PORT/v1")


def _list_cache_types(options: EngineOptions) -> Sequence[CacheType]:
    """Return llama.cpp's cache types that the options name, one for each row.

    Raises UsageError if ``cache_type=`` stands beside the keys of keys or values, and for a type of another name.
    """
    k, v = options.cache_type_k, options.cache_type_v
    if k or v:
        if options.cache_type:
            raise UsageError("cache_type= names both types: leave it out beside cache_type_k= and cache_type_v=")
        return [CacheType(k=k or llamacpp.EXACT, v=v or llamacpp.EXACT, rotation=options.rotation)]
    names = split_list(options.cache_type or llamacpp.EXACT)
    return [CacheType(k=name, v=name, rotation=options.rotation) for name in names]


def _build_llamacpp_row(plan: RunPlan, options: EngineOptions, cache_type: CacheType) -> EngineRow:
    """Return the row of llama.cpp with one type of cache.

    Raises UsageError if there is no GGUF, and if one label= is to name several rows.
    """
    gguf = _find_gguf(plan, options)
    label = options.label or cache_type.label
    if options.label and "," in (options.cache_type or ""):
        raise UsageError(f"label={label} is not possible for several cache types: each row is named by its own")

    def start() -> llamacpp.LlamaCpp:
        return llamacpp.LlamaCpp(gguf, cache_type, _count_longest(plan), plan.cfg.threads, every_logit=options.compares)

    identity = llamacpp.build_identity(llamacpp.fingerprint(gguf), cache_type)
    return EngineRow(label=label, identity=identity, open=start)


def _count_longest(plan: RunPlan) -> int:
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


def _find_gguf(plan: RunPlan, options: EngineOptions) -> Path:
    """Return the path of the GGUF that the user named, or else of the GGUF that a fetched model was converted from.

    Raises UsageError if there is no such file.
    """
    if options.gguf:
        path = Path(options.gguf).expanduser()
        if not path.is_file():
            raise UsageError(f"gguf={path}: there is no such file")
        return path
    # only models that kvbench itself has fetched are kept with a GGUF
    folder = Path(plan.source.location)
    if folder.parent != models_folder():
        raise UsageError(f"gguf= is missing: the file of the model {plan.cfg.model_name} for llama.cpp")
    path = gguf_file(folder.name)
    if not path.is_file():
        raise UsageError(f"{path} is not here: kvbench model fetch {plan.cfg.model_name} keeps it there")
    return path


def _print_plan(run: EngineRun) -> None:
    for row in run.rows:
        for group in run.plan.groups:
            unanswered = run.find_unanswered(group, row)
            print(f"{row.label} on {group.column}: {len(unanswered)} of {len(group.examples)} to do")


def _print_answers(run: EngineRun, args: argparse.Namespace) -> None:
    """Print the table of all rows on these prompts, or with --json the report as JSON."""
    answered = table.build_report(run)
    if args.json:
        print(json.dumps(asdict(answered), indent=1, ensure_ascii=False))
        return
    print(writers.compose(table.build_tables(answered), table.build_notes(answered), args.format), end="")


def _print_divergences(run: EngineRun, args: argparse.Namespace) -> None:
    """Print the table of divergences, or with --json the summaries as JSON."""
    by_label = divergence.summarise_rows(run)
    if args.json:
        print(json.dumps({label: asdict(summary) for label, summary in by_label.items()}, indent=1, ensure_ascii=False))
        return
    print(writers.compose([divergence.build_table(by_label)], divergence.build_notes(by_label), args.format), end="")

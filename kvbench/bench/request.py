"""Read and measure the requests of ``bench time``: seconds, tokens a second and peaks, end to end."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvbench.base.conf import top_level
from kvbench.base.errors import UsageError, unknown
from kvbench.base.visible import say
from kvbench.bench import architecture, environment, records, timing
from kvbench.bench.peers import PEERS, Peer, find_peer
from kvbench.bench.records import NOT_RUN, Row
from kvbench.bench.timing import Entrant, Settings, find_obstacle, is_finished, make_row_key
from kvbench.bench.workload import Workload, parse_workload
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.resolve import ChainConfig
from kvbench.models import load
from kvbench.plan import config
from kvbench.plan.config import RunConfig
from kvbench.plan.keys import Key, check_choice, choice, flag, optional, parse_pairs, values, whole
from kvbench.plan.words import RunRequest, read, split_list
from kvbench.report import writers
from kvbench.report.table import Table


def _read_gib(text: str) -> float:
    """Return a number above 0 that a text states. Raises ValueError for any other text."""
    if not 0 < float(text) < float("inf"):
        raise ValueError(text)
    return float(text)


def _read_file_name(text: str) -> str:
    """Return the text if it can name a visible file in a folder. Raises ValueError if it cannot."""
    if not text or "/" in text or text.startswith("."):
        raise ValueError(text)
    return text


GROUPS: dict[str, list[str]] = {"all": list(PEERS), "none": []}
"""The words that name several peers."""
STEP_KINDS = ("plain", "graph")
"""The kinds of decode steps: steps that run one by one, or one recorded step that is replayed."""


def _read_workloads(text: str) -> list[Workload]:
    return [parse_workload(word) for word in split_list(text)]


def _read_steps(text: str) -> list[str]:
    return [check_choice("value of step", STEP_KINDS, word) for word in split_list(text)]


def _read_peers(text: str) -> list[Peer]:
    """Return the peers that a text names: a word of GROUPS, or names separated by commas."""
    names = GROUPS.get(text)
    if names is None:
        names = split_list(text)
    return [find_peer(name) for name in names]


OWN = {
    key.name: key
    for key in (
        Key("workloads", "128+16x4", _read_workloads),
        whole("repeats", 1, "3"),
        whole("warmup", 0, "1"),
        choice("generate", ("full", "sampled")),
        whole("steps", 1, "64"),
        flag("check"),
        Key("step", "plain", _read_steps),
        Key("peers", "dynamic,static", _read_peers),
        Key("over", records.FULL),
        optional(Key("memory_limit", None, _read_gib, "GiB, a number above 0, as in memory_limit=40")),
        optional(whole("layers", 1)),
        whole("seed", 0, "0"),
        Key("name", "time", _read_file_name, "the name of a file in folder=, as in name=think"),
        Key("folder", "results/bench", Path),
        flag("again"),
    )
}
"""The keys that only ``bench time`` has, by name."""
OTHERS = ("device", "per", "match", "reference", "threads")
"""The keys of runs that ``bench time`` takes, too, besides models, methods and their knobs."""
METHODS = "full,snapkv,kivi"
"""The methods that are timed if none is named."""
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
"""The full names of dtypes by their short names."""


@dataclass(frozen=True)
class TimeOptions:
    """The values of the keys in OWN, without those of the file. The help of ``bench time`` explains them in full.

    workloads: the workloads to time.
    repeats: how many passes of each entrant are timed.
    warmup: how many passes of each entrant run before, without being timed.
    generate: ``full`` to run all steps, or ``sampled`` to run stretches of them at several cache lengths.
    steps: the number of steps in a stretch.
    check: whether one full generation runs beside sampled ones.
    step: the kinds of decode steps, of STEP_KINDS.
    peers: the peers to time beside kvbench's methods.
    over: the name of the entrant to which ratios are made.
    memory_limit: the most memory in GiB; None for no limit.
    layers: how many layers the model is cut to; None for all.
    seed: the seed of the random prompts and of the order of entrants.
    again: whether stored rows are measured again.
    """

    workloads: list[Workload]
    repeats: int
    warmup: int
    generate: str
    steps: int
    check: bool
    step: list[str]
    peers: list[Peer]
    over: str
    memory_limit: float | None
    layers: int | None
    seed: int
    again: bool


@dataclass(frozen=True)
class RequestedRow:
    """A requested row: an entrant on a workload, with the key under which it is stored."""

    workload: Workload
    entrant: Entrant
    key: str


def measure_rows(words: Sequence[str], plan: bool = False, beside: bool = True) -> tuple[list[Row], Path]:
    """Measure the missing rows that ``bench time``'s words ask for. Return (all rows asked for, the file with them).

    With ``plan``, only print the rows that would be measured. With ``beside``, each older row comes with the base rows
    of its own session: the full cache's, and that of ``over=``.
    """
    # words are of two kinds: keys of OWN, and the words of a run that name models and methods
    words = [_replace_results(word) for word in words]
    arguments = parse_pairs(words)
    refuse_keys("time", arguments, OTHERS, ("model", "method", "preset", "dtype", "weights", *OTHERS, *OWN))
    own_values = values(OWN.values(), arguments)
    folder, name = own_values.pop("folder"), own_values.pop("name")
    options = TimeOptions(**own_values)
    if not plan:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"folder={folder} cannot be made: {error.strerror}") from None
    path = folder / f"{name}.jsonl"
    rows = []
    for request in read(_select_run_words(words, arguments)):
        rows += _measure_model(request, options, path, plan=plan, older=beside)
    return rows, path


def _select_run_words(words: Sequence[str], arguments: Collection[str]) -> list[str]:
    """Return the words of the run that names the models and methods to time, with defaults for missing ones.

    arguments: the keys of all ``words``.
    """
    run_words = []
    for word in words:
        key, _, _ = word.partition("=")
        if key not in OWN:
            run_words.append(with_full_dtype(word))
    if "method" not in arguments:
        run_words.append(f"method={METHODS}")
    # a step's time does not depend on the values of weights, so none need be downloaded
    if "weights" not in arguments and "model.weights" not in arguments:
        run_words.append("weights=random")
    return run_words


def _replace_results(word: str) -> str:
    """Return the word, with ``results=FOLDER`` replaced by the ``folder=`` of benchmarks below it.

    ``results=`` is the key by which all verbs name the folder of results.
    """
    if word.startswith("results="):
        return f"folder={word.removeprefix('results=')}/bench"
    return word


def _measure_model(request: RunRequest, options: TimeOptions, path: Path, plan: bool, older: bool) -> list[Row]:
    """Measure the missing rows of one model and return all rows asked for.

    With ``plan``, only print the rows that would be measured, and return [].
    With ``older``, rows of earlier sessions come with the base rows of their sessions.
    """
    cfg = config.parse(request)
    if cfg.threads is not None:
        torch.set_num_threads(cfg.threads)
    device = load.resolve_device(cfg.device)
    entrants = _list_entrants(cfg, options.peers, options.step)
    check_choice("value of over", [entrant.name for entrant in entrants], options.over)
    base_names = [records.FULL, options.over]
    settings = _collect_settings(cfg, request.words, options, device)
    requested = []
    for workload in options.workloads:
        for entrant in entrants:
            requested.append(RequestedRow(workload, entrant, make_row_key(entrant, workload, settings)))
    stored: dict[str, Row] = {}
    if not options.again:
        stored = records.index_latest(records.read_rows(path))
    finished = set()
    for target in requested:
        if is_finished(stored.get(target.key), target.entrant, target.workload, settings):
            finished.add(target.key)
    if plan:
        measured = {key for key in finished if stored[key]["status"] != NOT_RUN}
        _print_plan(requested, measured, settings, path)
        return []
    missing = [target for target in requested if target.key not in finished]
    if missing:
        say(f"building {cfg.model.name}")
        model = architecture.build_model(cfg.model, device, settings.layers)
        for workload in options.workloads:
            missing_names = [target.entrant.name for target in missing if target.workload == workload]
            if missing_names:
                # base rows are measured again, since ratios compare only rows of one session
                names = missing_names + base_names
                chosen = [entrant for entrant in entrants if entrant.name in names]
                new_rows = timing.measure_entrants(model, chosen, workload, settings)
                keys = {entrant.name: make_row_key(entrant, workload, settings) for entrant in chosen}
                # append after each workload, so that an interruption loses one at most
                facts = {"workload": workload.name}
                records.append_rows(path, [row | {"key": keys[row["method"]]} | facts for row in new_rows])
    # read the file again, with the rows just appended
    all_rows = records.read_rows(path)
    latest = records.index_latest(all_rows)
    rows = [latest[target.key] for target in requested if target.key in latest]
    if older:
        rows += _list_older_base_rows(rows, all_rows, base_names)
    return rows


def _list_older_base_rows(rows: Sequence[Row], all_rows: Sequence[Row], base_names: Collection[str]) -> list[Row]:
    """Return the base rows among ``all_rows`` that are of the sessions of ``rows``, but are not in ``rows``.

    base_names: the entrants to which ratios are made.
    """
    present = {(row["session"], row["key"]) for row in rows}
    sessions = {row["session"] for row in rows}
    older = []
    for row in all_rows:
        is_base = row["session"] in sessions and row["method"] in base_names
        if is_base and (row["session"], row["key"]) not in present:
            older.append(row)
    return older


def _list_entrants(cfg: RunConfig, peers: Sequence[Peer], step_kinds: Sequence[str]) -> list[Entrant]:
    """Return the entrants to time: the full cache, then the methods, with each kind of step, then the peers.

    The full cache by plain steps is always among them: all ratios need it.

    step_kinds: the kinds of decode steps, of STEP_KINDS.
    """
    # a chain without stages is the full cache, which goes first whether it is asked for or not
    full = ChainConfig(Chain(), "full")
    chains = [full]
    chains += [c for c in cfg.chains if c.chain.stages]
    entrants = []
    if "plain" not in step_kinds:
        entrants.append(Entrant(full.label, full))
    # time a kind that is named twice only once
    for kind in dict.fromkeys(step_kinds):
        for c in chains:
            if kind == "plain":
                entrants.append(Entrant(c.label, c))
            else:
                entrants.append(Entrant(f"{c.label} step=graph", c, graph=True))
    entrants += [Entrant(peer.name, peer=peer) for peer in peers]
    return entrants


def _collect_settings(cfg: RunConfig, overrides: Sequence[str], options: TimeOptions, device: torch.device) -> Settings:
    """Return the settings that all rows of one ``bench time`` share, with facts about the model and the machine.

    overrides: the arguments of the run that defines the chains.
    """
    dtype = load.resolve_dtype(cfg.model, device, architecture.resolve_model_config(cfg.model))
    facts: dict[str, object] = {
        "model": cfg.model_name,
        "weights": cfg.model.weights,
        "dtype": str(dtype).removeprefix("torch."),
    }
    facts |= environment.read_machine_facts(device)
    return Settings(
        tuple(overrides),
        facts,
        repeats=options.repeats,
        warmup=options.warmup,
        sample=options.steps if options.generate == "sampled" else None,
        check=options.check,
        seed=options.seed,
        limit=options.memory_limit,
        layers=options.layers,
    )


def _print_plan(requested: Sequence[RequestedRow], measured: Collection[str], settings: Settings, path: Path) -> None:
    """Print each requested row and whether it is stored, would be measured or cannot run.

    measured: the keys of the stored rows.
    """
    rows = []
    for target in requested:
        missing = find_obstacle(target.entrant, target.workload)
        # a stored row stays, even if its peer is missing now
        if target.key in measured:
            state = "there"
        elif missing:
            state = f"not run: {missing}"
        else:
            state = "to measure"
        rows.append((str(settings.facts["model"]), target.workload.name, target.entrant.name, state))
    heads = ("model", "workload", "method", "state")
    print(writers.text(Table(heads, tuple(rows), left=len(heads))))
    print(f"Rows: {path}")


def refuse_keys(benchmark: str, given: Iterable[str], top: Collection[str], allowed: Sequence[str]) -> None:
    """Raise UsageError for a key that only runs use. Benchmarks read and score no answers.

    benchmark: the benchmark's name, for the error.
    given: the keys that the user typed.
    top: the top-level keys of a run that the benchmark takes, too.
    allowed: the keys among which the error looks for the key that the user meant.
    """
    for key in given:
        # keys of any depth, such as dataset.name and prompt.template; fidelity= is the former name of kl=
        first_part, _, _ = key.partition(".")
        is_about_answers = first_part in ("dataset", "prompt") or key == "fidelity"
        is_only_for_runs = key in top_level() and key not in top
        if is_about_answers or is_only_for_runs:
            raise unknown(f"key of bench {benchmark}", key, allowed)


def with_full_dtype(override: str) -> str:
    """Return an override with a short dtype (fp16, bf16, fp32) written in full."""
    key, sign, value = override.partition("=")
    if sign and key in ("dtype", "model.dtype"):
        return f"{key}={DTYPES.get(value, value)}"
    return override

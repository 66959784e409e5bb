"""Time a whole table: all its rows at once, over the same rows one by one, over kvpress and over a bare loop.

Rows: full, and streamingllm, snapkv, keynorm, h2o, snapkv+think at 50, 25, 12.5 and 6.25 % of the prompt (full has no
budget: one row). (a) The tiny suite. (b) A Llama with random weights: 8 layers, hidden 512, 8 heads, 4 kv heads, a
prompt of 4k tokens, 32 new ones. Every ratio is of times measured in this run, in turns; kvpress runs in the Python
given by --peers, on the same checkpoint, tokens and threads. Part overhead, on two tasks of the tiny suite: the full
cache through kvbench (audit, scoring, storing included) over a bare ``model.generate`` loop, and full and snapkv+think
together over full alone. Part fidelity, on a pretrained model: comparing 20 rows with the full cache on long texts,
over reading the prompts by the bare model and one pass over each forced text by each row alone. Part questions, on
XQuAD: answering all questions of an article from branches of its compressed caches, over answering each behind a prompt
of its own, both without the time of reading and compressing prompts.

    python scripts/bench/tables.py [--part a b peers memory overhead] [--repeats 2] [--threads 2] [--peers PYTHON]
    python scripts/bench/tables.py --part fidelity questions --examples 20 [--model MODEL]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ratio import add_peers, finish, in_process, in_turns, kvpress_seconds, median_ratio, options, seconds, verdict
from transformers import LlamaConfig, LlamaForCausalLM

from kvbench.base.errors import KvbenchError
from kvbench.base.example import scored_text
from kvbench.engine.likelihood import teacher_force
from kvbench.engine.memory import process_memory
from kvbench.engine.prefill import prefill_chains
from kvbench.models import load
from kvbench.plan import config, run_plan
from kvbench.plan.run_plan import RunPlan
from kvbench.run import experiment
from kvbench.run.forced import choose_texts
from kvbench.run.host import Host
from kvbench.run.runner import run_groups
from kvbench.store.provenance import collect_provenance
from kvbench.store.results import Sample
from kvbench.store.store import ResultStore

METHODS = "full,streamingllm,snapkv,keynorm,h2o,snapkv+think"
BUDGETS = (0.5, 0.25, 0.125, 0.0625)
# tokens of the prompt and of the answer in case (b)
N, NEW = 4096, 32

# all rows at once must be faster than rows one by one, and than kvpress, by at least these factors
AT_ONCE = 8.0
OVER_PEERS = 10.0
# kvbench may cost at most these factors over a bare ``generate``, and rows over each other
FULL_ALONE = 1.05
MEMORY = 2.0
BARE = 1.10
TOGETHER = 1.60
FIDELITY = 2.5
QUESTIONS = 1.2

ASKED = "method=snapkv,streamingllm,keynorm,expectedattention,h2o,adakv,pyramidkv kv_ratio=0.25"
"""With the full cache, the 8 methods of part questions."""
COMPARED = (
    "method=snapkv,streamingllm,keynorm,expectedattention,snapkv+think,tova kv_ratio=0.5,0.25 ratio=0.4",
    "method=kivi bits=2,4,8 group=32 residual=32",
    "method=fp8,int8,q8_0,q4_0,turboquant",
)
"""The 20 rows whose divergence from the full cache is timed: six selectors at two budgets, and eight formats."""
DEFAULT_PARTS = ("a", "b", "peers", "memory")
OTHER_PARTS = ("overhead", "fidelity", "questions")


def plan_run(*arguments: str) -> RunPlan:
    """Return the plan of the run that ``key=value`` arguments ask for."""
    return run_plan.prepare(config.read(arguments))


def load_host(run: RunPlan) -> Host:
    """Return the host of a run with its model loaded."""
    model = load.load_weights(run.cfg.model, run.source, load.resolve_device(run.cfg.device))
    return experiment.make_host(run, model)


def through_kvbench(host: Host, run: RunPlan) -> float:
    """Return the seconds that kvbench takes for the whole run, from an empty store."""
    return sum(time_parts(host, run))


def time_parts(host: Host, run: RunPlan) -> tuple[float, float]:
    """Return the seconds of a run from an empty store: for reading and compressing prompts, and for all else."""
    total, samples_by_cell = time_run(host, run)
    # all rows of a prompt share its pass and report exactly the same time, so count each pass once
    passes: set[float] = set()
    compressing = 0.0
    for samples in samples_by_cell:
        passes.update(sample.timing.prefill_s for sample in samples)
        # questions withheld from one context share its caches, too
        compressing += sum({sample.timing.compress_s for sample in samples})
    reading = sum(passes) + compressing
    return reading, total - reading


def time_run(host: Host, run: RunPlan) -> tuple[float, list[list[Sample]]]:
    """Return the seconds of a run from an empty store, and the samples of each cell."""
    with tempfile.TemporaryDirectory() as folder:
        store = ResultStore(Path(folder))
        facts = collect_provenance(host.model, torch.get_num_threads())
        start = time.perf_counter()
        for group in run.groups:
            run_groups(host, [group], store, facts)
        total = time.perf_counter() - start
        samples_by_cell = []
        for group in run.groups:
            samples_by_cell += [list(store.samples(cell.id).values()) for cell in group.cells]
        return total, samples_by_cell


def bare_generate(host: Host, prompt: Sequence[int], new: int, **options: Any) -> torch.Tensor:
    """Return the tokens that transformers' own greedy ``generate`` answers to one prompt."""
    ids = torch.tensor([prompt], device=host.model.device)
    mask = torch.ones_like(ids)
    out = host.model.generate(  # type: ignore[operator]
        ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0, **options
    )
    answer: torch.Tensor = out[0, len(prompt) :]
    return answer


def time_generate(host: Host, run: RunPlan) -> float:
    """Return the seconds that ``generate`` takes for the run's prompts one by one, with text encoded and decoded."""
    start = time.perf_counter()
    for group in run.groups:
        for example in group.examples:
            prompt = host.tokenizer.encode(example.prompt)
            answer = bare_generate(host, prompt, example.max_new_tokens, eos_token_id=sorted(host.stop))
            host.tokenizer.decode(answer.tolist(), skip_special_tokens=True)
    return time.perf_counter() - start


def prepare_table(*overrides: str, methods: str = METHODS) -> tuple[Host, RunPlan]:
    """Return (host, run) for ``methods`` at all budgets, on the task and model in ``overrides``."""
    words = [f"method={methods}"]
    if methods != "full":
        words.append(f"kv_ratio={','.join(map(str, BUDGETS))}")
    run = plan_run(*words, *overrides)
    return load_host(run), run


def time_row(host: Host, run: RunPlan, label: str) -> float:
    """Return the seconds of the one row ``label`` from an empty store, one example at a time."""
    groups = []
    for group in run.groups:
        cells = tuple(cell for cell in group.cells if cell.label == label)
        groups.append(replace(group, cells=cells))
    return through_kvbench(replace(host, batch_rows=1), replace(run, groups=tuple(groups)))


def random_llama(folder: Path, methods: str = METHODS, tokens: int = N) -> tuple[Host, RunPlan]:
    """Return (host, run) of case (b), with a prompt of ``tokens``. No token ends an answer.

    Checkpoint and prompt are written to ``folder``.
    """
    tiny = load.EMBEDDED / "tiny"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, folder / name)
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=int(json.loads((tiny / "config.json").read_text())["vocab_size"]),
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2 * tokens,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    words = ["the", "cold", "river", "shines", "slowly", "over", "an", "old", "stone", "bridge", "near", "town"]
    # a word has one token or more, so the prompt is too long and is cut to max_length
    order = torch.randint(len(words), (2 * tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    prompt = {"id": "0", "prompt": " ".join(words[i] for i in order), "answers": ["none"]}
    path = folder / "prompts.jsonl"
    path.write_text(json.dumps(prompt) + "\n")
    host, run = prepare_table(
        f"model={folder}",
        "dataset=file",
        f"path={path}",
        f"max_new_tokens={NEW}",
        f"max_length={tokens}",
        methods=methods,
    )
    return replace(host, stop=frozenset(), stop_texts=()), run


def compare_at_least(name: str, above: Sequence[float], below: Sequence[float], limit: float) -> bool:
    """Print the median over repeats of ``above`` / ``below``. Return True if it is at least ``limit``."""
    ratio = median_ratio(above, below)
    return verdict(name, ratio, ratio >= limit, f"{_medians(above, below)}; at least {limit:g}x")


def compare_at_most(name: str, above: Sequence[float], below: Sequence[float], limit: float) -> bool:
    """Print the median over repeats of ``above`` / ``below``. Return True if it is at most ``limit``."""
    ratio = median_ratio(above, below)
    return verdict(name, ratio, ratio <= limit, f"{_medians(above, below)}; at most {limit:g}x")


def describe_ratio(above: Sequence[float], below: Sequence[float]) -> str:
    """Return the median over repeats of ``above`` / ``below`` in words, for a ratio that no aim is set for."""
    return f"{median_ratio(above, below):.2f}x ({_medians(above, below)})"


def _medians(above: Sequence[float], below: Sequence[float]) -> str:
    return f"{statistics.median(above):.2f} s / {statistics.median(below):.2f} s"


def table_against_rows(host: Host, run: RunPlan, repeats: int) -> bool:
    """Compare all rows at once with all rows one by one. Return True if the ratio keeps to its limit."""
    rows = [cell.label for cell in run.groups[0].cells]
    # the first run of a process is slower
    time_row(host, run, rows[0])
    # run all at once at both ends and in the middle: a machine that grows busier or calmer then shifts both sides alike
    middle = len(rows) // 2
    all_rows = partial(through_kvbench, host, run)
    variants: dict[str, Callable[[], float]] = {"at once, first": all_rows}
    for label in rows[:middle]:
        variants[label] = partial(time_row, host, run, label)
    variants["at once, middle"] = all_rows
    for label in rows[middle:]:
        variants[label] = partial(time_row, host, run, label)
    variants["at once, last"] = all_rows
    times = in_turns(variants, repeats)
    one_by_one, at_once = [], []
    for i in range(repeats):
        one_by_one.append(sum(times[label][i] for label in rows))
        at_once.append(statistics.fmean(times[name][i] for name in variants if name not in rows))
    print(f"  {len(rows)} rows x {sum(len(group.examples) for group in run.groups)} prompts")
    return compare_at_least("one by one / at once", one_by_one, at_once, AT_ONCE)


def against_peers(host: Host, run: RunPlan, folder: Path, python: str, repeats: int, threads: int) -> bool:
    """Compare our whole table with kvpress over the rows that it has. Return True if the ratio keeps to its limit."""
    rows = ["full"]
    for budget in BUDGETS:
        rows += [f"{method} {budget}" for method in METHODS.split(",")[1:]]
    sizes: list[object] = ["--prompts", folder / "prompts.jsonl", "--n", N, "--new", NEW, "--threads", threads]
    ours, theirs, theirs_without_h2o = [], [], []
    by_row: dict[str, float] = {}
    for _ in range(repeats):
        ours.append(through_kvbench(host, run))
        try:
            by_row = kvpress_seconds(python, folder, *sizes, "--rows", *rows)
        except KvbenchError as error:
            print(f"  kvpress could not be measured: {error}")
            return False
        theirs.append(sum(by_row.values()))
        theirs_without_h2o.append(sum(s for label, s in by_row.items() if not label.startswith("h2o")))
    print(f"  kvpress by row, s: {', '.join(f'{label} {time:.1f}' for label, time in by_row.items())}")
    ok = compare_at_least(f"kvpress / at once, {len(by_row)} rows", theirs, ours, OVER_PEERS)
    # printed beside the verdict, but no part of it
    name = "kvpress without its h2o rows, which materialise attention / all our rows"
    compare_at_least(name, theirs_without_h2o, ours, OVER_PEERS)
    return ok


def full_alone(host: Host, run: RunPlan, repeats: int) -> bool:
    """Compare the full cache through kvbench with a bare ``generate``. Return True if it keeps to its limit."""
    (example,) = run.groups[0].examples
    ids = host.tokenizer.encode(example.prompt)
    # kvbench cuts the middle out of a prompt that is too long
    prompt = ids[: N // 2] + ids[-(N - N // 2) :]
    generate = partial(bare_generate, host, prompt, NEW, min_new_tokens=NEW)
    variants = {"kvbench": partial(time_row, host, run, "full"), "generate": partial(seconds, generate)}
    # these runs are short and their limit is tight: more repeats
    times = in_turns(variants, 2 * repeats + 1)
    return compare_at_most("full through kvbench / bare generate", times["kvbench"], times["generate"], FULL_ALONE)


def overhead(examples: int, repeats: int) -> bool:
    """Compare the full cache with a bare loop, and two methods with one. Return True if both keep to their limits."""
    # one task with short answers and one with long ones
    shared = ["baseline=false", "dataset=tiny/needle,tiny/listing", f"limit={examples}"]
    alone = plan_run("method=full", *shared)
    together = plan_run("method=full,snapkv+think", *shared)
    host = load_host(alone)
    variants: dict[str, Callable[[], float]] = {
        "bare": partial(time_generate, host, alone),
        "full": partial(through_kvbench, host, alone),
        "together": partial(through_kvbench, host, together),
    }
    # the first run of each is slower, and is not counted
    in_turns(variants, 1)
    times = in_turns(variants, repeats)
    print(f"  {sum(len(group.examples) for group in alone.groups)} prompts of 1024 tokens")
    bare_ok = compare_at_most("full through kvbench / bare generate", times["full"], times["bare"], BARE)
    name = "full and snapkv+think together / full"
    return compare_at_most(name, times["together"], times["full"], TOGETHER) and bare_ok


def fidelity(model: str, examples: int) -> bool:
    """Compare a run of divergences with prompts and forced texts read once. Return True if it keeps to its limit."""
    dataset = "dataset=fidelity/tiny" if model == "tiny" else "dataset=fidelity/essays"
    runs = [plan_run(f"model={model}", dataset, f"limit={examples}", *words.split()) for words in COMPARED]
    (group,) = runs[0].groups
    # one run of all rows: the full cache is the first of each
    for other in runs[1:]:
        group = replace(group, cells=group.cells + other.groups[0].cells[1:])
    host, run = load_host(runs[0]), replace(runs[0], groups=(group,))
    ours = seconds(partial(through_kvbench, host, run))
    reading, forcing = 0.0, 0.0
    for example in group.examples:
        window = scored_text(example)
        prefix = window.prefix
        ids = torch.tensor(window.ids)
        with torch.no_grad():
            reading += seconds(partial(host.model, ids[None, :prefix], logits_to_keep=1))
        full, *caches = prefill_chains(host.model, ids[:prefix], [cell.chain for cell in group.cells])
        texts: list[Sequence[int]] = [window.ids[prefix:]]
        texts.extend(choose_texts(host, example, full).values())
        for text in texts:
            rest = torch.tensor(text)
            for cache in caches:
                # rows that evict must see one token after the other
                chunk = 1 if cache.chain.evicts else len(rest)
                forcing += seconds(partial(teacher_force, host.model, [cache], rest, chunk))
    spent = f"{reading:.1f} s reading, {forcing:.1f} s forcing"
    print(f"  {len(group.examples)} prompts, {len(group.cells) - 1} rows: {spent}")
    return compare_at_most("divergences / prompts and texts once", [ours], [reading + forcing], FIDELITY)


def questions(model: str, count: int, repeats: int) -> bool:
    """Compare an article's first ``count`` questions with independent ones. Return True if it keeps to its limit."""
    run = plan_run(f"model={model}", "dataset=xquad", "limit=1", f"questions={count}", *ASKED.split())
    host, (group,) = load_host(run), run.groups
    (article,) = group.examples
    # the same questions, each behind the article in a prompt of its own
    task = replace(group.task, turns="", query_aware=False)
    prompts = tuple(article.asked(turn) for turn in range(len(article.turns)))
    cells = tuple(replace(cell, task=task) for cell in group.cells)
    independent = replace(run, groups=(replace(group, task=task, cells=cells, examples=prompts),))
    reading_once, reading_each, branches, own_prompts = [], [], [], []
    for _ in range(repeats):
        reading, rest = time_parts(host, run)
        reading_once.append(reading)
        branches.append(rest)
        reading, rest = time_parts(host, independent)
        reading_each.append(reading)
        own_prompts.append(rest)
    once, each = statistics.median(reading_once), statistics.median(reading_each)
    print(f"  {len(prompts)} questions x {len(cells)} methods")
    print(f"  reading and compressing: {once:.1f} s, with prompts of their own {each:.1f} s")
    return compare_at_most("questions on one cache / questions behind own prompts", branches, own_prompts, QUESTIONS)


def peak_memory(threads: int) -> bool:
    """Compare the peak memory of all rows with that of the full row alone. Return True if it keeps to its limit.

    Both are resident memory, in processes of their own.
    """
    alone = in_process("tables", "--resident", "full", "--threads", threads)
    together = in_process("tables", "--resident", METHODS, "--threads", threads)
    terms = f"{together:.0f} MiB / {alone:.0f} MiB; below {MEMORY:g}x"
    ratio = together / alone
    return verdict("peak resident memory, all rows / full alone", ratio, ratio < MEMORY, terms)


def main() -> int:
    """Print the ratios. Return exit status 1 if one misses its limit, else 0."""
    parser = options(__doc__, repeats=2, threads=2)
    help_text = f"peers: of (b), over kvpress alone (default: all but {', '.join(OTHER_PARTS)})"
    all_parts = DEFAULT_PARTS + OTHER_PARTS
    parser.add_argument("--part", nargs="+", choices=all_parts, default=DEFAULT_PARTS, help=help_text)
    parser.add_argument("--examples", type=int, default=4, help="prompts per task; of questions: how many")
    parser.add_argument("--model", default="smollm2-135m-q4_1", help="of fidelity and questions")
    add_peers(parser)
    parser.add_argument("--resident", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as name:
        if args.resident:
            host, run = random_llama(Path(name), args.resident)
            through_kvbench(host, run)
            print(process_memory("VmHWM") / 2**20)
            return 0
        print(f"{args.repeats} repeats, {args.threads} threads, load {os.getloadavg()[0]:.1f}")
        ok = measure_parts(args, Path(name))
    return 0 if ok else 1


def measure_parts(args: argparse.Namespace, folder: Path) -> bool:
    """Print the ratios of all parts that are asked for. Return True if each keeps to its limit."""
    ok = True
    if "a" in args.part:
        print("(a) the tiny suite")
        host, run = prepare_table("dataset=tiny", f"limit={args.examples}")
        ok &= table_against_rows(host, run, args.repeats)
    if "b" in args.part or "peers" in args.part:
        print(f"(b) random Llama, prompts of {N} tokens, {NEW} new")
        host, run = random_llama(folder)
        if "b" in args.part:
            ok &= table_against_rows(host, run, args.repeats)
            ok &= full_alone(host, run, args.repeats)
        if "peers" in args.part and args.peers:
            ok &= against_peers(host, run, folder, python=args.peers, repeats=args.repeats, threads=args.threads)
        elif "peers" in args.part:
            print("  kvpress is not measured: give --peers")
    if "memory" in args.part:
        ok &= peak_memory(args.threads)
    if "overhead" in args.part:
        print("overhead")
        ok &= overhead(args.examples, args.repeats)
    if "fidelity" in args.part:
        print(f"fidelity of {args.model}")
        ok &= fidelity(args.model, args.examples)
    if "questions" in args.part:
        print(f"questions to {args.model}")
        ok &= questions(args.model, args.examples, args.repeats)
    return ok


if __name__ == "__main__":
    finish(main)

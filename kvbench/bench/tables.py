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

    python -m kvbench.bench.tables [--part a b peers memory overhead] [--repeats 2] [--threads 2] [--peers PYTHON]
    python -m kvbench.bench.tables --part fidelity questions --examples 20 [--model MODEL]
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
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvbench.base.errors import KvbenchError
from kvbench.bench import ratio
from kvbench.bench.ratio import in_process, in_turns, kvpress_seconds, median_ratio, options, seconds, verdict
from kvbench.engine.likelihood import teacher_force
from kvbench.engine.memory import process_memory
from kvbench.engine.prefill import prefill_chains
from kvbench.models import load
from kvbench.plan import config
from kvbench.run import experiment
from kvbench.run.experiment import RunPlan
from kvbench.run.forced import texts_of
from kvbench.run.host import Host
from kvbench.run.runner import run_groups
from kvbench.store.provenance import provenance
from kvbench.store.results import Sample
from kvbench.store.store import ResultStore

METHODS = "full,streamingllm,snapkv,keynorm,h2o,snapkv+think"
BUDGETS = (0.5, 0.25, 0.125, 0.0625)
N, NEW = 4096, 32
AT_ONCE, OVER_PEERS, FULL_ALONE, MEMORY, BARE, TOGETHER, FIDELITY = 8.0, 10.0, 1.05, 2.0, 1.10, 1.60, 2.5
QUESTIONS = 1.2
ASKED = "method=snapkv,streamingllm,keynorm,expectedattention,h2o,adakv,pyramidkv kv_ratio=0.25"
"""With the full cache, the 8 methods of part questions."""
COMPARED = (
    "method=snapkv,streamingllm,keynorm,expectedattention,snapkv+think,tova kv_ratio=0.5,0.25 ratio=0.4",
    "method=kivi bits=2,4,8 group=32 residual=32",
    "method=fp8,int8,q8_0,q4_0,turboquant",
)
"""The 20 rows whose divergence from the full cache is timed: six selectors at two budgets, and eight formats."""


def planned(*arguments: str) -> RunPlan:
    """Return the plan of the run that ``key=value`` arguments ask for."""
    return experiment.prepare(config.read(arguments))


def loaded(run: RunPlan) -> Host:
    """Return the host of a run with its model loaded."""
    model = load.load_weights(run.cfg.model, run.source, load.resolve_device(run.cfg.device))
    return experiment.make_host(run, model)


def through_kvbench(host: Host, run: RunPlan) -> float:
    """Return the seconds that kvbench takes for the whole run, from an empty store."""
    return sum(parts_of(host, run))


def parts_of(host: Host, run: RunPlan) -> tuple[float, float]:
    """Return the seconds of a run from an empty store: for reading and compressing prompts, and for all else."""
    whole, cells = measured(host, run)
    # all rows of a prompt share its pass, and questions withheld from one context its caches, too
    passes = {s.timing.prefill_s for samples in cells for s in samples}
    reading = sum(passes) + sum(sum({s.timing.compress_s for s in samples}) for samples in cells)
    return reading, whole - reading


def measured(host: Host, run: RunPlan) -> tuple[float, list[list[Sample]]]:
    """Return the seconds of a run from an empty store, and the samples of each cell."""
    with tempfile.TemporaryDirectory() as folder:
        store = ResultStore(Path(folder))
        facts = provenance(host.model, torch.get_num_threads())
        start = time.perf_counter()
        for group in run.groups:
            run_groups(host, [group], store, facts)
        whole = time.perf_counter() - start
        return whole, [[*store.samples(c.id).values()] for g in run.groups for c in g.cells]


def bare_generate(host: Host, prompt: Sequence[int], new: int, **how: Any) -> torch.Tensor:
    """Return the tokens that transformers' own greedy ``generate`` answers to one prompt."""
    ids = torch.tensor([prompt], device=host.model.device)
    mask = torch.ones_like(ids)
    out = host.model.generate(  # type: ignore[operator]
        ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0, **how
    )
    answer: torch.Tensor = out[0, len(prompt) :]
    return answer


def by_generate(host: Host, run: RunPlan) -> float:
    """Return the seconds that ``generate`` takes for the run's prompts one by one, with text encoded and decoded."""
    start = time.perf_counter()
    for example in (e for group in run.groups for e in group.examples):
        prompt = host.tokenizer.encode(example.prompt)
        answer = bare_generate(host, prompt, example.max_new_tokens, eos_token_id=sorted(host.stop))
        host.tokenizer.decode(answer.tolist(), skip_special_tokens=True)
    return time.perf_counter() - start


def table(*overrides: str, methods: str = METHODS) -> tuple[Host, RunPlan]:
    """Return (host, run) for ``methods`` at all budgets, on what ``overrides`` name."""
    budgets = [] if methods == "full" else [f"kv_ratio={','.join(map(str, BUDGETS))}"]
    run = planned(f"method={methods}", *budgets, *overrides)
    return loaded(run), run


def row(host: Host, run: RunPlan, label: str) -> float:
    """Return the seconds of the one row ``label`` from an empty store, one example at a time."""
    groups = tuple(replace(g, cells=tuple(c for c in g.cells if c.label == label)) for g in run.groups)
    return through_kvbench(replace(host, batch_rows=1), replace(run, groups=groups))


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
    order = torch.randint(len(words), (2 * tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    prompt = {"id": "0", "prompt": " ".join(words[i] for i in order), "answers": ["none"]}
    path = folder / "prompts.jsonl"
    path.write_text(json.dumps(prompt) + "\n")
    named = [f"model={folder}", "dataset=file", f"path={path}", f"max_new_tokens={NEW}", f"max_length={tokens}"]
    host, run = table(*named, methods=methods)
    return replace(host, stop=frozenset()), run


def compare(what: str, above: Sequence[float], below: Sequence[float], limit: float, least: bool = True) -> bool:
    """Print the median over repeats of ``above`` / ``below`` and both times. Return True if it keeps to ``limit``."""
    ratio = median_ratio(above, below)
    spent = f"{statistics.median(above):.2f} s / {statistics.median(below):.2f} s"
    terms = f"{spent}; at {'least' if least else 'most'} {limit:g}x"
    return verdict(what, ratio, ratio >= limit if least else ratio <= limit, terms)


def table_against_rows(host: Host, run: RunPlan, repeats: int) -> bool:
    """Compare all rows at once with all rows one by one. Return True if the ratio keeps to its limit."""
    rows = [c.label for c in run.groups[0].cells]
    row(host, run, rows[0])
    # at once at both ends and in the middle: a machine that grows busier or calmer shifts both sides alike
    steps = ["at once", *rows[: len(rows) // 2], "at once ", *rows[len(rows) // 2 :], "at once  "]
    all_rows = partial(through_kvbench, host, run)
    times = in_turns({name: partial(row, host, run, name) if name in rows else all_rows for name in steps}, repeats)
    one_by_one = [sum(times[label][i] for label in rows) for i in range(repeats)]
    together = [statistics.fmean(times[name][i] for name in steps if name not in rows) for i in range(repeats)]
    print(f"  {len(rows)} rows x {sum(len(g.examples) for g in run.groups)} prompts")
    return compare("one by one / at once", one_by_one, together, AT_ONCE)


def against_peers(host: Host, run: RunPlan, folder: Path, python: str, repeats: int, threads: int) -> bool:
    """Compare our whole table with kvpress over the rows that it has. Return True if the ratio keeps to its limit."""
    rows = ["full", *(f"{method} {budget}" for budget in BUDGETS for method in METHODS.split(",")[1:])]
    sizes = ["--prompts", folder / "prompts.jsonl", "--n", N, "--new", NEW, "--threads", threads, "--rows", *rows]
    ours, theirs, others = [], [], []
    by_row: dict[str, float] = {}
    for _ in range(repeats):
        ours.append(through_kvbench(host, run))
        try:
            by_row = kvpress_seconds(python, folder, *sizes)
        except KvbenchError as error:
            print(f"  kvpress could not be measured: {error}")
            return False
        theirs.append(sum(by_row.values()))
        others.append(sum(s for label, s in by_row.items() if not label.startswith("h2o")))
    print(f"  kvpress by row, s: {', '.join(f'{label} {time:.1f}' for label, time in by_row.items())}")
    ok = compare(f"kvpress / at once, {len(by_row)} rows", theirs, ours, OVER_PEERS)
    compare("kvpress without its h2o rows, which materialise attention / all our rows", others, ours, OVER_PEERS)
    return ok


def full_alone(host: Host, run: RunPlan, repeats: int) -> bool:
    """Compare the full cache through kvbench with a bare ``generate``. Return True if it keeps to its limit."""
    (example,) = run.groups[0].examples
    ids = host.tokenizer.encode(example.prompt)
    # the middle is cut out, as of every prompt
    prompt = [*ids[: N // 2], *ids[-(N - N // 2) :]]
    generate = partial(bare_generate, host, prompt, NEW, min_new_tokens=NEW)
    variants = {"kvbench": partial(row, host, run, "full"), "generate": partial(seconds, generate)}
    times = in_turns(variants, 2 * repeats + 1)
    what = "full through kvbench / bare generate"
    return compare(what, times["kvbench"], times["generate"], FULL_ALONE, least=False)


def overhead(examples: int, repeats: int) -> bool:
    """Compare the full cache with a bare loop, and two methods with one. Return True if both keep to their limits."""
    # one task with short answers and one with long ones
    shared = ["baseline=false", "dataset=tiny/needle,tiny/listing", f"limit={examples}"]
    alone, together = (planned(f"method={method}", *shared) for method in ("full", "full,snapkv+think"))
    host = loaded(alone)
    variants: dict[str, Callable[[], float]] = {
        "bare": partial(by_generate, host, alone),
        "full": partial(through_kvbench, host, alone),
        "together": partial(through_kvbench, host, together),
    }
    in_turns(variants, 1)
    times = in_turns(variants, repeats)
    print(f"  {sum(len(g.examples) for g in alone.groups)} prompts of 1024 tokens")
    over_bare = compare("full through kvbench / bare generate", times["full"], times["bare"], BARE, least=False)
    what = "full and snapkv+think together / full"
    return compare(what, times["together"], times["full"], TOGETHER, least=False) and over_bare


def fidelity(model: str, examples: int) -> bool:
    """Compare a run of divergences with prompts and forced texts read once. Return True if it keeps to its limit."""
    dataset = f"dataset=fidelity/{'tiny' if model == 'tiny' else 'essays'}"
    runs = [planned(f"model={model}", dataset, f"limit={examples}", *words.split()) for words in COMPARED]
    # one run of all rows: the full cache is the first of each
    (group,) = (replace(g, cells=g.cells + runs[1].groups[0].cells[1:]) for g in runs[0].groups)
    group = replace(group, cells=group.cells + runs[2].groups[0].cells[1:])
    host, run = loaded(runs[0]), replace(runs[0], groups=(group,))
    times: dict[str, float] = dict.fromkeys(("prompts", "texts"), 0.0)
    start = time.perf_counter()
    through_kvbench(host, run)
    ours = time.perf_counter() - start
    for example in group.examples:
        prefix = int(example.meta["prefix"])
        ids = torch.tensor(example.tokens)
        with torch.no_grad():
            times["prompts"] += seconds(partial(host.model, ids[None, :prefix], logits_to_keep=1))
        full, *caches = prefill_chains(host.model, ids[:prefix], [c.chain for c in group.cells])
        texts = {"reference": example.tokens[prefix:], **texts_of(host, example, full)}
        for text, cache in product(texts.values(), caches):
            rest = torch.tensor(text)
            chunk = 1 if cache.chain.evicts else len(rest)
            times["texts"] += seconds(partial(teacher_force, host.model, [cache], rest, chunk))
    spent = f"{times['prompts']:.1f} s reading, {times['texts']:.1f} s forcing"
    print(f"  {len(group.examples)} prompts, {len(group.cells) - 1} rows: {spent}")
    return compare("divergences / prompts and texts once", [ours], [sum(times.values())], FIDELITY, least=False)


def questions(model: str, count: int, repeats: int) -> bool:
    """Compare an article's first ``count`` questions with independent ones. Return True if that keeps to its limit."""
    run = planned(f"model={model}", "dataset=xquad", "limit=1", f"questions={count}", *ASKED.split())
    host, (group,) = loaded(run), run.groups
    (article,) = group.examples
    task = replace(group.task, turns="", query_aware=False)
    prompts = tuple(article.asked(turn) for turn in range(len(article.turns)))
    cells = tuple(replace(cell, task=task) for cell in group.cells)
    alone = replace(run, groups=(replace(group, task=task, cells=cells, examples=prompts),))
    parts: dict[str, list[tuple[float, float]]] = {"branches": [], "prompts": []}
    for _ in range(repeats):
        parts["branches"].append(parts_of(host, run))
        parts["prompts"].append(parts_of(host, alone))
    read = {name: statistics.median(reading for reading, _ in turns) for name, turns in parts.items()}
    print(f"  {len(prompts)} questions x {len(cells)} methods")
    print(f"  reading and compressing: {read['branches']:.1f} s, with prompts of their own {read['prompts']:.1f} s")
    branches, own = ([rest for _, rest in turns] for turns in parts.values())
    return compare("questions on one cache / questions behind own prompts", branches, own, QUESTIONS, least=False)


def memory(threads: int) -> bool:
    """Compare the peak memory of all rows with that of the full row alone. Return True if it keeps to its limit.

    Both are resident memory, in processes of their own.
    """
    alone, together = (in_process("tables", "--resident", m, "--threads", threads) for m in ("full", METHODS))
    terms = f"{together:.0f} MiB / {alone:.0f} MiB; below {MEMORY:g}x"
    ratio = together / alone
    return verdict("peak resident memory, all rows / full alone", ratio, ratio < MEMORY, terms)


def main() -> int:
    """Print the ratios. Return exit status 1 if one misses its limit, else 0."""
    parser = options(__doc__, repeats=2, threads=2)
    parts, others = ("a", "b", "peers", "memory"), ("overhead", "fidelity", "questions")
    help_text = f"peers: of (b), over kvpress alone (default: all but {', '.join(others)})"
    parser.add_argument("--part", nargs="+", choices=(*parts, *others), default=parts, help=help_text)
    parser.add_argument("--examples", type=int, default=4, help="prompts per task; of questions: how many")
    parser.add_argument("--model", default="smollm2-135m-q4_1", help="of fidelity and questions")
    ratio.add_peers(parser)
    parser.add_argument("--resident", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ok = True
    with tempfile.TemporaryDirectory() as name:
        if args.resident:
            through_kvbench(*random_llama(Path(name), args.resident))
            print(process_memory("VmHWM") / 2**20)
            return 0
        print(f"{args.repeats} repeats, {args.threads} threads, load {os.getloadavg()[0]:.1f}")
        if "a" in args.part:
            print("(a) the tiny suite")
            ok &= table_against_rows(*table("dataset=tiny", f"limit={args.examples}"), args.repeats)
        if {"b", "peers"} & set(args.part):
            print(f"(b) random Llama, prompts of {N} tokens, {NEW} new")
            host, run = random_llama(Path(name))
            if "b" in args.part:
                ok &= table_against_rows(host, run, args.repeats)
                ok &= full_alone(host, run, args.repeats)
            if "peers" in args.part and args.peers:
                ok &= against_peers(host, run, Path(name), args.peers, args.repeats, args.threads)
            elif "peers" in args.part:
                print("  kvpress is not measured: give --peers")
        if "memory" in args.part:
            ok &= memory(args.threads)
        if "overhead" in args.part:
            print("overhead")
            ok &= overhead(args.examples, args.repeats)
        if "fidelity" in args.part:
            print(f"fidelity of {args.model}")
            ok &= fidelity(args.model, args.examples)
        if "questions" in args.part:
            print(f"questions to {args.model}")
            ok &= questions(args.model, args.examples, args.repeats)
    return 0 if ok else 1


if __name__ == "__main__":
    ratio.finish(main)

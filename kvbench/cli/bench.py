"""bench: what methods cost, measured here: memory by the byte, and time, throughput and peaks end to end."""

from __future__ import annotations

import argparse
import json

from kvbench.cli import bench_memory
from kvbench.run.keys import pairs

EXAMPLES = """examples:
  python -m kvbench bench memory
  python -m kvbench bench memory model=llama2-7b method=full,snapkv+think,kivi n=512,4096 kv_size=128
  python -m kvbench bench memory model=llama3-70b-instruct method=snapkv+think n=131072 --formula
  python -m kvbench bench memory method=h2o,h2o+think kv_size=128,512 match=bytes n=1024
  python -m kvbench bench memory paper=think/7
  python -m kvbench bench memory paper=all --json
  python -m kvbench bench time
  python -m kvbench bench time method=full,snapkv,kivi workloads=256+64x4,1024+32 repeats=5 kv_size=64
  python -m kvbench bench time method=kivi workloads=512+1024 generate=sampled check=true
  python -m kvbench bench time method=full,kivi workloads=64+16xmax memory_limit=0.25
  python -m kvbench bench time method=full,snapkv kv_size=64 step=plain,graph
  python -m kvbench bench time model=llama2-7b weights=random method=kivi workloads=160+338x300 --plan

memory prints, for each method (default: all, and a few chains) and each prompt size n= (default 512,4096), the bytes
of real caches beside the formula. Layers have the shape of the model in conf/model (default tiny), which need not be
there, are filled with random numbers and compressed by the same code as in runs.
keys: model=, method=, n=, any knob of a method (kv_size=, ratio=, bits=, ...), per=, preset=, match=, reference=,
dtype=fp16|bf16|fp32 (default fp16; tiny fp32). paper=think/7|think|kivi|flexgen|qhitter|uncomp|refreekv|all prints
what papers say about memory, computed again.

time runs prompts of random tokens through the prefill and the decode batch of runs, in turns with the full cache and
with transformers' own caches, and prints seconds, tokens a second, peaks, and how near a decode step comes to the
memory's speed. Rows are kept; what is there is not measured again.
keys: model=, weights=random|trained (default random, of the exact architecture in conf/model), method= and knobs as
in run, workloads=prompt+new[xbatch],... (xmax: the largest batch that fits), repeats=3, warmup=1,
generate=full|sampled (long answers by 64 steps at 4 cache lengths; steps= for others), check=true (one full answer
beside the sampled ones), step=plain|graph|plain,graph (a decode step recorded once and replayed: on a GPU a CUDA
graph, which nobody has run yet; for caches that only grow by new tokens, the others' rows are refused),
peers=dynamic,static,quanto,hqq,fp8,offload,kvpress,deepspeed,flexgen|all|none,
over= the method or peer that ratios are to (default full),
memory_limit= GiB of the process, layers= fewer layers, seed=, name= and folder= of the rows
(default results/bench/time.jsonl), again=true, device=, dtype=, threads=.

Peaks and resident memory of whole processes are measured by benchmarks of their own, too (make bench-memory,
make bench-resident)."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options."""
    parser.add_argument("what", choices=("memory", "time"), help="what to measure")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="which methods, models and sizes")
    parser.add_argument("--formula", action="store_true", help="memory: build nothing, print the formulas alone")
    parser.add_argument("--plan", action="store_true", help="time: say what would be measured, and stop")


def main(args: argparse.Namespace) -> int:
    """Print the benchmark asked for. Return exit status 1 if bytes differ from their formula or a timed row failed."""
    if args.what == "memory":
        return bench_memory.main(args)
    from kvbench.bench import request, time_table

    rows, path = request.measure(args.overrides, args.plan, beside=not args.json)
    if args.plan:
        return 0
    over = request.OWN["over"].value(pairs(args.overrides))
    if args.json:
        print(json.dumps(time_table.as_json(rows, over), indent=1, ensure_ascii=False))
    else:
        print(f"{time_table.render(rows, over=over)}Rows: {path}")
    return 1 if any(row["status"] == "failed" for row in rows) else 0

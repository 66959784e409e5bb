"""How the time and memory of a run grow with methods, prompts, their length, and new tokens: fitted exponents.

    python scripts/bench/growth.py [--curve methods prompts length new] [--threads 2]

Every point is a run of the tiny model from an empty store, in a process of its own: seconds of measuring, and MiB of
resident memory above the loaded model's at the peak. The exponent of a curve is the slope of log y over log x, by least
squares over its last three points: 1 grows as x does, 0 not at all. The aims are what the work itself takes: as many
prompts, answers and tokens as there are, products of each two tokens of a prompt, and memory for the rows that decode
together, which do not become more with the prompts.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from ratio import finish, in_process, options
from tables import load_host, plan_run, through_kvbench

from kvbench.engine.memory import process_memory

SELECTORS = ("streamingllm", "snapkv", "keynorm", "tova")


@dataclass(frozen=True)
class Curve:
    """One curve: its points, and the largest exponents of time and memory."""

    points: Sequence[int]
    seconds: float
    memory: float


CURVES: Mapping[str, Curve] = {
    "methods": Curve((1, 4, 12, 36, 100), seconds=1.05, memory=1.05),
    # the same number of rows decodes together, however many prompts wait
    "prompts": Curve((1, 10, 100, 1000), seconds=1.05, memory=0.2),
    # every two tokens of a prompt meet in a product
    "length": Curve((256, 512, 1024, 2048, 3840), seconds=2.0, memory=1.1),
    # the more tokens came before a step, the longer it takes
    "new": Curve((8, 32, 128, 512), seconds=1.3, memory=1.1),
}


def arguments(curve: str, x: int, folder: Path) -> list[str]:
    """Return the words of one point's run. Its prompts of ``dataset=file`` are written to ``folder``."""
    sizes = {"prompts": 1, "length": 1024, "new": 16}
    if curve == "prompts":
        # a thousand prompts of 1,024 tokens would take too long
        sizes["length"] = 256
    # the x of the curve methods is the number of rows
    sizes[curve] = x
    words = ["the", "cold", "river", "shines", "slowly", "over", "an", "old", "stone", "bridge", "near", "town"]
    # a word has one token or more, so every prompt is too long and is cut to max_length
    shape = (sizes["prompts"], 2 * sizes["length"])
    word_ids = torch.randint(len(words), shape, generator=torch.manual_seed(0)).tolist()
    lines = []
    for i, ids in enumerate(word_ids):
        prompt = " ".join(words[word_id] for word_id in ids)
        lines.append(json.dumps({"id": str(i), "prompt": prompt, "answers": ["none"]}) + "\n")
    path = folder / "prompts.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
    run_words = ["dataset=file", f"path={path}", f"max_length={sizes['length']}", f"max_new_tokens={sizes['new']}"]
    if curve == "methods":
        # x rows are the selectors at x / 4 budgets, down from 90 % in steps of 3.2 points
        budgets = [f"{0.9 - 0.8 * i / 25:.3f}" for i in range(math.ceil(x / len(SELECTORS)))]
        run_words += [f"method={','.join(SELECTORS[:x])}", f"kv_ratio={','.join(budgets)}", "baseline=false"]
    else:
        run_words += [f"method={','.join(SELECTORS)}", "kv_ratio=0.5"]
    return run_words


def point(curve: str, x: int) -> dict[str, float]:
    """Return the seconds and MiB of one point."""
    with tempfile.TemporaryDirectory() as name:
        run = plan_run(*arguments(curve, x, Path(name)))
        # no token ends an answer
        host = replace(load_host(run), stop=frozenset(), stop_texts=())
        before = process_memory("VmRSS")
        seconds = through_kvbench(host, run)
        return {"seconds": seconds, "memory": (process_memory("VmHWM") - before) / 2**20}


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the slope of log y over log x by least squares over the last three points."""
    slope, _ = np.polyfit(np.log(xs[-3:]), np.log(ys[-3:]), 1)
    return float(slope)


def main() -> int:
    """Print the curves with their exponents. Return exit status 1 if one exceeds its aim, else 0."""
    parser = options(__doc__, threads=2)
    parser.add_argument("--curve", nargs="+", choices=tuple(CURVES), default=tuple(CURVES))
    parser.add_argument("--point", type=int, help="measure one point of a curve in this process, and print JSON")
    args = parser.parse_args()
    if args.point is not None:
        torch.set_num_threads(args.threads)
        print(json.dumps(point(args.curve[0], args.point)))
        return 0
    ok = True
    print(f"model tiny, {args.threads} threads, {', '.join(SELECTORS)} and the full cache at half the tokens")
    for name in args.curve:
        curve = CURVES[name]
        results = []
        for x in curve.points:
            point_arguments = ["--curve", name, "--point", x, "--threads", args.threads]
            results.append(in_process("growth", *point_arguments))
        for x, result in zip(curve.points, results, strict=True):
            print(f"  {name} {x}: {result['seconds']:.2f} s, {result['memory']:.0f} MiB", flush=True)
        for quantity, most in (("seconds", curve.seconds), ("memory", curve.memory)):
            slope = exponent(curve.points, [result[quantity] for result in results])
            word = "ok" if slope <= most else "MISSED"
            ok &= slope <= most
            print(f"  {quantity} as {name}^{slope:.2f} (at most {most:g}: {word})")
    return 0 if ok else 1


if __name__ == "__main__":
    finish(main)

"""How the time and memory of a run grow with methods, prompts, their length, and new tokens: fitted exponents.

    python -m kvbench.bench.growth [--curve methods prompts length new] [--threads 2]

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

from kvbench.bench.ratio import finish, in_process, options
from kvbench.bench.tables import loaded, planned, through_kvbench
from kvbench.engine.memory import process_memory

SELECTORS = ("streamingllm", "snapkv", "keynorm", "tova")


@dataclass(frozen=True)
class Curve:
    """One curve: its points, and the largest exponents of time and memory."""

    points: Sequence[int]
    seconds: float
    memory: float


CURVES: Mapping[str, Curve] = {
    "methods": Curve((1, 4, 12, 36, 100), 1.05, 1.05),
    "prompts": Curve((1, 10, 100, 1000), 1.05, 0.2),
    "length": Curve((256, 512, 1024, 2048, 3840), 2.0, 1.1),
    "new": Curve((8, 32, 128, 512), 1.3, 1.1),
}


def arguments(curve: str, x: int, folder: Path) -> list[str]:
    """Return the run of one point. Its prompts of ``dataset=file`` are written to ``folder``."""
    sizes = {"prompts": 1, "length": 256 if curve == "prompts" else 1024, "new": 16} | {curve: x}
    if curve == "methods":
        budgets = [f"{0.9 - 0.8 * i / 25:.3f}" for i in range(math.ceil(x / len(SELECTORS)))]
        rows = [f"method={','.join(SELECTORS[:x])}", f"kv_ratio={','.join(budgets)}", "baseline=false"]
    else:
        rows = [f"method={','.join(SELECTORS)}", "kv_ratio=0.5"]
    words = ["the", "cold", "river", "shines", "slowly", "over", "an", "old", "stone", "bridge", "near", "town"]
    order = torch.randint(len(words), (sizes["prompts"], 2 * sizes["length"]), generator=torch.manual_seed(0)).tolist()
    lines = [
        {"id": str(i), "prompt": " ".join(words[word] for word in prompt), "answers": ["none"]}
        for i, prompt in enumerate(order)
    ]
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return [*rows, "dataset=file", f"path={path}", f"max_length={sizes['length']}", f"max_new_tokens={sizes['new']}"]


def point(curve: str, x: int) -> dict[str, float]:
    """Return the seconds and MiB of one point."""
    with tempfile.TemporaryDirectory() as name:
        run = planned(*arguments(curve, x, Path(name)))
        host = replace(loaded(run), stop=frozenset())
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
        sizes = ["--threads", args.threads]
        found = [in_process("growth", "--curve", name, "--point", x, *sizes) for x in curve.points]
        for x, one in zip(curve.points, found, strict=True):
            print(f"  {name} {x}: {one['seconds']:.2f} s, {one['memory']:.0f} MiB", flush=True)
        for what, most in (("seconds", curve.seconds), ("memory", curve.memory)):
            slope = exponent(curve.points, [one[what] for one in found])
            ok &= slope <= most
            print(f"  {what} as {name}^{slope:.2f} (at most {most:g}: {'ok' if slope <= most else 'MISSED'})")
    return 0 if ok else 1


if __name__ == "__main__":
    finish(main)

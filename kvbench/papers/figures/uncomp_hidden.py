"""UNComp's figure 6: matrix entropy of hidden states (arXiv 2410.03090, equations 1 and 8)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from kvbench.cache.observation import Needs
from kvbench.methods.entropy import entropy
from kvbench.models.interface import decoder_layers
from kvbench.papers.figures.figure import Code
from kvbench.papers.figures.findings import Fact
from kvbench.papers.figures.reading import Prompt, Reading


def hidden_entropy(reading: Reading) -> pd.DataFrame:
    """H of Sigma of the residual stream in front of every layer, and behind the last: per prompt and depth."""
    found: list[dict[str, Any]] = []
    for number, prompt in enumerate(reading.prompts):
        ids = reading.ids(prompt)

        def see(depth: int, hidden: Tensor, prompt: Prompt = prompt, number: int = number, n: int = len(ids)) -> None:
            h = matrix_entropy(hidden)
            at = {"source": prompt.source, "prompt": number, "tokens": n, "layer": depth}
            found.append({**at, "entropy": h, "erank": float(np.exp(h))})

        with residual_stream(reading.model, see):
            reading.read(ids, Needs(), lambda obs, k, v: None)
        reading.tick()
    return pd.DataFrame(found)


def matrix_entropy(rows: Tensor) -> float:
    """H of Sigma of rows [n, d]: the eigenvalues other than 0 are those of the smaller of X'X and XX'."""
    centred = rows.float() - rows.float().mean(dim=0)
    unit = centred / centred.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    n, d = unit.shape
    small = (unit @ unit.T if n < d else unit.T @ unit) / n
    return float(entropy(torch.linalg.eigvalsh(small.double()).clamp(min=0)))


@contextmanager
def residual_stream(model: Any, see: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call ``see(depth, hidden [n, d])`` with what goes into each decoder layer and, at the end, comes out of the last.

    Hooks go on exit.
    """
    decoders = decoder_layers(model)

    def before(depth: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            see(depth, (kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])[0])

        return hook

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        see(len(decoders), (output[0] if isinstance(output, tuple) else output)[0])

    handles = [m.register_forward_pre_hook(before(i), with_kwargs=True) for i, m in enumerate(decoders)]
    handles.append(decoders[-1].register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def named(data: pd.DataFrame) -> pd.DataFrame:
    """The data with a ``name`` for each prompt: its text, or its number where texts have several."""
    texts = data["source"].nunique() == data["prompt"].nunique()
    return data.assign(name=data["source"] if texts else [f"sample {int(i) + 1}" for i in data["prompt"]])


def entropy_facts(data: pd.DataFrame) -> Iterator[Fact]:
    """Whether entropy increases layer by layer."""
    curve = data.groupby("layer")["entropy"].mean()
    lines = data.pivot_table(index="prompt", columns="layer", values="entropy")
    ends = {"in front of the first layer": curve.iloc[0], "behind the last": curve.iloc[-1]}
    yield Fact("Mean entropy", ends, "{:.2f} nats")
    yield Fact("Highest", {f"after {int(curve.idxmax())} layers": curve.max()}, "{:.2f} nats")
    yield Fact(f"Steps of {len(curve) - 1} in which it rises", int((np.diff(curve) > 0).sum()), "{}")
    every = int((np.diff(lines.to_numpy(), axis=1) > 0).all(axis=1).sum())
    yield Fact(f"Samples of {len(lines)} in which every step rises", every, "{}")


CODE = {"uncomp/fig6": Code(hidden_entropy, entropy_facts, named)}

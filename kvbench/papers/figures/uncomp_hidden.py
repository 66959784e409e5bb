"""UNComp's figure 6: matrix entropy of hidden states (arXiv 2410.03090, equations 1 and 8)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure as Canvas
from torch import Tensor, nn

from kvbench.cache.observation import Needs
from kvbench.methods.entropy import entropy
from kvbench.models.interface import decoder_layers
from kvbench.papers.figures.figure import Figure
from kvbench.papers.figures.reading import Prompt, Reading
from kvbench.tables import style


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


def draw_hidden(data: pd.DataFrame) -> Canvas:
    """A line per prompt; where there are more than seven, thin ones and their mean."""
    fig = style.canvas(style.COLUMN, 2.2)
    ax = fig.subplots()
    prompts = list(data.groupby("prompt"))
    names = data["source"].nunique() == len(prompts)
    for i, (number, rows) in enumerate(prompts):
        if len(prompts) <= len(style.PALETTE):
            label = rows["source"].iloc[0] if names else f"sample {int(number) + 1}"
            ax.plot(rows["layer"], rows["entropy"], label=label, **style.series(i, len(rows)))
        else:
            ax.plot(rows["layer"], rows["entropy"], color=style.GREY, lw=0.5, label="samples" if i == 0 else None)
    if len(prompts) > len(style.PALETTE):
        mean = data.groupby("layer")["entropy"].mean()
        ax.plot(mean.index, mean, color=style.BLUE, lw=1.6, marker="o", label="mean")
    style.layer_axis(ax, sorted(data["layer"].unique()))
    ax.set_xlabel("layers passed")
    ax.set_ylabel(r"matrix entropy $H(\Sigma)$ (nats)")
    ax.legend(ncols=2)
    return fig


def say_hidden(data: pd.DataFrame) -> str:
    """Whether entropy increases layer by layer."""
    curve = data.groupby("layer")["entropy"].mean()
    lines = data.pivot_table(index="prompt", columns="layer", values="entropy")
    steps = np.diff(curve.to_numpy())
    every = int((np.diff(lines.to_numpy(), axis=1) > 0).all(axis=1).sum())
    return (
        f"Mean entropy goes from {curve.iloc[0]:.2f} nats in front of the first layer to {curve.iloc[-1]:.2f} behind "
        f"the last, highest after {int(curve.idxmax())} layers ({curve.max():.2f}); it rises in "
        f"{int((steps > 0).sum())} of {len(steps)} steps, in every step for {every} of {len(lines)} samples."
    )


FIGURES = (
    Figure(
        id="uncomp/fig6",
        title="matrix entropy of hidden states by layer",
        shows="Matrix entropy H, in nats, of the residual stream in front of every layer and behind the last; a line "
        "per prompt. Of n tokens and d channels, H is at most ln min(n - 1, d).",
        claim="Entropy of hidden states increases layer by layer.",
        unsaid="The paper shows six samples of WikiText-2 and does not say how long they are, whether H is truncated "
        "(ours is not), nor where in a layer the hidden states are taken.",
        columns=("source", "prompt", "tokens", "layer", "entropy", "erank"),
        compute=hidden_entropy,
        draw=draw_hidden,
        finding=say_hidden,
        knobs={"tokens": None},
    ),
)

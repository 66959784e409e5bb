"""Statistics over windows of text by which low-rank projections are chosen: moments, gradients, mean sizes, losses.

Memory is that of the statistics and one window, whatever the number of windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvbench.models.factors import Factors
from kvbench.models.interface import attention_modules
from kvbench.models.lowrank import ProjectionShape, head_rows, projection, swapped


def moments(model: PreTrainedModel, samples: Iterable[Tensor], fisher: bool) -> tuple[Tensor, Tensor | None]:
    """Return (mean of x x^T over all tokens [layers, d, d] fp32, Fisher values) of the projections' inputs x.

    Fisher values [layers, 2, Hk] are sqrt(E[g^2]) averaged over the entries of a head's key (0) and value (1)
    projection, where g is the gradient of a window's mean loss and E the mean over windows. They are None unless
    ``fisher``.
    """
    shape, modules = ProjectionShape.of(model), attention_modules(model)
    projections = [projection(a) for a in modules]
    device = projections[0][0].weight.device
    total = torch.zeros(shape.layers, shape.hidden, shape.hidden, dtype=torch.float64, device=device)
    tokens = count = 0

    def add(layer: int, x: Tensor) -> None:
        flat = x.detach().reshape(-1, x.shape[-1]).float()
        total[layer] += flat.T @ flat

    parameters = [m.weight for pair in projections for m in pair] if fisher else []
    squares = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
    with quiet(model, parameters), projection_inputs(model, add):
        for window in samples:
            value = loss(model, window)
            grads = torch.autograd.grad(value, parameters) if fisher else ()
            for square, grad in zip(squares, grads, strict=True):
                square += grad.float().square()
            tokens, count = tokens + len(window), count + 1
    mean = (total / max(tokens, 1)).float()
    if not fisher:
        return mean, None
    per_layer = len(projections[0])
    fisher_layers = []
    for i, attention in enumerate(modules):
        roots = [(s / max(count, 1)).sqrt() for s in squares[i * per_layer : (i + 1) * per_layer]]
        fisher_layers.append(torch.stack([t.mean(dim=(1, 2)) for t in head_rows(attention, roots, shape.heads)]))
    return mean, torch.stack(fisher_layers)


def moments_bytes(model: PreTrainedModel, fisher: bool) -> tuple[int, int]:
    """Return (bytes that ``moments`` holds while it measures, with gradients, bytes of its mean moments)."""
    shape = ProjectionShape.of(model)
    entries = shape.layers * shape.hidden**2
    parameters = [m.weight for a in attention_modules(model) for m in projection(a)] if fisher else []
    return 8 * entries + sum(w.numel() * (4 + w.element_size()) for w in parameters), 4 * entries


def mean_sizes(model: PreTrainedModel, samples: Iterable[Tensor]) -> Tensor:
    """Return the mean of |x| over all tokens [layers, d] fp32 of the projections' inputs x."""
    shape = ProjectionShape.of(model)
    total = torch.zeros(shape.layers, shape.hidden, dtype=torch.float64, device=model.device)
    tokens = 0

    def add(layer: int, x: Tensor) -> None:
        total[layer] += x.detach().reshape(-1, x.shape[-1]).double().abs().sum(dim=0)

    with quiet(model, ()), projection_inputs(model, add):
        for window in samples:
            loss(model, window)
            tokens += len(window)
    return (total / max(tokens, 1)).float()


def mean_loss(model: PreTrainedModel, windows: Sequence[Tensor], layers: Sequence[tuple[Factors, Factors]]) -> float:
    """Return the mean loss over ``windows`` of the model with each layer's (key factors, value factors)."""
    with quiet(model, ()), swapped(model, layers):
        return sum(float(loss(model, w)) for w in windows) / len(windows)


def loss(model: PreTrainedModel, window: Tensor) -> Tensor:
    """Return the mean negative log likelihood of a window [n] after its first token."""
    ids = window.to(model.device)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    return F.cross_entropy(logits.float(), ids[1:])


@contextmanager
def projection_inputs(model: PreTrainedModel, see: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call ``see(layer, x [B, n, d])`` with the input of each layer's key and value projections; hooks go on exit."""

    def watch(layer: int, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        return module.register_forward_pre_hook(lambda _, args: see(layer, args[0]))

    handles = [watch(i, projection(a)[0]) for i, a in enumerate(attention_modules(model))]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def quiet(model: PreTrainedModel, wanted: Sequence[Tensor]) -> Iterator[None]:
    """Keep the model in eval mode, with gradients for ``wanted`` parameters alone; its settings come back on exit."""
    flags = [(p, p.requires_grad) for p in model.parameters()]
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        for p, _ in flags:
            p.requires_grad_(False)
        for w in wanted:
            w.requires_grad_(True)
        with torch.set_grad_enabled(bool(wanted)):
            yield
    finally:
        for p, required in flags:
            p.requires_grad_(required)
        for module in training:
            module.training = True

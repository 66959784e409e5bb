"""Statistics over windows of text that low-rank methods use: moments, gradients, mean sizes, losses.

x is the input of a layer's key and value projections, which both read the same. A window is a tensor of token ids
[tokens]. Memory holds the statistics and one window at a time, whatever the number of windows.

Shapes: Hk kv heads, D head dimension, d hidden size, B rows, n tokens of a window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvbench.models.factors import Factors
from kvbench.models.interface import compressed_modules, evaluating
from kvbench.models.lowrank import ProjectionShape, head_rows, projection_modules, swap_projections


def measure_moments(model: PreTrainedModel, samples: Iterable[Tensor], fisher: bool) -> tuple[Tensor, Tensor | None]:
    """Return (mean moments [layers, d, d] fp32, Fisher values [layers, 2, Hk]) of the windows ``samples``.

    Moments are x x^T, and their mean is over all tokens. Fisher values are sqrt(E[g^2]), averaged over the entries of a
    head's key projection (index 0) and value projection (index 1). g is the gradient of a window's mean loss, and E is
    the mean over windows. Without ``fisher`` no gradients are computed, and the Fisher values are None.
    """
    shape, modules = ProjectionShape.of(model), compressed_modules(model)
    device = projection_modules(modules[0])[0].weight.device
    sums = torch.zeros(shape.layers, shape.hidden, shape.hidden, dtype=torch.float64, device=device)
    tokens, windows = 0, 0

    def add_moments(layer: int, x: Tensor) -> None:
        """Add x x^T of the tokens of x [B, n, d] to the layer's sum."""
        # x [B, n, d] -> [B n, d]: the sum of x x^T over tokens is X^T X
        flat = x.detach().reshape(-1, x.shape[-1]).float()
        sums[layer] += flat.T @ flat

    parameters = _select_projection_weights(modules, fisher)
    # the sums of g^2 over windows
    squares = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters]
    with only_gradients_of(model, parameters), projection_inputs(model, add_moments):
        for window in samples:
            window_loss = loss_on_window(model, window)
            if fisher:
                gradients = torch.autograd.grad(window_loss, parameters)
                for square, gradient in zip(squares, gradients, strict=True):
                    square += gradient.float().square()
            tokens += len(window)
            windows += 1
    # without windows the moments are 0
    moments = (sums / max(tokens, 1)).float()
    if not fisher:
        return moments, None
    return moments, _average_by_head(modules, shape.heads, squares, windows)


def _average_by_head(modules: Sequence[nn.Module], heads: int, squares: Sequence[Tensor], windows: int) -> Tensor:
    """Return the Fisher values [layers, 2, Hk]: sqrt(E[g^2]), averaged over a head's key entries and value entries.

    modules: the attention modules, each with ``heads`` kv heads.
    squares: the sums of g^2 over ``windows`` windows, for each weight of ``_select_projection_weights``.
    """
    # 2, or GPT-NeoX's one
    weights_per_layer = len(projection_modules(modules[0]))
    fisher_layers = []
    for i, attention in enumerate(modules):
        layer_squares = squares[i * weights_per_layer : (i + 1) * weights_per_layer]
        # sqrt(E[g^2])
        roots = [(square / max(windows, 1)).sqrt() for square in layer_squares]
        # the mean over each head's entries, for keys and for values: [Hk, D, d] -> [Hk]
        head_means = [rows.mean(dim=(1, 2)) for rows in head_rows(attention, roots, heads)]
        fisher_layers.append(torch.stack(head_means))
    return torch.stack(fisher_layers)


def _select_projection_weights(modules: Sequence[nn.Module], fisher: bool) -> list[Tensor]:
    """Return the weights of all layers' key and value projections in order; [] without ``fisher``: no gradients."""
    weights: list[Tensor] = []
    if fisher:
        for attention in modules:
            weights.extend(module.weight for module in projection_modules(attention))
    return weights


def moments_bytes(model: PreTrainedModel, fisher: bool) -> tuple[int, int]:
    """Return (the bytes that ``measure_moments`` takes while it measures, the bytes of its mean moments).

    fisher: True if it measures Fisher values as well.
    """
    shape = ProjectionShape.of(model)
    entries = shape.layers * shape.hidden**2
    weights = _select_projection_weights(compressed_modules(model), fisher)
    # sums are fp64 and their mean is fp32; each weight has an fp32 square and a gradient in its own dtype
    gradient_bytes = sum(weight.numel() * (4 + weight.element_size()) for weight in weights)
    return 8 * entries + gradient_bytes, 4 * entries


def mean_sizes(model: PreTrainedModel, samples: Iterable[Tensor]) -> Tensor:
    """Return the mean [layers, d], in fp32, of |x_i| for each input channel i over all tokens of ``samples``.

    samples: the windows of text.
    """
    shape = ProjectionShape.of(model)
    sums = torch.zeros(shape.layers, shape.hidden, dtype=torch.float64, device=model.device)
    tokens = 0

    def add_sizes(layer: int, x: Tensor) -> None:
        """Add |x| of the tokens of x [B, n, d] to the layer's sum."""
        sums[layer] += x.detach().reshape(-1, x.shape[-1]).double().abs().sum(dim=0)

    with only_gradients_of(model, ()), projection_inputs(model, add_sizes):
        for window in samples:
            # ``add_sizes`` sees the inputs while the model runs, and the loss itself is not used
            loss_on_window(model, window)
            tokens += len(window)
    # without windows the means are 0
    return (sums / max(tokens, 1)).float()


def mean_loss(model: PreTrainedModel, windows: Sequence[Tensor], layers: Sequence[tuple[Factors, Factors]]) -> float:
    """Return the mean loss over ``windows`` of the model with low-rank projections in each layer.

    ``layers`` has (key factors, value factors) for each layer.
    """
    with only_gradients_of(model, ()), swap_projections(model, layers):
        return sum(float(loss_on_window(model, window)) for window in windows) / len(windows)


def loss_on_window(model: PreTrainedModel, window: Tensor) -> Tensor:
    """Return the mean negative log likelihood, in nats, of the tokens of a window [n] after the first."""
    ids = window.to(model.device)
    # logits after token i predict token i + 1
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    return F.cross_entropy(logits.float(), ids[1:])


@contextmanager
def projection_inputs(model: PreTrainedModel, see: Callable[[int, Tensor], None]) -> Iterator[None]:
    """While the context is open, call ``see(layer, x)`` with the input x [B, n, d] of a layer's projections.

    It is called each time that the key and value projections of a layer run.
    """

    def watch(layer: int, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        """Hook a layer's projection ``module``, so that ``see`` gets its inputs, and return the hook's handle."""

        def see_input(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            """Pass the input of the projection to ``see`` (a forward pre-hook)."""
            see(layer, args[0])

        return module.register_forward_pre_hook(see_input)

    # keys and values have the same input, so a hook on a layer's first projection is enough
    handles = [watch(i, projection_modules(attention)[0]) for i, attention in enumerate(compressed_modules(model))]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def only_gradients_of(model: PreTrainedModel, wanted: Sequence[Tensor]) -> Iterator[None]:
    """While the context is open, the model is in eval mode, and only the ``wanted`` parameters get gradients.

    Without wanted parameters no gradients are computed. The model's settings come back on exit.
    """
    former_flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in former_flags:
            parameter.requires_grad_(False)
        for weight in wanted:
            weight.requires_grad_(True)
        with evaluating(model), torch.set_grad_enabled(bool(wanted)):
            yield
    finally:
        for parameter, required in former_flags:
            parameter.requires_grad_(required)

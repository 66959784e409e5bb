"""At which distances heads merge into clusters of like attention, in the mean over text (CHAI, arXiv 2403.08058)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.segment import Needs, Observation
from kvbench.engine.prefill import as_prompt, observe
from kvbench.methods.chai import OBSERVED, merged


def measure(model: PreTrainedModel, samples: Iterable[Tensor], tick: Callable[[], None]) -> Tensor:
    """Mean distance [layers, Hq - 1] of each layer's merges, in their order, over the beginnings of windows of ids."""
    n_layers, heads = int(model.config.num_hidden_layers), int(model.config.num_attention_heads)
    total, count = torch.zeros(n_layers, heads - 1, dtype=torch.float64), 0

    def on_layer(obs: Observation, k: Tensor, v: Tensor) -> None:
        assert obs.first_q is not None
        _, passed = merged(obs.first_q[:, :OBSERVED], k[:, :OBSERVED], obs.scale, 1)
        total[obs.layer] += torch.tensor(passed, dtype=torch.float64)

    for window in samples:
        observe(model, as_prompt(model, window), Needs(first_q=OBSERVED), on_layer)
        count += 1
        tick()
    return (total / count).float()

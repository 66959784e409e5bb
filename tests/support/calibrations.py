"""Chains bound to calibrations of random content, for tests that ask what holds whatever was measured."""

from __future__ import annotations

from dataclasses import replace

import torch
from support.calibrated import measured

from kvbench.engine.weights_digest import digest_weights
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.recipe import Calibration, digest
from kvbench.methods.core.resolve import chain_of


def uncomp(layers: int, heads: int) -> dict[str, torch.Tensor]:
    """Random entropies and effective ranks, and counts and ranks over 9 samples, with ties."""
    generator = torch.Generator().manual_seed(layers * heads)
    return {
        "entropy": torch.rand(layers, heads, generator=generator),
        "counts": torch.randint(0, 10, (layers, heads), generator=generator).float(),
        "erank_k": torch.rand(3, layers, generator=generator),
        "ranks": torch.randint(0, 9 * heads, (layers, heads), generator=generator).float(),
    }


CONTENT = {"uncomp": uncomp}


def bound(chain: Chain, layers: int, heads: int, weights: str = "none") -> Chain:
    """The chain with every stage that needs a calibration bound to a random one of its kind."""

    def bind(stage):
        recipe = stage.recipe()
        if recipe is None or stage.calibration is not None:
            return stage
        tensors = CONTENT[recipe.kind](layers, heads)
        return stage.calibrated(Calibration(recipe.kind, digest(tensors), weights, tensors))

    return replace(chain, stages=tuple(bind(s) for s in chain.stages))


chains: dict[str, Chain] = {}
"""Chains by the text of their entry: many tests ask for the same ones, and a chain never changes."""


def resolved(entry) -> Chain:
    """The chain of an entry with all of its keys."""
    if repr(entry) not in chains:
        chains[repr(entry)] = chain_of(entry)
    return chains[repr(entry)]


def ready(model, entry, per: str = "kv_head") -> Chain:
    """One chain of an entry as ``kvbench.prefill`` takes it, bound for ``model``; measured where it adapts that."""
    entry = {"method": entry} if isinstance(entry, str) else entry
    chain = entry if isinstance(entry, Chain) else resolved({"per": per, **entry})
    chain = replace(chain, stages=tuple(measured(model, s) if s.adapts else s for s in chain.stages))
    return bound(chain, model.config.num_hidden_layers, model.config.num_attention_heads, digest_weights(model))

"""Every registered method with small settings, and the logits of its first decode steps."""

from functools import partial

import torch
from support.families import SMALL_BLOCKS

from kvbench.audit.accounting import bytes_held
from kvbench.engine.prefill import prefill_chains
from kvbench.engine.step import build, step
from kvbench.methods.core import registry
from kvbench.methods.core.base import Modifier
from kvbench.methods.core.resolve import chain_of
from kvbench.models.interface import attached

CHAINS = ["snapkv+think", "adakv+think", "adakv+kivi", "think+kivi", "h2o+think variant=orig", "scissorhands+vatp"]
CHAINS += [
    "keydiff variant=paper block=16",
    "snapkv+think decode_budget=36 decode_every=1",
    "chunkkv variant=code reuse=2",
]
N, NEW = 60, 40


def every_method():
    """Those that need no calibration, each by itself or on the first that it decorates, and some chains."""
    written = [*CHAINS, "uncomp-group grouping=random"]
    for name in registry.available():
        stage = registry.make_stage(name, registry.defaults(name)) if name != "full" else None
        if stage is None or not stage.unbound:
            written.append(f"{stage.decorates[0]}+{name}" if isinstance(stage, Modifier) else name)
    return [parsed(w) for w in written]


def methods_on(name):
    """Every method on Llama, and every sixth on OPT, which rotates no keys."""
    if name == "opt":
        return [chain for chain in every_method() if "expectedattention" not in chain.name][::6]
    return every_method()


def parsed(written):
    method, *knobs = written.split()
    sized = any("kv_size" in registry.knob_names(m) for m in method.split("+"))
    size = {"kv_size": 40} if sized else {}
    return chain_of(
        {
            "method": method,
            **SMALL_BLOCKS.get(method, {}),
            **size,
            **{k: int(v) if v.isdigit() else v for k, v in map(partial(str.split, sep="="), knobs)},
        }
    )


def answered(model, chains):
    """Logits of two steps of every chain's two rows, a few tokens apart, and of one where half of the rows are left."""
    ids = torch.randint(3, 120, (N,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), attached(model):
        read = [prefill_chains(model, ids[:n], chains) for n in (N, N - 15)]
        caches = [c for pair in zip(*read, strict=True) for c in pair]
        assert all(bytes_held(layer).total > 0 for c in caches for layer in c.layers)
        batch, collected = build(model, caches, NEW), []
        starts = torch.tensor([[c.seen] for c in caches], device=model.device)
        token = torch.full_like(starts, 5)
        for t in range(2):
            collected.append(step(model, batch, token, starts + t))
        odd = torch.arange(1, len(caches), 2)
        for layer in batch.with_keys:
            layer.keep(odd)
            assert all(n > 0 for n in layer.payload())
        collected.append(step(model, batch, token[1::2], starts[1::2] + 2))
    return collected

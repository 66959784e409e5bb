"""What else generates: transformers' own caches and other systems, in the same run where they are installed."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from kvbench.bench.clock import Clock, Mark, timed_attention
from kvbench.bench.passes import Pass
from kvbench.errors import unknown
from kvbench.shape import from_config

QUANTISERS = {"optimum.quanto": "quanto", "hqq": "hqq"}
BITS = 4
RATIO = 0.5


@dataclass(frozen=True)
class Peer:
    """Another way to generate. ``packages``: any one of them must be there (all of them, if ``every``).

    ``options`` of ``generate``; ``context`` is entered around it. ``never`` says why it is only declared here.
    """

    name: str
    what: str
    packages: tuple[str, ...] = ()
    options: Callable[[], Mapping[str, Any]] = dict
    context: Callable[[PreTrainedModel], Any] = field(default=lambda model: nullcontext())
    cuda: bool = False
    never: str = ""

    def missing(self, device: torch.device) -> str:
        """Why it cannot run here; '' if it can."""
        if self.packages and not any(_installed(p) for p in self.packages):
            return f"needs {' or '.join(self.packages)}, which is not installed"
        if self.cuda and device.type != "cuda":
            return "needs a CUDA device"
        return self.never


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def _quantised() -> Mapping[str, Any]:
    backend = next(name for package, name in QUANTISERS.items() if _installed(package))
    return {"cache_implementation": "quantized", "cache_config": {"backend": backend, "nbits": BITS}}


def _press(model: PreTrainedModel) -> Any:
    return import_module("kvpress").SnapKVPress(compression_ratio=RATIO)(model)


@dataclass
class _Offloaded:
    """Weights in the processor's memory, brought to the device layer by layer."""

    model: PreTrainedModel

    def __enter__(self) -> None:
        import_module("accelerate").cpu_offload(self.model, execution_device=self.model.device)

    def __exit__(self, *_: object) -> None:
        hooks = import_module("accelerate.hooks")
        hooks.remove_hook_from_submodules(self.model)


PEERS = {
    p.name: p
    for p in (
        Peer("dynamic", "transformers' generate with DynamicCache"),
        Peer("static", "transformers' generate with StaticCache", options=lambda: {"cache_implementation": "static"}),
        Peer("quantized", f"transformers' QuantizedCache at {BITS} bits", tuple(QUANTISERS), _quantised),
        Peer(
            "offload", "generate with weights offloaded by accelerate", ("accelerate",), context=_Offloaded, cuda=True
        ),
        Peer("kvpress", f"kvpress' SnapKV that drops {RATIO:.0%} of the prompt", ("kvpress",), context=_press),
        Peer("deepspeed", "DeepSpeed-Inference", ("deepspeed",), never="declared, not driven from here"),
        Peer("flexgen", "FlexGen's own engine", ("flexllmgen", "flexgen"), never="declared, not driven from here"),
    )
}


def find(name: str) -> Peer:
    """By name; UsageError naming those there are."""
    if name not in PEERS:
        raise unknown("peer", name, (*PEERS, "all", "none"))
    return PEERS[name]


class _Marks(StoppingCriteria):
    """Never stops: takes down the moment of each new token."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.marks: list[Mark] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.marks.append(self.clock.mark())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def run(model: PreTrainedModel, peer: Peer, ids: Tensor, new: int) -> Pass:
    """``new`` tokens of each row of ``ids`` [B, n] by transformers' generate under ``peer``; prompts read together."""
    clock, ids = Clock(model.device), ids.to(model.device)
    marks = _Marks(clock)
    with torch.no_grad(), peer.context(model), timed_attention(model.config._attn_implementation, clock):
        clock.wait()
        began, start = time.perf_counter(), clock.mark()
        out = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            stopping_criteria=StoppingCriteriaList([marks]),
            **peer.options(),
        )
        clock.wait()
        total = time.perf_counter() - began
    steps = tuple(clock.seconds(a, b) for a, b in zip(marks.marks, marks.marks[1:], strict=False))
    first = clock.seconds(start, marks.marks[0])
    held = cache_bytes(out.past_key_values)
    del out
    gc.collect()
    shape, width = from_config(model.config), next(model.parameters()).element_size()
    dense = len(ids) * shape.full_bytes(ids.shape[1], width)
    return Pass(
        ttft=first,
        prefill=first,
        compress=0.0,
        build=0.0,
        decode=sum(steps),
        tpot=sum(steps) / len(steps),
        attention=clock.attention_seconds(),
        total=total,
        steps=steps,
        cache_bytes=held if held is not None else dense,
        read_bytes=float(held if held is not None else dense),
    )


def cache_bytes(cache: Any) -> int | None:
    """Bytes of the tensors that a transformers cache holds at the end; None where it does not show them."""
    tensors = [
        t
        for layer in getattr(cache, "layers", ())
        for name in ("keys", "values", "_quantized_keys", "_quantized_values")
        if isinstance(t := getattr(layer, name, None), Tensor)
    ]
    return sum(t.nbytes for t in tensors) if tensors else None

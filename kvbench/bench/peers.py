"""Other ways to generate: transformers' own caches and other systems. They are timed in the same run, if installed."""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList, cache_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvbench.base.errors import KvbenchError, unknown
from kvbench.bench.clock import Clock, Mark, timed_attention
from kvbench.bench.generation_pass import Pass
from kvbench.engine.memory import release
from kvbench.models.releases import named_cache

BITS = 4
"""The bits of a number in transformers' quantised caches."""
RATIO = 0.5
"""The share of a prompt's tokens that kvpress removes."""
WHOLE = "the whole cache is made exact again in every step"
"""The remark on peers that dequantise the cache before attention."""


def _make_dynamic_cache(model: PreTrainedModel, tokens: int) -> Any:
    """Return transformers' cache that grows with every token. It needs no number of ``tokens``."""
    return cache_utils.DynamicCache(config=model.config)


@dataclass(frozen=True)
class Peer:
    """A way to generate without kvbench, such as transformers' own caches or kvpress, timed beside kvbench's methods.

    name: the peer's name on the command line and in tables.
    packages: the packages that it needs.
    cache: a function of (model, tokens of prompt and answer) that makes the cache for ``generate``.
    context: entered around generation, untimed. It yields the model that generates.
    marks: remarks for its row.
    cpu_marks: further ones if it runs on a CPU.
    compiled: whether its steps are compiled on a GPU, so that attention in them cannot be timed.
    never: the reason why it can never run from here, if there is one.
    """

    name: str
    packages: tuple[str, ...] = ()
    cache: Callable[[PreTrainedModel, int], Any] = _make_dynamic_cache
    context: Callable[[PreTrainedModel], Any] = nullcontext
    marks: tuple[str, ...] = ()
    cpu_marks: tuple[str, ...] = ()
    compiled: bool = False
    never: str = ""

    def reason_against(self) -> str:
        """Return why the peer cannot run here, or '' if it can."""
        absent = [package.replace(".", "-") for package in self.packages if not _is_installed(package)]
        if absent:
            return f"needs {' and '.join(absent)}, which is not installed"
        return self.never


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        # the package that contains the module is missing
        return False


def _make_static_cache(model: PreTrainedModel, tokens: int) -> Any:
    """Return transformers' static cache for a prompt and its answer, ``tokens`` together."""
    # the last token of an answer is never fed to the model
    return cache_utils.StaticCache(config=model.config, max_cache_len=tokens - 1)


def _choose_quantised_cache(backend: str) -> Callable[[PreTrainedModel, int], Any]:
    """Return the function that makes transformers' quantised cache in a backend, at BITS bits except for fp8."""
    options: dict[str, int] = {}
    # fp8 has 8 bits and takes no number of them
    if backend != "fp8":
        options["nbits"] = BITS

    def make_cache(model: PreTrainedModel, tokens: int) -> Any:
        return cache_utils.QuantizedCache(backend, model.config, **options)

    return make_cache


@contextmanager
def _with_kvpress(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """While the context is open, kvpress compresses the prompts that ``model`` reads. Yield the model.

    On import kvpress wraps all attention functions for good. They are restored on exit, since kvpress's wrapper reads
    the shape of keys, and kvbench's layers have none.
    """
    previous = dict(ALL_ATTENTION_FUNCTIONS)
    try:
        kvpress = import_module("kvpress")
        # a second import does nothing, so after an earlier use the wrapping is repeated here
        if dict(ALL_ATTENTION_FUNCTIONS) == previous:
            kvpress.patch_attention_functions()
        with kvpress.SnapKVPress(compression_ratio=RATIO)(model):
            yield model
    finally:
        # deleting the instance's own function uncovers the registered one
        for name, plain in previous.items():
            if ALL_ATTENTION_FUNCTIONS[name] is not plain:
                del ALL_ATTENTION_FUNCTIONS[name]


@contextmanager
def _with_offload(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """While the context is open, accelerate brings the weights to the device layer by layer. Yield the model.

    The weights lie in the processor's memory, or on disk if the device is a CPU.
    """
    accelerate, device = import_module("accelerate"), model.device
    with tempfile.TemporaryDirectory() as folder:
        if device.type == "cuda":
            accelerate.cpu_offload(model, execution_device=device)
            # the weights have left the device, and must not count in the peak of generation
            release()
            torch.cuda.reset_peak_memory_stats(device)
        else:
            accelerate.disk_offload(model, folder, execution_device=device)
        try:
            yield model
        finally:
            import_module("accelerate.hooks").remove_hook_from_submodules(model)
            if device.type != "cuda":
                # weights are views of files in the folder, so remove it only now
                for p in model.parameters():
                    p.data = p.data.clone()
            # the hooks gave each module its own copy of tied weights
            model.tie_weights()


@contextmanager
def _with_hooks(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """While the context is open, every layer has accelerate's hooks around it, and all weights stay on the device.

    Yield the model.
    """
    import_module("accelerate").dispatch_model(model, device_map={"": model.device}, force_hooks=True)
    try:
        yield model
    finally:
        import_module("accelerate.hooks").remove_hook_from_submodules(model)


@contextmanager
def _with_deepspeed(model: PreTrainedModel) -> Iterator[Any]:
    """Yield DeepSpeed's engine around ``model``, without its kernels.

    The kernels would replace the model's layers for good, and all other rows run on this model.
    """
    # DeepSpeed logs on standard output, which is for tables and JSON
    with redirect_stdout(sys.stderr):
        engine = import_module("deepspeed").init_inference(model, dtype=model.dtype, replace_with_kernel_inject=False)
    yield engine


FP8_NEVER = "" if hasattr(cache_utils, "Fp8QuantizedLayer") else "needs a newer transformers"
_PEERS = (
    Peer("dynamic"),
    Peer("static", cache=_make_static_cache, compiled=True),
    Peer("quanto", ("optimum.quanto",), cache=_choose_quantised_cache("quanto"), marks=(WHOLE,)),
    Peer("hqq", ("hqq",), cache=_choose_quantised_cache("hqq"), marks=(WHOLE,)),
    Peer("fp8", cache=_choose_quantised_cache("fp8"), marks=(WHOLE,), never=FP8_NEVER),
    Peer("accelerate", ("accelerate",), context=_with_hooks),
    Peer(
        "offload",
        ("accelerate",),
        context=_with_offload,
        cpu_marks=("weights are read from disk in each step: a CPU has no other memory to bring them from",),
    ),
    Peer(
        "kvpress",
        ("kvpress",),
        context=_with_kvpress,
        marks=(f"SnapKV at {RATIO:.0%} of the prompt; tokens of the answer are all kept",),
    ),
    Peer(
        "deepspeed",
        ("deepspeed",),
        context=_with_deepspeed,
        marks=("the engine alone: none of its kernels, nothing offloaded",),
    ),
    Peer("flexgen", never="declared, not driven from here: it runs its own models alone"),
)
PEERS = {peer.name: peer for peer in _PEERS}


def find_peer(name: str) -> Peer:
    """Return a peer by name. Raises UsageError with the known names for any other."""
    if name not in PEERS:
        raise unknown("peer", name, (*PEERS, "all", "none"))
    return PEERS[name]


class _TokenRecorder(StoppingCriteria):
    """A criterion that never stops generation. It records the moments between tokens and the bytes of the cache.

    token_ends: the end of each token so far.
    token_starts: the start of the token that follows each of them. Only this criterion's own work lies in between.
    first_bytes: the cache's bytes after the first token.
    counting_s: the seconds that counting took, to be subtracted.
    """

    def __init__(self, clock: Clock, cache: Any) -> None:
        self.clock, self.cache = clock, cache
        self.token_ends: list[Mark] = []
        self.token_starts: list[Mark] = []
        self.first_bytes, self.counting_s = 0, 0.0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Record the end of a token, and return False for every row of ``input_ids`` [B, tokens]."""
        is_first = not self.token_ends
        self.token_ends.append(self.clock.mark())
        if is_first:
            # count the cache's bytes once; the time that it takes is subtracted later
            start = time.perf_counter()
            self.first_bytes = cache_bytes(self.cache)
            self.counting_s = time.perf_counter() - start
        self.token_starts.append(self.clock.mark())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def run(model: PreTrainedModel, peer: Peer, ids: Tensor, new: int) -> Pass:
    """Generate ``new`` tokens for each row of ``ids`` [B, n] under ``peer``, and return the cost.

    transformers' ``generate`` does the work and reads all prompts together. Raises KvbenchError if the peer generates
    another number of tokens.
    """
    device, n = model.device, ids.shape[1]
    clock, ids = Clock(device), ids.to(device)
    cache = peer.cache(model, n + new)
    recorder = _TokenRecorder(clock, cache)
    attention_is_timed = not (peer.compiled and device.type == "cuda")
    attention_timing: AbstractContextManager[None] = nullcontext()
    if attention_is_timed:
        attention_timing = timed_attention(str(model.config._attn_implementation), clock)
    with torch.no_grad(), peer.context(model) as generator, attention_timing:
        clock.wait()
        start_s, start = time.perf_counter(), clock.mark()
        tokens = _generate(generator, ids, new, cache, recorder)
        clock.wait()
        total = time.perf_counter() - start_s - recorder.counting_s
    token_ends, token_starts = recorder.token_ends, recorder.token_starts
    if tokens.shape[1] != new or len(token_ends) != new:
        raise KvbenchError(f"{peer.name} generated {tokens.shape[1]} tokens a row instead of {new}")
    # decode steps begin with the second token; after the last token no other one begins
    steps = tuple(clock.seconds(begin, end) for begin, end in zip(token_starts[:-1], token_ends[1:], strict=True))
    first_token_s = clock.seconds(start, token_ends[0])
    # the mean over the steps, for a cache that grows evenly or not at all
    read_bytes = (recorder.first_bytes + cache_bytes(cache)) / 2
    # free this peer's memory before the next one is timed
    del cache, recorder.cache
    gc.collect()
    return Pass(
        ttft=first_token_s,
        prefill=first_token_s,
        compress=0.0,
        build=0.0,
        decode=sum(steps),
        tpot=sum(steps) / len(steps),
        attention=clock.attention_seconds() if attention_is_timed else None,
        total=total,
        steps=steps,
        cache_bytes=recorder.first_bytes,
        read_bytes=read_bytes,
        tokens=tokens.cpu(),
    )


def _generate(generator: Any, ids: Tensor, new: int, cache: Any, recorder: _TokenRecorder) -> Tensor:
    """Return ``new`` tokens [B, new] for each row of ``ids`` [B, n], by transformers' ``generate``.

    generator: the model, or a system's own object around it with the same ``generate``.
    cache: the transformers cache to fill.
    recorder: records when each token begins and ends.
    """
    # every row generates exactly ``new`` tokens: nothing ends an answer
    prompts_and_answers = generator.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([recorder]),
        **named_cache(cache),
    )
    prompt_length = ids.shape[1]
    return prompts_and_answers[:, prompt_length:]


def cache_bytes(cache: Any) -> int:
    """Return the bytes of a transformers cache. Each storage counts once, including packed codes and scales."""
    bytes_by_address: dict[int, int] = {}
    for layer in cache.layers:
        for name in ("keys", "values", "_quantized_keys", "_quantized_values"):
            # only quantised layers have the latter two
            for tensor in _find_tensors(getattr(layer, name, None)):
                storage = tensor.untyped_storage()
                bytes_by_address[storage.data_ptr()] = storage.nbytes()
    return sum(bytes_by_address.values())


def _find_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the plain tensors in ``value``: a tensor, a sequence, a mapping, or a tensor that wraps others.

    Anything else, such as None, holds no tensors.
    """
    parts: Iterable[Any] = ()
    if isinstance(value, Tensor):
        # quanto's tensors are subclasses, which name the tensors inside them by PyTorch's protocol
        if hasattr(value, "__tensor_flatten__"):
            inner_names, _ = value.__tensor_flatten__()
            parts = [getattr(value, name) for name in inner_names]
        else:
            yield value
    elif isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (tuple, list)):
        parts = value
    for part in parts:
        yield from _find_tensors(part)

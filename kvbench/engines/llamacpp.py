"""llama.cpp in this process, with its own caches: f16, q8_0, q4_0 and others.

It reads a GGUF through the package llama-cpp-python, greedily, with flash attention, which it needs for coded values.
Caches of 4 and 8 bits are rotated since its pull request 21038; LLAMA_ATTN_ROT_DISABLE turns that off.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from kvbench.base.errors import UsageError, unknown
from kvbench.base.extras import require
from kvbench.base.files import sha256
from kvbench.base.numbers import ceil_div
from kvbench.engines.engine import AskedPrompt, EngineError, Reply
from kvbench.store.results import Facts

CACHE_TYPES: Mapping[str, int] = {
    "f32": 0,
    "f16": 1,
    "bf16": 30,
    "q8_0": 8,
    "q5_1": 7,
    "q5_0": 6,
    "q4_1": 3,
    "q4_0": 2,
    "iq4_nl": 20,
}
"""The types of a cache by llama.cpp's own names (``--cache-type-k``), and their numbers (``enum ggml_type``)."""
EXACT = "f16"
"""llama.cpp's default cache, with which its other caches are compared."""
NO_ROTATION = "LLAMA_ATTN_ROT_DISABLE"
"""The environment variable that turns off the rotation of caches if it is 1."""
ROTATIONS = ("on", "off")
"""The values of the key rotation=: whether llama.cpp may rotate a cache."""
DIGITS = 16
"""The number of digits of a file's SHA-256 in the ids of results."""
BATCH = 512
"""The tokens of a prompt that llama.cpp reads at once. This is its default."""
ROUNDED_TO = 256
"""The length of a cache is rounded up to a multiple of this, as llama.cpp does."""


@dataclass(frozen=True, kw_only=True)
class CacheType:
    """The settings with which llama.cpp stores a cache.

    k: the type of keys, a name of CACHE_TYPES.
    v: the type of values, a name of CACHE_TYPES.
    rotation: one of ROTATIONS, whether llama.cpp may rotate keys and values.
    """

    k: str
    v: str
    rotation: str = "on"

    def __post_init__(self) -> None:
        for name in (self.k, self.v):
            if name not in CACHE_TYPES:
                raise unknown("cache type of llama.cpp", name, CACHE_TYPES)

    @property
    def label(self) -> str:
        """The name of the row, such as ``llama.cpp q4_0`` or ``llama.cpp q8_0/q4_0 rotation=off``."""
        types = f"{self.k}/{self.v}" if self.v != self.k else self.k
        if self.rotation == "off":
            types += " rotation=off"
        return f"llama.cpp {types}"


def build_identity(gguf: str, cache_type: CacheType) -> dict[str, object]:
    """Return the facts that decide llama.cpp's answers. ``gguf`` is the ``fingerprint`` of the model's file."""
    return {"name": "llamacpp", "gguf": gguf} | asdict(cache_type)


@cache
def fingerprint(path: Path) -> str:
    """Return the first digits of a GGUF's SHA-256, which names its weights in the ids of results."""
    return sha256(path)[:DIGITS]


class LlamaCpp:
    """A model in llama.cpp with one type of cache.

    gguf: the model's file.
    cache_type: how keys and values are stored.
    tokens: the length of the longest prompt with its answer.
    threads: the number of CPU threads; None for llama.cpp's default.
    every_logit: True to keep the logits of all tokens, for divergences. They take tokens x vocabulary x 4 bytes.
    """

    def __init__(
        self, gguf: Path, cache_type: CacheType, tokens: int, threads: int | None, every_logit: bool = False
    ) -> None:
        require("llama_cpp", "engine=llamacpp")
        import llama_cpp

        self.gguf, self.cache_type = gguf, cache_type
        # one context answers one prompt at a time
        self.lock = Lock()
        with set_rotation(cache_type.rotation):
            try:
                self.model: Any = llama_cpp.Llama(
                    str(gguf),
                    n_ctx=ceil_div(tokens, ROUNDED_TO) * ROUNDED_TO,
                    n_batch=BATCH,
                    n_ubatch=BATCH,
                    n_threads=threads,
                    n_threads_batch=threads,
                    n_gpu_layers=0,
                    # only flash attention can read coded values
                    flash_attn=True,
                    type_k=CACHE_TYPES[cache_type.k],
                    type_v=CACHE_TYPES[cache_type.v],
                    logits_all=every_logit,
                    seed=0,
                    verbose=False,
                )
            except (ValueError, RuntimeError) as error:
                raise UsageError(f"llama.cpp cannot open {gguf} with a {cache_type.label} cache: {error}") from None

    def facts(self) -> Facts:
        """Return the versions and settings behind the answers, for the provenance of results."""
        return {
            "engine": "llama.cpp",
            "version": f"llama-cpp-python {metadata.version('llama-cpp-python')}",
            "gguf": fingerprint(self.gguf),
            "threads": self.model.n_threads,
        }

    def ask(self, prompt: AskedPrompt) -> Reply:
        """Return llama.cpp's greedy answer to a prompt, with the bytes of the prompt's cache."""
        with self.lock:
            start = time.perf_counter()
            # forget the previous prompt, or llama.cpp would reuse its cache for tokens that both prompts begin with
            self.model.reset()
            try:
                response = self.model.create_completion(
                    list(prompt.ids),
                    max_tokens=prompt.limit,
                    stop=list(prompt.stop),
                    temperature=0.0,
                    repeat_penalty=1.0,
                    seed=0,
                )
            except (ValueError, RuntimeError) as error:
                raise EngineError(f"llama.cpp did not answer: {error}", ends_run=False) from None
            seconds = time.perf_counter() - start
            return Reply(
                text=response["choices"][0]["text"],
                new_tokens=response["usage"]["completion_tokens"],
                seconds=seconds,
                bytes=self._measure_bytes(len(prompt.ids)),
            )

    def _measure_bytes(self, tokens: int) -> int:
        """Cut the cache to its first ``tokens`` tokens, and return the bytes that llama.cpp reports for it."""
        import llama_cpp

        context = self.model.ctx
        memory = llama_cpp.llama_get_memory(context)
        # a context may hold several sequences of tokens, but this one holds only sequence 0
        sequence = 0
        # the answer's tokens go first, because only the prompt's are counted, as for kvbench's own rows; -1 is the end
        llama_cpp.llama_memory_seq_rm(memory, sequence, tokens, -1)
        return int(llama_cpp.llama_state_seq_get_size(context, sequence))

    def compute_logits(self, tokens: tuple[int, ...]) -> Tensor:
        """Return the logits [T, V] after each of ``tokens`` [T], which are read through the cache.

        The model must have been opened with ``every_logit``.
        """
        self.model.reset()
        self.model.eval(list(tokens))
        # copied, because llama.cpp writes the next text's logits into the same memory
        return torch.from_numpy(self.model.scores[: len(tokens)].copy())

    def close(self) -> None:
        """Free the model and its cache."""
        self.model.close()


@contextmanager
def set_rotation(setting: str) -> Iterator[None]:
    """While the context is open, set the environment variable by which llama.cpp decides whether to rotate caches.

    llama.cpp reads it when it makes a model's context. The old value is restored afterwards.

    setting: one of ROTATIONS.
    """
    before = os.environ.get(NO_ROTATION)
    os.environ[NO_ROTATION] = "1" if setting == "off" else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NO_ROTATION]
        else:
            os.environ[NO_ROTATION] = before

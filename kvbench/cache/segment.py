"""The records that pass between the parts of kvbench: prompts, answers, observations and caches.

Shapes use: Hq query heads, Hk kv heads, H stored heads (Hk, or Hq under ``per=query_head``), n prompt
tokens, L stored tokens, D head dimension, T kept channels.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from kvbench.cache.packed import Packed
from kvbench.cache.partly_packed import Codes, Values

if TYPE_CHECKING:
    from kvbench.methods.chain import Chain

Found = TypeVar("Found")


@dataclass(frozen=True)
class Example:
    """One prompt with its references.

    ``prompt`` is text before tokenisation; ``answers`` are the acceptable references; ``classes`` is the closed
    label set of classification tasks; ``question`` is the prompt's end that ``query_aware=false`` withholds until the
    rest is compressed ('' where that cannot be told apart); ``tokens`` are the exact ids of a text that is not
    answered but scored by its likelihood, from token ``meta["prefix"]`` on; ``meta`` holds facts about the example
    (length, depth, ...) that reports use.
    """

    id: str
    prompt: str
    answers: tuple[str, ...]
    max_new_tokens: int
    classes: tuple[str, ...] = ()
    question: str = ""
    tokens: tuple[int, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Needs:
    """What a stage must see of a layer: the last and first queries (counts), column sums, hidden states.

    ``colsums_bits`` are the widths at which column sums are wanted of keys that were quantised per token.
    """

    last_q: int = 0
    first_q: int = 0
    colsums: bool = False
    hidden: bool = False
    colsums_bits: frozenset[int] = frozenset()

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            max(self.last_q, other.last_q),
            max(self.first_q, other.first_q),
            self.colsums or other.colsums,
            self.hidden or other.hidden,
            self.colsums_bits | other.colsums_bits,
        )


@dataclass(frozen=True)
class Observation:
    """One layer of one prefill, as every pending method sees it. Fields that nobody needs are None.

    ``scale`` multiplies q.k (1.0 where the model scales its queries itself). ``prompt`` is the CRC-32 of the token
    ids: methods that draw at random differ between prompts, and never between runs. ``n`` counts the tokens that this
    layer read. Where a stage drops hidden states that is less than the prompt's ``length``, to which budgets refer;
    ``positions`` then says which tokens they are, and everything else is in their order.
    """

    layer: int
    n_layers: int
    n: int
    scale: float
    prompt: int = 0
    last_q: Tensor | None = None  # [Hq, W, D], after RoPE, W = min(needs.last_q, n)
    first_q: Tensor | None = None  # [Hq, w0, D], after RoPE
    colsums: Tensor | None = None  # [Hq, n] fp32, attention received by each token from all queries
    colsums_q: Mapping[int, Tensor] = field(default_factory=dict)  # the same by bit width, of quantised keys
    hidden: Tensor | None = None  # [n, d], input of the attention module
    read_k: Tensor | None = None  # [Hk, n, D], the keys that the prompt's attention read, where not those stored
    latents: tuple[Tensor, Tensor] | None = None  # [n, R] of keys and of values, where projections are low-rank
    inv_freq: Tensor | None = None  # [r / 2], the model's rotary frequencies; None where positions are learned
    length: int = 0  # tokens of the prompt; 0: n
    positions: Tensor | None = None  # [n] int64, ascending; None: 0 .. n - 1
    found: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def once(self, key: Any, compute: Callable[[], Found]) -> Found:
        """What ``compute`` finds of this layer, computed by the first chain that asks for ``key``; never changed."""
        if key not in self.found:
            self.found[key] = compute()
        found: Found = self.found[key]
        return found

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, whether or not this layer read them."""
        return self.length or self.n

    def where(self, device: torch.device) -> Tensor:
        """The positions [n] of the tokens that this layer read."""
        return torch.arange(self.n, device=device) if self.positions is None else self.positions.to(device)

    def queries(self, w: int) -> Tensor:
        """The last ``min(w, n)`` queries [Hq, w, D]; raises if no stage declared that it needs them."""
        if self.last_q is None or self.last_q.shape[1] < min(w, self.n):
            raise ValueError(f"a stage reads the last {w} queries without declaring them in its needs")
        return self.last_q[:, -min(w, self.n) :]


@dataclass(frozen=True)
class Segment:
    """A run of stored tokens in one storage format, ascending in position.

    ``positions`` is [H, L], or [1, L] where all heads keep the same tokens. ``state`` tensors have leading axes
    [H, L] and are gathered with their tokens. ``lengths`` marks ragged heads, which are stored one after the other
    without padding: every leading [H, L] is then [1, N] with N = sum of ``lengths``. Where a quantiser has packed
    the older tokens, these are ``codes``, and ``k`` and ``v`` only the newest tokens, which stay exact. Where query
    heads share logits, ``leads`` names for each the one whose logits it takes, and ``k`` holds, in order, only the
    heads that a leading one reads.

    Of low-rank projections the latents of a layer are stored as one head [1, L, R]: ``latents`` while selection still
    looks at keys, and then (``latent``) in the place of ``k`` and ``v``.
    """

    k: Tensor  # [H, L, D or T]
    v: Tensor  # [H, L, D]
    positions: Tensor  # [H or 1, L] int32
    lengths: Tensor | None = None  # [H] int32; None: all heads hold L tokens
    key_channels: Tensor | None = None  # [H, T] int16, ascending: those kept, of packed keys where there are any
    value_channels: Tensor | None = None  # [H, T] int16, likewise of values
    state: Mapping[str, Tensor] = field(default_factory=dict)
    codes: Codes | None = None
    latents: tuple[Tensor, Tensor] | None = None  # what is stored in the end instead of k and v
    latent: bool = False
    leads: Tensor | None = None  # [Hq] int16

    @property
    def heads(self) -> int:
        return self.v.shape[0] if self.lengths is None else self.lengths.shape[0]

    @property
    def tokens(self) -> int:
        """Tokens held by the head that holds most."""
        return self.positions.shape[1] if self.lengths is None else int(self.lengths.max())

    @property
    def counts(self) -> list[int]:
        """Tokens that each head holds."""
        return [self.tokens] * self.heads if self.lengths is None else self.lengths.tolist()

    def head(self, h: int) -> Segment:
        """One stored head's tokens, a view: [1, its tokens, ...]."""
        end = self.tokens if self.lengths is None else int(self.lengths[: h + 1].sum())
        start = 0 if self.lengths is None else end - int(self.lengths[h])

        def at(t: Tensor) -> Tensor:
            return t[h if t.shape[0] > 1 else 0, start:end][None]

        keys, values = (None if c is None else c[h : h + 1] for c in (self.key_channels, self.value_channels))
        state = {name: at(t) for name, t in self.state.items()}
        if self.codes is None:
            return Segment(at(self.k), at(self.v), at(self.positions), None, keys, values, state)
        codes, k, v = self.codes.head(h, self.k, self.v, start, end)
        return Segment(k, v, at(self.positions), None, keys, values, state, codes)

    def stored(self) -> tuple[Values, Values]:
        """Keys and values of all tokens; raises ValueError where only the older ones are packed."""
        if self.codes is None:
            return self.k, self.v
        if self.k.shape[1] or self.v.shape[1]:
            raise ValueError("some tokens of this segment are packed and some exact")
        return self.codes.k, self.codes.v

    def holding(self, k: Values, v: Values) -> Segment:
        """The segment with these keys and values of all its tokens, both exact or both packed."""
        if not isinstance(k, Packed) or not isinstance(v, Packed):
            assert isinstance(k, Tensor) and isinstance(v, Tensor)
            return replace(self, k=k, v=v, codes=None)
        no_k, no_v = (self.k.new_zeros(x.shape[0], 0, x.shape[2]) for x in (k, v))
        counts = (None, None) if self.lengths is None else (self.lengths.clone(), self.lengths.clone())
        return replace(self, k=no_k, v=no_v, codes=Codes(k, v, *counts))

    def payload(self) -> Iterator[Tensor]:
        """The tensors that hold keys and values as stored."""
        yield self.k
        yield self.v
        if self.codes is not None:
            yield from self.codes.payload()

    def overhead(self) -> Iterator[Tensor]:
        """The tensors that only say what the payload means: positions, lengths, channel ids, state."""
        yield self.positions
        counts = () if self.codes is None else (self.codes.k_counts, self.codes.v_counts)
        named = (self.lengths, *counts, self.key_channels, self.value_channels, self.leads)
        yield from (t for t in named if t is not None)
        yield from self.state.values()


@dataclass(frozen=True)
class LayerCache:
    """One layer of one prompt's cache: no batch axis.

    ``segments`` hold the compressed tokens first and any dense tail last; ``seen`` is the number of tokens read so
    far, hence the position of the next one; ``heads`` is the number of heads under which a chain stores (Hk, or Hq
    under ``per=query_head``); ``query_heads`` is Hq. ``weight`` is what a stage that divides one budget over all layers
    weighs this one by; None where the layer takes no part. ``decided`` are the prompt's tokens that each stored head
    keeps, as a stage records them whose count depends on the data. ``prompt`` is the prompt's length when it was
    compressed, to which budgets refer for the whole generation (0: all that was read).
    """

    segments: tuple[Segment, ...]
    seen: int
    heads: int
    query_heads: int
    weight: float | None = None
    decided: tuple[int, ...] | None = None
    prompt: int = 0
    copy_from: Tensor | None = None  # [Hq] int16: the head whose attention output each head has; None: all their own

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, which budgets refer to, whatever was read since."""
        return self.prompt or self.seen

    @property
    def tokens(self) -> int:
        """Tokens held per stored head, at most."""
        ragged = [s.lengths for s in self.segments if s.lengths is not None]
        even = sum(s.tokens for s in self.segments if s.lengths is None)
        return even + (int(torch.stack(ragged).sum(dim=0).max()) if ragged else 0)

    def kept_positions(self) -> list[Tensor]:
        """The original positions of the tokens held, one ascending int32 tensor per stored head."""
        heads = max([self.heads, *(s.heads for s in self.segments)])
        kept: list[list[Tensor]] = [[] for _ in range(heads)]
        for segment in self.segments:
            if segment.lengths is None:
                parts = per_head(segment.positions, heads).unbind()
            else:
                parts = segment.positions[0].split(segment.lengths.tolist())
            for h in range(heads):
                kept[h].append(parts[h])
        return [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in kept]

    def even_positions(self) -> Tensor | None:
        """``kept_positions`` [H, tokens] in one tensor, [1, tokens] where all heads share them; None where ragged."""
        if any(s.lengths is not None for s in self.segments):
            return None
        heads = max(s.positions.shape[0] for s in self.segments)
        parts = [per_head(s.positions, heads) for s in self.segments]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def nbytes(self) -> int:
        """Bytes of the storages that this layer keeps alive, payload and overhead."""
        return storage_bytes(self.tensors())

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that the layer holds, payload and overhead."""
        yield from (t for s in self.segments for t in (*s.payload(), *s.overhead()))
        if self.copy_from is not None:
            yield self.copy_from


@dataclass(frozen=True)
class Cache:
    """What one chain kept of one prompt, ready to generate from: the layers and the next token's logits [V].

    ``prefill_s`` is the time of the prompt's forward pass without compression (shared by all chains of that pass);
    ``compress_s`` is this chain's own, the statistics that it needs included. ``model`` is the model that made it.
    Calling code never changes a cache: it can be used again.
    """

    layers: tuple[LayerCache, ...]
    logits: Tensor
    chain: Chain
    prompt_tokens: int
    prefill_s: float = 0.0
    compress_s: float = 0.0
    model: weakref.ref[Any] | None = field(default=None, compare=False, repr=False)
    strange: str = ""  # what was found in it, while the prompt was at hand, that the prompt does not have there

    @property
    def seen(self) -> int:
        """Tokens read so far, hence the position of the next one."""
        return self.layers[0].seen

    def nbytes(self) -> int:
        """Bytes of the storages held for keys, values and their overhead, each storage once."""
        return storage_bytes(t for layer in self.layers for t in layer.tensors())


def per_head(t: Tensor, heads: int) -> Tensor:
    """[H', ...] -> [heads, ...], each row repeated for the query heads that share it; H' must divide ``heads``."""
    return t if t.shape[0] == heads else t.repeat_interleave(heads // t.shape[0], dim=0)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors``: a view counts as all of what it keeps alive."""
    storages = {}
    for t in tensors:
        storage = t.untyped_storage()
        storages[storage.data_ptr() if storage.nbytes() else id(storage)] = storage.nbytes()
    return sum(storages.values())

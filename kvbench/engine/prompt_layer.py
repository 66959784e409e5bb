"""One layer of the model while a prompt is read."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from kvbench.kv.exact_attention import attend_in_blocks, attend_rows, attend_with_lse, column_sums
from kvbench.kv.observation import Needs
from kvbench.kv.packed import quantise_zero_point
from kvbench.kv.scale import cap_of
from kvbench.kv.segment import per_head
from kvbench.models.interface import KvbenchLayer, synchronise
from kvbench.storage import split

EXACT = 0  # the bit width under which column sums over unquantised keys are recorded
GROUPED_BY = 5  # first tokens by which heads are grouped
Read = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Share = Callable[..., Tensor | None]
Blocks = Callable[[Tensor], list[tuple[int, Tensor]]]


@dataclass(frozen=True)
class LayerStart:
    """A layer of the first p tokens of a prompt, which were read before the others, with what stages need of them.

    queries: in order, up to the last of them.
    colsums: by the bit width of the keys, EXACT for those as they are.
    """

    keys: Tensor  # [Hk, p, D]
    values: Tensor  # [Hk, p, D]
    hidden: Tensor | None  # [p, d], input of the attention module
    first_q: Tensor | None  # [Hq, w0, D], all that are wanted
    queries: tuple[Tensor, ...]  # [Hq, w, D] each
    colsums: Mapping[int, Tensor]  # [Hq, p]


class PromptLayer(KvbenchLayer):
    """One layer while the prompt is read: causal attention, and the statistics that stages need.

    Attention is over the keys and values that ``read`` makes of the layer's own; None: the layer's own. ``share``
    is ``HeadSharer.leads`` of the layer, which returns the query head whose logits each head takes, and ``blocks``
    ``BlockReader.blocks`` of its keys.

    needs: the statistics that are wanted of the first tokens of the prompt, by their number.
    start: the tokens that were read before; the others follow them.
    """

    def __init__(
        self,
        needs: Mapping[int, Needs],
        plain: bool = False,
        read: Read | None = None,
        share: Share | None = None,
        blocks: Blocks | None = None,
        start: LayerStart | None = None,
    ) -> None:
        super().__init__()
        self.start = start
        self.seen = 0 if start is None else start.keys.shape[1]
        self.needs, self.plain, self.read, self.share, self.blocks = needs, plain, read, share, blocks
        self.observed: dict[int, dict[str, Any]] = {}  # fields of Observation, by the number of tokens
        # seconds by number of tokens and bit width of the keys, EXACT for those as they are
        self.colsums_s: dict[tuple[int, int], float] = {}

    def add(self, k: Tensor, v: Tensor) -> None:
        if self.start is not None:
            k, v = torch.cat([self.start.keys[None], k], 2), torch.cat([self.start.values[None], v], 2)
        self.keys, self.values, self.seen = k, v, k.shape[2]

    def attend(self, query: Tensor, scale: float, window: int | None) -> Tensor:
        assert self.keys is not None and self.values is not None
        q, keys, values = query[0], self.keys[0], self.values[0]
        read_k = None
        if self.read is not None:
            keys, values = self.read(keys, values)
            read_k = keys
        blocks = self.blocks(self.keys[0]) if self.blocks is not None else []
        before = keys.shape[1] - q.shape[1]
        # where column sums are needed, fused attention gives the log-sum-exp of each row with its output
        wanted = bool(before) or any(needs.colsums for needs in self.needs.values())
        fused = not (self.plain or blocks) and window is None and self.share is None and wanted
        with_lse = None
        if fused and before:
            earlier, own = (keys[:, :before], values[:, :before]), (keys[:, before:], values[:, before:])
            with_lse = split.behind(q, earlier, own, scale)
        elif fused:
            with_lse = attend_with_lse(q, keys, values, scale)
        for n, needs in self.needs.items():
            lse = None if with_lse is None else with_lse[1][:, : n - before]
            statistics = self._statistics(n, needs, q[:, : n - before], keys[:, :n], scale, lse)
            self.observed[n] = {"scale": scale, **statistics}
            if read_k is not None:
                self.observed[n]["read_k"] = read_k[:, :n]
        if with_lse is not None:
            return with_lse[0][None]
        if blocks:
            return attend_in_blocks(q, keys, values, scale, blocks)[None]
        leads = None
        if self.share is not None:
            leads = self.share(q[:, :GROUPED_BY], keys[:, :GROUPED_BY], scale=scale)
        if leads is not None:
            # each head attends by its leading head's query and key, over its own values
            keys, values = per_head(keys, len(q))[leads], per_head(values, len(q))
            q = q[leads]
        if self.plain or window is not None or cap_of(scale) is not None:
            return attend_rows(q, keys, values, scale, window)[None]
        return F.scaled_dot_product_attention(
            q[None],
            keys[None],
            values[None],
            attn_mask=causal_lower_right(q.shape[1], keys.shape[1]) if before else None,
            is_causal=not before,
            scale=scale,
            enable_gqa=q.shape[0] != keys.shape[0],
        )

    def _statistics(
        self, n: int, needs: Needs, q: Tensor, keys: Tensor, scale: float, lse: Tensor | None
    ) -> dict[str, Any]:
        """Return what is needed of the first n tokens, by the names of Observation's fields.

        q [Hq, w, D] are the queries that are read now, the last w of them.
        """
        found: dict[str, Any] = {}
        if needs.last_q:
            earlier = self.start.queries if self.start is not None and q.shape[1] < needs.last_q else ()
            found["last_q"] = torch.cat([*earlier, q], dim=1)[:, -needs.last_q :].clone()
        if needs.first_q:
            first = q if self.start is None else self.start.first_q
            assert first is not None
            found["first_q"] = first[:, : needs.first_q].clone()
        if needs.colsums:
            found["colsums"] = self._column_sums(q, keys, scale, (n, EXACT), lse)
        found["colsums_q"] = {}
        for bits in sorted(needs.colsums_bits):
            quantised = quantise_zero_point(keys, bits).dequantise(torch.float32)
            found["colsums_q"][bits] = self._column_sums(q, quantised, scale, (n, bits))
        return found

    def _column_sums(
        self, query: Tensor, keys: Tensor, scale: float, place: tuple[int, int], lse: Tensor | None = None
    ) -> Tensor:
        synchronise(query.device)
        start = time.perf_counter()
        sums = column_sums(query, keys, scale, lse=lse)
        if self.start is not None:
            earlier = self.start.colsums[place[1]]
            sums[:, : earlier.shape[1]] += earlier
        synchronise(query.device)
        self.colsums_s[place] = time.perf_counter() - start
        return sums

    def states(self, hidden: Tensor) -> Tensor:
        """Return the hidden states [n, d] of all tokens where stages need them, of which ``hidden`` [w, d] came now."""
        earlier = None if self.start is None else self.start.hidden
        return hidden if earlier is None else torch.cat([earlier, hidden])

    def take(self) -> tuple[Tensor, Tensor]:
        """Return the dense keys and values [Hk, n, D], each alone in its storage; the layer drops them."""
        assert self.keys is not None and self.values is not None
        k, v = alone(self.keys[0]), alone(self.values[0])
        self.keys = self.values = self.start = None
        return k, v


def alone(t: Tensor) -> Tensor:
    """Return t [H, n, D] contiguous and alone in its storage (fused projections return views of a larger one)."""
    if t.is_contiguous() and t.untyped_storage().nbytes() == t.nbytes:
        return t
    return t.clone(memory_format=torch.contiguous_format)

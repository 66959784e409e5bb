"""One layer of the model while a prompt is read."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from kvbench.kv.exact_attention import attend_in_blocks, attend_rows, attend_with_lse, column_sums
from kvbench.kv.observation import Needs, Observation
from kvbench.kv.own_values import values_or_keys
from kvbench.kv.packed import quantise_zero_point
from kvbench.kv.scale import is_plain
from kvbench.kv.segment import per_head
from kvbench.models.interface import KvbenchLayer, synchronise
from kvbench.storage import split

FLASH_WIDTH = 256  # the most channels of a head that PyTorch's flash attention takes on a GPU
EXACT = 0  # stands for unquantised keys among the bit widths of column sums
GROUPED_BY = 5  # CHAI groups heads by their attention to the first five tokens (arXiv 2403.08058)
# maps a layer's keys and values [Hk, n, D] to those that the prompt's attention reads (Chain.read)
Read = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
# maps the first queries and keys to each query head's leading head [Hq], or None (HeadSharer.leads)
Share = Callable[..., Tensor | None]
# maps keys to (first token, tokens kept before it) of each block in which the prompt is read (BlockReader.blocks)
Blocks = Callable[[Tensor], list[tuple[int, Tensor]]]


@dataclass(frozen=True)
class LayerStart:
    """One layer of a prompt's first p tokens, which were read earlier, with the statistics that stages need.

    keys, values: those of the p tokens.
    hidden: the input of the attention module; None if no stage needs it.
    first_q: the first queries, as many as stages need; None if no stage needs them.
    queries: the last queries of each piece in which the tokens were read, in order. They end with that of token p - 1.
    colsums: the attention that each token received from all queries, by the bit width of the keys. EXACT stands for
        unquantised keys.
    """

    keys: Tensor  # [Hk, p, D]
    values: Tensor  # [Hk, p, D]
    hidden: Tensor | None  # [p, d]
    first_q: Tensor | None  # [Hq, w0, D]
    queries: tuple[Tensor, ...]  # [Hq, w, D] each
    colsums: Mapping[int, Tensor]  # [Hq, p]


@dataclass(frozen=True)
class LayerPlace:
    """Which layer of which prompt a layer is, as observations state it.

    number: the layer's number among the layers that methods compress.
    layers: how many layers methods compress.
    prompts: the CRC-32 of the prompt's first m tokens, for each number m that is observed.
    """

    number: int
    layers: int
    prompts: Mapping[int, int]


class PromptLayer(KvbenchLayer):
    """One layer while the prompt is read: causal attention, and the statistics that stages need.

    needs: the statistics that stages need of the prompt's first m tokens, for each number m that is observed. Empty for
        a local layer.
    place: where the layer stands; None for a local layer.
    plain: True if attention is computed by fp32 softmax rows instead of PyTorch's fused attention.
    read: a function that returns the keys and values to attend; None: the layer's own.
    share: the function that decides which query heads share logits; None: none do.
    blocks: the function that divides the prompt into blocks, each of which sees only some earlier tokens; None: the
        prompt is read whole.
    start: the tokens that were read earlier. The tokens of this pass follow them.
    lends: True if later layers of the model share this layer's keys and values.
    chunk: the tokens of a chunk if the layer attends chunks; None: it attends all tokens, or a window.
    """

    def __init__(
        self,
        needs: Mapping[int, Needs],
        plain: bool = False,
        place: LayerPlace | None = None,
        read: Read | None = None,
        share: Share | None = None,
        blocks: Blocks | None = None,
        start: LayerStart | None = None,
        lends: bool = False,
        chunk: int | None = None,
    ) -> None:
        super().__init__()
        self.needs = needs
        self.plain = plain
        self.place = place
        self.read = read
        self.share = share
        self.blocks = blocks
        self.start = start
        self.lends = lends
        self.chunk = chunk
        # keys and values [Hk, n, D] for later layers that share them, once this layer has ended
        self.lent: tuple[Tensor, Tensor] | None = None
        self.seen = 0
        if start is not None:
            self.seen = start.keys.shape[1]
        # observations by the number of tokens; the pass adds the parts that the layer itself does not know
        self.observed: dict[int, Observation] = {}
        # seconds of column sums by (number of tokens, bit width of the keys); EXACT stands for unquantised keys
        self.colsums_s: dict[tuple[int, int], float] = {}

    def add(self, k: Tensor, v: Tensor) -> None:
        """Take the keys and values of the tokens read in this pass. Tokens that were read earlier come before them."""
        if self.start is not None:
            k = torch.cat([self.start.keys[None], k], dim=2)
            v = torch.cat([self.start.values[None], v], dim=2)
        self.keys, self.values, self.seen = k, v, k.shape[2]

    def attend(self, query: Tensor, scale: float, window: int | None) -> Tensor:
        """Return the attention of the tokens read in this pass, and set ``observed``, the statistics that stages need.

        The queries of a later layer that shares this layer's keys and values come here as well, after ``take``.
        """
        if self.lent is not None:
            return self._attend_lent(query, scale, window)
        assert self.keys is not None and self.values is not None
        q, keys, values = query[0], self.keys[0], self.values[0]
        if self.read is not None:
            keys, values = self.read(keys, values)
        if self.chunk is not None:
            return self._attend_chunks(q, keys, values, scale, self.chunk)
        # blocks are found by the layer's own keys, not by those that ``read`` returns
        blocks = self._find_blocks(self.keys[0])
        fused = self._attend_with_lse(q, keys, values, scale=scale, window=window, in_blocks=bool(blocks))
        if fused is None:
            self._observe_parts(q, keys, scale, lse=None)
            return self._attend_without_lse(q, keys, values, scale=scale, window=window, blocks=blocks)
        out, lse = fused
        self._observe_parts(q, keys, scale, lse=lse)
        return out[None]

    def _find_blocks(self, keys: Tensor) -> list[tuple[int, Tensor]]:
        """Return (first token, tokens kept before it) of each block in which the prompt is read; [] reads it whole.

        keys: the layer's own keys [Hk, n, D].
        """
        if self.blocks is None:
            return []
        return self.blocks(keys)

    def _observe_parts(self, q: Tensor, keys: Tensor, scale: float, lse: Tensor | None) -> None:
        """Set ``observed`` for each number n of first tokens that is observed.

        q: [Hq, w, D], the queries of the tokens read in this pass.
        keys: [Hk, m, D], the keys that these queries attend, those of all tokens.
        lse: [Hq, w], the log-sum-exp of each query's logits if it is known.
        """
        n_earlier = keys.shape[1] - q.shape[1]  # tokens that were read before these queries
        for n, needs in self.needs.items():
            # this pass has read the last ``count`` of the first n tokens
            count = n - n_earlier
            part_lse = lse[:, :count] if lse is not None else None
            self.observed[n] = self._observe_tokens(n, needs, q[:, :count], keys=keys[:, :n], scale=scale, lse=part_lse)

    def _attend_chunks(self, q: Tensor, keys: Tensor, values: Tensor, scale: float, chunk: int) -> Tensor:
        """Return the attention [1, Hq, n, D] of q [Hq, n, D]: each chunk of tokens attends itself causally."""
        outputs = []
        for start in range(0, q.shape[1], chunk):
            span = slice(start, start + chunk)
            chunk_out = self._attend_without_lse(
                q[:, span], keys[:, span], values[:, span], scale=scale, window=None, blocks=[]
            )
            outputs.append(chunk_out)
        return torch.cat(outputs, dim=2)

    def _attend_lent(self, query: Tensor, scale: float, window: int | None) -> Tensor:
        """Return the attention [1, Hq, n, D] of a later layer that shares this layer's keys and values.

        No statistics are taken of the later layer: methods choose by the queries of the layer that holds the keys.
        """
        assert self.lent is not None
        keys, values = self.lent
        # blocks are found by the layer's own keys, before ``read`` may change these
        blocks = self._find_blocks(keys)
        if self.read is not None:
            keys, values = self.read(keys, values)
        return self._attend_without_lse(query[0], keys, values, scale=scale, window=window, blocks=blocks)

    def _attend_without_lse(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        window: int | None,
        blocks: list[tuple[int, Tensor]],
    ) -> Tensor:
        """Return the attention [1, Hq, w, D] of the last w of n tokens, without its log-sum-exp.

        q: [Hq, w, D], the queries of the last w tokens.
        keys, values: [Hk, n, D], those of all n tokens.
        blocks: the blocks in which the prompt is read; [] reads it whole.
        """
        n_earlier = keys.shape[1] - q.shape[1]
        if blocks:
            return attend_in_blocks(q, keys, values, scale, blocks)[None]
        leads = None
        if self.share is not None:
            leads = self.share(q[:, :GROUPED_BY], keys[:, :GROUPED_BY], scale=scale)
        if leads is not None:
            # each head attends with its leading head's query and key, over its own values
            keys, values = per_head(keys, len(q))[leads], per_head(values, len(q))
            q = q[leads]
        if self.plain or window is not None or not is_plain(scale):
            return attend_rows(q, keys, values, scale, window)[None]
        values = values_or_keys(keys, values)
        if q.is_cuda and q.shape[2] > FLASH_WIDTH:
            # only one of PyTorch's kernels for wider heads knows grouped heads, and it holds all logits in memory
            keys = _repeat_for_query_heads(keys, len(q))
            values = _repeat_for_query_heads(values, len(q))
        mask = None
        if n_earlier:
            # query i attends tokens 0 .. n_earlier + i; without earlier tokens is_causal is enough
            mask = causal_lower_right(q.shape[1], keys.shape[1])
        return F.scaled_dot_product_attention(
            q[None],
            keys[None],
            values[None],
            attn_mask=mask,
            is_causal=not n_earlier,
            scale=scale,
            enable_gqa=q.shape[0] != keys.shape[0],
        )

    def _attend_with_lse(
        self, q: Tensor, keys: Tensor, values: Tensor, *, scale: float, window: int | None, in_blocks: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Return (attention [Hq, w, D], log-sum-exp [Hq, w] of each row of logits) by fused attention.

        The log-sum-exp is needed for column sums, and to join this pass with tokens that were read earlier. Returns
        None if neither applies, or if fused attention cannot serve.

        q: [Hq, w, D], the queries of the last w tokens.
        keys, values: [Hk, n, D], those of all n tokens.
        in_blocks: True if the prompt is read in blocks.
        """
        n_earlier = keys.shape[1] - q.shape[1]
        needs_colsums = any(needs.colsums for needs in self.needs.values())
        if not n_earlier and not needs_colsums:
            return None
        # fused attention knows neither windows nor blocks nor shared logits
        if self.plain or in_blocks or window is not None or self.share is not None:
            return None
        if n_earlier:
            earlier_tokens = keys[:, :n_earlier], values[:, :n_earlier]
            new_tokens = keys[:, n_earlier:], values[:, n_earlier:]
            return split.attend_after(q, earlier_tokens, new_tokens, scale)
        return attend_with_lse(q, keys, values, scale)

    def _observe_tokens(
        self,
        n: int,
        needs: Needs,
        q: Tensor,
        *,
        keys: Tensor,
        scale: float,
        lse: Tensor | None,
    ) -> Observation:
        """Return the layer's observation after the first n tokens, with the statistics that stages need of them.

        n: how many of the prompt's first tokens are observed. If an earlier layer dropped hidden states, this layer has
            read m < n of them; otherwise m = n.
        q: [Hq, w, D], the queries of the tokens read in this pass, which are the last w of the m tokens.
        keys: [Hk, m, D], the keys that these queries attend.
        lse: [Hq, w], the log-sum-exp of each query's logits if it is known.
        """
        last_q, first_q, exact_sums = None, None, None
        if needs.last_q:
            earlier: tuple[Tensor, ...] = ()
            if self.start is not None and q.shape[1] < needs.last_q:
                earlier = self.start.queries
            last_q = torch.cat([*earlier, q], dim=1)[:, -needs.last_q :].clone()
        if needs.first_q:
            # the first queries are in the first piece
            first_piece: Tensor | None = self.start.first_q if self.start is not None else q
            # an earlier piece was kept with the statistics that this prompt's stages need
            assert first_piece is not None
            first_q = first_piece[:, : needs.first_q].clone()
        if needs.colsums:
            exact_sums = self._measure_column_sums(q, keys, scale, n, EXACT, lse)
        quantised_sums: dict[int, Tensor] = {}
        for bits in sorted(needs.colsums_bits):
            quantised = quantise_zero_point(keys, bits).dequantise(torch.float32)
            quantised_sums[bits] = self._measure_column_sums(q, quantised, scale, n, bits, lse=None)
        assert self.place is not None, "a local layer is not observed"
        return Observation(
            layer=self.place.number,
            n_layers=self.place.layers,
            n=keys.shape[1],  # fewer than the prompt's if an earlier layer dropped hidden states
            scale=scale,
            # the seed of random draws depends on these tokens only, not on the tokens after them
            prompt=self.place.prompts[n],
            last_q=last_q,
            first_q=first_q,
            colsums=exact_sums,
            colsums_q=quantised_sums,
            # None: attention has read the keys that are stored
            read_k=keys if self.read is not None else None,
            length=n,
        )

    def _measure_column_sums(
        self, query: Tensor, keys: Tensor, scale: float, n: int, bits: int, lse: Tensor | None
    ) -> Tensor:
        """Return the attention [Hq, n] that each token received from all queries, and record the seconds that it took.

        query: [Hq, w, D], the last w queries. ``self.start`` has the sums over earlier queries.
        keys: [Hk, n, D], the keys of the first n tokens, quantised to ``bits`` bits (EXACT: not quantised).
        lse: [Hq, w], the log-sum-exp of each query's logits if it is known.
        """
        synchronise(query.device)
        began = time.perf_counter()
        sums = column_sums(query, keys, scale, lse=lse)
        if self.start is not None:
            # earlier queries have attended only the tokens that were read before, so their sums are shorter
            earlier = self.start.colsums[bits]
            sums[:, : earlier.shape[1]] += earlier
        synchronise(query.device)
        self.colsums_s[n, bits] = time.perf_counter() - began
        return sums

    def join_hidden(self, hidden: Tensor) -> Tensor:
        """Return the hidden states [n, d] of all tokens. ``hidden`` [w, d] has those of the tokens read in this pass.

        If no stage needs hidden states, earlier ones were not kept, and the result is ``hidden``.
        """
        if self.start is None or self.start.hidden is None:
            return hidden
        return torch.cat([self.start.hidden, hidden])

    def take(self) -> tuple[Tensor, Tensor]:
        """Return the dense keys and values [Hk, n, D], each alone in its storage, and drop them from the layer.

        A layer that lends its keys and values keeps them for later layers.
        """
        assert self.keys is not None and self.values is not None
        k, v = isolate_tensor(self.keys[0]), isolate_tensor(self.values[0])
        if self.lends:
            self.lent = k, v
        self.keys, self.values, self.start = None, None, None
        return k, v


def _repeat_for_query_heads(t: Tensor, heads: int) -> Tensor:
    """Return keys or values t [Hk, n, D] with each kv head repeated for its query heads, as [heads, n, D]."""
    if t.shape[0] == 1:
        return t.expand(heads, -1, -1)
    return per_head(t, heads)


def isolate_tensor(t: Tensor) -> Tensor:
    """Return t [H, n, D] contiguous and alone in its storage. Fused projections return views of a larger storage."""
    if t.is_contiguous() and t.untyped_storage().nbytes() == t.nbytes:
        return t
    return t.clone(memory_format=torch.contiguous_format)

"""Read the tokens with which consecutive prompts begin alike once: common instructions, examples and documents.

Each prompt is read in pieces of equally many tokens, whether or not the previous prompt has made a piece known. Results
therefore do not depend on earlier prompts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.base.conf import check_piece_size
from kvbench.base.errors import UsageError
from kvbench.engine.prompt_layer import EXACT, LayerStart
from kvbench.engine.prompt_pass import observe_prompt
from kvbench.kv.model_shape import local_layers
from kvbench.kv.observation import Needs, Observation
from kvbench.kv.state import LayerState
from kvbench.models.interface import synchronise
from kvbench.models.traits import MOVING, reads_one_by_one, rope_type


def check_pieces(size: int | None, config: Any) -> None:
    """Raise UsageError unless a model with this ``config`` computes prompts in pieces as it computes whole prompts.

    ``size`` is the number of tokens of a piece; None reads whole prompts, which every model can.
    """
    if size is None:
        return
    reason = None
    if local_layers(config):
        reason = "some of its layers attend only to a window of tokens"
    elif reads_one_by_one(config):
        reason = "because of a bug in transformers, it must read the tokens after the first piece one at a time"
    elif rope_type(config) in MOVING:
        reason = "its rotary positions depend on the length of the text"
    if reason is not None:
        raise UsageError(f"shared_prefix={size} is not possible for this model: {reason}. Leave it out")


@dataclass(frozen=True)
class PieceEnd:
    """The statistics at the end of a piece, after the prompt's first e tokens.

    colsums: for each layer, the column sums [Hq, e] by the bit width of the keys; () after they were dropped.
    forward_s: the seconds of reading the e tokens, without column sums.
    colsums_s: the seconds of the column sums, by the bit width of the keys.
    states: the states of the layers that hold a state; () after the column sums were dropped.
    """

    colsums: tuple[Mapping[int, Tensor], ...]
    forward_s: float
    colsums_s: Mapping[int, float]
    states: tuple[LayerState, ...] = ()


class SharedPrefix:
    """The first tokens of the previous prompt, in whole pieces of ``size`` tokens, kept for the next prompt.

    Kept are their keys and values, and the statistics that stages need: column sums and the last queries at the ends of
    some pieces, and the queries or hidden states of all tokens. The model's weights must not change before ``forget``.
    Raises UsageError for a model that computes a prompt in pieces differently from a whole prompt.

    needs: the statistics that were kept, the union of what all prompts needed.
    plain: True if attention was computed by fp32 softmax rows.
    ids: the tokens [e] of all pieces.
    layers: each layer's keys, values and statistics of these tokens.
    ends: the end of each piece.
    """

    def __init__(self, model: PreTrainedModel, size: int) -> None:
        check_piece_size(size)
        check_pieces(size, model.config)
        self.model, self.size, self.needs, self.plain = model, size, Needs(), False
        self.forget()

    def forget(self) -> None:
        """Drop all tokens and statistics, so that the next prompt is read from its beginning."""
        self.ids = torch.empty(0, dtype=torch.int64)
        self.layers: list[LayerStart] = []
        self.ends: list[PieceEnd] = []
        self._common_pieces = 0  # how many pieces the last two prompts share

    def read(
        self, model: PreTrainedModel, ids: Tensor, needs: Needs, most: int, plain: bool = False
    ) -> tuple[Sequence[LayerStart], PieceEnd] | None:
        """Return (layers, end of the last piece) for the whole pieces within the prompt's first ``most`` tokens.

        Pieces that the previous prompt shares are not read again. The end's seconds are the time of reading all pieces,
        whenever that was. Returns None if there is no whole piece, or if stages need more first queries than a piece
        has.

        ids: the tokens [n] of the prompt.
        needs: the statistics that stages need, whether of the whole prompt or of its first tokens.
        plain: True attends by fp32 softmax rows instead of PyTorch's fused attention.
        """
        if model is not self.model:
            raise UsageError("this prefix was read by another model object: make one for this model")
        # A piece keeps its last queries, at most all of them. Needs of earlier prompts stay: a prompt with fewer needs
        # would otherwise drop known pieces, and the next one would read them again.
        needs = self.needs | replace(needs, last_q=min(needs.last_q, self.size))
        pieces = most // self.size
        if needs.first_q > self.size:
            pieces = 0
        self._common_pieces = self._count_common_tokens(ids[: pieces * self.size]) // self.size
        known = self._common_pieces
        if (needs, plain) != (self.needs, self.plain):
            # the known pieces lack the new statistics, so none of them can be used
            self.needs, self.plain, known = needs, plain, 0
        # reading continues from the newest known end whose column sums were kept
        while known and not self.ends[known - 1].colsums:
            known -= 1
        self._cut(known, last=known == pieces)
        try:
            while len(self.ends) < pieces:
                self._read_piece(ids)
        except BaseException:
            self.forget()  # some layers have the next piece and others lack it
            raise
        if not pieces:
            return None
        return tuple(self.layers), self.ends[-1]

    def _count_common_tokens(self, ids: Tensor) -> int:
        """Return with how many tokens both ``ids`` and the kept tokens begin."""
        overlap = min(len(ids), len(self.ids))
        differing = (ids[:overlap].cpu() != self.ids[:overlap]).nonzero()
        if len(differing):
            return int(differing[0])
        return overlap

    def _cut(self, pieces: int, last: bool) -> None:
        """Forget all but the first ``pieces`` pieces.

        last: True if the next prompt has no further pieces to read. The remaining tokens are then copied, because views
            would keep the memory of the forgotten ones alive. If pieces follow, joining them makes new tensors anyway.
        """
        if pieces == len(self.ends):
            return
        end = pieces * self.size
        self.ends = self.ends[:pieces]
        self.ids = self.ids[:end]
        if not pieces:
            self.layers = []
            return

        def cut_tokens(t: Tensor, dim: int) -> Tensor:
            """Return the tokens of the remaining pieces in t, whose axis ``dim`` counts tokens."""
            first_tokens = t.narrow(dim, 0, end)
            if last:
                return first_tokens.clone()
            return first_tokens

        shorter_layers = []
        # the last end has column sums for every layer: ``read`` goes on from such an end only
        for layer, sums in zip(self.layers, self.ends[-1].colsums, strict=False):
            hidden = cut_tokens(layer.hidden, dim=0) if layer.hidden is not None else None
            shorter_layer = replace(
                layer,
                keys=cut_tokens(layer.keys, dim=1),
                values=cut_tokens(layer.values, dim=1),
                hidden=hidden,
                queries=layer.queries[:pieces],
                colsums=sums,
            )
            shorter_layers.append(shorter_layer)
        self.layers = shorter_layers

    def _read_piece(self, ids: Tensor) -> None:
        """Read the next piece of a prompt ``ids`` [n], and keep its tokens, layers and end."""
        end = len(self.ids) + self.size
        former = PieceEnd(colsums=(), forward_s=0.0, colsums_s={})
        if self.ends:
            former = self.ends[-1]
        states_at_end: list[tuple[LayerState, ...]] = []  # ``on_states`` is called once
        synchronise(ids.device)
        start = time.perf_counter()
        _, seconds = observe_prompt(
            self.model,
            ids[:end],
            self.needs,
            on_layer=self._keep_layer,
            plain=self.plain,
            starts=self.layers,
            states=former.states,
            on_states=states_at_end.append,
        )
        synchronise(ids.device)
        # column sums are kept apart, because only some chains pay for them
        forward_s = time.perf_counter() - start - sum(seconds.values())
        colsums_s = {}
        for (_, bits), piece_seconds in seconds.items():
            colsums_s[bits] = former.colsums_s.get(bits, 0.0) + piece_seconds
        self._drop_statistics()
        piece_end = PieceEnd(
            colsums=tuple(layer.colsums for layer in self.layers),
            forward_s=former.forward_s + forward_s,
            colsums_s=colsums_s,
            states=states_at_end[0],
        )
        self.ends.append(piece_end)
        self.ids = ids[:end].cpu().clone()  # a view would keep the whole prompt alive

    def _keep_layer(self, obs: Observation, k: Tensor, v: Tensor) -> None:
        """Keep a layer's keys, values and statistics of all tokens read so far, in place of those of fewer pieces."""
        sums = dict(obs.colsums_q)
        if obs.colsums is not None:
            sums[EXACT] = obs.colsums
        queries: tuple[Tensor, ...] = ()
        if self.ends:
            # the queries at the ends of earlier pieces stay
            queries = self.layers[obs.layer].queries
        if obs.last_q is not None:
            queries += (obs.last_q,)
        layer = LayerStart(keys=k, values=v, hidden=obs.hidden, first_q=obs.first_q, queries=queries, colsums=sums)
        # replacing the former layer frees it at once; the first piece appends
        self.layers[obs.layer : obs.layer + 1] = [layer]

    def _drop_statistics(self) -> None:
        """Drop the newest end's column sums and states, unless a later prompt is likely to go on from this end.

        They stay if the last two prompts differ after this end, or if its number of pieces is a power of 2. The sums of
        all ends would grow with the square of the tokens. The sums after 1, 2, 4, 8 ... pieces are together only twice
        as large as the last.
        """
        count = len(self.ends)
        # a power of 2 has a single bit, and count - 1 has all the bits below it
        is_power_of_two = count & (count - 1) == 0
        if is_power_of_two or count == self._common_pieces:
            return
        if any(self.ends[-1].colsums) or self.ends[-1].states:
            self.ends[-1] = replace(self.ends[-1], colsums=(), states=())

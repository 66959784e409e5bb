"""UNComp's stage: hidden states leave between layers while the prompt is read (arXiv 2410.03090, section 3.3)."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvbench.base.conf import is_whole
from kvbench.base.numbers import ceil_div
from kvbench.kv.exact_attention import causal_softmax
from kvbench.kv.observation import Needs, Observation
from kvbench.methods.core.contract import top_indices
from kvbench.methods.core.entropy import find_erank_drops, make_entropy_recipe, measure_entropy
from kvbench.methods.core.knobs import Rule, at_least, knob, one_of
from kvbench.methods.core.prefill_changing import HiddenPruner
from kvbench.methods.core.recipe import CalibrationRun, Recipe

STARTS = {32: (0, 2, 15, 26, 31), 40: (0, 1, 3, 15, 23, 31, 35, 37)}
"""The first layer of each group of layers for models of 32 and of 40 layers (appendix A.3).

Between the groups the effective rank of the queries drops.
"""


@dataclass(frozen=True, kw_only=True)
class UncompStage(HiddenPruner):
    """Layer l reads the tokens of layer l - 1 that received most attention there: fewer in every group of layers.

    The attention received by token j is a[j] = sum over heads h and the last ``window`` queries i of layer l - 1 of
    A[h, i, j]. Ties go to the lower index. Layer 0 reads everything. The cache of a layer holds the tokens that it
    read, at their original positions. A selector behind chooses among those, and its budget still refers to the whole
    prompt.

    schedule: with ``relative`` the groups share the layers evenly. The tokens kept fall linearly from all n in the
    first group to ``least`` * n in the last. ``paper`` and ``code`` are for models of 32 and 40 layers, with the groups
    of appendix A.3. Their absolute numbers fall from ``most`` to ``least_size``, and a shorter prompt is not pruned.
    Where equal steps would not be whole numbers, ``paper`` makes the last step larger, and ``code`` the first. For
    40 layers these are 3731, 3366, ... and 3726, 3361, ...
    starts: the first layer of each group for ``relative``, in place of even groups.
    epsilon: with ``relative``, a new group begins where the effective rank of the queries falls by more than this from
    one layer to the next (equation 11, with 1 in the paper). This is the truncated rank, averaged over heads, as the
    calibration of uncomp-group measures it.
    last: number of last tokens that always stay, 8 as in UNComp's window. Released code forces none to stay, but
    without the final token there is nothing to predict from.
    """

    id: ClassVar[str] = "uncomp-stage"

    schedule: str = knob("relative", one_of("relative", "paper", "code"))
    groups: int = knob(4, at_least(1))
    starts: tuple[int, ...] = ()
    epsilon: float | None = knob(None, Rule("a fall of the effective rank, 0 or more, or null", lambda x: x >= 0))
    least: float = knob(0.375, Rule("a fraction of the prompt kept, above 0 and at most 1", lambda x: 0 < x <= 1))
    most: int = knob(4096, at_least(1))
    least_size: int = knob(1536, at_least(1))
    window: int = knob(8, at_least(1))
    last: int = knob(8, at_least(1))
    top: int = knob(32, at_least(1))
    samples: int = knob(100, at_least(1))
    tokens: int | None = knob(None, at_least(2, null=True))

    def check(self) -> None:
        is_list_of_layers = isinstance(self.starts, (list, tuple)) and all(is_whole(i) for i in self.starts)
        ascends_from_0 = False
        if is_list_of_layers:
            starts = list(self.starts)
            ascends = starts == sorted(set(starts))
            # an empty list leaves the groups to other knobs
            ascends_from_0 = ascends and (not starts or starts[0] == 0)
        self.require("starts", ascends_from_0, "an ascending list of layers that starts with 0")
        # YAML gives a list; a frozen dataclass can set its own fields only by object.__setattr__
        object.__setattr__(self, "starts", tuple(self.starts))
        self.require("starts", not self.starts or self.schedule == "relative", "an option of schedule=relative only")
        no_other_groups = self.epsilon is None or (self.schedule == "relative" and not self.starts)
        self.require("epsilon", no_other_groups, "an option of schedule=relative, given instead of starts")
        self.require("least_size", self.least_size <= self.most, f"at most most={self.most}")

    def check_layers(self, n_layers: int) -> None:
        if self.schedule != "relative":
            layer_counts = " and ".join(map(str, STARTS))
            reason = f"the model has {n_layers} layers, and this schedule is of models of {layer_counts}; use relative"
            self.require("schedule", n_layers in STARTS, reason)
        elif self.starts:
            self.require("starts", self.starts[-1] < n_layers, f"the model has layers 0 to {n_layers - 1}")

    def recipe(self) -> Recipe | None:
        # only ``epsilon`` needs the effective ranks of a model
        if self.epsilon is None:
            return None
        return make_entropy_recipe(self.top, self.samples, self.tokens)

    def calibrate(self, run: CalibrationRun) -> dict[str, torch.Tensor]:
        return measure_entropy(run)

    def needs(self, n: int) -> Needs:
        return Needs(last_q=self.window)

    def find_first_layers(self, n_layers: int) -> tuple[int, ...]:
        """Return the number of the first layer of each group, in a model of ``n_layers`` layers.

        Raises UsageError if ``epsilon`` decides the groups and the stage is not calibrated.
        """
        if self.schedule != "relative":
            return STARTS[n_layers]
        if self.starts:
            return self.starts
        if self.epsilon is not None:
            measured = self.measured(f"with epsilon={self.epsilon} its groups", "epsilon")
            # [L] each: the effective ranks of queries, keys and values
            query_eranks, _, _ = measured["erank_k"]
            return (0, *find_erank_drops(query_eranks.tolist(), self.epsilon))
        # group i of g begins at ceil(i * L / g)
        groups = min(self.groups, n_layers)
        return tuple(ceil_div(i * n_layers, groups) for i in range(groups))

    def count_group_tokens(self, n: int, groups: int) -> list[int]:
        """Return for each of ``groups`` groups of layers how many of a prompt's n tokens these layers read.

        ``sizes`` then limits the numbers to at least ``last`` and at most n.
        """
        if self.schedule == "relative":
            if groups == 1:
                return [n]
            # group i of g has the share 1 - (1 - least) * i / (g - 1) of n, from 1 to ``least``
            shares = [1 - (1 - self.least) * i / (groups - 1) for i in range(groups)]
            # 1e-9: a product that should be whole must not be cut to the number below
            return [int(n * share + 1e-9) for share in shares]
        if groups == 1:
            return [self.most]
        # from S_max to S_min in steps of (S_max - S_min) / (g - 1), cut to a whole number (section 3.3)
        step = (self.most - self.least_size) // (groups - 1)
        if self.schedule == "paper":
            # the last step is larger where steps are not whole
            tokens = [self.most - i * step for i in range(groups)]
            tokens[-1] = self.least_size
        else:
            # in released code the first step is larger where steps are not whole
            tokens = [self.least_size + (groups - 1 - i) * step for i in range(groups)]
            tokens[0] = self.most
        return tokens

    def sizes(self, n: int, n_layers: int) -> list[int]:
        starts = self.find_first_layers(n_layers)
        tokens = self.count_group_tokens(n, len(starts))
        sizes = []
        for layer in range(n_layers):
            # the layer's group is the last one that begins at or before the layer
            group = bisect_right(starts, layer) - 1
            sizes.append(min(n, max(self.last, tokens[group])))
        # no layer before layer 0 can have dropped a token
        sizes[0] = n
        return sizes

    def keep_hidden(self, keys: torch.Tensor, obs: Observation) -> torch.Tensor:
        # the number of tokens that the next layer reads
        size = self.sizes(obs.prompt_tokens, obs.n_layers)[obs.layer + 1]
        # a[j] = sum over heads h and the last queries i of A[h, i, j]
        received = causal_softmax(obs.queries(self.window), keys, obs.scale).sum(dim=(0, 1))
        # without the final token there is nothing to predict from
        received[-self.last :] = torch.inf
        # ``top_indices`` takes a row for each head: here one row stands for all heads
        return top_indices(received[None], size)[0]

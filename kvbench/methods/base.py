"""The names that a method's file imports: classes to derive from, and statistics that score tokens.

A selector of tokens derives from ``Selector`` and implements ``scores``. docs/own.md shows one in twelve lines.
"""

from kvbench.methods.core.base import Mask, Modifier, Selector, TokenSelector
from kvbench.methods.core.contract import Block, Capacity, Expected, top_indices, with_sinks
from kvbench.methods.core.knobs import at_least, knob
from kvbench.methods.core.pruner import ChannelPruner
from kvbench.methods.core.stage import Role, Stage
from kvbench.methods.core.statistics import at_heads, pool, window_sums

__all__ = [
    "Block",
    "Capacity",
    "ChannelPruner",
    "Expected",
    "Mask",
    "Modifier",
    "Role",
    "Selector",
    "Stage",
    "TokenSelector",
    "at_heads",
    "at_least",
    "knob",
    "pool",
    "top_indices",
    "window_sums",
    "with_sinks",
]

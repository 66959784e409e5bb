"""Ask foreign methods, which are not kvbench's own, the questions that a run will ask, before the run starts.

A method that cannot answer is left out with the reason, and the run goes on without it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial

from kvbench.base.errors import Refused
from kvbench.base.example import Example
from kvbench.kv.model_shape import Shape
from kvbench.methods.core.chain import Chain
from kvbench.methods.core.loading import locate_error
from kvbench.methods.core.resolve import ChainConfig
from kvbench.methods.core.walls import contained
from kvbench.plan.cells import Group
from kvbench.plan.config import RunConfig
from kvbench.plan.estimate import cache_bytes, keeps_everything
from kvbench.tasks.base import Tokenizer
from kvbench.tasks.encoding import encode_prompt


def find_early_failures(chains: Sequence[ChainConfig]) -> dict[str, str]:
    """Return, by label, why foreign methods cannot say their identity, which is asked before prompts are known.

    Methods that can say it have no entry.
    """
    return _find_failures(chains, _ask_for_identity)


def find_failures_on_prompts(
    cfg: RunConfig, groups: Sequence[Group], shape: Shape, tokenizer: Tokenizer, context: int | None
) -> dict[str, str]:
    """Return, by label, why foreign methods cannot say their budgets and bytes on prompts of a run's groups."""
    if not any(entry.chain.foreign for entry in cfg.chains):
        return {}
    lengths = _find_prompt_lengths(groups, cfg, tokenizer, context)
    return _find_failures(cfg.chains, partial(_ask_for_budgets, shape=shape, lengths=lengths))


def _find_failures(chains: Sequence[ChainConfig], ask: Callable[[Chain], None]) -> dict[str, str]:
    """Return, by label, why ``ask`` fails on foreign methods. Those on which it succeeds have no entry.

    ask: a function that calls those parts of a chain that a run will call.
    """
    reasons = {}
    for entry in chains:
        # a failure of kvbench's own methods is a bug and must be seen
        if not entry.chain.foreign:
            continue
        try:
            # with a seed the method may draw random numbers, as it may in the run; without one it would be refused
            with contained(entry.chain.name, seed=0):
                ask(entry.chain)
        except Refused:
            # the runner meets this refusal again on a prompt, and marks the cell as refused
            continue
        except Exception as error:
            reasons[entry.label] = locate_error(error, entry.chain.name)
    return reasons


def _ask_for_identity(chain: Chain) -> None:
    """Read the attributes of a method that its cells and its place in the run depend on.

    They may be computed by foreign code, which may raise any error.
    """
    chain.identity()
    hash(chain)
    # reading an attribute runs the code of a property
    for name in ("prefill_key", "evictor", "rolled"):
        getattr(chain, name)


def _ask_for_budgets(chain: Chain, shape: Shape, lengths: Collection[int]) -> None:
    """Ask a method for its budgets and bytes on prompts of these lengths in tokens."""
    # the answers are not used: only errors matter, so the bytes of a number and the tokens of an answer may be any
    for n in lengths:
        chain.needs(n)
        cache_bytes(chain, shape, n, itemsize=2)
        keeps_everything(chain, n, answer=1)


def _find_prompt_lengths(
    groups: Sequence[Group], cfg: RunConfig, tokenizer: Tokenizer, context: int | None
) -> set[int]:
    """Return the lengths in tokens of the first and of the longest prompt of each group."""
    lengths = set()
    for group in groups:
        # a group may have no example in this shard
        if not group.examples:
            continue
        first, longest = group.examples[0], sorted(group.examples, key=Example.size)[-1]
        for example in (first, longest):
            # the runner meets a prompt that cannot be encoded again, and reports it
            with suppress(Exception):
                if example.scored is not None:
                    lengths.add(len(example.scored.ids))
                else:
                    lengths.add(len(encode_prompt(tokenizer, example, group.task, cfg.prompt, context)))
    return lengths

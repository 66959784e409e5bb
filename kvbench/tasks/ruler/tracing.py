"""Variable tracking: a chain of assignments hidden in noise, after a worked example of the same form."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from random import Random

import numpy as np

from kvbench.tasks.ruler.fitting import LengthBudget, LengthTooShort, RulerPrompt
from kvbench.tasks.ruler.niah import NOISE

CONTEXT = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
QUESTION = "Question: Find all variables that are assigned the value {query} in the text above."
PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {num_v} variables are assigned the "
    "value {query}, they are: "
)
NAMES = 5
EXAMPLE_TOKENS = 500
EXAMPLE_VALUE = "12345"


def prompts(budget: LengthBudget) -> Iterator[RulerPrompt]:
    """Yield the task's prompts without end."""
    rng, legacy = Random(budget.seed), np.random.RandomState(budget.seed)

    def value() -> str:
        return str(legacy.randint(10000, 99999))

    small = replace(budget, length=EXAMPLE_TOKENS, new_tokens=0)
    draw_example = partial(_draw, rng, 3, lambda: EXAMPLE_VALUE)
    try:
        solved = small.sample(draw_example, small.bisect(draw_example, 5), 5, NAMES)
    except LengthTooShort:
        raise LengthTooShort(
            f"ruler/vt: its solved example has at most {EXAMPLE_TOKENS} tokens, and with this tokenizer even the "
            "shortest has more: leave out vt"
        ) from None
    example = f"{solved.context}{solved.question}{solved.prefix} {' '.join(solved.answers)}\n"

    def with_example(prompt: RulerPrompt) -> RulerPrompt:
        """Return a prompt behind the example, whose names and value are drawn anew."""
        text = example
        for name in solved.answers:
            text = text.replace(name, _name(rng, len(name)))
        text = text.replace(EXAMPLE_VALUE, value())
        return replace(prompt, context=f"{text}\n{prompt.context}")

    draw = partial(_draw, rng, 5, value)
    more, step = budget.count(example), 5 if budget.length < 4096 else 10
    size = budget.bisect(draw, step, more=more)
    while True:
        yield budget.sample(draw, size, step, NAMES, with_example, more)


def _draw(rng: Random, letters: int, draw_value: Callable[[], str], size: int) -> RulerPrompt:
    """Return a prompt with ``size`` lines of noise, without an example."""
    names = [_name(rng, letters) for _ in range(NAMES)]
    while len(set(names)) < NAMES:
        names = [*dict.fromkeys(names), _name(rng, letters)]
    value = draw_value()
    chain = [f"VAR {names[0]} = {value}", *(f"VAR {b} = VAR {a} " for a, b in pairwise(names))]
    lines = [NOISE] * size
    for i, place in enumerate(sorted(rng.sample(range(size), NAMES))):
        lines.insert(place + i, chain[i])
    return RulerPrompt(
        context=CONTEXT.format(context="\n".join(lines)),
        question=QUESTION.format(query=value),
        prefix=PREFIX.format(num_v=NAMES, query=value),
        answers=tuple(names),
        facts={"size": size},
    )


def _name(rng: Random, letters: int) -> str:
    return "".join(rng.choices(string.ascii_uppercase, k=letters))

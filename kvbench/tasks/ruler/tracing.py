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
"""The number of variables in the chain."""
EXAMPLE_TOKENS = 500
"""The most tokens of the solved example."""
EXAMPLE_VALUE = "12345"
"""The value in the solved example. Each prompt replaces it by a drawn one."""


def make_prompts(budget: LengthBudget) -> Iterator[RulerPrompt]:
    """Yield, without end, prompts that ask for all variables that a chain of assignments gives one value.

    Each prompt begins with a solved example.
    """
    # RULER draws names with Python's generator and values with numpy's
    rng, numpy_rng = Random(budget.seed), np.random.RandomState(budget.seed)

    def draw_value() -> str:
        return str(numpy_rng.randint(10000, 99999))

    solved = _draw_solved_prompt(rng, budget)
    # the answer is a part of the example
    example = f"{solved.context}{solved.question}{solved.prefix} {' '.join(solved.answers)}\n"

    def add_example(prompt: RulerPrompt) -> RulerPrompt:
        """Return a prompt behind the example, with newly drawn names and value in the example."""
        text = example
        for name in solved.answers:
            text = text.replace(name, _draw_name(rng, len(name)))
        text = text.replace(EXAMPLE_VALUE, draw_value())
        return replace(prompt, context=f"{text}\n{prompt.context}")

    draw = partial(_draw_prompt, rng, letters=5, draw_value=draw_value)
    # RULER's steps, in lines of noise
    step = 5 if budget.length < 4096 else 10
    example_tokens = budget.count(example)
    size = budget.bisect(draw, step, more=example_tokens)
    while True:
        # a chain of NAMES assignments needs as many lines
        yield budget.sample(draw, size, step, least=NAMES, finish=add_example, more=example_tokens)


def _draw_solved_prompt(rng: Random, budget: LengthBudget) -> RulerPrompt:
    """Return the prompt of the solved example. It has at most EXAMPLE_TOKENS tokens, and names of three letters.

    Raises LengthTooShort if even the smallest prompt has more tokens.
    """

    def give_example_value() -> str:
        return EXAMPLE_VALUE

    # the example's answer is not counted
    small = replace(budget, length=EXAMPLE_TOKENS, new_tokens=0)
    draw_example = partial(_draw_prompt, rng, letters=3, draw_value=give_example_value)
    try:
        size = small.bisect(draw_example, step=5)
        return small.sample(draw_example, size, step=5, least=NAMES)
    except LengthTooShort:
        raise LengthTooShort(
            f"ruler/vt: its solved example has at most {EXAMPLE_TOKENS} tokens, and with this tokenizer even the "
            "shortest has more: leave out vt"
        ) from None


def _draw_prompt(rng: Random, size: int, *, letters: int, draw_value: Callable[[], str]) -> RulerPrompt:
    """Return a prompt with ``size`` lines of noise, without an example.

    letters: the number of letters in the name of a variable.
    draw_value: returns the value of all variables.
    """
    names = [_draw_name(rng, letters) for _ in range(NAMES)]
    # drop a name that was drawn twice, and draw another one behind the others
    while len(set(names)) < NAMES:
        names = list(dict.fromkeys(names))
        names.append(_draw_name(rng, letters))
    value = draw_value()
    # each variable has the value of the one before it; the space at the end is RULER's
    assignments = [f"VAR {names[0]} = {value}"]
    for previous, name in pairwise(names):
        assignments.append(f"VAR {name} = VAR {previous} ")
    lines = [NOISE] * size
    places = sorted(rng.sample(range(size), NAMES))
    for i, (place, assignment) in enumerate(zip(places, assignments, strict=True)):
        # the i assignments before it have moved the place
        lines.insert(place + i, assignment)
    return RulerPrompt(
        context=CONTEXT.format(context="\n".join(lines)),
        question=QUESTION.format(query=value),
        prefix=PREFIX.format(num_v=NAMES, query=value),
        answers=tuple(names),
        facts={"size": size},
    )


def _draw_name(rng: Random, letters: int) -> str:
    return "".join(rng.choices(string.ascii_uppercase, k=letters))

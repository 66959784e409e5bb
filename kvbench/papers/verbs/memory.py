"""bench memory paper=: the numbers that papers compute about memory, computed again."""

from __future__ import annotations

import json
from collections.abc import Mapping

from kvbench.base.errors import UsageError


def print_paper_arithmetic(options: Mapping[str, str], as_json: bool) -> int:
    """Print the figures that a paper computes about memory, computed again. Return exit status 0.

    Raises UsageError for any option but ``paper``.

    options: the verb's key=value arguments. The caller ensures that ``paper`` is among them.
    as_json: True to print JSON.
    """
    from kvbench.papers.timed import paper_arithmetic

    for key, value in options.items():
        if key != "paper":
            raise UsageError(
                f"{key}={value} is not possible with paper=, because the numbers of papers have no options"
            )
    figures = paper_arithmetic.select_figures(options["paper"])
    if as_json:
        print(json.dumps([figure.as_json() for figure in figures], indent=1, ensure_ascii=False))
    else:
        print(paper_arithmetic.render(figures))
    return 0

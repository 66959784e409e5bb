"""Measure the missing rows of an efficiency table on a stand-in, by ``bench time``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvbench.base.errors import UsageError
from kvbench.bench import request
from kvbench.papers.timed import row_matching
from kvbench.papers.timed.timings import Timings


def measure_missing(timings: Timings, more: Sequence[str] = (), plan: bool = False) -> None:
    """Measure the missing rows of an efficiency table, if the table shows a stand-in.

    more: the user's arguments of ``bench time``, such as again=true. They replace the table's own.
    plan: True to print the rows that would be measured, and measure none.
    Raises UsageError for an argument that is not possible.
    """
    # the user's arguments are ``key=value``
    options = {}
    for argument in more:
        key, _, value = argument.partition("=")
        options[key] = value
    again = options.get("again") == "true"
    # the paper's own model is timed on a GPU by a script, not from here
    if not timings.stand_in:
        if again:
            raise UsageError(f"again=true is not possible here: {timings.command} measures {timings.table.id}")
        return
    cells = list(timings.cells.values())
    # ``again`` and ``plan`` concern rows that are measured already, too
    workloads = row_matching.list_workloads(timings.bench, cells, measured=again or plan)
    if not workloads:
        return
    # an argument that the user typed replaces the table's own
    words = [word for word in timings.bench.words(workloads) if word.partition("=")[0] not in options]
    words.extend(more)
    # the file that the table reads
    words += [f"folder={timings.file.parent}", f"name={timings.file.stem}"]
    # a benchmark sets the number of threads for its process, but this process continues with other tables
    threads = torch.get_num_threads()
    try:
        request.measure_rows(words, plan, beside=False)
    finally:
        torch.set_num_threads(threads)

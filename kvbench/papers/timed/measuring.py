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

    For the paper's own model this does nothing: a script times it on a GPU.

    more: the user's arguments of ``bench time``, such as again=true. They replace the table's own.
    plan: True to print the rows that would be measured, and measure none.
    Raises UsageError for an argument that is not possible.
    """
    options = {}
    for argument in more:
        key, _, value = argument.partition("=")
        options[key] = value
    again = options.get("again") == "true"
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
    arguments = []
    for argument in timings.bench.list_arguments(workloads):
        key, _, _ = argument.partition("=")
        if key not in options:
            arguments.append(argument)
    arguments.extend(more)
    # the file that the table reads
    arguments += [f"folder={timings.file.parent}", f"name={timings.file.stem}"]
    # a benchmark sets the number of threads for its process, but this process continues with other tables
    threads = torch.get_num_threads()
    try:
        request.measure_rows(arguments, plan, beside=False)
    finally:
        torch.set_num_threads(threads)

"""The progress of a run on stderr: its answers and the time left. A terminal shows a bar, other streams plain lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import fmean

from rich.console import Console
from rich.progress import Progress, TaskID

from kvbench.base.progress import PLAIN_EVERY_S, make_bars
from kvbench.base.visible import describe_duration, say
from kvbench.plan.run_plan import RunPlan
from kvbench.run.time_left import TaskTime, TimeLeft
from kvbench.store.cell import Cell
from kvbench.store.results import CellSummary, Sample


class Display:
    """A listener that shows how far a run has come.

    times: the work of each task that has something to do, by its column.
    answers: the answers of the whole run, including answers that a refused method will never give.
    open_cells: the number of each task's cells that have not ended.
    left: the estimate of the time left.
    current: the task whose prompts are being read or answered.
    start: the time when the first prompt was about to be read. The model is loaded by then.
    last: the time of the last plain line.
    bars, bar: rich's progress display and the one bar in it; None if plain lines are printed.
    console: where the bar is drawn; None for stderr, if that is a terminal.
    clock: the function that tells the seconds since some moment.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Make a display of no work yet. ``begin`` counts the work of a run."""
        self.console, self.clock = console, clock
        self.times: dict[str, TaskTime] = {}
        self.answers = 0
        self.open_cells: dict[str, int] = {}
        self.left = TimeLeft({})
        self.current = ""
        self.start: float | None = None
        self.last = 0.0
        self.bars: Progress | None = None
        self.bar: TaskID | None = None

    @property
    def done(self) -> int:
        """The number of answers of the whole run that have come."""
        return sum(work.done for work in self.times.values())

    def begin(self, prepared: RunPlan) -> None:
        """Count the run's work, print its notes, and prepare the bar if stderr is a terminal."""
        for group, todo in zip(prepared.groups, prepared.todo(), strict=True):
            # a group that is answered already tells nothing about this run's time
            if todo.answers_to_do:
                # the lengths of examples that no cell still needs must not enter the mean
                waiting = prepared.left(group)
                examples = [example for example in group.examples if example.id in waiting]
                length = fmean(example.size() for example in examples)
                longest_answer = max(example.max_new_tokens for example in examples)
                self.times[group.column] = TaskTime(
                    todo.answers_to_do, prompts=len(examples), length=length, longest_answer=longest_answer
                )
                self.answers += todo.answers_to_do
                self.open_cells[group.column] = len(group.cells)
        self.left = TimeLeft(self.times)
        # if everything is measured, the notes stand below the table
        if not self.times:
            return
        for note in prepared.advice() + prepared.note_drawn_answers() + prepared.note_cut_prompts():
            say(note)
        # bars that redraw themselves would fill a log file
        if self.console is None and sys.stderr.isatty():
            self.console = Console(stderr=True)
        if self.console is not None:
            self.bars = make_bars("{task.fields[task_name]}", self.console)
            self.bar = self.bars.add_task("answers", total=self.answers, start=False, task_name="", left=None)

    def reading(self, column: str) -> None:
        """Show that a prompt of the task ``column`` is being read. The first call starts the clock."""
        if column not in self.times:
            return
        now = self.clock()
        self.current = column
        self.left.prompt_begun(column, now)
        if self.start is None:
            self.start = self.last = now
            if self.bars is not None and self.bar is not None:
                self.bars.start()
                self.bars.start_task(self.bar)
        self._show(now)

    def stored(self, cell: Cell, sample: Sample) -> None:
        """Show that one more answer has come."""
        # tasks that were complete before this run are not counted (see ``begin``)
        if cell.column not in self.times:
            return
        now = self.clock()
        self.current = cell.column
        self.left.answered(cell.column, now)
        self._show(now)

    def ended(self, cell: Cell, status: str, summary: CellSummary | None, reason: str | None) -> None:
        """Take the task's remaining work out of the estimate once all of its cells have ended.

        A cell may end early, because it failed or was refused, so that some of its answers never come.
        """
        if cell.column not in self.times:
            return
        self.open_cells[cell.column] -= 1
        # other cells of this task are measured in a later round
        if self.open_cells[cell.column]:
            return
        self.left.ended(cell.column)
        # the last line of all: plain lines come only now and then, so the end may not have one yet
        if not any(self.open_cells.values()) and self.bars is None:
            self._print_line(self.clock())

    def close(self) -> None:
        """Stop redrawing the bar. Its last state stays on the terminal."""
        if self.bars is not None:
            self.bars.stop()

    def _show(self, now: float) -> None:
        """Move the bar, or print a plain line if the previous one is PLAIN_EVERY_S old.

        now: the clock's time.
        """
        if self.bars is not None and self.bar is not None:
            self.bars.update(self.bar, completed=self.done, task_name=self.current, left=self._estimate_seconds_left())
        # ``ended`` prints the line of a run that has all answers
        elif now - self.last >= PLAIN_EVERY_S and self.done < self.answers:
            self.last = now
            self._print_line(now)

    def _estimate_seconds_left(self) -> float | None:
        return self.left.bound_run().estimate()

    def _print_line(self, now: float) -> None:
        """Print a plain line: the answers of the whole run, the time that has passed, the time left, the task."""
        # a run may end before any prompt was read
        elapsed = now - (self.start or now)
        words = [f"{self.done} of {self.answers} answers", f"{elapsed:.0f} s"]
        if not self.done:
            words[0] += ", reading prompts"
        seconds_left = self._estimate_seconds_left()
        if seconds_left is not None and round(seconds_left):
            words.append(f"about {describe_duration(seconds_left)} left")
        if len(self.times) > 1 and self.done < self.answers:
            words.append(f"now {self.current}")
        say(", ".join(words))

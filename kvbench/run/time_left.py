"""Estimate the time that a run has yet to take. The estimate is given only if it is known within a factor of two.

Answers come in bursts: many prompts are read before the first answer, their answers are decoded together, and short
answers end first. So the time of answering is known only between two bounds, which move together as answers come. The
estimate is the geometric mean of the bounds. If they are too far apart, there is no estimate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, sqrt
from typing import NamedTuple

SPREAD = 3.0
"""The ratio of the bounds above which there is no estimate: 4 would be a factor of 2 if all prompts were alike."""
SEEN = 0.1
"""The share of a task's answers before which nothing is said: the first may be unlike the others."""
ALIKE = 1.25
"""Prompts whose mean lengths differ by less than this factor count as equally long."""
MARGIN = 1.5
"""The factor by which a prompt of a task to come may take more or less than one of a task that was measured."""


class Seconds(NamedTuple):
    """The lower and the upper bound of a time in seconds."""

    low: float
    high: float

    def estimate(self) -> float | None:
        """Return the time, or None if the bounds are more than SPREAD apart."""
        if self.high <= SPREAD * self.low:
            # the geometric mean is off by the same factor from either bound
            return sqrt(self.low * self.high)
        return None


@dataclass
class TaskTime:
    """The work of one task, and the time that it has taken so far.

    answers, prompts: the number of each that the task has in all.
    length: the mean length of its prompts, in characters, or in tokens for windows of a text.
    longest_answer: the most tokens of an answer.
    read, done: the prompts begun and the answers that have come.
    pure, pure_s: the prompts with no answer between them and the next prompt, and the seconds of reading these.
    mixed: the prompts that an answer followed. Their time is part of ``other_s``.
    other_s: all other seconds: of decoding, and of the ``mixed`` prompts.
    known: the seconds of one answer, from the last moment when all answers that were begun had ended.
    cut: whether the task ended before all answers came. It then tells nothing about other tasks.
    """

    answers: int
    prompts: int
    length: float = 0.0
    longest_answer: int = 0
    read: int = 0
    done: int = 0
    pure: int = 0
    pure_s: float = 0.0
    mixed: int = 0
    other_s: float = 0.0
    known: float = 0.0
    cut: bool = False

    @property
    def spent(self) -> float:
        """The seconds that the task has taken so far."""
        return self.pure_s + self.other_s

    @property
    def of_reading(self) -> float:
        """The mean seconds of reading a prompt; 0 if reading is part of the time of answering."""
        if not self.pure:
            return 0.0
        return self.pure_s / self.pure

    @property
    def of_answering(self) -> float:
        """The seconds that answering took in all."""
        return max(self.other_s - self.of_reading * self.mixed, 0.0)

    def begun_answers(self, read: int) -> int:
        """Return how many answers ``read`` prompts have, ended or not."""
        # answers per prompt * prompts read; a task that ended before any prompt was read has no prompts
        return round(read * self.answers / max(1, self.prompts))

    def left(self, reading: bool) -> Seconds | None:
        """Return the seconds that the task has yet to take, or None if nothing can be said.

        reading: True while the newest prompt is still being read.
        """
        if self.done >= self.answers:
            return Seconds(low=0.0, high=0.0)
        # the prompt that is being read has no answers yet
        prompts_read = self.read - int(reading)
        # the answers begun are at least those that have come, and at most all
        begun = max(self.done, min(self.answers, self.begun_answers(prompts_read)))
        if self.done < SEEN * self.answers:
            return None
        # one bound assumes that all begun answers had ended, the other that the unended ones had only begun and were
        # longer, since short answers end first
        least = self.of_answering / begun
        most = max(self.of_answering / self.done * (begun / self.done), self.known)
        # seconds of a prompt * prompts still to be read
        to_read = self.of_reading * max(0, self.prompts - prompts_read)
        # answers take too little time to be told from the reading of their prompts
        if not least + to_read:
            return None
        return Seconds(
            low=to_read + least * (self.answers - begun),
            high=to_read + most * (self.answers - self.done),
        )

    def holds(self, other: TaskTime) -> bool:
        """Return True if this task's prompts take at least as long as those of ``other``, judged by their sizes."""
        answers_per_prompt = self.answers / max(1, self.prompts)
        other_answers_per_prompt = other.answers / max(1, other.prompts)
        lengths = self.length * ALIKE >= other.length and self.longest_answer >= other.longest_answer
        return lengths and answers_per_prompt >= other_answers_per_prompt


class TimeLeft:
    """The time left of a run's tasks, from the run's events: a prompt is begun, an answer comes.

    Events come with their time ``now`` in seconds, by any one clock.

    tasks: the work of each task by name. Events change it.
    """

    def __init__(self, tasks: Mapping[str, TaskTime]) -> None:
        self.tasks = tasks
        # the task of the latest event, and whether that event was the beginning of a prompt
        self._newest: TaskTime | None = None
        self._is_reading = False
        self._last_event = 0.0

    def prompt_begun(self, task: str, now: float) -> None:
        """Count a prompt that is about to be read."""
        newest = self._newest
        if newest is not None:
            if self._is_reading:
                # no answer came since the previous prompt was begun, so the time between belongs to that prompt alone
                newest.pure += 1
                newest.pure_s += now - self._last_event
            else:
                newest.other_s += now - self._last_event
            # all begun answers have come, so the time of an answer is known exactly
            if newest.done and newest.done >= newest.begun_answers(newest.read):
                newest.known = newest.of_answering / newest.done
        self._newest, self._is_reading, self._last_event = self.tasks[task], True, now
        self._newest.read += 1

    def answered(self, task: str, now: float) -> None:
        """Count an answer that has come."""
        newest = self.tasks[task]
        # nothing is known of the time before the first event
        if self._newest is None:
            self._last_event = now
        newest.done += 1
        # the time since the previous event holds the reading of a prompt, too
        if self._is_reading:
            newest.mixed += 1
        newest.other_s += now - self._last_event
        self._newest, self._is_reading, self._last_event = newest, False, now

    def ended(self, task: str) -> None:
        """Count no more work for a task. Answers that have not come were refused or have failed."""
        times = self.tasks[task]
        # times of a task that ended early say nothing about a whole task
        times.cut = times.cut or times.done < times.answers
        times.answers = times.done
        times.prompts = times.read

    def of_task(self, task: str) -> Seconds | None:
        """Return the seconds left of one task, or None if nothing can be said."""
        times = self.tasks[task]
        return times.left(self._is_reading and times is self._newest)

    def of_run(self) -> Seconds:
        """Return the seconds left of all tasks. They have no upper bound while nothing is known of one task.

        A task that has not begun is bounded by tasks that have. Prompt by prompt, it takes at least as long as tasks
        with shorter prompts and answers, and at most as long as tasks with longer ones. The same bounds hold for a task
        that has only just begun.
        """
        low, high = 0.0, 0.0
        measured, to_come = [], []
        for name, task in self.tasks.items():
            seconds = self.of_task(name)
            is_begun = task.read > 0 or not task.answers
            if not is_begun or seconds is None:
                to_come.append(task)
            else:
                low, high = low + seconds.low, high + seconds.high
                if not task.cut:
                    measured.append((task, seconds))
        for task in to_come:
            # seconds a prompt: smaller tasks give the lower bound of a task to come, larger tasks the upper bound
            least = max([(t.spent + s.low) / t.prompts for t, s in measured if task.holds(t)], default=0.0)
            most = min([(t.spent + s.high) / t.prompts for t, s in measured if t.holds(task)], default=inf)
            low += task.prompts * least / MARGIN
            high += task.prompts * most * MARGIN
        return Seconds(low, high)

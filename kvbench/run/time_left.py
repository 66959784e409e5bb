"""Estimate the time that a run has yet to take. The estimate is given only if it is known within a factor of two.

Answers come in bursts: many prompts are read before the first answer, their answers are decoded together, and short
answers end first. So the time of answering is known only between two bounds, which move together as answers come. The
estimate is the geometric mean of the bounds. If they are too far apart, there is no estimate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        """Return the time, or None if the upper bound is more than SPREAD times the lower one."""
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
    exact_answer_s: the seconds of one answer, from the last moment when all answers that were begun had ended. It is 0
    before there was such a moment.
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
    exact_answer_s: float = 0.0
    cut: bool = False

    @property
    def spent_s(self) -> float:
        """The seconds that the task has taken so far."""
        return self.pure_s + self.other_s

    @property
    def prompt_s(self) -> float:
        """The mean seconds of reading a prompt; 0 if reading is part of the time of answering."""
        if not self.pure:
            return 0.0
        return self.pure_s / self.pure

    @property
    def answering_s(self) -> float:
        """The seconds that answering took in all."""
        # ``mixed`` prompts were read in the other seconds, too
        return max(self.other_s - self.prompt_s * self.mixed, 0.0)

    def count_begun_answers(self, read: int) -> int:
        """Return how many answers ``read`` prompts have, ended or not."""
        # prompts read * answers per prompt; a task that ended before any prompt was read has no prompts
        return round(read * self.answers / max(1, self.prompts))

    def bound_seconds_left(self, is_reading: bool) -> Seconds | None:
        """Return bounds on the seconds that the task has yet to take, or None if nothing can be said.

        is_reading: True while the newest prompt is still being read.
        """
        if self.done >= self.answers:
            return Seconds(low=0.0, high=0.0)
        if self.done < SEEN * self.answers:
            return None
        # the prompt that is being read has no answers yet
        prompts_read = self.read - int(is_reading)
        # the answers begun are at least those that have come, and at most all
        begun = max(self.done, min(self.answers, self.count_begun_answers(prompts_read)))
        # seconds of an answer, at least: as if all begun answers had ended
        least_answer_s = self.answering_s / begun
        # at most: as if the unended answers had only begun. They are longer, too, since short answers end first, and
        # the second factor allows for that
        most_answer_s = self.answering_s / self.done * (begun / self.done)
        most_answer_s = max(most_answer_s, self.exact_answer_s)
        reading_left_s = self.prompt_s * max(0, self.prompts - prompts_read)
        # answers take too little time to be told from the reading of their prompts
        if not least_answer_s + reading_left_s:
            return None
        # the lower bound has only answers that are not begun yet, the upper bound all that have not ended
        return Seconds(
            low=reading_left_s + least_answer_s * (self.answers - begun),
            high=reading_left_s + most_answer_s * (self.answers - self.done),
        )

    def takes_as_long_as(self, other: TaskTime) -> bool:
        """Return True if this task's prompts take at least as long as those of ``other``, judged by their sizes."""
        longer_prompts = self.length * ALIKE >= other.length
        longer_answers = self.longest_answer >= other.longest_answer
        answers_per_prompt = self.answers / max(1, self.prompts)
        other_answers_per_prompt = other.answers / max(1, other.prompts)
        return longer_prompts and longer_answers and answers_per_prompt >= other_answers_per_prompt


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
            if newest.done and newest.done >= newest.count_begun_answers(newest.read):
                newest.exact_answer_s = newest.answering_s / newest.done
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

    def bound_task(self, task: str) -> Seconds | None:
        """Return bounds on the seconds left of one task, or None if nothing can be said."""
        times = self.tasks[task]
        return times.bound_seconds_left(self._is_reading and times is self._newest)

    def bound_run(self) -> Seconds:
        """Return bounds on the seconds left of all tasks. The upper bound is inf while nothing is known of one task.

        A task that has not begun is bounded by tasks that have. Prompt by prompt, it takes at least as long as tasks
        with shorter prompts and answers, and at most as long as tasks with longer ones. The same bounds hold for a task
        that has only just begun.
        """
        low, high = 0.0, 0.0
        # (a task that has begun, the bounds on its seconds left)
        measured: list[tuple[TaskTime, Seconds]] = []
        to_come: list[TaskTime] = []
        for name, task in self.tasks.items():
            seconds_left = self.bound_task(name)
            is_begun = task.read > 0 or not task.answers
            if not is_begun or seconds_left is None:
                to_come.append(task)
                continue
            low, high = low + seconds_left.low, high + seconds_left.high
            if not task.cut:
                measured.append((task, seconds_left))
        for task in to_come:
            per_prompt = _bound_prompt(task, measured)
            low += task.prompts * per_prompt.low / MARGIN
            high += task.prompts * per_prompt.high * MARGIN
        return Seconds(low, high)


def _bound_prompt(task: TaskTime, measured: Sequence[tuple[TaskTime, Seconds]]) -> Seconds:
    """Return bounds on the seconds of a prompt with its answers, for a task to come.

    measured: the pairs (a task that has begun, the bounds on its seconds left).
    """
    low, high = 0.0, inf
    for other, seconds_left in measured:
        # tasks that take no longer give the lower bound, tasks that take no less time the upper bound
        if task.takes_as_long_as(other):
            low = max(low, (other.spent_s + seconds_left.low) / other.prompts)
        if other.takes_as_long_as(task):
            high = min(high, (other.spent_s + seconds_left.high) / other.prompts)
    return Seconds(low, high)

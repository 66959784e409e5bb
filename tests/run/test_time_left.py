"""The time left of simulated runs: within a factor of two from a tenth on, or not told."""

import random
from dataclasses import dataclass

import pytest

from kvbench.run.time_left import TaskTime, TimeLeft


@dataclass
class Work:
    """A task of a simulated run: prompts that take ``read`` seconds each, of which each cell answers ``tokens``.

    A step that decodes one token of every row of a batch takes ``step`` seconds, and ``row_step`` more for each row.
    """

    prompts: int
    cells: int
    read: float
    step: float
    row_step: float
    tokens: tuple[int, int]
    length: int = 1000
    longest: int = 64


def events(works, rows, noise, enter=0.5):
    """Yield (what, task, now) of a run as the queue makes it: prompts are read until ``rows`` answers wait.

    Rows enter a batch that has shrunk to the share ``enter`` of its limit.
    """
    rng, now = random.Random(1), 0.0
    for name, work in works.items():
        waiting, running, to_read = [], [], work.prompts
        while to_read or waiting or running:
            while to_read and ((not waiting and not running) or len(waiting) + len(running) + work.cells <= rows):
                yield "reading", name, now
                now += work.read * rng.uniform(1 - noise, 1 + noise)
                waiting += [rng.randint(*work.tokens) for _ in range(work.cells)]
                to_read -= 1
            if len(running) <= enter * rows:
                entering = rows - len(running)
                running, waiting = running + waiting[:entering], waiting[entering:]
            ended = []
            while not ended:
                now += (work.step + work.row_step * len(running)) * rng.uniform(1 - noise, 1 + noise)
                running = [tokens - 1 for tokens in running]
                ended = [tokens for tokens in running if not tokens]
            running = [tokens for tokens in running if tokens]
            for _ in ended:
                yield "stored", name, now
    yield "end", "", now


def told(works, rows, noise=0.2):
    """Return (share of the run, whether it was of the run, estimate, truth) of every estimate that could be printed."""
    run = list(events(works, rows, noise))
    end = run[-1][2]
    ends = {name: max(now for _, task, now in run if task == name) for name in works}
    tasks = {n: TaskTime(w.prompts * w.cells, w.prompts, w.length, w.longest) for n, w in works.items()}
    left, lines = TimeLeft(tasks), []
    for what, name, now in run[:-1]:
        (left.prompt_begun if what == "reading" else left.answered)(name, now)
        bounds = ((False, left.bound_task(name), ends[name] - now), (True, left.bound_run(), end - now))
        for whole, seconds, truth in bounds:
            lines.append((now / end, whole, None if seconds is None else seconds.estimate(), truth))
    return lines


SMALL = Work(prompts=40, cells=5, read=1.0, step=0.02, row_step=0.01, tokens=(2, 12))
RUNS = {
    "all answers of a prompt at once": ({"a": SMALL}, 5),
    "one batch of everything": ({"a": SMALL}, 1000),
    "many prompts read before their answers": ({"a": SMALL}, 48),
    "batches of half the run": ({"a": SMALL}, 100),
    "next to no reading": ({"a": Work(60, 4, 0.01, 0.05, 0.01, (30, 64))}, 32),
    "answers of one token and of many": ({"a": Work(100, 4, 0.2, 0.05, 0.01, (1, 120))}, 40),
    "next to no answering": ({"a": Work(50, 2, 3.0, 0.001, 0.0, (1, 3))}, 16),
    "one prompt": ({"a": Work(1, 6, 5.0, 0.05, 0.01, (5, 30))}, 96),
    "tasks alike": (dict.fromkeys("abcd", SMALL), 48),
    "one long task first": (
        {"long": Work(30, 5, 20.0, 0.02, 0.01, (2, 12), length=20_000), "a": SMALL, "b": SMALL},
        48,
    ),
    "one long task among short": (
        {"a": SMALL, "long": Work(30, 5, 20.0, 0.02, 0.01, (2, 12), length=20_000), "b": SMALL},
        48,
    ),
    "one long task last": (
        {"a": SMALL, "b": SMALL, "long": Work(30, 5, 20.0, 0.02, 0.01, (2, 12), length=20_000)},
        48,
    ),
    "one task of long answers last": (
        {"a": SMALL, "long": Work(30, 5, 1.0, 0.02, 0.01, (200, 500), longest=512)},
        48,
    ),
}
SAID = sorted(
    RUNS.keys() - {"one batch of everything", "batches of half the run", "one prompt", "one task of long answers last"}
)
"""The runs of which enough is known early: not those that are one batch or two."""


@pytest.mark.parametrize("noise", [0.0, 0.3])
@pytest.mark.parametrize("name", RUNS)
def test_what_is_told_is_within_a_factor_of_two(name, noise):
    for share, whole, estimate, truth in told(*RUNS[name], noise):
        if estimate is not None and share >= 0.1 and max(estimate, truth) >= 1:
            assert truth / 2 <= estimate <= 2 * truth, (share, whole, estimate, truth)


@pytest.mark.parametrize("name", SAID)
def test_it_is_told_for_most_of_a_long_run(name):
    by_moment = {}
    for share, _, estimate, _ in told(*RUNS[name]):
        if 0.1 <= share <= 0.9:
            by_moment[share] = by_moment.get(share) or estimate is not None
    assert sum(by_moment.values()) > len(by_moment) / 2


def test_nothing_is_told_where_one_batch_answers_everything():
    """62 s until the first of 88 answers was once taken for 62 s an answer: 1471 s left, of which 20 passed."""
    left = TimeLeft({"a": TaskTime(answers=88, prompts=22)})
    for i in range(22):
        left.prompt_begun("a", 2.0 * i)
    for i in range(88):
        left.answered("a", 62.0 + i * 20 / 87)
        seconds = left.bound_task("a")
        assert i == 87 or seconds is None or seconds.estimate() is None
    assert seconds.estimate() == 0


def test_bounds_by_hand():
    task = TaskTime(answers=20, prompts=10)
    left = TimeLeft({"a": task, "next": TaskTime(answers=8, prompts=4), "longer": TaskTime(8, 4, length=1000)})
    assert left.bound_task("a") is None
    for now in (100, 103, 106, 109):  # four prompts of 3 s
        left.prompt_begun("a", now)
    for now in (112 + 8, 112 + 8, 112 + 8, 112 + 8):  # half of their answers, after 8 s
        left.answered("a", now)
    assert (task.prompt_s, task.answering_s) == (3, 8)
    # at least 1 s an answer, if the other four had ended, too; at most 2 s, and they may be twice as long as those
    assert left.bound_task("a") == (6 * 3 + 1 * 12, 6 * 3 + 4 * 16)
    for now in (122, 124, 124, 124):
        left.answered("a", now)
    assert left.bound_task("a") == (6 * 3 + 1.5 * 12, 6 * 3 + 1.5 * 12)
    # those to come: a prompt of `a` takes 6 s, and a longer one no less
    assert left.bound_run() == (36 + 2 * 4 * 6 / 1.5, float("inf"))
    left.ended("longer")
    assert left.bound_run() == (36 + 4 * 6 / 1.5, 36 + 4 * 6 * 1.5)
    left.ended("a")  # before all answers came: it tells nothing of the next
    assert left.bound_task("a") == (0, 0) and left.bound_run() == (0, float("inf"))
    left.ended("next")
    assert left.bound_run() == (0, 0)

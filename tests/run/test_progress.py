"""What a run shows while it measures."""

import io
from types import SimpleNamespace

from rich.console import Console

from kvbench.base import progress
from kvbench.base.example import Example
from kvbench.run.display import Display


class Clock:
    now = 100.0

    def read(self):
        return self.now


def shown(console=None, counts=None, cells=1):
    clock = Clock()
    counts = {"needle": 4, "code": 2, "done": 0} if counts is None else counts
    examples = {t: [Example(f"{t} {i}", "", (), 5) for i in range(-(-n // cells))] for t, n in counts.items()}
    prepared = SimpleNamespace(
        todo=lambda: [SimpleNamespace(task=t, answers_to_do=n) for t, n in counts.items()],
        groups=[SimpleNamespace(column=t, cells=["full", "h2o"], examples=some) for t, some in examples.items()],
        left=lambda group: {e.id: ["cell"] * cells for e in group.examples},
        advice=list,
        note_drawn_answers=list,
        note_cut_prompts=list,
    )
    display = Display(console, clock.read)
    display.begin(prepared)
    return display, clock


def cell(name):
    return SimpleNamespace(column=name)


def run(display, clock):
    clock.now += 1000  # loading and calibrating, which are no task's time
    for i, kept_tokens in enumerate((100, 50, 25, 25)):
        if i % 2 == 0:  # two methods answer each prompt
            display.reading("needle")
        clock.now += 10
        display.stored(cell("needle"), SimpleNamespace(kept=kept_tokens, n=100))
    display.ended(cell("needle"), "complete", None, None)
    display.ended(cell("needle"), "complete", None, None)
    clock.now += 100
    display.reading("code")
    for _ in range(2):
        clock.now += 4
        display.stored(cell("code"), SimpleNamespace(kept=100, n=100))


def test_plain_lines_count_the_whole_run(capsys):
    display, clock = shown(cells=2)
    run(display, clock)
    for _ in range(2):
        display.ended(cell("code"), "complete", None, None)
    display.close()
    # the clock starts when the first prompt is read
    assert capsys.readouterr().err.splitlines() == [
        "kvbench: 2 of 6 answers, 20 s, about 41 s left, now needle",
        "kvbench: 4 of 6 answers, 40 s, about 20 s left, now needle",
        "kvbench: 4 of 6 answers, 140 s, about 70 s left, now code",
        "kvbench: 6 of 6 answers, 148 s",
    ]


def test_prompts_that_are_read_for_long_before_the_first_answer_are_told(capsys):
    display, clock = shown()
    for _ in range(4):
        display.reading("needle")
        clock.now += 10
    display.reading("done")
    assert capsys.readouterr().err.splitlines() == ["kvbench: 0 of 6 answers, reading prompts, 20 s, now needle"]


def test_a_run_that_ends_early_says_how_far_it_came(capsys):
    display, clock = shown(counts={"needle": 4}, cells=2)
    display.reading("needle")
    clock.now += 10
    display.stored(cell("needle"), SimpleNamespace(kept=50, n=100))
    for status in ("failed", "complete"):
        display.ended(cell("needle"), status, None, None)
    display.close()
    assert capsys.readouterr().err.splitlines() == ["kvbench: 1 of 4 answers, 10 s"]


def test_time_left_is_by_the_mean_rate_though_answers_come_in_bursts():
    remaining, task = progress.Left(), SimpleNamespace(id=0, completed=0, total=150, elapsed=5.0, fields={})
    assert remaining.render(task).plain == "-:--:--"
    seen = []
    # 75 answers at once after 15 s, and none for a while: as many again take 15 s more
    for task.completed, task.elapsed in ((75, 15.0), (75, 20.0), (75, 40.0), (150, 42.0)):
        seen.append(remaining.render(task).plain)
    assert seen == ["0:00:15", "0:00:10", "0:00:00", "0:00:00"]


def test_no_time_is_told_before_it_is_known(capsys):
    display, clock = shown(counts={"needle": 88}, cells=4)
    for _ in range(22):
        display.reading("needle")
        clock.now += 2
    clock.now += 18  # the first of 88 answers, which are decoded together, comes after 62 s; the last 20 s later
    for _ in range(88):
        display.stored(cell("needle"), SimpleNamespace(kept=50, n=100))
        clock.now += 20 / 88
    for _ in range(4):
        display.ended(cell("needle"), "complete", None, None)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 5 and "left" not in " ".join(said)
    assert said[-1] == "kvbench: 88 of 88 answers, 82 s"


def test_a_terminal_has_one_bar_of_the_whole_run():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    display, clock = shown(console, cells=2)
    run(display, clock)
    (bar,) = display.bars.tasks
    assert (bar.completed, bar.total) == (6, 6)
    assert (bar.fields["task_name"], bar.fields["left"]) == ("code", 0)
    display.close()
    assert "6/6" in out.getvalue() and "code" in out.getvalue()


def test_a_bar_without_an_estimate_says_so():
    remaining, task = progress.Left(), SimpleNamespace(id=0, completed=1, total=4, elapsed=5.0, fields={"left": None})
    assert remaining.render(task).plain == "-:--:--"
    task.completed, task.fields = 2, {"left": 30.0}
    assert remaining.render(task).plain == "0:00:30"


def test_other_work_is_told_now_and_then_and_at_its_end_if_it_was_long(capsys):
    clock = Clock()
    for seconds, lines in (
        (1, []),
        (8, ["kvbench: 2 of 3 tables, 16 s, about 8 s left", "kvbench: 3 of 3 tables, 24 s"]),
    ):
        with progress.progress({"tables": 3}, unit="tables", clock=clock.read) as tick:
            for _ in range(3):
                clock.now += seconds
                tick("tables", 1)
        assert capsys.readouterr().err.splitlines() == lines

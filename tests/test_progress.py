"""What a run shows while it measures."""

import io
from types import SimpleNamespace

from rich.console import Console

from kvbench import progress
from kvbench.run import display as displays


class Clock:
    now = 100.0

    def monotonic(self):
        return self.now


def shown(monkeypatch, terminal):
    clock = Clock()
    monkeypatch.setattr(displays.time, "monotonic", clock.monotonic)
    monkeypatch.setattr(displays.sys.stderr, "isatty", lambda: terminal, raising=False)
    todo = [SimpleNamespace(task=t, answers_to_do=n, cells=["c"]) for t, n in (("needle", 4), ("code", 2), ("done", 0))]
    display = displays.Display()
    display.begin(SimpleNamespace(todo=lambda: todo, advice=list))
    return display, clock


def cell(name):
    return SimpleNamespace(column=name)


def run(display, clock):
    clock.now += 1000  # loading and calibrating, which are no task's time
    display.reading("needle")
    for kept_tokens in (100, 50, 25, 25):
        clock.now += 10
        display.stored(cell("needle"), SimpleNamespace(kept=kept_tokens, n=100))
    display.ended(cell("needle"), "complete", None, None)
    display.ended(cell("needle"), "complete", None, None)
    clock.now += 100
    display.reading("code")
    for _ in range(2):
        clock.now += 4
        display.stored(cell("code"), SimpleNamespace(kept=100, n=100))


def test_plain_lines_tell_rate_tokens_kept_and_time_left(monkeypatch, capsys):
    display, clock = shown(monkeypatch, terminal=False)
    run(display, clock)
    display.close()
    # a group's clock starts when its first prompt is read
    assert capsys.readouterr().err.splitlines() == [
        "kvbench: needle: 2 of 4 answers, 0.1 answers/s, mean kept 75 %, about 20 s left",
        "kvbench: needle: 4 of 4 answers, 0.1 answers/s, mean kept 50 %",
        "kvbench: code: 2 of 2 answers, 0.2 answers/s, mean kept 100 %",
    ]


def test_prompts_that_are_read_for_long_before_the_first_answer_are_told(monkeypatch, capsys):
    display, clock = shown(monkeypatch, terminal=False)
    for _ in range(4):
        display.reading("needle")
        clock.now += 10
    display.reading("done")
    assert capsys.readouterr().err.splitlines() == ["kvbench: needle: 0 of 4 answers, reading prompts since 20 s"]


def test_a_group_that_ends_early_says_how_far_it_came(monkeypatch, capsys):
    display, clock = shown(monkeypatch, terminal=False)
    display.reading("needle")
    clock.now += 10
    display.stored(cell("needle"), SimpleNamespace(kept=50, n=100))
    for status in ("failed", "complete"):
        display.ended(cell("needle"), status, None, None)
    display.close()
    assert capsys.readouterr().err.splitlines() == ["kvbench: needle: 1 of 4 answers, 0.1 answers/s, mean kept 50 %"]


def test_time_left_is_by_the_mean_rate_though_answers_come_in_bursts():
    remaining, task = progress.Left(), SimpleNamespace(id=0, completed=0, total=150, elapsed=5.0, fields={})
    assert remaining.render(task).plain == "-:--:--"
    seen = []
    # 75 answers at once after 15 s, and none for a while: as many again take 15 s more
    for task.completed, task.elapsed in ((75, 15.0), (75, 20.0), (75, 40.0), (150, 42.0)):
        seen.append(remaining.render(task).plain)
    assert seen == ["0:00:15", "0:00:10", "0:00:00", "0:00:00"]


def test_time_left_counts_prompts_that_are_read_before_the_first_answer(monkeypatch, capsys):
    display, clock = shown(monkeypatch, terminal=False)
    for _ in range(4):
        display.reading("needle")
        clock.now += 10
    clock.now += 2  # all four have been read, and the first answer took two seconds more
    display.stored(cell("needle"), SimpleNamespace(kept=50, n=100))
    clock.now += 20
    display.stored(cell("needle"), SimpleNamespace(kept=50, n=100))
    said = capsys.readouterr().err.splitlines()
    assert [line.split(", ")[-1] for line in said if "left" in line] == ["about 6 s left", "about 22 s left"]
    # half of the prompts are still to come
    count = displays.Count(total=8, prompts=4, done=2, read=2, pure=1, pure_s=10.0, start=100.0)
    assert count.left(124.0) == 10.0 * 2 + 4.0 / 2 * 6


def test_a_terminal_has_one_line_per_group_that_has_something_to_do(monkeypatch):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    monkeypatch.setattr(progress, "Console", lambda stderr: console)
    display, clock = shown(monkeypatch, terminal=True)
    run(display, clock)
    lines = console.render_str("")  # nothing is printed but the bars
    assert not lines.plain
    tasks = {t.description: t for t in display.bars.tasks}
    assert list(tasks) == ["needle", "code"]
    assert (tasks["needle"].completed, tasks["code"].completed) == (4, 2)
    assert tasks["needle"].fields["rate"].endswith("mean kept 50 %")
    display.close()
    assert "needle" in out.getvalue() and "answers/s" in out.getvalue()


def test_slow_answers_are_counted_in_seconds():
    count = displays.Count(total=9, done=2, kept=1.0, start=100.0)
    assert count.text(142.0) == "21 s per answer, mean kept 50 %"
    assert count.text(110.0) == "0.2 answers/s, mean kept 50 %"


def test_other_work_is_told_now_and_then_and_at_its_end_if_it_was_long(monkeypatch, capsys):
    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", clock.monotonic)
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: False, raising=False)
    for seconds, lines in (
        (1, []),
        (8, ["kvbench: 2 of 3 tables, 16 s, about 8 s left", "kvbench: 3 of 3 tables, 24 s"]),
    ):
        with progress.progress({"tables": 3}, unit="tables") as tick:
            for _ in range(3):
                clock.now += seconds
                tick("tables", 1)
        assert capsys.readouterr().err.splitlines() == lines

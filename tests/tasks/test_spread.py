"""What a limit takes: the grid of depths is covered from the first examples on, and nothing is measured twice."""

import json
from itertools import product

from support.data import data_path

from kvbench.base.conf import entries
from kvbench.base.example import Example
from kvbench.cli.main import main
from kvbench.tasks.base import Task, load_tasks
from kvbench.tasks.spread import describe_left_out, order_by_spread


def grid(keys, *axes, repeats=3):
    """Examples in the loaders' order: rounds over all fields."""
    fields = [dict(zip(keys, at, strict=True)) for at in product(*axes)]
    return [Example(f"{r}-{at}", "p", ("a",), 1, meta=at) for r in range(repeats) for at in fields]


def test_ends_first_then_the_middle_then_what_lies_between():
    examples = grid(["depth"], [0, 25, 50, 75, 100])
    depths = [examples[i].meta["depth"] for i in order_by_spread(examples, ["depth"])]
    assert depths[:5] == depths[5:10] == depths[10:] == [0, 100, 50, 25, 75]
    assert order_by_spread(examples, ["depth"])[:5] == [0, 4, 2, 1, 3]
    assert sorted(order_by_spread(examples, ["depth"])) == list(range(15))


def test_a_larger_limit_takes_what_a_smaller_one_took_and_a_round_takes_every_field():
    axes = [[512, 1024, 4096], [0, 10, 50, 100]]
    task = Task("any/task", tuple(grid(["length", "depth"], *axes)), "f1", "here", grid=("length", "depth"))
    before: set = set()
    for limit in range(1, 40):
        chosen = task.take_examples(limit)
        assert len(chosen) == min(limit, 36) and before <= {e.id for e in chosen}
        assert [task.examples.index(e) for e in chosen] == sorted(task.examples.index(e) for e in chosen)
        before = {e.id for e in chosen}
    assert task.take_examples(12) == task.examples[:12] and task.take_examples(None) == task.examples
    corners = {(e.meta["length"], e.meta["depth"]) for e in task.take_examples(2)}
    assert corners == {(512, 0), (4096, 100)}
    assert describe_left_out(task.take_examples(2), task.examples, task.grid) == ["length 1024", "depth 10, 50"]
    assert describe_left_out(task.take_examples(12), task.examples, task.grid) == []


def test_uneven_fields_are_taken_to_the_end():
    examples = [*grid(["depth"], [0, 100], repeats=1), *grid(["depth"], [0], repeats=2)]
    assert [examples[i].meta["depth"] for i in order_by_spread(examples, ["depth"])] == [0, 100, 0, 0]


def test_without_a_grid_the_first_ones_are_taken():
    (task,) = load_tasks("tiny", {**entries("dataset")["tiny"]}, ["needle"], None)
    assert task.take_examples(3) == task.examples[:3]


def test_a_run_spreads_its_limit_over_the_depths_and_says_what_is_left_out(tmp_path, capsys):
    root = data_path("paul_graham").parent
    arguments = [f"data.root={root}", f"results={tmp_path}", "dataset=needle", "lengths=256", "depths=0,50,100"]
    arguments += ["repeats=1", "method=full", "max_new_tokens=1", "--json"]
    assert main(["run", *arguments, "limit=2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "needle/256: limit=2 leaves out depth 50." in report["notes"]
    (cell,) = [c["cell"] for c in report["rows"][0]["cells"]]
    lines = [json.loads(x) for f in (tmp_path / "cells" / cell).glob("samples*.jsonl") for x in f.open()]
    assert sorted(x["meta"]["depth"] for x in lines) == [0, 100]
    assert main(["run", *arguments, "limit=3"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert not any("leaves out" in n for n in report["notes"])
